"""SIGTERM, as before a pre-emption, and SIGINT: the current round is finished and saved, then the run ends.

    with watch(30):            the first signal is noted; a second SIGINT, or 30 seconds, end the process
        with rounds():         outside of this, a signal raises `Interrupted` at once
            ...                a round is over and saved: `end_after`

Outside of `watch`, as in a notebook, signals do what they always do. Python runs its handlers only between two of its
own instructions, and a compiled round may take long: so a thread, which the system wakes, keeps the deadline.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax
import numpy as np

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_noted: list[int] = []
_agreed: list[int] = []  # the signal that all processes know of
_asked: list[int] = []  # the last round about which `pending` was asked
_training: list[bool] = []


class Interrupted(KeyboardInterrupt):
    """A run that ended because of a signal; `code` is the exit code for that signal."""

    def __init__(self, sentence: str, number: int):
        super().__init__(sentence)
        self.code = 128 + number


def pending(round: int) -> int | None:
    """The signal after which the run is to end; None if there is none, or while other processes do not know of it.

    The caller saves the round if there is one, so from then on `end_after` goes by it. Of several experiments, which
    ask one after another, all get the first one's answer for a round.
    """
    if jax.process_count() == 1 and _asked != [round]:
        _asked[:] = [round]
        agree()
    return _agreed[0] if _agreed else None


def agree() -> None:
    """Agree on a signal, so that all processes end after the same round: one that any of them has counts for all."""
    number = _noted[0] if _noted else 0
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        number = int(np.max(multihost_utils.process_allgather(np.int32(number))))
    if number and not _agreed:
        _agreed.append(number)


def end_after(round: int) -> None:
    """Raise `Interrupted` if a signal was pending when the round was saved; a later one waits for the next round."""
    if _agreed:
        raise Interrupted(f"round {round} is saved", _agreed[0])


@contextmanager
def rounds() -> Iterator[None]:
    """A context in which no signal ends a round halfway."""
    _training.append(True)
    _asked.clear()
    try:
        yield
    finally:
        _training.pop()


@contextmanager
def watch(seconds: float, message: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Note signals instead of ending at once; only in the main thread, elsewhere nothing changes.

    Args:
      seconds: from the first signal, after which the process ends as if it had been killed.
      message: returns what is printed then.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = socket.socketpair()
    reading.setblocking(True)
    writing.setblocking(False)
    handlers_before = {number: signal.signal(number, _note) for number in SIGNALS}
    wakeup_before = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    finished = threading.Event()
    threading.Thread(target=_guard, args=(reading, finished, seconds, message), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        finished.set()
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
        writing.close()
        _noted.clear()
        _agreed.clear()


def _note(number: int, _) -> None:
    is_repeated = bool(_noted)
    if not is_repeated:
        _noted.append(number)
    if not _training or (is_repeated and number == signal.SIGINT):
        raise Interrupted("", number)


def _guard(reading: socket.socket, finished: threading.Event, seconds: float, message: Callable[[], str]) -> None:
    """Wait for the first signal, then for the end of `watch`; end the process if that does not come in time."""
    with reading:
        numbers: list[int] = []
        while not numbers:
            if not (received := reading.recv(64)):
                return
            numbers = [number for number in received if number in SIGNALS]
        # Open until the end: a second signal is written here too.
        if not finished.wait(seconds):
            print(message(), file=sys.stderr, flush=True)
            os._exit(128 + numbers[0])
