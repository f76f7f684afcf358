"""What can be said of a few seeds: paired differences, with an interval and tests.

Two experiments are compared pair by pair of the same seed, so that what the seed decides (partition, initial weights,
batches) drops out. The interval is Student's, which is as wide as few pairs ask for; of one pair only the sign is said.
Where several comparisons are one question, their p-values are adjusted by Holm ("A simple sequentially rejective
multiple test procedure", Scandinavian Journal of Statistics, 1979).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

ALPHA = 0.05
DIGITS = 9  # beyond which equal numbers differ by the rounding of floats
LEAST_WILCOXON = 6  # pairs below which the rank test cannot reach p <= 0.05


class Difference(NamedTuple):
    """A paired difference over seeds, in the unit of its metric.

    Args:
      mean: over the seeds that both have.
      error: standard error of the mean, None for one pair.
      seeds: of the pairs.
      low, high: Student's interval of the mean, None for one pair.
      p: of the paired t-test, two-sided; where all differences are equal, of the sign test. None for one pair.
      rank_p: of Wilcoxon's signed-rank test, two-sided; None below `LEAST_WILCOXON` pairs and where all are equal.
      mixed: pairs whose two runs were on different processors, where somebody counts them.
    """

    mean: float
    error: float | None
    seeds: tuple[int, ...]
    low: float | None = None
    high: float | None = None
    p: float | None = None
    rank_p: float | None = None
    mixed: int = 0

    @property
    def side(self) -> str:
        """Where the mean lies."""
        return "above" if self.mean > 0 else "below" if self.mean < 0 else "equal"

    def verdict(self, alpha: float = ALPHA) -> str:
        """What the t-test says.

        >>> Difference(1.5, None, (0,)).verdict(), Difference(1.5, 0.1, (0, 1, 2), p=0.01).verdict()
        ('one seed, above', 'above')
        """
        if self.p is None:
            return f"one seed, {self.side}"
        return self.side if self.p <= alpha and self.mean else "not distinguishable"

    @property
    def mark(self) -> str:
        """As ` †2` where two pairs are mixed."""
        return f" †{self.mixed}" if self.mixed else ""

    def __str__(self):
        """As `+1.50 ± 0.25`, the standard error, and the mark of mixed pairs."""
        return signed(self.mean) + ("" if self.error is None else f" ± {self.error:.2f}") + self.mark


def signed(value: float) -> str:
    """Two digits and a sign that is as wide as a digit.

    >>> signed(-1.5)
    '−1.50'
    """
    return f"{value:+.2f}".replace("-", "−")


def paired(higher: Mapping[int, float], lower: Mapping[int, float], confidence: float = 1 - ALPHA) -> Difference | None:
    """The paired difference of two experiments' values by seed; None where they share no seed.

    Args:
      higher, lower: value by seed; the difference is the first less the second, and what is not finite is left out.
      confidence: of the interval, in (0, 1).

    >>> one = paired({0: 3.0, 1: 5.0}, {0: 2.0, 1: 2.0, 2: 9.0})
    >>> one.mean, one.error, one.seeds
    (2.0, 1.0, (0, 1))
    """
    seeds = tuple(seed for seed in sorted(higher.keys() & lower.keys()) if np.isfinite(higher[seed] - lower[seed]))
    if not seeds:
        return None
    values = np.array([higher[seed] - lower[seed] for seed in seeds], float)
    centre, n = float(values.mean()), len(values)
    if n == 1:
        return Difference(centre, None, seeds)
    if np.allclose(values, centre, rtol=1e-9, atol=1e-12):  # no spread that a t-test could judge by
        return Difference(centre, 0.0, seeds, centre, centre, 0.5 ** (n - 1) if centre else 1.0)
    from scipy import stats  # half a second, which tables can do without

    test: Any = stats.ttest_1samp(values, 0.0)  # scipy's results are not typed
    low, high = test.confidence_interval(confidence)
    ranks: Any = stats.wilcoxon(np.round(values, DIGITS)) if n >= LEAST_WILCOXON else None
    rank_p = None if ranks is None else float(ranks.pvalue)
    return Difference(centre, float(stats.sem(values)), seeds, float(low), float(high), float(test.pvalue), rank_p)


def family(differences: Sequence[Difference | None]) -> list[Difference | None]:
    """Comparisons of one family, their p-values adjusted by Holm; those of a single pair count for nothing."""
    columns = [_holm([None if one is None else getattr(one, name) for one in differences]) for name in ("p", "rank_p")]
    return [
        None if one is None else one._replace(p=p, rank_p=rank_p)
        for one, p, rank_p in zip(differences, *columns, strict=True)
    ]


def _holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjusted p-values.

    >>> _holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    known = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, i) in enumerate(known):
        least = max(least, min(1.0, p * (len(known) - rank)))
        adjusted[i] = least
    return adjusted
