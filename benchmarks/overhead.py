"""What each method costs over FedAvg: seconds a round, and scalars that a client holds while it trains.

python -m benchmarks.overhead --workloads w1 w4 --rounds 4 --out benchmarks/results/overhead

Each method's rounds are timed between two groups of FedAvg's, and the ratio is that of the medians, so that a machine
that becomes slower meanwhile slows both. Beside it stands what extra forward passes explain: each costs a share of a
step that is measured in the same process.
"""

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.round_time import build, federation
from benchmarks.workloads import LR, MOMENTUM, WEIGHT_DECAY, WORKLOADS, Workload
from fedjax_pcdd.analysis.traffic import in_words, traffic
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.simulation.round import Experiment, Local, Simulation

# Forward passes of a client's data beside the training step's own, in a round of one local epoch.
EXTRA_FORWARDS = {"moon": 2, "fedrl": 1, "fedmr": 1, "fedproc": 1, "fedproto": 1}

UNLIKE = ("fml",)  # its second model, ResNet10, is what one would time


class Cost(NamedTuple):
    """One method on one workload."""

    method: str
    seconds: float
    ratio: float
    explained: float
    held: str


def simulate(name: str, workload: Workload, parts: Any) -> Simulation:
    """One local epoch of a method on one lane."""
    method, local = METHODS[name](), Local(1, workload.batch, "drop", "sgd", LR, MOMENTUM, WEIGHT_DECAY)
    return Simulation(
        method.build(build(workload)), [Experiment(parts, method, local, 0)], pipeline=Pipeline(),
        cohort=workload.clients, lanes=1,
    )  # fmt: skip


def timer(simulated: Simulation, rounds: int) -> Callable[[], list[float]]:
    """A function that runs some rounds and gives the seconds of each; what must be compiled is compiled here."""
    state = [simulated.start()]

    def run(rounds: int = rounds) -> list[float]:
        seconds = []
        for r in range(rounds):
            start = time.perf_counter()
            state[0], report = simulated.step(state[0], r)
            jax.block_until_ready((state[0], report))
            seconds.append(time.perf_counter() - start)
        return seconds

    run(1)
    return run


def forward_share(workload: Workload) -> float:
    """Time of a forward pass over that of a whole training step, on one batch."""
    model = build(workload)
    variables = model.init(jax.random.key(0), jnp.zeros((1, *workload.shape)), train=False)
    images = jax.random.normal(jax.random.key(1), (workload.batch, *workload.shape))
    labels = jnp.zeros(workload.batch, jnp.int32)

    def loss(params):
        logits = forward(model, {"params": params}, images, train=True)[0].logits
        return -jax.nn.log_softmax(logits)[:, labels].mean()

    @functools.partial(jax.jit, static_argnums=1)
    def repeat(params, steps):
        def step(_, params):
            return jax.tree.map(lambda p, g: p - LR * g, params, jax.grad(loss)(params))

        return jax.lax.fori_loop(0, steps, step, params)

    @functools.partial(jax.jit, static_argnums=1)
    def look(params, steps):
        def step(_, total):
            changed = jax.tree.map(lambda p: p + 1e-9 * total, params)
            return total + forward(model, {"params": changed}, images, train=True)[0].logits.sum()

        return jax.lax.fori_loop(0, steps, step, jnp.zeros(()))

    def fastest(function):
        jax.block_until_ready(function(variables["params"], 20))
        times = []
        for _ in range(5):
            start = time.perf_counter()
            jax.block_until_ready(function(variables["params"], 20))
            times.append(time.perf_counter() - start)
        return min(times)

    return fastest(look) / fastest(repeat)


def measure(workload: Workload, names: list[str], rounds: int) -> list[Cost]:
    """The costs of the methods, FedAvg's rounds before and after each."""
    parts, share = federation(workload), forward_share(workload)
    plain = timer(simulate("fedavg", workload, parts), rounds)
    found, before = [], plain()
    for name in names:
        run = timer(simulate(name, workload, parts), rounds)
        before = plain()
        seconds, after = run(), plain()
        ratio = statistics.median(seconds) / statistics.median(before + after)
        sizes = traffic(METHODS[name](), build(workload), workload.shape)
        explained = 1 + EXTRA_FORWARDS.get(name, 0) * share
        held = in_words(sizes.held, sizes, 10)
        found.append(Cost(name, statistics.median(seconds), ratio, explained, held))
        print(f"{name}: {ratio:.2f} times FedAvg, {explained:.2f} explained", flush=True)
    return found


def markdown(results: dict[str, list[Cost]]) -> str:
    """One table for each workload."""
    head = f"One lane, {platform.processor() or platform.machine()}, jax {jax.__version__} ({jax.default_backend()}).\n"
    text = [head]
    for workload, costs in results.items():
        text.append(
            f"\n## {workload.upper()}\n\n| method | s a round | times FedAvg | extra forward passes explain | held |"
        )
        text.append("|---|---|---|---|---|")
        text += [f"| {c.method} | {c.seconds:.4f} | {c.ratio:.2f} | {c.explained:.2f} | {c.held} |" for c in costs]
    return "\n".join(text) + "\n"


def _plain(method: Any) -> bool:
    """Whether a method runs on a partition without public images and models of its own."""
    return method.exchange == "never" and not method.distils


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["w1", "w4"])
    parser.add_argument("--methods", nargs="+", help="by default all that need no public images")
    parser.add_argument("--rounds", type=int, default=4, help="timed rounds of each method")
    parser.add_argument("--out", type=Path, help="file without its ending, for Markdown and JSON")
    args = parser.parse_args(argv)
    names = args.methods or [name for name, cls in METHODS.items() if _plain(cls()) and name not in UNLIKE]
    results: dict[str, list[Cost]] = {}
    for name in args.workloads:
        results[name] = measure(WORKLOADS[name], names, args.rounds)
        if args.out:
            args.out.with_suffix(".md").write_text(markdown(results))
            found = {workload: [cost._asdict() for cost in costs] for workload, costs in results.items()}
            args.out.with_suffix(".json").write_text(json.dumps(found))
    print(markdown(results))


if __name__ == "__main__":
    main()
