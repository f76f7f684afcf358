"""Accuracies from counts, the history of a run (plain data that goes into every checkpoint), and its result.

Letters: K clients, C classes.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods.method import Method
from fedjax_pcdd.registry import from_outside
from fedjax_pcdd.training.protocols import IN_WORDS

LAST = 10  # rounds averaged, reported besides best and last
DIGITS = 9  # after which equal means may differ by floating-point rounding
SELECTED = {"test": "", "validation": "_validation", "test, balanced accuracy": "_balanced"}
"""Criterion that chooses the best round -> suffix of the accuracy's name in the rows."""
CHOSEN_BY = dict(
    zip(SELECTED, ("test samples", "validation samples", "balanced accuracy on test samples"), strict=True)
) | {"validation, GA by test": "validation samples, those of GA by test samples"}
"""What `selection` returns, in words."""
MEASURES = ("ga_best", "ga_last", "pa_best", "pa_last")
"""Entries of a summary that a table of several summaries shows."""
CLIENTS = ("pa_clients", "best_pa_clients", "ga_of_best", "ga_clients")
MOST_WRITTEN = 10_000  # clients; with more, a run writes only the accuracies of those that trained


def accuracy(correct: np.ndarray, samples: np.ndarray | int) -> np.ndarray:
    """Share of correct answers, NaN where there are no samples; `samples` broadcasts to the shape of `correct`."""
    correct, samples = np.asarray(correct, float), np.asarray(samples, float)
    return np.divide(correct, samples, out=np.full(correct.shape, np.nan), where=samples > 0)


