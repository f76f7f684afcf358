"""Data sets from scikit-learn, npz files and prepared TFDS folders."""

import functools
import io
import os
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

import fedjax_pcdd as fp
from fedjax_pcdd.api.data import LOADED
from fedjax_pcdd.data import npz, sources
from fedjax_pcdd.data.augment import Pipeline, pipeline
from fedjax_pcdd.data.dataset import as_images, largest_groups, sampler, subset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.partition import partition
from fedjax_pcdd.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("PCDD_DATA", REPOSITORY.parent / "shared" / "data"))


def random_arrays(seed=0, n_train=12, n_test=6, shape=(5, 4, 3)):
    rng = np.random.default_rng(seed)
    return {
        "x_train": rng.integers(0, 256, (n_train, *shape), dtype=np.uint8),
        "y_train": (np.arange(n_train) % 3).astype(np.uint8),
        "x_test": rng.integers(0, 256, (n_test, *shape), dtype=np.uint8),
        "y_test": (np.arange(n_test) % 3).astype(np.uint8),
    }


def store_and_load(folder, arrays, name="mine"):
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    return sources.load(name, folder)


@functools.cache
def real_dataset(name):
    if not (DATA / f"{name}.npz").is_file():
        pytest.skip(f"{name}.npz is not in {DATA}; set PCDD_DATA")
    return sources.load(name, DATA)


# Built in


def test_data_from_outside_called_digits_is_taken_before_the_built_in_one(tmp_path, monkeypatch):
    x, y = np.arange(48, dtype=np.uint8).reshape(3, 4, 4), [0, 1, 2]
    fp.write_federation(tmp_path / "digits", [(x, y, x, y)])
    assert sources.load("digits", tmp_path).x_train.shape == (3, 4, 4, 1)
    assert LOADED[fp.load_dataset("digits", tmp_path)] == {"dataset": "digits", "data_dir": tmp_path}
    monkeypatch.setitem(sources.LOADERS.data, "digits", lambda: fp.from_arrays(x[:2], y[:2], x, y))
    assert len(sources.load("digits").y_train) == 2
    assert len(sources.digits().y_train) == 1442


