"""The files of a run, what a user sees of it, and the optional trackers."""

import io
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from fedjax_pcdd.analysis.curves import draw_curves
from fedjax_pcdd.errors import UserError, at_once, failed_write
from fedjax_pcdd.training import folder as records
from fedjax_pcdd.training import progress
from fedjax_pcdd.training.folder import CONFIG, RunFolder
from fedjax_pcdd.training.lock import InUse
from fedjax_pcdd.training.loggers import MLflow, TensorBoard, WandB
from fedjax_pcdd.training.metrics import History

DRAWS_PICTURES = True


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run", "method: fedavg\n")


def text_of(console):
    return console.file.getvalue()


@pytest.fixture
def console():

    return Console(file=io.StringIO(), width=100)


def test_a_run_can_be_opened_again_with_its_configuration(folder):
    folder.close()
    assert (RunFolder.open(str(folder.path)).path / CONFIG).read_text() == "method: fedavg\n"


def test_half_written_files_of_a_killed_process_are_removed_on_opening(folder):
    folder.close()
    mine = [".mine.png", ".2026.notes.txt", ".20261201123.jsonl"]
    for name in (".123.partition.png", *mine):
        (folder.path / name).write_text("")
    (folder.path / ".2026.old.json").mkdir()
    RunFolder.open(folder.path).close()
    assert {path.name for path in folder.path.iterdir()} == {CONFIG, *mine, ".2026.old.json"}


def test_a_folder_that_holds_a_run_is_refused(folder):
    folder.close()
    with pytest.raises(UserError, match=r"already holds a run: continue it with resume=.*/run or"):
        RunFolder.create(folder.path, "")


def test_a_folder_of_a_run_that_is_running_is_said_to_be_in_use(folder):
    with pytest.raises(InUse, match=r"is in use by .*: choose another run_dir, or wait for it to end"):
        RunFolder.create(folder.path, "")


def test_a_folder_in_which_another_process_was_faster_is_refused(tmp_path, monkeypatch):
    def late(path, take=records.Lock.take):
        (path.parent / CONFIG).write_text("seed: 1\n")
        return take(path)

    monkeypatch.setattr(records.Lock, "take", late)
    with pytest.raises(UserError, match="already holds a run"):
        RunFolder.create(tmp_path, "seed: 2\n")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {CONFIG: "seed: 1\n"}


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="not an empty folder"):
        RunFolder.create(tmp_path, "")


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="not an empty folder"):
        RunFolder.create(tmp_path / "run", "")


def test_an_empty_folder_is_accepted(tmp_path):
    assert (RunFolder.create(tmp_path, "seed: 1\n").path / CONFIG).read_text() == "seed: 1\n"


def test_a_folder_below_a_file_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        RunFolder.create(tmp_path / "file" / "run", "")


def test_opening_a_folder_without_a_run_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        RunFolder.open(tmp_path)


def test_a_line_starts_with_the_five_main_keys(folder):
    folder.append({"ga_per_class": [1.0], "seconds": 0.1, "loss": 2.0, "pa": 0.5, "ga": 0.25, "round": 1})
    line = (folder.path / "metrics.jsonl").read_text()
    assert list(json.loads(line)) == ["round", "ga", "pa", "loss", "seconds", "ga_per_class"]


def test_numbers_are_read_back_from_a_line_unchanged(folder):
    row = {"round": 1, "ga": 1 / 3, "loss": 1e-300, "pa": 0.1 + 0.2}
    folder.append(row)
    assert folder.rows() == [row]


def test_numbers_that_are_not_finite_become_null(folder):
    folder.append({"round": 1, "ga": float("nan"), "per": {"a": [float("inf"), np.float32("nan")]}})
    assert folder.rows() == [{"round": 1, "ga": None, "per": {"a": [None, None]}}]


def test_arrays_and_numpy_numbers_are_written(folder):
    folder.write_json("summary.json", {"a": np.float32(0.5), "b": jnp.arange(2), "c": np.array([True]), "d": Path("x")})
    assert folder.read_json("summary.json") == {"a": 0.5, "b": [0, 1], "c": [True], "d": "x"}


