"""What can be said of a few seeds: paired differences, and whether two orders agree."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata

LEAST_RANKED = 3  # methods that an order is about


class Difference(NamedTuple):
    """A paired difference over seeds, in the unit of its metric.

    Args:
      mean: over the seeds that both have.
      error: standard error of the mean (n - 1), None for one seed.
      seeds: how many pairs.
    """

    mean: float
    error: float | None
    seeds: int

    @property
    def told_apart(self) -> bool:
        """Whether it is at least two standard errors from 0; never for one seed."""
        return self.error is not None and self.mean != 0 and abs(self.mean) >= 2 * self.error

    def against(self, claimed: float) -> str:
        """What it says about a difference with the sign of `claimed`.

        >>> Difference(1.5, 0.5, 3).against(7.0), Difference(-1.5, None, 1).against(7.0)
        ('held', 'one seed, opposite sign')
        """
        same = self.mean * claimed > 0
        if self.error is None:
            return f"one seed, {'same' if same else 'no' if self.mean == 0 else 'opposite'} sign"
        if not self.told_apart:
            return "not distinguishable"
        return "held" if same else "did not hold"

    def __str__(self):
        """As `+1.50 ± 0.25`, the standard error."""
        text = f"{self.mean:+.2f}" + ("" if self.error is None else f" ± {self.error:.2f}")
        return text.replace("-", "−")


VERDICTS = (
    *("held", "not distinguishable", "did not hold"),
    *("one seed, same sign", "one seed, opposite sign", "one seed, no sign"),
)


def difference(higher: Mapping[int, float], lower: Mapping[int, float]) -> Difference | None:
    """The paired difference of two methods' values by seed; None where they share no seed.

    >>> difference({0: 3.0, 1: 5.0}, {0: 2.0, 1: 2.0, 2: 9.0})
    Difference(mean=2.0, error=1.0, seeds=2)
    """
    seeds = sorted(higher.keys() & lower.keys())
    if not seeds:
        return None
    values = np.array([higher[seed] - lower[seed] for seed in seeds])
    error = float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return Difference(float(values.mean()), error, len(values))


def rank_correlation(ours: Sequence[float], paper: Sequence[float]) -> float | None:
    """Spearman's correlation of two columns, ties at their mean rank; None for few or equal values.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    ranks = [rankdata(column) for column in (ours, paper)]
    if len(ours) < LEAST_RANKED or any(np.ptp(rank) == 0 for rank in ranks):
        return None
    return round(float(np.corrcoef(*ranks)[0, 1]), 12)
