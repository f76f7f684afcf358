"""Arrays in mapped files: unpacked from archives, and rows of them, which are read as of a file.

A page of a mapped file that was cut meanwhile would end the process; reading it so gives a sentence instead, costs less
than a page fault for each page, and leaves no pages in the process.
"""

import mmap
import os
import shutil
import warnings
import weakref
import zipfile
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pcdd.errors import UserError

_CHUNK = 1 << 24  # bytes that are read at once


def unpacked(file: str | os.PathLike, name: str) -> np.ndarray:
    """An array of an npz archive, mapped from a file that it is unpacked into once, which is said.

    The file lies in `<archive>.unpacked`, or where that cannot be written in the user's cache folder (XDG_CACHE_HOME,
    else ~/.cache); it is used again where its checksum is that in the archive.

    Raises:
      UserError: neither folder can be written, or there is no room.
    """
    path, member = Path(file).absolute(), f"{name}.npy"
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedjax_pcdd" / "unpacked"
    folders = path.with_name(f"{path.name}.unpacked"), own / f"{path.stem}-{zlib.crc32(str(path).encode()):08x}"
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(member)
        for folder in folders:
            if _is_copy(folder / member, info):
                return np.load(folder / member, mmap_mode="r")
        errors: list[OSError] = []
        for folder in folders:
            try:
                return np.load(_copy(archive, info, folder), mmap_mode="r")
            except OSError as error:
                errors.append(error)
    reasons = " and ".join(f"{folder} ({e.strerror or e})" for folder, e in zip(folders, errors, strict=True))
    raise UserError(
        f"{path.name} cannot be unpacked, {info.file_size / 1e6:.0f} MB, into {reasons}: make room, set XDG_CACHE_HOME "
        "to a folder that can be written, or use `data=device`."
    )


def _is_copy(file: Path, info: zipfile.ZipInfo) -> bool:
    """Whether a file holds what a member of an archive does."""
    if not file.is_file() or file.stat().st_size != info.file_size:
        return False
    crc = 0
    with file.open("rb") as opened:
        while part := opened.read(_CHUNK):
            crc = zlib.crc32(part, crc)
    return crc == info.CRC


def _copy(archive: zipfile.ZipFile, info: zipfile.ZipInfo, folder: Path) -> Path:
    """The member as a file of the folder, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    file, half = folder / info.filename, folder / f".{os.getpid()}.{info.filename}"
    try:
        with archive.open(info) as source, half.open("wb") as target:
            shutil.copyfileobj(source, target, _CHUNK)
        half.replace(file)
    finally:
        half.unlink(missing_ok=True)
    warnings.warn(f"{file} was unpacked from {archive.filename}, to be mapped into memory.", stacklevel=4)
    return file


class Rows:
    """Rows [n, ...] that are read some at a time."""

    def __init__(self, array: Any):
        """Args: array: numpy's; of a view of a mapped file that has all of some rows, the file is read."""
        self.array, self.shape, self.dtype = array, array.shape[1:], array.dtype
        self.width = int(np.prod(self.shape)) * self.dtype.itemsize
        mapped = _mapped(array)
        self._file = None
        if mapped is not None:
            self._path, self._start = mapped
            self._file = os.open(self._path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self._known = self._state()

    def _state(self) -> tuple[int, int]:
        assert self._file is not None
        known = os.fstat(self._file)
        return known.st_size, known.st_mtime_ns

    def _check(self, same: bool) -> None:
        if not same:
            raise UserError(f"{self._path} was changed during the run: put it back as it was and resume the run.")

    def read(self, numbers: np.ndarray, into: np.ndarray) -> None:
        """Write the rows with these numbers [m] to the first m of an array [>= m, ...] of the same type.

        Raises:
          UserError: the file is not what it was.
        """
        if self._file is None:
            into[: len(numbers)] = self.array[numbers]
            return
        self._check(self._state() == self._known)
        edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        for first, last in pairwise(edges):  # rows that lie one after another are read as one
            self._read(int(numbers[first]) if last > first else 0, into[first:last])

    def _read(self, row: int, into: np.ndarray) -> None:
        assert self._file is not None
        left, position = into.reshape(-1).view(np.uint8).data, self._start + row * self.width
        while left:
            got = os.preadv(self._file, [left], position)
            self._check(got > 0)
            left, position = left[got:], position + got


def _mapped(array: Any) -> tuple[str, int] | None:
    """Of an array in a mapped file, the file and where in it the array begins."""
    base = array
    while isinstance(base, np.ndarray) and not isinstance(base.base, mmap.mmap):
        base = base.base
    if not isinstance(base, np.memmap) or base.filename is None or not array.flags.c_contiguous:
        return None
    return str(base.filename), int(base.offset) + array.ctypes.data - base.ctypes.data
