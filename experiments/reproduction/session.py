"""A session: the unfinished cells of a plan, one after another, until the time is spent.

Several processes may work on one plan: each claims the cell that it runs and leaves those of the others.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from fedjax_pcdd.api.sweep import PAUSE, groups, portions
from fedjax_pcdd.engine.executables import compiled_once
from fedjax_pcdd.training.config import values
from fedjax_pcdd.training.lock import InUse
from reproduction import results
from reproduction.cells import Folders, OutOfTime, deadline, missing_data, run_cells, run_folder
from reproduction.eigenvalues import needed
from reproduction.plan import Cell, configured
from reproduction.sharing import claim_name, claimed


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
    waiting = [cell for cell in cells if not results.has_result(folders.results, cell, current=folders.current)]
    begun = [cell for cell in waiting if (run_folder(cell, folders) / "config.yaml").is_file()]
    return begun + [cell for cell in waiting if cell not in begun]


def typical_seconds(cell: Cell, known: Sequence[dict[str, Any]]) -> float | None:
    """Median time of finished cells like this: of its table and method, else of its table, else None."""
    same = [r for r in known if r["scale"] == cell.scale and r["table"] == cell.table and "seconds" in r]
    nearer = [r for r in same if r["method"] == cell.method] or same
    return median(r["seconds"] for r in nearer) if nearer else None


@compiled_once()
def work_off(
    cells: Sequence[Cell], folders: Folders, budget: Budget, say: Callable[[str], None] = print, together: int = 1
) -> Outcome:
    """Run the unfinished cells until all are done or the time is spent.

    A cell with the options of one that is done (tables share cells) takes over its result; one whose data set cannot be
    read is left for another time. Where other processes run the last ones, wait for them: one may die.

    Args:
      cells, folders, budget: what, where and for how long.
      say: told of each cell.
      together: most cells of one program that are trained together.
    """
    waiting, done, lacking = unfinished(cells, folders), 0, _Lacking(folders, say)
    names = {run_folder(cell, folders): f"[{i}/{len(waiting)}] {cell.table} {cell.name}"
             for i, cell in enumerate(waiting, 1)}  # fmt: skip
    left = {run_folder(cell, folders): cell for cell in waiting if not lacking(cell)}
    while left:
        before = len(left)
        for part in _parts(list(left.values()), folders, together):
            try:
                for cell, result in _taken(part, folders, budget):
                    del left[folder := run_folder(cell, folders)]
                    if result is not None:
                        done += 1
                        say(f"{names[folder]}: {_in_words(result)}")
            except OutOfTime:
                say(f"{names[run_folder(part[0], folders)]}: no time left")
                return Outcome(done, lacking.cells, True)
        if len(left) == before:
            time.sleep(PAUSE)
    return Outcome(done, lacking.cells, False)


def _parts(cells: Sequence[Cell], folders: Folders, together: int) -> list[list[Cell]]:
    """The cells as they are run, in the order of the first of each part."""
    if together == 1:
        return [[cell] for cell in cells]
    pairs = []
    for cell in cells:
        config, method = configured(cell, folders.presets)
        folder = run_folder(cell, folders)
        begun = folder if (folder / "config.yaml").is_file() else None  # which shares no program with a new one
        pairs.append((replace(config, resume=begun), method))
    return [[cells[i] for i in part] for group in groups(pairs) for part in portions(group, together)]


def _taken(part: Sequence[Cell], folders: Folders, budget: Budget) -> Iterator[tuple[Cell, dict[str, Any] | None]]:
    """The cells of a part that need no more, and the result of each that is from this process.

    Raises:
      OutOfTime: there is no time for the others.
    """
    if budget.left is not None and budget.left <= 0:
        raise OutOfTime
    with ExitStack() as claims:
        mine: dict[str, Cell] = {}  # of cells with the same options but one: the others take over its result later
        for cell in part:
            name = claim_name(cell, folders)
            if name not in mine and claims.enter_context(claimed(cell, folders)):
                mine[name] = cell
        known = results.read_results(folders.results)  # anew: other processes add to them
        to_run = []
        for cell in mine.values():
            if results.has_result(folders.results, cell, current=folders.current):
                yield cell, None
            elif (shared := _shared(cell, folders, known)) is not None:
                results.write_result(folders.results, cell, shared)
                yield cell, shared
            else:
                to_run.append(cell)
        for cell, result in zip(to_run, _run(to_run, folders, budget, known), strict=False):
            results.write_result(folders.results, cell, result)
            yield cell, result


def _shared(cell: Cell, folders: Folders, known: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The result of another cell with the same options."""
    known = [one for one in known if results.is_current(one) or not folders.current]
    options = values(*configured(cell, folders.presets))
    return results.repeated(cell, options, known, needed(cell.table, folders.expected))


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


def _run(
    cells: Sequence[Cell], folders: Folders, budget: Budget, known: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The results of cells that are run together, [] where a process without a claim has the folder of one.

    Raises:
      OutOfTime: they are not begun, or are interrupted, for want of time.
    """
    begun = all((run_folder(cell, folders) / "config.yaml").is_file() for cell in cells)
    typical = [typical_seconds(cell, known) for cell in cells]
    seconds = None if begun or None in typical else sum(one for one in typical if one is not None)
    if not cells:
        return []
    if not budget.allows(seconds):
        raise OutOfTime
    try:
        with deadline(budget.left):
            return run_cells(cells, folders)
    except InUse:
        return []


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
