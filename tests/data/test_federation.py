"""Data sets and federations: checks of arrays, class counts, saved partitions and heat maps."""

import numpy as np
import pytest
from matplotlib.image import imread

import fedjax_pcdd as fp
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation, heat_map
from fedjax_pcdd.data.lists import Partition, load_partition
from fedjax_pcdd.data.partition import partition
from fedjax_pcdd.errors import UserError


def dataset(n_train=120, n_test=40, num_classes=10, **changes):
    rng = np.random.default_rng(0)
    fields = {
        "x_train": rng.integers(0, 256, (n_train, 4, 5, 3), dtype=np.uint8),
        "y_train": np.arange(n_train) % num_classes,
        "x_test": rng.integers(0, 256, (n_test, 4, 5, 3), dtype=np.uint8),
        "y_test": np.arange(n_test) % num_classes,
        "num_classes": num_classes,
    }
    return Dataset("tiny", **{**fields, **changes})


def federation(clients=6, name="pcdd", **changes):
    data = dataset(**changes)
    split = partition(name, data.y_train, data.y_test, num_classes=10, clients=clients, seed=0, classes_per_client=2)
    return Federation(data, split)


def test_labels_cannot_be_changed_behind_the_counts_of_a_federation():
    y = np.array([0, 1])
    data = fp.from_arrays(np.zeros((2, 4)), y, np.zeros((2, 4)), y)
    with pytest.raises(ValueError, match="read-only"):
        data.y_train[0] = 1
    y[0] = 1
    assert data.y_train.tolist() == [0, 1]


def test_labels_are_kept_as_int32():
    data = dataset()
    assert data.y_train.dtype == data.y_test.dtype == np.int32


@pytest.mark.parametrize(
    "changes",
    [
        {"x_train": np.zeros((120, 4, 5, 3), np.float64)},
        {"x_train": np.zeros((120, 4, 5, 3), np.float32)},
        {"x_train": np.zeros((120, 20), np.uint8)},
        {"x_train": np.zeros((119, 4, 5, 3), np.uint8)},
        {"x_test": np.zeros((40, 4, 6, 3), np.uint8)},
        {"y_train": np.full(120, 10)},
        {"y_train": np.full(120, -1)},
        {"y_train": np.zeros(120, np.float32)},
        {"y_test": np.zeros((40, 1), np.int32)},
        {"x_train": np.ma.masked_less(np.zeros((120, 4, 5, 3), np.uint8), 1)},
        {"y_test": np.ma.masked_less(np.zeros(40, np.int32), 1)},
        {"x_train": np.ones((120, 4, 5, 3), np.uint8), "x_test": np.zeros((40, 4, 5, 3), np.uint8)},
        {"num_classes": 10.0},
        {"groups_train": np.zeros(120, np.int32)},
        {"groups_train": np.zeros(119, np.int32), "groups_test": np.zeros(40, np.int32)},
        {"class_names": ("cat", "dog")},
    ],
    ids=str,
)
def test_arrays_that_do_not_fit_are_rejected(changes):
    with pytest.raises(UserError, match=r"data set 'tiny'"):
        dataset(**changes)


def test_sizes_are_the_row_sums_of_the_class_counts():
    fed = federation()
    np.testing.assert_array_equal(fed.sizes, fed.class_counts.sum(1))
    np.testing.assert_array_equal(fed.test_sizes, fed.test_class_counts.sum(1))


def test_class_counts_add_up_to_the_data_set():
    fed = federation()
    assert fed.class_counts.shape == fed.test_class_counts.shape == (fed.num_clients, 10) == (6, 10)
    np.testing.assert_array_equal(fed.class_counts.sum(0), np.bincount(fed.dataset.y_train))
    np.testing.assert_array_equal(fed.test_class_counts.sum(0), np.bincount(fed.dataset.y_test))


def test_the_image_shape_is_that_of_one_image():
    assert federation().image_shape == (4, 5, 3)


def test_a_federation_that_cannot_be_saved_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"cannot write to .*split.npz \(No such file or dir.*: choose another path"):
        federation().save(tmp_path / "nowhere/split.npz")


@pytest.mark.parametrize("part", ["train", "test"])
@pytest.mark.parametrize("n_test", [0, 40])
def test_a_saved_partition_holds_the_list_of_every_client(tmp_path, part, n_test):
    fed = federation(n_test=n_test)
    fed.save(tmp_path / "split.npz")
    tables = dict(np.load(tmp_path / "split.npz"))
    starts, sizes = tables[f"{part}_start"], tables[f"{part}_size"]
    for indices, start, size in zip(getattr(fed.partition, part), starts, sizes, strict=True):
        np.testing.assert_array_equal(tables[part][start : start + size], indices)
    assert tables.pop("labels")[:, 0].tolist() == [len(fed.dataset.y_train), n_test]
    assert {table.dtype for table in tables.values()} == {np.dtype(np.int32)}


@pytest.mark.parametrize("n_test", [0, 40])
def test_a_saved_partition_is_loaded_unchanged(tmp_path, n_test):
    fed = federation(n_test=n_test)
    fed.save(tmp_path / "split.npz")
    loaded = load_partition(tmp_path / "split.npz")
    for expected, indices in zip(
        [*fed.partition.train, *fed.partition.test], [*loaded.train, *loaded.test], strict=True
    ):
        assert indices.dtype == np.int64
        np.testing.assert_array_equal(expected, indices)


def test_a_missing_partition_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no file .*nothing\.npz"):
        load_partition(tmp_path / "nothing.npz")


@pytest.mark.parametrize("content", [b"", b"words", b"PK\x03\x04 torn"])
def test_a_file_without_a_partition_is_rejected(tmp_path, content):
    path = tmp_path / "other.npz"
    path.write_bytes(content)
    with pytest.raises(UserError, match="not a readable npz archive"):
        load_partition(path)


def test_an_archive_of_other_arrays_is_rejected(tmp_path):
    np.savez(tmp_path / "other.npz", a=np.arange(3))
    with pytest.raises(UserError, match="holds no partition"):
        load_partition(tmp_path / "other.npz")


def test_a_partition_of_a_larger_data_set_is_rejected():
    with pytest.raises(UserError, match=r"has t.* sample .*, and 'tiny' has .*make the partition for this data set"):
        Federation(dataset(n_train=100), federation().partition)


@pytest.mark.parametrize("lists", [Partition((), ()), Partition((np.arange(3),), ())])
def test_a_partition_needs_a_training_and_a_test_list_for_each_client(lists):
    with pytest.raises(UserError, match="as many test lists"):
        Federation(dataset(), lists)


@pytest.mark.thorough
@pytest.mark.parametrize("clients", [5, 500])
def test_the_heat_map_shows_absent_classes_blank(tmp_path, clients):
    fed = federation(clients, n_train=5000)
    heat_map(fed, tmp_path / "map.png")
    picture = imread(tmp_path / "map.png")[..., :3]
    blank_share = (picture == 1.0).all(-1).mean()
    iid_fed = federation(clients, "iid", n_train=5000)
    heat_map(iid_fed, tmp_path / "full.png")
    assert blank_share > (imread(tmp_path / "full.png")[..., :3] == 1.0).all(-1).mean() + 0.2


@pytest.mark.thorough
def test_a_heat_map_of_an_empty_federation_with_class_names_is_drawn(tmp_path):
    names = tuple("abcdefghij")
    heat_map(federation(name="iid", n_train=0, class_names=names), tmp_path / "map.svg")
    drawn = (tmp_path / "map.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in names)
