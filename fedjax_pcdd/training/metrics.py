"""Accuracies from counts, the history of a run (plain data that goes into every checkpoint), and its result.

Letters: K clients, C classes.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods.method import Method

LAST = 10  # rounds averaged beside best and last
SELECTED = {"test": "", "validation": "_validation", "test, balanced accuracy": "_balanced"}
"""What chooses the best round -> end of the name of that accuracy in the rows."""
MEASURES = ("ga_best", "ga_last", "pa_best", "pa_last")
"""Of a summary, what a table of several shows."""
CLIENTS = ("pa_clients", "best_pa_clients", "ga_of_best", "ga_clients")
MOST_WRITTEN = 10_000  # clients, of whose accuracies a run writes those that changed


def accuracy(correct: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Share of correct answers, NaN where there are no samples; both of one shape."""
    correct, samples = np.asarray(correct, float), np.asarray(samples, float)
    return np.divide(correct, samples, out=np.full(correct.shape, np.nan), where=samples > 0)


def balanced(correct: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Mean recall [..] over the classes that occur in the test samples [.., C]; NaN where none does."""
    recall = accuracy(correct, samples)
    return accuracy(np.nansum(recall, -1), (~np.isnan(recall)).sum(-1))


def personal(federation: Federation, clients: np.ndarray, correct: np.ndarray) -> dict[str, np.ndarray]:
    """Accuracies [n] of some clients' models: `pa`, `pa_balanced`, and where there are such samples `pa_validation`.

    Args:
      clients: [n] which.
      correct: [n, C] correct predictions on the own tests, with those on validation samples behind them.
    """
    tests, held = np.split(correct, [federation.dataset.num_classes], axis=1)
    shares = {
        "pa": accuracy(tests.sum(1), federation.test_sizes[clients]),
        "pa_balanced": balanced(tests, federation.test_class_counts[clients]),
    }
    if federation.validation is not None:
        shares["pa_validation"] = accuracy(held.sum(1), federation.validation.sizes[clients])
    return shares


def mean(values: np.ndarray) -> float | None:
    """Mean without NaN (clients without test samples are left out); None if nothing is left."""
    values = np.asarray(values, float)
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None


def spread(pa: Any) -> dict[str, float | None]:
    """How personal accuracies [K] differ: standard deviation over clients, and mean of the worst tenth of them.

    The worst tenth are at least one client; those without test samples (NaN or None) are left out.

    >>> spread([0.5, None, 1.0])
    {'pa_std': 0.25, 'pa_worst10': 0.5}
    """
    known = np.sort(np.array(pa, float))
    known = known[~np.isnan(known)]
    if not len(known):
        return {"pa_std": None, "pa_worst10": None}
    return {"pa_std": float(known.std()), "pa_worst10": float(known[: math.ceil(len(known) / 10)].mean())}


def plain(values: np.ndarray) -> list[float | None]:
    """A JSON list; NaN becomes None."""
    values = np.asarray(values, float)
    known = values.tolist()
    return [None if v != v else v for v in known] if np.isnan(values).any() else known


def _numbers(values: Any) -> np.ndarray:
    """What `_encoded` made of an array."""
    if not isinstance(values, dict):
        return np.array(values, float)
    numbers = np.full(values["of"], np.nan)
    numbers[values["clients"]] = values["values"]
    return numbers


def _encoded(values: np.ndarray) -> Any:
    """An array for JSON: a list, or of many clients those that are known."""
    if len(values) <= MOST_WRITTEN:
        return plain(values)
    known = np.flatnonzero(~np.isnan(values))
    return {"of": len(values), "clients": known.tolist(), "values": values[known].tolist()}


@dataclass(eq=False)
class History:
    """What is known of a run so far; JSON-able.

    Args:
      rows: one line of metrics.jsonl each.
      pa_clients: [K] accuracy of each client's personal model at its last participation (NaN: no test samples).
      best_pa_clients: [K] the best of them so far, and the round in which it was reached first.
      ga_of_best: [K] accuracy on the global test set of that best local model, for methods without a global model.
      ga_clients: [K] the best accuracy of each client's models on the global test set, for the same methods.
      ga_best_mean: best round's mean over the clients of the accuracy of their models on the global test set.
      also: [K] by name, as `pa_clients`: `pa_balanced`, `pa_validation` where there are validation samples, `pa_last`,
        `pa_received` and the other protocols of PA that were measured.
      select_on: what the best round is the best of, a key of `SELECTED`.
    """

    rows: list[dict] = field(default_factory=list)
    pa_clients: Any = ()
    best_pa_clients: Any = ()
    ga_of_best: Any = ()
    ga_clients: Any = ()
    ga_best_mean: float | None = None
    also: dict[str, np.ndarray] = field(default_factory=dict)
    select_on: str = "test"
    _encoded: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self):
        for name in CLIENTS:
            setattr(self, name, _numbers(getattr(self, name)))
        self.also = {name: _numbers(values) for name, values in self.also.items()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, History) and self.to_json() == other.to_json()

    def to_json(self) -> str:
        """Its fields as a JSON object, for the checkpoint of every round.

        A row must stay as it was when this was first called with it: each is encoded once, since to encode all of them
        every round takes tens of milliseconds after a thousand rounds.
        """
        self._encoded += [json.dumps(row) for row in self.rows[len(self._encoded) :]]
        clients = {name: _encoded(getattr(self, name)) for name in CLIENTS}
        clients |= {"ga_best_mean": self.ga_best_mean, "select_on": self.select_on}
        clients["also"] = {name: _encoded(values) for name, values in self.also.items()}
        return f'{{"rows": [{", ".join(self._encoded)}], {json.dumps(clients)[1:]}'

    def update_clients(self, clients: np.ndarray, values: np.ndarray, name: str = "") -> None:
        """Take over new personal accuracies [n] of some clients [n], or others by name."""
        known = self.pa_clients
        if name:
            known = self.also.setdefault(name, np.full(len(self.pa_clients), np.nan))
        known[clients] = values

    def update_best(self, ga_local: np.ndarray | None) -> None:
        """Per client, keep the first round's accuracy that is the best; ga_local [K] goes with it."""
        pa = self.pa_clients
        if ga_local is not None:
            tested = np.where(np.isnan(pa), np.nan, ga_local)
            self.ga_clients = np.fmax(tested, self.ga_clients if len(self.ga_clients) else np.nan)
            means = (mean(tested), self.ga_best_mean)
            self.ga_best_mean = max((one for one in means if one is not None), default=None)
        better = ~np.isnan(pa) & ~(pa <= self.best_pa_clients)
        self.best_pa_clients[better] = pa[better]
        if ga_local is not None:
            self.ga_of_best[better] = ga_local[better]

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(rounds, values) of the rows that have a value; UserError for a name that no row can have."""
        known = name.split("_")[0] in ("ga", "pa", "loss")  # there though not measured, as ga_validation
        if self.rows and not known and not any(name in row for row in self.rows):
            raise UserError(f"no round has '{name}': {nearest(name, self.rows[-1])}")
        pairs = [(row["round"], row[name]) for row in self.rows if row.get(name) is not None]
        return np.array([p[0] for p in pairs], int), np.array([p[1] for p in pairs], float)

    def best(self, name: str) -> tuple[float | None, int | None]:
        """(value, round) of the first round with the largest value, of GA and PA by what selects; smallest of loss."""
        rounds, values = self.column(name)
        selecting = f"{name}{SELECTED[self.select_on]}" if name in ("ga", "pa") else name
        scores = self.column(selecting)[1]
        if not len(values) or len(scores) != len(values):
            return None, None
        best = scores.argmin() if name == "loss" else scores.argmax()
        return float(values[best]), int(rounds[best])

    def is_best(self, name: str) -> bool:
        """Whether the last row is the first to attain the maximum."""
        return bool(self.rows) and self.best(name)[1] == self.rows[-1]["round"]

    def last(self, name: str) -> float | None:
        """The last value."""
        values = self.column(name)[1]
        return float(values[-1]) if len(values) else None

    def mean_last(self, name: str) -> float | None:
        """Mean of the last ten values."""
        return mean(self.column(name)[1][-LAST:])

    def without_global_model(self) -> float | None:
        """GA by the papers' protocol: mean over clients of the best local model on the global test set."""
        return mean(self.ga_of_best)


def new_history(clients: int) -> History:
    """The history before the first round of K clients."""
    nothing = np.full((3, clients), np.nan)
    return History([], nothing[0], nothing[1], nothing[2])


def result(history: History, method: Method) -> dict[str, Any]:
    """Best and last of GA and PA, as summary.json has them before any fine-tuning.

    PA under each protocol that was measured is `pa_<protocol>_best` and so on; without a name it is that of the run's.
    GA of a further model of the server is `ga_<name>_last`.
    """
    (ga_best, ga_round), (pa_best, pa_round) = history.best("ga"), history.best("pa")
    more: dict[str, Any] = {}
    if not method.traits().global_model:
        ga_best, ga_round = history.without_global_model(), None
        own = mean(np.array(history.ga_clients, float))
        more = {"ga_best_mean": history.ga_best_mean, "ga_best_clients": own}
        if history.select_on != "test":  # each client's best round is that of its own tests, whatever selects
            more["ga_best_selected_on"] = "test"
    names = [f"{name}_{kind}" for kind in ("balanced", "validation") for name in ("ga", "pa")]
    for name in dict.fromkeys([*names, *history.also]):
        if history.last(name) is not None:
            more |= {f"{name}_best": history.best(name)[0], f"{name}_last": history.last(name)}
    for name in (name for name in history.also if name not in names):
        more[f"{name}_mean_last10"] = history.mean_last(name)
    for name, value in (history.rows or [{}])[-1].items():  # of further models of the server, and of an ensemble
        if name.startswith("ga_") and isinstance(value, float):
            more[f"{name}_last"] = value
    return more | {"selected_on": history.select_on} | {
        "ga_best": ga_best, "ga_last": history.last("ga"), "pa_best": pa_best, "pa_last": history.last("pa"),
        "ga_best_round": ga_round, "pa_best_round": pa_round,
        "ga_mean_last10": history.mean_last("ga"), "pa_mean_last10": history.mean_last("pa"),
        "pa_protocol": "during training", "pa_best_per_client": plain(history.best_pa_clients),
        "pa_best_clients": mean(history.best_pa_clients), **spread(history.pa_clients),
    }  # fmt: skip
