"""What is there and cannot be read is one sentence, which advises nobody to remove it."""

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

WORDS = "cannot be read (Permission denied)"
LONG = "x" * 300


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """A folder that may not be entered, nor listed; permissions would not keep root out."""
    folder = tmp_path / "closed"
    folder.mkdir()

    def keep_out(name, of):
        asked = getattr(os, name)

        def refused(path, *args, **known):
            if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(f"{folder}{of}"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
            return asked(path, *args, **known)

        monkeypatch.setattr(os, name, refused)

    keep_out("stat", os.sep)
    keep_out("scandir", "")
    keep_out("listdir", "")
    return folder


@pytest.mark.parametrize("command", [
    "run --dataset={}/x", "run --dataset=cifar10 --data-dir={}", "run --resume={}", "run --preset={}/x",
    "run --method={}/x.py:X", "report {}/x", "report {}", "leaderboard --results={} --status",
])  # fmt: skip
def test_a_folder_that_may_not_be_entered_is_named(command, closed, capsys):
    assert main(command.format(closed).split()) == 2
    said = capsys.readouterr().err
    assert WORDS in said
    assert said.count("\n") == 1


def test_a_folder_of_results_that_may_not_be_entered_is_another_one(closed, capsys):
    assert main(["run", f"--run-dir={closed}", "--rounds=1"]) == 2
    assert capsys.readouterr().err == f"cannot write to {closed} (Permission denied): choose another --run-dir.\n"


@pytest.mark.parametrize(
    "act", [lambda path: fp.write_federation(path, []), fp.from_folder, lambda path: fp.load_dataset("cifar10", path)]
)
def test_python_says_so_too(act, closed):
    with pytest.raises(fp.UserError, match="Permission denied"):
        act(closed / "x")


def test_a_name_that_is_too_long_is_that_of_nothing(tmp_path, capsys):
    for command in (f"run --dataset={LONG}", f"report {LONG}", f"leaderboard --plan={LONG}", f"run --resume={LONG}"):
        assert main(command.split()) == 2
        assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(fp.UserError, match="there is no folder"):
        fp.from_folder(LONG)


def test_a_report_names_the_folders_that_it_cannot_look_into(tmp_path, closed, capsys):
    write_run(tmp_path / "a")
    assert [record.path.name for record in collect([tmp_path])] == ["a"]
    assert f"left out: {closed} {WORDS}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.json"])
def test_nobody_is_told_to_remove_what_may_only_not_be_read(name, tmp_path):
    write_run(tmp_path / "a")
    (tmp_path / "a" / name).unlink()
    (tmp_path / "a" / name).mkdir()
    with pytest.raises(fp.UserError, match=r"cannot be read \(Is a directory\): put that right"):
        collect([tmp_path / "a"])


def test_checkpoints_that_may_not_be_read_are_not_gone(closed):
    with pytest.raises(fp.UserError, match="Permission denied"):
        _check_readable(closed)
    _check_readable(closed.parent / "none")


def test_a_file_that_nobody_has_looked_at_is_one_sentence(tmp_path, capsys):
    assert guarded(lambda _: open(tmp_path).close(), []) == 2
    assert capsys.readouterr().err == f"{tmp_path} cannot be used (Is a directory): put that right.\n"


@pytest.mark.parametrize("read", [read_text, read_counts, read_arrays])
def test_a_pipe_is_not_waited_for(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(fp.UserError, match="pipe is not a file"):
        read(tmp_path / "pipe")


def test_the_root_is_no_file_to_write():
    with pytest.raises(fp.UserError, match=r"cannot write to / .*: choose another page"):
        write_text(Path("/"), "", "another `page`")
