"""SIGTERM, as before a pre-emption, and SIGINT: the round that is computed ends, is saved, and then the run.

    with watch(30):            the first signal is noted; a second SIGINT, or 30 seconds, end the process
        with rounds():         before and after the rounds, it raises `Interrupted` at once
            ...                a round is over and saved: `end_after`

Outside of `watch`, as in a notebook, signals do what they always do. Python runs its handlers between two lines of its
own, and a compiled round may take long: the deadline is kept by a thread that the system wakes.
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
_agreed: list[int] = []  # of several processes: known to all
_training: list[bool] = []


class Interrupted(KeyboardInterrupt):
    """A run that ended because of a signal; `code` is the exit code that says so."""

    def __init__(self, sentence: str, number: int):
        super().__init__(sentence)
        self.code = 128 + number


def pending() -> int | None:
    """The signal after which the run is to end; None for none, or while other processes do not know of it.

    Who asks saves the round, so from then on it is what `end_after` goes by.
    """
    if jax.process_count() == 1:
        agree()
    return _agreed[0] if _agreed else None


def agree() -> None:
    """Of several processes, all end after the same round: the first signal that any of them has, all have."""
    known = _noted[0] if _noted else 0
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        known = int(np.max(multihost_utils.process_allgather(np.int32(known))))
    if known and not _agreed:
        _agreed.append(known)


def end_after(round: int) -> None:
    """Raise `Interrupted` where a signal was pending when the round was saved; a later one waits for the next round."""
    if _agreed:
        raise Interrupted(f"round {round} is saved", _agreed[0])


@contextmanager
def rounds() -> Iterator[None]:
    """Within, a signal ends no round halfway."""
    _training.append(True)
    try:
        yield
    finally:
        _training.pop()


@contextmanager
def watch(seconds: float, last_words: Callable[[], str] = lambda: "") -> Iterator[None]:
    """Note signals instead of ending at once; only in the main thread, elsewhere nothing changes.

    Args:
      seconds: from the first signal, after which the process ends as if it had been killed.
      last_words: what is then printed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = socket.socketpair()
    reading.setblocking(True)
    writing.setblocking(False)
    before = {number: signal.signal(number, _note) for number in SIGNALS}
    wakened = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    over = threading.Event()
    threading.Thread(target=_guard, args=(reading, over, seconds, last_words), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakened)
        over.set()
        for number, handler in before.items():
            signal.signal(number, handler)
        writing.close()
        _noted.clear()
        _agreed.clear()


def _note(number: int, _) -> None:
    again = bool(_noted)
    if not again:
        _noted.append(number)
    if not _training or (again and number == signal.SIGINT):
        raise Interrupted("", number)


def _guard(reading: socket.socket, over: threading.Event, seconds: float, last_words: Callable[[], str]) -> None:
    """Wait for the first signal, then for the end, and make one where there is none."""
    with reading:
        numbers = [number for number in reading.recv(64) if number in SIGNALS]
        while not numbers:
            if not (known := reading.recv(64)):
                return
            numbers = [number for number in known if number in SIGNALS]
        # Open until the end: a second signal is written here too.
        if not over.wait(seconds):
            print(last_words(), file=sys.stderr, flush=True)
            os._exit(128 + numbers[0])
