"""Statistics of a few seeds: paired differences, with an interval and tests.

Two experiments are compared in pairs of the same seed, so that what the seed decides (partition, initial weights,
batches) cancels out. The interval is Student's, which is as wide as so few pairs require; for one pair only the sign is
given. If several comparisons answer one question, their p-values are adjusted by Holm ("A simple sequentially rejective
multiple test procedure", Scandinavian Journal of Statistics, 1979).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_pcdd.training.metrics import DIGITS

ALPHA = 0.05
LEAST_WILCOXON = 6  # pairs below which the rank test cannot reach p <= 0.05


class Difference(NamedTuple):
    """A paired difference over seeds, in the unit of its metric.

    P-values are two-sided: `p` of the paired t-test, or of the sign test where all differences are equal, None for one
    pair; `rank_p` of Wilcoxon's signed-rank test, None below `LEAST_WILCOXON` pairs and where all are equal.
    """

    mean: float  # over the seeds that both have
    error: float | None  # standard error of the mean, None for one pair
    seeds: tuple[int, ...]  # of the pairs
    low: float | None = None  # Student's interval of the mean, None for one pair
    high: float | None = None
    p: float | None = None
    rank_p: float | None = None
    mixed: int = 0  # pairs whose two runs were on different processors, if the caller counts them

    def verdict(self, alpha: float = ALPHA) -> str:
        """The verdict of the t-test.

        >>> Difference(1.5, None, (0,)).verdict(), Difference(1.5, 0.1, (0, 1, 2), p=0.01).verdict()
        ('one seed, above', 'above')
        """
        side = "above" if self.mean > 0 else "below" if self.mean < 0 else "equal"
        if self.p is None:
            return f"one seed, {side}"
        return side if self.p <= alpha and self.mean else "not distinguishable"

    @property
    def mark(self) -> str:
        """The mark of mixed pairs, such as ` †2` for two of them."""
        return f" †{self.mixed}" if self.mixed else ""

    def __str__(self):
        """Mean and standard error as `+1.50 ± 0.25`, and the mark of mixed pairs."""
        return signed(self.mean) + ("" if self.error is None else f" ± {self.error:.2f}") + self.mark


def signed(value: float) -> str:
    """A number with two decimals and a sign that is as wide as a digit.

    >>> signed(-1.5)
    '−1.50'
    """
    return f"{value:+.2f}".replace("-", "−")


def paired(higher: Mapping[int, float], lower: Mapping[int, float], confidence: float = 1 - ALPHA) -> Difference | None:
    """The paired difference of two experiments' values by seed; None if they share no seed.

    Args:
      higher, lower: value by seed; the difference is the first minus the second, without pairs that are not finite.
      confidence: of the interval, in (0, 1).

    >>> one = paired({0: 3.0, 1: 5.0}, {0: 2.0, 1: 2.0, 2: 9.0})
    >>> one.mean, one.error, one.seeds
    (2.0, 1.0, (0, 1))
    """
    seeds = tuple(seed for seed in sorted(higher.keys() & lower.keys()) if np.isfinite(higher[seed] - lower[seed]))
    if not seeds:
        return None
    values = np.round([higher[seed] - lower[seed] for seed in seeds], DIGITS)  # without what rounding left of zeros
    centre, n = float(values.mean()), len(values)
    if n == 1:
        return Difference(centre, None, seeds)
    if np.allclose(values, centre, rtol=1e-9, atol=1e-12):  # no spread for a t-test
        return Difference(centre, 0.0, seeds, centre, centre, 0.5 ** (n - 1) if centre else 1.0)
    from scipy import stats  # importing it takes half a second, which not every table needs

    test: Any = stats.ttest_1samp(values, 0.0)  # scipy's results are not typed
    low, high = test.confidence_interval(confidence)
    ranks: Any = stats.wilcoxon(values) if n >= LEAST_WILCOXON else None
    rank_p = None if ranks is None else float(ranks.pvalue)
    return Difference(centre, float(stats.sem(values)), seeds, float(low), float(high), float(test.pvalue), rank_p)


def family(differences: Sequence[Difference | None]) -> list[Difference | None]:
    """Comparisons of one family, with p-values adjusted by Holm; those of a single pair do not count."""
    columns = [holm([None if x is None else getattr(x, name) for x in differences]) for name in ("p", "rank_p")]
    return [
        None if difference is None else difference._replace(p=p, rank_p=rank_p)
        for difference, p, rank_p in zip(differences, *columns, strict=True)
    ]


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """P-values adjusted by Holm's method.

    >>> holm([0.01, None, 0.04, 0.03])
    [0.03, None, 0.06, 0.06]
    """
    ascending = sorted((p, i) for i, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    least = 0.0
    for rank, (p, i) in enumerate(ascending):
        least = max(least, min(1.0, p * (len(ascending) - rank)))
        adjusted[i] = least
    return adjusted
