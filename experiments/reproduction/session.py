"""A session: runs the unfinished cells of a plan, one after another, until the time is spent.

Several processes may work on one plan: each claims the cell that it runs and skips those that others have claimed.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from statistics import median_low
from typing import Any, NamedTuple

from fedjax_pcdd.api.programs import groups, portions
from fedjax_pcdd.api.sweep_folder import PAUSE
from fedjax_pcdd.engine.executables import compiled_once
from fedjax_pcdd.training.config import values
from fedjax_pcdd.training.lock import InUse
from reproduction import results
from reproduction.cells import Folders, OutOfTime, deadline, missing_data, run_cells, run_folder
from reproduction.eigenvalues import needed
from reproduction.plan import Cell, configured
from reproduction.sharing import claim_name, claimed


class Budget:
    """Seconds that may be spent, None without a limit."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic):
        self.seconds, self._clock, self._start = seconds, clock, clock()

    @property
    def left(self) -> float | None:
        """Seconds that are left, None without a limit."""
        return None if self.seconds is None else self.seconds - (self._clock() - self._start)

    def allows(self, typical: float | None) -> bool:
        """Whether to start a cell that typically takes so many seconds.

        A cell that takes longer than the whole budget is started too: the next session continues it.
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
    """The cells without a result, in order, but those already begun first."""
    waiting = [cell for cell in cells if not results.has_result(folders.results, cell, current=folders.current)]
    begun = [cell for cell in waiting if (run_folder(cell, folders) / "config.yaml").is_file()]
    return begun + [cell for cell in waiting if cell not in begun]


def typical_seconds(cell: Cell, known: Sequence[dict[str, Any]]) -> float | None:
    """Median time (of two, the lower) of finished cells of the same table and method, else of the table, else None."""
    of_table = [r for r in known if r["scale"] == cell.scale and r["table"] == cell.table and "seconds" in r]
    closest = [r for r in of_table if r["method"] == cell.method] or of_table
    return median_low(r["seconds"] for r in closest) if closest else None


@compiled_once()
def work_off(
    cells: Sequence[Cell], folders: Folders, budget: Budget, say: Callable[[str], None] = print, together: int = 1
) -> Outcome:
    """Run the unfinished cells until all are done or the time is spent.

    A cell with the options of one that is done (tables share cells) takes over its result; one whose data set cannot be
    read is skipped. If other processes run the last cells, it waits for them, as one of them may die.

    Args:
      cells, folders, budget: what to run, where, and for how long.
      say: receives a line for each cell.
      together: the most cells of one program that are trained together.
    """
    waiting, done, lacking = unfinished(cells, folders), 0, _Lacking(folders, say)
    names = {run_folder(cell, folders): f"[{i}/{len(waiting)}] {cell.table} {cell.name}"
             for i, cell in enumerate(waiting, 1)}  # fmt: skip
    remaining = {run_folder(cell, folders): cell for cell in waiting if not lacking(cell)}
    while remaining:
        count_before = len(remaining)
        for portion in _parts(list(remaining.values()), folders, together):
            try:
                for cell, result in _taken(portion, folders, budget):
                    del remaining[folder := run_folder(cell, folders)]
                    if result is not None:
                        done += 1
                        say(f"{names[folder]}: {_in_words(result)}")
            except OutOfTime:
                say(f"{names[run_folder(portion[0], folders)]}: no time left")
                return Outcome(done, lacking.cells, True)
        if len(remaining) == count_before:
            time.sleep(PAUSE)
    return Outcome(done, lacking.cells, False)


def _parts(cells: Sequence[Cell], folders: Folders, together: int) -> list[list[Cell]]:
    """The cells in the portions that run together, in the order of the first cell of each portion."""
    if together == 1:
        return [[cell] for cell in cells]
    experiments = []
    for cell in cells:
        config, method = configured(cell, folders.presets)
        folder = run_folder(cell, folders)
        # A continued run shares no program with a new one.
        begun = folder if (folder / "config.yaml").is_file() else None
        experiments.append((replace(config, resume=begun), method))
    return [[cells[i] for i in portion] for group in groups(experiments) for portion in portions(group, together)]


def _taken(portion: Sequence[Cell], folders: Folders, budget: Budget) -> Iterator[tuple[Cell, dict[str, Any] | None]]:
    """The cells of a portion that now have a result, each with its result, None if another process wrote it.

    Raises:
      OutOfTime: there is no time for the other cells.
    """
    if budget.left is not None and budget.left <= 0:
        raise OutOfTime
    with ExitStack() as claims:
        # One cell of each group with the same options: the others take over its result later.
        claimed_cells: dict[str, Cell] = {}
        for cell in portion:
            name = claim_name(cell, folders)
            if name not in claimed_cells and claims.enter_context(claimed(cell, folders)):
                claimed_cells[name] = cell
        if not claimed_cells:
            return
        known_results = results.read_results(folders.results)  # read again: other processes add results
        to_run = []
        for cell in claimed_cells.values():
            if results.has_result(folders.results, cell, current=folders.current):
                yield cell, None
            elif (shared := _shared(cell, folders, known_results)) is not None:
                results.write_result(folders.results, cell, shared)
                yield cell, shared
            else:
                to_run.append(cell)
        for cell, result in zip(to_run, _run(to_run, folders, budget, known_results), strict=False):
            results.write_result(folders.results, cell, result)
            yield cell, result


def _shared(cell: Cell, folders: Folders, known_results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The result of another cell with the same options."""
    known_results = [result for result in known_results if results.is_current(result) or not folders.current]
    options = values(*configured(cell, folders.presets))
    return results.repeated(cell, options, known_results, needed(cell.table, folders.expected))


class _Lacking:
    """Whether a cell's data is missing; each data set is tried and reported once."""

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
    cells: Sequence[Cell], folders: Folders, budget: Budget, known_results: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The results of cells that are run together, [] if a process without a claim uses the folder of one.

    Raises:
      OutOfTime: there was no time to begin or to finish them.
    """
    if not cells:
        return []
    begun = all((run_folder(cell, folders) / "config.yaml").is_file() for cell in cells)
    estimates = [typical_seconds(cell, known_results) for cell in cells]
    seconds = None if begun or None in estimates else sum(filter(None, estimates))
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
