"""A log of the changes to clients' states, by rows: for checkpoints of states that are too large to be written whole.

Before the first round, states are functions of the seed, so a resumed run makes them anew and replays the log. An
*entry* is a folder named after its round, with the rows that changed since the previous entry (`rows.npy`) and their
values, one file for each array of a client's state. Its `entry.json` has their checksums, the round of the previous
entry, and a *mark*, a checksum of all that the log holds up to this entry. The round's checkpoint has the mark too, so
that entries of another run are noticed. Entries that no checkpoint needs one by one are merged, so that the log takes
no more than a few times the space of the states.

In a run of several processes each writes the rows of its own clients: the first writes the entry, every other one a
*part*, a folder `<round>.parts/<process>` that counts once the entry has its checksums.
"""

import json
import os
import re
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

SLACK = 2  # entries may have this many times the size of the states before they are merged
NOTED, MERGED, PARTS = "entry.json", "-merged", ".parts"
_OF_A_LOG = re.compile(rf"\d+({MERGED}|{re.escape(PARTS)})?(\.unfinished)?")


class Changed(NamedTuple):
    """Clients' states, and the changed rows that a checkpoint writes."""

    rows: np.ndarray  # in order
    states: Tree  # of all clients, numpy arrays
    owners: np.ndarray | None = None  # [K] process that has each client's state, if there are several


