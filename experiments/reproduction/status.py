"""The progress of plans in one line: what is done and left, the time still needed, and which process runs what."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reproduction import results
from reproduction.cells import Folders
from reproduction.plan import Cell, Plan
from reproduction.session import unfinished
from reproduction.sharing import running


def status_line(plans: Sequence[Plan], folders: Folders) -> str:
    """The state of some plans, one after another, as `cpu: 3 of 4 cells done, 1 left, about 0.1 hours; none runs`."""
    known_results = results.read_results(folders.results)
    states, running_cells = [], []
    for plan in plans:
        remaining = unfinished(plan.cells, folders)
        states.append(f"{plan.scale}: {_state(plan, remaining, known_results, folders)}")
        running_cells += running(remaining, folders)
    runs = ", ".join(f"{cell.table} {cell.name} by {process}" for cell, process in running_cells)
    return "; ".join([*states, f"running: {runs}" if runs else "none runs"])


def _state(plan: Plan, remaining: Sequence[Cell], known_results: Sequence[dict[str, Any]], folders: Folders) -> str:
    paths = [results.result_path(folders.results, cell) for cell in plan.cells]
    failed = sum(results.read_result(path)["status"] == "failed" for path in paths if path.is_file())
    done = f"{len(plan.cells) - len(remaining)} of {len(plan.cells)} cells done" + f" ({failed} failed)" * bool(failed)
    if not remaining:
        return done
    seconds = expected_seconds(remaining, known_results)
    time = "time not known" if seconds is None else f"about {seconds / 3600:.1f} hours of a process"
    return f"{done}, {len(remaining)} left, {time}"


def left_over(plan: Plan, folder: Path) -> str:
    """A sentence about the cells of a plan that have no result in a folder, "" if all have one."""
    left = [cell for cell in plan.cells if not results.has_result(folder, cell)]
    parts = Counter(" ".join(filter(None, (cell.table, cell.split, cell.tag))) for cell in left)
    named = ", ".join(f"{part} ({count})" for part, count in parts.items())
    return f"{len(left)} of the {len(plan.cells)} cells of its plan were not run yet: {named}." if left else ""


def expected_seconds(left: Sequence[Cell], known: Sequence[dict[str, Any]]) -> float | None:
    """Seconds for these cells one after another, each taking the mean of its table's finished cells.

    If the table has none yet, the mean of its scale is used; None if the scale has none either.
    """
    of_scale: dict[str, list[float]] = {}
    of_table: dict[tuple[str, str], list[float]] = {}
    for result in known:
        if "seconds" in result and "same_run_as" not in result:
            of_scale.setdefault(result["scale"], []).append(result["seconds"])
            of_table.setdefault((result["scale"], result["table"]), []).append(result["seconds"])
    durations = [of_table.get((cell.scale, cell.table)) or of_scale.get(cell.scale) for cell in left]
    if not all(durations):
        return None
    return sum(fmean(seconds) for seconds in durations if seconds)
