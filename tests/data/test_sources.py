"""Data sets from scikit-learn, npz files and prepared TFDS folders."""

import functools
import importlib.util
import io
import json
import os
import shutil
import socket
import sys
import time
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedjax_pcdd.cli.prepare import prepare_main
from fedjax_pcdd.data import npz, sources
from fedjax_pcdd.data.dataset import largest_groups, sampler, subset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.partition import partition
from fedjax_pcdd.errors import UserError

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("PCDD_DATA", REPOSITORY.parent / "shared" / "data"))


def made_up(seed=0, n_train=12, n_test=6, shape=(5, 4, 3)):
    random = np.random.default_rng(seed)
    return {
        "x_train": random.integers(0, 256, (n_train, *shape), dtype=np.uint8),
        "y_train": (np.arange(n_train) % 3).astype(np.uint8),
        "x_test": random.integers(0, 256, (n_test, *shape), dtype=np.uint8),
        "y_test": (np.arange(n_test) % 3).astype(np.uint8),
    }


def test_an_archive_is_unpacked_once_and_anew_where_it_is_another(tmp_path):
    arrays = made_up()
    for seed in (0, 1):
        arrays = made_up(seed)
        np.savez_compressed(tmp_path / "mine.npz", **arrays)
        with pytest.warns(UserWarning, match=r"mine.npz.unpacked/x_\w+.npy was unpacked from"):
            data = sources.load("mine", tmp_path, mapped=True)
        assert isinstance(data.x_train.base, np.memmap)
        np.testing.assert_array_equal(data.x_train, arrays["x_train"])
    sources.load("mine", tmp_path, mapped=True)  # says nothing, as warnings are errors
    file = tmp_path / "mine.npz.unpacked" / "x_test.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.warns(UserWarning, match="x_test.npy was unpacked"):
        np.testing.assert_array_equal(sources.load("mine", tmp_path, mapped=True).x_test, arrays["x_test"])


