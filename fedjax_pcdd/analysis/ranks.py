"""Ranks of methods over several splits, with their uncertainty and groups of indistinguishable methods.

Letters: M methods, B splits, N seeds.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.stats import permutation_test, rankdata, studentized_range, t

from fedjax_pcdd.analysis.curves import new_figure

DRAWS = 2000  # of the bootstrap
ROUNDING = 1e-9  # differences of mean ranks below this are none


class Ranks(NamedTuple):
    """Mean ranks over the splits, 1 for the best; `over` and `p` are None without a baseline."""

    mean: np.ndarray  # [M]
    low: np.ndarray  # [M] lower end of its 95 % interval, at least 1
    high: np.ndarray  # [M] upper end, at most M
    critical: float  # mean ranks that differ by less are not told apart at 5 % (Nemenyi); NaN with one split or method
    over: np.ndarray | None = None  # [M, 2] ends of the interval of the mean rank minus that of the baseline
    p: np.ndarray | None = None  # [M] of these differences, two-sided, for each method alone; NaN for the baseline


def ranks(scores: np.ndarray, baseline: int | None = None) -> Ranks:
    """Mean ranks, with intervals from resampling splits, and seeds within each, with replacement.

    All methods share the draws, so two methods can be compared by the interval of the difference of their mean ranks.
    An interval is Student's with the standard deviation of the draws, widened by sqrt(n / (n - 1)) for n splits, since
    quantiles of so few things drawn again are too narrow. Of a single split n counts the seeds, and the choice of the
    split is not covered. Ranks are whole numbers, so an error counts as at least 1 / n. The p-values are of the exact
    test that flips the signs of the n differences of ranks, which needs no normal differences: of five splits none is
    below 0.06, also where the interval leaves out 0.

    Args:
      scores: [M, B, N], larger is better; -inf for a run that diverged.
      baseline: index of the baseline of `over`.

    >>> one = ranks(np.array([[[3.0, 3.0]], [[1.0, 2.0]]]))
    >>> one.mean.tolist(), one.low.tolist(), one.high.tolist()
    ([1.0, 2.0], [1.0, 1.0], [2.0, 2.0])
    """
    methods, splits, seeds = scores.shape
    rng = np.random.default_rng(0)
    drawn_splits = rng.integers(splits, size=(DRAWS, splits))
    drawn_seeds = rng.integers(seeds, size=(DRAWS, splits, seeds))
    drawn = scores[:, drawn_splits[:, :, None], drawn_seeds].mean(-1)  # [M, DRAWS, B]
    draws, mean = _ranked(drawn).mean(-1), _ranked(scores.mean(-1)).mean(-1)  # [M, DRAWS], [M]
    n = splits if splits > 1 else seeds
    low, high = np.clip(_interval(mean, np.maximum(_error(draws, n), 1 / n), n), 1, methods)
    ranked = Ranks(mean, low, high, critical_difference(methods, splits))
    if baseline is None:
        return ranked
    difference, error = mean - mean[baseline], _error(draws - draws[baseline], n)
    error = np.where(np.arange(methods) == baseline, error, np.maximum(error, 1 / n))
    over = np.clip(_interval(difference, error, n), 1 - methods, methods - 1).T
    ranks_of = _ranked(scores.mean(-1)) if splits > 1 else _ranked(scores[:, 0])  # [M, n]
    p = _p_values(ranks_of - ranks_of[baseline])
    p[baseline] = np.nan
    return ranked._replace(over=over, p=p)


def _error(draws: np.ndarray, n: int) -> np.ndarray:
    """Standard errors [M] of the means of n things with draws [M, DRAWS]; infinite if n is 1."""
    if n == 1:
        return np.full(len(draws), np.inf)
    error = np.sqrt(n / (n - 1)) * draws.std(1)
    return np.where(error < ROUNDING, 0.0, error)


def _interval(mean: np.ndarray, error: np.ndarray, n: int) -> np.ndarray:
    """Ends [2, M] of the 95 % intervals about means [M] of n things with standard errors [M]."""
    half = t.ppf(0.975, max(n - 1, 1)) * error
    return np.stack([mean - half, mean + half])


def _p_values(differences: np.ndarray) -> np.ndarray:
    """Two-sided p-values [M] of differences [M, n] by flipping their signs: each way up to n = 13, then at random."""
    if differences.shape[1] == 1:
        return np.ones(len(differences))
    test = permutation_test(
        (differences,), lambda x, axis: x.mean(axis), permutation_type="samples", vectorized=True, axis=1, rng=0
    )
    return np.array(test.pvalue)


def _ranked(scores: np.ndarray) -> np.ndarray:
    """Ranks along the first axis; scores that are equal but for rounding share their mean rank."""
    return rankdata(-np.round(scores, 12), axis=0)


def critical_difference(methods: int, splits: int) -> float:
    """Critical difference of mean ranks at 5 % (Nemenyi): q sqrt(M (M + 1) / (6 B)), q: studentised range / sqrt 2.

    >>> round(critical_difference(5, 30), 2), round(critical_difference(2, 20), 2)
    (1.11, 0.44)
    """
    if methods < 2 or splits < 2:
        return float("nan")
    q = studentized_range.ppf(0.95, methods, np.inf) / np.sqrt(2)
    return float(q * np.sqrt(methods * (methods + 1) / (6 * splits)))


def cliques(mean: np.ndarray, critical: float) -> list[tuple[int, int]]:
    """First and last of each maximal group of mean ranks [M], ascending, that differ by less than `critical`.

    No groups if `critical` is NaN, as with a single split.

    >>> cliques(np.array([1.0, 1.5, 2.4, 4.0]), 1.0)
    [(0, 1), (1, 2)]
    """
    if np.isnan(critical):
        return []
    ends = [int(np.searchsorted(mean, first + critical)) - 1 for first in mean]
    return [(i, end) for i, end in enumerate(ends) if end > i and (i == 0 or end > ends[i - 1])]


def draw_ranks(names: list[str], ranks: Ranks, path: str | Path) -> None:
    """Write a PNG of mean ranks with their intervals, and a bar beside each group of indistinguishable methods [M]."""
    order = np.argsort(ranks.mean, kind="stable")
    mean, low, high = ranks.mean[order], ranks.low[order], ranks.high[order]
    figure = new_figure(8.0, 1.2 + 0.2 * len(names))
    panel, positions = figure.subplots(), np.arange(len(names))
    panel.errorbar(mean, positions, xerr=np.maximum(0, [mean - low, high - mean]), fmt="o", markersize=4, capsize=2)
    for number, (first, last) in enumerate(cliques(mean, ranks.critical)):
        x = len(names) + 0.6 + 0.25 * (number % 8)
        panel.plot([x, x], [first - 0.2, last + 0.2], color="0.4", linewidth=2, solid_capstyle="butt")
    panel.set_yticks(positions, [names[i] for i in order], fontsize=8, parse_math=False)
    panel.invert_yaxis()
    bars = "" if np.isnan(ranks.critical) else "; bars join what is not told apart at 5 %"
    panel.set_xlabel(f"mean rank over the splits, with 95 % intervals{bars}")
    panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
