"""A run that receives a signal finishes its round, saves it, and says how to continue."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import toy
from commands import results, resumed, start, undisturbed, wait_for_rounds
from jax.experimental import multihost_utils

import fedjax_pcdd as fp
from fedjax_pcdd.training import interrupts
from fedjax_pcdd.training.loop import loop

OPTIONS = [
    "--method=scaffold", "--clients=3", "--rounds=20000", "--local-epochs=1", "--batch-size=16", "--lanes=1", "--quiet",
    "--train-samples=120", "--test-samples=40", "--min-samples=1", "--checkpoint-every=50", "--beta=0.5",
]  # fmt: skip


def interrupted(folder, number, *options):
    """Exit code, stderr and number of recorded rounds of a run that received a signal while it trained."""
    process = start(*OPTIONS, *options, f"--run-dir={folder}")
    wait_for_rounds(process, folder, 4)
    process.send_signal(number)
    sent = time.time()
    _, err = process.communicate(timeout=120)
    assert time.time() - sent < 60  # 30 for the round, the rest for ending the process
    return process.returncode, err, (folder / "metrics.jsonl").read_bytes().count(b"\n")


@pytest.mark.thorough
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_finishes_and_saves_the_round_and_says_how_to_continue(tmp_path, number, code):
    folder = tmp_path / "run"
    exit_code, err, rounds = interrupted(folder, number)
    assert exit_code == code, err
    assert err == f"stopped; round {rounds} is saved: continue with --resume={folder}\n"
    assert (folder / "checkpoints" / str(rounds)).is_dir()
    assert not (folder / "lock").exists()


@pytest.mark.parametrize("seconds", [0.0, 0.3, 0.6])
def test_ctrl_c_while_jax_is_being_loaded_ends_the_command_with_a_sentence(tmp_path, seconds):
    process = start(*OPTIONS, f"--run-dir={tmp_path / 'run'}")
    while "jaxlib" not in Path(f"/proc/{process.pid}/maps").read_text():
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.startswith("stopped; "), err.count("\n")) == (130, True, 1), err


@pytest.mark.slow
def test_a_run_that_continues_after_a_signal_ends_with_the_same_bits(tmp_path):
    options = ["--rounds=60"]
    expected = undisturbed(tmp_path / "whole", *OPTIONS, *options)
    interrupted(tmp_path / "run", signal.SIGTERM, *options)
    assert resumed(tmp_path / "run") == expected
    assert results(tmp_path / "run") == expected


@pytest.mark.thorough
def test_a_signal_in_the_round_in_which_a_callback_ends_the_run_ends_the_process_before_fine_tuning(tmp_path):
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    options = {"run_dir": tmp_path / "run", "local_epochs": 1, "fine_tune_epochs": 1, "lanes": 1}

    def stop(run, report):
        signal.raise_signal(signal.SIGTERM)
        return True

    with interrupts.watch(60), pytest.raises(interrupts.Interrupted, match="round 1 is saved"):
        fp.simulate(federation, callbacks=[stop], **options)
    assert not (tmp_path / "run" / "summary.json").exists()
    history = fp.resume(tmp_path / "run", federation=federation)
    assert (len(history), history.summary["rounds"]) == (1, 1)


class Signal(fp.Callback):
    """Sends a signal after a round is saved, and ends the run if asked to."""

    def __init__(self, ends):
        self.ends = ends

    def on_round(self, run, report):
        signal.raise_signal(signal.SIGTERM)
        return self.ends


@pytest.mark.parametrize(("rounds", "ends"), [(1, False), (3, True)])
def test_a_signal_after_the_last_round_is_saved_ends_the_process_before_fine_tuning(rounds, ends):
    simulated = toy.simulation()
    with interrupts.watch(60), pytest.raises(interrupts.Interrupted, match="round 1 is saved"):
        loop(simulated, simulated.start(), rounds, [Signal(ends)])


def test_a_signal_outside_of_rounds_ends_the_run_at_once():
    with pytest.raises(interrupts.Interrupted) as caught, interrupts.watch(60):
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143
    assert interrupts.pending(0) is None


def test_a_signal_within_rounds_is_noted_and_a_second_sigint_ends_at_once():
    with interrupts.watch(60), interrupts.rounds():
        signal.raise_signal(signal.SIGINT)
        assert interrupts.pending(0) == signal.SIGINT
        with pytest.raises(interrupts.Interrupted):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_after_the_round_was_saved_waits_for_the_next_one():
    with interrupts.watch(60), interrupts.rounds():
        assert interrupts.pending(1) is None  # as asked when the round is saved
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.pending(1) is None  # as asked by a second experiment
        interrupts.end_after(1)
        assert interrupts.pending(2) == signal.SIGTERM
        with pytest.raises(interrupts.Interrupted, match="round 2 is saved"):
            interrupts.end_after(2)


def test_with_several_processes_a_signal_counts_once_all_know_of_it(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", lambda mine: np.array([0, mine]))
    with interrupts.watch(60), interrupts.rounds():
        interrupts.agree()
        signal.raise_signal(signal.SIGTERM)  # while the round is saved
        interrupts.end_after(1)
        assert interrupts.pending(0) is None
        interrupts.agree()
        with pytest.raises(interrupts.Interrupted):
            interrupts.end_after(2)
    assert interrupts.pending(0) is None


def test_signal_handlers_are_restored_afterwards():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with interrupts.watch(60):
        pass
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert signal.set_wakeup_fd(-1) == -1  # signals are written to no socket any more


def test_outside_of_the_main_thread_nothing_is_watched():
    handler_before, handlers = signal.getsignal(signal.SIGTERM), []

    def work():
        with interrupts.watch(60):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert handlers == [handler_before]


def test_a_second_sigterm_waits_for_the_end_of_the_round_too():
    with interrupts.watch(60), interrupts.rounds():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(interrupts.Interrupted, match="round 3 is saved"):
            interrupts.end_after(3 if interrupts.pending(0) else 0)


def test_a_run_that_ended_in_time_is_not_killed_later(monkeypatch):
    exit_codes = []
    monkeypatch.setattr(os, "_exit", exit_codes.append)
    with interrupts.watch(0.1), interrupts.rounds():
        signal.raise_signal(signal.SIGTERM)
    time.sleep(0.4)
    assert exit_codes == []


ENDLESS_ROUND = """
import threading
from fedjax_pcdd.training import interrupts
with interrupts.watch(0.5, lambda: "last words"), interrupts.rounds():
    print("training", flush=True)
    while True:
        threading.Event().wait(1)  # a round without an end
"""


@pytest.mark.thorough
def test_a_round_that_does_not_end_in_time_is_given_up():
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS_ROUND], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "training\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=120)[1] == "last words\n"
    assert process.returncode == 143
