"""Blocks: how many jobs begin or end as one, chosen from the backend and from how unequal the clients are.

A lane's job is loaded before its first step and finished after its last: its message reduced, its state stored, its
model tested. On a CPU that is fastest one job after another, b = 1. Elsewhere each kernel's launch and each turn of a
loop has its price, so b jobs are loaded or finished under one `vmap`. Then jobs should end together, and of like size,
which the phases of the schedule see to. Everything here is decided once, before anything is compiled.

Letters: J jobs of a round on a device, L lanes, b jobs of a block, q steps of a phase, R rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from fedjax_pcdd.engine.schedule import layout

# Predictions from programs compiled for a GPU, not measured:
END = 2  # steps that the end of a segment costs, with its turns of loops and the kernels of a load and a finish
WAITING = 1.1  # the most by which jobs that wait for each other may lengthen a round
PADDING = 3  # and the most by which padding may multiply the jobs that are finished, in blocks larger than the smallest
SIZES = (32, 8)  # of blocks, beside L


@dataclass(frozen=True)
class Blocks:
    """How jobs begin and end, static."""

    size: int = 1  # b
    quantum: int = 1  # q
    together: bool = False  # all lanes begin and end their jobs together: a segment is a block of whole jobs
    waits: bool = False  # some job may wait in its lane for the end of a phase, and is not to be trained meanwhile
    steps: int = 0  # of every segment, 0 where they differ


class Pass(NamedTuple):
    """How one client's samples go through a model that does not train."""

    batch: int
    turns: int = 0  # batches of every client, 0 where they differ


def choose_blocks(steps: np.ndarray, jobs: int, lanes: int, *, everyone: bool, size: int | None = None) -> Blocks:
    """The blocks of a simulation; `everyone` says that the J jobs of every round are those of all clients.

    Args:
      steps: [R] local steps in a round.
      size: b, None to choose it.
    """
    able = np.sort(steps[steps > 0])[::-1].tolist() or [1]
    longest, equal = able[0], able[0] == able[-1]
    chosen = size or (1 if jax.default_backend() == "cpu" else lanes)
    if min(chosen, lanes) == 1:
        return Blocks(together=lanes == 1, steps=int(longest == 1))
    typical = [able[i] for i in np.linspace(0, len(able) - 1, jobs).round().astype(int)]
    quantum = longest if equal else choose_quantum(typical, lanes)
    together = chosen >= lanes and quantum == longest
    if size is None and not together:
        chosen = block_size(typical, lanes, quantum)
    same = equal or (together and everyone and jobs <= lanes)
    return Blocks(min(chosen, lanes), quantum, together, not equal and quantum > 1, longest if same else 0)


def choose_quantum(steps: Sequence[int], lanes: int) -> int:
    """Steps of a phase for these jobs [J]: what makes steps and ends of segments cheapest, without much waiting.

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
    """The largest block without too much padding when these jobs [J] end, or else the smallest."""
    jobs, _ = layout(steps, lanes, quantum)
    ends = np.unique(jobs[:, 1], return_counts=True)[1]
    sizes = [lanes, *(size for size in SIZES if size < lanes)]
    return next((size for size in sizes if (-(-ends // size) * size).sum() <= PADDING * len(steps)), sizes[-1])


def client_pass(sizes: np.ndarray, budget: int, size: int, *, batch: int | None = None) -> Pass:
    """The pass of a block of clients, with [R] samples, over their own data.

    Args:
      budget: samples of all clients of a block together, so that memory does not grow with b.
      size: b; a single client's loop turns as often as its own samples ask, so that one without any costs nothing.
      batch: in place of what the budget allows.
    """
    batch = batch or min(max(int(sizes.max(initial=1)), 1), max(budget // size, 1))
    turns = np.unique(-(-sizes[sizes > 0] // batch))
    return Pass(batch, int(turns[0]) if size > 1 and len(turns) == 1 else 0)
