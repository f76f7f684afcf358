"""The workloads, and what both sides of a comparison need; imports nothing beyond the standard library."""

import argparse
import itertools
import json
import math
import resource
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

LR, MOMENTUM, WEIGHT_DECAY = 0.01, 0.9, 1e-4
CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A round of FedAvg: SGD on each of the cohort's clients, all of the same size unless `beta` is given.

    Args:
      model: "logistic_regression" or a name that `fedjax_pcdd.models.build` knows.
      shape: (H, W, channels).
      clients: K.
      per_client: training samples of each client.
      batch: B; divides `per_client`.
      cohort: S, clients a round; None for all.
      epochs: E, local epochs of each client.
      norm: "batch" or "group", for models that normalise.
      beta: of a Dirichlet partition, whose clients are unequal with `per_client` samples on average.
    """

    model: str
    shape: tuple[int, int, int]
    clients: int
    per_client: int
    batch: int
    cohort: int | None = None
    epochs: int = 1
    norm: str = "batch"
    beta: float | None = None

    @property
    def participants(self) -> int:
        """S, clients a round."""
        return self.cohort or self.clients

    @property
    def stored(self) -> int:
        """Training samples of all clients."""
        return self.clients * self.per_client

    @property
    def samples(self) -> int:
        """Samples that a round trains on, counted once for each epoch."""
        return self.participants * self.per_client * self.epochs

    @property
    def data_bytes(self) -> int:
        """Bytes of the images as uint8."""
        return self.stored * math.prod(self.shape)


WORKLOADS = {
    "w1": Workload("simple_cnn", (32, 32, 3), clients=10, per_client=500, batch=100),
    "w2": Workload("mcmahan_cnn", (28, 28, 1), clients=10, per_client=600, batch=100),
    "w3": Workload("resnet18", (32, 32, 3), clients=10, per_client=100, batch=50),
    "w4": Workload("mlp", (28, 28, 1), clients=500, per_client=20, batch=20),
    "w4lr": Workload("logistic_regression", (28, 28, 1), clients=500, per_client=20, batch=20),
}

DIRICHLET = Workload("mlp", (28, 28, 1), clients=100, per_client=200, batch=20, beta=0.1)  # not for the PyTorch loops


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that both sides of a comparison share."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--workload", choices=WORKLOADS, required=True)
    options.add_argument("--rounds", type=_positive, default=8, help="timed rounds, after one that is not timed")
    options.add_argument("--clients", type=_positive, help="instead of the workload's")
    options.add_argument("--per-client", type=_positive, help="samples of a client, instead of the workload's")
    options.add_argument("--batch", type=_positive, help="instead of the workload's")
    options.add_argument("--json", action="store_true", help="only the JSON line, no summary on stderr")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def chosen(args: argparse.Namespace) -> Workload:
    """The workload of the command line; exits if a client's samples do not fill whole batches."""
    overrides = {name: getattr(args, name) for name in ("clients", "per_client", "batch")}
    workload = replace(WORKLOADS[args.workload], **{k: v for k, v in overrides.items() if v})
    if workload.per_client % workload.batch:
        sys.exit(f"--batch={workload.batch} must divide --per-client={workload.per_client}.")
    return workload


def clocks() -> tuple[float, float]:
    """The time in seconds: of the wall clock, and of this process's work on all cores."""
    return time.perf_counter(), time.process_time()


def timing(marks: list[tuple[float, float]], samples: int) -> dict:
    """Statistics of the rounds between the marks of `clocks`; the first round warms up and is not counted."""
    wall, cpu = ([b - a for a, b in itertools.pairwise(clock)] for clock in zip(*marks, strict=True))
    first, *seconds = wall
    median = statistics.median(seconds)
    return {
        "median_s": round(median, 5),
        "min_s": round(min(seconds), 5),
        "cpu_s": round(statistics.median(cpu[1:]), 5),
        "samples_per_s": round(samples / median, 1),
        "rounds": len(seconds),
        "compile_s": round(first - median, 3),
    }


def peak_memory_mb() -> float:
    """Peak resident memory of this process so far, MiB."""
    status = Path("/proc/self/status")
    if status.exists():  # unlike getrusage, this does not count the parent that started the process
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return round(int(line.split()[1]) / 1024, 1)
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit, 1)


def report(record: dict, *, quiet: bool) -> None:
    """Print the record as one JSON line, and a summary on stderr unless `quiet`."""
    print(json.dumps(record), flush=True)
    if not quiet:
        seconds, memory = record["median_s"], record["peak_memory_mb"]
        print(f"{record['workload']}: {seconds:.4f} s a round, peak {memory:.0f} MiB", file=sys.stderr)
