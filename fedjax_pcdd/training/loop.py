"""Rounds one after another, whoever writes them down."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pcdd.engine.program import State, Tree
from fedjax_pcdd.engine.round import Report
from fedjax_pcdd.engine.schedule import Jobs
from fedjax_pcdd.training.metrics import History
from fedjax_pcdd.training.tracking import Recorder


class Progress(NamedTuple):
    """A run between two rounds."""

    round: int  # completed rounds
    state: State
    best: Tree  # global variables [1, ...] of the best GA, () where no fine-tuning starts from them
    history: History


class Trained(NamedTuple):
    """A round that is done."""

    round: int  # from 1
    state: State
    report: Report  # on the host
    jobs: Jobs
    seconds: float
    seen: Any  # what the recorder saw before it


def train(simulation: Any, state: State, done: int, rounds: int, recorder: Recorder | None = None) -> Iterator[Trained]:
    """Train round after round; a round's state is donated when the next one is asked for."""
    plan = simulation.plan(min(done, rounds - 1))
    for r in range(done, rounds):
        seen = recorder and recorder.before(r, state, plan)
        begun = perf_counter()
        launched = simulation.launch(state, r, plan)
        jobs, plan = plan[1], simulation.plan(min(r + 1, rounds - 1))  # while the device computes
        if r + 1 < rounds:
            simulation.prefetch(launched, plan)
        state, report = simulation.settle(launched)
        report = jax.tree.map(np.array, report)
        yield Trained(r + 1, state, report, jobs, perf_counter() - begun, seen)


def profiled(rounds: Iterator[Trained], folder: Path) -> Iterator[Trained]:
    """The same rounds; the second and the third, which compile nothing, are traced into the folder.

    It holds what TensorBoard's profiler (xprof) reads, and perfetto_trace.json.gz for https://ui.perfetto.dev.
    """
    yield from islice(rounds, 1)
    with jax.profiler.trace(folder, create_perfetto_trace=True):
        yield from islice(rounds, 2)
    yield from rounds
