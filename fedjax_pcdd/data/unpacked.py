"""Arrays of archives and of prepared data sets, unpacked once into files that are mapped into memory.

The files lie in `<source>.unpacked`, or where that cannot be written in the user's cache folder (XDG_CACHE_HOME, else
~/.cache), and are used again where their checksums are right; that one is written is said.
"""

import json
import os
import secrets
import shutil
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from fedjax_pcdd.errors import UserError

_CHUNK = 1 << 24  # bytes that are read at once


def unpacked(archive: str | os.PathLike, name: str) -> np.ndarray:
    """An array of an npz archive, mapped from a file with the checksum that the archive has for it.

    Raises:
      UserError: neither folder can be written, or there is no room.
    """
    with zipfile.ZipFile(archive) as opened:
        info = opened.getinfo(f"{name}.npy")

        def is_copy(file: Path) -> bool:
            return file.stat().st_size == info.file_size and checksum(file) == info.CRC

        def write(file: Path) -> None:
            with opened.open(info) as content, _whole_or_nothing(file) as target:
                shutil.copyfileobj(content, target, _CHUNK)

        return _unpack(Path(archive).absolute(), info.filename, info.file_size, is_copy, write)


def decoded(
    source: Path, name: str, digest: str, like: np.ndarray, count: int, pieces: Callable[[], Iterable[np.ndarray]]
) -> np.ndarray:
    """An array that is decoded from a source piece by piece, mapped; beside it, its checksum and the source's digest.

    Args:
      source: file or folder that is decoded.
      digest: of all of the source that the array depends on.
      like: a row, of the shape and type of all.
      count: n, of rows.
      pieces: makes rows [m, ...], n in all; called only where the file is not there, or is of another digest.

    Returns:
      [n, ...], read-only.

    Raises:
      UserError: neither folder can be written, or there is no room.
    """

    def is_copy(file: Path) -> bool:
        known = json.loads(file.with_suffix(".json").read_text())
        return known == {"source": digest, "checksum": checksum(file)}

    def write(file: Path) -> None:
        with _whole_or_nothing(file) as target:
            head = {"descr": like.dtype.str, "fortran_order": False, "shape": (count, *like.shape)}
            np.lib.format.write_array_header_1_0(target, head)
            for piece in pieces():
                target.write(np.ascontiguousarray(piece).data)
        with _whole_or_nothing(file.with_suffix(".json")) as target:
            target.write(json.dumps({"source": digest, "checksum": checksum(file)}).encode())

    return _unpack(source.absolute(), f"{name}.npy", count * like.nbytes, is_copy, write)


def _unpack(
    source: Path, name: str, size: int, is_copy: Callable[[Path], bool], write: Callable[[Path], None]
) -> np.ndarray:
    """The array of this file in the first folder that has it, or else in the first that takes it."""
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedjax_pcdd" / "unpacked"
    folders = source.with_name(f"{source.name}.unpacked"), own / f"{source.stem}-{zlib.crc32(str(source).encode()):08x}"
    for folder in folders:
        try:
            if is_copy(folder / name):
                return np.load(folder / name, mmap_mode="r")
        except (OSError, ValueError):
            continue  # it is not there, or no such file
    errors: list[OSError] = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write(folder / name)
            warnings.warn(f"{folder / name} was unpacked from {source}, to be mapped into memory.", stacklevel=4)
            return np.load(folder / name, mmap_mode="r")
        except OSError as error:
            errors.append(error)
    reasons = " and ".join(f"{folder} ({e.strerror or e})" for folder, e in zip(folders, errors, strict=True))
    raise UserError(
        f"{source} cannot be unpacked, {size / 1e6:.0f} MB, into {reasons}: make room, set XDG_CACHE_HOME "
        "to a folder that can be written, or use `data=device`."
    )


@contextmanager
def _whole_or_nothing(file: Path) -> Iterator[IO[bytes]]:
    """Opened for writing; the file is there once all is written, whoever else writes the same one."""
    half = file.with_name(f".{secrets.token_hex(4)}.{file.name}")
    try:
        with half.open("wb") as target:
            yield target
        half.replace(file)
    finally:
        half.unlink(missing_ok=True)


def checksum(file: Path) -> int:
    """CRC-32 of a file of any size."""
    crc = 0
    with file.open("rb") as opened:
        while part := opened.read(_CHUNK):
            crc = zlib.crc32(part, crc)
    return crc
