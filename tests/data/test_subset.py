"""Stratified subsets of a data set: --train-samples and --test-samples."""

import numpy as np
import pytest
from commands import parse
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pcdd.data import sources
from fedjax_pcdd.data.dataset import Dataset, sampler, stratified, subset
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.build import federate

DIGITS = sources.load("digits")


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.data())
def test_every_class_keeps_its_share_to_within_one_sample(labels, data):
    labels, size = np.array(labels), data.draw(st.integers(1, len(labels)))
    chosen = stratified(labels, size, np.random.default_rng(0))
    assert len(np.unique(chosen)) == size
    expected = np.bincount(labels, minlength=5) * size / len(labels)
    assert (np.abs(np.bincount(labels[chosen], minlength=5) - expected) < 1).all()


def test_chosen_samples_keep_their_order():
    chosen = stratified(DIGITS.y_train, 100, np.random.default_rng(0))
    assert (np.diff(chosen) > 0).all()


def test_images_labels_and_groups_stay_together():
    numbers = np.arange(20)
    images = numbers.astype(np.uint8).reshape(20, 1, 1, 1)
    dataset = Dataset("made-up", images, numbers % 2, images, numbers % 2, 2, groups_train=numbers, groups_test=numbers)
    small = subset(dataset, sampler("made-up", 6, None, 0))
    assert small.x_train.ravel().tolist() == small.groups_train.tolist()
    np.testing.assert_array_equal(small.y_train, small.groups_train % 2)
    assert len(small.y_test) == 20


def test_a_subset_of_all_samples_is_the_whole_data_set():
    whole = subset(DIGITS, sampler("digits", len(DIGITS.y_train), None, 3))
    np.testing.assert_array_equal(whole.x_train, DIGITS.x_train)


def test_the_seed_decides_which_samples_are_chosen():
    first, same, other = (subset(DIGITS, sampler("digits", 100, 50, seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.x_train, same.x_train)
    assert not np.array_equal(first.x_train, other.x_train)
    assert not np.array_equal(first.x_test, other.x_test)


def test_a_federation_divides_the_subset_among_its_clients():
    config, _ = parse(["--train-samples=300", "--test-samples=100", "--partition=pcdd", "--clients=5"])
    federation = federate(config)
    assert (federation.sizes.sum(), federation.test_sizes.sum()) == (300, 100)


@pytest.mark.parametrize("part", ["train", "test"])
def test_more_samples_than_the_data_set_has_are_refused(part):
    with pytest.raises(UserError, match=rf"'digits' has \d+ {part} samples, not {part}_samples=9999"):
        federate(parse([f"--{part}-samples=9999"])[0])
