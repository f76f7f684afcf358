"""Which client trains on which samples, when and in which lane: plain numpy arrays, a pure function of (seed, round).

A *job* is one client of one experiment in one round. Jobs are packed into L lanes, longest first; each lane works
through its jobs one after another. A *segment* is a stretch of steps in which no lane changes its job. Every array has
a shape that depends on the federation alone, so a changing cohort compiles nothing.

Lanes change their jobs only where a *phase* of at most q steps ends, so that with a larger q more jobs end together,
and some wait in their lanes until it does; with q = 1 nobody waits.

Several devices divide the jobs, and each has lanes of its own.

Letters: J jobs, L lanes, T steps (an upper bound), B batch, D devices, M jobs that a device has at most, b jobs
of a block (`blocks.py`), q steps of a phase.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pcdd.methods.method import LastBatch
from fedjax_pcdd.trees import select

# In place of a client, for draws of a whole round: the cohort, or, where all take part and exchange answers, the order
# of the public images.
NOBODY = 2**63


class Plan(NamedTuple):
    """One round, ready for the lanes. The `*_stop` arrays [J + 2] are running counts, with a leading 0, per segment.

    The lists of jobs and lanes [J + b - 1] are those of all segments one after another, longest jobs first in each;
    their ends are padding, so that b entries in a row can be read from any start.
    """

    indices: np.ndarray  # [T, L, B] int32, sample of the data set, -1 for padding
    num_segments: np.int32
    step_stop: np.ndarray  # steps done before each segment
    load_stop: np.ndarray  # jobs loaded before each segment; those of segment g are load_*[stop[g]:stop[g + 1]]
    load_job: np.ndarray
    load_lane: np.ndarray
    finish_stop: np.ndarray  # jobs finished before each segment
    finish_job: np.ndarray
    finish_lane: np.ndarray


class Shares(NamedTuple):
    """One round on several devices, each with a plan of its own, in which job i is the device's i-th."""

    plan: Plan  # leaves [D, ...]
    members: np.ndarray  # [D, M] int32, jobs of each device, -1 for none
    position: np.ndarray  # [J] int32, of a job among all [D * M] members


class Jobs(NamedTuple):
    """What the lanes know of each job, all [J]."""

    row: np.ndarray  # experiment * K + client
    number: np.ndarray  # of the client in the federation, which its random draws depend on
    slot: np.ndarray  # where the state of that row is in what the round sees
    experiment: np.ndarray
    weight: np.ndarray  # p_k, normalised within the experiment's cohort; 0 for a job without steps
    steps: np.ndarray  # local steps in the round
    epoch_steps: np.ndarray  # local steps in an epoch


def jobs_of(jobs: Jobs, members: Any) -> Jobs:
    """Those that `Shares.members` name, -1 as a job without steps; takes arrays of NumPy and of JAX."""
    own = select(jobs, members.clip(0))
    return own._replace(steps=own.steps * (members >= 0))


Draws = Callable[[int, int], np.random.Generator]


def streams(seed: int, round: int) -> Draws:
    """The random numbers of (seed, round, client, epoch), as a function of client and epoch; streams never overlap.

    One generator goes from stream to stream, for to make one takes longer than a client's permutation: draw from what
    a call returns before the next call.
    """
    bits = np.random.Philox(key=[seed, round])
    generator, state = np.random.Generator(bits), bits.state
    counter = state["state"]["counter"]

    def begin(client: int, epoch: int) -> np.random.Generator:
        counter[2], counter[3] = client, epoch
        bits.state = state
        return generator

    return begin


def stream(seed: int, round: int, client: int, epoch: int) -> np.random.Generator:
    """The random numbers of one (seed, round, client, epoch)."""
    return streams(seed, round)(client, epoch)


def cohort(seed: int, round: int, able: np.ndarray, size: int, there: np.ndarray | None = None) -> np.ndarray:
    """Clients of a round: S of those that have samples, or all of these, uniformly, in increasing order.

    It depends on (seed, round) alone, never on the method (methods are compared on the same selections).

    Args:
      able: numbers of the clients with training samples, in increasing order.
      there: [K] which clients can be drawn; None for all, so that nothing is done for each of K clients.
    """
    able = able if there is None else able[there[able]]
    if size >= len(able):
        return able
    return able[np.sort(stream(seed, round, NOBODY, 0).choice(len(able), size, replace=False))]


def batches_per_epoch(samples: Any, batch: int, rule: LastBatch) -> Any:
    """Steps of one local epoch. `drop`: only full batches, but one masked batch for a client smaller than that."""
    full, all_of_them = samples // batch, -(-samples // batch)
    return full if rule == "strict" else full + (full == 0) * all_of_them if rule == "drop" else all_of_them


