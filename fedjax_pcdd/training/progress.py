"""What the user sees of a run: a progress bar during training, a table at its end."""

import math
import re
import time
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedjax_pcdd.errors import yes_or_no
from fedjax_pcdd.screen import Screen
from fedjax_pcdd.training.callbacks import Function
from fedjax_pcdd.training.loop import Callback, RoundReport, Run

IN_TRAINING = "PA in training"


class CellBar:
    """A bar in the output of a notebook's cell, updated in place."""

    def __init__(self):
        self._shown = None

    def show(self, done: int, total: int, text: str) -> None:
        """Draw the bar, with a text beside it."""
        from IPython.display import display  # pyright: ignore[reportMissingImports] -- a notebook has it

        html = f'<progress max="{total}" value="{done}"></progress> {escape(text)}'
        data = {"text/plain": text, "text/html": html}
        if self._shown is None:
            self._shown = display(data, raw=True, display_id=True)
        else:
            self._shown.update(data, raw=True)


class _Bar:
    """Rounds out of a total, drawn on a terminal or in a notebook's cell; elsewhere nothing is drawn."""

    def __init__(self, console: Console, cell: CellBar | None):
        rounds = TextColumn("round {task.completed:.0f}/{task.total:.0f}")
        columns = rounds, BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._cell = cell

    def start(self, total: int, done: int = 0) -> None:
        self._total, self._first, self._begun = total, done, time.perf_counter()
        self._task = self._progress.add_task("", total=total, completed=done)
        self._progress.start()

    def show(self, done: int, text: str) -> str:
        """Draw the bar; returns what it shows as a line of text."""
        self._progress.update(self._task, completed=done, description=text)
        line = f"round {done}/{self._total}  {text}  {self._left(done)}"
        if self._cell:
            self._cell.show(done, self._total, line)
        return line

    def stop(self) -> None:
        self._progress.stop()

    def _left(self, done: int) -> str:
        """The remaining time, if rounds take as long as those so far."""
        elapsed = time.perf_counter() - self._begun
        seconds = math.ceil(elapsed / max(1, done - self._first) * (self._total - done))
        minutes, seconds = divmod(seconds, 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left"


class RunBar(Callback):
    """A bar on a terminal or in a notebook; elsewhere one plain line after about every tenth of the rounds."""

    def __init__(self, console: Console | None = None):
        self._console = console or Screen()
        self._bar = _Bar(self._console, CellBar() if self._console.is_jupyter else None)
        self._known: dict[str, Any] = {}

    def on_start(self, run: Run) -> None:
        """Draw the rounds that are done."""
        self._bar.start(run.rounds, run.round)

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Draw the round; values that a round without evaluation does not have stay as they were."""
        self._known |= {name: value for name, value in run.history.rows[-1].items() if value is not None}
        line = self._bar.show(run.round, _accuracies(self._known))
        in_lines = not (self._console.is_terminal or self._console.is_jupyter)
        if in_lines and (run.round % max(1, run.rounds // 10) == 0 or run.is_over):
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def on_end(self, run: Run) -> None:
        """Stop the bar, which stays as it is."""
        self._bar.stop()


def bars(progress: Any) -> list[Callback]:
    """The bar of a run as a list of callbacks, if asked for; UserError if `progress` is neither True nor False."""
    return [RunBar()] if yes_or_no(progress, "progress") else []


class SweepBar:
    """One bar for the rounds of all runs of a sweep; on a terminal or in a notebook only."""

    def __init__(self, rounds: Mapping[str, int], console: Console, cell: CellBar | None = None):
        """Args: rounds: number of rounds of each run, by its name; cell: the bar in a notebook."""
        self._rounds, self._done = rounds, dict.fromkeys(rounds, 0)
        self._bar = _Bar(console, cell)

    def __enter__(self):
        self._bar.start(sum(self._rounds.values()))
        return self

    def __exit__(self, *error):
        self._bar.stop()

    def show(self, name: str, done: int) -> None:
        """Show that a run has completed this many rounds."""
        self._done[name] = done
        self._bar.show(sum(self._done.values()), name)

    def part(self, name: str) -> Callback:
        """A callback that shows the rounds of one run."""
        return Function(lambda run, report: self.show(name, run.round))

    def end(self, name: str) -> None:
        """Show that a run is over, whether or not it came to its last round."""
        self.show(name, self._rounds[name])


def final_table(summary: Mapping[str, Any]) -> Table:
    """Best and last GA and PA in percent, from a summary's shares in [0, 1]; "-" for what is None or missing there."""
    table = Table("accuracy (%)", title_justify="left")
    for heading in ("best", "in round", "last", "std over clients", "worst tenth"):
        table.add_column(heading, justify="right")
    spread = [_percent(summary.get(f"pa_{n}")) for n in ("std", "worst10")]
    for heading, name in {"GA": "ga", **pa_entries(summary)}.items():
        best, last = (_percent(summary.get(f"{name}_{which}")) for which in ("best", "last"))
        round = summary.get(f"{name}_best_round")
        cells = spread if name == "pa" else ["-", "-"]
        table.add_row(heading, best, "-" if round is None else str(round), last, *cells)
    return table


def pa_name(summary: Mapping[str, Any]) -> str:
    """The name of PA in a summary, which tells it from PA measured at another time.

    >>> pa_name({"pa_protocol": "global model fine-tuned for 10 epochs"}), pa_name({"pa_protocol": "during training"})
    ('PA after fine-tuning', 'PA in training')
    """
    protocol = str(summary.get("pa_protocol"))
    if "fine-tuned" in protocol:
        return "PA after fine-tuning"
    return IN_TRAINING if protocol.startswith("during training") else "PA"


def tuned_epochs(summary: Mapping[str, Any]) -> int | None:
    """Epochs for which the global model is fine-tuned before PA, None if it is not."""
    match = re.match(r"global model fine-tuned for (\d+) epochs", str(summary.get("pa_protocol")))
    return int(match[1]) if match else None


def pa_epochs(summary: Mapping[str, Any], local_epochs: int | None) -> int | None:
    """Local epochs between the server's model and the test of PA; None if the protocol fixes no number.

    >>> pa_epochs({"pa_protocol": "during training"}, 2), pa_epochs({"pa_protocol": "global model as received"}, 2)
    (2, None)
    >>> pa_epochs({"pa_protocol": "global model fine-tuned for 10 epochs, best epoch of each client"}, 2)
    10
    """
    return tuned_epochs(summary) or (local_epochs if pa_name(summary) == IN_TRAINING else None)


def pa_entries(summary: Mapping[str, Any]) -> dict[str, str]:
    """The prefix of the PA entries in a summary, by the name of that PA; the first is that of the run's protocol.

    >>> pa_entries({"pa_protocol": "global model fine-tuned for 10 epochs", "pa_local_best": 0.5})
    {'PA after fine-tuning': 'pa', 'PA in training': 'pa_local'}
    """
    return {pa_name(summary): "pa"} | ({IN_TRAINING: "pa_local"} if "pa_local_best" in summary else {})


def pa_names(summaries: Iterable[Mapping[str, Any]]) -> list[str]:
    """The distinct names of PA in summaries; those without PA, as of failed runs, count only if none has PA."""
    listed = list(summaries)
    return list(dict.fromkeys(map(pa_name, filter(_has_pa, listed) if any(map(_has_pa, listed)) else listed)))


def _has_pa(summary: Mapping[str, Any]) -> bool:
    return any(value not in (None, "") for name, value in summary.items() if name.startswith("pa_"))


def with_pa_named(heading: str, summaries: Iterable[Mapping[str, Any]]) -> str:
    """A heading in which PA has its name from `pa_name`; if the summaries have several, all of these.

    >>> training, tuned = {"pa_protocol": "during training"}, {"pa_protocol": "global model fine-tuned for 2 epochs"}
    >>> with_pa_named("PA best", [training]), with_pa_named("PA best", [training, tuned])
    ('PA in training best', 'PA (in training, after fine-tuning) best')
    >>> with_pa_named("PA best", [training, {"pa_protocol": "", "pa_best": None}])  # of an experiment that failed
    'PA in training best'
    """
    names = pa_names(summaries)
    if len(names) < 2:
        return heading.replace("PA", names[0]) if names else heading
    kinds = ", ".join(name.removeprefix("PA").strip() or "otherwise" for name in names)
    return heading.replace("PA", f"PA ({kinds})")


def show(summary: Mapping[str, Any], folder: Path, console: Console | None = None) -> None:
    """Print the table and where the files are."""
    console = console or Screen()
    console.print(final_table(summary))
    console.print(f"written to {folder}", markup=False, highlight=False, soft_wrap=True)


def _accuracies(row: Mapping[str, Any]) -> str:
    """GA, PA and loss in words, those that a row has."""
    texts = [f"{name} {_percent(row[key])} %" for key, name in (("ga", "GA"), ("pa", IN_TRAINING)) if key in row]
    return "  ".join([*texts, f"loss {row['loss']:.4g}"] if "loss" in row else texts)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"
