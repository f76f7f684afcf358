"""What every client is to do in a round: local training, cohorts, jobs and their schedule, from (seed, round) alone.

Letters: E experiments, K clients, S cohort, J = E * S jobs, B batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.engine import schedule
from fedjax_pcdd.engine.mesh import SPLIT, place
from fedjax_pcdd.engine.program import Program
from fedjax_pcdd.engine.storage import OnDevice
from fedjax_pcdd.methods.method import Method
from fedjax_pcdd.trees import select

Planned = tuple[schedule.Plan | schedule.Shares, schedule.Jobs]


@dataclass(frozen=True)
class Local:
    """Local training: what every client does in a round."""

    epochs: int | tuple[int, ...] = 10  # of all clients, or of each
    batch_size: int = 100
    last_batch: schedule.LastBatch = "drop"
    optimizer: str = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip: float | None = None  # global norm of the gradient
    shuffle: bool = True  # a fresh permutation each epoch, else the stored order of each client
    lr_steps: tuple[int, ...] = ()  # rounds from which on the learning rate is multiplied by lr_decay
    lr_decay: float = 0.1


class Experiment(NamedTuple):
    """One federation trained by one method from one seed."""

    federation: Federation
    method: Method
    local: Local
    seed: int
    numbers: tuple[int, ...] = ()  # of the clients in the whole federation, where this one is a part of it


class Planner:
    """Schedules rounds; `Simulation` is one, and sets these attributes."""

    experiments: Sequence[Experiment]
    program: Program
    storage: OnDevice
    local: Local
    cohort_size: int  # S
    capacity: int  # most steps of a lane
    numbers: np.ndarray  # [E, K] of the clients in the whole federation
    sizes: np.ndarray  # [E, K] training samples
    steps: np.ndarray  # [E, K] in a local epoch
    epochs: np.ndarray  # [K]
    weights: np.ndarray  # [E, K] before normalisation

    @property
    def federations(self) -> list[Federation]:
        """Of each experiment."""
        return [one.federation for one in self.experiments]

    def _of_each(self, value) -> np.ndarray:
        """A number for each client [K], from one for all or one for each."""
        return np.broadcast_to(value, (self.sizes.shape[1],))

    def _epoch_steps(self, samples: int) -> int:
        return schedule.batches_per_epoch(int(samples), self.local.batch_size, self.local.last_batch)

    def _has_padding(self) -> bool:
        full = (self.steps * self.local.batch_size <= self.sizes) | (self.local.last_batch == "top_up")
        return not full.all()

    def clients_of(self, round: int) -> list[np.ndarray]:
        """The cohort of each experiment."""
        pairs = zip(self.experiments, self.sizes, strict=True)
        return [schedule.cohort(e.seed, round, sizes, self.cohort_size) for e, sizes in pairs]

    def parts(self) -> list[np.ndarray]:
        """All clients with samples in portions of a cohort, for one experiment."""
        able = np.flatnonzero(self.sizes[0] > 0)
        return [able[i : i + self.cohort_size] for i in range(0, len(able), self.cohort_size)]

    def jobs(self, round: int, cohorts: Sequence[np.ndarray] | None = None) -> tuple[schedule.Jobs, list[np.ndarray]]:
        """Jobs of a round [J] and the batches of each [T_j, B]; `cohorts` in place of those drawn.

        A cohort without any weight has no batches: what its clients learnt, nobody would hear of.
        """
        size, local = self.cohort_size, self.local
        shape = (len(self.experiments), size)
        clients, weight = np.zeros(shape, np.int32), np.zeros(shape)
        batches = []
        for e, chosen in enumerate(cohorts or self.clients_of(round)):
            experiment = self.experiments[e]
            clients[e, : len(chosen)] = chosen
            weight[e, : len(chosen)] = self.weights[e, chosen] * (self.steps[e, chosen] > 0)
            lists = [experiment.federation.partition.train[k] for k in chosen]
            draw = partial(
                schedule.job_batches, seed=experiment.seed, round=round, batch=local.batch_size, rule=local.last_batch,
                shuffle=local.shuffle,
            )  # fmt: skip
            numbers = self.numbers[e, chosen]
            epochs = self.epochs[chosen]
            drawn = [draw(x, client=int(k), epochs=e) for k, x, e in zip(numbers, lists, epochs, strict=True)]
            batches += drawn if weight[e].any() else [b[:0] for b in drawn]
            batches += [np.zeros((0, local.batch_size), np.int32)] * (size - len(chosen))
        weight /= np.maximum(weight.sum(1, keepdims=True), np.finfo(float).tiny)
        return self.table(clients, weight, batches), batches

    def table(self, clients: np.ndarray, weight: np.ndarray, batches: Sequence[np.ndarray]) -> schedule.Jobs:
        """The job table from clients [E, S], weights [E, S] and the jobs' batches."""
        experiments = np.repeat(np.arange(len(clients), dtype=np.int32), clients.shape[1])
        rows = experiments * self.program.setting.num_clients + clients.ravel()
        steps = np.array([len(b) for b in batches], np.int32)
        dtype = np.dtype(jnp.result_type(float))
        slots, weight = self.storage.slots(rows), weight.ravel().astype(dtype)
        return schedule.Jobs(
            rows, self.numbers.ravel()[rows], slots, experiments, weight, steps, self.steps.ravel()[rows]
        )

    def plan(self, round: int, cohorts: Sequence[np.ndarray] | None = None) -> Planned:
        """The schedule of a round, host arrays that depend on (seed, round) and the cohorts alone."""
        (jobs, batches), program = self.jobs(round, cohorts), self.program
        blocks = program.blocks
        shape: Any = {"steps": self.capacity, "quantum": blocks.quantum, "block": blocks.size}
        if program.devices == 1:
            return schedule.pack(batches, program.lanes, **shape), jobs
        shares = schedule.divide(batches, program.lanes, program.devices, **shape)
        if program.split_clients:
            jobs = jobs._replace(slot=shares.place % shares.members.shape[1])
        return shares, jobs

    def _seen(self, plan: schedule.Plan | schedule.Shares, jobs: schedule.Jobs) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the clients' state that a round sees, and which of them train."""
        if isinstance(plan, schedule.Plan) or not self.program.split_clients:
            return jobs.row, jobs.steps > 0
        members = plan.members.ravel()
        jobs = select(jobs, np.maximum(members, 0))
        return jobs.row, (members >= 0) & (jobs.steps > 0)

    def _placed(self, plan: schedule.Plan | schedule.Shares) -> schedule.Plan | schedule.Shares:
        """The plan on the devices, which then need not wait for it."""
        if isinstance(plan, schedule.Plan):
            return plan
        devices = self.program.devices
        own, members = place((plan.plan, plan.members), devices, SPLIT)
        return schedule.Shares(own, members, place(plan.place, devices))
