"""Reports of damaged folders: runs that cannot be read are named and left out, unrelated files are ignored."""

import re

import pytest
from made_up_runs import write_run

from fedjax_pcdd.cli.analyse import analyse_main
from fedjax_pcdd.cli.report import compare_main, report_main
from fedjax_pcdd.report.collect import collect
from fedjax_pcdd.training.written import is_summary

COMMANDS = {
    "report": lambda folder: report_main([str(folder), f"--output={folder.parent / 'report'}"]),
    "compare": lambda folder: compare_main([str(folder)]),
    "analyse": lambda folder: analyse_main(["rounds", str(folder)]),
}
DAMAGED = ["resolved.json", "clients.jsonl", "summary.json", "metrics.jsonl", "partition.npz", "config.yaml"]


@pytest.fixture
def folder(tmp_path):
    """Two pairs of runs."""
    for seed in range(2):
        write_run(tmp_path / f"runs/a{seed}", 0.5, seed=seed, shift=seed)
        write_run(tmp_path / f"runs/b{seed}", 0.6, seed=seed, shift=seed, method="fedgela")
    return tmp_path / "runs"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "content"),
    [
        (name, content)
        for name in DAMAGED
        for content in (b"", b"{\n", b"\xff\xfe[\n")
        if content or not name.endswith("jsonl")  # no line is no damage
    ],
)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_run_is_left_out_and_named(folder, capsys, command, name, content):
    write_run(folder / "bad", 0.5, seed=9)
    (folder / "bad" / name).write_bytes(content)
    assert COMMANDS[command](folder) == 0
    err = capsys.readouterr().err
    assert err.startswith("left out: ")
    assert str(folder / "bad" / name) in err
    assert err.count("\n") == 1


WRONG_CONTENTS = [  # file, pattern of what it holds, and the replacement
    ("summary.json", r".*", "{}"),
    *(("summary.json", f'"{name}": [0-9.]+', f'"{name}": "1"') for name in ("ga_best", "seconds_per_round", "rounds")),
    *(("config.yaml", f"(?m)^{name}: .*$", f"{name}: {value}") for name, value in {
        "seed": "x", "beta": "null", "rounds": "x", "lr": "abc", "clients": "[1, 2]"}.items()),
    ("metrics.jsonl", '"round": 2', '"round": 7'), ("metrics.jsonl", '"round": 1', '"round": true'),
    ("metrics.jsonl", '"ga": ', '"ga": "x", "was": '), ("metrics.jsonl", '"round": 1', '"round": 0'),
    ("metrics.jsonl", r'\{"round": 2.*\n', ""), ("metrics.jsonl", r'\{"round": 3.*\n', ""),
    ("summary.json", '"ga_best": ', f'"ga_best": {10**400}, "was": '),
    ("metrics.jsonl", '"ga": ', f'"ga": {10**400}, "was": '),
    ("clients.jsonl", r"\[.*\]", '"x"'), ("resolved.json", ".*", '{"hyperparameters": 5}'),
]  # fmt: skip


@pytest.mark.parametrize(("name", "old", "new"), WRONG_CONTENTS)
def test_readable_files_with_wrong_contents_are_left_out_and_named(folder, capsys, name, old, new):
    file = write_run(folder / "bad", 0.5, seed=9) / name
    changed = re.sub(old, new, file.read_text(), count=1)
    assert changed != file.read_text()
    file.write_text(changed)
    assert COMMANDS["compare"](folder) == 0
    err = capsys.readouterr().err
    assert (err.startswith("left out: "), str(file) in err, err.count("\n")) == (True, True, 1)


def test_half_a_character_in_a_recorded_command_is_replaced(folder):
    (folder / "a0/resolved.json").write_text('{"command": "run \\ud800"}')
    assert COMMANDS["report"](folder) == 0


def test_a_report_shows_pictures_of_partitions_and_nothing_else(folder, tmp_path):
    (folder / "a0/partition.png").unlink()
    (tmp_path / "key").write_text("private")
    (folder / "a0/partition.png").symlink_to(tmp_path / "key")
    pictures = [run.heat_map for run in collect([folder])]
    assert (pictures[0], all(pictures[1:])) == (None, True)


def test_control_characters_in_names_do_not_reach_the_terminal(folder, capsys):
    (write_run(folder / "bad\x1b[31m", 0.5, seed=9) / "summary.json").write_text("{}")
    assert COMMANDS["report"](folder) == 0
    assert "bad\\x1b[31m/summary.json" in capsys.readouterr().err


def test_a_summary_of_more_rounds_than_there_are_is_noticed_without_counting_them(folder, capsys):
    file = write_run(folder / "bad", 0.5, seed=9) / "summary.json"
    file.write_text(file.read_text().replace('"rounds": 3', f'"rounds": {10**30}'))
    assert COMMANDS["report"](folder) == 0
    assert "bad/metrics.jsonl has lost rounds" in capsys.readouterr().err


@pytest.mark.thorough
def test_runs_of_a_method_whose_file_is_gone_are_read_nevertheless(folder, capsys):
    config = write_run(folder / "gone", 0.5, seed=1) / "config.yaml"
    config.write_text(re.sub("(?m)^method: .*$", "method: gone.py:Gone", config.read_text()))
    assert COMMANDS["report"](folder) == 0
    assert capsys.readouterr().err == ""


def test_a_grid_analysis_without_recorded_hyperparameters_is_one_sentence(folder, capsys):
    assert analyse_main(["grid", str(folder)]) == 2
    assert "resolved.json has no hyper-parameters" in capsys.readouterr().err


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_run_that_is_the_only_one_is_one_sentence(tmp_path, capsys, command, name):
    write_run(tmp_path / "bad", 0.5)
    (tmp_path / "bad" / name).write_bytes(b"{\n")
    assert COMMANDS[command](tmp_path) == 2
    err = capsys.readouterr().err
    assert str(tmp_path / "bad" / name) in err
    assert err.count("\n") == 1


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_with_a_corrupt_partition_archive_is_left_out_and_named(folder, capsys, command):
    file = write_run(folder / "bad", 0.5, seed=9) / "partition.npz"
    content = bytearray(file.read_bytes())
    content[60:140] = bytes(80)
    file.write_bytes(content)
    assert COMMANDS[command](folder) == 0
    err = capsys.readouterr().err
    assert (str(file) in err, err.count("\n")) == (True, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS)
def test_unrelated_files_and_those_of_a_killed_start_are_ignored(folder, capsys, command):
    (folder / "a0" / "mine.jsonl").write_text("not JSON\n")
    (folder / "begun").mkdir()
    (folder / "begun" / ".config.yaml.tmp").write_text("meth")
    assert COMMANDS[command](folder) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "wrong_entry",
    [{"rounds": 0}, {"rounds": True}, {"ga_best": True}, {"pa_last": "0.5"}, {"selected_on": 1},
     {"pa_best_per_client": [0.5, True]}, {"device_peak_memory_mb": [1]}],
)  # fmt: skip
def test_a_summary_with_values_that_no_run_writes_is_not_accepted(wrong_entry):
    summary = {"method": "fedavg", "rounds": 2, "ga_best": 0.5, "pa_last": None, "pa_best_per_client": [0.5, None]}
    assert is_summary(summary)
    assert not is_summary(summary | wrong_entry)
