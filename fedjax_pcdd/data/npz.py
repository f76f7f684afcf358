"""Data sets in npz files: read without pickles, checked, and what is wrong with them said in a sentence.

docs/data.md describes the layouts. Letters: n images, C classes.
"""

import os
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedjax_pcdd.data import text
from fedjax_pcdd.data.federation import Dataset
from fedjax_pcdd.errors import UserError, in_one_line

_GROUPS = ("writer", "domain")
_PARTS = tuple(f"{key}_{part}" for part in ("train", "test") for key in ("x", "y", *_GROUPS))
_KNOWN = (*_PARTS, "x_train_delta", "x_test_delta", "classes", *_GROUPS, "x", *text.KEYS, *text.OPTIONS)
_UNREADABLE = (
    OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def read_npz(file: str | os.PathLike, name: str | None = None) -> Dataset:
    """Read an npz file in one of the layouts of docs/data.md; pickles are never loaded.

    Args:
      file: with a text (see `text.read_text`), or with `x_train`, `y_train`, `x_test`, `y_test` (or
        `x_train_delta`, `x_test_delta`) and, where known, `classes` and `writer_train`, `writer_test` (or
        `writer`: training, then test rows); groups may also be called `domain`.
      name: the data set's name; by default the file's stem.

    Raises:
      UserError: the file is unreadable or does not hold a data set; names the file and what is wrong.
    """
    file = Path(file)
    arrays = read_arrays(file, _KNOWN)
    try:
        if not arrays:
            raise UserError("it holds neither images (x_train, ...) nor a text (text, speech_start, ...).")
        if text.is_text(arrays):
            return text.read_text(arrays, name or file.stem)
        x = {part: _images(arrays, part) for part in ("train", "test")}
        y = {part: _labels(arrays, part, len(x[part])) for part in ("train", "test")}
        groups = _groups(arrays, len(x["train"]), len(x["test"]))
        names, num_classes = _classes(arrays, np.concatenate([y["train"], y["test"]]))
        return Dataset(name or file.stem, x["train"], y["train"], x["test"], y["test"], num_classes, names, *groups)
    except UserError as error:
        raise UserError(f"{file} cannot be used: {error}") from None


def read_arrays(file: str | os.PathLike, wanted: Iterable[str] | None = None) -> dict[str, np.ndarray]:
    """The wanted arrays of an npz file, in this order and as far as they are there; the others are not read.

    Args:
      wanted: None for all there are.

    Raises:
      UserError: it is no readable archive, or a wanted array is a pickle.
    """
    try:
        with open(file, "rb") as stream:
            single_array = stream.read(6) == b"\x93NUMPY"
            if not (single_array or zipfile.is_zipfile(stream)):
                raise ValueError("it is another kind of file, or cut short")
            stream.seek(0)
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            return {
                key: np.asarray(archive[key])
                for key in (archive.files if wanted is None else wanted)
                if key in archive.files
            }
    except _UNREADABLE as error:
        advice = "write it anew with numpy.savez, without object arrays."
        raise UserError(f"{file} is no readable npz archive ({in_one_line(error)}); {advice}") from error


def _images(arrays: dict[str, np.ndarray], part: str) -> np.ndarray:
    """One split's images, uint8 [n, H, W, channels]."""
    delta = arrays.get(f"x_{part}_delta")
    if delta is not None:
        if delta.dtype != np.uint8 or delta.ndim != 4 or delta.shape[1] != 3:
            raise UserError(f"x_{part}_delta must be uint8 [n, 3, H, W], not {delta.dtype} {list(delta.shape)}.")
        return decode_delta(delta)
    x = arrays.get(f"x_{part}")
    if x is None:
        split = "it has no train/test split, since " if "x" in arrays else ""
        raise UserError(f"{split}x_{part} is missing; it needs x_train, y_train, x_test and y_test.")
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or (part == "train" and x.size == 0):
        wanted = "uint8 [n, H, W] or [n, H, W, channels]"
        raise UserError(f"x_{part} must be non-empty {wanted}, not {x.dtype} {list(x.shape)}.")
    return x if x.ndim == 4 else x[..., None]


def _labels(arrays: dict[str, np.ndarray], part: str, n: int) -> np.ndarray:
    y = arrays.get(f"y_{part}")
    if y is None:
        raise UserError(f"y_{part} is missing; it needs x_train, y_train, x_test and y_test.")
    if y.dtype.kind not in "iu" or y.shape != (n,):
        raise UserError(f"y_{part} must be integers [{n}], not {y.dtype} {list(y.shape)}.")
    return y


def _groups(arrays: dict[str, np.ndarray], n_train: int, n_test: int) -> tuple:
    """Groups of training and test rows, ([n_train], [n_test]) int32, or (None, None)."""
    for key in _GROUPS:
        both = [arrays[f"{key}_{part}"] for part in ("train", "test") if f"{key}_{part}" in arrays]
        if not both and key not in arrays:
            continue
        if not both and arrays[key].shape == (n_train + n_test,):
            both = [arrays[key][:n_train], arrays[key][n_train:]]
        fits = [group.shape for group in both] == [(n_train,), (n_test,)]
        if not fits or any(group.dtype.kind not in "iu" for group in both):
            raise UserError(f"{key}_train, {key}_test (or {key}) must give one integer an image.")
        return tuple(group.astype(np.int32) for group in both)
    return None, None


def _classes(arrays: dict[str, np.ndarray], y: np.ndarray) -> tuple[tuple[str, ...] | None, int]:
    """Class names, if given, and the number of classes C; y [n] holds the labels of both splits."""
    low, high = int(y.min()), int(y.max())
    classes = arrays.get("classes")
    if classes is None:
        if low != 0 or high >= len(y):
            raise UserError(f"its labels must run from 0 to C - 1, not from {low} to {high}.")
        return None, high + 1
    if classes.ndim != 1 or low < 0 or high >= len(classes):
        raise UserError(f"its labels run from {low} to {high}, but classes has shape {list(classes.shape)}.")
    return tuple(classes.astype(str).tolist()), len(classes)


def decode_delta(delta: np.ndarray) -> np.ndarray:
    """Undo the delta coding of colour images: red and blue less green, then each pixel less its left one.

    Args:
      delta: [n, 3, H, W] uint8 differences modulo 256.

    Returns:
      [n, H, W, 3] uint8 images.
    """
    images = np.empty((len(delta), *delta.shape[2:], 3), np.uint8)
    np.cumsum(delta.transpose(0, 2, 3, 1), axis=2, dtype=np.uint8, out=images)
    images[..., 0] += images[..., 1]
    images[..., 2] += images[..., 1]
    return images
