"""How far plans are, in one line: what is done and left, the time that it needs, and who runs what."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from reproduction import results
from reproduction.cells import Folders
from reproduction.plan import Cell, Plan
from reproduction.session import unfinished
from reproduction.sharing import running


def status_line(plans: Sequence[Plan], folders: Folders) -> str:
    """The state of some plans, one after another, as `cpu: 3 of 4 cells done, 1 left, about 0.1 hours; none runs`."""
    known = results.read_results(folders.results)
    parts, at_work = [], []
    for plan in plans:
        left = unfinished(plan.cells, folders)
        parts.append(f"{plan.scale}: {_state(plan, left, known, folders)}")
        at_work += running(left, folders)
    runs = ", ".join(f"{cell.table} {cell.name} by {by}" for cell, by in at_work)
    return "; ".join([*parts, f"running: {runs}" if runs else "none runs"])


def _state(plan: Plan, left: Sequence[Cell], known: Sequence[dict[str, Any]], folders: Folders) -> str:
    paths = [results.result_path(folders.results, cell) for cell in plan.cells]
    failed = sum(results.read_result(path)["status"] == "failed" for path in paths if path.is_file())
    done = f"{len(plan.cells) - len(left)} of {len(plan.cells)} cells done" + (f" ({failed} failed)" if failed else "")
    if not left:
        return done
    seconds = expected_seconds(left, known)
    time = "time not known" if seconds is None else f"about {seconds / 3600:.1f} hours of a process"
    return f"{done}, {len(left)} left, {time}"


def expected_seconds(left: Sequence[Cell], known: Sequence[dict[str, Any]]) -> float | None:
    """Of these cells one after another, each as long as the mean of its table's finished ones; None without any.

    Where its table has none yet, the mean of the scale's counts.
    """
    of_scale: dict[str, list[float]] = {}
    of_table: dict[tuple[str, str], list[float]] = {}
    for one in known:
        if "seconds" in one and "same_run_as" not in one:
            of_scale.setdefault(one["scale"], []).append(one["seconds"])
            of_table.setdefault((one["scale"], one["table"]), []).append(one["seconds"])
    usual = [of_table.get((cell.scale, cell.table)) or of_scale.get(cell.scale) for cell in left]
    if not all(usual):
        return None
    return sum(fmean(seconds) for seconds in usual if seconds)
