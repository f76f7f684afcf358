"""Data sets prepared by TensorFlow Datasets: reading, memory-mapping, damage, and the command that prepares them."""

import importlib.util
import io
import json
import shutil
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from fedjax_pcdd.cli.prepare import prepare_main
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.data import prepared as prepared_data
from fedjax_pcdd.data import sources
from fedjax_pcdd.errors import UserError


@pytest.fixture(scope="module")
def tfds():
    pytest.importorskip("array_record", reason="array_record has no wheel for this platform")
    return pytest.importorskip("tensorflow_datasets")


def examples(n, seed):
    """Images as PNG files, so that TFDS has nothing to encode (for which it would need TensorFlow)."""
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
    """The root of a copy of pcdd_tiny/1.0.0 that belongs to one test."""
    return Path(shutil.copytree(prepared_root / "pcdd_tiny", tmp_path / "pcdd_tiny")).parent


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def multiset(x, y):
    return sorted((label, image.tobytes()) for image, label in zip(x, y.tolist(), strict=True))


@pytest.mark.thorough
def test_the_images_and_labels_of_a_prepared_folder_are_read(prepared, no_network):
    dataset = sources.load("pcdd_tiny", prepared)
    for x, y, n, seed in ((dataset.x_train, dataset.y_train, 9, 0), (dataset.x_test, dataset.y_test, 4, 1)):
        assert multiset(x, y) == sorted((label, image.tobytes()) for _, image, _, label in examples(n, seed))


def test_the_classes_of_a_prepared_folder_are_read(prepared):
    dataset = sources.load("pcdd_tiny", prepared)
    assert (dataset.num_classes, dataset.class_names) == (3, ("ant", "bee", "cat"))


