"""One process at a time writes to a folder, even if an owner dies, pauses, or has another clock."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training import lock as module
from fedjax_pcdd.training.lock import InUse, Lock

OWNER = """
import sys, time
from pathlib import Path
from fedjax_pcdd.training.lock import Lock
Lock.take(Path(sys.argv[1]))
print("has it", flush=True)
time.sleep(60)
"""

RACER = """
import sys
from pathlib import Path
from fedjax_pcdd.training.lock import InUse, Lock
sys.stdin.readline()
try:
    Lock.take(Path(sys.argv[1]), wait=0)
    print("has it", flush=True)
except InUse:
    print("refused", flush=True)
sys.stdin.readline()
"""


def start_process(code, path):
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "BEAT", 0.02)
    monkeypatch.setattr(module, "PATIENCE", 0.2)


def write_lock_of_another_machine(path, **fields):
    """Write a lock as a process on another machine does."""
    content = {
        "host": "elsewhere",
        "process": 1,
        "machine": "elsewhere",
        "started": "1",
        "token": "t",
        "beat": 0,
    } | fields
    path.write_bytes(json.dumps(content).ljust(module.LENGTH).encode())


def test_a_lock_is_gone_after_its_release(path):
    with Lock.take(path) as lock:
        lock.check()
        assert json.loads(path.read_text())["process"] == os.getpid()
    assert list(path.parent.iterdir()) == []


def test_a_process_that_holds_a_lock_is_refused_it_in_every_thread(path):
    with Lock.take(path) as lock, ThreadPoolExecutor(1) as thread:
        for take in (Lock.take, lambda path: thread.submit(Lock.take, path).result()):
            with pytest.raises(InUse, match="in use by another run of this process: wait for it to end"):
                take(path)
        lock.check()
    assert not path.exists()


def test_of_threads_that_take_a_lock_at_once_one_gets_it(path):
    def take(_):
        barrier.wait()
        try:
            return Lock.take(path)
        except InUse:
            return None

    barrier = threading.Barrier(8)
    with ThreadPoolExecutor(8) as threads:
        (lock,) = filter(None, threads.map(take, range(8)))
    lock.release()


def test_a_live_owners_lock_is_refused_and_a_killed_ones_taken_over_at_once(path):
    owner = start_process(OWNER, path)
    assert owner.stdout.readline() == "has it\n"
    start = time.monotonic()
    with pytest.raises(InUse, match=rf"in use by process {owner.pid} on .*: wait for it to end, or end it\."):
        Lock.take(path)
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    with Lock.take(path):
        assert time.monotonic() - start < 2


def test_a_process_with_a_dead_owners_reused_number_is_no_owner(path):
    content = {"machine": module._machine(), "process": os.getpid(), "started": "0", "host": "this", "token": "t"}
    path.write_text(json.dumps(content))
    with Lock.take(path, wait=0):
        pass


def test_an_owner_that_has_ended_is_dead_though_no_parent_has_waited_for_it(path):
    owner = subprocess.Popen(["sleep", "60"])
    content = {"machine": module._machine(), "process": owner.pid, "started": module._started(owner.pid), "token": "t"}
    path.write_text(json.dumps(content))
    owner.kill()
    os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
    with Lock.take(path, wait=0):
        owner.wait()


def test_of_processes_that_race_for_a_dead_owners_lock_one_gets_it(path):
    content = {"machine": module._machine(), "process": 2**22 + 1, "started": "0", "host": "this", "token": "t"}
    path.write_text(json.dumps(content))
    racers = [start_process(RACER, path) for _ in range(4)]
    for racer in racers:
        racer.stdin.write("go\n")
    assert sorted(racer.stdout.readline() for racer in racers) == ["has it\n", *3 * ["refused\n"]]
    for racer in racers:
        racer.communicate("end\n")


def test_an_owner_on_another_machine_whose_beat_rises_is_alive(path, quick, monkeypatch):
    beats = itertools.count()
    monkeypatch.setattr(module.time, "sleep", lambda _: write_lock_of_another_machine(path, beat=next(beats)))
    write_lock_of_another_machine(path)
    with pytest.raises(InUse, match="process 1 on elsewhere"):
        Lock.take(path, wait=0.5)


@pytest.mark.parametrize("offset", [-1e9, 1e9])
def test_an_owner_on_another_machine_whose_beat_stops_is_dead_by_any_clock(path, quick, offset):
    write_lock_of_another_machine(path)
    os.utime(path, (time.time() + offset,) * 2)
    with Lock.take(path, wait=1):
        pass


def looks_until_taken(path, pause, most=100):
    """Tries, this many seconds apart and none waiting, until the lock is taken."""
    for look in range(most):
        try:
            Lock.take(path, wait=0).release()
        except InUse:
            time.sleep(pause)
        else:
            return look
    return most


def test_without_waiting_a_lock_that_stood_still_between_calls_is_taken_over(path, quick):
    write_lock_of_another_machine(path)
    assert 5 <= looks_until_taken(path, pause=0.03) <= 8


def test_a_pause_of_the_process_that_watches_does_not_count_as_its_owners(path, quick):
    write_lock_of_another_machine(path)
    assert looks_until_taken(path, pause=0.5, most=4) == 4


def test_an_owner_of_this_machine_that_is_paused_keeps_its_lock(path, quick):
    owner = start_process(OWNER, path)
    assert owner.stdout.readline() == "has it\n"
    owner.send_signal(signal.SIGSTOP)
    assert looks_until_taken(path, pause=0.03, most=20) == 20
    owner.kill()
    owner.communicate()
    Lock.take(path, wait=0).release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_a_damaged_lock_that_stands_still_is_taken_over(path, quick, content):
    path.write_bytes(content)
    with Lock.take(path, wait=1) as lock:
        lock.check()


def test_an_owner_that_was_paused_learns_that_another_one_took_over(path):
    lock = Lock.take(path)
    path.unlink()
    write_lock_of_another_machine(path)
    with pytest.raises(UserError, match="was taken over by process 1 on elsewhere"):
        lock.check()
    lock.release()
    assert json.loads(path.read_text())["host"] == "elsewhere"


def test_an_owner_whose_lock_is_gone_is_not_told_that_another_one_goes_on(path):
    with Lock.take(path) as lock:
        path.unlink()
        with pytest.raises(UserError, match="lock is gone, as if the folder had been moved or removed: continue with"):
            lock.check()


def test_the_owner_raises_its_beat_and_writes_to_no_file_but_its_own(path, quick):
    with Lock.take(path):
        first_beat = json.loads(path.read_text())["beat"]
        time.sleep(0.3)
        assert json.loads(path.read_text())["beat"] > first_beat
        path.unlink()
        write_lock_of_another_machine(path)
        time.sleep(0.1)
        assert json.loads(path.read_text())["token"] == "t"


def test_a_link_is_refused_as_a_lock(path):
    path.symlink_to(path.parent / "elsewhere")
    with pytest.raises(UserError, match="is a link or no file"):
        Lock.take(path)
    assert not (path.parent / "elsewhere").exists()


def test_a_pipe_is_refused_as_a_lock_and_is_not_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(UserError, match="is a link or no file"):
        Lock.take(path)


def test_a_folder_that_cannot_be_written_to_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="cannot write to"):
        Lock.take(tmp_path / "missing" / "lock")
