"""Orbax as checkpoints use it: which it keeps, how it writes, and which process does."""

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

REMOVED = "removed"
PARTS = ("server", "clients")


class Retention:
    """Orbax preservation policy: the `keep` newest checkpoints and the two newest full ones."""

    def __init__(self, keep: int, full: set[int]):
        """Args: full: rounds of the full ones, a set that its owner changes."""
        self._keep, self._full = keep, full

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which of the checkpoints stay."""
        del context
        rounds = sorted(info.step for info in checkpoints)
        kept = {*rounds[-self._keep :], *[r for r in rounds if r in self._full][-2:]}
        return [info.step in kept for info in checkpoints]


def open_manager(folder: Path, retention: Retention, *, writes: bool) -> ocp.CheckpointManager:
    """A manager that waits for no other process; if it writes, in a folder without what a killed one left behind."""
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if not path.name.isdigit():  # half-written or half-removed
                shutil.rmtree(path, ignore_errors=True)
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )
    # Compression takes three times as long as writing and shrinks trained weights by a tenth at best.
    plain = {"use_compression": False, "multiprocessing_options": alone}
    handlers: dict[str, Any] = {part: ocp.PyTreeCheckpointHandler(**plain) for part in PARTS}
    handlers["record"] = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False,
        preservation_policy=retention if writes else None,
        # Renaming is atomic and removing a tree is not: a killed process must not leave half a checkpoint.
        todelete_subdir=REMOVED if writes else None,
        save_root_metadata=False,
        lightweight_initialize=True,
        create=False,
        read_only=not writes,
        multiprocessing_options=alone,
    )
    return ocp.CheckpointManager(folder, item_handlers=handlers, options=options)


def silence_orbax() -> None:
    """Let Orbax log nothing; errors are raised too."""
    logger = logging.getLogger("absl")
    if _is_not_orbax not in logger.filters:
        logger.addFilter(_is_not_orbax)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    # Errors too: Orbax prints the traceback of every exception that it also raises.
    return f"{os.sep}orbax{os.sep}" not in record.pathname