class ClientLog:
    """The entries of one run."""

    def __init__(self, folder: Path):
        """Args: folder: created with the first entry."""
        self.folder = folder
        self._sizes: dict[Path, int] = {}  # in bytes, of entries that have been asked for it

    def append(
        self, round: int, rows: np.ndarray, values: Sequence[np.ndarray], parts: Sequence[Sequence[int]] = ()
    ) -> int:
        """Write the entry of a round; returns its mark. `parts`: what `append_part` returned to processes 1, 2, ..."""
        earlier, names = self._needed(round - 1), _names(len(values))
        part_files: dict[str, int] = {}
        for p, checksums in enumerate(parts, 1):
            part_files |= {f"../{round}{PARTS}/{p}/{name}": crc for name, crc in zip(names, checksums, strict=True)}
        with self._writing(str(round), earlier[-1] if earlier else None, part_files) as entry:
            _save(entry, rows, values)
        return _noted(self.folder / str(round))["mark"]

    def append_part(self, round: int, process: int, rows: np.ndarray, values: Sequence[np.ndarray]) -> list[int]:
        """Write this process's part of the entry of a round; once it is complete, returns its files' checksums."""
        folder = self.folder / f"{round}{PARTS}" / str(process)
        with _whole_or_not(folder) as unfinished:
            _save(unfinished, rows, values)
        return [checksum(folder / name) for name in _names(len(values))]

    def replay(self, round: int, states: Tree) -> None:
        """Bring the initial states of this process's clients to what they were after a round, in place."""
        leaves = jax.tree.leaves(states)
        for folder in [part for entry in self._needed(round) for part in _parts(entry)]:
            rows, *values = (np.load(folder / name, mmap_mode="r") for name in _names(len(leaves)))
            is_own = owners_of(rows, len(leaves[0])) == jax.process_index()
            for leaf, new in zip(leaves, values, strict=True):
                leaf[rows[is_own]] = new[is_own]

    def check(self, round: int, mark: int | None) -> None:
        """Raise ValueError if an entry that this round needs is missing, damaged or of another run.

        Args:
          mark: what `append` returned; None for a checkpoint that was written when entries had no marks.
        """
        last_round, last_mark = 0, None
        for entry in self._needed(round):
            info = _noted(entry)
            intact = all(checksum(entry / name) == crc for name, crc in info["files"].items())
            if not intact or (info["before"], info.get("follows")) != (last_round, last_mark):
                raise ValueError(f"the entry {entry.name} of {self.folder.name} is damaged, or not of the one before")
            last_round, last_mark = _round(entry), info.get("mark")
        if last_round != round:
            raise ValueError(f"the entry {round} of {self.folder.name} is missing")
        if mark is not None and last_mark != mark:
            raise ValueError(f"the entry {round} of {self.folder.name} is of another run")

    def discard_after(self, round: int) -> None:
        """Remove the entries of later rounds, and what a killed process left behind."""
        kept = {folder for entry in self._needed(round) for folder in (entry, _parts_of(entry))}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if path not in kept and _OF_A_LOG.fullmatch(path.name) and path.is_dir():
                shutil.rmtree(path)
        self._sizes.clear()

    def merge(self, until: int, states: Tree) -> None:
        """Merge the entries up to a round if they are much larger than the states of all clients."""
        entries, leaves = self._needed(until), jax.tree.leaves(states)
        size = sum(self._size(entry) for entry in entries)
        if len(entries) < 2 or size <= SLACK * sum(leaf.nbytes for leaf in leaves):
            return
        parts = [part for entry in entries for part in _parts(entry)]
        changed = [np.load(part / "rows.npy") for part in parts]
        rows = np.unique(np.concatenate(changed))
        with self._writing(f"{_round(entries[-1])}{MERGED}", None, {}, last=entries[-1]) as merged:
            np.save(merged / "rows.npy", rows)
            for name, leaf in zip(_names(len(leaves))[1:], leaves, strict=True):
                shape = (len(rows), *leaf.shape[1:])
                array = np.lib.format.open_memmap(merged / name, "w+", leaf.dtype, shape)
                for part, part_rows in zip(parts, changed, strict=True):
                    array[np.searchsorted(rows, part_rows)] = np.load(part / name, mmap_mode="r")
                array.flush()
        for entry in entries:
            shutil.rmtree(entry)
            shutil.rmtree(_parts_of(entry), ignore_errors=True)
        self._sizes.clear()

    def _size(self, entry: Path) -> int:
        """Bytes of an entry, which is not changed once it is written: to list it each time costs 0.1 ms an entry."""
        if entry not in self._sizes:
            self._sizes[entry] = sum(file.stat().st_size for part in _parts(entry) for file in part.iterdir())
        return self._sizes[entry]

    def _needed(self, round: int) -> list[Path]:
        """The entries up to a round, in order; a merged entry stands for all that it holds."""
        if not self.folder.is_dir():
            return []
        paths = [p for p in self.folder.iterdir() if p.name.removesuffix(MERGED).isdigit()]
        merged_round = max((_round(p) for p in paths if p.name.endswith(MERGED)), default=-1)
        current = [p for p in paths if _round(p) > merged_round or p.name == f"{merged_round}{MERGED}"]
        return sorted((p for p in current if _round(p) <= round), key=_round)

    @contextmanager
    def _writing(
        self, name: str, previous: Path | None, part_files: Mapping[str, int], last: Path | None = None
    ) -> Iterator[Path]:
        """A folder that becomes an entry, whole or not at all, with the checksums of other processes' files.

        It follows the entry `previous`, if any; `last` is the last one of those that it merges, if it merges any.
        """
        with _whole_or_not(self.folder / name) as unfinished:
            yield unfinished
            files = {file.name: checksum(file) for file in sorted(unfinished.iterdir())} | dict(part_files)
            info = {"before": 0, "files": files}
            if previous is not None:
                info |= {"before": _round(previous), "follows": _noted(previous).get("mark")}
            info["mark"] = zlib.crc32(json.dumps(info).encode()) if last is None else _noted(last).get("mark")
            (unfinished / NOTED).write_text(json.dumps(info))


def _noted(entry: Path) -> dict[str, Any]:
    return json.loads((entry / NOTED).read_text())


def _parts_of(entry: Path) -> Path:
    """The folder of the parts of an entry that other processes have written."""
    return entry.with_name(f"{entry.name}{PARTS}")


def _parts(entry: Path) -> list[Path]:
    """The folders of an entry that have rows: its own, and those of other processes."""
    return [(entry / name).parent for name in _noted(entry)["files"] if name.endswith("rows.npy")]


def _save(folder: Path, rows: np.ndarray, values: Sequence[np.ndarray]) -> None:
    for name, array in zip(_names(len(values)), [rows, *values], strict=True):
        np.save(folder / name, array)


@contextmanager
def _whole_or_not(folder: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name, and replaces an older one, when its files are on the disk."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    yield unfinished
    for file in unfinished.iterdir():
        with file.open("rb+") as opened:
            os.fsync(opened.fileno())
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)


def _names(leaves: int) -> list[str]:
    return ["rows.npy", *(f"{i}.npy" for i in range(leaves))]


def _round(entry: Path) -> int:
    return int(entry.name.removesuffix(MERGED))
