"""Run folders as plain records; nothing is trained or restored."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pcdd.errors import UserError, is_there, unreadable
from fedjax_pcdd.training.config import RUN
from fedjax_pcdd.training.fields import convert_all, load_mapping, read_text
from fedjax_pcdd.training.folder import CONFIG, TRACK, RunFolder, failure_of


@dataclass(frozen=True)
class RunRecord:
    """What the folder of one run says.

    Args:
      path: the folder, as it was named.
      config: every option by field name; those that an older run did not know have their defaults.
      text: config.yaml as written.
      resolved: resolved.json: lanes, hyper-parameters as used, and preset, split, variant and command where recorded.
      rows: metrics.jsonl, accuracies as shares.
      clients: clients.jsonl.
      summary: summary.json, None while the run is unfinished.
    """

    path: Path
    config: dict[str, Any]
    text: str
    resolved: dict[str, Any]
    rows: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    summary: dict[str, Any] | None

    @property
    def result(self) -> dict[str, Any]:
        """The summary, empty while the run is unfinished."""
        return self.summary or {}

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.config["method"])

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return self.config["seed"]

    @property
    def dataset(self) -> str:
        """Data set, or the task by domain."""
        return str(self.config["task"] or self.config["dataset"])

    @property
    def rounds_done(self) -> int:
        """Rounds that metrics.jsonl knows."""
        return self.rows[-1]["round"] if self.rows else 0

    @property
    def preset(self) -> str | None:
        """The preset as `fedmr/table1`, if the run was started with one."""
        name = self.resolved.get("preset")
        return None if name is None else str(name).removesuffix(".yaml")

    @property
    def command(self) -> str | None:
        """How the run was started, where that is recorded."""
        return self.resolved.get("command")

    @property
    def failure(self) -> str | None:
        """Why it failed as an experiment of a sweep, which notes that beside its folders; None for others."""
        noted = None if self.summary is not None else failure_of(self.path.resolve())
        return None if noted is None else noted.strip()

    @property
    def state(self) -> str:
        """In a word: finished, failed (see `failure`) or unfinished."""
        return "finished" if self.summary is not None else "failed" if self.failure else "unfinished"

    @property
    def heat_map(self) -> bytes | None:
        """The picture of the partition."""
        path = self.path / "partition.png"
        return path.read_bytes() if is_there(path) else None

    @cached_property
    def partition(self) -> str | None:
        """A digest of the data set and who holds what of it; None if the folder does not say, UserError if damaged."""
        path = self.path / "partition.npz"
        if not is_there(path):
            return None
        try:
            with np.load(path) as arrays:
                parts = [name.encode() + np.ascontiguousarray(arrays[name]).tobytes() for name in sorted(arrays)]
        except PermissionError as error:
            raise unreadable(error, path) from error
        except Exception:  # of a damaged archive almost anything is raised
            raise UserError(f"{path} is damaged: resume the run, or leave it out.") from None
        # Of data sets of one size equal indices are other samples.
        return hashlib.sha256(b"".join([self.dataset.encode(), *parts])).hexdigest()

    @cached_property
    def tracked(self) -> list[dict[str, Any]]:
        """Lines of track.jsonl, [] of a run that tracked nothing; UserError where they cannot be read."""
        return RunFolder(self.path).rows(TRACK)

    def changed(self) -> float:
        """When the run last wrote a round, in seconds since the epoch; 0 before its first."""
        path = self.path / "metrics.jsonl"
        return path.stat().st_mtime if is_there(path) else 0.0


def collect(paths: Iterable[str | Path]) -> list[RunRecord]:
    """All runs in these folders, in their order, each once.

    Args:
      paths: folders of runs, or folders with such folders below them, at any depth; files beside them are passed over,
        as a shell's `*` names them too.

    Raises:
      UserError: no such folder, no run in it, or the only one, or all, cannot be read or are no runs of this library.
        Of several the others are left out, which is said on stderr.
    """
    folders: dict[Path, Path] = {}
    named = [Path(path) for path in paths]
    for path in [path for path in named if not is_there(path)] or named:
        if is_there(path):
            raise UserError(f"{path} is a file: name the folder of a run, or one that holds runs.")
        if not is_there(path, Path.is_dir):
            raise UserError(f"there is no folder {path}: name the folder of a run, or one that holds runs.")
        unread: list[OSError] = []
        below = list(_folders(path, unread.append))
        if unread and not below:
            raise unreadable(unread[0], unread[0].filename)
        for error in unread:
            print(f"left out: {unreadable(error, error.filename)}", file=sys.stderr)
        if not below:
            raise UserError(f"{path} holds no run (no {CONFIG} in it or below): name the folder of a run.")
        for folder in below:
            folders.setdefault(folder.resolve(), folder)
    records: list[RunRecord] = []
    for folder in folders.values():
        try:
            records.append(read_record(folder))
        except UserError as error:
            if len(folders) == 1:
                raise
            print(f"left out: {error}", file=sys.stderr)
    if not records:
        raise UserError(f"none of the {len(folders)} runs can be read: repair one, or name other folders.")
    return records


def _folders(path: Path, unread: Callable[[OSError], Any]) -> Iterable[Path]:
    """Those of runs at or below a path; `unread` is told of folders that cannot be read."""
    seen = set()  # links may lead in a circle
    for folder, below, files in os.walk(path, onerror=unread, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        if CONFIG in files:
            below.clear()
            yield Path(folder)
        below.sort()


def read_record(path: Path) -> RunRecord:
    """The record of one folder; UserError where it is no run of this library or cannot be read."""
    folder = RunFolder(path)
    text = read_text(path / CONFIG)
    given = load_mapping(text, str(path / CONFIG))
    if not {"method", "dataset", "seed", "rounds"} <= given.keys():
        raise UserError(f"{path / CONFIG} is not the configuration of a run: leave {path} out.")
    # The method's own options stay as they are written: it may be one that is not at hand.
    own = convert_all({name: value for name, value in given.items() if name in RUN}, RUN, str(path / CONFIG))
    config = {name: option.default for name, option in RUN.items()} | given | own
    resolved, summary = folder.read_json("resolved.json") or {}, folder.summary()
    words = all(isinstance(resolved.get(name, ""), str | None) for name in ("preset", "split", "variant", "command"))
    if not words or not isinstance(resolved.get("hyperparameters", {}), dict):
        raise UserError(f"{path / 'resolved.json'} is damaged: resume the run, or leave it out.")
    rows, clients = folder.rows(rounds=summary["rounds"] if summary else 0), folder.rows("clients.jsonl")
    record = RunRecord(path, config, text, resolved, rows, clients, summary)
    _ = record.partition  # read now, as what is damaged is left out
    return record
