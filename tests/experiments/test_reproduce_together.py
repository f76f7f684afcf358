"""Cells that share a program are trained together: each has the result that it has alone, but for rounding."""

import json

import numpy as np
import pytest

from fedjax_pcdd.api import runs
from fedjax_pcdd.training import folder as records
from fedjax_pcdd.training.presets import PAPERS
from reproduction import results
from reproduction.cells import Folders, OutOfTime
from reproduction.plan import read_plan
from reproduction.session import Budget, unfinished, work_off

PLAN = """
settings: {dataset: digits, model: mlp, neck: 0, rounds: 2, local_epochs: 1, fine_tune_epochs: 0, train_samples: 200,
  test_samples: 100, lanes: 1}
blocks:
  - {table: fedmr/table1, splits: [cifar10-P10C3], methods: [fedavg]}
  - {table: fedmr/table1, splits: [cifar10-P10C3], methods: [fedavg], tag: fast, settings: {lr: FAST}}
  - {table: fedmr/table5, splits: [cifar10-P10C3], methods: [fedavg]}
"""


@pytest.fixture
def programs(monkeypatch):
    """The number of cells that each program trained."""
    cell_counts, run_together = [], runs.run_together

    def count_and_run(experiments, *arguments, **options):
        cell_counts.append(len(experiments))
        return run_together(experiments, *arguments, **options)

    monkeypatch.setattr(runs, "run_together", count_and_run)
    return cell_counts


def cells_of(tmp_path, fast=0.02):
    (tmp_path / "tiny.yaml").write_text(PLAN.replace("FAST", str(fast)))
    return read_plan(str(tmp_path / "tiny.yaml"), tmp_path, PAPERS / "presets").cells


def folders_in(path):
    return Folders(path / "runs", path / "results", None)


def run_session(cells, folders, together):
    return work_off(cells, folders, Budget(None), lambda text: None, together)


def read_result(cell, folders):
    return json.loads(results.result_path(folders.results, cell).read_text())


@pytest.mark.thorough
def test_cells_of_one_program_are_trained_together_and_equal_runs_only_once(tmp_path, programs):
    cells, together, alone = cells_of(tmp_path), folders_in(tmp_path / "whole"), folders_in(tmp_path / "alone")
    assert run_session(cells, together, 4).done == 3
    assert programs == [2]
    assert read_result(cells[2], together)["same_run_as"] == "fedmr/table1 cifar10-P10C3"
    run_session(cells[:2], alone, 1)
    assert programs == [2, 1, 1]
    for cell in cells[:2]:
        # The tolerance is one of 100 test images.
        np.testing.assert_allclose(read_result(cell, together)["ga"], read_result(cell, alone)["ga"], atol=0.011)
        assert (read_result(cell, together).get("together"), read_result(cell, alone).get("together")) == (2, None)


@pytest.mark.thorough
def test_a_cell_that_diverges_does_not_fail_the_others(tmp_path):
    cells, folders = cells_of(tmp_path, fast=1e30)[:2], folders_in(tmp_path)
    assert run_session(cells, folders, 2).done == 2
    assert [read_result(cell, folders)["status"] for cell in cells] == ["finished", "failed"]


@pytest.mark.thorough
def test_an_interrupted_program_resumes_with_all_its_cells(tmp_path, monkeypatch, programs):
    cells, folders = cells_of(tmp_path)[:2], folders_in(tmp_path)
    append = records.RunFolder.append

    def append_then_stop(self, row, name=records.METRICS):
        append(self, row, name)
        if row["round"] == 2:
            raise OutOfTime

    with monkeypatch.context() as patch:
        patch.setattr(records.RunFolder, "append", append_then_stop)
        assert run_session(cells, folders, 2) == (0, 0, True)
    assert len(unfinished(cells, folders)) == 2
    assert run_session(cells, folders, 2).done == 2
    assert [len(read_result(cell, folders)["ga"]) for cell in cells] == [2, 2]
    assert programs[0] == 2
