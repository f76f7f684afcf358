"""What a difference over seeds says about a claim of a paper, and whether our order of methods is the paper's."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_pcdd.report.statistics import Difference

LEAST_RANKED = 3  # fewest methods that can be ranked
VERDICTS = (
    *("held", "not distinguishable", "did not hold"),
    *("one seed, same sign", "one seed, opposite sign", "one seed, no sign"),
)

UNLIKE = "different quantities"  # in place of a verdict


def against(difference: Difference, claimed: float) -> str:
    """What a difference says about a claimed one with the sign of `claimed`: one of `VERDICTS`.

    >>> against(Difference(1.5, 0.1, (0, 1, 2), p=0.01), 7.0), against(Difference(-1.5, None, (1,)), 7.0)
    ('held', 'one seed, opposite sign')
    """
    same = difference.mean * claimed > 0
    if difference.p is None:
        return f"one seed, {'same' if same else 'opposite' if difference.mean else 'no'} sign"
    verdict = difference.verdict()
    return ("held" if same else "did not hold") if verdict in ("above", "below") else verdict


def rank_correlation(ours: Sequence[float], paper: Sequence[float]) -> float | None:
    """Spearman's correlation of two columns, ties at their mean rank; None if a column is too short or constant.

    >>> rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0])
    0.5
    """
    if len(ours) < LEAST_RANKED or any(np.ptp(column) == 0 for column in (ours, paper)):
        return None
    from scipy import stats

    correlation: Any = stats.spearmanr(ours, paper)
    return round(float(correlation.statistic), 12)
