"""Items in processes of their own, within the given minutes: a crash or a hang ends only its own item."""

import contextlib
import itertools
import multiprocessing
import os
import queue
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.items import Item, Results

LONGEST = 6.0  # times its estimated seconds, after which an item has failed
PATIENCE = 120.0  # seconds that every item may take
RESERVE = 3.0  # seconds for ending a worker and writing its result
LAST_LINES = 12

Outcome = tuple[str, dict[str, Any]]  # status and record


class Lacking(Exception):
    """An item needs what this machine does not have; the text says what."""


class Clock:
    """The seconds of a call."""

    def __init__(self, seconds: float):
        self.seconds, self._start = seconds, time.monotonic()

    @property
    def left(self) -> float:
        """The seconds that are left."""
        return self.seconds - (time.monotonic() - self._start)


def serve(connection: Any, log: str, environment: Mapping[str, str]) -> None:
    """The process of a worker: compute what comes through the connection, with all output written to the log."""
    os.setsid()  # so that the processes it starts can be ended with it
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    while (request := connection.recv()) is not None:
        connection.send(_computed(*request))


def _computed(work: Callable[..., dict[str, Any]], options: Mapping[str, Any]) -> Outcome:
    try:
        record = work(**options)
        return record.pop("status", "ok"), record
    except Lacking as error:
        return "left out", {"reason": str(error)}
    except BaseException:
        return "failed", {"error": last_lines(traceback.format_exc())}


def last_lines(text: str) -> str:
    """The end of a program's output, which contains its error."""
    return "\n".join(line[:300] for line in text.strip().splitlines()[-LAST_LINES:])


class Worker:
    """A process that computes items one after another."""

    def __init__(self, environment: Mapping[str, str]):
        context = multiprocessing.get_context("spawn")
        self.connection, child_end = context.Pipe()
        number, name = tempfile.mkstemp(suffix=".log")
        os.close(number)
        self.log = Path(name)
        self.process = context.Process(target=serve, args=(child_end, name, dict(environment)), daemon=True)
        self.process.start()
        child_end.close()

    def compute(self, item: Item, options: Mapping[str, Any], limit: float) -> Outcome | None:
        """Status and record; None if the limit, in seconds, was too short. A worker that died takes no more items."""
        try:
            self.connection.send((item.work, options))
            return self.connection.recv() if self.connection.poll(max(0.0, limit)) else None
        except (EOFError, ConnectionError):
            self.process.join()
            output = last_lines(self.log.read_text(encoding="utf-8", errors="replace"))
            return "failed", {"error": f"{output}\n{_ending(self.process.exitcode)}".strip()}

    def close(self, *, kill: bool = False) -> None:
        """End the process; if it does not end in time, kill it and what it has started (with `kill` at once)."""
        with contextlib.suppress(ConnectionError):
            self.connection.send(None)
        self.process.join(0 if kill else RESERVE)
        if self.process.is_alive() and self.process.pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.join()
        self.connection.close()
        self.log.unlink()


def _ending(code: int | None) -> str:
    """How a process ended, in words.

    >>> _ending(-6)
    'the process was ended by SIGABRT'
    """
    if code is not None and code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with code {code}"


class Call:
    """One call of the program: computes items until they are done or the time is over."""

    def __init__(
        self, results: Results, clock: Clock, *, workers: int, shared: bool, say: Callable[[str], object] = print
    ):
        """Prepare; nothing is started.

        Args:
          workers: number of workers for items that may run together.
          shared: whether one worker takes item after item, instead of one worker for each.
        """
        self.results, self.clock, self.workers, self.shared, self.say = results, clock, workers, shared, say
        self.lock = threading.Lock()
        self.stopped, self.pace = False, 1.0
        self.environment: Mapping[str, str] = {}
        self.stamp: Mapping[str, Any] = {}

    def work_off(
        self, items: Sequence[Item], environment: Mapping[str, str], *, again: bool = False, **stamp: Any
    ) -> bool:
        """Compute items while there is time, and return whether nothing is left to do.

        Args:
          environment: variables of the workers' processes.
          again: try failed items once more.
          stamp: entries of every line of the results.
        """
        self.stopped, self.pace = False, self.results.pace(items)
        self.environment, self.stamp = environment, stamp
        waiting = self.results.unfinished(items, again=again)
        for together, batch in itertools.groupby(waiting, key=lambda item: item.together and not self.shared):
            todo: queue.SimpleQueue[Item] = queue.SimpleQueue()
            for item in batch:
                todo.put(item)
            count = min(self.workers, todo.qsize()) if together else 1
            drivers = [threading.Thread(target=self._drive, args=(todo,), daemon=True) for _ in range(count)]
            for driver in drivers:
                driver.start()
            for driver in drivers:
                driver.join()
        return not self.stopped

    def _drive(self, todo: "queue.SimpleQueue[Item]") -> None:
        """Take items from the queue while there is time for them."""
        worker = None
        with contextlib.suppress(queue.Empty):
            while True:
                item = todo.get_nowait()
                if self._allows(item):
                    worker = self._one(item, worker)
                else:
                    self.stopped = True
        if worker:
            worker.close()

    def _allows(self, item: Item) -> bool:
        """Whether there is time for an item; one that is too long for any call of this length needs a fresh call."""
        needed, remaining = item.seconds * self.pace + RESERVE, self.clock.left
        if item.interruptible:
            return remaining > 3 * RESERVE
        return remaining > needed or (needed > self.clock.seconds and remaining > 0.9 * self.clock.seconds > RESERVE)

    def _one(self, item: Item, worker: Worker | None) -> Worker | None:
        """Compute an item, and return the worker if it can take the next one."""
        exclusive = bool(item.environment) or not self.shared
        if worker and exclusive:
            worker.close()
            worker = None
        begun, remaining = time.monotonic(), self.clock.left - RESERVE
        worker = worker or Worker({**self.environment, **item.environment})
        limit = remaining if item.interruptible else min(remaining, max(PATIENCE, LONGEST * item.seconds))
        options = {**item.options, "seconds": remaining - RESERVE} if item.interruptible else item.options
        outcome = worker.compute(item, options, limit)
        self._note(item, outcome or self._out_of_time(limit, remaining), time.monotonic() - begun)
        if exclusive or outcome is None or outcome[0] == "failed":
            worker.close(kill=outcome is None)
            return None
        return worker

    def _out_of_time(self, limit: float, remaining: float) -> Outcome:
        if limit < remaining:
            return "failed", {"error": f"it took longer than {limit:.0f} seconds"}
        return "interrupted", {"reason": "the time of the call was over"}

    def _note(self, item: Item, outcome: Outcome, seconds: float) -> None:
        """Write the result of an item, and print it."""
        status, record = outcome
        line = {"name": item.name, "status": status, "seconds": round(seconds, 2)}
        with self.lock:
            self.stopped |= status == "interrupted"
            self.results.add({**line, **self.stamp, **record})
            reason = str(record.get("reason") or record.get("error", "")).splitlines()[-1:]
            self.say(": ".join([f"{item.name}: {status}, {seconds:.0f} s", *reason]))