def test_digits_are_split_by_class_about_80_to_20():
    digits = sources.load("digits")
    train, test = (np.bincount(y, minlength=10) for y in (digits.y_train, digits.y_test))
    assert digits.x_train.shape == (1442, 8, 8, 1)
    assert digits.x_test.shape == (355, 8, 8, 1)
    np.testing.assert_array_equal(test, (train + test) // 5)


def test_digits_fill_the_range_of_uint8():
    x = sources.load("digits").x_train
    assert x.dtype == np.uint8
    assert (x.min(), x.max()) == (0, 255)


def test_digits_are_the_same_every_time():
    first, second = sources.load("digits"), sources.load("digits")
    np.testing.assert_array_equal(first.x_test, second.x_test)
    np.testing.assert_array_equal(first.y_test, second.y_test)


# npz


def test_npz_arrays_come_back_unchanged(tmp_path):
    arrays = random_arrays()
    dataset = store_and_load(tmp_path, arrays)
    for key, value in arrays.items():
        np.testing.assert_array_equal(getattr(dataset, key), value)
    assert dataset.y_train.dtype == np.int32
    assert (dataset.name, dataset.num_classes, dataset.class_names) == ("mine", 3, None)


def test_labels_may_be_floats_that_are_whole_numbers(tmp_path):
    arrays = random_arrays()
    loaded = store_and_load(tmp_path, arrays | {"y_train": arrays["y_train"].astype(float)})
    x, y = arrays["x_train"], arrays["y_train"].tolist()
    for data in (loaded, fp.from_arrays(x, list(map(float, y)), x[:0], [])):
        assert (data.y_train.dtype, data.y_train.tolist()) == (np.int32, y)


def test_grey_images_without_channel_axis_get_one(tmp_path):
    assert store_and_load(tmp_path, random_arrays(shape=(5, 4))).x_train.shape == (12, 5, 4, 1)


def test_an_array_of_classes_gives_their_number_and_names(tmp_path):
    dataset = store_and_load(tmp_path, random_arrays() | {"classes": np.array(["a", "b", "c", "never"])})
    assert (dataset.num_classes, dataset.class_names) == (4, ("a", "b", "c", "never"))


def test_labels_with_gaps_cause_a_warning_unless_the_classes_are_named(tmp_path):
    arrays = random_arrays()
    arrays |= {name: 5 * (arrays[name] > 0) for name in ("y_train", "y_test")}
    with pytest.warns(UserWarning, match=r"labels lack 4 of 6 classes \(1, 2, 3, \.\.\.\): number all"):
        assert store_and_load(tmp_path, arrays).num_classes == 6
    assert store_and_load(tmp_path, arrays | {"classes": np.array(list("abcdef"))}).num_classes == 6


@pytest.mark.parametrize("key", ["writer", "domain"])
def test_groups_may_be_given_for_each_split(tmp_path, key):
    groups = {f"{key}_train": np.arange(12) // 4, f"{key}_test": np.arange(6) // 2}
    dataset = store_and_load(tmp_path, random_arrays() | groups)
    np.testing.assert_array_equal(dataset.groups_train, np.arange(12) // 4)
    np.testing.assert_array_equal(dataset.groups_test, np.arange(6) // 2)


def test_groups_in_one_array_are_those_of_training_then_test_samples(tmp_path):
    dataset = store_and_load(tmp_path, random_arrays() | {"writer": np.arange(18)})
    np.testing.assert_array_equal(dataset.groups_test, np.arange(12, 18))


def test_delta_coding_is_decoded():
    images = random_arrays(shape=(6, 7, 3))["x_train"]
    coded = images.copy()
    coded[..., 0] -= images[..., 1]
    coded[..., 2] -= images[..., 1]
    coded[:, :, 1:] = coded[:, :, 1:] - coded[:, :, :-1].copy()
    np.testing.assert_array_equal(npz.decode_delta(coded.transpose(0, 3, 1, 2)), images)


def test_delta_files_load_as_images(tmp_path):
    arrays = random_arrays()
    delta = np.zeros((12, 3, 5, 4), np.uint8), np.zeros((6, 3, 5, 4), np.uint8)
    delta[0][:, :, :, 0] = 7
    arrays = {"x_train_delta": delta[0], "x_test_delta": delta[1]} | {k: arrays[k] for k in ("y_train", "y_test")}
    dataset = store_and_load(tmp_path, arrays)
    np.testing.assert_array_equal(dataset.x_train, np.broadcast_to([14, 7, 14], (12, 5, 4, 3)).astype(np.uint8))


BROKEN = {
    "missing images": ({"x_test": None}, "x_test is missing"),
    "missing labels": ({"y_train": None}, "y_train is missing"),
    "float and byte images": ({"x_train": np.zeros((12, 5, 4, 3))}, "x_train is kept as float32 and x_test as uint8"),
    "numbers that are none": ({"x_train": np.full((12, 5, 4, 3), np.nan)}, "x_train holds numbers that are not finite"),
    "words": ({"x_train": np.full((12, 5), "a")}, "x_train must be numbers"),
    "films": ({"x_train": np.zeros((12, 2, 5, 4, 3), np.uint8)}, "x_train must be numbers"),
    "flat images": ({"x_test": np.zeros((6, 60), np.uint8)}, "differ in image size"),
    "no images": ({"x_train": np.zeros((0, 5, 4, 3), np.uint8), "y_train": np.zeros(0, int)}, "non-empty"),
    "other size": ({"x_test": np.zeros((6, 9, 4, 3), np.uint8)}, "differ in image size"),
    "float labels": ({"y_train": np.full(12, 0.5)}, "y_train must be one integer .* not float64 .12.: leave out"),
    "one-hot labels": ({"y_train": np.eye(3)[np.arange(12) % 3]}, r"y_train must be .* take \.argmax\(1\) of it"),
    "numbers beyond float32": ({"x_train": np.full((12, 5, 4, 3), 1e300)}, "x_train holds numbers beyond the range of"),
    "too few labels": ({"y_test": np.zeros(5, int)}, "y_test must be integers"),
    "labels from 1": ({"y_train": np.arange(12) % 3 + 1, "y_test": np.arange(6) % 3 + 1}, "from 1 to 3"),
    "negative labels": ({"y_train": np.arange(12) % 3 - 1}, r"y_train must be .* not int64 \[12\] from -1"),
    "absurd labels": ({"y_train": np.arange(12) * 2**40}, "not from 0 to"),
    "too few classes": ({"classes": np.array(["a", "b"])}, r"classes has shape \[2\]"),
    "short groups": ({"writer_train": np.zeros(11, int), "writer_test": np.zeros(6, int)}, "writer_train"),
    "half the groups": ({"writer_train": np.zeros(12, int)}, "writer_test"),
    "object arrays": ({"y_train": np.array([None] * 12)}, "not a readable npz archive"),
    "short delta": ({"x_train_delta": np.zeros((12, 5, 4, 3), np.uint8)}, "x_train_delta must be"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_unsuitable_npz_files_are_named_with_what_is_wrong(tmp_path, case):
    change, reason = BROKEN[case]
    arrays = {key: value for key, value in (random_arrays() | change).items() if value is not None}
    with pytest.raises(UserError, match=reason) as caught:
        store_and_load(tmp_path, arrays)
    assert str(tmp_path / "mine.npz") in str(caught.value)


def test_files_without_a_train_test_split_are_refused(tmp_path):
    arrays = random_arrays()
    with pytest.raises(UserError, match="no train/test split"):
        store_and_load(tmp_path, {"x": arrays["x_train"], "y": arrays["y_train"], "domain": arrays["y_train"]})


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 cut", b"\x93NUMPY", b"\x80\x04."])
def test_files_that_are_no_archive_are_refused(tmp_path, content):
    (tmp_path / "mine.npz").write_bytes(content)
    with pytest.raises(UserError, match="not a readable npz archive"):
        sources.load("mine", tmp_path)


def test_a_single_array_is_refused(tmp_path):
    with open(tmp_path / "mine.npz", "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(UserError, match="single array"):
        sources.load("mine", tmp_path)


def test_every_truncation_is_refused(tmp_path):
    store_and_load(tmp_path, random_arrays())
    content = (tmp_path / "mine.npz").read_bytes()
    for length in np.linspace(0, len(content) - 1, 60, dtype=int):
        (tmp_path / "mine.npz").write_bytes(content[:length])
        with pytest.raises(UserError, match=r"mine\.npz"):
            sources.load("mine", tmp_path)


@pytest.mark.thorough
def test_damaged_bytes_are_refused_or_change_nothing(tmp_path):
    expected = store_and_load(tmp_path, random_arrays())
    content = np.frombuffer((tmp_path / "mine.npz").read_bytes(), np.uint8)
    refused = 0
    for position in np.random.default_rng(0).integers(0, len(content), 150):
        damaged = content.copy()
        damaged[position] ^= 255
        (tmp_path / "mine.npz").write_bytes(damaged.tobytes())
        try:
            np.testing.assert_array_equal(sources.load("mine", tmp_path).x_train, expected.x_train)
        except UserError:
            refused += 1
    assert refused > 75


# Large files


@pytest.mark.thorough
def test_only_the_chosen_samples_of_a_large_file_are_held_in_memory(tmp_path, monkeypatch):
    x = np.arange(2000, dtype=np.uint8).reshape(-1, 1, 1) + np.zeros((1, 160, 160), np.uint8)  # 51 MB
    y = np.arange(2000) % 3
    np.savez_compressed(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    keep = sampler("mine", 30, None, 0)
    expected = subset(sources.load("mine", tmp_path), keep)
    monkeypatch.setattr(npz, "_CHUNK", 1 << 20)
    tracemalloc.start()
    dataset = sources.load("mine", tmp_path, keep)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(dataset.x_train, expected.x_train)
    np.testing.assert_array_equal(dataset.y_train, expected.y_train)
    assert peak < 10e6


def test_chosen_samples_keep_their_groups(tmp_path):
    x, y = np.arange(24, dtype=np.uint8).reshape(24, 1, 1), np.arange(24) % 3
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y, writer=np.append(x.ravel(), x.ravel()))
    dataset = sources.load("mine", tmp_path, sampler("mine", 6, 9, 0))
    assert (len(dataset.x_train), len(dataset.x_test)) == (6, 9)
    np.testing.assert_array_equal(dataset.groups_train, dataset.x_train.ravel())
    np.testing.assert_array_equal(dataset.groups_test, dataset.x_test.ravel())


@pytest.mark.parametrize("rows", [[0, 2, 3, 9], [3, 4, 5], [2, 6], []])
def test_the_chosen_rows_are_read_wherever_the_chunks_of_an_array_end(tmp_path, monkeypatch, rows):
    array = np.arange(60).reshape(10, 6)
    np.savez(tmp_path / "a.npz", x=array)
    monkeypatch.setattr(npz, "_CHUNK", 3 * array[0].nbytes)
    np.testing.assert_array_equal(npz.Archive(tmp_path / "a.npz").read("x", np.array(rows, int)), array[rows])


@pytest.mark.parametrize("dtype", ["datetime64[s]", "U3", "complex64"])
def test_images_that_are_not_numbers_are_refused_before_they_are_unpacked(tmp_path, dtype):
    arrays = random_arrays()
    arrays["x_train"] = np.zeros(arrays["x_train"].shape, dtype)
    np.savez(tmp_path / "odd.npz", **arrays)
    with pytest.raises(UserError, match="x_train must be numbers"):
        sources.load("odd", tmp_path, mapped=True)
    assert not (tmp_path / "odd.npz.unpacked").exists()


def test_arrays_larger_than_memory_are_refused_by_their_header(tmp_path):
    store_and_load(tmp_path, random_arrays())
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (10**9, 224, 224, 3)}
    )
    with (
        zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive,
        zipfile.ZipFile(tmp_path / "mine.npz") as small_archive,
    ):
        archive.writestr("x_train.npy", header.getvalue())
        for name in ("y_train.npy", "x_test.npy", "y_test.npy"):
            archive.writestr(name, small_archive.read(name))
    with pytest.raises(UserError, match=r"x_train \[1000000000, 224, 224, 3\] of uint8 needs 150528.0 GB of memory"):
        sources.load("huge", tmp_path)


@pytest.mark.thorough
def test_a_hundred_thousand_class_names_take_seconds(tmp_path):
    y = np.random.default_rng(0).integers(0, 100_000, 5000)
    x, names = np.zeros((5000, 2, 2), np.uint8), np.char.add("class ", np.arange(100_000).astype(str))
    start = time.process_time()
    dataset = store_and_load(tmp_path, {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "classes": names})
    options = {"num_classes": dataset.num_classes, "clients": 10, "seed": 0, "classes_per_client": 10_000}
    for kind in ("dirichlet", "pcdd"):
        federation = Federation(dataset, partition(kind, y, y, **options))
        assert federation.class_counts.shape == (10, 100_000)
    assert time.process_time() - start < 30


# Names and folders


def test_a_missing_data_set_is_refused_with_the_command_and_the_searched_names(tmp_path):
    with pytest.raises(UserError) as caught:
        sources.load("svhn", tmp_path)
    for text in (f"fedjax-pcdd prepare svhn, with data_dir={tmp_path}", "svhn.npz", "svhn_cropped"):
        assert text in str(caught.value)


def test_the_default_root_is_searched_without_data_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(UserError, match=str(tmp_path)):
        sources.load("mnist")


def test_a_mistyped_name_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(UserError, match="did you mean 'fashion_mnist'"):
        sources.load("fashionmnist", tmp_path)


@pytest.mark.parametrize("name", ["", "..", "../mnist", "/etc/passwd", "a//b"])
def test_paths_are_refused_as_names(tmp_path, name):
    with pytest.raises(UserError, match="cannot be the name"):
        sources.load(name, tmp_path)


def test_unknown_data_sets_are_only_scaled():
    assert pipeline("unheard_of", True, (32, 32, 3)) == Pipeline((0.0,), (1.0,))


def test_every_known_data_set_has_a_description():
    assert set(sources.TFDS_NAMES) < set(sources.DATASETS)
    assert all(text and "\n" not in text for text in sources.DATASETS.values())


# Real files


@pytest.mark.thorough
def test_cifar10_decodes_to_the_published_class_counts():
    dataset = real_dataset("cifar10")
    assert dataset.x_train.shape == (50000, 32, 32, 3)
    np.testing.assert_array_equal(np.bincount(dataset.y_train), [5000] * 10)


@pytest.mark.thorough
def test_cifar10_mean_is_the_normalisation_constant():
    dataset = real_dataset("cifar10")
    mean = dataset.x_train.mean(axis=(0, 1, 2)) / 255
    np.testing.assert_allclose(mean, pipeline("cifar10", False, (32, 32, 3)).mean, atol=5e-4)


def test_a_data_set_without_groups_is_refused_with_the_arrays_to_add():
    with pytest.raises(UserError, match=r"'digits' names no writers .* add domain_train and domain_test to its npz"):
        largest_groups(sources.load("digits"), 3)


def test_femnist_has_105_writers():
    dataset = real_dataset("femnist")
    assert dataset.groups_train is not None
    assert len(np.unique(dataset.groups_train)) == 105


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_mnist_files_are_complete(name):
    dataset = real_dataset(name)
    assert (dataset.x_train.shape, dataset.x_test.shape) == ((60000, 28, 28, 1), (10000, 28, 28, 1))


def test_office_caltech10_has_no_split():
    with pytest.raises(UserError, match="no train/test split"):
        real_dataset("office_caltech10")


@pytest.mark.parametrize("rows", [5, 60])
def test_a_wrong_number_of_labels_is_refused_if_only_some_samples_are_chosen(tmp_path, rows):
    x, y = np.full((20, 4, 4), 7, np.uint8), np.arange(rows) % 2
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=np.arange(20) % 2)
    with pytest.raises(UserError, match=rf"y_train must be integers \[20\], not \[{rows}\]"):
        sources.load("mine", tmp_path, sampler("mine", 4, None, 0))


def test_whether_integers_are_levels_depends_on_all_samples_of_the_file(tmp_path):
    x, y = np.arange(20, dtype=np.int16)[:, None, None] + np.zeros((1, 4, 4), np.int16), np.arange(20) % 2
    x[0, 0, 0] = 300
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    for seed in range(3):
        with pytest.warns(UserWarning, match="holds integers from 0 to 300, no levels"):
            assert sources.load("mine", tmp_path, sampler("mine", 4, None, seed)).x_train.dtype == np.float32


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64])
def test_images_of_only_0_and_1_become_float32_whatever_their_type(dtype):
    x, y = np.random.default_rng(0).integers(0, 2, (2000, 3, 3)), np.arange(2000) % 2
    data = fp.from_arrays(x.astype(dtype), y, x.astype(dtype), y)
    assert data.x_train.dtype == data.x_test.dtype == np.float32
    np.testing.assert_array_equal(data.x_train[..., 0], x)
    bright = x.astype(np.uint8)
    bright[-1] = 2
    assert fp.from_arrays(bright, y, bright, y).x_train.dtype == np.uint8


def test_feature_vectors_of_integers_become_float32(tmp_path):
    for dtype in (np.uint8, np.int64):
        x, y = np.arange(20, dtype=dtype).reshape(10, 2), np.arange(10) % 2
        np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x[:0], y_test=y[:0])
        loaded = sources.load("mine", tmp_path)
        assert (loaded.x_train.dtype, loaded.x_test.dtype) == (np.float32, np.float32)
        np.testing.assert_array_equal(loaded.x_train.reshape(10, 2), x)


def test_an_empty_test_set_takes_the_type_of_the_training_images():
    x = np.full((4, 3, 3, 1), 200)
    data = fp.from_arrays(x, [0, 1, 0, 1], x[:0], [])
    assert data.x_test.dtype == data.x_train.dtype == np.uint8
    with pytest.raises(UserError, match="x_train must be a NumPy array, not a list"):
        fp.Dataset("mine", [[1]], np.zeros(1, int), x, np.zeros(4, int), 2)
    with pytest.raises(UserError, match="groups must be a pair"):
        fp.from_arrays(x, [0, 1, 0, 1], x, [0, 1, 0, 1], groups=np.zeros(4, int))


def test_group_numbers_beyond_32_bits_stay_distinct(tmp_path):
    images, labels = np.zeros((6, 4, 4), np.uint8), np.arange(6) % 2
    writers = np.where(labels == 0, 1, 1 + 2**32)
    arrays = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    np.savez(tmp_path / "mine.npz", **arrays, writer_train=writers, writer_test=writers)
    data = sources.load(str(tmp_path / "mine.npz"))
    assert [len(indices) for indices in fp.partition(data, "natural").partition.train] == [3, 3]


def test_the_largest_groups_are_those_with_the_most_training_samples():
    images, labels = np.zeros((6, 4, 4), np.uint8), np.arange(6) % 2
    groups = np.array([5, 5, 7, 7, 7, 9]), np.array([5, 7, 7, 9, 13, 13])
    data = fp.from_arrays(images, labels, images, labels, groups=groups)
    federation = fp.partition(data, "natural", clients=3)
    assert (federation.sizes.tolist(), federation.test_sizes.tolist()) == ([2, 3, 1], [1, 2, 1])


def test_digits_are_those_of_scikit_learn():
    images, labels = load_digits(return_X_y=True)
    digits = sources.load("digits")
    in_test = sources.ranks(labels) % 5 == 4
    for rows, x, y in ((~in_test, digits.x_train, digits.y_train), (in_test, digits.x_test, digits.y_test)):
        np.testing.assert_array_equal(x.reshape(-1, 64), np.rint(images[rows] * (255 / 16)))
        np.testing.assert_array_equal(y, labels[rows])


def test_levels_stored_as_floats_cause_a_warning(tmp_path):
    arrays = random_arrays()
    levels = arrays["x_train"].astype(np.uint8)
    levels[0, 0, 0] = 255
    for fraction in (0.0, -0.25):  # as a resized image has
        with pytest.warns(UserWarning, match="holds numbers from 0 to 25.* as float32, which reach the model as they"):
            as_images(np.maximum(levels.astype(np.float32) + fraction, 0), "x")
    assert as_images(levels, "x").dtype == as_images(levels.astype(np.int64), "x").dtype == np.uint8
