"""Runs with the options of the command line, but through the library: stopped, killed and continued at will."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workloads import CLASSES
from fedjax_pcdd.training.folder import RunFolder
from fedjax_pcdd.training.loop import Callback, RoundReport, Run

ROOT = Path(__file__).parents[2]


class Enough(BaseException):
    """A run has come as far as requested."""


class Until(Callback):
    """Ends a run after a given round, or when another round would not fit into the time."""

    def __init__(self, last: int | None, seconds: float | None):
        now = time.monotonic()
        self.last, self.end = last, math.inf if seconds is None else now + seconds
        self.before, self.longest = now, None

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Called when a round is done and is in the checkpoint being written."""
        now = time.monotonic()
        # The first round of a process compiles, so it says nothing about the next one.
        self.longest = 0.0 if self.longest is None else max(self.longest, now - self.before)
        self.before = now
        if run.round == self.last or now + 1.2 * self.longest > self.end:
            raise Enough


def train(options: Mapping[str, Any], folder: Path, *, last: int | None = None, seconds: float | None = None) -> None:
    """Begin or continue a run in a folder.

    Args:
      options: those of `experiments/run.py`, by field name.
      last: round after which the run stops, even if it has more.
      seconds: time after which it stops.
    """
    from fedjax_pcdd.api.runs import run
    from fedjax_pcdd.training.config import build

    if last is not None and len(RunFolder(folder).rows()) >= last:
        return
    data_dir = options.get("data_dir")  # a text where the options came through JSON
    own = {"data_dir": None if data_dir is None else Path(data_dir), "run_dir": folder, "quiet": True}
    resumption = {"resume": folder} if (folder / "config.yaml").is_file() else {}
    config, method = build({"checkpoint_every": 1, **options, **own, **resumption})
    try:
        run(config, method, last=[Until(last, seconds)])
    except Enough:
        if len(RunFolder(folder).rows()) >= config.rounds:  # only its summary is left to be written
            train(options, folder)


def random_images(folder: Path, shape: tuple[int, ...], train: int, test: int = 100) -> dict[str, Any]:
    """A data set of random images in a folder, as options of a run."""
    rng, arrays = np.random.default_rng(0), {}
    for part, count in (("train", train), ("test", test)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (count, *shape), np.uint8)
        arrays[f"y_{part}"] = np.arange(count) % CLASSES
    np.savez(folder / "random.npz", **arrays)
    return {"dataset": "random", "data_dir": folder, "partition": "iid"}


def random_text(folder: Path, speakers: int, length: int) -> dict[str, Any]:
    """A data set of random characters in a folder, as options of a run."""
    start = np.arange(speakers) * length
    text = np.random.default_rng(0).integers(97, 97 + 26, speakers * length).astype(np.uint8)
    np.savez(
        folder / "letters.npz", text=text, speech_start=start, speech_end=start + length,
        speech_speaker=np.arange(speakers),
    )  # fmt: skip
    return {"dataset": "letters", "data_dir": folder, "partition": "natural", "clients": None}


def killed(options: Mapping[str, Any], folder: Path, after: int, seconds: float = 300.0) -> int:
    """Run in another process, end that by SIGKILL after some rounds, and return how many it had done.

    Raises:
      RuntimeError: it ended by itself, or did not come that far in time.
    """
    options_json = json.dumps({**options, "data_dir": str(options["data_dir"])})
    command = [sys.executable, "-m", "benchmarks.gpu.training", options_json, str(folder)]
    record = RunFolder(folder)
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        end = time.monotonic() + seconds
        while len(record.rows()) < after and process.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        exit_code = process.poll()
        process.kill()
        process.wait()
        log.seek(0)
        if exit_code is not None or len(record.rows()) < after:
            raise RuntimeError(f"the run that was to be killed ended too early or was too slow: {log.read()[-2000:]}")
    return len(record.rows())


def largest_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """Largest relative difference of the losses of two runs; infinite if they differ in length."""
    if len(one) != len(other):
        return math.inf
    return max(abs(a["loss"] - b["loss"]) / max(abs(a["loss"]), 1e-12) for a, b in zip(one, other, strict=True))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is started in order to be killed
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    train(json.loads(sys.argv[1]), Path(sys.argv[2]))
