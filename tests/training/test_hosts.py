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
# Processes in step would read cached programs that are still being written, and warn of it: only slow ones are cached.
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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = [f"--coordinator=127.0.0.1:{port}", f"--processes={number}", f"--patience={patience}"]
    scripts = script or [RUN] * number
    return [start(*common, f"--process={i}", *options, temporary=temporary, script=scripts[i]) for i in range(number)]


def end(process, seconds=300):
    out, err = process.communicate(timeout=seconds)
    return Ended(process.returncode, out, err)


def metrics(folder):
    """[rounds, 3]: GA, PA and loss, which do not depend on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return np.array([[row["ga"], row["pa"], row["loss"]] for row in rows])


COUNTING = """
import fedjax_pcdd as fp

class Counting(fp.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_round(self, run, report):
        (self.folder / "rounds.txt").write_text(str(run.round))

def counting(folder, options):
    return Counting(folder)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run in one process and in two: the folder of both, and how the three processes ended."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "counting.py").write_text(COUNTING)
    logger = f"--loggers={folder / 'counting.py'}:counting"
    options = ["--method=fedmr", "--rounds=3", "--fine-tune-epochs=1", logger, *SMALL]
    alone = start(*options, f"--run-dir={folder / 'alone'}", temporary=folder / "tmp")
    two = start_two(*options, f"--run-dir={folder / 'two'}", temporary=folder / "tmp")
    ended = [end(process) for process in (alone, *two)]
    assert [result.code for result in ended] == [0, 0, 0], [result.err for result in ended]
    return folder, ended


@pytest.mark.thorough
def test_two_processes_give_the_results_of_one(runs):
    folder, _ = runs
    np.testing.assert_allclose(metrics(folder / "alone"), metrics(folder / "two"), 1e-5)
    summaries = [json.loads((folder / name / "summary.json").read_text()) for name in ("alone", "two")]
    for key in ("ga_best", "ga_last", "pa_best", "pa_last"):
        assert summaries[0][key] == pytest.approx(summaries[1][key], abs=1e-5)


@pytest.mark.thorough
def test_the_run_folder_of_two_processes_is_that_of_one(runs):
    folder, _ = runs
    files = [{str(p.relative_to(folder / name)) for p in (folder / name).glob("*")} for name in ("alone", "two")]
    assert files[0] == files[1] >= {"rounds.txt"}
    config = (folder / "two" / "config.yaml").read_text()
    assert config == (folder / "alone" / "config.yaml").read_text().replace("/alone", "/two")


@pytest.mark.thorough
def test_the_second_process_leaves_no_files_and_prints_no_results(runs):
    folder, (_, first, second) = runs
    assert list((folder / "tmp").iterdir()) == []
    assert "GA" in first.out
    assert [line for line in second.out.splitlines() if not line.startswith("[Gloo]")] == []  # the library's own line
    assert second.err == ""


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "own"), [("seed", ("1", "2")), ("method", ("fedavg", "scaffold"))])
def test_processes_with_other_options_than_the_first_end_all_before_a_folder_is_made(tmp_path, name, own):
    scripts = [[*RUN, f"--{name}={value}"] for value in own]
    two = start_two(*SMALL, f"--run-dir={tmp_path / 'run'}", temporary=tmp_path / "tmp", script=scripts)
    first, second = map(end, two)
    assert (first.code, second.code) == (2, 2)
    assert "another process has other options or data than process 0 of 2: start all" in first.err
    assert f"in process 1 of 2 --{name} is {own[1]}, and {own[0]} in the first one: start all" in second.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("others_differ", [False, True])
@pytest.mark.parametrize("data", ["a", "b"])
def test_processes_with_other_data_than_the_first_are_refused(monkeypatch, others_differ, data):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts, "told_by_first", lambda _: '{"the data set": "a"}')
    monkeypatch.setattr(hosts.multihost_utils, "process_allgather", lambda own: np.array([own, others_differ]))
    if data == "b":
        with pytest.raises(UserError, match="in process 0 of 2 the data set is not that of the first one: start all"):
            hosts.agree({"the data set": data})
    elif others_differ:
        with pytest.raises(UserError, match="another process has other options or data than process 0 of 2"):
            hosts.agree({"the data set": data})
    else:
        hosts.agree({"the data set": data})


