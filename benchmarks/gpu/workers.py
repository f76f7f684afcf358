"""Items in processes of their own, within the minutes that are given: what crashes or hangs ends its item alone."""

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

LONGEST = 6.0  # times its estimate, after which an item has failed
PATIENCE = 120.0  # seconds that every item may take
RESERVE = 3.0  # seconds in which a worker ends and its result is written
LAST_LINES = 12

Outcome = tuple[str, dict[str, Any]]  # status and record


class Lacking(Exception):
    """An item needs what this machine does not have; the text says what."""


class Clock:
    """The seconds of a call."""

    def __init__(self, seconds: float, now: Callable[[], float] = time.monotonic):
        self.seconds, self._now, self._start = seconds, now, now()

    @property
    def left(self) -> float:
        """What is left of them."""
        return self.seconds - (self._now() - self._start)


def serve(connection: Any, log: str, environment: Mapping[str, str]) -> None:
    """The process of a worker: compute what comes through the connection, and write all output into the log."""
    os.setsid()  # so that what it starts can be ended with it
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    while (asked := connection.recv()) is not None:
        connection.send(_computed(*asked))


def _computed(work: Callable[..., dict[str, Any]], options: Mapping[str, Any]) -> Outcome:
    try:
        record = work(**options)
        return record.pop("status", "ok"), record
    except Lacking as error:
        return "left out", {"reason": str(error)}
    except BaseException:
        return "failed", {"error": last_lines(traceback.format_exc())}


def last_lines(text: str) -> str:
    """The end of a program's output, where its error stands."""
    return "\n".join(line[:300] for line in text.strip().splitlines()[-LAST_LINES:])


class Worker:
    """A process that computes items one after another."""

    def __init__(self, environment: Mapping[str, str]):
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        number, name = tempfile.mkstemp(suffix=".log")
        os.close(number)
        self.log = Path(name)
        self.process = context.Process(target=serve, args=(other, name, dict(environment)), daemon=True)
        self.process.start()
        other.close()

    def compute(self, item: Item, options: Mapping[str, Any], limit: float) -> Outcome | None:
        """Status and record; None where the limit, in seconds, was too short. A failed worker takes no more."""
        try:
            self.connection.send((item.work, options))
            return self.connection.recv() if self.connection.poll(max(0.0, limit)) else None
        except (EOFError, ConnectionError):
            self.process.join()
            output = last_lines(self.log.read_text(encoding="utf-8", errors="replace"))
            return "failed", {"error": f"{output}\n{_ending(self.process.exitcode)}".strip()}

    def close(self, *, kill: bool = False) -> None:
        """End the process; at once, with what it has started, where it does not answer any more."""
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
    """One call of the program: works off items until they are done or the time is over."""

    def __init__(
        self, results: Results, clock: Clock, *, workers: int, shared: bool, say: Callable[[str], object] = print
    ):
        """Prepare; nothing is started.

        Args:
          workers: for items that may run together.
          shared: whether a worker takes one item after another, in place of one each.
        """
        self.results, self.clock, self.workers, self.shared, self.say = results, clock, workers, shared, say
        self.lock = threading.Lock()
        self.stopped, self.pace = False, 1.0
        self.environment: Mapping[str, str] = {}
        self.stamp: Mapping[str, Any] = {}

    def work_off(
        self, items: Sequence[Item], environment: Mapping[str, str], *, again: bool = False, **stamp: Any
    ) -> bool:
        """Whether nothing is left to do.

        Args:
          environment: of the workers.
          again: try what failed once more.
          stamp: goes into every line.
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
        """Whether there is time for an item; one that no call of this length could hold is begun in a fresh one."""
        needed, left = item.seconds * self.pace + RESERVE, self.clock.left
        if item.interruptible:
            return left > 3 * RESERVE
        return left > needed or (needed > self.clock.seconds and left > 0.9 * self.clock.seconds > RESERVE)

    def _one(self, item: Item, worker: Worker | None) -> Worker | None:
        """Compute an item; the worker that can take the next one."""
        own = bool(item.environment) or not self.shared
        if worker and own:
            worker.close()
            worker = None
        begun, left = time.monotonic(), self.clock.left - RESERVE
        worker = worker or Worker({**self.environment, **item.environment})
        limit = left if item.interruptible else min(left, max(PATIENCE, LONGEST * item.seconds))
        options = {**item.options, "seconds": left - RESERVE} if item.interruptible else item.options
        outcome = worker.compute(item, options, limit)
        self._note(item, outcome or self._out_of_time(limit, left), time.monotonic() - begun)
        if own or outcome is None or outcome[0] == "failed":
            worker.close(kill=outcome is None)
            return None
        return worker

    def _out_of_time(self, limit: float, left: float) -> Outcome:
        if limit < left:
            return "failed", {"error": f"it took longer than {limit:.0f} seconds"}
        return "interrupted", {"reason": "the time of the call was over"}

    def _note(self, item: Item, outcome: Outcome, seconds: float) -> None:
        """Write the result of an item, and say it."""
        status, record = outcome
        line = {"name": item.name, "status": status, "seconds": round(seconds, 2)}
        with self.lock:
            self.stopped |= status == "interrupted"
            self.results.add({**line, **self.stamp, **record})
            why = str(record.get("reason") or record.get("error", "")).splitlines()[-1:]
            self.say(": ".join([f"{item.name}: {status}, {seconds:.0f} s", *why]))
