"""The folder of a run and what is written into it: one JSON line per round, the summary, the curves.

config.yaml    the whole configuration
metrics.jsonl  one line per round; `ga` and `pa` as shares in [0, 1], `seconds` of wall time
clients.jsonl  PA of every client (if more than 10 000, of those that trained since the line before), one line per
               evaluated round
summary.json   the result
curves.png     GA, PA and loss over the rounds
track.jsonl    the quantities that `track` names, one line per tracked round; drawn as track_<name>.png
resolved.json  choices that the options left open, and the inputs of the run
lock           present while a process writes here

Files are written atomically, except for appended lines; symbolic links are not followed.
"""

import errno
import json
import math
import os
import platform
import re
import resource
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

from fedjax_pcdd import __version__
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Lists, load_partition
from fedjax_pcdd.errors import UserError, at_once, failed_write, in_one_line, is_there, unreadable, writing
from fedjax_pcdd.training.lock import InUse, Lock, Taken, owner
from fedjax_pcdd.training.loop import Callback, RoundReport, Run
from fedjax_pcdd.training.metrics import MOST_WRITTEN
from fedjax_pcdd.training.written import is_line, is_summary

CLAIMS = "claims"  # of a sweep: the locks of its experiments, and the error messages of those that failed
CONFIG, METRICS, CLIENTS, SUMMARY = "config.yaml", "metrics.jsonl", "clients.jsonl", "summary.json"
_DAMAGED = "{} is damaged: put it back as it was, or remove it."
_NO_SUMMARY = "{} is damaged: remove it and resume the run, which writes it again."
LOCK, PARTITION, TRACK = "lock", "partition.npz", "track.jsonl"
# Written by libraries, such as numpy, which follow links.
_WRITTEN_BY_OTHERS = ("clients", "tensorboard", "wandb", "wandb.txt", "mlflow.txt", "profile")
_LEFT_BEHIND = re.compile(r"lock(\.\w+)?|\.(\d+\.)?config\.yaml(\.tmp)?")
_HALF_WRITTEN = re.compile(r"\.\d{1,8}\.[\w-]+\.(yaml|jsonl?|npz|png)")  # by `at_once`
FIRST_KEYS = ("round", "ga", "pa", "loss", "seconds")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def failure_file(folder: Path) -> Path:
    """The file in which a sweep notes why the experiment of a folder failed."""
    return folder.parent / CLAIMS / f"{folder.name}.failed"


def failure_of(folder: Path) -> str | None:
    """The content of `failure_file`, where names may have bytes that are not UTF-8; None if there is no such file."""
    file = failure_file(folder)
    return file.read_text(encoding="utf-8", errors="surrogateescape") if is_there(file) else None