BAD = {
    "a coordinator alone": ["--coordinator=host:1"],
    "no coordinator": ["--processes=2", "--process=0"],
    "numbers where they are found": ["--coordinator=auto", "--processes=2", "--process=0"],
    "a number from 1": ["--coordinator=host:1", "--processes=2", "--process=2"],
}


@pytest.mark.parametrize("case", BAD)
def test_incomplete_options_of_processes_are_refused(case):
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
def test_a_process_ends_with_an_exit_code_and_a_sentence(error, code, sentence):
    assert hosts._ending(error, RUN_OF_TWO) == (code, sentence)
    resumed = replace(RUN_OF_TWO, run_dir=None, resume=Path("r"))
    assert hosts._ending(error, resumed) == (code, sentence)


def test_a_mistake_in_the_program_ends_a_process_with_its_traceback():
    code, text = hosts._ending(ZeroDivisionError("of nothing"), RUN_OF_TWO)
    assert (code, text.splitlines()[-1]) == (1, "ZeroDivisionError: of nothing")


@pytest.mark.parametrize("own_text", ["ab", "a text that is longer than the first one's"])
def test_every_process_gets_the_first_ones_text_whatever_its_own_is(monkeypatch, own_text):
    first_text = np.frombuffer("grün, of 1".encode(), np.uint8)

    def broadcast(value):
        first_value = first_text if value.shape else np.int32(first_text.size)
        assert np.shape(first_value) == value.shape
        return first_value

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(hosts.multihost_utils, "broadcast_one_to_all", broadcast)
    assert hosts.told_by_first(own_text) == "grün, of 1"


@pytest.mark.parametrize(("process", "order"), [(0, ["work", "meet"]), (1, ["meet", "work"])])
def test_the_first_process_works_before_the_others(monkeypatch, process, order):
    events = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(hosts.multihost_utils, "sync_global_devices", lambda _: events.append("meet"))

    @hosts.in_turn()
    def work():
        events.append("work")
        raise KeyboardInterrupt  # after which no process is left waiting

    with pytest.raises(KeyboardInterrupt):
        work()
    assert events == order


def test_all_but_the_first_process_write_to_another_folder_and_log_nothing(monkeypatch, tmp_path):
    options = hosts._own_options(RUN_OF_TWO, tmp_path)
    assert options == RunConfig(run_dir=Path("r"), **LOGS)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert hosts._own_options(RUN_OF_TWO, tmp_path) == RunConfig(run_dir=tmp_path / "run", quiet=True)
    old_folder = tmp_path / "old"
    for name in ("checkpoints", "clients"):
        (old_folder / name).mkdir(parents=True)
        (old_folder / name / "1").touch()
    (old_folder / "config.yaml").write_text("method: fedavg")
    resumed = hosts._own_options(replace(RUN_OF_TWO, resume=old_folder), tmp_path)
    assert (resumed.resume, resumed.run_dir) == (tmp_path / "run",) * 2
    for name in ("config.yaml", "checkpoints/1", "clients/1"):
        assert (tmp_path / "run" / name).exists()
    assert not (tmp_path / "run" / "config.yaml").is_symlink()


def wait_for_rounds(folder, number, processes):
    deadline = time.time() + 600
    file = folder / "metrics.jsonl"
    while time.time() < deadline and not (file.exists() and len(file.read_text().splitlines()) >= number):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)
    assert time.time() < deadline, "the processes train no round"


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "signal_sent"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_run_with_a_dead_or_silent_process_ends_and_resumes_in_one_process(tmp_path, victim, signal_sent):
    options = ["--method=scaffold", "--momentum=0", "--rounds=60", "--fine-tune-epochs=0", *SMALL]
    whole = start(*options, f"--run-dir={tmp_path / 'whole'}", "--quiet", temporary=tmp_path / "tmp")
    assert end(whole).code == 0
    folder = tmp_path / "two"
    processes = start_two(*options, f"--run-dir={folder}", temporary=tmp_path / "tmp")
    wait_for_rounds(folder, 4, processes)
    processes[victim].send_signal(signal_sent)
    survivor = end(processes[1 - victim], seconds=60)
    processes[victim].kill()
    end(processes[victim])
    assert survivor.code != 0
    messages = [message for message in survivor.err.splitlines() if message.startswith("process ")]
    assert messages
    assert all(f"continue with --resume={folder}" in message for message in messages)
    assert 4 <= len(metrics(folder)) < 60
    assert list((tmp_path / "tmp").iterdir()) == []
    resumed = end(start(f"--resume={folder}", "--quiet", temporary=tmp_path / "tmp"))
    assert resumed.code == 0, resumed.err
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
    last_round = len(metrics(folder))
    assert 4 <= last_round < 60
    assert [result.code for result in ended] == [143, 143], ended
    advice = f"continue with --resume={folder}, in any number of processes."
    assert [result.err for result in ended] == [f"stopped; round {last_round} is saved: {advice}\n"] * 2
    assert not (folder / "lock").exists()
    assert list((tmp_path / "tmp").iterdir()) == []
    resumed = end(start(f"--resume={folder}", "--quiet", temporary=tmp_path / "tmp"))
    assert resumed.code == 0, resumed.err
    whole = start(*options, f"--run-dir={tmp_path / 'whole'}", "--quiet", temporary=tmp_path / "tmp")
    assert end(whole).code == 0
    np.testing.assert_allclose(metrics(folder), metrics(tmp_path / "whole"), 1e-4)


