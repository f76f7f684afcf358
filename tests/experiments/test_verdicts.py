"""The verdict on a claim from a measured difference, and the rank correlation of two orders."""

import numpy as np
import pytest
from scipy import stats

from fedjax_pcdd.report.statistics import Difference
from reproduction.verdicts import VERDICTS, against, rank_correlation


@pytest.mark.parametrize(
    ("mean", "p", "claimed", "verdict"),
    [
        (2.0, 0.04, 5.0, "held"), (-2.0, 0.04, -5.0, "held"), (-2.0, 0.04, 5.0, "did not hold"),
        (2.0, 0.06, 5.0, "not distinguishable"), (0.0, 1.0, 5.0, "not distinguishable"),
        (9.0, None, 5.0, "one seed, same sign"), (-9.0, None, 5.0, "one seed, opposite sign"),
        (0.0, None, 5.0, "one seed, no sign"),
    ],
)  # fmt: skip
def test_the_verdict_on_a_claim_follows_from_sign_and_p_value(mean, p, claimed, verdict):
    difference = Difference(mean, None if p is None else 1.0, (0,) if p is None else (0, 1, 2), p=p)
    assert against(difference, claimed) == verdict
    assert verdict in VERDICTS


def test_the_rank_correlation_is_spearmans_also_with_ties():
    ours, paper = np.random.default_rng(0).integers(0, 6, (2, 12))
    assert rank_correlation(list(ours), list(paper)) == pytest.approx(stats.spearmanr(ours, paper).statistic)


@pytest.mark.parametrize("ours", [[1.0, 2.0], [3.0, 3.0, 3.0]])
def test_too_few_or_equal_values_have_no_rank_correlation(ours):
    assert rank_correlation(ours, list(range(len(ours)))) is None
