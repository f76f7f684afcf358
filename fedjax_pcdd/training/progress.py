"""What a user sees of a run: a bar while it trains, a table at its end."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

SHOWN = ("ga", "pa", "loss")


class Bar(Protocol):
    """What `progress` gives."""

    def __enter__(self) -> "Bar": ...

    def __exit__(self, *error: Any) -> None: ...

    def update(self, row: Mapping[str, Any]) -> None:
        """Show a finished round; what the row does not know (GA without evaluation) stays as it was."""
        ...


def progress(total: int, done: int, quiet: bool, console: Console | None = None) -> Bar:
    """Show how a run proceeds.

    Args:
      total: rounds of the run.
      done: rounds completed before.
      quiet: show nothing.
      console: where to; a bar on a terminal, elsewhere one plain line about every tenth of the rounds.
    """
    console = console or Console()
    if quiet:
        return _Silent()
    return _Terminal(total, done, console) if console.is_terminal else _Lines(total, done, console)


class SweepBar:
    """One bar for the rounds of all runs of a sweep; on a terminal only."""

    def __init__(self, rounds: Mapping[str, int], console: Console):
        """Args: rounds: of each run, by its name."""
        self._rounds, self._done = rounds, dict.fromkeys(rounds, 0)
        shown = TextColumn("{task.description}"), BarColumn(), TextColumn("round {task.completed:.0f}/{task.total:.0f}")
        self._progress = Progress(*shown, TimeRemainingColumn(), console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("sweep", total=sum(rounds.values()))

    @property
    def completed(self) -> int:
        """Rounds of all runs."""
        return sum(self._done.values())

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *error):
        self._progress.stop()

    def of(self, name: str) -> Bar:
        """What the run of this name tells of its rounds."""
        return _Part(self, name)

    def show(self, name: str, done: int) -> None:
        """A run has completed so many rounds."""
        self._progress.update(self._task, advance=done - self._done[name], description=name)
        self._done[name] = done

    def end(self, name: str) -> None:
        """A run is over, whether or not it came to its last round."""
        self.show(name, self._rounds[name])


def final_table(summary: Mapping[str, Any]) -> Table:
    """Best and last GA and PA in percent.

    Args:
      summary: `ga_best`, `ga_best_round`, `ga_last` as shares in [0, 1], and the same for `pa`; None or
        nothing where there is no such value.
    """
    table = Table("accuracy (%)", title_justify="left")
    for heading in ("best", "in round", "last"):
        table.add_column(heading, justify="right")
    for name in ("ga", "pa"):
        best, last = (_percent(summary.get(f"{name}_{which}")) for which in ("best", "last"))
        round = summary.get(f"{name}_best_round")
        table.add_row(name.upper(), best, "-" if round is None else str(round), last)
    return table


def show(summary: Mapping[str, Any], folder: Path, console: Console | None = None) -> None:
    """Print the table and where the files are."""
    console = console or Console()
    console.print(final_table(summary))
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)


class _Silent:
    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def update(self, row):
        pass


class _Part(_Silent):
    def __init__(self, whole: SweepBar, name: str):
        self._whole, self._name = whole, name

    def update(self, row):
        self._whole.show(self._name, row["round"])


class _Terminal:
    def __init__(self, total: int, done: int, console: Console):
        texts = [TextColumn("{task.fields[" + name + "]}") for name in SHOWN]
        rounds = TextColumn("round {task.completed:.0f}/{task.total:.0f}")
        self._progress = Progress(rounds, BarColumn(), *texts, TimeRemainingColumn(), console=console)
        self._task = self._progress.add_task("", total=total, completed=done, **_texts({}))

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *error):
        self._progress.stop()

    def update(self, row):
        known = {name: text for name, text in _texts(row).items() if text}
        self._progress.update(self._task, completed=row["round"], **known)


class _Lines:
    def __init__(self, total: int, done: int, console: Console):
        self._total, self._done, self._console = total, done, console
        self._known: dict[str, Any] = {}

    def __enter__(self):
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error):
        pass

    def update(self, row):
        self._known |= {name: text for name, text in _texts(row).items() if text}
        if row["round"] % max(1, self._total // 10) and row["round"] != self._total:
            return
        words = [f"round {row['round']}/{self._total}", *(self._known[n] for n in SHOWN if n in self._known)]
        words.append(self._left(row["round"]))
        self._console.print("  ".join(words), markup=False, highlight=False, soft_wrap=True)

    def _left(self, round: int) -> str:
        elapsed = time.perf_counter() - self._start
        seconds = math.ceil(elapsed / max(1, round - self._done) * (self._total - round))
        minutes, seconds = divmod(seconds, 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left"


def _texts(row: Mapping[str, Any]) -> dict[str, Any]:
    texts: dict[str, Any] = dict.fromkeys(SHOWN, "")
    for name in ("ga", "pa"):
        if row.get(name) is not None:
            texts[name] = f"{name.upper()} {_percent(row[name])} %"
    if row.get("loss") is not None:
        texts["loss"] = f"loss {row['loss']:.4g}"
    return texts


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"
