"""What has become of clients' states since a run began, by rows: checkpoints of states too large to be written whole.

Before the first round states are functions of the seed, so they are made anew and brought up to date. An *entry* is a
folder named after its round, with the rows that changed since the entry before (`rows.npy`) and their values, a file
for each array of a client's state; `entry.json` has their checksums and the round of the entry before. Entries that no
checkpoint needs one by one are merged, so that the log holds no more than a few times the states.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from fedjax_pcdd.engine.mesh import owners_of
from fedjax_pcdd.engine.program import Tree

SLACK = 2  # times the states' size that the entries may have before they are merged
CHUNK = 2**24  # bytes of a file that are read at once
NOTED, MERGED = "entry.json", "-merged"


class Changed(NamedTuple):
    """Clients' states of which a checkpoint writes what changed."""

    rows: np.ndarray  # in order
    states: Tree  # of all clients, numpy arrays
    owners: np.ndarray | None = None  # of several processes the one that has each client's

    def values(self) -> list[np.ndarray]:
        """The states of the rows, in every process those of all; all take part."""
        leaves = [leaf[self.rows] for leaf in jax.tree.leaves(self.states)]
        if self.owners is None:
            return leaves
        first = self.owners[self.rows], np.arange(len(self.rows))
        return [np.asarray(multihost_utils.process_allgather(leaf))[first] for leaf in leaves]


class ClientLog:
    """The entries of one run."""

    def __init__(self, folder: Path):
        """Args: folder: made with the first entry."""
        self.folder = folder

    def append(self, round: int, rows: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Write the entry of a round."""
        before = [r for r in self._entries() if r < round]
        with self._writing(str(round), max(before, default=0)) as entry:
            for name, array in zip(_names(len(values)), [rows, *values], strict=True):
                np.save(entry / name, array)

    def replay(self, round: int, states: Tree) -> None:
        """Bring initial states to what they were after a round, in place; those of this process's clients."""
        leaves = jax.tree.leaves(states)
        for entry in self._needed(round):
            rows, *values = (np.load(entry / name, mmap_mode="r") for name in _names(len(leaves)))
            own = owners_of(rows, len(leaves[0])) == jax.process_index()
            for leaf, new in zip(leaves, values, strict=True):
                leaf[rows[own]] = new[own]

    def check(self, round: int) -> None:
        """ValueError where an entry that this round needs is missing or damaged."""
        last = 0
        for entry in self._needed(round):
            noted = json.loads((entry / NOTED).read_text())
            if noted["before"] != last or any(_checksum(entry / name) != crc for name, crc in noted["files"].items()):
                raise ValueError(
                    f"the entry {entry.name} of {self.folder.name} is damaged, or the one before is missing"
                )
            last = _round(entry)
        if last != round:
            raise ValueError(f"the entry {round} of {self.folder.name} is missing")

    def discard_after(self, round: int) -> None:
        """Remove the entries of later rounds, and what a killed process left behind."""
        kept = set(self._needed(round))
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path not in kept:
                shutil.rmtree(path)

    def merge(self, until: int, states: Tree) -> None:
        """Join the entries up to a round where they are much larger than the states of all clients."""
        entries, leaves = self._needed(until), jax.tree.leaves(states)
        size = sum(file.stat().st_size for entry in entries for file in entry.iterdir())
        if len(entries) < 2 or size <= SLACK * sum(leaf.nbytes for leaf in leaves):
            return
        changed = [np.load(entry / "rows.npy") for entry in entries]
        rows = np.unique(np.concatenate(changed))
        with self._writing(f"{_round(entries[-1])}{MERGED}", 0) as merged:
            np.save(merged / "rows.npy", rows)
            for name, leaf in zip(_names(len(leaves))[1:], leaves, strict=True):
                shape = (len(rows), *leaf.shape[1:])
                array = np.lib.format.open_memmap(merged / name, "w+", leaf.dtype, shape)
                for entry, own in zip(entries, changed, strict=True):
                    array[np.searchsorted(rows, own)] = np.load(entry / name, mmap_mode="r")
                array.flush()
        for entry in entries:
            shutil.rmtree(entry)

    def _entries(self) -> dict[int, Path]:
        """By round; of what a merged entry holds, that alone."""
        paths = (
            [p for p in self.folder.iterdir() if p.name.removesuffix(MERGED).isdigit()] if self.folder.is_dir() else []
        )
        whole = max((_round(p) for p in paths if p.name.endswith(MERGED)), default=-1)
        kept = [p for p in paths if _round(p) > whole or p.name == f"{whole}{MERGED}"]
        return {_round(path): path for path in sorted(kept, key=_round)}

    def _needed(self, round: int) -> list[Path]:
        return [path for r, path in self._entries().items() if r <= round]

    @contextmanager
    def _writing(self, name: str, before: int) -> Iterator[Path]:
        """A folder that becomes an entry, whole or not at all."""
        unfinished, path = self.folder / f"{name}.unfinished", self.folder / name
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        noted = {"before": before, "files": {file.name: _checksum(file) for file in sorted(unfinished.iterdir())}}
        (unfinished / NOTED).write_text(json.dumps(noted))
        for file in unfinished.iterdir():
            with file.open("rb+") as opened:
                os.fsync(opened.fileno())
        if path.exists():
            shutil.rmtree(path)
        unfinished.rename(path)


def _names(leaves: int) -> list[str]:
    return ["rows.npy", *(f"{i}.npy" for i in range(leaves))]


def _round(entry: Path) -> int:
    return int(entry.name.removesuffix(MERGED))


def _checksum(file: Path) -> int:
    crc = 0
    with file.open("rb") as opened:
        while part := opened.read(CHUNK):
            crc = zlib.crc32(part, crc)
    return crc
