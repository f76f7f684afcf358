"""Which client trains on which samples, when and in which lane: plain numpy arrays, a pure function of (seed, round).

A *job* is one client of one experiment in one round. Jobs are packed into L lanes, longest first; each lane works
through its jobs one after another. A *segment* is a stretch of steps in which no lane changes its job. Every array has
a shape that depends on the federation alone, so a changing cohort causes no compilation.

Lanes change their jobs only where a *phase* of at most q steps ends, so that with a larger q more jobs end together,
and some wait in their lanes for the end of the phase; with q = 1 none waits.

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

# Stands for a client in draws for a whole round: the cohort or, where all take part and exchange answers, the order of
# the public images.
NO_CLIENT = 2**63


class Plan(NamedTuple):
    """One round, ready for the lanes. The `*_stop` arrays [J + 2] are running counts, with a leading 0, per segment.

    The lists of jobs and lanes [J + b - 1] are those of all segments one after another, longest jobs first in each;
    they are padded at the end, so that b consecutive entries can be read from any start.
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
    """What the lanes know about each job, all [J]."""

    row: np.ndarray  # experiment * K + client
    number: np.ndarray  # of the client in the federation; its random draws depend on it
    slot: np.ndarray  # position of that row's state in the state that the round sees
    experiment: np.ndarray
    weight: np.ndarray  # p_k, normalised within the experiment's cohort; 0 for a job without steps
    steps: np.ndarray  # local steps in the round
    epoch_steps: np.ndarray  # local steps in an epoch


def jobs_of(jobs: Jobs, members: Any) -> Jobs:
    """The jobs that `Shares.members` name, -1 as a job without steps; takes NumPy and JAX arrays."""
    selected = select(jobs, members.clip(0))
    return selected._replace(steps=selected.steps * (members >= 0))


Draws = Callable[[int, int], np.random.Generator]


def streams(seed: int, round: int) -> Draws:
    """The random numbers of (seed, round, client, epoch), as a function of client and epoch; streams never overlap.

    One generator moves from stream to stream, as creating one takes longer than a client's permutation: draw from the
    generator that a call returns before the next call.
    """
    bits = np.random.Philox(key=[seed, round])
    generator, state = np.random.Generator(bits), bits.state
    counter = state["state"]["counter"]

    def begin(client: int, epoch: int) -> np.random.Generator:
        counter[2], counter[3] = client, epoch
        bits.state = state
        return generator

    return begin


def cohort(seed: int, round: int, able: np.ndarray, size: int, available: np.ndarray | None = None) -> np.ndarray:
    """Clients of a round, in increasing order: S of those with samples, drawn uniformly, or all if there are no more.

    It depends on (seed, round) alone, never on the method (methods are compared on the same selections).

    Args:
      able: numbers of the clients with training samples, in increasing order.
      available: [K] which clients can be drawn; None for all, which saves work for each of K clients.
    """
    able = able if available is None else able[available[able]]
    if size >= len(able):
        return able
    return able[np.sort(streams(seed, round)(NO_CLIENT, 0).choice(len(able), size, replace=False))]


def batches_per_epoch(samples: Any, batch: int, rule: LastBatch) -> Any:
    """Steps of one local epoch. `drop`: only full batches, but one masked batch for a client with fewer samples."""
    full, rounded_up = samples // batch, -(-samples // batch)
    return full if rule == "strict" else full + (full == 0) * rounded_up if rule == "drop" else rounded_up


