"""The training loop; everything else that happens in a run is a callback.

    class StopAt(Callback):
        def on_round(self, run, report):
            return (run.history.last("ga") or 0) >= 0.9

    run = loop(simulation, simulation.start(), 20, [Accuracies("fedavg"), StopAt()])

Run folders, in-memory runs, domain tasks and sweeps differ only in their callbacks. A sweep is one simulation of
several experiments: `runs[e]` is one of them, and `Each` passes it to callbacks written for a single experiment.
Letters: E experiments, K clients, S cohort, C classes.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_pcdd.engine.program import Evaluation, State, Tree
from fedjax_pcdd.engine.schedule import Jobs
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training import interrupts
from fedjax_pcdd.training.finite import not_finite
from fedjax_pcdd.training.metrics import History, new_history
from fedjax_pcdd.training.trained_models import TrainedModels
from fedjax_pcdd.trees import on_leaves, select


class RoundReport(NamedTuple):
    """The results of a round, in host memory.

    Attributes:
      jobs: what each client in the cohort did, fields [S].
      loss: [S] mean training loss of each client, NaN if it made no steps.
      correct: [S, C] correct predictions of each just-trained model on its client's own test set; [S, 2C] with
        validation samples, whose classes follow.
      before: [S, epochs, C] the same before each local epoch; no epochs if this is not measured.
      seconds: duration of the round's training.
    """

    jobs: Jobs
    loss: np.ndarray
    correct: np.ndarray
    before: np.ndarray
    seconds: float


class Progress(NamedTuple):
    """The progress of one experiment between two rounds, apart from its state."""

    round: int  # completed rounds
    history: History
    best: Tree = ()  # global variables [1, ...] with the best GA, () if no callback keeps them
    stopped: bool = False  # whether a callback has ended the experiment


class Callback:
    """A hook into the training loop; override the methods you need.

    A callback that keeps anything between rounds returns it from `state` and takes it back in `restore`. It is part of
    every checkpoint, so that a resumed run continues as if it had not been interrupted.
    """

    def on_start(self, run: "Run") -> None:
        """Called before the first round of this process and, if the run is resumed, after `restore`."""

    def on_round(self, run: "Run", report: RoundReport) -> bool | None:
        """Called after every round; return True to end the run. `run.state` is valid until this returns."""

    def on_end(self, run: "Run") -> None:
        """Called when the run is over, however it ended; `run.error` is the exception that ended it, if any."""

    def state(self) -> Any:
        """The state to be restored, in JSON types (numbers, strings, lists, dictionaries); None for no state."""
        return None

    def restore(self, state: Any) -> None:
        """Take back what `state` returned."""


class Run(TrainedModels):
    """One experiment during training, as callbacks see it.

    Attributes:
      index: e, the index of this experiment in the simulation.
      rounds: number of rounds after which training ends.
      method, traits: the method with its hyper-parameters, and its traits.
      federation: the clients' data.
      history: one row per round, and the accuracies of the clients.
      best: global variables [1, ...] with the best GA, if a callback keeps them.
      stopped: whether a callback has ended the experiment.
      error: the exception that ended it early, if any.
    """

    def __init__(self, runs: "Runs", index: int, progress: Progress):
        self.runs, self.index = runs, index
        self.simulation, self.rounds, self.federation = runs.simulation, runs.rounds, runs.federations[index]
        self.method = select(runs.simulation.methods, index)
        self.traits, self.label = self.method.traits(), type(self.method).__name__
        self.history, self.best, self.stopped = progress.history, progress.best, progress.stopped
        self.error: BaseException | None = None
        self._own: tuple[int, State] | None = None  # if the simulation has several: the round, and this one's state

    @property
    def round(self) -> int:
        """Completed rounds."""
        return self._own[0] if self.stopped and self._own else self.runs.round

    @property
    def is_over(self) -> bool:
        """Whether no further round follows."""
        return self.stopped or self.round >= self.rounds

    @property
    def state(self) -> State:
        """State after the last round: servers [1, ...], clients and statistics [K, ...]; donated to the next round."""
        if len(self.runs) == 1:
            return self.runs.state
        if self._own is None or (self._own[0] != self.runs.round and not self.stopped):
            self._own = self.runs.round, own_state(self.runs.state, self.index, self.federation.num_clients)
        return self._own[1]

    @property
    def generic(self) -> Tree:
        """Variables [1, ...] of the model that GA is measured on."""
        if len(self.runs) == 1 or self.stopped:
            servers = self.state.servers
        else:  # without a copy of the clients, which `state` makes
            servers = _rows(self.runs.state.servers, index=np.int32(self.index), size=1)
        return jax.vmap(self.method.generic_variables)(servers)

    def evaluate(self, *, personal: bool) -> tuple[Evaluation, float]:
        """Correct predictions, as in `Simulation.evaluate`, and this experiment's share of the seconds they took."""
        counts, seconds = self.runs.evaluate(personal)
        experiment_slice, rows = slice(self.index, self.index + 1), self._rows(self.federation.num_clients)
        further = {name: correct[experiment_slice] for name, correct in counts.further.items()}
        return Evaluation(counts.generic[experiment_slice], counts.personal[rows], counts.local[rows], further), seconds

    def not_finite(self) -> str | None:
        """A non-finite part of the models after the round, e.g. "client 3's params.bias"; None if there is none."""
        return self.runs.not_finite()[self.index]

    def share(self, report: RoundReport) -> RoundReport:
        """This experiment's part of a report on all experiments."""
        rows, clients = self._rows(self.simulation.cohort_size), self.federation.num_clients
        jobs = Jobs(*(column[rows] for column in report.jobs))
        jobs = jobs._replace(row=jobs.row - self.index * clients)
        loss, correct, before = (column[rows] for column in (report.loss, report.correct, report.before))
        return RoundReport(jobs, loss, correct, before, report.seconds / len(self.runs))

    def stop(self) -> None:
        """Stop training; if other experiments of the simulation continue, the state of this one stays as it is."""
        _ = self.state
        self.stopped = True

    def _rows(self, size: int) -> slice:
        return slice(self.index * size, (self.index + 1) * size)


