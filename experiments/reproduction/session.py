"""A session: the unfinished cells of a plan, one after another, until the time is spent.

Several processes may work on one plan: each claims the cell that it runs and leaves those of the others.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from fedjax_pcdd.api.sweep import PAUSE
from fedjax_pcdd.training.config import values
from fedjax_pcdd.training.lock import InUse
from reproduction import results
from reproduction.cells import Folders, OutOfTime, deadline, missing_data, run_cell, run_folder
from reproduction.eigenvalues import needed
from reproduction.plan import Cell, configured
from reproduction.sharing import claimed


class Budget:
    """Seconds that may be spent, None for any number."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic):
        self.seconds, self._clock, self._start = seconds, clock, clock()

    @property
    def left(self) -> float | None:
        """What is left of it."""
        return None if self.seconds is None else self.seconds - (self._clock() - self._start)

    def allows(self, typical: float | None) -> bool:
        """Whether to start a cell that typically takes so many seconds.

        A cell that no budget of this size could hold is started too: it is continued in the next one.
        """
        if self.left is None or self.seconds is None:
            return True
        return self.left > 0 and (typical is None or typical <= self.left or typical > self.seconds)


class Outcome(NamedTuple):
    """What a session did: cells that now have a result, cells without data, and whether time ran out."""

    done: int
    skipped: int
    out_of_time: bool


def unfinished(cells: Sequence[Cell], folders: Folders) -> list[Cell]:
    """Cells without a result, in order; those that were begun come first."""
    waiting = [cell for cell in cells if not results.result_path(folders.results, cell).is_file()]
    begun = [cell for cell in waiting if (run_folder(cell, folders) / "config.yaml").is_file()]
    return begun + [cell for cell in waiting if cell not in begun]


def typical_seconds(cell: Cell, known: Sequence[dict[str, Any]]) -> float | None:
    """Median time of finished cells like this: of its table and method, else of its table, else None."""
    same = [r for r in known if r["scale"] == cell.scale and r["table"] == cell.table and "seconds" in r]
    nearer = [r for r in same if r["method"] == cell.method] or same
    return median(r["seconds"] for r in nearer) if nearer else None


def work_off(cells: Sequence[Cell], folders: Folders, budget: Budget, say: Callable[[str], None] = print) -> Outcome:
    """Run the unfinished cells until all are done or the time is spent.

    A cell with the options of one that is done (tables share cells) takes over its result; one whose data set cannot be
    read is left for another time. Where other processes run the last ones, wait for them: one may die.
    """
    waiting, done, lacking = unfinished(cells, folders), 0, _Lacking(folders, say)
    names = [f"[{number}/{len(waiting)}] {cell.table} {cell.name}" for number, cell in enumerate(waiting, 1)]
    left = [(name, cell) for name, cell in zip(names, waiting, strict=True) if not lacking(cell)]
    while left:
        others = []
        for name, cell in left:
            try:
                taken, result = _taken(cell, folders, budget)
            except OutOfTime:
                say(f"{name}: no time left")
                return Outcome(done, lacking.cells, True)
            others += [] if taken else [(name, cell)]
            if result is not None:
                done += 1
                say(f"{name}: {_in_words(result)}")
        if len(others) == len(left):
            time.sleep(PAUSE)
        left = others
    return Outcome(done, lacking.cells, False)


def _taken(cell: Cell, folders: Folders, budget: Budget) -> tuple[bool, dict[str, Any] | None]:
    """Whether a cell needs no more, and its result where it is from this process; OutOfTime where there is no time."""
    if budget.left is not None and budget.left <= 0:
        raise OutOfTime
    try:
        with claimed(cell, folders) as mine:
            if not mine or results.result_path(folders.results, cell).is_file():
                return mine, None
            result = _result(cell, folders, budget)
            results.write_result(folders.results, cell, result)
            return True, result
    except InUse:  # the folder of its run: a process that has no claim continues it
        return False, None


def _result(cell: Cell, folders: Folders, budget: Budget) -> dict[str, Any]:
    """The result of another cell with the same options, else that of a run."""
    known = results.read_results(folders.results)  # anew: other processes add to them
    options = values(*configured(cell, folders.presets))
    shared = results.repeated(cell, options, known, needed(cell.table, folders.expected))
    return shared or _run(cell, folders, budget, known)


class _Lacking:
    """Whether a cell's data is not there; each data set is tried and told of once."""

    def __init__(self, folders: Folders, say: Callable[[str], None]):
        self.cells, self._folders, self._say = 0, folders, say
        self._reasons: dict[str, str | None] = {}

    def __call__(self, cell: Cell) -> bool:
        config, _ = configured(cell, self._folders.presets)
        data = config.task or config.dataset
        if data not in self._reasons:
            self._reasons[data] = missing_data(cell, self._folders)
            if self._reasons[data]:
                self._say(f"all cells with {data} are left out: {self._reasons[data]}")
        self.cells += self._reasons[data] is not None
        return self._reasons[data] is not None


def _run(cell: Cell, folders: Folders, budget: Budget, known: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The result of a cell; OutOfTime where it is not begun, or is interrupted, for want of time."""
    begun = (run_folder(cell, folders) / "config.yaml").is_file()
    if not budget.allows(None if begun else typical_seconds(cell, known)):
        raise OutOfTime
    with deadline(budget.left):
        return run_cell(cell, folders)


def _in_words(result: dict[str, Any]) -> str:
    if result["status"] == "failed":
        return f"failed: {result['sentence']}"
    accuracies = [
        f"{name} {100 * result[key]:.2f}"
        for key, name in (("ga_best", "GA best"), ("ga_mean_last10", "last ten"), ("pa_best", "PA best"))
        if key in result
    ]
    shared = f", the run of {result['same_run_as']}" if "same_run_as" in result else f", {result['seconds']:.0f} s"
    return ", ".join(accuracies) + shared
