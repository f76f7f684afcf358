"""What has become of clients' states since a run began, by rows: checkpoints of states too large to be written whole.

Before the first round states are functions of the seed, so they are made anew and brought up to date. An *entry* is a
folder named after its round, with the rows that changed since the entry before (`rows.npy`) and their values, a file
for each array of a client's state; `entry.json` has their checksums, the round of the entry before, and a *mark* of all
that the log holds up to it, which the round's checkpoint knows, too: entries of another run are noticed. Those that no
checkpoint needs one by one are merged, so that the log holds no more than a few times the states.

Of several processes each writes the rows of its own clients: the first those of the entry, another one a *part*, a
folder `<round>.parts/<process>` that counts once the entry has its checksums.
"""

import json
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pcdd.data.unpacked import checksum
from fedjax_pcdd.engine.mesh import owners_of
from fedjax_pcdd.engine.program import Tree

SLACK = 2  # times the states' size that the entries may have before they are merged
NOTHING: Mapping[str, int] = {}
NOTED, MERGED, PARTS = "entry.json", "-merged", ".parts"


class Changed(NamedTuple):
    """Clients' states of which a checkpoint writes what changed."""

    rows: np.ndarray  # in order
    states: Tree  # of all clients, numpy arrays
    owners: np.ndarray | None = None  # of several processes the one that has each client's

    def own(self) -> "Changed":
        """Those of this process."""
        if self.owners is None:
            return self
        return self._replace(rows=self.rows[self.owners[self.rows] == jax.process_index()])

    def values(self) -> list[np.ndarray]:
        """The states of the rows, copied."""
        return [leaf[self.rows] for leaf in jax.tree.leaves(self.states)]


class Part(NamedTuple):
    """What another process has written of an entry."""

    process: int
    files: list[int]  # their checksums


