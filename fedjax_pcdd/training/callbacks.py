"""Small callbacks: early stopping, profiling, and the user's own functions."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import jax

from fedjax_pcdd.errors import UserError, shortened
from fedjax_pcdd.methods.declared import check_hooks, misspelt
from fedjax_pcdd.registry import called, takes
from fedjax_pcdd.training.loop import Callback, RoundReport, Run
from fedjax_pcdd.training.metrics import DIGITS


class EarlyStopping(Callback):
    """Ends a run whose accuracy has not risen for a while."""

    def __init__(self, metric: str = "ga", patience: int = 10, least: float = 0.0):
        """Choose when to stop.

        Args:
          metric: "ga" or "pa", or another entry of the history's rows for which higher is better.
          patience: evaluated rounds without a rise after which the run ends, at least 1.
          least: a rise exceeds the best value by more than this; at least 0.

        Raises:
          UserError: a value out of these bounds; an unknown metric only after the first round.
        """
        if not isinstance(patience, Integral) or not isinstance(least, Real):
            raise UserError("early stopping takes a whole number of rounds as patience, and a number as least rise.")
        if patience < 1 or least < 0:
            raise UserError("early stopping needs a patience of at least 1 and a least rise of at least 0.")
        self.metric, self.patience, self.least = metric, patience, least
        self.best, self.waited, self._restored = float("-inf"), 0, False

    def on_start(self, run: Run) -> None:
        """Forget an earlier run, unless the state of this one has just been restored."""
        if not (self._restored and run.round):  # if memory ran out, a run that begins anew restores what was before it
            self.best, self.waited = float("-inf"), 0
        self._restored = False

    def on_round(self, run: Run, report: RoundReport) -> bool:
        """Whether the last `patience` evaluations brought no rise above the best value."""
        row, name = run.history.rows[-1], self.metric
        if name not in row and row["ga"] is not None:
            raise UserError(f"early stopping knows no '{name}': choose one of {', '.join(row)}.")
        value = row.get(name)
        if value is None:
            return False  # this round was not evaluated
        if not isinstance(value, int | float) and getattr(value, "ndim", 1):
            raise UserError(f"early stopping looks at one number, of which '{name}' has several: choose another.")
        value = float(value)  # of a callback it may be a number of NumPy's or JAX's
        rises = round(value - self.best, DIGITS) > self.least
        self.best, self.waited = (value, 0) if rises else (self.best, self.waited + 1)
        return self.waited >= self.patience

    def state(self) -> Any:
        """The best value so far, and the number of evaluations since."""
        return [self.best if self.best > float("-inf") else None, self.waited]

    def restore(self, state: Any) -> None:
        """Continue with the saved value and number of evaluations."""
        best, self.waited = state
        self.best, self._restored = float("-inf") if best is None else best, True


class Profile(Callback):
    """Traces the second and the third round, which compile nothing.

    The folder then holds what TensorBoard's profiler (xprof) reads, and perfetto_trace.json.gz for
    https://ui.perfetto.dev.
    """

    def __init__(self, folder: Path):
        self.folder, self.rounds, self.active = folder, 0, False

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Start tracing after the first round of this process, stop after the third."""
        self.rounds += 1
        if self.rounds == 1 and not run.is_over:
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
            self.active = True
        elif self.rounds == 3:
            self.on_end(run)

    def on_end(self, run: Run) -> None:
        """Write the trace."""
        if self.active:
            self.active = False
            jax.profiler.stop_trace()


class Metrics(Callback):
    """The user's own metrics, besides the accuracies of every evaluated round."""

    def __init__(self, functions: Mapping[str, Callable[[Run], float]]):
        """Args: functions: functions of the run, by the names of their values in the rows."""
        valid = isinstance(functions, Mapping) and all(isinstance(n, str) and callable(f) for n, f in functions.items())
        if not valid:
            raise UserError(f"takes a dictionary of functions of a run by name, not {functions!r}.", field="metrics")
        if reserved := [name for name in functions if name.startswith(("ga_", "pa_"))]:
            raise UserError(f"may not begin with ga_ or pa_, as accuracies do: rename '{reserved[0]}'.", "metrics")
        self.functions, self.lost = functions, list[str]()

    def state(self) -> list[str]:
        """The names, so that a run that goes on without its metrics is told."""
        return sorted(self.functions)

    def restore(self, state: list[str]) -> None:
        """Note those that the run had and that are not measured any more."""
        self.lost = sorted(set(state) - self.functions.keys())

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Add the metrics to the newest row."""
        row = run.history.rows[-1]
        if duplicates := self.functions.keys() & row.keys():
            raise UserError(f"names '{min(duplicates)}', which every row has: choose another name.", field="metrics")
        if row["ga"] is None:
            row |= dict.fromkeys(self.functions)
        else:
            self.complete(run, report)

    def complete(self, run: Run, report: RoundReport) -> None:
        """Measure, and write into the newest row."""
        run.history.rows[-1] |= {name: _number(name, function, run) for name, function in self.functions.items()}


def _number(name: str, function: Callable[[Run], Any], run: Run) -> float:
    value = called(f"metric '{name}'", function, run, of="the run")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise UserError(f"'{name}' must give one number, not {shortened(value)}.", field="metrics") from error


class Function(Callback):
    """A function of the run and the report, called after every round."""

    def __init__(self, function: Callable[[Run, RoundReport], Any]):
        """Args: function: returns True to end the run."""
        self.function = function

    def on_round(self, run: Run, report: RoundReport) -> Any:
        """Call the function."""
        return self.function(run, report)


def as_callbacks(given: Iterable[Any]) -> list[Callback]:
    """The user's callbacks, with functions wrapped as `Function`; UserError for anything else.

    A warning names functions of theirs that the loop does not call, but whose names are almost those of some it does,
    and classes that forget what their checkpoints keep.
    """
    if not isinstance(given, list | tuple):
        raise UserError(f"takes a list of callbacks, not {given!r}.", field="callbacks")
    for callback in given:
        if isinstance(callback, Callback):
            check_hooks(callback)
        elif isinstance(callback, type) or not callable(callback):
            raise UserError(
                f"takes fp.Callback objects and functions of a run and a report, not {callback!r}.", "callbacks"
            )
        elif not takes(callback, 2):
            raise UserError("takes functions of two arguments, a run and a report of its round.", field="callbacks")
    callbacks = [callback if isinstance(callback, Callback) else Function(callback) for callback in given]
    for callback in callbacks:
        for sentence in misspelt(callback, Callback) + _forgets(callback):
            warnings.warn(sentence, stacklevel=3)
    return callbacks


def _forgets(callback: Callback) -> list[str]:
    """A sentence if checkpoints keep the callback's state, but a resumed run does not give it back."""
    name = type(callback).__name__
    keeps = getattr(callback.state, "__func__", None) is not Callback.state
    if not keeps or getattr(callback.restore, "__func__", None) is not Callback.restore:
        return []
    return [f"{name} has a state, but no restore(state) that takes it back when a run is resumed: define one."]
