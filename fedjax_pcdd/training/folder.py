"""The folder of a run and what is written into it: one JSON line a round, the summary, the curves.

config.yaml    the whole configuration
metrics.jsonl  one line a round; `ga` and `pa` as shares in [0, 1], `seconds` of wall time
clients.jsonl  PA of every client, one line a round that is evaluated
summary.json   the result
curves.png     GA, PA and loss over the rounds
track.jsonl    what --track names, one line a round that is looked at; drawn as track_<name>.png
"""

import json
import math
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_pcdd import __version__
from fedjax_pcdd.errors import UserError, failed_write
from fedjax_pcdd.training.loop import Callback, RoundReport, Run

CONFIG, METRICS, CLIENTS, SUMMARY, TRACK = (
    "config.yaml", "metrics.jsonl", "clients.jsonl", "summary.json", "track.jsonl"
)  # fmt: skip
FIRST_KEYS = ("round", "ga", "pa", "loss", "seconds")
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class RunFolder:
    """The folder of one run; `create` or `open` it."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def create(cls, path: str | Path, config_yaml: str) -> "RunFolder":
        """A new run.

        Raises:
          UserError: the folder holds a run or anything else, or cannot be written.
        """
        path = Path(path)
        if (path / CONFIG).exists():
            raise UserError(
                f"{path} already holds a run: continue it with `resume={path}` or choose another `run_dir`."
            )
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise UserError(f"{path} is not an empty folder: choose another `run_dir`.")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failed_write(error, path) from error
        folder = cls(path)
        folder.write(CONFIG, config_yaml)
        return folder

    @classmethod
    def open(cls, path: str | Path) -> "RunFolder":
        """A run to continue or to read; UserError where the folder holds none."""
        path = Path(path)
        if not (path / CONFIG).is_file():
            raise UserError(f"{path} holds no run (it has no {CONFIG}): check the path given to `resume`.")
        return cls(path)

    @property
    def config_yaml(self) -> str:
        """The configuration the run was started with."""
        return (self.path / CONFIG).read_text(encoding="utf-8")

    def append(self, row: Mapping[str, Any], name: str = METRICS) -> None:
        """Add one line; round, ga, pa, loss and seconds come first, and NaN becomes null."""
        ordered = {key: row[key] for key in FIRST_KEYS if key in row} | dict(row)
        try:
            with open(self.path / name, "a", encoding="utf-8") as file:
                file.write(_dumps(ordered) + "\n")
        except OSError as error:
            raise failed_write(error, self.path) from error

    def rows(self, name: str = METRICS) -> list[dict[str, Any]]:
        """All complete lines; one that a killed process left unfinished is ignored."""
        path = self.path / name
        if not path.exists():
            return []
        *lines, _ = path.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines]

    def truncate(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Go back to what a checkpoint knows: these rows, and in every other .jsonl no round after them."""
        rows = list(rows)
        last = rows[-1]["round"] if rows else 0
        self.write(METRICS, "".join(_dumps(row) + "\n" for row in rows))
        for path in self.path.glob("*.jsonl"):
            if path.name != METRICS:
                kept = [row for row in self.rows(path.name) if row["round"] <= last]
                self.write(path.name, "".join(_dumps(row) + "\n" for row in kept))

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file at once or not at all; NaN becomes null."""
        self.write(name, _dumps(value, indent=2) + "\n")

    def read_json(self, name: str) -> Any:
        """What `write_json` wrote, None where there is no such file."""
        path = self.path / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def write(self, name: str, text: str) -> None:
        """Write a file at once or not at all; UserError where the disk is full or read-only."""
        temporary = self.path / f".{name}.tmp"
        try:
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, self.path / name)
        except OSError as error:
            raise failed_write(error, self.path) from error


class Records(Callback):
    """Writes every round into the folder of a run."""

    def __init__(self, folder: RunFolder):
        """Args: folder: it goes back to the rounds that the run begins with."""
        self.folder = folder

    def on_start(self, run: Run) -> None:
        """Forget rounds that no checkpoint knows."""
        self.folder.truncate(run.history.rows)

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Append a line to metrics.jsonl, and to clients.jsonl where the round was evaluated."""
        row = run.history.rows[-1]
        self.folder.append(row)
        if row["ga"] is not None:
            self.folder.append({"round": run.round, "pa_per_client": run.history.pa_clients}, CLIENTS)


def describe_machine() -> dict[str, Any]:
    """Versions, devices and processors, for the summary."""
    devices = jax.devices()
    own = {"python": platform.python_version(), "fedjax-pcdd": __version__}
    return {
        "versions": own | {name: metadata.version(name) for name in PACKAGES},
        "backend": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def peak_memory_mb() -> dict[str, float | None]:
    """Peak memory in MB of this process (`host`) and of its busiest device (`device`, None where unknown)."""
    import resource  # not on Windows

    # Linux counts kilobytes, macOS bytes.
    unit = 1e6 if sys.platform == "darwin" else 1e6 / 1024
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] / 1e6 for s in statistics if "peak_bytes_in_use" in s]
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return {"host": host, "device": max(peaks, default=None)}


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    """The value in JSON's own types; what is not a finite number becomes None."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
