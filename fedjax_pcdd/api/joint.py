"""Experiments that share a program, trained together as one simulation; on the disk each is a run of its own.

A member's folder holds what `run.py` writes, and `run.py --resume` continues it alone. Its seconds are its share, the
common ones divided by the number of members (`together` in resolved.json and summary.json), so that the sum over the
members is what they cost.

Letters: E members, K clients, S cohort, R = E * K rows, J = E * S jobs.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.engine.device_errors import OutOfMemory, in_sentences
from fedjax_pcdd.engine.devices import CompileClock, choose_lanes, select_device
from fedjax_pcdd.engine.program import State
from fedjax_pcdd.engine.round import Evaluation, Report, Simulation
from fedjax_pcdd.engine.schedule import Jobs
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import Method
from fedjax_pcdd.training.build import assemble, experiment, federate, load
from fedjax_pcdd.training.config import RunConfig
from fedjax_pcdd.training.fine_tuning import after_training
from fedjax_pcdd.training.loggers import require
from fedjax_pcdd.training.loop import Progress, Trained, train
from fedjax_pcdd.training.metrics import History
from fedjax_pcdd.training.progress import Bar
from fedjax_pcdd.training.runner import Run
from fedjax_pcdd.training.tuning import convolutions_of, fewer_lanes, lanes_of, note
from fedjax_pcdd.trees import select

Result = dict[str, Any] | str


class Asked(NamedTuple):
    """One experiment that is to be run."""

    config: RunConfig
    method: Method
    origin: Mapping[str, Any]  # for resolved.json, as `launch.run` has it
    bar: Bar  # told of every round


def run_together(asked: Sequence[Asked]) -> list[Result]:
    """Run (or resume) experiments whose `program_key` is the same.

    Those that were interrupted in different rounds are trained with those of the same round.

    Returns:
      For each what summary.json holds, or the sentence with which it failed, which stops none of the others.

    Raises:
      UserError: one of them cannot be prepared or continued; none has trained then.
    """
    with in_sentences("preparing the runs"):
        work = Joint(asked)
    found, done = [], []
    try:
        work.open()
        with in_sentences("training"):
            found = work.begin()
            done = [progress.round for progress in found]
            if len(set(done)) == 1:
                return work.finish(*work.rounds(found))
    except OutOfMemory as error:
        asked, done = work.with_fewer_lanes(error), []
    finally:
        work.close()
    del work, found  # and what they have on the device
    if not done:
        return run_together(asked)
    results: dict[int, Result] = {}
    for round in sorted(set(done)):
        chosen = [e for e, reached in enumerate(done) if reached == round]
        results |= zip(chosen, run_together([asked[e] for e in chosen]), strict=True)
    return [results[e] for e in range(len(asked))]


class Member(Run):
    """One of the experiments; what it is given of a round is its own part."""

    error: str | None = None  # the sentence with which it failed

    def __init__(self, config: RunConfig, federation: Federation, simulation: Simulation, index: int, clock, started):
        """Look whether it can run; UserError if not."""
        self.config, self.federation, self.simulation, self.index = config, federation, simulation, index
        self.clock, self.started, self.together = clock, started, len(simulation.experiments)
        self.method = select(simulation.methods, index)
        self._check_cohort(config.cohort or federation.num_clients)
        self._advise()

    def note(self, settled: Mapping[str, Any], origin: Mapping[str, Any]) -> None:
        """Write resolved.json; what it said of the origin before, it keeps."""
        known = self.folder.read_json("resolved.json") or {}
        new = {**settled, "together": self.together}
        self.resolve(**{"hyperparameters": self._hyperparameters(), **origin} | known | new)

    def write_round(self, trained: Trained, counts: Evaluation | None, seconds: float, progress: Progress) -> Progress:
        """Write down a round; `counts` where it is evaluated, which took some seconds."""
        row, history = self._row(trained), progress.history
        self._trained(trained.report, trained.jobs, history)
        if counts is not None:
            self._measure(row, counts, history)
            row["eval_seconds"] = seconds
        best = self._keep(row, trained.state, progress.best, history)
        return progress._replace(round=trained.round, best=best)

    def write_result(self, result: dict[str, Any], history: History) -> dict[str, Any]:
        """Write summary.json and the curves."""
        self.checkpoints.wait()
        summary = result | self._cost(history) | {"together": self.together}
        self.conclude(summary, history)
        return summary


class Joint:
    """One simulation of several experiments, and those who write it down."""

    def __init__(self, asked: Sequence[Asked]):
        """Prepare the simulation; UserError before anything is written."""
        first, clock, started = asked[0].config, CompileClock(), time.perf_counter()
        self.asked, self.config = asked, first
        select_device(first.device, first.devices)
        require(first.tensorboard, first.wandb)
        dataset = load(first)
        federations = [federate(one.config, dataset) for one in asked]
        everybody = [experiment(one.config, one.method, own) for one, own in zip(asked, federations, strict=True)]
        self.make = partial(assemble, first, asked[0].method, federations[0], others=everybody[1:])
        self.simulation = self.make(1)
        self.members = [
            Member(one.config, federation, self.simulation, e, clock, started)
            for e, (one, federation) in enumerate(zip(asked, federations, strict=True))
        ]
        self.clients = federations[0].num_clients
        self.own_state = jax.jit(partial(part_of, clients=self.clients))
        self.opened = ExitStack()

    def open(self) -> None:
        """Open or create all folders, and settle the number of lanes."""
        state, recorded = self.simulation.start(), []
        for member, one in zip(self.members, self.asked, strict=True):
            recorded.append(member._open(one.config, one.method, self.own_state(state, member.index)))
            self.opened.callback(member.close)
        resolved = max(filter(None, recorded), key=lambda noted: noted["lanes"], default=None)
        convolutions = convolutions_of(self.config, self.simulation, state, resolved)
        self.make = partial(self.make, convolutions=convolutions)
        lanes = resolved["lanes"] if resolved else self.config.lanes
        if lanes == "auto":
            self.simulation = self._fastest(state)
            lanes = lanes_of(self.simulation)
        elif lanes > 1 or convolutions:
            self.simulation = self.make(lanes)
        settled = {"lanes": lanes, "convolutions": note(convolutions)}
        for member, one in zip(self.members, self.asked, strict=True):
            member.simulation = self.simulation
            member.note(settled, one.origin)

    def _fastest(self, state: State) -> Simulation:
        """The simulation for --lanes=auto."""
        jobs = len(self.members) * self.simulation.cohort_size
        return choose_lanes(self.make, state, jobs, self.config.rounds)

    def with_fewer_lanes(self, error: OutOfMemory) -> list[Asked]:
        """The experiments as they go on with half of the lanes; the error where there is but one."""
        lanes = fewer_lanes(lanes_of(self.simulation), error)
        for member in self.members:
            member.resolve(lanes=lanes)
        return [
            one._replace(config=replace(one.config, resume=member.folder.path))
            for one, member in zip(self.asked, self.members, strict=True)
        ]

    def close(self) -> None:
        """Wait for what is still being written."""
        self.opened.close()

    def begin(self) -> list[Progress]:
        """The start of each member, or its newest intact checkpoint."""
        state = self.simulation.start()
        found = [member._restored(self.own_state(state, member.index)) for member in self.members]
        waiting = [m for m in self.members if not found[m.index].round and m._somebody_waits()]
        if waiting:
            correct = np.array(self.simulation.evaluate(state, personal=True).personal)
            for member in waiting:
                member._personal(correct[self._rows(member)], found[member.index].history)
        return found

    def rounds(self, found: list[Progress]) -> tuple[list[Progress], State]:
        """Train to the last round from a common one; a member that fails is computed on, and not written any more.

        Returns:
          (Progress of each member, without its state; the common state).
        """
        state = jax.tree.map(lambda *x: jnp.concatenate(x), *(progress.state for progress in found))
        done, found = found[0].round, [progress._replace(state=()) for progress in found]
        for trained in train(self.simulation, state, done, self.config.rounds):
            state, (counts, seconds) = trained.state, self._evaluated(trained)
            for member in [m for m in self.members if m.error is None]:
                e = member.index
                try:
                    own = self._own_round(trained, member), self._own_counts(counts, member), seconds
                    found[e] = member.write_round(*own, found[e])
                    self.asked[e].bar.update(found[e].history.rows[-1])
                except UserError as error:
                    member.error = str(error)
            if all(member.error for member in self.members):
                break
        return found, state

    def _evaluated(self, trained: Trained) -> tuple[Evaluation | None, float]:
        """What all models said correctly, if it is time for it, and each member's share of the seconds."""
        first, begun = self.members[0], time.perf_counter()
        if not first._is_due(trained.round):
            return None, 0.0
        counts = self.simulation.evaluate(trained.state, personal=first.method.personal_model == "server")
        return jax.tree.map(np.array, counts), (time.perf_counter() - begun) / len(self.members)

    def _rows(self, member: Member) -> slice:
        return slice(member.index * self.clients, (member.index + 1) * self.clients)

    def _own_counts(self, counts: Evaluation | None, member: Member) -> Evaluation | None:
        if counts is None:
            return None
        own, rows = slice(member.index, member.index + 1), self._rows(member)
        further = {name: correct[own] for name, correct in counts.further.items()}
        return Evaluation(counts.generic[own], counts.personal[rows], counts.local[rows], further)

    def _own_round(self, trained: Trained, member: Member) -> Trained:
        """A round as a simulation of this member alone gives it."""
        size = self.simulation.cohort_size
        part = slice(member.index * size, (member.index + 1) * size)
        jobs = Jobs(*(column[part] for column in trained.jobs))
        return trained._replace(
            state=self.own_state(trained.state, member.index),
            report=Report(*(column[part] for column in trained.report)),
            jobs=jobs._replace(row=jobs.row - member.index * self.clients),
            seconds=trained.seconds / len(self.members),
        )

    def finish(self, found: list[Progress], state: State) -> list[Result]:
        """Fine-tune where PA asks for it, and write all results."""
        results = [m._result(progress.history) for m, progress in zip(self.members, found, strict=True)]
        first, alive = self.members[0], [m for m in self.members if m.error is None]
        if first.tunes and alive:
            keeps = first.keeps_best
            best = jax.tree.map(lambda *x: jnp.concatenate(x), *(p.best for p in found)) if keeps else None
            epochs, rounds = self.config.fine_tune_epochs, self.config.rounds
            changes = after_training(self.simulation, epochs, rounds, state, best, results)
            results = [result | change for result, change in zip(results, changes, strict=True)]
        for member in alive:
            try:
                results[member.index] = member.write_result(results[member.index], found[member.index].history)
            except UserError as error:
                member.error = str(error)
        return [member.error or result for member, result in zip(self.members, results, strict=True)]


def part_of(state: State, index: jax.Array, *, clients: int) -> State:
    """One experiment's part of a state: servers [1, ...], and clients and statistics [K, ...]."""

    def own(tree, size):
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * size, size), tree)

    return State(own(state.servers, 1), own(state.clients, clients), own(state.statistics, clients))
