"""Seconds a round against clients, cohort, lanes, model size and raggedness, as one table and one picture.

python -m benchmarks.scaling --out=benchmarks/results/scaling

Every point is timed in this process, after one round that compiles. Beside the seconds stands what they are a multiple
of: the client, the sample or the step that a simulator without overhead would pay for.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from benchmarks.round_time import build, federation, simulation, time_rounds
from benchmarks.table import hardware, save
from benchmarks.workloads import WORKLOADS, Workload, peak_memory_mb
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.data.partition import dirichlet
from fedjax_pcdd.models.classifier import sizes

SMALL = replace(WORKLOADS["w4lr"], clients=10)
MODELS = {  # by growing number of parameters, images as each needs them
    "logistic_regression": (28, 28, 1), "simple_cnn": (32, 32, 3), "mlp": (28, 28, 1), "mcmahan_cnn": (28, 28, 1),
}  # fmt: skip
BETAS = (10000.0, 10.0, 1.0, 0.5, 0.1, 0.05)


class Point(NamedTuple):
    """One measurement."""

    series: str
    x: float | str
    seconds: float  # median of a round
    per: float  # seconds per client, sample or step, depending on the series
    compile_seconds: float
    peak_memory_mb: float  # of the process so far
    lanes: int


def point(series: str, x, workload: Workload, parts: Federation, *, lanes: int, rounds: int, of: str):
    """Time one setting; `of` is what the seconds are divided by: clients, samples or steps."""
    simulated = simulation(workload, parts, lanes)
    seconds = np.diff([wall for wall, _ in time_rounds(simulated, rounds)]).tolist()
    median = statistics.median(seconds[1:])
    jobs, _ = simulated.jobs(1)
    steps = int(jobs.steps.sum())
    divisor = {"clients": workload.participants, "samples": steps * workload.batch, "steps": steps}[of]
    memory = peak_memory_mb()
    return Point(series, x, median, median / divisor, seconds[0] - median, memory, simulated.program.lanes)


def ragged(workload: Workload, beta: float) -> Federation:
    """The workload's images over its clients by Dirichlet(beta) of the labels."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (workload.samples, *workload.shape), np.uint8)
    labels = rng.integers(0, 10, workload.samples)
    lists = dirichlet(labels, labels[:2], num_classes=10, clients=workload.clients, beta=beta, seed=0, retry=False)
    tests = (np.arange(2), *[np.zeros(0, np.int64)] * (workload.clients - 1))
    return Federation(Dataset("random", images, labels, images[:2], labels[:2], 10), Partition(lists.train, tests))


def points(most_clients: int, rounds: int) -> Iterator[Point]:
    """All measurements, the smallest first."""
    for clients in (n for n in (10, 100, 1000, 10000) if n <= most_clients):
        workload = replace(SMALL, clients=clients)
        federated = federation(workload)
        yield point("clients", clients, workload, federated, lanes=1, rounds=rounds, of="clients")
    for cohort in (n for n in (1, 10, 100, 1000) if n <= clients):
        chosen = replace(workload, cohort=cohort)
        yield point("cohort", cohort, chosen, federated, lanes=1, rounds=rounds, of="clients")
    workload = replace(WORKLOADS["w4"], clients=64, per_client=40)
    federated = federation(workload)
    for lanes in (1, 2, 4, 8, 16, 32):
        yield point("lanes", lanes, workload, federated, lanes=lanes, rounds=rounds, of="samples")
    for model, shape in MODELS.items():
        workload = Workload(model, shape, clients=10, per_client=100, batch=50)
        number = sizes(build(workload), shape).params
        yield point("parameters", number, workload, federation(workload), lanes=1, rounds=rounds, of="samples")
    workload = replace(WORKLOADS["w4"], clients=50, per_client=40)
    for lanes in (1, 8):
        for beta in BETAS:
            federated = ragged(workload, beta)
            name = f"beta, {lanes} lane{'s' * (lanes > 1)}"
            yield point(name, beta, workload, federated, lanes=lanes, rounds=rounds, of="steps")


def draw(points: list[Point], path: str) -> None:
    """One logarithmic panel for each series."""
    from matplotlib.figure import Figure

    panels = ("clients", "cohort", "lanes", "parameters", "beta")
    figure = Figure(figsize=(15, 3), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for series in dict.fromkeys(p.series for p in points if p.series.startswith(panel)):
            members = [p for p in points if p.series == series]
            axes.plot([p.x for p in members], [p.seconds for p in members], marker="o", label=series)
        axes.set(xscale="log", yscale="log", xlabel=panel, ylabel="s a round")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def markdown(machine: dict, points: list[Point]) -> str:
    """The table, with a line for each point."""
    head = "| series | x | s a round | ms per client, sample or step | lanes | compile, s | peak MiB so far |"
    lines = [head, "|---" * 7 + "|"]
    for p in points:
        cells = (p.series, p.x, f"{p.seconds:.4f}", f"{1e3 * p.per:.4f}", p.lanes, f"{p.compile_seconds:.1f}")
        lines.append(f"| {' | '.join(map(str, cells))} | {p.peak_memory_mb:.0f} |")
    machine_text = f"{machine['cpu']}, {machine['cores']} cores, jax {jax.__version__} ({jax.default_backend()})"
    units = "Per client in the first two series, per sample in the next two, per local step in those over beta."
    return "\n".join([f"FedAvg, one local epoch. {machine_text}, {machine['date']}. {units}", "", *lines, ""])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds at each point")
    parser.add_argument("--most-clients", type=int, default=10000, help="at least 10")
    parser.add_argument("--out", help="path of the files to write, without their ending")
    args = parser.parse_args(argv)
    measured = []
    for measurement in points(args.most_clients, args.rounds):
        print(measurement, flush=True)
        measured.append(measurement)
    machine = hardware(None)
    save(args.out, {"machine": machine, "points": [p._asdict() for p in measured]}, markdown(machine, measured))
    if args.out:
        draw(measured, f"{args.out}.png")


if __name__ == "__main__":
    main()