def test_a_cache_that_cannot_be_written_is_another_or_a_sentence(tmp_path, monkeypatch):
    np.savez(tmp_path / "mine.npz", **made_up())
    (tmp_path / "mine.npz.unpacked").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.warns(UserWarning, match=r"cache/fedjax_pcdd/unpacked/mine-\w+/x_\w+.npy was unpacked"):
        sources.load("mine", tmp_path, mapped=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine.npz"))
    with pytest.raises(UserError, match=r"mine.npz cannot be unpacked.*XDG_CACHE_HOME to a folder that can be written"):
        sources.load("mine", tmp_path, mapped=True)


def stored(folder, arrays, name="mine"):
    np.savez_compressed(folder / f"{name}.npz", **arrays)
    return sources.load(name, folder)


@functools.cache
def real(name):
    if not (DATA / f"{name}.npz").is_file():
        pytest.skip(f"{name}.npz is not in {DATA}; set PCDD_DATA")
    return sources.load(name, DATA)


# Built in


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
    arrays = made_up()
    dataset = stored(tmp_path, arrays)
    for key, value in arrays.items():
        np.testing.assert_array_equal(getattr(dataset, key), value)
    assert dataset.y_train.dtype == np.int32
    assert (dataset.name, dataset.num_classes, dataset.class_names) == ("mine", 3, None)


def test_grey_images_without_channel_axis_get_one(tmp_path):
    assert stored(tmp_path, made_up(shape=(5, 4))).x_train.shape == (12, 5, 4, 1)


def test_classes_give_number_and_names(tmp_path):
    dataset = stored(tmp_path, made_up() | {"classes": np.array(["a", "b", "c", "never"])})
    assert (dataset.num_classes, dataset.class_names) == (4, ("a", "b", "c", "never"))


@pytest.mark.parametrize("key", ["writer", "domain"])
def test_groups_by_split(tmp_path, key):
    groups = {f"{key}_train": np.arange(12) // 4, f"{key}_test": np.arange(6) // 2}
    dataset = stored(tmp_path, made_up() | groups)
    np.testing.assert_array_equal(dataset.groups_train, np.arange(12) // 4)
    np.testing.assert_array_equal(dataset.groups_test, np.arange(6) // 2)


def test_groups_in_one_array_are_training_then_test(tmp_path):
    dataset = stored(tmp_path, made_up() | {"writer": np.arange(18)})
    np.testing.assert_array_equal(dataset.groups_test, np.arange(12, 18))


def test_delta_coding_is_undone():
    images = made_up(shape=(6, 7, 3))["x_train"]
    coded = images.copy()
    coded[..., 0] -= images[..., 1]
    coded[..., 2] -= images[..., 1]
    coded[:, :, 1:] = coded[:, :, 1:] - coded[:, :, :-1].copy()
    np.testing.assert_array_equal(npz.decode_delta(coded.transpose(0, 3, 1, 2)), images)


def test_delta_files_load_as_images(tmp_path):
    arrays = made_up()
    delta = np.zeros((12, 3, 5, 4), np.uint8), np.zeros((6, 3, 5, 4), np.uint8)
    delta[0][:, :, :, 0] = 7
    arrays = {"x_train_delta": delta[0], "x_test_delta": delta[1]} | {k: arrays[k] for k in ("y_train", "y_test")}
    dataset = stored(tmp_path, arrays)
    np.testing.assert_array_equal(dataset.x_train, np.broadcast_to([14, 7, 14], (12, 5, 4, 3)).astype(np.uint8))


BROKEN = {
    "missing images": ({"x_test": None}, "x_test is missing"),
    "missing labels": ({"y_train": None}, "y_train is missing"),
    "float and byte images": ({"x_train": np.zeros((12, 5, 4, 3))}, "x_train is float32 and x_test uint8"),
    "numbers that are none": ({"x_train": np.full((12, 5, 4, 3), np.nan)}, "x_train holds numbers that are not finite"),
    "words": ({"x_train": np.full((12, 5), "a")}, "x_train must be numbers"),
    "films": ({"x_train": np.zeros((12, 2, 5, 4, 3), np.uint8)}, "x_train must be numbers"),
    "flat images": ({"x_test": np.zeros((6, 60), np.uint8)}, "differ in image size"),
    "no images": ({"x_train": np.zeros((0, 5, 4, 3), np.uint8), "y_train": np.zeros(0, int)}, "non-empty"),
    "other size": ({"x_test": np.zeros((6, 9, 4, 3), np.uint8)}, "differ in image size"),
    "float labels": ({"y_train": np.zeros(12)}, "y_train must be integers"),
    "too few labels": ({"y_test": np.zeros(5, int)}, "y_test must be integers"),
    "labels from 1": ({"y_train": np.arange(12) % 3 + 1, "y_test": np.arange(6) % 3 + 1}, "from 1 to 3"),
    "negative labels": ({"y_train": np.arange(12) % 3 - 1}, "from -1 to 2"),
    "absurd labels": ({"y_train": np.arange(12) * 2**40}, "not from 0 to"),
    "too few classes": ({"classes": np.array(["a", "b"])}, r"classes has shape \[2\]"),
    "short groups": ({"writer_train": np.zeros(11, int), "writer_test": np.zeros(6, int)}, "writer_train"),
    "half the groups": ({"writer_train": np.zeros(12, int)}, "writer_test"),
    "object arrays": ({"y_train": np.array([None] * 12)}, "no readable npz archive"),
    "short delta": ({"x_train_delta": np.zeros((12, 5, 4, 3), np.uint8)}, "x_train_delta must be"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_foreign_npz_files_are_named_with_what_is_wrong(tmp_path, case):
    change, reason = BROKEN[case]
    arrays = {key: value for key, value in (made_up() | change).items() if value is not None}
    with pytest.raises(UserError, match=reason) as caught:
        stored(tmp_path, arrays)
    assert str(tmp_path / "mine.npz") in str(caught.value)


def test_files_without_a_split_say_so(tmp_path):
    arrays = made_up()
    with pytest.raises(UserError, match="no train/test split"):
        stored(tmp_path, {"x": arrays["x_train"], "y": arrays["y_train"], "domain": arrays["y_train"]})


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 cut", b"\x93NUMPY", b"\x80\x04."])
def test_what_is_no_archive_is_refused(tmp_path, content):
    (tmp_path / "mine.npz").write_bytes(content)
    with pytest.raises(UserError, match="no readable npz archive"):
        sources.load("mine", tmp_path)


def test_a_single_array_is_refused(tmp_path):
    with open(tmp_path / "mine.npz", "wb") as file:
        np.save(file, np.zeros(3))
    with pytest.raises(UserError, match="single array"):
        sources.load("mine", tmp_path)


def test_every_truncation_is_refused(tmp_path):
    stored(tmp_path, made_up())
    content = (tmp_path / "mine.npz").read_bytes()
    for length in np.linspace(0, len(content) - 1, 60, dtype=int):
        (tmp_path / "mine.npz").write_bytes(content[:length])
        with pytest.raises(UserError, match=r"mine\.npz"):
            sources.load("mine", tmp_path)


def test_damaged_bytes_are_refused_or_harmless(tmp_path):
    expected = stored(tmp_path, made_up())
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


def test_of_a_large_file_only_the_samples_that_are_wanted_are_in_memory(tmp_path, monkeypatch):
    x = np.arange(2000, dtype=np.uint8).reshape(-1, 1, 1) + np.zeros((1, 160, 160), np.uint8)  # 51 MB
    y = np.arange(2000) % 3
    np.savez_compressed(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x[:9], y_test=y[:9])
    keep = sampler("mine", 30, None, 0)
    whole = subset(sources.load("mine", tmp_path), keep)
    monkeypatch.setattr(npz, "_CHUNK", 1 << 20)
    tracemalloc.start()
    part = sources.load("mine", tmp_path, keep)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(part.x_train, whole.x_train)
    np.testing.assert_array_equal(part.y_train, whole.y_train)
    assert peak < 10e6


def test_arrays_larger_than_memory_are_refused_by_their_header(tmp_path):
    stored(tmp_path, made_up())
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (10**9, 224, 224, 3)}
    )
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive, zipfile.ZipFile(tmp_path / "mine.npz") as other:
        archive.writestr("x_train.npy", header.getvalue())
        for name in ("y_train.npy", "x_test.npy", "y_test.npy"):
            archive.writestr(name, other.read(name))
    with pytest.raises(UserError, match=r"x_train \[1000000000, 224, 224, 3\] of uint8 needs 150528.0 GB of memory"):
        sources.load("huge", tmp_path)


def test_a_hundred_thousand_class_names_take_seconds(tmp_path):
    y = np.random.default_rng(0).integers(0, 100_000, 5000)
    x, names = np.zeros((5000, 2, 2), np.uint8), np.char.add("class ", np.arange(100_000).astype(str))
    start = time.process_time()
    data = stored(tmp_path, {"x_train": x, "y_train": y, "x_test": x, "y_test": y, "classes": names})
    options = {"num_classes": data.num_classes, "clients": 10, "seed": 0, "classes_per_client": 10_000}
    for kind in ("dirichlet", "pcdd"):
        made = Federation(data, partition(kind, y, y, **options))
        assert made.class_counts.shape == (10, 100_000)
    assert time.process_time() - start < 30


# Names and places


def test_missing_data_set_gives_the_command_and_the_places(tmp_path):
    with pytest.raises(UserError) as caught:
        sources.load("svhn", tmp_path)
    for part in (f"fedjax-pcdd prepare svhn --data-dir={tmp_path}", "svhn.npz", "svhn_cropped"):
        assert part in str(caught.value)


def test_default_root_is_searched_without_data_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    with pytest.raises(UserError, match=str(tmp_path)):
        sources.load("mnist")


def test_mistyped_name_names_the_nearest(tmp_path):
    with pytest.raises(UserError, match="did you mean 'fashion_mnist'"):
        sources.load("fashionmnist", tmp_path)


@pytest.mark.parametrize("name", ["", "..", "../mnist", "/etc/passwd", "a//b"])
def test_paths_are_no_names(tmp_path, name):
    with pytest.raises(UserError, match="cannot be the name"):
        sources.load(name, tmp_path)


def test_unknown_sets_are_only_scaled():
    assert sources.spec("unheard_of") == sources.DatasetSpec((0.0,), (1.0,), ())


def test_every_known_set_is_described():
    assert set(sources.TFDS_NAMES) < set(sources.DATASETS)
    assert all(text and "\n" not in text for text in sources.DATASETS.values())


# Prepared TFDS folders


@pytest.fixture(scope="module")
def tfds():
    pytest.importorskip("array_record", reason="array_record has no wheel for this platform")
    return pytest.importorskip("tensorflow_datasets")


def examples(n, seed):
    """PNG files, so that TFDS has nothing to encode (for which it would need TensorFlow)."""
    from PIL import Image

    for i, image in enumerate(np.random.default_rng(seed).integers(0, 256, (n, 6, 5, 3), dtype=np.uint8)):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        yield i, image, io.BytesIO(file.getvalue()), i % 3


@pytest.fixture(scope="module")
def builder_class(tfds):
    class PcddTiny(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "id": tfds.features.Text(),
                "image": tfds.features.Image(shape=(6, 5, 3)),
                "label": tfds.features.ClassLabel(names=["ant", "bee", "cat"]),
            }
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(9, 0), "validation": self._generate_examples(4, 1)}

        def _generate_examples(self, n, seed):
            for i, _, png, label in examples(n, seed):
                yield i, {"id": str(i), "image": png, "label": label}

    return PcddTiny


@pytest.fixture(scope="module")
def prepared_root(builder_class, tmp_path_factory):
    root = tmp_path_factory.mktemp("tfds")
    builder_class(data_dir=root, file_format="array_record").download_and_prepare()
    return root


@pytest.fixture
def prepared(prepared_root, tmp_path):
    """A folder of its own: root/pcdd_tiny/1.0.0."""
    return Path(shutil.copytree(prepared_root / "pcdd_tiny", tmp_path / "pcdd_tiny")).parent


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def multiset(x, y):
    return sorted((label, image.tobytes()) for image, label in zip(x, y.tolist(), strict=True))


def test_prepared_folder_gives_back_the_images(prepared, no_network):
    dataset = sources.load("pcdd_tiny", prepared)
    for x, y, n, seed in ((dataset.x_train, dataset.y_train, 9, 0), (dataset.x_test, dataset.y_test, 4, 1)):
        assert multiset(x, y) == sorted((label, image.tobytes()) for _, image, _, label in examples(n, seed))


def test_prepared_folder_gives_back_the_classes(prepared):
    dataset = sources.load("pcdd_tiny", prepared)
    assert (dataset.num_classes, dataset.class_names) == (3, ("ant", "bee", "cat"))


def test_prepared_folder_is_read_without_tensorflow(prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert sources.load("pcdd_tiny", prepared).x_train.shape == (9, 6, 5, 3)


def test_our_names_lead_to_tfds_names(prepared):
    (prepared / "pcdd_tiny").rename(prepared / "svhn_cropped")
    for file in (prepared / "svhn_cropped" / "1.0.0").iterdir():
        file.rename(file.with_name(file.name.replace("pcdd_tiny", "svhn_cropped")))
    info = prepared / "svhn_cropped" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("pcdd_tiny", "svhn_cropped"))
    assert sources.load("svhn", prepared).name == "svhn"


def test_npz_comes_before_tfds(prepared):
    assert stored(prepared, made_up(), "pcdd_tiny").x_train.shape == (12, 5, 4, 3)


def test_newest_version_is_read(prepared):
    (prepared / "pcdd_tiny" / "1.0.0").rename(prepared / "pcdd_tiny" / "10.0.0")
    for version in ("9.0.0", "incomplete.X_11.0.0"):
        (prepared / "pcdd_tiny" / version).mkdir()
        (prepared / "pcdd_tiny" / version / "dataset_info.json").write_text("{}")
    assert len(sources.load("pcdd_tiny", prepared).y_train) == 9


def test_several_configurations_must_be_named(tmp_path):
    for configuration in ("letters", "digits"):
        (tmp_path / "kinds" / configuration / "1.0.0").mkdir(parents=True)
        (tmp_path / "kinds" / configuration / "1.0.0" / "dataset_info.json").write_text("{}")
    with pytest.raises(UserError, match="kinds/digits, kinds/letters"):
        sources.load("kinds", tmp_path)


def test_other_file_formats_are_refused_with_the_command(prepared):
    file = prepared / "pcdd_tiny" / "1.0.0" / "dataset_info.json"
    info = json.loads(file.read_text())
    info["fileFormat"] = "tfrecord"
    file.write_text(json.dumps(info))
    for shard in file.parent.glob("*.array_record*"):
        shard.rename(shard.with_name(shard.name.replace("array_record", "tfrecord")))
    with pytest.raises(UserError, match="fedjax-pcdd prepare pcdd_tiny"):
        sources.load("pcdd_tiny", prepared)


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json", "pcdd_tiny-train.array_record*"])
def test_damaged_prepared_folders_are_named(prepared, name):
    (file,) = (prepared / "pcdd_tiny" / "1.0.0").glob(name)
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(UserError, match=r"pcdd_tiny/1\.0\.0 cannot be used"):
        sources.load("pcdd_tiny", prepared)


def test_missing_split_is_named(prepared):
    file = prepared / "pcdd_tiny" / "1.0.0" / "dataset_info.json"
    info = json.loads(file.read_text())
    info["splits"] = [split for split in info["splits"] if split["name"] == "train"]
    file.write_text(json.dumps(info))
    with pytest.raises(UserError, match="splits train and test"):
        sources.load("pcdd_tiny", prepared)


# experiments/prepare.py


def pretend_tensorflow(monkeypatch, present):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if present else None)


def test_prepare_without_tensorflow_is_one_sentence_and_exit_code_2(monkeypatch, tmp_path, capsys):
    pretend_tensorflow(monkeypatch, False)
    assert prepare_main(["mnist", f"--data-dir={tmp_path}"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_prepare_without_network_is_one_sentence_and_exit_code_2(tfds, builder_class, monkeypatch, tmp_path, capsys):
    def unreachable(*_, **__):
        raise ConnectionError("no route to host")

    pretend_tensorflow(monkeypatch, True)
    monkeypatch.setattr(builder_class, "download_and_prepare", unreachable)
    assert prepare_main(["pcdd_tiny", f"--data-dir={tmp_path}"]) == 2
    assert "could not be downloaded" in capsys.readouterr().err


def test_what_prepare_writes_is_what_load_reads(builder_class, monkeypatch, tmp_path):
    pretend_tensorflow(monkeypatch, True)
    assert prepare_main(["pcdd_tiny", f"--data-dir={tmp_path}"]) == 0
    assert sources.load("pcdd_tiny", tmp_path).x_train.shape == (9, 6, 5, 3)


@pytest.mark.parametrize(("name", "says"), [("digits", "built in"), ("usps", "usps.npz")])
def test_prepare_says_what_needs_no_preparation(tmp_path, capsys, name, says):
    assert prepare_main([name, f"--data-dir={tmp_path}"]) == 2
    assert says in capsys.readouterr().err


def test_prepare_lists_its_names(capsys):
    assert prepare_main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(sources.TFDS_NAMES)


# Real files


def test_cifar10_decodes_to_the_published_class_counts():
    dataset = real("cifar10")
    assert dataset.x_train.shape == (50000, 32, 32, 3)
    np.testing.assert_array_equal(np.bincount(dataset.y_train), [5000] * 10)


def test_cifar10_mean_is_the_normalisation_constant():
    dataset = real("cifar10")
    mean = dataset.x_train.mean(axis=(0, 1, 2)) / 255
    np.testing.assert_allclose(mean, sources.spec("cifar10").mean, atol=5e-4)


def test_a_data_set_without_groups_says_which_arrays_would_name_them():
    with pytest.raises(UserError, match=r"'digits' names no writers .* add domain_train and domain_test to its npz"):
        largest_groups(sources.load("digits"), 3)


def test_femnist_has_its_writers():
    dataset = real("femnist")
    assert dataset.groups_train is not None
    assert len(np.unique(dataset.groups_train)) == 105


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_mnist_files_are_whole(name):
    dataset = real(name)
    assert (dataset.x_train.shape, dataset.x_test.shape) == ((60000, 28, 28, 1), (10000, 28, 28, 1))


def test_office_caltech10_has_no_split():
    with pytest.raises(UserError, match="no train/test split"):
        real("office_caltech10")
