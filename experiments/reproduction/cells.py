"""One cell: run it, or continue it, and say what came of it."""

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_pcdd.api import runs
from fedjax_pcdd.cli.messages import sentence
from fedjax_pcdd.cli.options import configure
from fedjax_pcdd.data import sources
from fedjax_pcdd.data.domains import load_task
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.collect import read_run
from fedjax_pcdd.training.config import values
from fedjax_pcdd.training.lock import InUse
from fedjax_pcdd.training.presets import PAPERS
from reproduction import results
from reproduction.eigenvalues import add_eigenvalues
from reproduction.plan import Cell, configured

AGAIN = 60.0  # seconds until an alarm that a library has swallowed rings again


class Folders(NamedTuple):
    """Where things lie: run folders, results, the data sets, the presets, and the papers' numbers."""

    runs: Path
    results: Path
    data: Path | None
    presets: Path = PAPERS / "presets"
    expected: Path = PAPERS / "expected"


class OutOfTime(BaseException):
    """The budget is spent, or the process was asked to end; the run goes on from its last checkpoint."""


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raise OutOfTime in here after some seconds (None: never), and at once when the process is told to end."""

    def stop(*_):
        raise OutOfTime

    before = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGTERM)}
    if seconds is not None:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), AGAIN)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def missing_data(cell: Cell, folders: Folders) -> str | None:
    """Why the data set of a cell cannot be read, None where it can."""
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
    """Where the run of a cell lies."""
    return folders.runs / cell.table / cell.name


def run_cell(cell: Cell, folders: Folders) -> dict[str, Any]:
    """The result of a cell, run or continued in a folder of its own.

    Raises:
      InUse: another process has the folder.
      UserError: files cannot be written; a run that itself fails is a result.
    """
    folder = run_folder(cell, folders)
    more = {**_data(folders), "quiet": "true"}
    config, method = configured(cell, folders.presets, **more)
    options = values(config, method)
    try:
        if (folder / "config.yaml").is_file():
            pair = configure({"resume": str(folder), **more}, folders.presets)
        else:
            pair = configured(cell, folders.presets, **more, run_dir=str(folder))
        origin = {**cell.origin, "command": results.command(cell, options)}
        runs.run(*pair, origin, say=lambda text: None)
        return add_eigenvalues(results.finished(cell, read_run(folder), folders.expected), folder, folders.expected)
    except InUse:
        raise
    except UserError as error:
        if isinstance(error.__cause__, OSError | ValueError):
            raise
        return results.failed(cell, options, sentence(error.sentence).replace(str(folder), "its run folder"))
    finally:
        jax.clear_caches()
        gc.collect()


def _data(folders: Folders) -> dict[str, str]:
    return {} if folders.data is None else {"data_dir": str(folders.data)}
