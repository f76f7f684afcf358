"""Accuracies from counts, the history of a run (plain data that goes into every checkpoint), and its result.

Letters: K clients, C classes.
"""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedjax_pcdd.methods.method import Method

LAST = 10  # rounds averaged beside best and last


def accuracy(correct: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """Share of correct answers, NaN where there are no samples; both of one shape."""
    correct, samples = np.asarray(correct, float), np.asarray(samples, float)
    return np.divide(correct, samples, out=np.full(correct.shape, np.nan), where=samples > 0)


def mean(values: np.ndarray) -> float | None:
    """Mean without NaN (clients without test samples are left out); None if nothing is left."""
    values = np.asarray(values, float)
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None


def plain(values: np.ndarray) -> list[float | None]:
    """A JSON list; NaN becomes None."""
    return [None if np.isnan(v) else float(v) for v in np.asarray(values, float)]


@dataclass
class History:
    """What is known of a run so far; JSON-able.

    Args:
      rows: one line of metrics.jsonl each.
      pa_clients: [K] accuracy of each client's personal model at its last participation (None: no test samples).
      best_pa_clients: [K] the best of them so far, and the round in which it was reached first.
      ga_of_best: [K] accuracy on the global test set of that best local model, for methods without a global model.
    """

    rows: list[dict] = field(default_factory=list)
    pa_clients: list = field(default_factory=list)
    best_pa_clients: list = field(default_factory=list)
    ga_of_best: list = field(default_factory=list)
    _encoded: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    def to_json(self) -> str:
        """Its fields as a JSON object, for the checkpoint of every round.

        A row must stay as it was when this was first called with it: each is encoded once, since to encode all of them
        every round takes tens of milliseconds after a thousand rounds.
        """
        self._encoded += [json.dumps(row) for row in self.rows[len(self._encoded) :]]
        clients = {name: getattr(self, name) for name in ("pa_clients", "best_pa_clients", "ga_of_best")}
        return f'{{"rows": [{", ".join(self._encoded)}], {json.dumps(clients)[1:]}'

    def update_clients(self, clients: np.ndarray, pa: np.ndarray) -> None:
        """Take over new personal accuracies [n] of some clients [n]."""
        for k, value in zip(clients, plain(pa), strict=True):
            self.pa_clients[k] = value

    def update_best(self, ga_local: np.ndarray | None) -> None:
        """Per client, keep the first round's accuracy that is the best; ga_local [K] goes with it."""
        for k, value in enumerate(self.pa_clients):
            best = self.best_pa_clients[k]
            if value is not None and (best is None or value > best):
                self.best_pa_clients[k] = value
                if ga_local is not None:
                    self.ga_of_best[k] = float(ga_local[k])

    def column(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(rounds, values) of the rows that have a value."""
        pairs = [(row["round"], row[name]) for row in self.rows if row.get(name) is not None]
        return np.array([p[0] for p in pairs], int), np.array([p[1] for p in pairs], float)

    def best(self, name: str) -> tuple[float | None, int | None]:
        """(value, round) of the first round that attains the maximum."""
        rounds, values = self.column(name)
        if not len(values):
            return None, None
        return float(values.max()), int(rounds[values.argmax()])

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
        return mean(np.array([np.nan if v is None else v for v in self.ga_of_best]))


def new_history(clients: int) -> History:
    """The history before the first round of K clients."""
    return History([], [None] * clients, [None] * clients, [None] * clients)


def result(history: History, method: Method) -> dict[str, Any]:
    """Best and last of GA and PA, as summary.json has them before any fine-tuning."""
    (ga_best, ga_round), (pa_best, pa_round) = history.best("ga"), history.best("pa")
    if not method.traits().global_model:
        ga_best, ga_round = history.without_global_model(), None
    return {
        "ga_best": ga_best, "ga_last": history.last("ga"), "pa_best": pa_best, "pa_last": history.last("pa"),
        "ga_best_round": ga_round, "pa_best_round": pa_round,
        "ga_mean_last10": history.mean_last("ga"), "pa_mean_last10": history.mean_last("pa"),
        "pa_protocol": "during training", "pa_best_per_client": history.best_pa_clients,
    }  # fmt: skip
