"""What every client does in a round: local training, cohorts, jobs and their schedule, from (seed, round) alone.

Letters: E experiments, K clients, S cohort, J = E * S jobs, B batch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.availability import Availability
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Lists
from fedjax_pcdd.engine import schedule
from fedjax_pcdd.engine.mesh import SPLIT, distribute, own_copy
from fedjax_pcdd.engine.parcels import Parcel, packed
from fedjax_pcdd.engine.program import Data, Program
from fedjax_pcdd.engine.storage import OnDevice
from fedjax_pcdd.engine.streaming import Streamed, renumbered
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.checks import scalar
from fedjax_pcdd.methods.method import Local, Method

Planned = tuple[schedule.Plan | schedule.Shares, schedule.Jobs]


class Experiment(NamedTuple):
    """One federation trained by one method from one seed."""

    federation: Federation
    method: Method
    local: Local
    seed: int
    numbers: tuple[int, ...] = ()  # of the clients in the whole federation, if this one is a part of it
    whole: Federation | None = None  # that federation
    availability: Availability | None = None  # None: all clients are always available


def fitting(local: Local, sizes: np.ndarray, weights: str = "method") -> Local:
    """Local training with batches not much wider than the largest client, where that removes nothing but padding.

    Widths are powers of two up to 128 and multiples of it beyond, so that most similar partitions share a program.
    """
    if local.last_batch in ("strict", "top_up") or weights == "batches":
        return local
    largest = max(1, int(sizes.max()))
    width = 1 << (largest - 1).bit_length() if largest <= 128 else -(-largest // 128) * 128
    return replace(local, batch_size=min(local.batch_size, width))


class Planner:
    """Schedules rounds; the subclass `Simulation` sets those attributes that `__init__` does not.

    Attributes:
      federations: [E] of the experiments.
      sizes, steps, round_steps: [E, K] training samples, and steps of a local epoch and of a round.
      able: [E] numbers of the clients with samples, in increasing order.
      epochs: [K] local epochs of a round.
      numbers: [E, K] of the clients in the whole federation.
      weights: [E, K] before normalisation.
      capacity: the most steps of a lane.
      owners: how many processes own clients, whose samples and state they alone have; 1 if none does.
    """

    owners: int = 1

    program: Program
    storage: OnDevice
    streamed: Streamed | None = None
    weights: np.ndarray
    data: Data
    capacity: int

    def __init__(self, experiments: Sequence[Experiment], cohort: int, weights: str = "method"):
        """Plan for cohorts of size S; `weights` as in `raw_weights`."""
        first = experiments[0]
        self.experiments, self.cohort_size = experiments, cohort
        self.federations = [e.federation for e in experiments]
        self.sizes = np.stack([federation.sizes for federation in self.federations])
        self.local = fitting(first.local, self.sizes, weights)
        self.able = [np.flatnonzero(sizes) for sizes in self.sizes]
        clients = np.arange(self.sizes.shape[1], dtype=np.int32)
        self.numbers = np.stack([np.array(e.numbers, np.int32) if e.numbers else clients for e in experiments])
        self.steps = schedule.batches_per_epoch(self.sizes, self.local.batch_size, self.local.last_batch)
        traits = first.method.traits()
        epochs = self.local.epochs if traits.epochs is None else traits.epochs
        self.epochs = np.maximum(np.broadcast_to(epochs, len(clients)), traits.least_epochs) + traits.more_epochs
        if self.local.local_steps is not None:
            if traits.epochs is not None or traits.least_epochs > 1 or traits.more_epochs:
                raise UserError("this method tells its local epochs apart: give `local_epochs`, not `local_steps`.")
            # A round counts as one epoch where it matters.
            self.steps = np.where(self.steps > 0, self.local.local_steps, 0)
            self.epochs = np.ones_like(self.epochs)
        self.round_steps = self.steps * self.epochs
        if traits.own_loss and (self.local.loss, self.local.class_weights) != ("ce", "none"):
            raise UserError("this method has a softmax of its own: use `loss=ce` and `class_weights=none`.")

    @property
    def has_padding(self) -> bool:
        """Whether any batch is not full."""
        batch, rule = self.local.batch_size, self.local.last_batch
        full = (schedule.batches_per_epoch(self.sizes, batch, rule) * batch <= self.sizes) | (rule == "top_up")
        return not full.all()

    def raw_weights(self, rule: str, methods: Any, data: Data) -> np.ndarray:
        """Aggregation weights [E, K] before normalisation.

        Args:
          rule: `method`, `uniform` or `batches`.
          methods: [E, ...] as configured.

        Raises:
          UserError: the method's are invalid.
        """
        if rule == "uniform":
            return np.ones(self.sizes.shape)
        if rule == "batches":
            return (self.sizes // self.local.batch_size).astype(float)

        methods, data = own_copy((methods, data))

        def weight(row):
            method = jax.tree.map(lambda x: x[row // self.program.setting.num_clients], methods)
            return scalar(method, "weight", method.weight(self.program.facts_of(data, row)))

        rows = np.arange(self.sizes.size, dtype=np.int32)
        weights = np.asarray(jax.jit(jax.vmap(weight))(rows), float).reshape(self.sizes.shape)
        for experiment, row in zip(self.experiments, weights, strict=True):
            invalid = np.flatnonzero(~(np.isfinite(row) & (row >= 0)))
            if len(invalid):
                name, value = type(experiment.method).__name__, row[invalid[0]]
                raise UserError(f"{name}.weight must be finite and at least 0, not {value} as for client {invalid[0]}.")
        return weights

    @property
    def everyone_trains(self) -> bool:
        """Whether all clients with steps are in every cohort."""
        always_available = all(e.availability is None for e in self.experiments)
        return always_available and bool(self.cohort_size >= (self.round_steps > 0).sum(1).max())

    def clients_of(self, round: int) -> list[np.ndarray]:
        """The cohort of each experiment: drawn from the available clients, without those that are lost in mid-round.

        What a lost client does has no effect: it has no steps and no weight, and keeps the state that it had.
        """
        cohorts = []
        for e, able in zip(self.experiments, self.able, strict=True):
            availability = e.availability
            available = availability and availability.available(e.seed, round)
            drawn = schedule.cohort(e.seed, round, able, self.cohort_size, available)
            cohorts.append(drawn if availability is None else drawn[availability.stay(e.seed, round)[drawn]])
        return cohorts

    def jobs(self, round: int, cohorts: Sequence[np.ndarray] | None = None) -> tuple[schedule.Jobs, list[np.ndarray]]:
        """Jobs of a round [J] and the batches of each [T_j, B]; `cohorts` replace those drawn.

        Where the models are averaged, a round takes place only if any of the cohort has a weight; what clients keep
        would otherwise no longer fit the server, which stays as it is. Clients with models of their own always train.
        """
        local, base = self.local, 0
        clients = np.zeros((len(self.experiments), self.cohort_size), np.int32)
        weight, batches = np.zeros(clients.shape), []
        for e, cohort in enumerate(cohorts or self.clients_of(round)):
            train = self.experiments[e].federation.partition.train
            clients[e, : len(cohort)] = cohort
            weight[e, : len(cohort)] = self.weights[e, cohort] * (self.steps[e, cohort] > 0)
            trains = weight[e].any() or self.experiments[e].method.traits().own_models
            if self.streamed and trains:  # positions in the shard, which has the samples of jobs with steps
                size = np.where(self.steps[e, cohort] > 0, self.sizes[e, cohort], 0)
                lists, base = Lists(base + np.arange(size.sum()), size), base + int(size.sum())
            else:
                lists = [train[k] for k in cohort.tolist()]
            drawn = self._drawn(lists, e, cohort, round)
            batches += drawn if trains else [b[:0] for b in drawn]
            batches += [np.zeros((0, local.batch_size), np.int32)] * (self.cohort_size - len(cohort))
        weight /= np.maximum(weight.sum(1, keepdims=True), np.finfo(float).tiny)
        return self.table(clients, weight, batches), batches

    def _drawn(self, samples: Sequence[np.ndarray], e: int, cohort: np.ndarray, round: int) -> list[np.ndarray]:
        """The batches [T_j, B] of an experiment's cohort in a round."""
        local, steps, clients = self.local, self.local.local_steps, self.numbers[e, cohort]
        draws = schedule.streams(self.experiments[e].seed, round if steps is None else 0)
        options: Any = {"batch": local.batch_size, "rule": local.last_batch, "shuffle": local.shuffle}
        if steps is None:
            return schedule.job_batches(samples, draws, clients=clients, epochs=self.epochs[cohort], **options)
        return schedule.endless_batches(samples, draws, clients=clients, round=round, steps=steps, **options)

    def table(self, clients: np.ndarray, weight: np.ndarray, batches: Sequence[np.ndarray]) -> schedule.Jobs:
        """The job table from clients [E, S], weights [E, S] and the jobs' batches."""
        experiments = np.repeat(np.arange(len(clients), dtype=np.int32), clients.shape[1])
        rows = experiments * self.program.setting.num_clients + clients.ravel()
        steps, weight = np.array([len(b) for b in batches], np.int32), weight.ravel().astype(jnp.result_type(float))
        numbers, epoch_steps, slots = self.numbers.ravel()[rows], self.steps.ravel()[rows], self.storage.slots(rows)
        return schedule.Jobs(rows, numbers, slots, experiments, weight, steps, epoch_steps)

    def plan(self, round: int, cohorts: Sequence[np.ndarray] | None = None) -> Planned:
        """The schedule of a round, host arrays that depend on (seed, round) and the cohorts alone."""
        (jobs, batches), program = self.jobs(round, cohorts), self.program
        blocks = program.blocks
        shape: Any = {"steps": self.capacity, "quantum": blocks.quantum, "block": blocks.size}
        if program.devices == 1:
            return schedule.pack(batches, program.lanes, **shape), jobs
        owners = None if self.storage.owners is None else self.storage.owners[jobs.row]
        shape |= {"owners": owners, "processes": self.owners}
        shares = schedule.divide(batches, program.lanes, program.devices, **shape)
        if program.split_clients:
            jobs = jobs._replace(slot=shares.position % shares.members.shape[1])
        if self.streamed:  # each device has the samples of its own jobs
            sizes, pairs = self.streamed.sizes_of(jobs), zip(shares.plan.indices, shares.members, strict=True)
            positions = [renumbered(indices, sizes, members[members >= 0]) for indices, members in pairs]
            shares = shares._replace(plan=shares.plan._replace(indices=np.stack(positions)))
        return shares, jobs

    def data_of(self, plan: schedule.Plan | schedule.Shares, jobs: schedule.Jobs) -> Data:
        """The samples that the round of a plan sees."""
        return self.streamed.of_jobs(plan, jobs) if self.streamed else self.data

    def _seen(self, plan: schedule.Plan | schedule.Shares, jobs: schedule.Jobs) -> tuple[np.ndarray, np.ndarray]:
        """Rows of the clients' state that a round sees, and which of them train."""
        if isinstance(plan, schedule.Shares) and self.program.split_clients:
            jobs = schedule.jobs_of(jobs, plan.members.ravel())
        return jobs.row, jobs.steps > 0

    def sent(self, plan: schedule.Plan | schedule.Shares, jobs: schedule.Jobs, round: int) -> Parcel:
        """What the host sends for a round; each of several devices gets its own share, and all get the rest."""
        if isinstance(plan, schedule.Plan):
            return packed((plan, jobs, np.int32(round)))
        shares = packed((plan.plan, plan.members), each=True)
        shares = replace(shares, words=distribute(shares.words, self.program.devices, SPLIT))
        return packed(((shares, plan.position), jobs, np.int32(round)))
