"""Rows of arrays in memory-mapped files, read with ordinary file reads.

If a mapped file is truncated meanwhile, touching a missing page kills the process; file reads give an error message
instead, cost less than a page fault per page, and leave no pages in the process.
"""

import mmap
import os
import weakref
from itertools import pairwise
from typing import Any

import numpy as np

from fedjax_pcdd.errors import UserError


class Rows:
    """Rows [n, ...] of which some are read at a time."""

    def __init__(self, array: Any):
        """Args: array: of NumPy; if it is a contiguous view of a mapped file, the rows are read from the file."""
        self.array, self.shape, self.dtype = array, array.shape[1:], array.dtype
        self.width = int(np.prod(self.shape)) * self.dtype.itemsize
        self._file: Any = None
        if mapped := _mapped(array):
            self._path, self._start = mapped
            self._file = os.open(self._path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
            self._known = self._state()

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._file)
        return status.st_size, status.st_mtime_ns

    def _check(self, same: bool) -> None:
        if not same:
            raise UserError(f"{self._path} was changed during the run: put it back as it was and resume the run.")

    def read(self, numbers: np.ndarray, into: np.ndarray) -> None:
        """Write the rows with these numbers [m] to the first m of an array [>= m, ...] of the same type.

        Raises:
          UserError: the file has changed.
        """
        if self._file is None:
            into[: len(numbers)] = self.array[numbers]
            return
        self._check(self._state() == self._known)
        edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        for first, last in pairwise(edges):  # consecutive rows are read at once
            self._read(int(numbers[first]) if last > first else 0, into[first:last])

    def _read(self, row: int, into: np.ndarray) -> None:
        remaining, position = into.reshape(-1).view(np.uint8).data, self._start + row * self.width
        while remaining:
            count = os.preadv(self._file, [remaining], position)
            self._check(count > 0)
            remaining, position = remaining[count:], position + count


def _mapped(array: Any) -> tuple[str, int] | None:
    """The mapped file that holds an array, and the offset where the array begins; None if there is none.

    What was written into a map of mode "c" is in memory alone.
    """
    base = array
    while isinstance(base, np.ndarray) and not isinstance(base.base, mmap.mmap):
        base = base.base
    if not isinstance(base, np.memmap) or base.filename is None or base.mode == "c" or not array.flags.c_contiguous:
        return None
    return str(base.filename), int(base.offset) + array.ctypes.data - base.ctypes.data