class Runs:
    """All experiments of a simulation during training; `runs[e]` is one of them.

    Attributes:
      round: completed rounds.
      rounds: number of rounds after which training ends.
      state: servers [E, ...], clients and statistics [E * K, ...].
      plan: plan of the next round, from `Simulation.plan`.
      stopped, error: as in `Run`, for all experiments together.
    """

    def __init__(self, simulation: Any, state: State, rounds: int, since: Sequence[Progress] = ()):
        """Args: since: progress of each experiment, all after the same number of rounds; empty for a new run."""
        self.simulation, self.state, self.rounds = simulation, state, rounds
        self.federations = simulation.federations
        since = since or [Progress(0, new_history(federation.num_clients)) for federation in self.federations]
        self.round, self.stopped = since[0].round, all(progress.stopped for progress in since)
        self.error: BaseException | None = None
        self.plan = simulation.plan(min(self.round, rounds - 1))
        self._counts: tuple[int, bool, Evaluation, float] | None = None
        self._finite: tuple[int, list[str | None]] = -1, []
        self._rows = np.zeros(0, int)  # of the clients in the last round's cohort
        self._samples: dict[int, list[int]] = {}  # of rounds that were asked for
        self._members = [Run(self, e, progress) for e, progress in enumerate(since)]

    def __len__(self) -> int:
        return len(self.federations)

    def __getitem__(self, index: int) -> Run:
        return self._members[index]

    def release(self) -> list[Run]:
        """The experiments [E], to which this no longer refers: the last of them ends what they hold on the device."""
        members, self._members = self._members, []
        return members

    def train(self) -> Iterator[RoundReport]:
        """Train and report one round after another; the state is donated when the next report is requested."""
        last = self.rounds - 1

        def next_plan() -> Any:
            self.plan = self.simulation.plan(min(self.round + 1, last))
            return self.plan if self.round < last else None

        while self.round < self.rounds:
            start_time, jobs = perf_counter(), self.plan[1]
            for run in self._members:  # copies of what is donated now would take memory during the round
                run._own = run._own if run.stopped else None
            self.state, report = self.simulation.step(self.state, self.round, self.plan, next_plan)
            loss, correct, before = map(np.array, jax.device_get(report))  # one wait for all
            loss[jobs.steps == 0] = np.nan  # not on the device, for `jax_debug_nans`
            self._rows = jobs.row
            self.round += 1
            yield RoundReport(jobs, loss, correct, before, perf_counter() - start_time)

    def stop(self) -> None:
        """Stop training."""
        self.stopped = True

    def evaluate(self, personal: bool) -> tuple[Evaluation, float]:
        """Correct predictions of all experiments, computed once per round, and each one's share of the seconds."""
        cached = self._counts
        if cached is None or cached[:2] != (self.round, personal):
            start_time = perf_counter()
            counts = jax.tree.map(np.array, jax.device_get(self.simulation.evaluate(self.state, personal=personal)))
            cached = self._counts = self.round, personal, counts, (perf_counter() - start_time) / len(self)
        return cached[2:]

    def samples(self, round: int) -> list[int]:
        """Training samples that each experiment sees in a round [E], counted once for all of them."""
        if round not in self._samples:
            seen = np.array([(batches >= 0).sum() for batches in self.simulation.jobs(round)[1]])
            self._samples[round] = seen.reshape(len(self), -1).sum(1).tolist()
        return self._samples[round]

    def not_finite(self) -> list[str | None]:
        """As `Run.not_finite`, for each experiment [E]; checked once per round."""
        if self._finite[0] != self.round:
            self._finite = self.round, not_finite(self.simulation, self.state, self._rows)
        return self._finite[1]


