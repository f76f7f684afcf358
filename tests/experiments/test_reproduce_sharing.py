"""Several processes that work on one plan divide its cells and run none twice; a plan's status is one line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.presets import PAPERS
from reproduction import session
from reproduction.cells import Folders
from reproduction.command import reproduce_main
from reproduction.plan import Plan, read_plan
from reproduction.session import Budget, work_off
from reproduction.sharing import claim_name, claimed, claims
from reproduction.status import expected_seconds, left_over, status_line

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
# FedAvg's run is shared by both tables.
PLAN = """
settings: {dataset: digits, model: mlp, neck: 0, rounds: 2, local_epochs: 1, fine_tune_epochs: 0, train_samples: 200,
  test_samples: 100, lanes: 1}
blocks:
  - {table: fedmr/table1, splits: [cifar10-P10C3], methods: [fedavg, fedprox]}
  - {table: fedmr/table5, splits: [cifar10-P10C3], methods: [fedavg]}
"""
HOLD = """
import sys
from pathlib import Path
from fedjax_pcdd.training.lock import Lock
Lock.take(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folders(tmp_path):
    return Folders(tmp_path / "runs", tmp_path / "results", None)


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "tiny.yaml").write_text(PLAN)
    return read_plan(str(tmp_path / "tiny.yaml"), tmp_path, PAPERS / "presets")


@pytest.fixture
def hold_claim():
    """A function that starts a process which holds a claim until the end of the test."""
    started = []

    def hold(path):
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        )
        assert started[-1].stdout.readline() == "held\n"
        return started[-1]

    yield hold
    for process in started:
        process.communicate("")


def reproduce(tmp_path, *flags):
    command = [sys.executable, EXPERIMENTS / "reproduce.py", f"--scale={tmp_path / 'tiny.yaml'}", *flags]
    folders = [f"--runs-dir={tmp_path / 'runs'}", f"--results-dir={tmp_path / 'results'}"]
    return subprocess.Popen([*command, *folders], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ran_and_shared(text):
    """From a process's output: the cells that it ran, and those whose result it took from another cell's run."""
    lines = re.findall(r"^\[.*?\] (\S+ \S+): (.*)$", text, re.MULTILINE)
    ran = [name for name, words in lines if "the run of" not in words and "no time" not in words]
    return ran, [name for name, words in lines if "the run of" in words]


@pytest.mark.slow
def test_two_commands_on_one_folder_run_no_cell_twice(tmp_path, plan):
    texts = [process.communicate(timeout=300)[0] for process in [reproduce(tmp_path) for _ in range(2)]]
    ran, shared = ([name for text in texts for name in ran_and_shared(text)[part]] for part in (0, 1))
    cells = [f"{cell.table} {cell.name}" for cell in plan.cells]
    assert sorted(ran + shared) == sorted(cells), texts
    assert len(shared) == 1
    assert len(list((tmp_path / "runs").glob("*/*/*/config.yaml"))) == len(cells) - 1


@pytest.mark.thorough
def test_workers_divide_the_cells_and_the_command_says_what_is_left(tmp_path, plan):
    text, _ = reproduce(tmp_path, "--workers=2").communicate(timeout=300)
    assert f"{len(plan.cells)} cells done, 0 left." in text
    logs = [path.read_text() for path in (tmp_path / "runs/claims").glob("worker-*.log")]
    assert len(logs) == 2
    assert sorted(name for log in logs for names in ran_and_shared(log) for name in names) == sorted(
        f"{cell.table} {cell.name}" for cell in plan.cells
    )


@pytest.mark.thorough
def test_a_cell_that_another_process_runs_is_left_to_it(folders, plan, hold_claim, monkeypatch):
    cell = plan.cells[0]
    hold_claim(claims(folders) / claim_name(cell, folders))
    monkeypatch.setattr(session, "run_cells", lambda *_: pytest.fail("run twice"))
    assert work_off([cell], folders, Budget(3.0), lambda text: None) == (0, 0, True)


def test_the_claim_of_a_process_that_died_is_taken_over(folders, plan, hold_claim):
    process = hold_claim(claims(folders) / claim_name(plan.cells[0], folders))
    process.kill()
    process.wait()
    with claimed(plan.cells[0], folders) as is_claimed:
        assert is_claimed


@pytest.mark.thorough
def test_a_cell_whose_folder_another_process_writes_to_does_not_fail(folders, plan, hold_claim):
    cell = plan.cells[0]
    work_off([cell], folders, Budget(None), lambda text: None)
    result_file = next(folders.results.rglob("*.json"))
    result_file.unlink()  # as if the cell were still running
    hold_claim(folders.runs / cell.table / cell.name / "lock")
    assert work_off([cell], folders, Budget(3.0), lambda text: None) == (0, 0, True)
    assert not result_file.exists()


def test_cells_with_the_same_options_share_one_claim(folders, plan):
    average, prox, shared = (claim_name(cell, folders) for cell in plan.cells)
    assert average == shared != prox


def test_a_claim_that_cannot_be_written_is_a_user_error(folders, plan):
    folders.runs.write_text("a file")
    with pytest.raises(UserError), claimed(plan.cells[0], folders):
        pass


# The status in one line


def finished_result(cell, seconds, **fields):
    return {**cell._asdict(), "status": "finished", "seconds": seconds, **fields}


def test_the_time_left_follows_from_the_mean_of_the_tables_finished_cells(plan):
    first, second, in_other_table = plan.cells
    results = [
        finished_result(first, 10.0),
        finished_result(second, 30.0),
        finished_result(second, 900.0, same_run_as="a table"),
    ]
    assert expected_seconds([second], results) == 20.0
    # Where a table has no result, the mean of the scale is taken.
    assert expected_seconds([second, in_other_table], [finished_result(first, 10.0)]) == 20.0
    assert expected_seconds([second], []) is None


def test_the_status_of_a_plan_is_one_line(folders, plan, hold_claim):
    line = status_line([plan], folders)
    assert line == "tiny: 0 of 3 cells done, 3 left, time not known; none runs"
    path = folders.results / plan.cells[0].table / f"{plan.cells[0].name}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(finished_result(plan.cells[0], 1200.0)))
    (folders.runs / "fedmr/table1" / plan.cells[1].name).mkdir(parents=True)
    process = hold_claim(folders.runs / "fedmr/table1" / plan.cells[1].name / "lock")
    line = status_line([plan], folders)
    named = "fedmr/table1 cifar10-P10C3 (1), fedmr/table5 cifar10-P10C3 (1)"
    assert left_over(plan, folders.results) == f"2 of the 3 cells of its plan were not run yet: {named}."
    assert line.startswith("tiny: 1 of 3 cells done, 2 left, about 0.7 hours of a process; running: fedmr/table1 tiny-")
    assert f"process {process.pid}" in line


def test_a_failed_cell_is_counted_as_done_and_named(folders, plan):
    path = folders.results / plan.cells[0].table / f"{plan.cells[0].name}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**plan.cells[0]._asdict(), "status": "failed"}))
    line = status_line([Plan("tiny", plan.cells[:1])], folders)
    assert line == "tiny: 1 of 1 cells done (1 failed); none runs"
    assert not left_over(Plan("tiny", plan.cells[:1]), folders.results)


def test_the_command_prints_the_status_of_all_cpu_plans_in_one_line(tmp_path, capsys):
    flags = ["--status", f"--runs-dir={tmp_path}", f"--results-dir={tmp_path}"]
    assert reproduce_main(EXPERIMENTS, flags) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert [part.partition(":")[0] for part in line.split("; ")] == ["cpu", "mid", "long", "full", "none runs"]