def balanced(correct: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Mean recall [..] over the classes that occur in the test samples [.., C] or [C]; NaN where none does."""
    recall = accuracy(correct, samples)
    return accuracy(np.nansum(recall, -1), (~np.isnan(recall)).sum(-1))


def personal(federation: Federation, clients: np.ndarray, correct: np.ndarray) -> dict[str, np.ndarray]:
    """Accuracies [n] of some clients' models: `pa`, `pa_balanced`, and with validation samples `pa_validation`.

    Args:
      clients: [n] their numbers.
      correct: [n, C] correct predictions on the clients' own tests, followed by those on their validation samples.
    """
    tests, validation = np.split(correct, [federation.dataset.num_classes], axis=1)
    shares = {
        "pa": accuracy(tests.sum(1), federation.test_sizes[clients]),
        "pa_balanced": balanced(tests, federation.test_class_counts[clients]),
    }
    if federation.validation is not None:
        shares["pa_validation"] = accuracy(validation.sum(1), federation.validation.sizes[clients])
    return shares


def chosen_by(summaries: Iterable[Mapping[str, Any]]) -> str:
    """What chose the best rounds of runs, in words.

    >>> chosen_by([{"selected_on": "test"}, {"selected_on": "validation"}, {}])
    'test samples or validation samples'
    """
    return " or ".join(CHOSEN_BY.get(criterion, criterion) for criterion in dict.fromkeys(map(selection, summaries)))


def selection(summary: Mapping[str, Any]) -> str:
    """What chose the best rounds of a run: `selected_on`, and beside it what chose those of GA if that is another."""
    criterion, of_ga = str(summary.get("selected_on", "test")), summary.get("ga_best_selected_on")
    return criterion if of_ga in (None, criterion) else f"{criterion}, GA by {of_ga}"


def mean(values: np.ndarray) -> float | None:
    """Mean without NaN (clients without test samples are left out); None if nothing is left."""
    values = np.asarray(values, float)
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None


def spread(pa: Any) -> dict[str, float | None]:
    """How personal accuracies [K] differ: standard deviation over clients, and mean of the worst tenth.

    The worst tenth is at least one client; those without test samples (NaN or None) are left out.

    >>> spread([0.5, None, 1.0])
    {'pa_std': 0.25, 'pa_worst10': 0.5}
    """
    shares = np.sort(np.array(pa, float))
    shares = shares[~np.isnan(shares)]
    if not len(shares):
        return {"pa_std": None, "pa_worst10": None}
    return {"pa_std": float(shares.std()), "pa_worst10": float(shares[: math.ceil(len(shares) / 10)].mean())}


def plain(values: np.ndarray) -> list[float | None]:
    """A JSON list; NaN becomes None."""
    values = np.asarray(values, float)
    numbers = values.tolist()
    return [None if v != v else v for v in numbers] if np.isnan(values).any() else numbers


def _numbers(values: Any) -> np.ndarray:
    """The array that `_encoded` has encoded."""
    if not isinstance(values, dict):
        return np.array(values, float)
    numbers = np.full(values["of"], np.nan)
    numbers[values["clients"]] = values["values"]
    return numbers


def _encoded(values: np.ndarray) -> Any:
    """An array for JSON: a list, or with many clients only the measured values."""
    if len(values) <= MOST_WRITTEN:
        return plain(values)
    measured = np.flatnonzero(~np.isnan(values))
    return {"of": len(values), "clients": measured.tolist(), "values": values[measured].tolist()}


@dataclass(eq=False)
class History:
    """The record of a run so far; JSON-serialisable.

    Args:
      rows: one line of metrics.jsonl each.
      pa_clients: [K] accuracy of each client's personal model at its last participation (NaN: no test samples).
      best_pa_clients: [K] the best of these accuracies so far.
      ga_of_best: [K] accuracy on the global test set of that best local model, for methods without a global model.
      ga_clients: [K] the best accuracy of each client's models on the global test set, for the same methods.
      ga_best_mean: mean over the clients of their models' accuracy on the global test set, in its best round.
      also: further accuracies [K] by name, as `pa_clients`: `pa_balanced`, `pa_validation` with validation samples,
        `pa_last`, `pa_received` and the other protocols of PA that were measured.
      select_on: the criterion that chooses the best round, a key of `SELECTED`.
    """

    rows: list[dict] = field(default_factory=list)
    pa_clients: Any = ()
    best_pa_clients: Any = ()
    ga_of_best: Any = ()
    ga_clients: Any = ()
    ga_best_mean: float | None = None
    also: dict[str, np.ndarray] = field(default_factory=dict)
    select_on: str = "test"
    _encoded: list[str] = field(default_factory=list, init=False, repr=False)
    _highest: dict[str, tuple[int, float]] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self):
        for name in CLIENTS:
            setattr(self, name, _numbers(getattr(self, name)))
        self.also = {name: _numbers(values) for name, values in self.also.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self.to_json() == other.to_json()

    def to_json(self) -> str:
        """Its fields as a JSON object, for a checkpoint.

        A row must not change after the first call that includes it: each is encoded only once, since encoding all of
        them for each checkpoint takes tens of milliseconds after a thousand rounds.
        """
        # A callback may have added numbers of NumPy's or JAX's.
        with from_outside("a callback records what cannot be written"):
            self._encoded += [json.dumps(row, default=lambda x: x.tolist()) for row in self.rows[len(self._encoded) :]]
        clients = {name: _encoded(getattr(self, name)) for name in CLIENTS}
        clients |= {"ga_best_mean": self.ga_best_mean, "select_on": self.select_on}
        clients["also"] = {name: _encoded(values) for name, values in self.also.items()}
        return f'{{"rows": [{", ".join(self._encoded)}], {json.dumps(clients)[1:]}'

    def update_clients(self, clients: np.ndarray, values: np.ndarray, name: str = "") -> None:
        """Record new personal accuracies [n] of some clients [n], or other accuracies by name."""
        accuracies = self.also.setdefault(name, np.full_like(self.pa_clients, np.nan)) if name else self.pa_clients
        accuracies[clients] = values

    def update_best(self, ga_local: np.ndarray | None) -> None:
        """Per client, keep the best accuracy, of equal ones the first, with its `ga_local` [K] of the same round."""
        pa = self.pa_clients
        if ga_local is not None:
            tested = np.where(np.isnan(pa), np.nan, ga_local)
            self.ga_clients = np.fmax(tested, self.ga_clients if len(self.ga_clients) else np.nan)
            means = (mean(tested), self.ga_best_mean)
            self.ga_best_mean = max((value for value in means if value is not None), default=None)
        better = ~np.isnan(pa) & ~(pa <= self.best_pa_clients)
        self.best_pa_clients[better] = pa[better]
        if ga_local is not None:
            self.ga_of_best[better] = ga_local[better]

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(rounds, values) of the rows that have a value; UserError for a name that no row can have."""
        is_metric = name.split("_")[0] in ("ga", "pa", "loss")  # valid even if not measured, such as ga_validation
        if self.rows and not is_metric and not any(name in row for row in self.rows):
            raise UserError(f"no round has '{name}': {nearest(name, self.rows[-1])}")
        pairs = [(row["round"], row[name]) for row in self.rows if row.get(name) is not None]
        return np.array([p[0] for p in pairs], int), np.array([p[1] for p in pairs], float)

    def best(self, name: str) -> tuple[float | None, int | None]:
        """(value, round) of the best round, the first of equal ones; loss by the smallest.

        GA and PA are chosen by `select_on`; PA under a protocol too, in the round of the run's own PA unless the plain
        accuracy on tests chooses it.
        """
        rounds, values = self.column(name)
        scores = np.round(self.column(self._selecting(name))[1], DIGITS)
        if not len(values) or len(scores) != len(values):
            return None, None
        best = scores.argmin() if name == "loss" else scores.argmax()
        return float(values[best]), int(rounds[best])

    def is_best(self, name: str) -> bool:
        """Whether the last row is the first to attain the maximum of `name`, an accuracy.

        As with `to_json`, a row must not change once there is another: only what is new is looked at, since after
        thousands of short rounds a look at all of them takes as long as training.
        """
        if not self.rows:
            return False
        seen, best = self._highest.get(name, (0, -math.inf))
        scores = (row.get(self._selecting(name)) for row in self.rows[seen:])
        *before, last = (-math.inf if score is None else float(np.round(score, DIGITS)) for score in scores)
        best = max([best, *before])
        self._highest[name] = len(self.rows) - 1, best
        return last > best

    def _selecting(self, name: str) -> str:
        """The metric that chooses the best round of `name`."""
        of_protocol = self.select_on != "test" and name.removeprefix("pa_") in IN_WORDS
        selecting = "pa" if of_protocol else name
        return f"{selecting}{SELECTED[self.select_on]}" if selecting in ("ga", "pa") else name

    def last(self, name: str) -> float | None:
        """The last value."""
        values = self.column(name)[1]
        return float(values[-1]) if len(values) else None

    def mean_last(self, name: str) -> float | None:
        """Mean of the last ten values."""
        return mean(self.column(name)[1][-LAST:])


def new_history(clients: int) -> History:
    """The history before the first round of K clients."""
    pa, best_pa, ga_of_best = np.full((3, clients), np.nan)
    return History([], pa, best_pa, ga_of_best)


def result(history: History, method: Method) -> dict[str, Any]:
    """Best and last of GA and PA, as in summary.json before any fine-tuning.

    PA under each measured protocol is `pa_<protocol>_best` and so on; without a name it is that of the run's.
    GA of a further server model is `ga_<name>_last`.
    """
    (ga_best, ga_round), (pa_best, pa_round) = history.best("ga"), history.best("pa")
    extra: dict[str, Any] = {}
    if not method.traits().global_model:
        ga_best, ga_round = mean(history.ga_of_best), None  # the papers' protocol
        extra = {"ga_best_mean": history.ga_best_mean, "ga_best_clients": mean(history.ga_clients)}
        if history.select_on != "test":  # each client's best round is chosen on its own tests, whatever `select_on`
            extra["ga_best_selected_on"] = "test"
    names = [f"{name}_{kind}" for kind in ("balanced", "validation") for name in ("ga", "pa")]
    for name in dict.fromkeys([*names, *history.also]):
        if history.last(name) is not None:
            extra |= {f"{name}_best": history.best(name)[0], f"{name}_last": history.last(name)}
    extra |= {f"{name}_mean_last10": history.mean_last(name) for name in history.also if name not in names}
    for name, value in (history.rows or [{}])[-1].items():  # of further models of the server, and of an ensemble
        if name.startswith("ga_") and isinstance(value, float):
            extra[f"{name}_last"] = value
    return extra | {"selected_on": history.select_on} | {
        "ga_best": ga_best, "ga_last": history.last("ga"), "pa_best": pa_best, "pa_last": history.last("pa"),
        "ga_best_round": ga_round, "pa_best_round": pa_round,
        "ga_mean_last10": history.mean_last("ga"), "pa_mean_last10": history.mean_last("pa"),
        "pa_protocol": "during training", "pa_best_per_client": plain(history.best_pa_clients),
        "pa_best_clients": mean(history.best_pa_clients), **spread(history.pa_clients),
    }  # fmt: skip
