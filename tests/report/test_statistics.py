"""Statistics over a few seeds: Student's interval, rank test and Holm's adjustment."""

import numpy as np
import pytest
from scipy import stats

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.statistics import LEAST_WILCOXON, family, paired
from fedjax_pcdd.report.tables import between


def difference(*values):
    """The paired difference of these values, one per seed, to zeros."""
    return paired(dict(enumerate(values)), dict.fromkeys(range(len(values)), 0.0))


def test_differences_are_paired_by_seed():
    result = paired({0: 52.0, 1: 64.0, 2: 1.0}, {1: 60.0, 0: 50.0, 5: 99.0})
    assert (result.mean, result.error, result.seeds) == (3.0, pytest.approx(1.0), (0, 1))


def test_experiments_without_a_common_seed_have_no_difference():
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_the_interval_and_p_are_students():
    values = np.random.default_rng(1).normal(1.0, 2.0, 5)
    result, margin = difference(*values), stats.t.ppf(0.975, 4) * stats.sem(values)
    assert (result.low, result.high) == (pytest.approx(values.mean() - margin), pytest.approx(values.mean() + margin))
    assert result.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)


def test_the_interval_is_as_wide_as_the_confidence_asks():
    values = np.random.default_rng(1).normal(1.0, 2.0, 5)
    result = paired(dict(enumerate(values)), dict.fromkeys(range(5), 0.0), 0.8)
    margin = stats.t.ppf(0.9, 4) * stats.sem(values)
    assert (result.low, result.high) == (pytest.approx(values.mean() - margin), pytest.approx(values.mean() + margin))


@pytest.mark.thorough
def test_an_interval_covers_the_truth_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(3.0, 1.0, (2000, 3))
    covered = np.mean([result.low <= 3.0 <= result.high for result in (difference(*values) for values in draws)])
    assert covered == pytest.approx(0.95, abs=0.015)


def test_the_rank_test_needs_enough_pairs_to_be_conclusive():
    few, many = difference(*range(1, LEAST_WILCOXON)), difference(*range(1, LEAST_WILCOXON + 1))
    assert few.rank_p is None
    assert many.rank_p == pytest.approx(2 / 2**LEAST_WILCOXON)


def test_what_rounding_leaves_of_zero_is_no_difference():
    one = paired({seed: 50.0 + 1e-11 * seed for seed in range(6)}, dict.fromkeys(range(6), 50.0))
    assert (one.mean, one.p) == (0.0, 1.0)


def test_differences_equal_up_to_float_rounding_are_ties():
    first, second = [0.57, 0.58, 0.29, 0.61, 0.70, 0.83], [0.47, 0.48, 0.39, 0.51, 0.80, 0.43]
    noisy = difference(*(100 * a - 100 * b for a, b in zip(first, second, strict=True)))
    assert noisy.rank_p == difference(10, 10, -10, 10, -10, 40).rank_p


def test_a_value_that_is_not_finite_is_left_out_and_affects_no_other_comparison():
    with_nan, other = difference(1.0, float("nan"), 2.0, 4.0), difference(1.0, 2.0, 3.0)
    assert with_nan.seeds == (0, 2, 3)
    assert all(np.isfinite(result.p) for result in family([with_nan, other]))


@pytest.mark.parametrize(("n", "p"), [(2, 0.5), (6, 1 / 32)])
def test_equal_differences_are_judged_by_their_sign_alone(n, p):
    assert (difference(*[0.5] * n).error, difference(*[0.5] * n).p) == (0.0, pytest.approx(p))
    assert difference(*[0.0] * n).p == 1.0


def test_holms_adjustment_rises_with_the_number_of_comparisons():
    first = difference(1.0, 2.0, 3.0)
    second = difference(1.0, 1.1, 1.2)
    adjusted = family([first, None, second, difference(1.0)])
    assert adjusted[2].p == pytest.approx(2 * second.p)
    assert adjusted[0].p == pytest.approx(first.p)
    assert (adjusted[1], adjusted[3].p) == (None, None)


def test_an_adjusted_p_is_at_most_one():
    balanced = difference(1.0, -1.1, 0.2)
    assert [adjusted.p for adjusted in family([balanced, balanced])] == [1.0, 1.0]


def test_the_rank_test_is_adjusted_too():
    result = difference(*range(1, LEAST_WILCOXON + 1))
    assert [adjusted.rank_p for adjusted in family([result, result])] == [2 * result.rank_p] * 2


def test_a_page_without_both_marks_is_refused():
    assert between("a <x> old <y> b", ("<x>", "<y>"), "new", "page.md") == "a <x>\nnew\n<y> b"
    for text in ("a <x> b", "a <y> b", "<y> <x>"):
        with pytest.raises(UserError, match=r"page.md needs the lines <x> and <y>"):
            between(text, ("<x>", "<y>"), "new", "page.md")
