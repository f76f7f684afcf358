"""Sweeps: the grid, what is run, what is not run again, and the table."""

import csv
import json

import pytest

from fedjax_pcdd.api import sweep
from fedjax_pcdd.cli.sweep import expand, summarise, sweep_main

DRAWS_PICTURES = True
SMALL = ["--rounds=1", "--local-epochs=1", "--fine-tune-epochs=0", "--lanes=1", "--clients=3", "--min-samples=1"]


def test_grid_gives_options_to_the_methods_that_have_them():
    found = expand({"method": "fedavg,fedgela", "beta": "0.1,0.5", "seed": "0:2", "ew": "1e3,1e4"})
    assert len(found) == 2 * 2 + 2 * 2 * 2
    assert len({e.name for e in found}) == len(found)
    assert all(("ew" in e.given) == (e.given["method"] == "fedgela") for e in found)
    assert {e.group for e in found if e.given["method"] == "fedavg"} == {"fedavg-beta=0.1", "fedavg-beta=0.5"}


def test_means_and_deviations_are_over_seeds():
    found = expand({"method": "fedavg", "seed": "0,1"})
    results = {
        e.name: dict.fromkeys(("ga_best", "ga_last", "pa_best", "pa_last"), v)
        for e, v in zip(found, (0.4, 0.6), strict=True)
    }
    (row,) = summarise(found, results)
    assert row["ga_best"] == pytest.approx(50)
    assert row["ga_best_std"] == pytest.approx(14.142, abs=1e-3)
    (row,) = summarise(found, {**results, found[1].name: "the loss is not finite"})
    assert (row["seeds"], row["failed"], row["ga_best_std"]) == (1, 1, None)


def test_a_sweep_writes_runs_as_run_py_does_and_does_not_repeat_them(tmp_path, monkeypatch, capsys):
    argv = ["--method=fedavg,solo", "--seed=0:2", *SMALL, f"--sweep-dir={tmp_path}"]
    assert sweep_main(argv) == 0
    rows = list(csv.DictReader((tmp_path / "summary.csv").read_text().splitlines()))
    assert [row["experiment"] for row in rows] == ["fedavg", "solo"]
    summary = json.loads((tmp_path / "solo-s1" / "summary.json").read_text())
    assert (summary["method"], summary["seed"]) == ("solo", 1)
    assert (tmp_path / "fedavg-s0" / "partition.png").is_file()
    before = (tmp_path / "summary.csv").read_text()

    def refuse(*_, **__):
        raise AssertionError("a finished experiment was run again")

    monkeypatch.setattr(sweep, "run", refuse)
    monkeypatch.setattr(sweep, "run_together", refuse)
    assert sweep_main(argv) == 0
    assert (tmp_path / "summary.csv").read_text() == before


@pytest.mark.parametrize(
    ("argument", "word"),
    [("--beta=0.1,-1", "beta"), ("--method=fedavg,fedgella", "fedgela"), ("--ew=3", "fedgela"), ("--seed=3:3", "range"),
     ("--run-dir=x", "--sweep-dir"), ("--coordinator=auto", "one process")],
)  # fmt: skip
def test_mistakes_are_said_before_anything_runs(tmp_path, capsys, argument, word):
    assert sweep_main([argument, *SMALL, f"--sweep-dir={tmp_path / 'sweep'}"]) == 2
    error = capsys.readouterr().err
    assert word in error
    assert error.count("\n") == 1
    assert not (tmp_path / "sweep").exists()


def test_a_failed_experiment_does_not_stop_the_others(tmp_path, capsys):
    argv = ["--method=fedavg", "--lr=0.01,1e30", "--momentum=0", *SMALL, f"--sweep-dir={tmp_path}"]
    assert sweep_main(argv) == 1
    assert "not finite" in capsys.readouterr().out.replace("\n", " ")
    assert (tmp_path / "fedavg-lr=0.01" / "summary.json").is_file()