def job_batches(
    samples: Sequence[np.ndarray], draws: Draws, *, clients: np.ndarray, epochs: np.ndarray, batch: int,
    rule: LastBatch, shuffle: bool = True, first: Any = 0,
) -> list[np.ndarray]:  # fmt: skip
    """The batches of n jobs, of each [epochs * steps, B]: every epoch a fresh uniform permutation of its samples.

    What an epoch's last batch lacks is -1, with `top_up` its first samples.

    Args:
      samples: n index arrays.
      draws: `streams` of the seed and the round.
      clients: [n] numbers of the jobs' clients.
      epochs: [n] how many each job has.
      shuffle: without it every epoch has the samples in their stored order (FedRL).
      first: [n] number of each job's first epoch.

    >>> given = {"clients": np.zeros(1, int), "epochs": np.ones(1, int), "batch": 3, "shuffle": False}
    >>> {r: job_batches([np.arange(4)], streams(0, 0), rule=r, **given)[0].tolist() for r in ("keep", "drop", "top_up")}
    {'keep': [[0, 1, 2], [3, -1, -1]], 'drop': [[0, 1, 2]], 'top_up': [[0, 1, 2], [3, 0, 1]]}
    """
    sizes = np.array([len(own) for own in samples], int)
    steps = batches_per_epoch(sizes, batch, rule)
    edges, at = np.append(0, np.cumsum(steps * epochs)).tolist(), 0
    out = np.full(edges[-1] * batch, -1, np.int32)
    begins = np.broadcast_to(first, sizes.shape)
    numbers = (x.tolist() for x in (clients, begins, begins + epochs, steps * batch))
    for own, client, begin, end, length in zip(samples, *numbers, strict=True):
        for epoch in range(begin, end):
            order = own
            if shuffle:
                order = own.copy()
                draws(client, epoch).shuffle(order)
            used = order[:length]
            out[at : at + len(used)] = used
            if rule == "top_up" and len(used) < length:
                out[at + len(used) : at + length] = np.resize(order, length - len(used))
            at += length
    rows = out.reshape(-1, batch)
    return [rows[start:stop] for start, stop in pairwise(edges)]


