"""The one training loop; whatever else happens in a run is a callback.

    class StopAt(Callback):
        def on_round(self, run, report):
            return (run.history.last("ga") or 0) >= 0.9

    run = loop(simulation, simulation.start(), 20, [Accuracies("fedavg"), StopAt()])

Run folders, runs in memory, tasks by domain and sweeps differ in their callbacks alone. A sweep is one simulation of
several experiments: `runs[e]` is one of them, and `Each` hands it to callbacks that are written for one.
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
    """What a round tells the host, on the host.

    Attributes:
      jobs: what each client of the cohort did, fields [S].
      loss: [S] mean training loss of each, NaN without steps.
      correct: [S, C] correct predictions of the model just trained on the client's own test set.
      before: [S, E, C] the same before each local epoch, E = 0 where that is not asked for.
      seconds: of training the round.
    """

    jobs: Jobs
    loss: np.ndarray
    correct: np.ndarray
    before: np.ndarray
    seconds: float


class Progress(NamedTuple):
    """What is known of one experiment between two rounds, beside its state."""

    round: int  # completed rounds
    history: History
    best: Tree = ()  # global variables [1, ...] of the best GA, () where nobody asks for them
    stopped: bool = False  # whether a callback ended it


class Callback:
    """Something that happens beside the training; override what is needed.

    A callback that keeps anything between rounds returns it from `state` and takes it back in `restore`: it is part of
    every checkpoint, so that a resumed run goes on as if it had not been interrupted.
    """

    def on_start(self, run: "Run") -> None:
        """Before the first round of this process; after `restore`, if the run is resumed."""

    def on_round(self, run: "Run", report: RoundReport) -> bool | None:
        """After every round; True ends the run. `run.state` is valid until this returns."""

    def on_end(self, run: "Run") -> None:
        """When the run is over, however it ended: what failed is `run.error`."""

    def state(self) -> Any:
        """What is to be restored, as JSON knows it (numbers, texts, lists, dictionaries); None for nothing."""
        return None

    def restore(self, state: Any) -> None:
        """Take back what `state` returned."""


class Run(TrainedModels):
    """One experiment while it is trained, as callbacks see it.

    Attributes:
      index: e, of this experiment among those of the simulation.
      rounds: after which training ends.
      method, traits: with its hyper-parameters, and what it is.
      federation: what it trains on.
      history: its rows, one a round, and the accuracies of its clients.
      best: global variables [1, ...] of the best GA, if a callback keeps them.
      stopped: whether a callback has ended it.
      error: what ended it before its time.
    """

    def __init__(self, runs: "Runs", index: int, progress: Progress):
        """A view of one of the `runs`."""
        self.runs, self.index = runs, index
        self.simulation, self.rounds, self.federation = runs.simulation, runs.rounds, runs.federations[index]
        self.method = select(runs.simulation.methods, index)
        self.traits, self.label = self.method.traits(), type(self.method).__name__
        self.history, self.best, self.stopped = progress.history, progress.best, progress.stopped
        self.error: BaseException | None = None
        self._own: tuple[int, State] | None = None  # with others in the simulation: this one's, and of which round

    @property
    def round(self) -> int:
        """Completed rounds."""
        return self._own[0] if self.stopped and self._own else self.runs.round

    @property
    def is_over(self) -> bool:
        """Whether no round follows."""
        return self.stopped or self.round >= self.rounds

    @property
    def state(self) -> State:
        """After the last round: servers [1, ...], clients and statistics [K, ...]; donated to the next."""
        if len(self.runs) == 1:
            return self.runs.state
        if self._own is None or (self._own[0] != self.runs.round and not self.stopped):
            self._own = self.runs.round, own_state(self.runs.state, self.index, self.federation.num_clients)
        return self._own[1]

    @property
    def generic(self) -> Tree:
        """Variables [1, ...] that GA is read from."""
        return jax.vmap(self.method.generic_variables)(self.state.servers)

    def evaluate(self, *, personal: bool) -> tuple[Evaluation, float]:
        """Correct predictions as `Simulation.evaluate` counts them, and this experiment's share of the seconds."""
        counts, seconds = self.runs.evaluate(personal)
        own, rows = slice(self.index, self.index + 1), self._rows(self.federation.num_clients)
        further = {name: correct[own] for name, correct in counts.further.items()}
        return Evaluation(counts.generic[own], counts.personal[rows], counts.local[rows], further), seconds

    def not_finite(self) -> str | None:
        """What of the models is not finite after the round, as "client 3's params.bias"; None for nothing."""
        return self.runs.not_finite()[self.index]

    def share(self, report: RoundReport) -> RoundReport:
        """This experiment's part of a report of all."""
        rows, clients = self._rows(self.simulation.cohort_size), self.federation.num_clients
        jobs = Jobs(*(column[rows] for column in report.jobs))
        jobs = jobs._replace(row=jobs.row - self.index * clients)
        loss, correct, before = (column[rows] for column in (report.loss, report.correct, report.before))
        return RoundReport(jobs, loss, correct, before, report.seconds / len(self.runs))

    def stop(self) -> None:
        """Train no further; where others in the simulation do, this one's state stays as it is."""
        _ = self.state
        self.stopped = True

    def _rows(self, size: int) -> slice:
        return slice(self.index * size, (self.index + 1) * size)


