"""One run in two real processes on this machine: the same numbers, one writer, and what happens when one is killed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from commands import parse

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training import hosts, interrupts
from fedjax_pcdd.training.config import RunConfig

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, str(ROOT / "experiments" / "run.py"), "--device=cpu"]
SMALL = ["--local-epochs=1", "--batch-size=32", "--lanes=1", "--lr=0.001"]
# Two processes in step would read cached programs while they are written, and say so: only the long ones are kept.
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05"}


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def start(*options, temporary, script=RUN, **variables):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    temporary.mkdir(exist_ok=True)
    variables = os.environ | CACHE | {"TMPDIR": str(temporary)} | variables
    return subprocess.Popen([*script, *options], env=variables, **pipes)


def start_two(*options, temporary, patience=20, number=2, script=None):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = [f"--coordinator=127.0.0.1:{port}", f"--processes={number}", f"--patience={patience}"]
    scripts = script or [RUN] * number
    return [start(*common, f"--process={i}", *options, temporary=temporary, script=scripts[i]) for i in range(number)]


def end(process, seconds=300):
    out, err = process.communicate(timeout=seconds)
    return Ended(process.returncode, out, err)


def metrics(folder):
    """[rounds, 3]: what does not depend on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([[row["ga"], row["pa"], row["loss"]] for row in rows])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run in one process and in two: their folder, and how the processes ended."""
    place = tmp_path_factory.mktemp("runs")
    options = ["--method=fedmr", "--rounds=3", "--fine-tune-epochs=1", *SMALL]
    alone = start(*options, f"--run-dir={place / 'alone'}", temporary=place / "tmp")
    two = start_two(*options, f"--run-dir={place / 'two'}", temporary=place / "tmp")
    ended = [end(process) for process in (alone, *two)]
    assert [one.code for one in ended] == [0, 0, 0], [one.err for one in ended]
    return place, ended


@pytest.mark.thorough
def test_two_processes_give_the_numbers_of_one(runs):
    place, _ = runs
    np.testing.assert_allclose(metrics(place / "alone"), metrics(place / "two"), 1e-5)
    summaries = [json.loads((place / name / "summary.json").read_text()) for name in ("alone", "two")]
    for key in ("ga_best", "ga_last", "pa_best", "pa_last"):
        assert summaries[0][key] == pytest.approx(summaries[1][key], abs=1e-5)


@pytest.mark.thorough
def test_the_folder_of_two_processes_is_that_of_one(runs):
    place, _ = runs
    files = [{str(p.relative_to(place / name)) for p in (place / name).glob("*")} for name in ("alone", "two")]
    assert files[0] == files[1]
    config = (place / "two" / "config.yaml").read_text()
    assert config == (place / "alone" / "config.yaml").read_text().replace("/alone", "/two")


@pytest.mark.thorough
def test_the_second_process_leaves_nothing_and_says_nothing(runs):
    place, (_, first, second) = runs
    assert list((place / "tmp").iterdir()) == []
    assert "GA" in first.out
    assert "GA" not in second.out
    assert second.err == ""


BAD = {
    "a coordinator alone": ["--coordinator=host:1"],
    "no coordinator": ["--processes=2", "--process=0"],
    "numbers where they are found": ["--coordinator=auto", "--processes=2", "--process=0"],
    "a number from 1": ["--coordinator=host:1", "--processes=2", "--process=2"],
}


@pytest.mark.parametrize("case", BAD)
def test_half_of_the_options_of_processes_is_a_sentence(case):
    with pytest.raises(UserError, match="process"):
        parse(BAD[case])


LOGS = {"tensorboard": True, "wandb": True, "mlflow": True}
RUN_OF_TWO = RunConfig(coordinator="host:1", processes=2, process=1, patience=9, run_dir=Path("r"), **LOGS)
GO_ON = "continue with `resume=r`, in any number of processes."


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (UserError("no."), 2, "no."),
        (interrupts.Interrupted("round 3 is saved", signal.SIGTERM), 143, f"stopped; round 3 is saved: {GO_ON}"),
        (KeyboardInterrupt(), 130, f"stopped; {GO_ON}"),
        (RuntimeError("Gloo closed\nmore"), 1, f"process 0 of 1 lost another one (Gloo closed): {GO_ON}"),
        (RuntimeError("UNAVAILABLE: gone"), 1, f"process 0 of 1 lost another one (UNAVAILABLE: gone): {GO_ON}"),
    ],
)
def test_the_end_of_a_process_is_a_code_and_a_sentence(error, code, sentence):
    assert hosts._ending(error, RUN_OF_TWO) == (code, sentence)
    there = replace(RUN_OF_TWO, run_dir=None, resume=Path("r"))
    assert hosts._ending(error, there) == (code, sentence)


def test_a_mistake_in_the_program_ends_a_process_with_its_traceback():
    code, text = hosts._ending(ZeroDivisionError("of nothing"), RUN_OF_TWO)
    assert (code, text.splitlines()[-1]) == (1, "ZeroDivisionError: of nothing")


@pytest.mark.parametrize("own", ["ab", "a text that is longer than the first one's"])
def test_what_the_first_process_says_is_heard_whatever_others_would_say(monkeypatch, own):
    first = np.frombuffer("grün, of 1".encode(), np.uint8)

    def told(mine):
        theirs = first if mine.shape else np.int32(first.size)
        assert np.shape(theirs) == mine.shape
        return theirs

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts.multihost_utils, "broadcast_one_to_all", told)
    assert hosts.told_by_first(own) == "grün, of 1"


@pytest.mark.parametrize(("process", "order"), [(0, ["work", "meet"]), (1, ["meet", "work"])])
def test_the_first_process_works_before_the_others(monkeypatch, process, order):
    done = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(hosts.multihost_utils, "sync_global_devices", lambda _: done.append("meet"))

    @hosts.in_turn()
    def work():
        done.append("work")
        raise KeyboardInterrupt  # after which nobody is waited for

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == order


def test_all_but_the_first_process_write_elsewhere_and_log_nothing(monkeypatch, tmp_path):
    own = hosts._own_options(RUN_OF_TWO, tmp_path)
    assert own == RunConfig(run_dir=Path("r"), **LOGS)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert hosts._own_options(RUN_OF_TWO, tmp_path) == RunConfig(run_dir=tmp_path / "run", quiet=True)
    run = tmp_path / "old"
    for name in ("checkpoints", "clients"):
        (run / name).mkdir(parents=True)
        (run / name / "1").touch()
    (run / "config.yaml").write_text("method: fedavg")
    again = hosts._own_options(replace(RUN_OF_TWO, resume=run), tmp_path)
    assert (again.resume, again.run_dir) == (tmp_path / "run",) * 2
    for name in ("config.yaml", "checkpoints/1", "clients/1"):
        assert (tmp_path / "run" / name).exists()
    assert not (tmp_path / "run" / "config.yaml").is_symlink()


def wait_for_rounds(folder, number, processes):
    deadline = time.time() + 600
    file = folder / "metrics.jsonl"
    while time.time() < deadline and not (file.exists() and len(file.read_text().splitlines()) >= number):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "blow"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_the_run_of_a_dead_or_silent_process_ends_and_continues_alone(tmp_path, victim, blow):
    options = ["--method=scaffold", "--momentum=0", "--rounds=60", "--fine-tune-epochs=0", *SMALL]
    whole = start(*options, f"--run-dir={tmp_path / 'whole'}", "--quiet", temporary=tmp_path / "tmp")
    assert end(whole).code == 0
    folder = tmp_path / "two"
    processes = start_two(*options, f"--run-dir={folder}", temporary=tmp_path / "tmp")
    wait_for_rounds(folder, 4, processes)
    processes[victim].send_signal(blow)
    survivor = end(processes[1 - victim], seconds=60)
    processes[victim].kill()
    end(processes[victim])
    assert survivor.code != 0
    said = [line for line in survivor.err.splitlines() if line.startswith("process ")]
    assert said
    assert all(f"continue with --resume={folder}" in line for line in said)
    assert 4 <= len(metrics(folder)) < 60
    assert list((tmp_path / "tmp").iterdir()) == []
    alone = end(start(f"--resume={folder}", "--quiet", temporary=tmp_path / "tmp"))
    assert alone.code == 0, alone.err
    np.testing.assert_allclose(metrics(folder), metrics(tmp_path / "whole"), 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_to_one_of_two_processes_ends_both_after_the_same_round(tmp_path, victim):
    options = ["--method=scaffold", "--momentum=0", "--rounds=60", "--fine-tune-epochs=0", *SMALL]
    folder = tmp_path / "two"
    processes = start_two(*options, f"--run-dir={folder}", "--quiet", temporary=tmp_path / "tmp", patience=200)
    wait_for_rounds(folder, 4, processes)
    processes[victim].send_signal(signal.SIGTERM)
    ended = [end(process, seconds=90) for process in processes]
    done = len(metrics(folder))
    assert 4 <= done < 60
    assert [one.code for one in ended] == [143, 143], ended
    advice = f"continue with --resume={folder}, in any number of processes."
    assert [one.err for one in ended] == [f"stopped; round {done} is saved: {advice}\n"] * 2
    assert not (folder / "lock").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
    alone = end(start(f"--resume={folder}", "--quiet", temporary=tmp_path / "tmp"))
    assert alone.code == 0, alone.err
    whole = start(*options, f"--run-dir={tmp_path / 'whole'}", "--quiet", temporary=tmp_path / "tmp")
    assert end(whole).code == 0
    np.testing.assert_allclose(metrics(folder), metrics(tmp_path / "whole"), 1e-4)


@pytest.mark.slow
def test_a_run_of_one_process_continues_in_two_with_two_devices_each(tmp_path):
    options = ["--method=scaffold", "--momentum=0", "--client-state=host", "--fine-tune-epochs=0", *SMALL]
    folder = tmp_path / "part"
    assert end(start(*options, "--rounds=6", f"--run-dir={folder}", "--quiet", temporary=tmp_path / "tmp")).code == 0
    whole = metrics(folder)
    shutil.rmtree(folder / "checkpoints" / "6")  # the one before it is continued
    for process in start_two(f"--resume={folder}", "--devices=2", temporary=tmp_path / "tmp"):
        ended = end(process)
        assert ended.code == 0, ended.err
    assert (folder / "checkpoints" / "6").is_dir()
    np.testing.assert_allclose(metrics(folder), whole, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["host", "disk"])
def test_processes_with_clients_of_their_own_give_the_numbers_of_one_and_continue_in_another_number(tmp_path, state):
    """Three processes, of which the last round is done again by two; then two, to the same bits twice."""
    options = [
        "--method=fedrep",
        f"--client-state={state}",
        "--data=stream",
        "--cohort=5",
        "--fine-tune-epochs=0",
        *SMALL,
    ]
    folders, common = {name: tmp_path / name for name in ("1", "2", "3")}, {"temporary": tmp_path / "tmp"}
    assert end(start(*options, "--rounds=3", f"--run-dir={folders['1']}", "--quiet", **common)).code == 0
    for number in (2, 3):
        for ended in map(
            end, start_two(*options, "--rounds=3", f"--run-dir={folders[str(number)]}", number=number, **common)
        ):
            assert ended.code == 0, ended.err
        np.testing.assert_allclose(metrics(folders[str(number)]), metrics(folders["1"]), 1e-5)
        written = {path.name for path in (folders[str(number)] / "clients" / "3.parts").iterdir()}
        assert written == {str(process) for process in range(1, number)}  # beside the first, each its own rows
    before = metrics(folders["2"])
    for number in (2, 3):
        shutil.rmtree(folders[str(number)] / "checkpoints" / "3")
        for ended in map(end, start_two(f"--resume={folders[str(number)]}", **common)):
            assert ended.code == 0, ended.err
        np.testing.assert_allclose(metrics(folders[str(number)]), metrics(folders["1"]), 1e-5)
    np.testing.assert_array_equal(metrics(folders["2"]), before)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["host", "disk"])
def test_each_of_two_processes_reads_and_holds_about_half_of_samples_and_state(tmp_path, state):
    """Every client takes part in every round, so each process looks at all that is its own; memory has large pages."""
    script = [sys.executable, str(ROOT / "tests" / "shares.py")]
    options = [
        "--method=scaffold", "--momentum=0", "--data=stream", f"--client-state={state}", "--clients=160", "--beta=100",
        "--rounds=2", "--fine-tune-epochs=0", "--min-samples=1", "--model=mcmahan_cnn", *SMALL, "--batch-size=8",
    ]  # fmt: skip
    processes = start_two(*options, f"--run-dir={tmp_path / 'run'}", "--quiet", temporary=tmp_path / "tmp", script=[
        [*script, str(tmp_path / f"{i}.json"), "--device=cpu"] for i in range(2)
    ])  # fmt: skip
    for process in processes:
        ended = end(process)
        assert ended.code == 0, ended.err
    found = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]
    print(found)
    assert sum(one["samples"] for one in found) == found[0]["of_samples"]
    for one in found:
        assert 0.45 < one["samples"] / one["of_samples"] <= 0.55
        assert 0.45 < one["state"] / one["of_state"] <= 0.55


@pytest.mark.slow
def test_variables_of_slurm_are_enough(tmp_path):
    folder, common = tmp_path / "run", ["--coordinator=auto", "--rounds=1", "--fine-tune-epochs=0", *SMALL]
    job = {"JOB_ID": str(os.getpid()), "STEP_NODELIST": "localhost", "NTASKS": "2", "STEP_NUM_NODES": "1"}
    processes = []
    for i in range(2):
        task = {f"SLURM_{name}": value for name, value in (job | {"PROCID": str(i), "LOCALID": str(i)}).items()}
        processes.append(start(*common, f"--run-dir={folder}", temporary=tmp_path / "tmp", **task))
    for process in processes:
        ended = end(process)
        assert ended.code == 0, ended.err
    assert json.loads((folder / "summary.json").read_text())["devices"] == 2


@pytest.mark.slow
def test_processes_that_do_not_meet_end_with_a_sentence(tmp_path):
    alone = start(
        "--coordinator=127.0.0.1:9", "--processes=2", "--process=1", "--patience=5", f"--run-dir={tmp_path / 'run'}",
        temporary=tmp_path / "tmp",
    )  # fmt: skip
    ended = end(alone, seconds=60)
    assert ended.code != 0
    assert ended.err.splitlines()[-1].startswith("not all processes came to --coordinator=127.0.0.1:9 within 5 s")
    assert not (tmp_path / "run").exists()
