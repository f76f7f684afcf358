"""Experiments trained together: which share a program, numbers and folders as of single runs, failures, resuming."""

import contextlib
import functools
import io
import itertools
import json
import math
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
from rich.console import Console

from fedjax_pcdd.api import programs, records, runs, sweep_folder
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.cli.sweep import sweep_main
from fedjax_pcdd.data.sources import load
from fedjax_pcdd.engine.devices import CompileClock
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Method as FedAvg
from fedjax_pcdd.training import loop
from fedjax_pcdd.training.checkpoint import Pace
from fedjax_pcdd.training.config import RunConfig, build
from fedjax_pcdd.training.named_arrays import bytes_of
from fedjax_pcdd.training.progress import SweepBar
from fedjax_pcdd.training.setup import Setup

SMALL = {
    "rounds": 3, "local_epochs": 1, "fine_tune_epochs": 0, "clients": 3, "min_samples": 1, "batch_size": 100,
    "lanes": 1, "quiet": True,
}  # fmt: skip
COSTS = {
    *("seconds", "eval_seconds", "seconds_per_round", "compile_seconds", "wall_seconds", "samples_per_second"),
    *("peak_memory_mb", "device_peak_memory_mb", "lanes", "together", "seconds_local", "compilations"),
}
TUNED = {"fine_tune_epochs": 1, "checkpoint_every": 3}
GRIDS = {
    "fedavg": [{"beta": beta, "seed": seed, **TUNED} for beta, seed in ((0.1, 0), (0.5, 1), (0.5, 0), (0.1, 1))],
    "scaffold": [{"momentum": 0.0, "cohort": 2, "seed": seed, "lr": lr} for seed, lr in ((0, 0.1), (3, 0.05))],
    "fedgela": [{"ew": 1.0}, {"ew": 9.0}],
}
DIVERGES = {"lr": 1e30, "momentum": 0.0, **TUNED}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]


def pairs(folder, method, grid, **options):
    """Pairs of a configuration and a method, with folders named by their number."""
    return [
        build({**SMALL, "method": method, "run_dir": folder / str(i), **point, **options})
        for i, point in enumerate(grid)
    ]


def train(experiments):
    return runs.run_together([runs.Asked(*pair, {"command": "x"}) for pair in experiments])


@functools.cache
def alone(folder, method):
    """The folder of single runs of the first two experiments, trained once for all tests."""
    for pair in pairs(folder, method, GRIDS[method][:2]):
        runs.run(*pair, {"command": "x"})
    return folder


@functools.cache
def together(folder, method):
    """The folder of the same experiments trained together, and what was returned.

    One of FedAvg's experiments diverges; SCAFFOLD's have more lanes than the single runs.
    """
    grid = GRIDS[method] + [DIVERGES] * (method == "fedavg")
    return folder, train(pairs(folder, method, grid, lanes=3 if method == "scaffold" else 1))


@pytest.fixture
def shared(tmp_path_factory):
    """Calls `alone` or `together` with a folder that all tests share."""
    base = tmp_path_factory.getbasetemp()
    return lambda train_all, method: train_all(base / f"{train_all.__name__}-{method}", method)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(folder):
    """All values that a run has written except its costs, by name."""
    written = {"summary": json.loads((folder / "summary.json").read_text())}
    written |= {name: lines(folder / name) for name in ("metrics.jsonl", "clients.jsonl")}
    return {name: value for name, value in flat("", written) if name.rpartition(".")[2] not in COSTS}


def flat(name, value):
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in inner:
            yield from flat(f"{name}.{key}", entry)
    else:
        yield name, value


def assert_same_numbers(folder, expected_folder):
    actual, expected = numbers(folder), numbers(expected_folder)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] == (pytest.approx(value, rel=1e-5, abs=1e-5) if isinstance(value, float) else value), name


