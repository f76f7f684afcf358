"""Data sets in npz files: read without pickles and checked, with a sentence that says what is wrong.

If only some samples of an array are needed, it is read in parts, and arrays that do not fit into memory are refused
by their header. docs/data.md describes the layouts. Letters: n images, C classes.
"""

import math
import os
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from fedjax_pcdd.data import text
from fedjax_pcdd.data.dataset import Dataset, Keep, as_groups, as_images, as_labels, count_classes, keep_all
from fedjax_pcdd.data.memory import check_memory
from fedjax_pcdd.data.unpacked import unpacked
from fedjax_pcdd.errors import UserError, check_file, in_one_line, unreadable

_GROUPS = ("writer", "domain")
_CHUNK = 1 << 24  # bytes read at once from an array of which only some rows are needed
_FEWER = "ask for or store fewer samples, or use `data=stream`"
_UNREADABLE = (
    OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip

Arrays = dict[str, np.ndarray]


class Archive:
    """An npz file whose arrays are read one by one; a `UserError` names the file and what is wrong with it."""

    def __init__(self, file: str | os.PathLike):
        self.file = file
        check_file(file)
        with self._reading():
            with open(file, "rb") as stream:
                if stream.read(6) == b"\x93NUMPY":
                    raise ValueError("it holds a single array")
                if not zipfile.is_zipfile(stream):
                    raise ValueError("it is another kind of file, or cut short")
            self._zip = zipfile.ZipFile(file)
            self.names = [name.removesuffix(".npy") for name in self._zip.namelist()]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise UserError(f"there is no file {self.file}: check the path.") from None
        except PermissionError as error:
            raise unreadable(error, self.file) from error
        except UserError:
            raise
        except _UNREADABLE as error:
            advice = "write it anew with numpy.savez, without object arrays."
            raise UserError(f"{self.file} is not a readable npz archive ({in_one_line(error)}); {advice}") from error

    def read(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Read an array, or its rows [m], ascending; the other rows are then never all in memory."""
        with self._reading(), self._zip.open(f"{name}.npy") as stream:
            shape, fortran, dtype = _header(stream)
            if rows is not None and shape and not fortran and not dtype.hasobject:
                check_memory(f"{self.file} cannot be used: {name}", (len(rows), *shape[1:]), dtype, _FEWER)
                return _rows(stream, rows, shape, dtype)
            check_memory(f"{self.file} cannot be used: {name}", shape, dtype, _FEWER)
        with self._reading(), self._zip.open(f"{name}.npy") as stream:
            return np.lib.format.read_array(stream, allow_pickle=False)[... if rows is None else rows]

    def header(self, name: str) -> tuple[tuple[int, ...], bool, np.dtype]:
        """Shape of an array, whether it is stored column by column, and its dtype."""
        with self._reading(), self._zip.open(f"{name}.npy") as stream:
            return _header(stream)

    def checksum(self, name: str) -> str:
        """Checksum and size of an array as recorded in the archive."""
        info = self._zip.getinfo(f"{name}.npy")
        return f"{info.CRC:08x} {info.file_size}"

    def pieces(self, name: str) -> Iterator[np.ndarray]:
        """Read an array that is stored row by row, some rows [m, ...] at a time."""
        with self._reading(), self._zip.open(f"{name}.npy") as stream:
            shape, _, dtype = _header(stream)
            for _, content in _chunks(stream, shape, dtype):
                yield content


def _header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(stream)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return header(stream)


def _chunks(stream: IO[bytes], shape: tuple[int, ...], dtype: np.dtype) -> Iterator[tuple[int, np.ndarray]]:
    """Read rows of the array that comes next in a stream, some at a time, each chunk with its first row number."""
    width = dtype.itemsize * math.prod(shape[1:])
    chunk = max(1, _CHUNK // max(1, width))
    for start in range(0, shape[0], chunk):
        number = min(chunk, shape[0] - start)
        yield start, np.frombuffer(stream.read(number * width), dtype).reshape(number, *shape[1:])


def _rows(stream: IO[bytes], rows: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    result = np.empty((len(rows), *shape[1:]), dtype)
    for start, content in _chunks(stream, shape, dtype):
        first, last = np.searchsorted(rows, (start, start + len(content)))
        result[first:last] = content[rows[first:last] - start]
    return result


def read_arrays(file: str | os.PathLike, wanted: Iterable[str] | None = None) -> Arrays:
    """Read the wanted arrays of an npz file that exist, in this order; None for all arrays.

    Raises:
      UserError: the file is not a readable archive, a wanted array is a pickle, or they do not fit into memory.
    """
    archive = Archive(file)
    return {key: archive.read(key) for key in (archive.names if wanted is None else wanted) if key in archive.names}


def read_npz(file: str | os.PathLike, name: str | None = None, keep: Keep = keep_all, mapped: bool = False) -> Dataset:
    """Read an npz file in one of the layouts of docs/data.md; pickles are never loaded.

    Args:
      file: with a text (see `text.read_text`), or with `x_train`, `y_train`, `x_test`, `y_test` (or
        `x_train_delta`, `x_test_delta`) and, where known, `classes` and `writer_train`, `writer_test` (or
        `writer`: training, then test rows); groups may also be called `domain`.
      name: the data set's name; by default the file's stem.
      keep: which samples to keep; the images of the others are not kept in memory.
      mapped: unpack the images of all samples into files, once, and memory-map these.

    Raises:
      UserError: the file is unreadable or does not hold a data set; names the file and what is wrong.
    """
    archive = Archive(file)
    try:
        if text.is_text(archive.names):
            return text.read_text(read_arrays(file, (*text.KEYS, *text.OPTIONS)), name or Path(file).stem)
        return _dataset(archive, name or Path(file).stem, keep, mapped)
    except UserError as error:
        raise error if str(file) in str(error) else UserError(f"{file} cannot be used: {error}") from None


def _dataset(archive: Archive, name: str, keep: Keep, mapped: bool) -> Dataset:
    if not {"x_train", "x_train_delta"} & set(archive.names):
        no_split = "it has no train/test split: x_train is missing, and x_test."
        nothing = "it holds neither images (x_train, ...) nor a text (text, speech_start, ...)."
        raise UserError(no_split if "x" in archive.names else nothing)
    fields = {}
    y = {part: as_labels(archive.read(_first(archive, f"y_{part}")), f"y_{part}") for part in ("train", "test")}
    groups = _groups(archive, len(y["train"]), len(y["test"]))
    names, num_classes = _classes(archive, np.concatenate(list(y.values())))
    for part, labels in y.items():
        rows, (shape, *_) = keep(part, labels), archive.header(_first(archive, f"x_{part}_delta", f"x_{part}"))
        number = shape[0] if shape else 0
        fits = number == len(labels)
        # Read first, so that an array that is too large is reported first.
        x = read_images(archive, f"x_{part}", rows, mapped) if fits or rows is None else ()
        if not fits:
            raise UserError(f"y_{part} must be integers [{number}], not {list(labels.shape)}.")
        selected = slice(None) if rows is None else rows
        fields |= {f"x_{part}": x, f"y_{part}": labels[selected]}
        fields |= {f"groups_{part}": groups[part][selected]} if groups else {}
    if not len(fields["x_train"]):
        raise UserError("x_train must be non-empty.")
    return Dataset(name, **fields, num_classes=num_classes, class_names=names)


def _first(archive: Archive, *names: str) -> str:
    """The first of these arrays that the archive has; UserError if it has none."""
    for name in names:
        if name in archive.names:
            return name
    raise UserError(f"{names[-1]} is missing; it needs x_train, y_train, x_test and y_test.")


def read_images(archive: Archive, key: str, rows: np.ndarray | None = None, mapped: bool = False) -> np.ndarray:
    """Read the images [n, H, W, channels] of `key`, or of `<key>_delta`, or only these rows.

    Args:
      mapped: unpack all images into a file, once, and memory-map it; see `unpacked.unpacked`. Of integers wider than
        uint8 only the file is mapped, and the images are made from it in memory.
    """
    name = _first(archive, f"{key}_delta", key)
    coded = name != key
    shape, fortran, dtype = archive.header(name)
    if coded and (dtype != np.uint8 or len(shape) != 4 or shape[1] != 3):
        raise UserError(f"{name} must be uint8 [n, 3, H, W], not {dtype} {list(shape)}.")
    decode = decode_delta if coded else np.asarray
    if mapped and rows is None and shape and math.prod(shape) and not fortran and dtype.kind in "biuf":
        decode = _single if dtype.kind == "f" else decode
        example, digest = decode(np.zeros((1, *shape[1:]), dtype))[0], archive.checksum(name)
        x = unpacked(Path(archive.file), key, digest, example, shape[0], lambda: map(decode, archive.pieces(name)))
    elif rows is not None and dtype.kind in "iu" and dtype != np.uint8:  # all of them tell whether they are levels
        return as_images(archive.read(name), key)[rows]
    else:
        x = decode(archive.read(name, rows))
    return x if coded else as_images(x, key)


def _single(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):  # infinite numbers are refused later
        return x.astype(np.float32, copy=False)


def _groups(archive: Archive, n_train: int, n_test: int) -> Arrays | None:
    """Groups of training and test rows, [n_train] and [n_test]; None if there are none."""
    for key in _GROUPS:
        splits = [archive.read(f"{key}_{part}") for part in ("train", "test") if f"{key}_{part}" in archive.names]
        if not splits and key not in archive.names:
            continue
        if not splits:
            combined = archive.read(key)
            splits = [combined[:n_train], combined[n_train:]] if combined.ndim == 1 else []
        fits = [group.shape for group in splits] == [(n_train,), (n_test,)]
        if not fits or any(group.dtype.kind not in "iu" for group in splits):
            raise UserError(f"{key}_train, {key}_test (or {key}) must give one integer an image.")
        return {part: as_groups(group) for part, group in zip(("train", "test"), splits, strict=True)}
    return None


def _classes(archive: Archive, y: np.ndarray) -> tuple[tuple[str, ...] | None, int]:
    """Class names, if given, and the number of classes C; y [n] holds the labels of both splits."""
    low, high = (int(y.min()), int(y.max())) if y.size else (0, 0)
    if "classes" not in archive.names:
        if low != 0 or high >= max(len(y), 1):
            raise UserError(f"its labels must run from 0 to C - 1, not from {low} to {high}.")
        return None, count_classes(y)
    classes = archive.read("classes")
    if classes.ndim != 1 or high >= len(classes):
        raise UserError(f"its labels run from {low} to {high}, but classes has shape {list(classes.shape)}.")
    try:
        return tuple(classes.astype(str).tolist()), len(classes)
    except UnicodeDecodeError:
        raise UserError("its classes must be texts, not bytes.") from None


def decode_delta(delta: np.ndarray) -> np.ndarray:
    """Undo the delta coding of colour images: red and blue minus green, then each pixel minus its left neighbour.

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