def test_a_prepared_folder_is_read_without_tensorflow(prepared, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert sources.load("pcdd_tiny", prepared).x_train.shape == (9, 6, 5, 3)


def test_names_of_this_package_lead_to_those_of_tfds(prepared):
    (prepared / "pcdd_tiny").rename(prepared / "svhn_cropped")
    for file in (prepared / "svhn_cropped" / "1.0.0").iterdir():
        file.rename(file.with_name(file.name.replace("pcdd_tiny", "svhn_cropped")))
    info = prepared / "svhn_cropped" / "1.0.0" / "dataset_info.json"
    info.write_text(info.read_text().replace("pcdd_tiny", "svhn_cropped"))
    assert sources.load("svhn", prepared).name == "svhn"


def test_an_npz_file_is_preferred_to_a_prepared_folder(prepared):
    x, y = np.zeros((12, 5, 4, 3), np.uint8), np.zeros(12, np.int32)
    np.savez(prepared / "pcdd_tiny.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert sources.load("pcdd_tiny", prepared).x_train.shape == (12, 5, 4, 3)


def test_the_newest_complete_version_is_read(prepared):
    (prepared / "pcdd_tiny" / "1.0.0").rename(prepared / "pcdd_tiny" / "10.0.0")
    for version in ("9.0.0", "incomplete.X_11.0.0"):
        (prepared / "pcdd_tiny" / version).mkdir()
        (prepared / "pcdd_tiny" / version / "dataset_info.json").write_text("{}")
    assert len(sources.load("pcdd_tiny", prepared).y_train) == 9


def test_one_of_several_configurations_must_be_named(tmp_path):
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


def test_missing_splits_are_named(prepared):
    file = prepared / "pcdd_tiny" / "1.0.0" / "dataset_info.json"
    info = json.loads(file.read_text())
    info["splits"] = [split for split in info["splits"] if split["name"] == "train"]
    file.write_text(json.dumps(info))
    with pytest.raises(UserError, match="splits train and test"):
        sources.load("pcdd_tiny", prepared)


# Memory-mapped


def mapped(prepared):
    return sources.load("pcdd_tiny", prepared, mapped=True)


@pytest.fixture
def unpacked(prepared):
    """A prepared root that is unpacked already, and the folder of its unpacked files."""
    with pytest.warns(UserWarning, match="was unpacked"):
        mapped(prepared)
    return prepared, prepared / "pcdd_tiny" / "1.0.0.unpacked"


def test_a_prepared_folder_is_unpacked_once_with_a_warning_for_each_file(prepared):
    with pytest.warns(UserWarning, match="was unpacked") as warnings:
        first = mapped(prepared)
    assert sorted(Path(str(warning.message).split()[0]).name for warning in warnings) == sorted(
        f"{key}_{part}.npy" for key in "xy" for part in ("train", "validation")
    )
    assert all(str(warning.message).endswith("1.0.0, to be mapped into memory.") for warning in warnings)
    second = mapped(prepared)  # no warning, which would be an error
    in_memory = sources.load("pcdd_tiny", prepared)
    for dataset in (first, second):
        assert isinstance(dataset.x_train, np.memmap)
        for key in ("x_train", "y_train", "x_test", "y_test"):
            np.testing.assert_array_equal(getattr(dataset, key), getattr(in_memory, key))
            assert getattr(dataset, key).dtype == getattr(in_memory, key).dtype


def test_a_damaged_unpacked_file_is_unpacked_again(unpacked):
    prepared, folder = unpacked
    whole = (folder / "x_train.npy").read_bytes()
    for content in (whole[:-1] + b"!", whole[:-1], b""):
        (folder / "x_train.npy").write_bytes(content)
        with pytest.warns(UserWarning, match="x_train.npy was unpacked"):
            mapped(prepared)
        assert (folder / "x_train.npy").read_bytes() == whole
    for content in ("", "[]", "null"):
        (folder / "y_train.json").write_text(content)
        with pytest.warns(UserWarning, match="y_train.npy was unpacked"):
            mapped(prepared)


def test_a_folder_that_is_prepared_again_is_unpacked_again(unpacked):
    """The training samples are replaced by the test samples."""
    prepared, _ = unpacked
    folder = prepared / "pcdd_tiny" / "1.0.0"
    train, tests = (next(folder.glob(f"*-{part}.array_record*")) for part in ("train", "validation"))
    train.write_bytes(tests.read_bytes())
    info = json.loads((folder / "dataset_info.json").read_text())
    for split in info["splits"]:
        split["shardLengths"] = ["4"]
    (folder / "dataset_info.json").write_text(json.dumps(info))
    with pytest.warns(UserWarning, match="_train.npy was unpacked"):
        data = mapped(prepared)
    assert multiset(data.x_train, data.y_train) == multiset(data.x_test, data.y_test)


def test_damaged_records_are_refused_although_they_are_unpacked_already(unpacked):
    prepared, _ = unpacked
    (file,) = (prepared / "pcdd_tiny" / "1.0.0").glob("*-train.array_record*")
    content = bytearray(file.read_bytes())
    position = content.find(b"IHDR")
    content[position if position > 0 else 200] ^= 255
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"pcdd_tiny/1\.0\.0 cannot be used"):
        mapped(prepared)


def test_images_are_decoded_one_by_one(prepared, monkeypatch):
    """No piece that is written holds more than one image."""
    sizes = []

    def recording_unpacked(source, name, digest, like, count, pieces, original=prepared_data.unpacked):
        def recorded_pieces():
            for piece in pieces():
                sizes.append(len(piece) if name.startswith("x") else 1)
                yield piece

        return original(source, name, digest, like, count, recorded_pieces)

    monkeypatch.setattr(prepared_data, "unpacked", recording_unpacked)
    with pytest.warns(UserWarning, match="was unpacked"):
        mapped(prepared)
    assert set(sizes) == {1}


def test_a_folder_that_cannot_be_unpacked_anywhere_is_refused_with_one_sentence(prepared, monkeypatch):
    (prepared / "pcdd_tiny" / "1.0.0.unpacked").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(prepared / "pcdd_tiny" / "1.0.0.unpacked"))
    with pytest.raises(UserError, match=r"1\.0\.0 cannot be unpacked, 0 MB, into .*XDG_CACHE_HOME") as caught:
        mapped(prepared)
    assert str(caught.value).count("cannot be") == 1


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*was unpacked from")
def test_streaming_a_prepared_folder_trains_to_the_bits_of_data_on_the_device(prepared, tmp_path):
    options = ["--method=fedmr", "--dataset=pcdd_tiny", f"--data-dir={prepared}", "--clients=2", "--beta=100"]
    options += ["--min-samples=1", "--rounds=2", "--local-epochs=1", "--batch-size=2", "--lanes=1", "--model=mlp"]
    rows = {}
    for data in ("device", "stream"):
        folder = tmp_path / data
        assert main([*options, f"--data={data}", f"--run-dir={folder}", "--quiet"]) == 0
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows[data] = [[row["ga"], row["pa"], row["loss"]] for row in records]
    assert rows["stream"] == rows["device"]
    assert (prepared / "pcdd_tiny" / "1.0.0.unpacked" / "x_train.npy").is_file()


# The command that prepares


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


@pytest.mark.parametrize(("name", "sentence"), [("digits", "built in"), ("usps", "usps.npz")])
def test_prepare_refuses_data_sets_that_need_no_preparation(tmp_path, capsys, name, sentence):
    assert prepare_main([name, f"--data-dir={tmp_path}"]) == 2
    assert sentence in capsys.readouterr().err


def test_prepare_lists_the_names_that_it_takes(capsys):
    assert prepare_main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(sources.TFDS_NAMES)