@pytest.mark.thorough
@pytest.mark.parametrize("method", GRIDS)
def test_numbers_are_those_of_single_runs(shared, method):
    single, (folder, results) = shared(alone, method), shared(together, method)
    for i in range(2):
        assert_same_numbers(folder / str(i), single / str(i))
        assert results[i] == json.loads((folder / str(i) / "summary.json").read_text())
    assert len({str(numbers(folder / str(i))) for i in range(len(GRIDS[method]))}) == len(GRIDS[method])


@pytest.mark.thorough
def test_an_experiment_that_diverges_fails_alone(shared):
    folder, (*others, failed) = shared(together, "fedavg")
    assert "is not finite in round" in str(failed)
    assert not (folder / "4" / "summary.json").exists()
    assert [result["together"] for result in others] == [5] * 4


@pytest.mark.thorough
def test_every_experiment_reports_the_lanes_of_the_shared_program(shared):
    assert [result["lanes"] for result in shared(together, "scaffold")[1]] == [3, 3]
    assert [result["lanes"] for result in shared(together, "fedgela")[1]] == [1, 1]


@pytest.mark.thorough
def test_a_finished_experiment_that_is_resumed_alone_keeps_its_summary(shared, tmp_path):
    shutil.copytree(shared(together, "scaffold")[0] / "0", tmp_path / "copy")
    before = json.loads((tmp_path / "copy" / "summary.json").read_text())
    assert main([f"--resume={tmp_path / 'copy'}", "--quiet"]) == 0
    assert json.loads((tmp_path / "copy" / "summary.json").read_text()) == before


@pytest.mark.thorough
def test_folders_hold_the_files_that_a_single_run_writes(shared):
    single, joint = shared(alone, "fedgela") / "1", shared(together, "fedgela")[0] / "1"
    for subfolder in ("", "checkpoints", "checkpoints/3"):
        assert {path.name for path in (joint / subfolder).iterdir()} == {
            path.name for path in (single / subfolder).iterdir()
        }
    assert (joint / "config.yaml").read_text() == (single / "config.yaml").read_text().replace(str(single), str(joint))
    with np.load(single / "partition.npz") as a, np.load(joint / "partition.npz") as b:
        assert {name: a[name].tolist() for name in a} == {name: b[name].tolist() for name in b}
    single_notes, joint_notes = (json.loads((folder / "resolved.json").read_text()) for folder in (single, joint))
    assert joint_notes == single_notes | {"together": 2, "crc": joint_notes["crc"]}


@pytest.mark.thorough
def test_every_experiment_reports_its_share_of_the_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "perf_counter", itertools.count().__next__)  # a second between any two readings
    monkeypatch.setattr(CompileClock, "seconds", 8.0)
    begun = time.perf_counter()
    results = train(pairs(tmp_path, "fedavg", [{"seed": 0}, {"seed": 1}], rounds=2, last_batch="keep"))
    assert sum(result["wall_seconds"] for result in results) <= time.perf_counter() - begun
    assert [result["compile_seconds"] for result in results] == [4.0] * 2
    rows = [row for i in range(2) for row in lines(tmp_path / str(i) / "metrics.jsonl")]
    assert [(row["seconds"], row["eval_seconds"]) for row in rows] == [(0.5, 0.5)] * 4
    assert [result["samples_per_second"] for result in results] == [len(load("digits").y_train) / 0.5] * 2


KILLED = """
import os, signal, sys
from fedjax_pcdd.api import records
from fedjax_pcdd.training.saving import Checkpoint
from fedjax_pcdd.training.folder import Records
from fedjax_pcdd.cli.sweep import sweep_main
from fedjax_pcdd.methods.method import Method as FedAvg

records.heat_map = lambda *_: None
save, write = Checkpoint.on_round, Records.on_round

def saved(callback, run, report):
    save(callback, run, report)
    callback.checkpoints.wait()

def killed(callback, run, report):
    if (run.round, run.index) == (2, 1):
        os.kill(os.getpid(), signal.SIGKILL)
    write(callback, run, report)

Checkpoint.on_round, Records.on_round = saved, killed
sweep_main(sys.argv[1:])
"""