def test_a_line_cut_off_by_a_kill_is_ignored(folder):
    folder.append({"round": 1})
    with open(folder.path / "metrics.jsonl", "a") as file:
        file.write('{"round": 2, "ga": 0.')
    assert folder.rows() == [{"round": 1}]


def test_the_last_line_alone_is_read_if_no_other_is_asked_for(folder):
    (folder.path / "clients.jsonl").write_text('{"round": 1}\n{"round": 2}\n{"round": 3}')
    assert folder.rows("clients.jsonl", last=1) == [{"round": 2}]
    assert folder.rows("track.jsonl", last=1) == []
    (folder.path / "clients.jsonl").write_text('{"round": 2}\n{"round": 1}\n{"round": 3}\n')
    with pytest.raises(UserError, match="is damaged in line 2"):
        folder.rows("clients.jsonl", last=1)


def test_truncate_cuts_all_files_of_lines_back_to_the_checkpoints_round(folder):
    for round in (1, 2, 3):
        folder.append({"round": round})
        folder.append({"round": round, "pa_per_client": [0.5]}, "clients.jsonl")
    folder.truncate([{"round": 1}, {"round": 2}])
    folder.append({"round": 3, "ga": 1.0})
    assert folder.rows() == [{"round": 1}, {"round": 2}, {"round": 3, "ga": 1.0}]
    assert [row["round"] for row in folder.rows("clients.jsonl")] == [1, 2]


def test_a_finished_run_that_is_resumed_keeps_its_time_by_which_newer_runs_are_told(folder):
    folder.append({"round": 1, "ga": 0.1})
    folder.append({"round": 1, "pa_per_client": [0.5]}, "clients.jsonl")
    os.utime(folder.path / "metrics.jsonl", (1, 1))
    folder.truncate([{"round": 1, "ga": 0.1}])
    assert (folder.path / "metrics.jsonl").stat().st_mtime == 1
    folder.truncate([{"round": 1, "ga": 0.2}])
    assert folder.rows() == [{"round": 1, "ga": 0.2}]


def test_a_failed_write_leaves_the_old_file(folder, monkeypatch):
    folder.write_json("summary.json", {"ga": 1})

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match="no space left"):
        folder.write_json("summary.json", {"ga": 2})
    assert folder.read_json("summary.json") == {"ga": 1}


def test_writers_with_equal_process_numbers_do_not_publish_each_others_files(folder):
    path = folder.path / "summary.csv"  # of a sweep on a shared file system
    with at_once(path) as one, at_once(path) as other:
        one.write_text("whole")
        other.write_text("ha")
    assert path.read_text() == "whole"
    assert [entry.name for entry in folder.path.iterdir() if "summary" in entry.name] == ["summary.csv"]