def job_batches(
    samples: Sequence[np.ndarray], draws: Draws, *, clients: np.ndarray, epochs: np.ndarray, batch: int,
    rule: LastBatch, shuffle: bool = True, first: Any = 0,
) -> list[np.ndarray]:  # fmt: skip
    """The batches of n jobs, each [epochs * steps, B]: every epoch is a fresh uniform permutation of the job's samples.

    An epoch's last batch is filled up with -1, with `top_up` by the epoch's first samples.

    Args:
      samples: n index arrays.
      draws: `streams` of the seed and the round.
      clients: [n] numbers of the jobs' clients.
      epochs: [n] number of epochs of each job.
      shuffle: if False, every epoch has the samples in their stored order (FedRL).
      first: [n] number of each job's first epoch.

    >>> fixed = {"clients": np.zeros(1, int), "epochs": np.ones(1, int), "batch": 3, "shuffle": False}
    >>> {r: job_batches([np.arange(4)], streams(0, 0), rule=r, **fixed)[0].tolist() for r in ("keep", "drop", "top_up")}
    {'keep': [[0, 1, 2], [3, -1, -1]], 'drop': [[0, 1, 2]], 'top_up': [[0, 1, 2], [3, 0, 1]]}
    """
    sizes = np.array([len(indices) for indices in samples], int)
    steps = batches_per_epoch(sizes, batch, rule)
    edges, position = np.append(0, np.cumsum(steps * epochs)).tolist(), 0
    out = np.full(edges[-1] * batch, -1, np.int32)
    first_epochs = np.broadcast_to(first, sizes.shape)
    columns = (x.tolist() for x in (clients, first_epochs, first_epochs + epochs, steps * batch))
    for indices, client, begin, end, length in zip(samples, *columns, strict=True):
        for epoch in range(begin, end):
            order = indices
            if shuffle:
                order = indices.copy()
                draws(client, epoch).shuffle(order)
            used = order[:length]
            out[position : position + len(used)] = used
            if rule == "top_up" and len(used) < length:
                out[position + len(used) : position + length] = np.resize(order, length - len(used))
            position += length
    rows = out.reshape(-1, batch)
    return [rows[start:stop] for start, stop in pairwise(edges)]


def runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Runs of consecutive numbers with these starts and lengths, one run after another.

    >>> runs(np.array([5, 7, 0]), np.array([2, 0, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())


def endless_batches(
    samples: Sequence[np.ndarray], draws: Draws, *, clients: np.ndarray, round: int, steps: int, batch: int,
    rule: LastBatch, shuffle: bool = True,
) -> list[np.ndarray]:  # fmt: skip
    """The batches of n jobs [steps, B] where rounds count steps: the order of the samples continues across rounds.

    A permutation is used up before the next is drawn. Batches of rounds in which a client is not drawn are skipped, so
    that batches depend on (seed, round) alone.

    Args:
      draws: `streams` of the seed and round 0; the others are as in `job_batches`.

    >>> fixed = {"clients": np.zeros(1, int), "steps": 3, "batch": 2, "rule": "drop"}
    >>> parts = [endless_batches([np.arange(4)], streams(0, 0), round=r, **fixed)[0] for r in (0, 1)]
    >>> np.sort(np.concatenate(parts).reshape(3, 4)).tolist()
    [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2, 3]]
    """
    epoch_steps = batches_per_epoch(np.array([len(indices) for indices in samples], int), batch, rule)
    first, skipped = np.divmod(round * steps, np.maximum(epoch_steps, 1))
    epochs = np.where(epoch_steps > 0, -(-(round + 1) * steps // np.maximum(epoch_steps, 1)) - first, 0)
    options: Any = {"batch": batch, "rule": rule, "shuffle": shuffle}
    batches = job_batches(samples, draws, clients=clients, epochs=epochs, first=first, **options)
    return [rows[skip : skip + steps] for rows, skip in zip(batches, skipped.tolist(), strict=True)]


def most_jobs(jobs: int, devices: int) -> int:
    """M, the most jobs of one device: a quarter more than its share, so that memory is bounded and lengths even out.

    >>> [most_jobs(100, devices) for devices in (1, 2, 8)]
    [100, 64, 17]
    """
    return jobs if devices == 1 else min(jobs, -(-5 * jobs // (4 * devices)) + 1)


def most_steps(steps: Sequence[np.ndarray], cohort: int, lanes: int, devices: int = 1, quantum: int = 1) -> int:
    """Upper bound of the length T of a round for any cohorts; one device may have all the longest jobs.

    Graham's bound on the longest-first packing; if every job takes one phase, the sum of the longest job of each phase.

    Args:
      steps: for each experiment [K], the local steps of each client in a round.
    """
    cohorts = np.concatenate([np.sort(s)[::-1][:cohort] for s in steps])
    longest = np.sort(cohorts)[::-1][: most_jobs(len(steps) * cohort, devices)]
    if quantum >= longest.max(initial=0):
        return max(1, int(longest[::lanes].sum()))
    phases = -(-longest // quantum)
    most_phases = int(phases.max())
    return quantum * (-(-(int(phases.sum()) - most_phases) // lanes) + most_phases)


def layout(steps: Sequence[int], lanes: int, quantum: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Assign each job, longest first, to the lane that is free first; steps [J], jobs without steps are left out.

    A job takes whole phases. All but its last have q steps, and no phase is longer than its jobs need.

    Returns:
      Rows (first phase, phase after the last, job, lane) [n, 4], longest job first, and the steps done before each
      phase [P + 1].
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
    return jobs, np.append(0, np.cumsum(lengths))


def pack(batches: Sequence[np.ndarray], lanes: int, *, steps: int, quantum: int = 1, block: int = 1) -> Plan:
    """Pack jobs into lanes, longest first, each to the lane that is free first.

    Args:
      batches: for each of the J jobs [T_j, B], its batches in order; a job without batches is left out.
      steps: T, at least the length of the longest lane (`most_steps`).
      quantum, block: q and b.
    """
    total, width = len(batches), batches[0].shape[1] if len(batches) else 1
    indices, lengths = np.full((steps, lanes, width), -1, np.int32), [len(b) for b in batches]
    jobs, edges = layout(lengths, lanes, quantum)
    start, stop, job, lane = jobs.T
    if len(job):
        length = np.array(lengths)[job]
        step = runs(edges[start], length)
        indices[step, np.repeat(lane, length)] = np.concatenate([batches[j] for j in job.tolist()])
    ends = np.unique(np.append(stop, 0))  # where segments meet
    load, finish = (jobs[np.argsort(phase, kind="stable")] for phase in (start, stop))

    def stops(counts):
        return np.pad(counts, (0, total + 2 - len(counts)), mode="edge").astype(np.int32)

    def fill(column):
        return np.pad(column, (0, total + block - 1 - len(column))).astype(np.int32)

    loaded = np.append(0, np.searchsorted(load[:, 0], ends[:-1], side="right"))
    finished = np.append(0, np.searchsorted(finish[:, 1], ends[1:], side="right"))
    return Plan(
        indices, np.int32(len(ends) - 1), stops(edges[ends]), stops(loaded), fill(load[:, 2]), fill(load[:, 3]),
        stops(finished), fill(finish[:, 2]), fill(finish[:, 3]),
    )  # fmt: skip


def divide(
    batches: Sequence[np.ndarray], lanes: int, devices: int, *, steps: int, quantum: int = 1, block: int = 1,
    owners: np.ndarray | None = None, processes: int = 1,
) -> Shares:  # fmt: skip
    """Divide jobs among D devices with L lanes each, and `pack` each device's; both take the longest jobs first.

    Args:
      owners: [J] with several processes, the one whose devices train each job; None if any may.
      processes: how many own jobs; the devices of each are consecutive.
    """
    process_devices = devices // processes
    jobs, most = len(batches), most_jobs(len(batches), process_devices)
    members = np.full((devices, most), -1, np.int32)
    position, count = np.zeros(jobs, np.int32), [0] * devices
    queues = [
        [(0, 0, lane * process_devices + device) for lane in range(lanes) for device in range(process_devices)]
        for _ in range(processes)
    ]
    for job in sorted(range(jobs), key=lambda j: (-len(batches[j]), j)):
        owner = 0 if owners is None else int(owners[job])
        free = queues[owner]
        while count[owner * process_devices + free[0][2] % process_devices] == most:
            heapq.heappop(free)
        stop, lane_jobs, lane = free[0]
        device = owner * process_devices + lane % process_devices
        members[device, count[device]] = job
        position[job] = device * most + count[device]
        count[device] += 1
        heapq.heapreplace(free, (stop + len(batches[job]), lane_jobs + 1, lane))
    no_batches = batches[0][:0]
    shares = [[batches[j] if j >= 0 else no_batches for j in device_jobs] for device_jobs in members]
    plans = [pack(share, lanes, steps=steps, quantum=quantum, block=block) for share in shares]
    return Shares(jax.tree.map(lambda *x: np.stack(x), *plans), members, position)
