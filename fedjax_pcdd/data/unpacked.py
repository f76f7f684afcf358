"""Arrays of archives and of prepared data sets, unpacked once into files that are mapped into memory.

The files lie in `<source>.unpacked`, or if that cannot be written in the user's cache folder (XDG_CACHE_HOME, else
~/.cache), and are reused if their checksums match; a warning reports each file that is written.
"""

import json
import os
import secrets
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedjax_pcdd.errors import UserError

_CHUNK = 1 << 24  # bytes read at once


def unpacked(
    source: Path, name: str, digest: str, like: np.ndarray, count: int, pieces: Callable[[], Iterable[np.ndarray]]
) -> np.ndarray:
    """Unpack an array piece by piece and memory-map it; its checksum and the source's digest are stored beside it.

    Args:
      source: file or folder to unpack.
      name: of the array.
      digest: of everything in the source that the array depends on.
      like: a row, of the shape and dtype of all rows.
      count: n, number of rows.
      pieces: makes rows [m, ...], n in total; called only if the file is missing or has another digest.

    Returns:
      [n, ...], read-only.

    Raises:
      UserError: neither folder can be written, or there is no room.
    """
    source, head = source.absolute(), {"descr": like.dtype.str, "fortran_order": False, "shape": (count, *like.shape)}
    fallback = cache_folder() / "unpacked" / f"{source.stem}-{zlib.crc32(str(source).encode()):08x}"
    files = [folder / f"{name}.npy" for folder in (source.with_name(f"{source.name}.unpacked"), fallback)]
    for file in files:
        with suppress(OSError, ValueError):  # the file is missing or not of this kind
            if json.loads(file.with_suffix(".json").read_text()) == _note(digest, file):
                return np.load(file, mmap_mode="r")
    errors: list[OSError] = []
    for file in files:
        try:
            _write(file, digest, head, pieces())
            warnings.warn(f"{file} was unpacked from {source}, to be mapped into memory.", stacklevel=3)
            return np.load(file, mmap_mode="r")
        except OSError as error:
            errors.append(error)
    reasons = " and ".join(f"{file.parent} ({e.strerror or e})" for file, e in zip(files, errors, strict=True))
    raise UserError(
        f"{source} cannot be unpacked, {count * like.nbytes / 1e6:.0f} MB, into {reasons}: make room, set "
        "XDG_CACHE_HOME to a folder that can be written, or use `data=device`."
    )


def cache_folder() -> Path:
    """The cache folder of this package and this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedjax_pcdd"


def _note(digest: str, file: Path) -> dict[str, Any]:
    return {"source": digest, "checksum": checksum(file)}


def _write(file: Path, digest: str, head: dict[str, Any], pieces: Iterable[np.ndarray]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with _whole_or_nothing(file) as target:
        np.lib.format.write_array_header_1_0(target, head)
        for piece in pieces:
            target.write(np.ascontiguousarray(piece).data)
    with _whole_or_nothing(file.with_suffix(".json")) as target:
        target.write(json.dumps(_note(digest, file)).encode())


@contextmanager
def _whole_or_nothing(file: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing; it appears only once it is complete, even if several processes write it."""
    temporary = file.with_name(f".{secrets.token_hex(4)}.{file.name}")
    try:
        with temporary.open("wb") as target:
            yield target
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def checksum(file: Path) -> int:
    """CRC-32 of a file of any size."""
    crc = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