@pytest.mark.parametrize(("number", "advice"), [(28, "free some"), (27, "raise that limit")])
def test_the_error_of_a_full_disk_says_what_to_do(tmp_path, number, advice):
    error = OSError(number, "")
    assert f"{advice} and resume the run." in str(failed_write(error, tmp_path))
    assert f"{advice} and try again." in str(failed_write(error, tmp_path, "another `output`"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has such a file")
def test_an_array_that_numpy_cannot_write_to_its_end_is_told_as_a_full_disk(tmp_path):
    with pytest.raises(OSError, match="100000 requested and 0 written") as caught:
        np.zeros(100_000).tofile("/dev/full")
    sentence = str(failed_write(caught.value, tmp_path))
    assert sentence.startswith(f"the disk of {tmp_path} is full, or a limit on the size of files was reached: ")
    assert sentence.endswith("and resume the run.")


def test_a_missing_json_file_reads_as_none(folder):
    assert folder.read_json("resolved.json") is None


@pytest.mark.parametrize("rounds", [0, 1, 50])
def test_curves_are_drawn_with_missing_values_and_any_number_of_rounds(tmp_path, rounds):
    rows = [
        {"round": r, "ga": None if r % 2 else r / 100, "pa": None, "loss": 1 / r if r != 7 else float("nan")}
        for r in range(1, rounds + 1)
    ]
    draw_curves(rows, tmp_path / "curves.png", "a title", {"ga": 2, "pa": None})
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_marks_the_rounds_that_were_chosen(tmp_path):
    rows = [{"round": r, "ga": ga, "pa": ga, "loss": 1.0} for r, ga in [(1, 0.8), (2, 0.9), (3, 0.7)]]
    draw_curves(rows, tmp_path / "curves.svg", "a title", {"ga": 1, "pa": None})
    names = re.findall(r"<!-- (.*) -->", (tmp_path / "curves.svg").read_text())
    assert "best 80.00 (round 1)" in names
    assert not [name for name in names if "90.00" in name]


def test_the_machine_is_described_in_json(folder):
    machine = records.describe_machine()
    assert {"python", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"} <= machine["versions"].keys()
    assert json.loads(json.dumps(machine)) == machine


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_peak_memory_is_in_megabytes():
    status = Path("/proc/self/status").read_text()
    kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert records.peak_memory_mb()["host"] == pytest.approx(kilobytes * 1024 / 1e6, rel=0.05)


def test_the_table_shows_percent_with_two_decimals_and_the_best_round(console):
    console.print(progress.final_table({"ga_best": 0.81234, "ga_best_round": 40, "ga_last": 0.8, "pa_best": None}))
    lines = [line.split("│")[1:-1] for line in text_of(console).splitlines() if "A " in line]
    cells = [[cell.strip() for cell in line] for line in lines]
    assert cells == [["GA", "81.23", "40", "80.00", "-", "-"], ["PA", "-", "-", "-", "-", "-"]]


def test_the_table_tells_pa_after_fine_tuning_from_pa_in_training():
    summary = {"pa_best": 0.9, "pa_last": 0.8, "pa_local_best": 0.5, "pa_local_last": 0.4}
    table = progress.final_table(summary | {"pa_protocol": "global model fine-tuned for 2 epochs"})
    headings, best, _, last, *_ = (list(column.cells) for column in table.columns)
    assert headings == ["GA", "PA after fine-tuning", "PA in training"]
    assert (best, last) == (["-", "90.00", "50.00"], ["-", "80.00", "40.00"])


class RunStandIn:
    """What bars and loggers read of a run."""

    def __init__(self, rounds, done):
        self.rounds, self.round, self.history = rounds, done, History()

    @property
    def is_over(self):
        return self.round == self.rounds

    def after(self, row):
        self.round += 1
        self.history.rows.append({"round": self.round} | row)
        return self


def call_with_rows(callback, rounds, done, rows):
    """Call a callback for a run that records these rows, one a round."""
    run = RunStandIn(rounds, done)
    callback.on_start(run)
    for row in rows:
        callback.on_round(run.after(row), None)
    callback.on_end(run)


def test_outside_a_terminal_every_tenth_of_the_rounds_prints_a_plain_line(console):
    rows = [{"ga": 0.5 if round == 55 else None, "pa": None, "loss": 0.25} for round in range(51, 101)]
    call_with_rows(progress.RunBar(console), 100, 50, rows)
    lines = text_of(console).splitlines()
    assert [line.split()[1] for line in lines] == ["60/100", "70/100", "80/100", "90/100", "100/100"]
    assert lines[0].startswith("round 60/100  GA 50.00 %  loss 0.25  0:00:")
    assert "\x1b" not in text_of(console)


def test_a_terminal_gets_a_bar_that_keeps_the_last_evaluation():

    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    call_with_rows(
        progress.RunBar(console), 4, 0, [{"ga": 0.5, "pa": 0.75, "loss": 2.0}, {"ga": None, "pa": None, "loss": 1.0}]
    )
    last = text_of(console).split("round ")[-1]
    assert last.startswith("2/4")
    assert all(text in last for text in ("GA 50.00 %", "PA in training 75.00 %", "loss 1"))


def test_a_notebook_gets_one_bar_that_changes_in_place(monkeypatch):
    recorder = Recorder()
    monkeypatch.setitem(sys.modules, "IPython", recorder)
    monkeypatch.setitem(sys.modules, "IPython.display", recorder)
    call_with_rows(progress.RunBar(Console(file=io.StringIO(), force_jupyter=True)), 2, 0, [{"ga": 0.5}, {"ga": 0.75}])
    (first_call, first_data, _), (second_call, second_data, _) = recorder.calls
    assert (first_call, second_call) == ("display", "update")
    assert first_data["text/plain"].startswith("round 1/2  GA 50.00 %")
    assert second_data["text/html"].startswith('<progress max="2" value="2"></progress> round 2/2  GA 75.00 %')


class Recorder:
    """Stands in for a tracker's package, and records every call."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.calls.append((name, *args, kwargs)) or self


START = {"resume": "allow", "reinit": "create_new"}
ROW = {"ga": 0.5, "pa": None, "loss": np.float32(0.25), "per_class": [1.0], "method": "fedavg"}


def test_tensorboard_gets_the_scalars_over_rounds(tmp_path, monkeypatch):
    package = Recorder()
    monkeypatch.setitem(sys.modules, "tensorboardX", package)
    call_with_rows(TensorBoard(tmp_path / "tensorboard"), 3, 2, [ROW])
    assert package.calls == [
        ("SummaryWriter", str(tmp_path / "tensorboard"), {"purge_step": 3}),
        ("add_scalar", "ga", 0.5, 3, {}),
        ("add_scalar", "loss", 0.25, 3, {}),
        ("close", {}),
    ]


def test_wandb_gets_the_configuration_and_the_scalars_over_rounds(tmp_path, monkeypatch):
    package = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", package)
    package.id = "7f"
    call_with_rows(WandB(tmp_path, {"seed": 1}), 3, 2, [ROW])
    assert package.calls == [
        ("init", START | {"dir": str(tmp_path), "name": tmp_path.name, "config": {"seed": 1}, "id": None}),
        ("log", {"ga": 0.5, "loss": 0.25}, {"step": 3}),
        ("finish", {}),
    ]
    call_with_rows(WandB(tmp_path, {}), 3, 2, [])
    assert package.calls[-2][1]["id"] == "7f"


@pytest.mark.parametrize("logger", [WandB, MLflow])
def test_a_tracker_that_cannot_be_reached_is_one_sentence(tmp_path, monkeypatch, logger):
    def refuse(**_):
        raise ConnectionError("no server\nat all")

    name = logger.__name__.lower()
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=refuse, start_run=refuse))
    with pytest.raises(UserError, match=rf"{name} does not log \(no server\): put that right, or go on without it\.$"):
        logger(tmp_path, {}).on_start(RunStandIn(3, 2))
    (tmp_path / f"{name}.txt").write_text("7")
    with pytest.raises(UserError, match=rf"to log as another run, remove .*{name}\.txt\.$"):
        logger(tmp_path, {}).on_start(RunStandIn(3, 2))


@pytest.mark.parametrize("logger", [WandB, MLflow])
def test_a_tracker_is_asked_for_nothing_before_training_starts_nor_ended_if_it_did_not(tmp_path, monkeypatch, logger):
    monkeypatch.setitem(sys.modules, logger.__name__.lower(), package := Recorder())
    logger(tmp_path, {}).on_end(RunStandIn(3, 2))
    assert package.calls == []


@pytest.mark.parametrize("call", ["log", "finish"])
def test_a_tracker_that_fails_in_a_round_or_at_the_end_is_one_sentence(monkeypatch, tmp_path, call):
    monkeypatch.setitem(sys.modules, "wandb", package := Recorder())
    logger = WandB(tmp_path, {})
    setattr(package, call, lambda *_, **__: 1 / 0)
    with pytest.raises(UserError, match=r"wandb does not log \(division by zero\)"):
        call_with_rows(logger, 3, 2, [ROW])
    assert package.calls


def test_a_missing_tracker_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UserError, match=r"pip install 'fedjax-pcdd\[tensorboard\]'"):
        TensorBoard(tmp_path)
