"""Properties of the partitioners."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pcdd.data.lists import Partition, checked, class_counts, following, load_partition
from fedjax_pcdd.data.partition import (
    PARTITIONS,
    dirichlet,
    extended_dirichlet,
    iid,
    natural,
    partition,
    pcdd,
    quantity,
)
from fedjax_pcdd.errors import UserError

quick = settings(deadline=None, max_examples=30)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def label_sets(draw, per_class=1):
    """Train and test labels of C classes, each with at least `per_class` training samples; and C."""
    num_classes = draw(st.integers(2, 6))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    counts = rng.integers(per_class, per_class + 30, num_classes)
    train = rng.permutation(np.repeat(np.arange(num_classes), counts))
    test = rng.integers(0, num_classes, draw(st.integers(0, 40)))
    return train, test, num_classes


@st.composite
def pcdd_problems(draw):
    """Labels and a feasible assignment of fewer than all classes; no class has fewer samples than clients."""
    train, _, num_classes = draw(label_sets(per_class=12))
    per_client = draw(st.integers(1, num_classes - 1))
    clients = draw(st.integers(-(-num_classes // per_client), 12))
    options = {"clients": clients, "classes_per_client": per_client, "num_classes": num_classes}
    return train, np.repeat(np.arange(num_classes), 12), options


def assert_partition(split, y_train, y_test, clients):
    for lists, y in zip(split, (y_train, y_test), strict=True):
        assert len(lists) == clients
        assert all(indices.dtype == np.int64 for indices in lists)
        np.testing.assert_array_equal(np.sort(np.concatenate(lists)), np.arange(len(y)))


def same(a, b):
    lists = zip([*a.train, *a.test], [*b.train, *b.test], strict=True)
    return all(np.array_equal(x, y) for x, y in lists)


def balanced(samples, num_classes=10):
    return np.arange(samples) % num_classes


OPTIONS = {"num_classes": 10, "clients": 10, "classes_per_client": 3, "beta": 0.5}


def split_by(name, test_samples=100, **options):
    groups = (balanced(400) // 2, balanced(100) // 2)
    given = {**OPTIONS, "seed": 0, "groups": groups, **options}
    return partition(name, balanced(400), balanced(test_samples), **given)


@quick
@given(label_sets(), st.integers(1, 12), st.floats(1e-3, 1e5), seeds)
def test_dirichlet_without_retry_gives_every_sample_to_exactly_one_client(labels, clients, beta, seed):
    train, test, num_classes = labels
    split = dirichlet(train, test, clients=clients, num_classes=num_classes, beta=beta, seed=seed, retry=False)
    assert_partition(split, train, test, clients)


@quick
@given(label_sets(per_class=20), st.integers(1, 4), seeds)
def test_dirichlet_with_retry_gives_every_client_the_minimum_size(labels, clients, seed):
    train, test, num_classes = labels
    split = dirichlet(train, test, clients=clients, num_classes=num_classes, beta=1.0, seed=seed, min_size=5)
    assert_partition(split, train, test, clients)
    assert min(map(len, split.train)) >= 5


@quick
@given(seeds)
def test_a_client_with_exactly_its_fair_share_gets_no_more(seed):
    options = {"clients": 2, "num_classes": 2, "beta": 0.01, "seed": seed, "retry": False}
    counts = class_counts(balanced(20, 2), dirichlet(balanced(20, 2), None, **options).train, 2)
    assert (counts[counts[:, 0] == 10, 1] == 0).all()


RETRIED = {"clients": 10, "num_classes": 10, "beta": 0.1, "seed": 5}


def test_retry_leaves_no_client_empty_where_the_published_split_does():
    y = balanced(600)
    assert min(map(len, dirichlet(y, y, retry=False, **RETRIED).train)) == 0
    assert min(map(len, dirichlet(y, y, retry=True, **RETRIED).train)) >= 10


def plain_dirichlet_with_retry(labels, clients, num_classes, beta, seed):
    """The specified loop, line by line: retries redraw all lists from the continuing stream; the last are shuffled."""
    rng = np.random.RandomState(seed)
    smallest, tries = 0, 0
    while smallest < 10:
        lists = [[[] for _ in range(clients)] for _ in labels]
        for c in range(num_classes):
            positions = [np.where(y == c)[0] for y in labels]
            for indices in positions:
                rng.shuffle(indices)
            shares = rng.dirichlet(np.repeat(beta, clients))
            for client_lists, indices, y in zip(lists, positions, labels, strict=True):
                open_ = np.array([len(client_list) < len(y) / clients for client_list in client_lists])
                cuts = (np.cumsum(shares * open_ / (shares * open_).sum()) * len(indices)).astype(int)[:-1]
                for client_list, piece in zip(client_lists, np.split(indices, cuts), strict=True):
                    client_list += piece.tolist()
        smallest, tries = min(len(client_list) for client_list in lists[0]), tries + 1
    for client_lists in lists:
        for client_list in client_lists:
            rng.shuffle(client_list)
    return lists, tries


@pytest.mark.parametrize("test_samples", [0, 600])
def test_retry_redraws_all_lists_from_the_continuing_stream(test_samples):
    labels = [balanced(600)] + [balanced(test_samples)] * (test_samples > 0)
    expected, tries = plain_dirichlet_with_retry(labels, **RETRIED)
    split = dirichlet(labels[0], balanced(test_samples), **RETRIED)
    assert tries > 1
    for expected_lists, lists in zip(expected, split, strict=False):
        assert expected_lists == [indices.tolist() for indices in lists]


@quick
@given(pcdd_problems(), seeds)
def test_pcdd_gives_every_sample_to_exactly_one_client(problem, seed):
    train, test, options = problem
    assert_partition(pcdd(train, test, seed=seed, **options), train, test, options["clients"])


@quick
@given(pcdd_problems(), seeds)
def test_pcdd_clients_have_exactly_the_given_number_of_classes(problem, seed):
    train, test, options = problem
    counts = class_counts(train, pcdd(train, test, seed=seed, **options).train, options["num_classes"])
    assert ((counts > 0).sum(1) == options["classes_per_client"]).all()


@quick
@given(pcdd_problems(), seeds)
def test_pcdd_tests_every_client_on_its_training_classes(problem, seed):
    train, test, options = problem
    split = pcdd(train, test, seed=seed, **options)
    trained, tested = (class_counts(*pair, options["num_classes"]) for pair in zip((train, test), split, strict=True))
    np.testing.assert_array_equal(trained > 0, tested > 0)


@quick
@given(pcdd_problems(), seeds)
def test_doubled_pcdd_gives_every_training_sample_twice_to_owners_of_its_class(problem, seed):
    train, test, options = problem
    single, double = (pcdd(train, test, seed=seed, doubled=flag, **options) for flag in (False, True))
    np.testing.assert_array_equal(np.bincount(np.concatenate(double.train)), np.full(len(train), 2))
    once, twice = (class_counts(train, split.train, options["num_classes"]) for split in (single, double))
    np.testing.assert_array_equal(once > 0, twice > 0)


@quick
@given(label_sets(), st.integers(1, 12), seeds)
def test_pcdd_with_all_classes_is_iid(labels, clients, seed):
    train, test, num_classes = labels
    options = {"clients": clients, "seed": seed}
    split = pcdd(train, test, classes_per_client=num_classes, num_classes=num_classes, **options)
    assert same(split, iid(train, test, **options))


@quick
@given(pcdd_problems(), seeds)
def test_extended_dirichlet_divides_each_class_among_its_owners_only(problem, seed):
    train, test, options = problem
    split = extended_dirichlet(train, test, seed=seed, beta=0.5, **options)
    assert_partition(split, train, test, options["clients"])
    counts, pcdd_counts = (
        class_counts(train, lists.train, options["num_classes"])
        for lists in (split, pcdd(train, test, seed=seed, **options))
    )
    assert (counts[pcdd_counts == 0] == 0).all()


def test_extended_dirichlet_with_a_large_beta_has_the_class_counts_of_pcdd():
    train, options = balanced(4000), {"clients": 10, "classes_per_client": 3, "num_classes": 10, "seed": 1}
    pcdd_counts, counts = (class_counts(train, split.train, 10) for split in (
        pcdd(train, train, **options), extended_dirichlet(train, train, beta=1e6, **options)))  # fmt: skip
    assert np.abs(pcdd_counts - counts).max() <= 2


def test_extended_dirichlet_divides_test_samples_by_the_proportions_of_the_training_samples():
    split = split_by("extended_dirichlet", test_samples=400)
    trained, tested = (class_counts(balanced(400), lists, 10) for lists in split)
    np.testing.assert_array_equal(trained, tested)


@pytest.mark.parametrize("name", ["pcdd", "extended_dirichlet"])
def test_chance_decides_which_samples_of_a_class_an_owner_gets(name):
    split = split_by(name, clients=20, classes_per_client=1, beta=1e6, test_samples=400)
    assert all((np.diff(indices) < 0).any() for lists in split for indices in lists)


@quick
@given(label_sets(per_class=30), st.integers(1, 5), seeds)
def test_quantity_skew_gives_every_client_the_minimum_size(labels, clients, seed):
    train, test, _ = labels
    split = quantity(train, test, clients=clients, seed=seed, beta=0.2)
    assert_partition(split, train, test, clients)
    assert min(map(len, split.train)) >= 10


def test_quantity_skew_gives_clients_unequal_sizes_and_all_classes():
    labels = np.sort(balanced(5000))
    split = quantity(labels, labels, clients=5, seed=0, beta=0.3)
    for lists in split:
        sizes = np.array([len(indices) for indices in lists])
        assert sizes.max() > 3 * sizes.min()
        assert (class_counts(labels, lists, 10)[sizes > 200] > 0).all()


def test_quantity_skew_divides_test_samples_in_proportion_to_training_samples():
    split = quantity(balanced(5000), balanced(1000), clients=5, seed=0, beta=0.3)
    trained, tested = (np.array([len(indices) for indices in lists]) for lists in split)
    assert np.abs(trained / 5 - tested).max() <= 1


@pytest.mark.parametrize("beta", [1e-6, 1e-300])
def test_a_tiny_beta_gives_as_much_as_possible_to_one_client(beta):
    """In most draws all gammas underflow to 0, but the limit of Dirichlet(beta) is by no means an even one."""
    labels, options = balanced(400), {"clients": 4, "num_classes": 10, "classes_per_client": 5}
    for seed in range(20):
        sizes = sorted(len(indices) for indices in quantity(labels, labels, clients=4, seed=seed, beta=beta).train)
        assert sizes[:3] == [10, 10, 10]
        split = extended_dirichlet(labels, labels, seed=seed, beta=beta, **options)
        assert (np.sort(class_counts(labels, split.train, 10), 0)[-1] == 40).all()


def test_with_a_tiny_beta_chance_decides_who_gets_almost_all():
    splits = [split_by("quantity", clients=4, beta=1e-300, seed=seed) for seed in range(40)]
    assert {np.argmax([len(indices) for indices in split.train]) for split in splits} == {0, 1, 2, 3}


def test_where_no_proportion_is_left_dirichlet_gives_a_class_to_the_client_with_the_fewest_samples():
    split = split_by("dirichlet", clients=5, beta=1e-300, retry=False)
    assert [len(indices) for indices in split.train] == [80] * 5
    assert (class_counts(balanced(400), split.train, 10).max(0) == 40).all()


@quick
@given(label_sets(), st.integers(1, 12), seeds)
def test_iid_gives_every_sample_to_one_client_and_equal_sizes_to_within_one(labels, clients, seed):
    train, test, _ = labels
    split = iid(train, test, clients=clients, seed=seed)
    assert_partition(split, train, test, clients)
    assert np.ptp([len(indices) for indices in split.train]) <= 1


def test_iid_permutes_the_training_samples_before_the_test_samples():
    split = iid(np.zeros(30), np.zeros(20), clients=4, seed=5)
    stream = np.random.RandomState(5)
    np.testing.assert_array_equal(np.concatenate(split.train), stream.permutation(30))
    np.testing.assert_array_equal(np.concatenate(split.test), stream.permutation(20))


@quick
@given(st.lists(st.integers(-3, 3), min_size=1), st.lists(st.integers(-3, 3)))
def test_natural_clients_are_the_groups(train, test):
    split = natural((train, test))
    groups = sorted(set(train) | set(test))
    assert_partition(split, train, test, len(groups))
    for group, indices in zip(groups, split.train, strict=True):
        assert all(train[i] == group for i in indices)


@quick
@given(label_sets(), st.integers(1, 5), seeds)
def test_class_counts_count_every_class_of_every_client(labels, clients, seed):
    train, test, num_classes = labels
    lists = iid(train, test, clients=clients, seed=seed).train
    expected = [[int((train[indices] == c).sum()) for c in range(num_classes)] for indices in lists]
    np.testing.assert_array_equal(class_counts(train, lists, num_classes), expected)


def test_following_gives_each_client_test_samples_of_its_training_classes():
    train = (np.array([1, 3]), np.array([0, 2]), np.array([4, 5]))
    test_lists = following(train, np.array([0, 1, 0, 1, 0, 0]), np.array([1, 0, 1, 0, 0, 0]))
    assert [indices.tolist() for indices in test_lists] == [[0, 2], [1, 3], [4, 5]]


def test_following_gives_exact_shares_where_there_are_such():
    test_lists = following([[i] for i in range(49)], np.zeros(49, int), np.zeros(49, int))  # 1 / 49 * 49 < 1 in floats
    assert [len(indices) for indices in test_lists] == [1] * 49


def test_following_leaves_out_test_samples_of_a_class_that_nobody_trains_on():
    test_lists = following((np.array([0]), np.array([1])), np.array([0, 2]), np.array([1, 0, 2, 1]))
    assert [indices.tolist() for indices in test_lists] == [[1], [2]]


@pytest.mark.filterwarnings("ignore:.*only classes without training samples")
@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("test_samples", [0, 50])
def test_classes_without_samples_and_empty_test_sets_are_partitioned(name, test_samples):
    train, test = balanced(400), balanced(test_samples)
    split = partition(name, train, test, **{**OPTIONS, "num_classes": 25}, seed=0, groups=(train, test))
    assert_partition(split, train, test, 10)


@pytest.mark.parametrize("name", ["pcdd", "extended_dirichlet"])
def test_clients_that_own_only_classes_without_samples_are_warned_of(name):
    labels = np.array([0, 1, 2, 4, 7] * 8)
    with pytest.warns(UserWarning, match="3 of 8 clients, the first of them client 3, get only classes without"):
        split = partition(name, labels, labels, num_classes=8, clients=8, classes_per_client=1, seed=0)
    assert [k for k, indices in enumerate(split.train) if not len(indices)] == [3, 5, 6]


@pytest.mark.parametrize("name", PARTITIONS)
def test_same_seed_gives_the_same_partition(name):
    assert same(split_by(name, seed=3), split_by(name, seed=3))


@pytest.mark.parametrize("name", sorted(set(PARTITIONS) - {"natural"}))
def test_another_seed_gives_another_partition(name):
    assert not same(split_by(name, seed=3), split_by(name, seed=4))


@pytest.mark.parametrize("name", PARTITIONS)
def test_global_generators_are_left_alone(name):
    np.random.seed(7)  # noqa: NPY002
    random.seed(7)
    split_by(name)
    assert np.random.random() == np.random.RandomState(7).random_sample()  # noqa: NPY002
    assert random.random() == random.Random(7).random()


@quick
@given(st.integers(3, 9), seeds)
def test_small_beta_gives_fewer_classes_than_large_beta(clients, seed):
    owned_classes = [
        (class_counts(balanced(900), split_by_beta(beta, clients, seed).train, 10) > 0).sum() for beta in (0.05, 1e4)
    ]
    assert owned_classes[0] < owned_classes[1] == clients * 10


def split_by_beta(beta, clients, seed) -> Partition:
    options = {"clients": clients, "num_classes": 10, "beta": beta, "seed": seed}
    return dirichlet(balanced(900), None, retry=False, **options)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("dirichlett", {}, "did you mean 'dirichlet'"),
        ("dirichlet", {"beta": 0.0}, "beta"),
        ("dirichlet", {"beta": -1.0}, "beta"),
        ("dirichlet", {"beta": float("nan")}, "beta"),
        ("dirichlet", {"clients": 0}, "clients"),
        ("dirichlet", {"clients": 41}, "400 training samples cannot give 41 clients 10 each"),
        ("dirichlet", {"clients": 40, "beta": 0.01}, r"the best left one with 0\): use a larger beta"),
        ("pcdd", {"clients": 0}, "clients"),
        ("pcdd", {"classes_per_client": 11}, "classes_per_client"),
        ("pcdd", {"classes_per_client": 0}, "classes_per_client"),
        ("pcdd", {"clients": 3}, "raise clients or classes_per_client"),
        ("pcdd", {"num_classes": 5}, r"labels must lie in \[0, 5\)"),
        ("extended_dirichlet", {"clients": 3}, "raise clients or classes_per_client"),
        ("extended_dirichlet", {"beta": 0.0}, "beta"),
        ("quantity", {"clients": 41}, "400 training samples cannot give 41 clients 10 each"),
        ("iid", {"clients": 0}, "clients"),
        ("iid", {"seed": -1}, "seed"),
        ("natural", {"groups": None}, "partition"),
    ],
)
def test_mistakes_are_refused_with_one_sentence(name, options, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        split_by(name, **options)
    assert str(error.value).endswith((".", "?"))


def test_a_function_from_outside_that_draws_without_the_seed_is_refused(tmp_path):
    code = (
        "import numpy as np\n\ndef drawn(y_train, seed):\n    draw = np.random{}\n    return [draw.permutation(40)]\n"
    )
    for name, generator in (("seeded", ".default_rng(seed)"), ("free", "")):
        (tmp_path / f"{name}.py").write_text(code.format(generator))
    assert len(partition(f"{tmp_path}/seeded.py:drawn", np.zeros(40, int), [], seed=3).train[0]) == 40
    with pytest.raises(UserError, match=r"gives other lists each time, .*: draw by seed\.$"):
        partition(f"{tmp_path}/free.py:drawn", np.zeros(40, int), [], seed=3)


@pytest.mark.parametrize(
    "lists",
    [
        (np.array([[0, 1], [2, 3]]), np.array([[0], [1]])),
        [[[0, 1], [2, 3]], [[0], [1]]],
        ([[0, 1], [2, 3]], np.array([[0], [1]])),
    ],
    ids=["two arrays", "a list of lists", "lists and an array"],
)
def test_training_and_test_lists_may_be_arrays_or_stand_in_a_list(lists):
    train, test = checked(lists, np.zeros(4), np.zeros(2), "split")
    assert [list(part) for part in (*train, *test)] == [[0, 1], [2, 3], [0], [1]]


def test_the_client_whose_list_names_other_samples_is_named():
    with pytest.raises(UserError, match=r"the training list of client 1 names samples outside of \[0, 4\)"):
        checked([[0, 1], [9, 2], [3]], np.zeros(4), np.zeros(2), "split")


def test_two_arrays_of_samples_are_two_clients():
    train, _ = checked((np.array([0, 1]), np.array([2])), np.zeros(4, int), np.zeros(2, int), "split")
    assert [list(part) for part in train] == [[0, 1], [2]]


def test_a_failing_function_from_outside_is_reported_in_one_sentence(tmp_path):
    (tmp_path / "split.py").write_text("def by_hospital(y_train):\n    raise ValueError('oops\\nagain')\n")
    with pytest.raises(UserError, match=r"^partition .*split\.py:by_hospital fails: ValueError: oops\.$"):
        partition(f"{tmp_path / 'split.py'}:by_hospital", [0, 1], [0, 1])


@pytest.mark.parametrize(
    ("train", "sizes", "sentence"),
    [
        ([0.5, 1.5, 2.5], [2, 1], "must be integers"),
        (list(range(10)), [5, 2], "adds up to 7, but train has 10"),
        (list(range(10)), [5, 10], "adds up to 15, but train has 10"),
        (list(range(4)), [5, -1], "adds up to 4"),
        (list(range(4)), [2**62, 2**62, 2**62, 2**62, 4], "adds up to 18446744073709551620, but train has 4"),
    ],
)
def test_sizes_that_do_not_fit_their_lists_are_refused(tmp_path, train, sizes, sentence):
    file = tmp_path / "lists.npz"
    np.savez(file, train=train, train_size=sizes, test=[0, 1], test_size=[1, 1])
    with pytest.raises(UserError, match=sentence):
        load_partition(file)