@pytest.mark.thorough
def test_a_killed_sweep_continues_and_so_does_each_folder_alone(tmp_path, shared):
    argv = ["--method=fedgela", "--ew=1,9", *FLAGS, f"--sweep-dir={tmp_path / 'sweep'}"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *argv], timeout=120)
    assert killed.returncode == -signal.SIGKILL
    folders = [tmp_path / "sweep" / f"fedgela-ew={ew}" for ew in (1, 9)]
    shutil.copytree(folders[0], tmp_path / "copy")
    assert [len(lines(folder / "metrics.jsonl")) for folder in folders] == [2, 1]
    assert sweep_main(argv) == 0
    assert main([f"--resume={tmp_path / 'copy'}"]) == 0
    for folder, number in ((folders[0], 0), (folders[1], 1), (tmp_path / "copy", 0)):
        assert_same_numbers(folder, shared(alone, "fedgela") / str(number))


@pytest.mark.thorough
def test_an_experiment_that_cannot_be_prepared_is_named_and_others_run(tmp_path, capsys):
    options = ["--partition=pcdd", "--classes-per-client=4,11", "--seed=0", "--rounds=1"]
    assert sweep_main([*FLAGS, *options, f"--sweep-dir={tmp_path}"]) == 1
    assert "fedavg-classes-per-client=11-s0: " in capsys.readouterr().err
    assert (tmp_path / "fedavg-classes-per-client=4-s0" / "summary.json").is_file()


@pytest.mark.thorough
def test_experiments_trained_together_have_checkpoints_at_one_pace(tmp_path, monkeypatch):
    paces, begin = [], Pace.begin
    monkeypatch.setattr(Pace, "begin", lambda pace, *args: (paces.append(pace), begin(pace, *args)))
    train(pairs(tmp_path, "fedavg", [{"seed": 0}, {"seed": 1}], rounds=1))
    assert len(paces) == 2
    assert paces[0] is paces[1]


def test_together_1_runs_experiments_one_by_one(tmp_path, monkeypatch):
    seeds = []
    monkeypatch.setattr(sweep_folder, "run", lambda config, *_, **__: seeds.append(config.seed) or {"ga_best": 0.5})
    monkeypatch.setattr("fedjax_pcdd.cli.sweep.summarise", lambda *_: [{"failed": 0}])
    monkeypatch.setattr("fedjax_pcdd.cli.sweep.as_table", lambda *_: "")
    tmp_path.joinpath("sweep").mkdir()
    assert sweep_main(["--seed=0:3", "--together=1", f"--sweep-dir={tmp_path / 'sweep'}"]) == 0
    assert seeds == [0, 1, 2]


def test_together_takes_a_positive_number(tmp_path, capsys):
    assert sweep_main(["--together=0", f"--sweep-dir={tmp_path / 'sweep'}"]) == 2
    assert "--together must be at least 1" in capsys.readouterr().err


def number_of_groups(*points):
    return len(programs.groups([build(point) for point in points]))


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"beta": 0.5}, {"lr": 0.1}, {"momentum": 0.0}, {"weight_decay": 0.0}, {"grad_clip": 1.0},
     {"partition": "pcdd"}, {"partition": "iid"}, {"run_dir": "elsewhere"}],
)  # fmt: skip
def test_experiments_that_differ_in_numbers_or_partition_share_a_program(other):
    assert number_of_groups({}, other) == 1


@pytest.mark.parametrize(
    "other",
    [{"rounds": 9}, {"local_epochs": 1}, {"batch_size": 7}, {"clients": 7}, {"cohort": 2}, {"optimizer": "adam"},
     {"model": "simple_cnn"}, {"lr_steps": "5"}, {"method": "fedprox"}, {"weights": "uniform"}, {"resume": "folder"},
     {"partition": "natural"}],
)  # fmt: skip
def test_options_that_change_the_program_need_a_separate_one(other):
    assert number_of_groups({}, other) == 2