def _counts(lengths: np.ndarray) -> np.ndarray:
    """0, 1, ... up to each of the lengths, one after another.

    >>> _counts(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    stops = np.cumsum(lengths)
    return np.arange(stops[-1] if len(stops) else 0) - np.repeat(stops - lengths, lengths)


def endless_batches(
    samples: Sequence[np.ndarray], draws: Draws, *, clients: np.ndarray, round: int, steps: int, batch: int,
    rule: LastBatch, shuffle: bool = True,
) -> list[np.ndarray]:  # fmt: skip
    """The batches of n jobs [steps, B] where rounds count steps: the order of the samples goes on across rounds.

    A permutation is used up before the next is drawn. What a client misses while it is not drawn passes by unused, so
    that batches depend on (seed, round) alone.

    Args:
      draws: `streams` of the seed and round 0; the others as of `job_batches`.

    >>> given = {"clients": np.zeros(1, int), "steps": 3, "batch": 2, "rule": "drop"}
    >>> parts = [endless_batches([np.arange(4)], streams(0, 0), round=r, **given)[0] for r in (0, 1)]
    >>> np.sort(np.concatenate(parts).reshape(3, 4)).tolist()
    [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    """
    own = batches_per_epoch(np.array([len(one) for one in samples], int), batch, rule)
    first, skipped = np.divmod(round * steps, np.maximum(own, 1))
    epochs = np.where(own > 0, -(-(round + 1) * steps // np.maximum(own, 1)) - first, 0)
    how: Any = {"batch": batch, "rule": rule, "shuffle": shuffle}
    whole = job_batches(samples, draws, clients=clients, epochs=epochs, first=first, **how)
    return [rows[skip : skip + steps] for rows, skip in zip(whole, skipped.tolist(), strict=True)]


def most_jobs(jobs: int, devices: int) -> int:
    """M, the most jobs of one device: a quarter more than its share, so that memory is bounded and lengths even out.

    >>> [most_jobs(100, devices) for devices in (1, 2, 8)]
    [100, 64, 17]
    """
    return jobs if devices == 1 else min(jobs, -(-5 * jobs // (4 * devices)) + 1)


def most_steps(steps: Sequence[np.ndarray], cohort: int, lanes: int, devices: int = 1, quantum: int = 1) -> int:
    """Upper bound of the length T of a round, whatever the cohorts; one device may have the longest jobs.

    Graham's bound on the longest-first packing; where every job takes one phase, the sum of the phases' longest.

    Args:
      steps: for each experiment [K], the local steps of each client in a round.
    """
    cohorts = np.concatenate([np.sort(s)[::-1][:cohort] for s in steps])
    longest = np.sort(cohorts)[::-1][: most_jobs(len(steps) * cohort, devices)]
    if quantum >= longest.max(initial=0):
        return max(1, int(longest[::lanes].sum()))
    phases = -(-longest // quantum)
    most = int(phases.max())
    return quantum * (-(-(int(phases.sum()) - most) // lanes) + most)


class Layout(NamedTuple):
    """When and where jobs run."""

    jobs: np.ndarray  # [n, 4] rows (first phase, phase after the last, job, lane), longest first
    edges: np.ndarray  # [P + 1] steps done before each phase


def layout(steps: Sequence[int], lanes: int, quantum: int = 1) -> Layout:
    """Give each job to the lane that is free first, longest first; steps [J], jobs without any are left out.

    A job takes whole phases. All but its last have q steps, and none is longer than its jobs need.
    """
    free = [(0, lane) for lane in range(lanes)]
    rows = []
    for job in sorted((j for j in range(len(steps)) if steps[j]), key=lambda j: (-steps[j], j)):
        start, lane = free[0]
        stop = start + -(-steps[job] // quantum)
        heapq.heapreplace(free, (stop, lane))
        rows.append((start, stop, job, lane))
    jobs = np.array(rows, np.int32).reshape(-1, 4)
    start, last = jobs[:, 0], jobs[:, 1] - 1
    lengths, longer = np.zeros((2, jobs[:, 1].max(initial=0)), np.int32)
    np.maximum.at(lengths, last, np.asarray(steps, np.int32)[jobs[:, 2]] - quantum * (last - start))
    np.add.at(longer, start, 1)
    np.add.at(longer, last, -1)  # phases in which some job is not yet in its last one
    lengths = np.where(np.cumsum(longer) > 0, quantum, lengths)
    return Layout(jobs, np.append(0, np.cumsum(lengths)))


def pack(batches: Sequence[np.ndarray], lanes: int, *, steps: int, quantum: int = 1, block: int = 1) -> Plan:
    """Pack jobs into lanes, longest first, each to the lane that is free first.

    Args:
      batches: for each of the J jobs [T_j, B], its batches in order; a job without batches is left out.
      steps: T, at least the length of the longest lane (`most_steps`).
      quantum, block: q and b.
    """
    width = batches[0].shape[1] if len(batches) else 1
    indices, lengths = np.full((steps, lanes, width), -1, np.int32), [len(b) for b in batches]
    jobs = layout(lengths, lanes, quantum)
    start, _, job, lane = jobs.jobs.T
    if len(job):
        length = np.array(lengths)[job]
        step = np.repeat(jobs.edges[start], length) + _counts(length)
        indices[step, np.repeat(lane, length)] = np.concatenate([batches[j] for j in job.tolist()])
    return _segments(indices, jobs, len(batches), block)


def divide(
    batches: Sequence[np.ndarray], lanes: int, devices: int, *, steps: int, quantum: int = 1, block: int = 1,
    owners: np.ndarray | None = None, processes: int = 1,
) -> Shares:  # fmt: skip
    """Divide jobs among D devices with L lanes each, and `pack` each device's; the longest go first in both.

    Args:
      owners: [J] of several processes the one whose devices train each job; None where any may.
      processes: that own jobs, whose devices lie one after another.
    """
    each = devices // processes
    jobs, most = len(batches), most_jobs(len(batches), each)
    members = np.full((devices, most), -1, np.int32)
    position, count = np.zeros(jobs, np.int32), [0] * devices
    lists = [
        [(0, 0, lane * each + device) for lane in range(lanes) for device in range(each)] for _ in range(processes)
    ]
    for job in sorted(range(jobs), key=lambda j: (-len(batches[j]), j)):
        owner = 0 if owners is None else int(owners[job])
        free = lists[owner]
        while count[owner * each + free[0][2] % each] == most:
            heapq.heappop(free)
        stop, held, lane = free[0]
        device = owner * each + lane % each
        members[device, count[device]] = job
        position[job] = device * most + count[device]
        count[device] += 1
        heapq.heapreplace(free, (stop + len(batches[job]), held + 1, lane))
    nothing = batches[0][:0]
    shares = [[batches[j] if j >= 0 else nothing for j in own] for own in members]
    plans = [pack(own, lanes, steps=steps, quantum=quantum, block=block) for own in shares]
    return Shares(jax.tree.map(lambda *x: np.stack(x), *plans), members, position)


def _segments(indices: np.ndarray, layout: Layout, total: int, block: int) -> Plan:
    """Segments from a layout of jobs, J in `total`."""
    jobs, edges = layout
    ends = np.unique(np.append(jobs[:, 1], 0))
    segments = len(ends) - 1
    load = jobs[np.argsort(jobs[:, 0], kind="stable")]
    finish = jobs[np.argsort(jobs[:, 1], kind="stable")]

    def stops(counts):
        return np.pad(counts, (0, total + 2 - len(counts)), mode="edge").astype(np.int32)

    def fill(column):
        return np.pad(column, (0, total + block - 1 - len(column))).astype(np.int32)

    loaded = np.append(0, np.searchsorted(load[:, 0], ends[:-1], side="right"))
    finished = np.append(0, np.searchsorted(finish[:, 1], ends[1:], side="right"))
    return Plan(
        indices, np.int32(segments), stops(edges[ends]), stops(loaded), fill(load[:, 2]), fill(load[:, 3]),
        stops(finished), fill(finish[:, 2]), fill(finish[:, 3]),
    )  # fmt: skip