class Runs:
    """All experiments of a simulation while they are trained; `runs[e]` is one of them.

    Attributes:
      round: completed rounds.
      rounds: after which training ends.
      state: servers [E, ...], clients and statistics [E * K, ...].
      plan: of the coming round, as `Simulation.plan` gives it.
      stopped, error: as those of a `Run`, of all together.
    """

    def __init__(self, simulation: Any, state: State, rounds: int, since: Sequence[Progress] = ()):
        """Args: since: of each experiment, which have completed the same rounds; none for the start."""
        self.simulation, self.state, self.rounds = simulation, state, rounds
        self.federations = simulation.federations
        since = since or [Progress(0, new_history(one.num_clients)) for one in self.federations]
        self.round, self.stopped = since[0].round, all(progress.stopped for progress in since)
        self.error: BaseException | None = None
        self.plan = simulation.plan(min(self.round, rounds - 1))
        self._counts: tuple[int, bool, Evaluation, float] | None = None
        self._finite: tuple[int, list[str | None]] = -1, []
        self._rows = np.zeros(0, int)  # of the clients of the last round
        self._members = [Run(self, e, progress) for e, progress in enumerate(since)]

    def __len__(self) -> int:
        return len(self._members)

    def __getitem__(self, index: int) -> Run:
        return self._members[index]

    def train(self) -> Iterator[RoundReport]:
        """Round after round; the state is donated when the next one is asked for."""
        simulation, last = self.simulation, self.rounds - 1
        while self.round < self.rounds:
            begun = perf_counter()
            launched, jobs = simulation.launch(self.state, self.round, self.plan), self.plan[1]
            self.plan = simulation.plan(min(self.round + 1, last))  # while the device computes
            if self.round < last:
                simulation.prefetch(launched, self.plan)
            self.state, report = simulation.settle(launched)
            loss, correct, before = (np.array(column) for column in report)
            self._rows = jobs.row
            self.round += 1
            yield RoundReport(jobs, loss, correct, before, perf_counter() - begun)

    def stop(self) -> None:
        """Train no further."""
        self.stopped = True

    def evaluate(self, personal: bool) -> tuple[Evaluation, float]:
        """Counts of all experiments, computed once in a round, and each one's share of the seconds."""
        known = self._counts
        if known is None or known[:2] != (self.round, personal):
            begun = perf_counter()
            counts = jax.tree.map(np.array, self.simulation.evaluate(self.state, personal=personal))
            known = self._counts = self.round, personal, counts, (perf_counter() - begun) / len(self)
        return known[2:]

    def not_finite(self) -> list[str | None]:
        """As a `Run` has it, of each experiment [E], looked at once in a round."""
        if self._finite[0] != self.round:
            self._finite = self.round, not_finite(self.simulation, self.state, self._rows)
        return self._finite[1]


class Each(Callback):
    """Callbacks of each experiment of a sweep; one that fails or stops leaves the others alone."""

    def __init__(self, callbacks: Sequence[Sequence[Callback]]):
        """Args: callbacks: of each experiment [E]."""
        self.callbacks = callbacks

    def on_start(self, run: Any):
        """Start those of every experiment."""
        for one, own in zip(run, self.callbacks, strict=True):
            for callback in own:
                callback.on_start(one)

    def on_round(self, run: Any, report):
        """Hand every experiment its part; True when all are over."""
        active = [pair for pair in zip(run, self.callbacks, strict=True) if not (pair[0].stopped or pair[0].error)]
        for one, own in active:
            try:
                call_all(own, one, one.share(report))
            except UserError as error:
                one.error = error
        return all(one.stopped or one.error for one in run)

    def on_end(self, run: Any):
        """End those of every experiment."""
        with ExitStack() as ends:
            for one, own in zip(run, self.callbacks, strict=True):
                one.error = one.error or run.error
                for callback in own:
                    ends.callback(callback.on_end, one)


def call_all(callbacks: Sequence[Callback], run: Any, report: RoundReport) -> None:
    """Tell all callbacks of a round; those after one that ends the run already see that it is stopped."""
    for callback in callbacks:
        ends = callback.on_round(run, report)
        if isinstance(ends, bool | np.bool_) and ends:  # a function may return anything else
            run.stop()


def loop(
    simulation: Any, state: State, rounds: int, callbacks: Sequence[Callback], since: Sequence[Progress] = ()
) -> Run | Runs:
    """Train to the last round, or until a callback ends it.

    Args:
      simulation: a `Simulation`, or `Groups`.
      state: of all its experiments; donated.
      rounds: T, those before included.
      callbacks: called in this order after every round, and in the opposite one at the end; of a run of several
        experiments `Each` distributes them.
      since: of each experiment, what is known of the rounds before; nothing for a new run.

    Returns:
      The run of the one experiment, or those of all: round, state, history and best model.
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
                if run.stopped:
                    break
                interrupts.end_after(runs.round)
        except BaseException as error:
            run.error = error
            raise
    return run


def own_state(state: State, index: int, clients: int) -> State:
    """A copy of one experiment's part of a state: servers [1, ...], and clients and statistics [K, ...]."""
    rows = partial(_rows, index=np.int32(index))
    return State(rows(state.servers, size=1), *(rows(x, size=clients) for x in (state.clients, state.statistics)))


@partial(on_leaves, static_argnames="size")
def _rows(leaf: Any, *, index: Any, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(leaf, index * size, size)
