"""Seconds a round of this simulator: host scheduling, training and aggregation; no evaluation.

python -m benchmarks.round_time --workload=w1 --rounds=8 --lanes=auto --devices=1
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import workloads
from benchmarks.limits import limits
from benchmarks.workloads import CLASSES, LR, MOMENTUM, WEIGHT_DECAY, Workload
from fedjax_pcdd import models
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.data.partition import dirichlet
from fedjax_pcdd.engine.devices import TYPES, products, select_device
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.engine.tuning import choose_lanes
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import get
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.models.classifier import Classifier, sizes


class Flatten(nn.Module):
    """The backbone of logistic regression: [B, ...] to [B, D]."""

    @nn.compact
    def __call__(self, x, *, train: bool = False, mask=None):
        """Flattens; train and mask change nothing."""
        del train, mask
        return x.reshape(x.shape[0], -1)


def build(workload: Workload, precision: str = "float32") -> Classifier:
    """The model of a workload, computing in the given precision."""
    types = {"dtype": None if TYPES[precision] == jnp.float32 else TYPES[precision], "precision": products(precision)}
    if workload.model == "logistic_regression":
        return Classifier(Flatten(), CLASSES, **types)
    return models.build(workload.model, num_classes=CLASSES, image_shape=workload.shape, norm=workload.norm, **types)


def federation(workload: Workload) -> Federation:
    """Random images.

    A round tests each trained model on its client's own test samples. Unequal clients have as many as a tenth of their
    training samples; of equal ones there are two in all, the first client's (one would be a constant of the program,
    and XLA would test it once a job).
    """
    rng = np.random.default_rng(0)
    sizes = (workload.stored, workload.stored // 10 if workload.beta else 2)
    labels = [rng.integers(0, CLASSES, n) for n in sizes]
    train, test = ((rng.integers(0, 256, (len(y), *workload.shape), np.uint8), y) for y in labels)
    dataset = Dataset("random", *train, *test, CLASSES)
    if workload.beta:
        counts = {"clients": workload.clients, "num_classes": CLASSES, "min_size": 1}
        return Federation(dataset, dirichlet(*labels, beta=workload.beta, seed=0, **counts))
    empty = np.zeros(0, np.int64)
    train_lists = tuple(np.arange(workload.stored).reshape(workload.clients, -1))
    return Federation(dataset, Partition(train_lists, (np.arange(2), *[empty] * (workload.clients - 1))))


def simulation(
    workload: Workload,
    parts: Federation,
    lanes: int,
    devices: int = 1,
    *,
    method: str = "fedavg",
    precision: str = "float32",
    block: int | None = None,
    **options: Any,
) -> Simulation:
    """A method as the workload describes it, computing in the given precision.

    Args:
      block: as in `Execution`.
      options: further ones of `Simulation`.
    """
    local = Local(workload.epochs, workload.batch, "drop", "sgd", LR, MOMENTUM, WEIGHT_DECAY)
    algorithm = get(method)()
    return Simulation(
        algorithm.build(build(workload, precision)), [Experiment(parts, algorithm, local, 0)], pipeline=Pipeline(),
        cohort=workload.participants, **options,
        execution=Execution(lanes=lanes, devices=devices, dtype=TYPES[precision], block=block),
    )  # fmt: skip


def prepare(workload: Workload, lanes: str, devices: int, rounds: int, **options: Any) -> Simulation:
    """The simulation with the requested lanes; "auto" chooses as a real run does. Options are those of `simulation`."""
    federated = federation(workload)

    def make(lanes: int) -> Simulation:
        return simulation(workload, federated, lanes, devices, **options)

    if lanes != "auto":
        return make(int(lanes))
    return choose_lanes(make, make(1).start(), workload.participants, rounds)


def time_rounds(simulated: Simulation, rounds: int) -> list[tuple[float, float]]:
    """The clocks before, between and after the rounds, one more than asked for."""
    state = jax.block_until_ready(simulated.start())
    marks = [workloads.clocks()]
    for r in range(rounds + 1):
        state, report = simulated.step(state, r)
        jax.block_until_ready((state, report))
        marks.append(workloads.clocks())
    return marks


def profile(simulated: Simulation) -> Any:
    """JAX's `ProfileData` of one round that compiles nothing."""
    state, _ = jax.block_until_ready(simulated.step(simulated.start(), 0))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(simulated.step(state, 1))
        (file,) = Path(folder).rglob("*.xplane.pb")
        return jax.profiler.ProfileData.from_file(str(file))


def device_peak_mb(device) -> float | None:
    """Peak memory of an accelerator in MiB; None if the backend does not count it."""
    stats = device.memory_stats() or {}
    return round(stats["peak_bytes_in_use"] / 2**20, 1) if "peak_bytes_in_use" in stats else None


def measure(name: str, workload: Workload, lanes: str, devices: int, rounds: int) -> dict:
    """The record that is printed."""
    select_device("auto", devices)
    simulated = prepare(workload, lanes, devices, rounds)
    timed = workloads.timing(time_rounds(simulated, rounds), workload.samples)
    device = jax.devices()[0]
    return {
        "bench": "round_time",
        "workload": name,
        **timed,
        "peak_memory_mb": workloads.peak_memory_mb(),
        "device_peak_memory_mb": device_peak_mb(device),
        "data_mb": round(workload.data_bytes / 2**20, 1),
        "lanes": simulated.program.lanes,
        "devices": devices,
        "clients": workload.clients,
        **limits(simulated.program.model, workload),
        "params": sizes(simulated.program.model, workload.shape).params,
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "jax": jax.__version__,
    }


def _lanes(text: str) -> str:
    if text != "auto" and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is neither auto nor a positive number")
    return text


def main(argv: list[str] | None = None) -> None:
    parser = workloads.parser(__doc__)
    parser.add_argument("--lanes", type=_lanes, default="auto", help="auto or a number")
    parser.add_argument("--devices", type=int, default=1, help="that divide the clients; a CPU is made into so many")
    args = parser.parse_args(argv)
    try:
        record = measure(args.workload, workloads.chosen(args), args.lanes, args.devices, args.rounds)
    except UserError as error:
        sys.exit(str(error))
    workloads.report(record, quiet=args.json)


if __name__ == "__main__":
    main()
