"""Partitions agree index by index with the published ones."""

import re

import numpy as np
import pytest
from golden_vectors import cases

from fedjax_pcdd.data.lists import class_counts
from fedjax_pcdd.data.partition import dirichlet, pcdd


def families(g, pattern):
    """The matches of `pattern` among the names of the arrays; asserts that there is at least one."""
    matches = [match for match in (re.fullmatch(pattern, name) for name in g) if match]
    assert matches, pattern
    return matches


def number_of_classes(g):
    return int(max(g["in_y_train"].max(), g["in_y_test"].max())) + 1


def assert_lists(lists, g, stem):
    np.testing.assert_array_equal([len(indices) for indices in lists], g[f"{stem}_len"], err_msg=stem)
    np.testing.assert_array_equal(np.concatenate(lists), g[f"{stem}_idx"], err_msg=stem)


def run_pcdd(g, match, **options):
    return pcdd(
        g["in_y_train"],
        g["in_y_test"],
        clients=int(match[1]),
        classes_per_client=int(match[2]),
        num_classes=number_of_classes(g),
        seed=int(g["par_seed"]),
        **options,
    )


def run_dirichlet(g, match, stem, y_test, retry):
    """`dir05` means beta 0.5."""
    return dirichlet(
        g["in_y_train"],
        y_test,
        clients=len(g[f"{stem}_len"]),
        num_classes=number_of_classes(g),
        beta=float(f"{match[1][0]}.{match[1][1:]}"),
        seed=int(g["par_seed"]),
        retry=retry,
    )


@pytest.mark.parametrize("g", cases("partition"))
def test_pcdd_is_the_published_split(g):
    for match in families(g, r"out_p(\d+)c(\d+)_train_idx"):
        split = run_pcdd(g, match)
        assert_lists(split.train, g, f"out_p{match[1]}c{match[2]}_train")
        assert_lists(split.test, g, f"out_p{match[1]}c{match[2]}_test")


@pytest.mark.parametrize("g", cases("partition"))
def test_pcdd_assigns_the_published_classes(g):
    for match in families(g, r"out_p(\d+)c(\d+)_classes"):
        counts = class_counts(g["in_y_train"], run_pcdd(g, match).train, number_of_classes(g))
        owned = [np.flatnonzero(row) for row in counts]
        np.testing.assert_array_equal(owned, g[match[0]])


@pytest.mark.parametrize("g", cases("partition"))
def test_doubled_pcdd_is_the_published_fedmr_split(g):
    for match in families(g, r"out_p(\d+)c(\d+)_doubled_train_idx"):
        split = run_pcdd(g, match, doubled=True)
        assert_lists(split.train, g, f"out_p{match[1]}c{match[2]}_doubled_train")


@pytest.mark.parametrize("g", cases("partition"))
def test_dirichlet_with_retry_is_the_published_split(g):
    for match in families(g, r"out_dir(\d+)_idx"):
        stem = f"out_dir{match[1]}"
        assert_lists(run_dirichlet(g, match, stem, None, retry=True).train, g, stem)


@pytest.mark.parametrize("g", cases("partition"))
def test_personal_dirichlet_is_the_published_split(g):
    for match in families(g, r"out_dir(\d+)_per_train_idx"):
        stem = f"out_dir{match[1]}_per"
        split = run_dirichlet(g, match, f"{stem}_train", g["in_y_test"], retry=False)
        assert_lists(split.train, g, f"{stem}_train")
        assert_lists(split.test, g, f"{stem}_test")
