"""Runs a cell, or several that share a program, or continues them, and returns their results."""

import gc
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax

from fedjax_pcdd import __version__
from fedjax_pcdd.api import runs
from fedjax_pcdd.api.records import Asked
from fedjax_pcdd.cli.messages import sentence
from fedjax_pcdd.cli.options import configure
from fedjax_pcdd.data import sources
from fedjax_pcdd.data.domains import load_task
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.collect import read_record
from fedjax_pcdd.training.config import values
from fedjax_pcdd.training.lock import InUse
from fedjax_pcdd.training.presets import PAPERS
from reproduction import results
from reproduction.eigenvalues import add_eigenvalues
from reproduction.plan import Cell, configured

AGAIN = 60.0  # seconds until the alarm is repeated, in case a library has swallowed the exception
SOON = 0.01  # the same for an alarm that arrives during garbage collection


class Folders(NamedTuple):
    """The folders of the runs, the results, the data sets, the presets and the papers' numbers.

    With `current`, results of another version count as missing.
    """

    runs: Path
    results: Path
    data: Path | None
    presets: Path = PAPERS / "presets"
    expected: Path = PAPERS / "expected"
    current: bool = False


class OutOfTime(BaseException):
    """The budget is spent, or the process was asked to end; the run can continue from its last checkpoint."""


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raise OutOfTime in the block after so many seconds (None: never), and at once when the process is told to end."""

    def stop(_, frame):
        if not _collects(frame):
            raise OutOfTime
        signal.setitimer(signal.ITIMER_REAL, SOON, AGAIN)

    previous_handlers = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGTERM)}
    if seconds is not None:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _collects(frame: FrameType | None) -> bool:
    """Whether the frame is within a callback of the garbage collector, where Python drops exceptions."""
    callbacks = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None and frame.f_code not in callbacks:
        frame = frame.f_back
    return frame is not None


def missing_data(cell: Cell, folders: Folders) -> str | None:
    """Why the data set of a cell cannot be read, None if it can."""
    config, _ = configured(cell, folders.presets, **_data(folders))
    try:
        if config.task is not None:
            load_task(config.task, config.data_dir, seed=config.seed, split=config.task_split)
        else:
            sources.load(config.dataset, config.data_dir)
    except UserError as error:
        return sentence(error.sentence)
    return None


def run_folder(cell: Cell, folders: Folders) -> Path:
    """The run folder of a cell."""
    return folders.runs / cell.table / cell.name


def run_cells(cells: Sequence[Cell], folders: Folders) -> list[dict[str, Any]]:
    """The results of one cell, or of several that share a program; each is run or continued in its own folder.

    Raises:
      InUse: another process uses one of the folders.
      UserError: files cannot be written, or results of this version are wanted and a folder holds a run of another one;
        a run that itself fails is a result.
    """
    for cell in cells:
        configured(cell, folders.presets)  # a mistake in the plan must not become a failed run
        if folders.current:
            _check_version(run_folder(cell, folders))
    try:
        trained = zip(cells, _trained(cells, folders), strict=True)
        return [_result(cell, error, folders) for cell, error in trained]
    finally:
        jax.clear_caches()
        gc.collect()


def _check_version(folder: Path) -> None:
    if not (folder / "config.yaml").is_file():
        return
    record = read_record(folder)
    begun = record.resolved or record.rows  # without either nothing has been computed
    if begun and (version := results.begun_with(record)) != __version__:
        raise UserError(f"{folder} holds a run of version {version}: remove it, or name another `runs_dir`.")


def _trained(cells: Sequence[Cell], folders: Folders) -> list[UserError | None]:
    """Train the cells to their end, together if there are several; the error of each, None if it has none."""
    try:
        requests = [_asked(cell, folders) for cell in cells]
        if len(requests) == 1:
            runs.run(requests[0].config, requests[0].method, requests[0].origin, say=_silent)
            return [None]
        outcomes = runs.run_together(requests, _silent)
        return [outcome if isinstance(outcome, UserError) else None for outcome in outcomes]
    except InUse:
        raise
    except UserError as error:
        if len(cells) == 1:
            return [error]
    return [error for cell in cells for error in _trained([cell], folders)]  # alone: shows whose error it is


def _asked(cell: Cell, folders: Folders) -> Asked:
    """The request for a cell: a new run, or the rest of one that was begun."""
    folder, overrides = run_folder(cell, folders), {**_data(folders), "quiet": "true"}
    config, method = configured(cell, folders.presets, **overrides)
    origin = {**cell.origin, "command": results.command(cell, values(config, method)), "commit": results.commit()}
    if (folder / "config.yaml").is_file():
        return Asked(*configure({"resume": str(folder), **overrides}, folders.presets), origin)
    return Asked(*configured(cell, folders.presets, **overrides, run_dir=str(folder)), origin)


def _result(cell: Cell, error: UserError | None, folders: Folders) -> dict[str, Any]:
    """The result of a cell that was run, or that failed for reasons of its own."""
    folder = run_folder(cell, folders)
    try:
        if error is not None:
            raise error
        return add_eigenvalues(results.finished(cell, read_record(folder), folders.expected), folder, folders.expected)
    except UserError as error:
        if isinstance(error.__cause__, OSError | ValueError):
            raise
        options = values(*configured(cell, folders.presets))
        return results.failed(cell, options, sentence(error.sentence).replace(str(folder), "its run folder"))


def _silent(text: str) -> None:
    """Prints nothing: single runs are silent."""


def _data(folders: Folders) -> dict[str, str]:
    return {} if folders.data is None else {"data_dir": str(folders.data)}
