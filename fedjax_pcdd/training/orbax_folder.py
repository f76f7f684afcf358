"""Orbax on a folder of checkpoints: its manager, removal of what it leaves behind, and checks of its files."""

import asyncio
import errno
import json
import logging
import os
import re
import shutil
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_pcdd.data.unpacked import checksum

REMOVED = "removed"
_FILES = "files.json"


class _Together(ocp.type_handlers.NumpyHandler):
    """Reports a failed write only when all writes have ended.

    Orbax closes the event loop of all arrays as soon as one of them fails, as on a full disk. TensorStore then prints a
    traceback for every other write that ends and finds its loop closed.
    """

    async def serialize(self, values: Sequence[np.ndarray], infos: Any, args: Any = None) -> Any:
        """Futures of the writes."""
        self._left, self._ended = len(values), asyncio.Event()
        return await super().serialize(values, infos, args)

    async def _open_and_write(self, *arguments: Any) -> None:
        try:
            await super()._open_and_write(*arguments)
        finally:
            self._left -= 1
            if not self._left:
                self._ended.set()
            await self._ended.wait()


def open_manager(folder: Path, alias: Path, retention: Any) -> ocp.CheckpointManager:
    """A manager that waits for no other process.

    Args:
      folder: the checkpoints; if this process writes, what a killed one left half-written or half-removed is removed.
      alias: a path to the folder in characters that Orbax does not misread.
      retention: decides which checkpoints to keep; None for a manager that writes nothing.
    """
    writes, process = retention is not None, jax.process_index()
    if writes:
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link")
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder)
    alone = ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process{process}"
    )
    # Compression takes three times as long as writing and shrinks trained weights by a tenth at best.
    plain = {"use_compression": False, "multiprocessing_options": alone}
    handlers: dict[str, Any] = {}
    for part in ("server", "clients"):
        arrays = ocp.type_handlers.create_type_handler_registry((np.ndarray, _Together()))
        handlers[part] = ocp.PyTreeCheckpointHandler(**plain, type_handler_registry=arrays)
    handlers["record"] = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    # Renaming is atomic and removing a tree is not: a killed process must not leave half a checkpoint.
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False, preservation_policy=retention, todelete_subdir=REMOVED if writes else None,
        save_root_metadata=False, lightweight_initialize=True, create=False, read_only=not writes,
        multiprocessing_options=alone,
    )  # fmt: skip
    return ocp.CheckpointManager(alias, item_handlers=handlers, options=options)


def remove_unfinished(folder: Path) -> None:
    """Remove incomplete checkpoints; after a failed write, TensorStore's threads may still be adding files to one."""
    left_behind = re.compile(f"{REMOVED}|\\d+{re.escape(ocp.utils.TMP_DIR_SUFFIX)}.*")  # a copy set aside is the user's
    unfinished = [p for p in folder.iterdir() if left_behind.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]
    for path in unfinished:
        deadline = time.monotonic() + 5
        while path.exists() and time.monotonic() < deadline:
            shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.01)


def list_files(checkpoint: Path) -> None:
    """Record the checksums of a checkpoint's files, for `check_files`."""
    files = {str(f.relative_to(checkpoint)): checksum(f) for f in checkpoint.rglob("*") if f.is_file()}
    (checkpoint / _FILES).write_text(json.dumps(files))


def check_files(checkpoint: Path) -> None:
    """Raise ValueError if a file is missing or has other bytes than were written.

    TensorStore would notice too, but leaves reads behind that print tracebacks when they fail one by one. A process
    killed before the list was written leaves a checkpoint without one, which is then only checked by its contents.
    """
    try:
        files = json.loads((checkpoint / _FILES).read_text())
    except (FileNotFoundError, ValueError):
        return
    for name, crc in files.items():
        if not (checkpoint / name).is_file():
            raise ValueError(f"the file {name} is missing")
        if checksum(checkpoint / name) != crc:
            raise ValueError(f"the file {name} has other bytes than were written")


def damage(error: Exception) -> str:
    """Why a checkpoint cannot be read, in words for the user, from the exception."""
    if isinstance(error, FileNotFoundError | KeyError):
        return "a file is missing"
    if isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error)):
        return "an array file is missing or cut short"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[0], 100, placeholder="...")


# Error records are dropped too: Orbax prints the traceback of every exception that it also raises.
logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)