class Each(Callback):
    """Callbacks of each experiment of a sweep; an experiment that fails or stops does not affect the others."""

    def __init__(self, callbacks: Sequence[Sequence[Callback]]):
        self.callbacks = callbacks  # those of each experiment [E]

    def on_start(self, run: Any):
        """Call `on_start` of every experiment's callbacks."""
        for experiment, callbacks in zip(run, self.callbacks, strict=True):
            for callback in callbacks:
                callback.on_start(experiment)

    def on_round(self, run: Any, report):
        """Pass every active experiment its part of the report; True when all experiments are over."""
        active = [pair for pair in zip(run, self.callbacks, strict=True) if not (pair[0].stopped or pair[0].error)]
        for experiment, callbacks in active:
            try:
                call_all(callbacks, experiment, experiment.share(report))
            except UserError as error:
                experiment.error = error.with_traceback(None)  # whose frames hold the experiment
        return all(experiment.stopped or experiment.error for experiment in run)

    def on_end(self, run: Any):
        """Call `on_end` of every experiment's callbacks."""
        with ExitStack() as ends:
            for experiment, callbacks in zip(run, self.callbacks, strict=True):
                experiment.error = experiment.error or run.error
                for callback in callbacks:
                    ends.callback(callback.on_end, experiment)


def call_all(callbacks: Sequence[Callback], run: Any, report: RoundReport) -> None:
    """Call `on_round` of all callbacks; those after one that ends the run already see that it is stopped."""
    for callback in callbacks:
        ends = callback.on_round(run, report)
        kinds = bool | np.bool_ | np.ndarray | jax.Array  # a function may return anything else
        flag = np.asarray(ends if isinstance(ends, kinds) else False)
        if flag.shape == () and flag.dtype.kind == "b" and flag:
            run.stop()


def loop(
    simulation: Any, state: State, rounds: int, callbacks: Sequence[Callback], since: Sequence[Progress] = ()
) -> Run | list[Run]:
    """Train to the last round, or until a callback ends the run.

    Args:
      simulation: a `Simulation`, or `Groups`.
      state: the state of all its experiments; donated.
      rounds: T, including those already completed.
      callbacks: called in this order after every round, and in reverse order at the end; `Each` holds the callbacks
        of several experiments.
      since: progress of each experiment in earlier rounds; empty for a new run.

    Returns:
      The `Run` of a single experiment, or those of several: round, state, history and best model.
    """
    runs = Runs(simulation, state, rounds, since)
    run: Any = runs[0] if len(runs) == 1 else runs
    with ExitStack() as ends, interrupts.rounds():
        try:
            for callback in callbacks:
                ends.callback(callback.on_end, run)
                callback.on_start(run)
            for report in () if run.stopped else runs.train():
                interrupts.agree()
                call_all(callbacks, run, report)
                if run.stopped or runs.round == rounds:
                    interrupts.agree()  # on a signal since the save, for which no further round would end the process
                interrupts.end_after(runs.round)
                if run.stopped:
                    break
        except BaseException as error:
            run.error = error
            raise
    members = runs.release()
    return members[0] if len(members) == 1 else members


def own_state(state: State, index: int, clients: int) -> State:
    """A copy of one experiment's part of a state: servers [1, ...], and clients and statistics [K, ...]."""
    rows = partial(_rows, index=np.int32(index))
    return State(rows(state.servers, size=1), *(rows(x, size=clients) for x in (state.clients, state.statistics)))


@partial(on_leaves, static_argnames="size")
def _rows(leaf: Any, *, index: Any, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(leaf, index * size, size)
