"""Run folders as plain records; nothing is trained or restored."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fedjax_pcdd.data.lists import LABELS
from fedjax_pcdd.errors import UserError, is_there, printable, unreadable
from fedjax_pcdd.training.config import RUN, partition_tag
from fedjax_pcdd.training.fields import convert_all, load_mapping, read_text
from fedjax_pcdd.training.folder import CONFIG, TRACK, RunFolder, failure_of
from fedjax_pcdd.training.outside import OUTSIDE, onlookers, recorded_origins
from fedjax_pcdd.training.presets import has_own_partition

OF_DATA = "data set"
INPUTS = (OF_DATA, "pipeline", "model object", "method object")
"""What `RunRecord.inputs` may hold: short digests of what was read or passed in as objects."""

T = TypeVar("T")
U = TypeVar("U")


@dataclass(frozen=True)
class RunRecord:
    """The contents of the folder of one run."""

    path: Path  # the folder, as it was named
    config: dict[str, Any]  # every option by field name; options that an older run did not know have their defaults
    text: str  # config.yaml as written
    resolved: dict[str, Any]  # resolved.json: lanes, hyper-parameters as used; perhaps preset, split, variant, command
    rows: list[dict[str, Any]]  # metrics.jsonl, accuracies as shares
    clients: list[dict[str, Any]]  # the last line of clients.jsonl: many rounds of many clients would fill the memory
    summary: dict[str, Any] | None  # summary.json, None while the run is unfinished
    inputs: dict[str, str]  # those of `INPUTS` that are recorded

    @property
    def settings(self) -> dict[str, Any]:
        """The options, and what the run was given besides."""
        return self.config | self.inputs

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
        """Name of the data set, or of the task over domains."""
        return str(self.config["task"] or self.config["dataset"])

    @property
    def rounds_done(self) -> int:
        """Rounds that metrics.jsonl records."""
        return self.rows[-1]["round"] if self.rows else 0

    @property
    def version(self) -> str | None:
        """Version of this library that began the run, if it is recorded."""
        return ((self.resolved.get("inputs") or {}).get("versions") or {}).get("fedjax-pcdd")

    @property
    def preset(self) -> str | None:
        """The preset as `fedmr/table1`, if the run was started with one."""
        name = self.resolved.get("preset")
        return None if name is None else str(name).removesuffix(".yaml")

    @property
    def command(self) -> str | None:
        """The command that started the run, if it is recorded."""
        return self.resolved.get("command")

    @property
    def failure(self) -> str | None:
        """Why the run failed in a sweep, which notes failures beside its folders; None for other runs."""
        reason = None if self.summary is not None else failure_of(self.path.resolve())
        return None if reason is None else reason.strip()

    @property
    def state(self) -> str:
        """One word: finished, failed (see `failure`) or unfinished."""
        return "finished" if self.summary is not None else "failed" if self.failure else "unfinished"

    @property
    def heat_map(self) -> bytes | None:
        """The picture of the partition; None if there is none, or the file is something else."""
        path = self.path / "partition.png"
        content = path.read_bytes() if is_there(path) else b""
        return content if content.startswith(b"\x89PNG") else None

    @cached_property
    def partition(self) -> str | None:
        """Digest of the data set and of which client holds what; None if not recorded, UserError if damaged."""
        path = self.path / "partition.npz"
        if not is_there(path):
            return None
        try:
            with np.load(path) as arrays:
                names = sorted({*arrays} - {LABELS})  # the digest of the data below says more
                chunks = [name.encode() + np.ascontiguousarray(arrays[name]).tobytes() for name in names]
        except PermissionError as error:
            raise unreadable(error, path) from error
        except Exception:  # a damaged archive raises almost anything
            raise UserError(f"{path} is damaged: resume the run, or leave it out.") from None
        # With equal indices, another data set has other samples, even if it has the same name.
        data = str((self.resolved.get("inputs") or {}).get("data set", ""))
        return hashlib.sha256(b"".join([self.dataset.encode(), data.encode(), *chunks])).hexdigest()

    @cached_property
    def tracked(self) -> list[dict[str, Any]]:
        """Lines of track.jsonl, [] for a run that tracked nothing; UserError if they cannot be read."""
        return RunFolder(self.path).rows(TRACK)

    def changed(self) -> float:
        """When the run last wrote a round, in seconds since the epoch; 0 before its first."""
        path = self.path / "metrics.jsonl"
        return path.stat().st_mtime if is_there(path) else 0.0


def collect(paths: Iterable[str | Path]) -> list[RunRecord]:
    """All runs in these folders, in their order, each once.

    Args:
      paths: folders of runs, or folders with such folders below them, at any depth; files among them are skipped,
        since a shell's `*` names them too.

    Raises:
      UserError: a folder does not exist or holds no run, or the only run, or every run, cannot be read or is none of
        this library. If that holds for some of several runs, these are left out, with a message on stderr.
    """
    folders: dict[Path, Path] = {}
    given_paths = [Path(path) for path in paths]
    if not given_paths:
        raise UserError("name at least one folder of runs, as runs/.")
    for path in [path for path in given_paths if not is_there(path)] or given_paths:
        if is_there(path):
            raise UserError(f"{path} is a file: name the folder of a run, or one that holds runs.")
        if not is_there(path, Path.is_dir):
            raise UserError(f"there is no folder {path}: name the folder of a run, or one that holds runs.")
        errors: list[OSError] = []
        run_folders = list(_folders(path, errors.append))
        if errors and not run_folders:
            raise unreadable(errors[0], errors[0].filename)
        for error in errors:
            print(printable(f"left out: {unreadable(error, error.filename)}"), file=sys.stderr)
        if not run_folders:
            raise UserError(f"{path} holds no run (no {CONFIG} in it or below): name the folder of a run.")
        for folder in run_folders:
            folders.setdefault(folder.resolve(), folder)
    return [record for _, record in readable(list(folders.values()), read_record)]


def readable(runs: Sequence[T], read: Callable[[T], U]) -> list[tuple[T, U]]:
    """Each run with what `read` returns of it; where that raises a `UserError`, the run is left out and stderr says so.

    Raises:
      UserError: that of the only run, or all runs are left out.
    """
    results: list[tuple[T, U]] = []
    for run in runs:
        try:
            results.append((run, read(run)))
        except UserError as error:
            if len(runs) == 1:
                raise
            path = str(run.path if isinstance(run, RunRecord) else run)
            where = "left out" if path in str(error) else f"left out: {path}"
            print(printable(f"{where}: {error}"), file=sys.stderr)
    if not results:
        raise UserError(f"none of the {len(runs)} runs can be used, for the reasons above: name other folders.")
    return results


def _folders(path: Path, on_error: Callable[[OSError], Any]) -> Iterable[Path]:
    """Folders of runs at or below a path; `on_error` is called for folders that cannot be read."""
    visited = set()  # links may form a cycle
    for folder, subfolders, files in os.walk(path, onerror=on_error, followlinks=True):
        real_path = os.path.realpath(folder)
        if real_path in visited:
            subfolders.clear()
            continue
        visited.add(real_path)
        if CONFIG in files:
            subfolders.clear()
            yield Path(folder)
        subfolders.sort()


def read_record(path: Path) -> RunRecord:
    """The record of one folder; UserError if it is no run of this library or cannot be read."""
    folder = RunFolder(path)
    text = read_text(path / CONFIG)
    options = load_mapping(text, str(path / CONFIG))
    if not {"method", "dataset", "seed", "rounds"} <= options.keys():
        raise UserError(f"{path / CONFIG} is not the configuration of a run: leave {path} out.")
    # The method's own options stay as written, because the method may not be available.
    run_options = convert_all({name: value for name, value in options.items() if name in RUN}, RUN, str(path / CONFIG))
    config = {name: option.default for name, option in RUN.items()} | options | run_options
    origins = recorded_origins(config.pop(OUTSIDE, None), str(path / CONFIG))
    if contents := sorted(origin.sha256 for name, origin in origins.items() if name not in onlookers(config)):
        config[OUTSIDE] = short(*contents)  # by content, wherever the files were
    resolved, summary = folder.read_json("resolved.json") or {}, folder.summary()
    valid = all(isinstance(resolved.get(name, ""), str | None) for name in ("preset", "split", "variant", "command"))
    inputs = resolved.get("inputs") or {}
    objects = (inputs.get("objects") or {}) if isinstance(inputs, dict) else None
    if not (valid and isinstance(resolved.get("hyperparameters", {}), dict) and isinstance(objects, dict)):
        raise UserError(f"{path / 'resolved.json'} is damaged: resume the run, or leave it out.")
    rows, clients = folder.rows(rounds=summary["rounds"] if summary else 0), folder.rows("clients.jsonl", last=1)
    record = RunRecord(path, config, text, resolved, rows, clients, summary, _inputs(config, inputs))
    digest = record.partition  # read now, so that a damaged one is left out
    if has_own_partition(config["partition"], config["run_dir"]):
        config |= _of_own_partition(record, digest or "")
    return record


def _inputs(config: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, str]:
    """`INPUTS` that a run has recorded; not its samples if options draw them by the seed."""
    if not inputs:
        return {}
    objects = inputs.get("objects") or {}
    drawn = config["train_samples"] or config["test_samples"] or config["task"]
    found = {OF_DATA: None if drawn else inputs.get("data set"), "method object": objects.get("method")}
    known = {name: short(str(digest)) for name, digest in found.items() if digest}
    pipeline, model = inputs.get("pipeline"), objects.get("model")
    known["pipeline"] = short(str(pipeline)) if pipeline else "customary"
    return known | {"model object": short(str(model)) if model else "by name"}


def short(*texts: str) -> str:
    """Eight hexadecimal digits that tell texts apart."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:8]


def _of_own_partition(record: RunRecord, digest: str) -> dict[str, Any]:
    """The options of a partition that was made in Python, so that its runs stand beside others of the same kind.

    A partition that is the same for all seeds, or of which nothing is known, is named by its seed or its content.
    """
    drawn = record.resolved.get("drawn")
    if not isinstance(drawn, dict) or not {"partition", "seed"} <= drawn.keys():
        return {"partition": f"partition {digest[:8]}"}
    options = {name: value for name, value in drawn.items() if name in RUN and name not in ("seed", "clients")}
    if drawn["seed"] == record.seed:
        return options
    return options | {"partition": f"{partition_tag(record.config | options)} of seed {drawn['seed']}"}