@pytest.mark.slow
def test_a_run_of_one_process_resumes_in_two_with_two_devices_each(tmp_path):
    options = ["--method=scaffold", "--momentum=0", "--client-state=host", "--fine-tune-epochs=0", *SMALL]
    options += ["--checkpoint-every=1"]
    folder = tmp_path / "part"
    assert end(start(*options, "--rounds=6", f"--run-dir={folder}", "--quiet", temporary=tmp_path / "tmp")).code == 0
    whole = metrics(folder)
    shutil.rmtree(folder / "checkpoints" / "6")  # so the run resumes from the checkpoint before it
    for process in start_two(f"--resume={folder}", "--devices=2", temporary=tmp_path / "tmp"):
        ended = end(process)
        assert ended.code == 0, ended.err
    assert (folder / "checkpoints" / "6").is_dir()
    np.testing.assert_allclose(metrics(folder), whole, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["host", "disk"])
def test_processes_with_their_own_clients_match_one_and_resume_in_any_number(tmp_path, state):
    """Two processes repeat the last round of a run of two, to the same bits, and that of a run of three."""
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
        parts = {path.name for path in (folders[str(number)] / "clients" / "3.parts").iterdir()}
        assert parts == {str(process) for process in range(1, number)}  # all but the first write their own rows
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
    """Every client takes part in every round, so each process reads all of its own share; memory has large pages."""
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
    shares = [json.loads((tmp_path / f"{i}.json").read_text()) for i in range(2)]
    print(shares)
    assert sum(share["samples"] for share in shares) == shares[0]["of_samples"]
    for share in shares:
        assert 0.45 < share["samples"] / share["of_samples"] <= 0.55
        assert 0.45 < share["state"] / share["of_state"] <= 0.55


@pytest.mark.slow
def test_slurms_variables_are_enough_to_start_processes(tmp_path):
    folder, options = tmp_path / "run", ["--coordinator=auto", "--rounds=1", "--fine-tune-epochs=0", *SMALL]
    job = {"JOB_ID": str(os.getpid()), "STEP_NODELIST": "localhost", "NTASKS": "2", "STEP_NUM_NODES": "1"}
    processes = []
    for i in range(2):
        task = {f"SLURM_{name}": value for name, value in (job | {"PROCID": str(i), "LOCALID": str(i)}).items()}
        processes.append(start(*options, f"--run-dir={folder}", temporary=tmp_path / "tmp", **task))
    for process in processes:
        ended = end(process)
        assert ended.code == 0, ended.err
    assert json.loads((folder / "summary.json").read_text())["devices"] == 2


@pytest.mark.slow
def test_processes_that_do_not_meet_end_with_a_sentence(tmp_path):
    process = start(
        "--coordinator=127.0.0.1:9", "--processes=2", "--process=1", "--patience=5", f"--run-dir={tmp_path / 'run'}",
        temporary=tmp_path / "tmp",
    )  # fmt: skip
    ended = end(process, seconds=60)
    assert ended.code != 0
    assert ended.err.splitlines()[-1].startswith("not all processes came to --coordinator=127.0.0.1:9 within 5 s")
    assert not (tmp_path / "run").exists()
