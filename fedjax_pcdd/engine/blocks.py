"""Blocks: how many jobs begin or end together, chosen by the backend and by how unequal the clients are.

A lane's job is loaded before its first step and finished after its last: its message is reduced, its state stored and
its model tested. On a CPU it is fastest to do this one job at a time, b = 1. Elsewhere every kernel launch and every
loop iteration has a cost, so b jobs are loaded or finished under one `vmap`. Jobs should then end together and be of
similar size, which the phases of the schedule arrange. Everything here is decided once, before compilation.

Letters: J jobs of a round on a device, L lanes, b jobs of a block, q steps of a phase, R rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from fedjax_pcdd.engine.schedule import layout

# Predicted from programs compiled for a GPU, not measured:
END = 2  # cost of ending a segment, in steps: its loop iterations, and the kernels of a load and a finish
WAITING = 1.1  # largest factor by which jobs that wait for each other may lengthen a round
PADDING = 3  # largest factor by which padding may multiply the finished jobs, in blocks larger than the smallest
SIZES = (32, 8)  # of blocks, besides L


@dataclass(frozen=True)
class Blocks:
    """How jobs begin and end; static."""

    size: int = 1  # b
    quantum: int = 1  # q
    together: bool = False  # all lanes begin and end their jobs together: a segment is a block of whole jobs
    waits: bool = False  # some job may wait in its lane for the end of a phase, and must not be trained meanwhile
    steps: int = 0  # of every segment, 0 if segments differ


class Pass(NamedTuple):
    """How one client's samples go through a model without training it."""

    batch: int
    turns: int = 0  # batches of every client, 0 if clients differ


def choose_blocks(steps: np.ndarray, jobs: int, lanes: int, *, everyone: bool, size: int | None = None) -> Blocks:
    """Choose the blocks of a simulation.

    Args:
      steps: [R] local steps in a round.
      everyone: whether the J jobs of every round are those of all clients.
      size: b, None to choose it.
    """
    step_counts = np.sort(steps[steps > 0])[::-1].tolist() or [1]
    longest, equal = step_counts[0], step_counts[0] == step_counts[-1]
    block = size or (1 if jax.default_backend() == "cpu" else lanes)
    if min(block, lanes) == 1:
        return Blocks(together=lanes == 1, steps=int(longest == 1))
    typical = [step_counts[i] for i in np.linspace(0, len(step_counts) - 1, jobs).round().astype(int)]
    quantum = longest if equal else choose_quantum(typical, lanes)
    together = block >= lanes and quantum == longest
    if size is None and not together:
        block = block_size(typical, lanes, quantum)
    same_length = equal or (together and everyone and jobs <= lanes)
    return Blocks(min(block, lanes), quantum, together, not equal and quantum > 1, longest if same_length else 0)


def choose_quantum(steps: Sequence[int], lanes: int) -> int:
    """Steps of a phase for these jobs [J]: the choice with the cheapest steps and segment ends, without much waiting.

    >>> choose_quantum([9, 5, 1], lanes=3)
    9
    """
    longest = max(steps)
    options = [longest, *(2**i for i in reversed(range(longest.bit_length())) if 2**i < longest)]
    layouts = [layout(steps, lanes, quantum) for quantum in options]
    lengths = np.array([edges[-1] for _, edges in layouts])
    costs = lengths + END * np.array([len(np.unique(jobs[:, 1])) for jobs, _ in layouts])
    costs[lengths > WAITING * lengths[-1]] = costs.max() + 1
    return options[int(np.argmin(costs))]


def block_size(steps: Sequence[int], lanes: int, quantum: int) -> int:
    """The largest block size without too much padding when these jobs [J] end, or else the smallest."""
    jobs, _ = layout(steps, lanes, quantum)
    ends = np.unique(jobs[:, 1], return_counts=True)[1]
    sizes = [lanes, *(size for size in SIZES if size < lanes)]
    return next((size for size in sizes if (-(-ends // size) * size).sum() <= PADDING * len(steps)), sizes[-1])


def client_pass(sizes: np.ndarray, budget: int, size: int, *, batch: int | None = None) -> Pass:
    """The pass of a block of clients over their own data; sizes [R] in samples.

    Args:
      budget: samples at a time for all clients of a block together, so that memory does not grow with b.
      size: b; with b = 1 a client's loop takes only the turns that its samples need, none for a client without any.
      batch: instead of what the budget allows.
    """
    batch = batch or min(int(sizes.max(initial=1)), max(budget // size, 1))
    turns = np.unique(-(-sizes[sizes > 0] // batch))
    return Pass(batch, int(turns[0]) if size > 1 and len(turns) == 1 else 0)