class RunFolder:
    """The folder of one run; `create` or `open` it to write, then `close` it."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.lock: Lock | None = None

    @classmethod
    def create(cls, path: str | Path, config_yaml: str) -> "RunFolder":
        """The folder of a new run.

        Raises:
          Taken: the folder holds a run, or another process is about to write one.
          UserError: it holds anything else, or cannot be written.
        """
        folder = cls(path)
        path = folder.path
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder._check_empty()
        except FileExistsError:
            raise UserError(f"{path} is not an empty folder: choose another `run_dir`.") from None
        except OSError as error:
            raise failed_write(error, path) from error
        folder.lock = Lock.take(path / LOCK)
        try:
            folder._check_empty()  # another process may have been faster
            folder.write(CONFIG, config_yaml)
        except UserError:
            folder.close()
            raise
        return folder

    def _check_empty(self) -> None:
        if (self.path / CONFIG).exists():
            if self.lock is None and (process := owner(self.path / LOCK)) is not None:
                raise InUse(f"{self.path} is in use by {process}: choose another `run_dir`, or wait for it to end.")
            unfinished = "" if self.rows() else " (no round of it is finished, so nothing is lost if you remove it)"
            raise Taken(
                f"{self.path} already holds a run: continue it with `resume={self.path}` or choose another "
                f"`run_dir`{unfinished}."
            )
        # A process that was killed before its configuration was written leaves its lock and a temporary file.
        if not all(_LEFT_BEHIND.fullmatch(path.name) for path in self.path.iterdir()):
            raise UserError(f"{self.path} is not an empty folder: choose another `run_dir`.")

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """The folder of a run to continue; UserError if it holds none or links, or another process writes to it."""
        folder = cls(path)
        if not is_there(folder.path / CONFIG):
            raise UserError(f"{path} holds no run (it has no {CONFIG}): check the path given to `resume`.")
        for entry in (folder.path / name for name in _WRITTEN_BY_OTHERS):
            if entry.is_symlink() and jax.process_index() == 0:  # the folders of other processes hold links of ours
                raise failed_write(OSError(errno.ELOOP, ""), entry)
        folder.lock = Lock.take(folder.path / LOCK)
        for leftover in filter(_HALF_WRITTEN.fullmatch, os.listdir(folder.path)):  # left by a killed process
            if not (folder.path / leftover).is_dir():
                (folder.path / leftover).unlink(missing_ok=True)
        return folder

    def close(self) -> None:
        """Release the lock, so that other processes can write here."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    def check(self) -> None:
        """Raise UserError if another process has taken over."""
        if self.lock is not None:
            self.lock.check()

    def append(self, row: Mapping[str, Any], name: str = METRICS) -> None:
        """Append one line; round, ga, pa, loss and seconds come first, and NaN becomes null."""
        ordered = {key: row[key] for key in FIRST_KEYS if key in row} | dict(row)
        with writing(self.path / name), open(self.path / name, "a", encoding="utf-8", opener=_no_link) as file:
            file.write(dumps(ordered) + "\n")

    def rows(self, name: str = METRICS, rounds: int = 0, last: int | None = None) -> list[dict[str, Any]]:
        """All complete lines; one that a killed process left unfinished is ignored.

        Args:
          rounds: number of rounds, from the first one on, that must be there.
          last: number of lines, the last ones, that are returned, so that the others need no memory; None for all.

        Raises:
          UserError: a line is not one that a run writes, or is missing.
        """
        rows, damaged = self._rows(name, last)
        if damaged:
            raise UserError(f"{self.path / name} is damaged in line {damaged[0]}: resume the run, or leave it out.")
        if len(rows) < rounds or any(row["round"] != round for round, row in enumerate(rows[:rounds], 1)):
            raise UserError(f"{self.path / name} has lost rounds: resume the run, or leave it out.")
        return rows

    def summary(self) -> dict[str, Any] | None:
        """The result, None if the run is not finished; UserError if the file is damaged."""
        value = self.read_json(SUMMARY, _NO_SUMMARY)
        if value is not None and not is_summary(value):
            raise UserError(_NO_SUMMARY.format(self.path / SUMMARY))
        return value

    def _rows(self, name: str, last: int | None = None) -> tuple[list[dict[str, Any]], list[int]]:
        """The readable lines, or the last ones, and the line numbers of the others."""
        rows, damaged, foreign = deque[dict[str, Any]](maxlen=last), list[int](), name not in (METRICS, CLIENTS, TRACK)
        for number, line in enumerate(self._lines(name), 1):
            try:
                row = json.loads(line)
                if not (isinstance(row["round"], int) if foreign else is_line(row, rows[-1]["round"] if rows else 0)):
                    raise ValueError
                rows.append(row)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                damaged.append(number)
        return list(rows), damaged

    def _lines(self, name: str) -> Iterator[bytes]:
        """The complete lines of a file, none if it does not exist; UserError if it cannot be read."""
        try:
            with open(self.path / name, "rb") as file:
                yield from (line for line in file if line.endswith(b"\n"))
        except FileNotFoundError:
            return
        except OSError as error:
            raise unreadable(error, self.path / name) from error

    def truncate(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Go back to these rows, those of a checkpoint, and drop later rounds from every other .jsonl file.

        Files from elsewhere, whose lines have no rounds, stay as they are. If lines of clients.jsonl are lost, which no
        checkpoint has, a warning says so.
        """
        last = rows[-1]["round"] if rows else 0
        text, file = "".join(dumps(row) + "\n" for row in rows), self.path / METRICS
        if not is_there(file) or file.read_bytes() != text.encode():  # else its time stays, which tells newer runs
            self.write(METRICS, text)
        for path in self.path.glob("*.jsonl"):
            readable, damaged = self._rows(path.name)
            if path.name != METRICS and (path.name in (CLIENTS, TRACK) or not damaged):
                self.write(path.name, "".join(dumps(row) + "\n" for row in readable if row["round"] <= last))
        remaining = {row["round"] for row in self._rows(CLIENTS)[0]}
        lost = [str(row["round"]) for row in rows if row.get("ga") is not None and row["round"] not in remaining]
        if lost and jax.process_index() == 0:  # the folders of other processes are temporary
            sentence = f"{self.path / CLIENTS} has lost the accuracies of the clients in round {', '.join(lost)}."
            warnings.warn(sentence, stacklevel=2)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file atomically; NaN becomes null."""
        self.write(name, dumps(value, indent=2) + "\n")

    def read_json(self, name: str, damaged: str = _DAMAGED) -> Any:
        """The content that `write_json` wrote, None if there is no such file; UserError if it is `damaged`."""
        path = self.path / name
        try:
            value = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(error, path) from error
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise UserError(damaged.format(path))
        return value

    def write(self, name: str, text: str) -> None:
        """Write a file atomically; UserError if the disk is full or read-only."""
        self.draw(name, lambda path: path.write_bytes(text.encode("utf-8", "surrogateescape")))

    def draw(self, name: str, write: Callable[[Path], Any]) -> None:
        """As `write`, with a function that writes to a path with the suffix of the name, as pictures need."""
        with at_once(self.path / name) as temporary:
            write(temporary)

    def keep_partition(self, federation: Federation, draw: Callable[[Federation, Path], None]) -> None:
        """Write the partition and its picture, if they are missing or damaged."""
        try:
            pairs = zip(load_partition(self.path / PARTITION), federation.partition, strict=True)
            list_pairs = [(Lists.of(stored), Lists.of(current)) for stored, current in pairs]
            same = all(np.array_equal(a.flat, b.flat) and np.array_equal(a.sizes, b.sizes) for a, b in list_pairs)
        except Exception:  # a damaged archive can raise almost anything
            same = False
        if not same:
            self.draw(PARTITION, federation.write)
        try:
            with Image.open(self.path / "partition.png") as picture:
                picture.verify()
        except Exception:  # on a damaged file Pillow can raise almost anything
            self.draw("partition.png", lambda path: draw(federation, path))


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class Records(Callback):
    """Writes every round into the folder of a run."""

    def __init__(self, folder: RunFolder):
        """Args: folder: the run's; on start it goes back to the rounds that the run begins with."""
        self.folder = folder

    def on_start(self, run: Run) -> None:
        """Drop rounds that no checkpoint has."""
        self.folder.truncate(run.history.rows)

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Append a line to metrics.jsonl, and to clients.jsonl if the round was evaluated."""
        self.folder.check()
        row = run.history.rows[-1]
        self.folder.append(row)
        if row["ga"] is not None:
            pa = run.history.pa_clients
            if len(pa) <= MOST_WRITTEN:
                accuracies = {"pa_per_client": pa}
            else:
                trained = _trained(run, report)
                accuracies = {"clients": trained, "pa": pa[trained]}
            self.folder.append({"round": run.round, **accuracies}, CLIENTS)


def _trained(run: Run, report: RoundReport) -> np.ndarray:
    """The clients that trained since the evaluated round before this one [n]; what drew them draws them again."""
    evaluated = (row["round"] for row in reversed(run.history.rows[:-1]) if row["ga"] is not None)
    cohorts = [run.simulation.clients_of(r)[run.index] for r in range(next(evaluated, 0), run.round - 1)]
    earlier = [cohort[run.simulation.steps[run.index, cohort] > 0] for cohort in cohorts]
    return np.unique(np.concatenate([*earlier, report.jobs.row[report.jobs.steps > 0]]))


def describe_machine() -> dict[str, Any]:
    """Versions, devices and processors, for the summary."""
    devices = jax.devices()
    versions = {"python": platform.python_version(), "fedjax-pcdd": __version__}
    return {
        "versions": versions | {name: metadata.version(name) for name in PACKAGES},
        "backend": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def peak_memory_mb() -> dict[str, float | None]:
    """Peak memory in MB of this process (`host`) and of its busiest device (`device`, None where unknown)."""
    # Linux counts kilobytes, macOS bytes.
    unit = 1e6 if sys.platform == "darwin" else 1e6 / 1024
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] / 1e6 for s in statistics if "peak_bytes_in_use" in s]
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return {"host": host, "device": max(peaks, default=None)}


def dumps(value: Any, indent: int | None = None) -> str:
    """A value as JSON, with null for numbers that are not finite; UserError for what JSON has not (of a callback)."""
    try:
        return json.dumps(_plain(value), indent=indent, allow_nan=False)
    except (AttributeError, TypeError, ValueError) as error:
        reason = in_one_line(error)
        raise UserError(f"a callback keeps or records what cannot be written ({reason}): convert it first.") from error


def _plain(value: Any) -> Any:
    """The value in JSON's own types; numbers that are not finite become None."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
