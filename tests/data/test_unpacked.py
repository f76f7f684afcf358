"""Arrays of archives in memory-mapped files: unpacked once, with a warning; checked; refused without room."""

import errno
import json
import os

import numpy as np
import pytest

from fedjax_pcdd.cli.run import main
from fedjax_pcdd.data import npz, sources, unpacked
from fedjax_pcdd.engine.streaming import Streamed
from fedjax_pcdd.errors import UserError


def random_arrays(seed=0):
    rng, labels = np.random.default_rng(seed), np.arange(18, dtype=np.uint8) % 3
    x = rng.integers(0, 256, (18, 5, 4, 3), dtype=np.uint8)
    return {"x_train": x[:12], "y_train": labels[:12], "x_test": x[12:], "y_test": labels[12:]}


def test_an_archive_is_unpacked_once_and_again_if_it_or_its_copy_changes(tmp_path):
    for seed in (0, 1):
        arrays = random_arrays(seed)
        np.savez_compressed(tmp_path / "mine.npz", **arrays)
        with pytest.warns(UserWarning, match=r"mine.npz.unpacked/x_\w+.npy was unpacked from"):
            data = sources.load("mine", tmp_path, mapped=True)
        assert isinstance(data.x_train.base, np.memmap)
        np.testing.assert_array_equal(data.x_train, arrays["x_train"])
    sources.load("mine", tmp_path, mapped=True)  # no warning, which would be an error
    copy = tmp_path / "mine.npz.unpacked" / "x_test.npy"
    copy.write_bytes(copy.read_bytes()[:-1] + b"!")
    with pytest.warns(UserWarning, match="x_test.npy was unpacked"):
        np.testing.assert_array_equal(sources.load("mine", tmp_path, mapped=True).x_test, arrays["x_test"])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_floats_are_mapped_as_the_model_takes_them_and_refused_if_not_finite(tmp_path, dtype):
    arrays = random_arrays()
    images = {name: arrays[name].astype(dtype) / 255 for name in ("x_train", "x_test")}
    np.savez(tmp_path / "mine.npz", **(arrays | images))
    with pytest.warns(UserWarning, match="was unpacked"):
        data = sources.load("mine", tmp_path, mapped=True)
    assert isinstance(data.x_train.base, np.memmap)
    np.testing.assert_array_equal(data.x_train, images["x_train"].astype(np.float32))
    assert data.x_train.dtype == np.float32
    images["x_test"][1, 2, 3, 0] = np.finfo(dtype).max if dtype == np.float64 else np.nan
    np.savez(tmp_path / "mine.npz", **(arrays | images))
    with (
        pytest.warns(UserWarning, match="was unpacked"),
        pytest.raises(UserError, match="x_test holds numbers that are"),
    ):
        sources.load("mine", tmp_path, mapped=True)


def test_a_damaged_archive_is_refused_with_a_sentence_when_it_is_mapped(tmp_path):
    np.savez(tmp_path / "mine.npz", **random_arrays())
    content = bytearray((tmp_path / "mine.npz").read_bytes())
    content[content.index(b"y_train.npy") - 200] ^= 255  # in the images, which come before the labels
    (tmp_path / "mine.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"mine.npz is not a readable npz archive .*CRC"):
        sources.load("mine", tmp_path, mapped=True)
    assert not list(tmp_path.rglob("*.np[yz].unpacked/*.npy"))


def test_an_unwritable_folder_is_replaced_by_the_cache_folder_or_refused(tmp_path, monkeypatch):
    np.savez(tmp_path / "mine.npz", **random_arrays())
    (tmp_path / "mine.npz.unpacked").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.warns(UserWarning, match=r"cache/fedjax_pcdd/unpacked/mine-\w+/x_\w+.npy was unpacked"):
        sources.load("mine", tmp_path, mapped=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine.npz"))
    with pytest.raises(UserError, match=r"mine.npz cannot be unpacked.*XDG_CACHE_HOME to a folder that can be written"):
        sources.load("mine", tmp_path, mapped=True)


def delta_coded(images):
    coded = images.copy()
    coded[..., 0] -= images[..., 1]
    coded[..., 2] -= images[..., 1]
    coded[:, :, 1:] = coded[:, :, 1:] - coded[:, :, :-1].copy()
    return coded.transpose(0, 3, 1, 2)


def test_delta_coded_images_are_decoded_in_chunks_once_and_again_if_they_change(tmp_path, monkeypatch):
    monkeypatch.setattr(npz, "_CHUNK", 150)  # two and a half images
    for seed in (0, 1):
        arrays = random_arrays(seed)
        coded = {f"{key}_delta": delta_coded(arrays[key]) for key in ("x_train", "x_test")}
        np.savez_compressed(tmp_path / "mine.npz", y_train=arrays["y_train"], y_test=arrays["y_test"], **coded)
        with pytest.warns(UserWarning, match=r"mine.npz.unpacked/x_\w+.npy was unpacked from"):
            data = sources.load("mine", tmp_path, mapped=True)
        assert isinstance(data.x_train, np.memmap)
        np.testing.assert_array_equal(data.x_train, arrays["x_train"])
        np.testing.assert_array_equal(data.x_test, arrays["x_test"])
    sources.load("mine", tmp_path, mapped=True)  # no warning, which would be an error


@pytest.mark.parametrize("full_folders", [1, 2])
def test_a_full_disk_is_avoided_by_the_cache_folder_or_refused_without_leftovers(tmp_path, monkeypatch, full_folders):
    np.savez(tmp_path / "mine.npz", **random_arrays())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    failures = iter(full_folders * [True])

    def write_header(target, header, original=np.lib.format.write_array_header_1_0):
        original(target, header)
        if next(failures, False):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(unpacked.np.lib.format, "write_array_header_1_0", write_header)
    if full_folders == 1:
        with pytest.warns(UserWarning, match="x_t"):
            sources.load("mine", tmp_path, mapped=True)
    else:
        with pytest.raises(UserError, match=r"into .*No space left on device.* and .*No space left.*: make room"):
            sources.load("mine", tmp_path, mapped=True)
    assert not list(tmp_path.rglob(".*"))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*was unpacked from")
def test_a_copy_truncated_during_a_run_stops_it_and_is_unpacked_again_on_resume(tmp_path, monkeypatch, capsys):
    np.savez(tmp_path / "mine.npz", **random_arrays())
    options = ["--method=fedmr", "--dataset=mine", f"--data-dir={tmp_path}", "--data=stream", "--clients=2"]
    options += ["--beta=100", "--min-samples=1", "--rounds=4", "--local-epochs=1", "--batch-size=2", "--lanes=1"]
    options += ["--model=mlp", "--cohort=1", "--fine-tune-epochs=1", "--quiet"]
    assert main([*options, f"--run-dir={tmp_path / 'whole'}"]) == 0
    plans, copy = [], tmp_path / "mine.npz.unpacked" / "x_train.npy"

    def prefetch(self, plan, jobs, original=Streamed.prefetch):
        plans.append(plan)
        if len(plans) == 2:
            os.truncate(copy, 200)
        original(self, plan, jobs)

    with monkeypatch.context() as patch:
        patch.setattr(Streamed, "prefetch", prefetch)
        assert main([*options, f"--run-dir={tmp_path / 'cut'}"]) == 2
    err = capsys.readouterr().err
    assert err == f"{copy} was changed during the run: put it back as it was and resume the run.\n"
    assert main([f"--resume={tmp_path / 'cut'}"]) == 0
    logs = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "cut")]
    rows = [[[json.loads(line)[key] for key in ("ga", "pa", "loss")] for line in lines] for lines in logs]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 4
