"""A file or folder that exists and cannot be read is one sentence, which does not advise removing it."""

import errno
import os
from pathlib import Path

import pytest
from made_up_runs import write_run

import fedjax_pcdd as fp
from fedjax_pcdd.api.runs import _check_readable
from fedjax_pcdd.cli.main import main
from fedjax_pcdd.cli.messages import guarded
from fedjax_pcdd.data.federation import read_counts
from fedjax_pcdd.data.npz import read_arrays
from fedjax_pcdd.report.collect import collect
from fedjax_pcdd.training.fields import read_text, write_text

MESSAGE = "cannot be read (Permission denied)"
LONG = "x" * 300


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """A folder that can be neither entered nor listed; patched, as permissions would not keep root out."""
    folder = tmp_path / "closed"
    folder.mkdir()

    def keep_out(name, suffix):
        original = getattr(os, name)

        def refuse(path, *args, **kwargs):
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(f"{folder}{suffix}"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
            return original(path, *args, **kwargs)

        monkeypatch.setattr(os, name, refuse)

    keep_out("stat", os.sep)
    keep_out("scandir", "")
    keep_out("listdir", "")
    return folder


@pytest.mark.parametrize("command", [
    "run --dataset={}/x", "run --dataset=cifar10 --data-dir={}", "run --resume={}", "run --preset={}/x",
    "run --method={}/x.py:X", "report {}/x", "report {}", "leaderboard --results={} --status",
])  # fmt: skip
def test_a_folder_that_cannot_be_entered_is_named(command, closed, capsys):
    assert main(command.format(closed).split()) == 2
    error = capsys.readouterr().err
    assert MESSAGE in error
    assert error.count("\n") == 1


def test_an_unreadable_run_dir_is_refused_with_advice_to_choose_another(closed, capsys):
    assert main(["run", f"--run-dir={closed}", "--rounds=1"]) == 2
    assert capsys.readouterr().err == f"cannot write to {closed} (Permission denied): choose another --run-dir.\n"


@pytest.mark.parametrize(
    "call", [lambda path: fp.write_federation(path, []), fp.from_folder, lambda path: fp.load_dataset("cifar10", path)]
)
def test_python_functions_report_an_unreadable_folder_too(call, closed):
    with pytest.raises(fp.UserError, match="Permission denied"):
        call(closed / "x")


def test_a_path_that_is_too_long_counts_as_missing(tmp_path, capsys):
    for command in (f"run --dataset={LONG}", f"report {LONG}", f"leaderboard --plan={LONG}", f"run --resume={LONG}"):
        assert main(command.split()) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(fp.UserError, match="there is no folder"):
        fp.from_folder(LONG)


@pytest.mark.parametrize(
    "options",
    [
        ["--dataset=~nobody/a.npz"],
        ["--dataset=~nobody"],
        ["--dataset=cifar10", "--data-dir=~nobody"],
        ["--partition=~nobody/a.npz"],
        ["--availability=~nobody/a.npz"],
        ["--initial-weights=~nobody/a.npz"],
    ],
)
def test_a_home_folder_that_does_not_exist_is_not_found_like_any_other(options, capsys):
    assert main(["run", *options]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_report_names_the_folders_that_it_cannot_enter(tmp_path, closed, capsys):
    write_run(tmp_path / "a")
    assert [record.path.name for record in collect([tmp_path])] == ["a"]
    assert f"left out: {closed} {MESSAGE}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_a_run_with_an_unreadable_file_is_not_advised_to_be_removed(name, tmp_path):
    write_run(tmp_path / "a")
    (tmp_path / "a" / name).unlink()
    (tmp_path / "a" / name).mkdir()
    with pytest.raises(fp.UserError, match=r"cannot be read \(Is a directory\): put that right"):
        collect([tmp_path / "a"])


def test_unreadable_checkpoints_are_not_taken_for_missing_ones(closed):
    with pytest.raises(fp.UserError, match="Permission denied"):
        _check_readable(closed)
    _check_readable(closed.parent / "none")


def test_an_os_error_that_no_check_foresaw_is_one_sentence(tmp_path, capsys):
    assert guarded(lambda _: open(tmp_path).close(), []) == 2
    assert capsys.readouterr().err == f"{tmp_path} cannot be used (Is a directory): put that right.\n"


@pytest.mark.parametrize("read", [read_text, read_counts, read_arrays])
def test_reading_a_pipe_is_refused_instead_of_waiting_for_it(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(fp.UserError, match="pipe is not a file"):
        read(tmp_path / "pipe")


def test_writing_to_the_root_folder_is_refused():
    with pytest.raises(fp.UserError, match=r"cannot write to / .*: choose another page"):
        write_text(Path("/"), "", "another `page`")