class ClientLog:
    """The entries of one run."""

    def __init__(self, folder: Path):
        """Args: folder: made with the first entry."""
        self.folder = folder

    def append(self, round: int, rows: np.ndarray, values: Sequence[np.ndarray], parts: Sequence[Part] = ()) -> int:
        """Write the entry of a round, to which parts of other processes belong that are written already; its mark."""
        before, names = self._needed(round - 1), _names(len(values))
        theirs = {
            f"../{round}{PARTS}/{p}/{name}": crc for p, crcs in parts for name, crc in zip(names, crcs, strict=True)
        }
        with self._writing(str(round), before[-1] if before else None, theirs) as entry:
            _save(entry, rows, values)
        return _noted(self.folder / str(round))["mark"]

    def append_part(self, round: int, process: int, rows: np.ndarray, values: Sequence[np.ndarray]) -> Part:
        """Write this process's part of the entry of a round, and return when it is there."""
        folder = self.folder / f"{round}{PARTS}" / str(process)
        unfinished = folder.with_name(f"{process}.unfinished")
        for old in (folder, unfinished):
            shutil.rmtree(old, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _save(unfinished, rows, values)
        _flush(unfinished)
        unfinished.rename(folder)
        return Part(process, [checksum(folder / name) for name in _names(len(values))])

    def replay(self, round: int, states: Tree) -> None:
        """Bring initial states to what they were after a round, in place; those of this process's clients."""
        leaves = jax.tree.leaves(states)
        for folder in [part for entry in self._needed(round) for part in _parts(entry)]:
            rows, *values = (np.load(folder / name, mmap_mode="r") for name in _names(len(leaves)))
            own = owners_of(rows, len(leaves[0])) == jax.process_index()
            for leaf, new in zip(leaves, values, strict=True):
                leaf[rows[own]] = new[own]

    def check(self, round: int, mark: int | None) -> None:
        """ValueError where an entry that this round needs is missing, damaged or of another run.

        Args:
          mark: what `append` returned; None of a checkpoint that was written when entries had none.
        """
        last, known = 0, None
        for entry in self._needed(round):
            noted = _noted(entry)
            whole = all(checksum(entry / name) == crc for name, crc in noted["files"].items())
            if not whole or (noted["before"], noted.get("follows")) != (last, known):
                raise ValueError(f"the entry {entry.name} of {self.folder.name} is damaged, or not of the one before")
            last, known = _round(entry), noted.get("mark")
        if last != round:
            raise ValueError(f"the entry {round} of {self.folder.name} is missing")
        if mark is not None and known != mark:
            raise ValueError(f"the entry {round} of {self.folder.name} is of another run")

    def discard_after(self, round: int) -> None:
        """Remove the entries of later rounds, and what a killed process left behind."""
        kept = {folder for entry in self._needed(round) for folder in (entry, _parts_of(entry))}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path not in kept:
                shutil.rmtree(path)

    def merge(self, until: int, states: Tree) -> None:
        """Join the entries up to a round where they are much larger than the states of all clients."""
        entries, leaves = self._needed(until), jax.tree.leaves(states)
        parts = [part for entry in entries for part in _parts(entry)]
        size = sum(file.stat().st_size for part in parts for file in part.iterdir())
        if len(entries) < 2 or size <= SLACK * sum(leaf.nbytes for leaf in leaves):
            return
        changed = [np.load(part / "rows.npy") for part in parts]
        rows = np.unique(np.concatenate(changed))
        with self._writing(f"{_round(entries[-1])}{MERGED}", None, last=entries[-1]) as merged:
            np.save(merged / "rows.npy", rows)
            for name, leaf in zip(_names(len(leaves))[1:], leaves, strict=True):
                shape = (len(rows), *leaf.shape[1:])
                array = np.lib.format.open_memmap(merged / name, "w+", leaf.dtype, shape)
                for part, own in zip(parts, changed, strict=True):
                    array[np.searchsorted(rows, own)] = np.load(part / name, mmap_mode="r")
                array.flush()
        for entry in entries:
            shutil.rmtree(entry)
            shutil.rmtree(_parts_of(entry), ignore_errors=True)

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
    def _writing(
        self, name: str, before: Path | None, theirs: Mapping[str, int] = NOTHING, last: Path | None = None
    ) -> Iterator[Path]:
        """A folder that becomes an entry, whole or not at all; checksums of files of other processes belong to it.

        Args:
          before: the entry that it follows, None for the first.
          last: the last one of those that it holds, where these were merged.
        """
        unfinished, path = self.folder / f"{name}.unfinished", self.folder / name
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        yield unfinished
        files = {file.name: checksum(file) for file in sorted(unfinished.iterdir())} | dict(theirs)
        noted = {"before": 0, "files": files}
        if before is not None:
            noted |= {"before": _round(before), "follows": _noted(before).get("mark")}
        noted["mark"] = zlib.crc32(json.dumps(noted).encode()) if last is None else _noted(last).get("mark")
        (unfinished / NOTED).write_text(json.dumps(noted))
        _flush(unfinished)
        if path.exists():
            shutil.rmtree(path)
        unfinished.rename(path)


def _noted(entry: Path) -> dict[str, Any]:
    return json.loads((entry / NOTED).read_text())


def _parts_of(entry: Path) -> Path:
    """Where other processes have written what belongs to an entry."""
    return entry.with_name(f"{entry.name}{PARTS}")


def _parts(entry: Path) -> list[Path]:
    """The folders of an entry with rows: its own, and those of other processes."""
    return [(entry / name).parent for name in _noted(entry)["files"] if name.endswith("rows.npy")]


def _save(folder: Path, rows: np.ndarray, values: Sequence[np.ndarray]) -> None:
    for name, array in zip(_names(len(values)), [rows, *values], strict=True):
        np.save(folder / name, array)


def _flush(folder: Path) -> None:
    for file in folder.iterdir():
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())


def _names(leaves: int) -> list[str]:
    return ["rows.npy", *(f"{i}.npy" for i in range(leaves))]


def _round(entry: Path) -> int:
    return int(entry.name.removesuffix(MERGED))