@pytest.mark.parametrize(
    "options",
    [{"client_state": "host"}, {"wandb": True}, {"track": "angles"}, {"method": "fccl"}, {"task": "digits_domains"},
     {"method": "feddf"}, {"train_samples": 100}],
)  # fmt: skip
def test_some_options_prevent_sharing_across_seeds(options):
    assert number_of_groups(options, options | {"seed": 1}) == 2


def test_traced_hyperparameters_share_a_program_and_static_ones_do_not():
    points = [{"method": "fedgela", **hyper} for hyper in ({"ew": 1.0}, {"ew": 2.0}, {"phi": "exp", "ew": 1.0}, {})]
    assert programs.groups([build(point) for point in points]) == [[0, 1], [2], [3]]


@pytest.mark.parametrize(
    ("states", "most"), [(0, 1), (11.5, 1), (2 * programs.COPIES * 5, 5), (math.inf, programs.MOST)]
)
def test_no_more_experiments_share_a_program_than_fit_into_memory(monkeypatch, states, most):
    config, method = build({**SMALL, "method": "fedavg"})
    state = Setup([(config, method)]).simulation.start()
    monkeypatch.setattr(programs, "available_memory", lambda: states * bytes_of(state))
    assert programs.affordable(config, method) == most


def test_disk_space_is_checked_for_all_kept_checkpoints_and_one_more_each(tmp_path, monkeypatch):
    requested = {}

    def refuse(folder, size):
        requested[folder.parent.name] = size
        raise UserError("full.")

    monkeypatch.setattr(records, "check_space", refuse)
    for name, seeds, keep in (("alone", 1, 3), ("two", 2, 3), ("more", 1, 8)):
        with contextlib.suppress(UserError):
            train(pairs(tmp_path / name, "fedavg", [{"seed": seed} for seed in range(seeds)], keep=keep))
    one_checkpoint = requested["alone"] / 4
    assert requested == {"alone": 4 * one_checkpoint, "two": 2 * 4 * one_checkpoint, "more": 9 * one_checkpoint}


def test_one_progress_bar_counts_the_rounds_of_all_experiments():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with SweepBar({"first": 4, "second": 2}, console) as bar:
        for name, round in (("first", 1), ("first", 3), ("second", 1)):
            bar.part(name).on_round(types.SimpleNamespace(round=round), None)
        bar.end("second")
    assert "round 5/6" in console.file.getvalue()


@pytest.mark.thorough
def test_partition_files_and_augmentation_drawn_once_prevent_sharing():
    method = FedAvg()
    by_file = [RunConfig(partition=name) for name in ("a.npz", "b.npz")]
    by_seed = [[RunConfig(dataset=name, seed=seed) for seed in (0, 1)] for name in ("isic2019", "digits")]
    keys = [[programs.program_key(config, method) for config in configs] for configs in (by_file, *by_seed)]
    assert [first == second for first, second in keys] == [False, False, True]


def test_clipped_and_unclipped_runs_share_a_program_unless_their_optimisers_are_kept():
    for kept, shares in (("fresh", True), ("kept", False)):
        configs = [RunConfig(grad_clip=clip, optimizer_state=kept) for clip in ("none", "method", 1.0, 2.0)]
        none, default, one, two = (programs.program_key(config, FedAvg()) for config in configs)
        assert (none == default, one == two, none == one) == (True, True, shares)


@pytest.mark.thorough
def test_warnings_common_to_all_runs_are_printed_once(tmp_path, capsys):
    options = ["--optimizer=adam", "--momentum=0.3", "--seed=0:2", f"--sweep-dir={tmp_path}"]
    assert sweep_main([flag for flag in FLAGS if not flag.startswith("--quiet")] + options) == 0
    assert capsys.readouterr().err.count("momentum") == 1
