"""Runs that live in folders: run, resume and load them, one or several as one compiled program.

Each experiment has a folder of its own, whether or not it is trained with others: it holds the same files, and can be
resumed alone. The seconds of an experiment that shares a program are its share, so that the sum over all is what they
cost. Letters: E experiments, K clients.
"""

import copy
import dataclasses
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.analysis.curves import draw_curves
from fedjax_pcdd.api.history import History
from fedjax_pcdd.data.federation import heat_map
from fedjax_pcdd.engine.device_errors import OutOfMemory, in_sentences
from fedjax_pcdd.engine.program import State
from fedjax_pcdd.errors import UserError, spelled
from fedjax_pcdd.methods import Method
from fedjax_pcdd.training import loggers
from fedjax_pcdd.training.build import Setup
from fedjax_pcdd.training.callbacks import Profile, as_callbacks
from fedjax_pcdd.training.checkpoint import Checkpoint, Checkpoints, check_space, required_bytes
from fedjax_pcdd.training.config import RunConfig, dump, run_folder
from fedjax_pcdd.training.fine_tuning import after_training
from fedjax_pcdd.training.folder import (
    CLIENTS,
    SUMMARY,
    Records,
    RunFolder,
    describe_machine,
    peak_memory_mb,
)
from fedjax_pcdd.training.loop import Callback, Each, Progress, Run, loop, own_state
from fedjax_pcdd.training.metrics import new_history, result
from fedjax_pcdd.training.presets import read_run
from fedjax_pcdd.training.progress import bar
from fedjax_pcdd.training.tasks import setup
from fedjax_pcdd.training.tracking import Tracking, names_of
from fedjax_pcdd.training.tuning import Say

Result = dict[str, Any]


def warn(sentence: str) -> None:
    """How Python is told what a user should know."""
    warnings.warn(spelled(sentence), stacklevel=3)


class Asked(NamedTuple):
    """One experiment that is to be run, or continued where its configuration says `resume`."""

    config: RunConfig
    method: Method
    origin: Mapping[str, Any] = {}  # for resolved.json: the command, and the cell of a preset that it stands for
    callbacks: Sequence[Callback] = ()  # beside those that the options ask for
    last: Sequence[Callback] = ()  # called when a round is written and on its way into a checkpoint


def run(
    config: RunConfig,
    method: Method,
    origin: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    last: Sequence[Callback] = (),
    say: Say = warn,
) -> Result:
    """Run, or resume, one experiment.

    Args:
      config, method, origin, callbacks, last: as in `Asked`.
      say: told of settings without effect, or that the method advises against.

    Returns:
      What summary.json holds.

    Raises:
      UserError: a setting that cannot work, or a loss that is no longer finite.
    """
    (summary,) = run_together([Asked(config, method, origin or {}, callbacks, last)], say)
    if isinstance(summary, UserError):
        raise summary
    return summary


def run_together(asked: Sequence[Asked], say: Say = warn) -> list[Result | UserError]:
    """Run, or resume, experiments that share a program (`sweep.program_key`).

    Those that were interrupted in different rounds are trained with those of the same round. Where the device is out of
    memory, they go on from the newest checkpoint with half of the lanes, which resolved.json then notes.

    Returns:
      For each what summary.json holds, or the error with which it failed, which stops none of the others.

    Raises:
      UserError: one of them cannot be prepared or continued, none has trained then; or a device that fails.
    """
    fewer: list[Asked] = []
    with ExitStack() as opened:
        with in_sentences("preparing the run"):
            session = Session(asked, say, opened)
        rounds = [progress.round for progress in session.since]
        if len(set(rounds)) == 1:
            try:
                with in_sentences("training"):
                    return session.results(session.train())
            except OutOfMemory as error:
                fewer = session.with_fewer_lanes(error, say)
    del session  # and what it has on the device
    if fewer:
        return run_together(fewer, say)
    groups: dict[int, list[int]] = {}
    for e, round in enumerate(rounds):
        groups.setdefault(round, []).append(e)
    results: dict[int, Result | UserError] = {}
    for members in groups.values():
        results |= zip(members, run_together([asked[e] for e in members], say), strict=True)
    return [results[e] for e in range(len(asked))]


class Session:
    """Experiments of one program, between their options and their results.

    Attributes:
      setup: their parts.
      records: what each writes [E].
      simulation: with the number of lanes that is used.
      state: that training begins with.
      since: what is known of the rounds before it [E].
    """

    def __init__(self, asked: Sequence[Asked], say: Say, opened: ExitStack):
        """Prepare all, open or create the folders, and go back to the newest checkpoints."""
        for name in ("tensorboard", "wandb"):
            if getattr(asked[0].config, name):
                loggers.load(name)
        self.setup = setup([(one.config, one.method) for one in asked])
        for e in range(len(asked)):
            for sentence in self.setup.advice(e):
                say(sentence)
        state = self.setup.simulation.start()
        self.records = []
        for e, one in enumerate(asked):
            self.records.append(Record(one, self.setup, e, self._own(state, e)))
            opened.callback(self.records[-1].checkpoint.checkpoints.close)
        noted = max((r.noted for r in self.records if r.noted), key=lambda noted: noted["lanes"], default=None)
        self.simulation = self.setup.settled(state, noted, say)
        for record in self.records:
            record.resolve(self.setup.notes(self.simulation))
        starts = [record.begin(self._own(state, e)) for e, record in enumerate(self.records)]
        self.since = [progress for _, progress in starts]
        resumed = any(progress.round for progress in self.since)
        self.state = _joined([own for own, _ in starts]) if resumed else self.setup.prepared(self.simulation, state)

    def _own(self, state: State, e: int) -> State:
        several = len(self.setup.pairs) > 1
        return own_state(state, e, self.setup.federations[e].num_clients) if several else state

    def train(self) -> list[Run]:
        """Train to the end; one that fails among others has its error."""
        callbacks = [record.callbacks for record in self.records]
        used = callbacks[0] if len(callbacks) == 1 else [Each(callbacks)]
        since, self.since = self.since, []  # the best models in it are replaced by better ones
        runs: Any = loop(self.simulation, self.state, self.setup.config.rounds, used, since)
        return [runs] if isinstance(runs, Run) else [runs[e] for e in range(len(runs))]

    def with_fewer_lanes(self, error: OutOfMemory, say: Say) -> list[Asked]:
        """The experiments as they are continued with half of the lanes.

        Raises:
          OutOfMemory: the error, where there is but one lane, or where other processes would have to know.
        """
        notes = self.setup.notes_out_of_memory(self.simulation, error, say)
        for record in self.records:
            record.resolve(notes)
        if jax.process_count() > 1:
            raise error
        return [record.continued() for record in self.records]

    def results(self, runs: Sequence[Run]) -> list[Result | UserError]:
        """Fine-tune where PA asks for it, and write all results."""
        results = [result(run.history, run.method) for run in runs]
        if self.setup.tunes and not all(run.error for run in runs):
            best = _joined([run.best for run in runs]) if self.setup.keeps_best else None
            state = _joined([run.state for run in runs]) if any(run.stopped for run in runs) else runs[0].runs.state
            changes = after_training(
                self.simulation, self.setup.config.fine_tune_epochs, runs[0].round, state, best, results
            )
            results = [result | change for result, change in zip(results, changes, strict=True)]
        written = zip(self.records, runs, results, strict=True)
        return [run.error or record.conclude(run, result) for record, run, result in written]  # pyright: ignore


class Record:
    """What one experiment writes: its folder, and the callbacks that fill it."""

    def __init__(self, asked: Asked, setup: Setup, e: int, state: State):
        """Open or create the folder; UserError before anything is written."""
        self.asked, self.setup, self.e = asked, setup, e
        config = asked.config
        self.folder = RunFolder.open(config.resume) if config.resume else self._created(state)
        self.noted = self.folder.read_json("resolved.json")  # None: nothing is settled yet
        beside = as_callbacks([*asked.callbacks, *asked.last])
        self._first = [(callback, copy.deepcopy(callback.state())) for callback in beside]
        path = self.folder.path
        checkpoints = Checkpoints(
            path / "checkpoints", keep=config.keep, every=config.checkpoint_every,
            clients_every=config.checkpoint_clients_every,
        )  # fmt: skip
        kept = f"; the checkpoints before it in {path} are good"
        measured = [setup.accuracies(e, kept=kept), *as_callbacks(list(asked.callbacks))]
        self.checkpoint = Checkpoint(checkpoints, measured)
        self.callbacks = [*measured, *self._writers(), self.checkpoint, *asked.last]

    def _created(self, state: State) -> RunFolder:
        config, federation = self.asked.config, self.setup.federations[self.e]
        path = run_folder(config)
        size = required_bytes((state.servers, state.servers), (state.clients, state.statistics))
        check_space(path, size * (config.keep + 1) * len(self.setup.pairs))
        folder = RunFolder.create(path, dump(config, self.asked.method))
        federation.save(path / "partition.npz")
        heat_map(federation, path / "partition.png")
        return folder

    def _writers(self) -> list[Callback]:
        config, folder = self.asked.config, self.folder
        writers: list[Callback] = [Records(folder), *self.setup.pictures(folder)]
        if config.track:
            names = names_of(config.track)
            writers.append(
                Tracking(names, folder, every=config.track_every, local=config.track_local, seed=config.seed)
            )
        if config.tensorboard:
            writers.append(loggers.TensorBoard(folder.path / "tensorboard"))
        if config.wandb:
            writers.append(loggers.WandB(folder.path, dataclasses.asdict(config)))
        writers += loggers.made(config.loggers, folder.path, dataclasses.asdict(config))
        if config.profile:
            writers.append(Profile(folder.path / "profile"))
        return writers

    def continued(self) -> Asked:
        """What goes on from the newest checkpoint, or from the start, where its callbacks are as they were then."""
        for callback, state in self._first:
            if state is not None:
                callback.restore(state)
        path = self.folder.path
        return self.asked._replace(config=dataclasses.replace(self.asked.config, resume=path, run_dir=path))

    def resolve(self, notes: Mapping[str, Any]) -> None:
        """Note in resolved.json what the options did not say; what a run that had begun noted stays."""
        hyperparameters = {
            name: value if isinstance(value, str | int | bool | None) else float(value)
            for name, value in dataclasses.asdict(self.setup.methods[self.e]).items()
        }
        origin = {} if self.asked.config.resume else self.asked.origin
        known = self.folder.read_json("resolved.json") or {}
        settled = {**notes} | self._together()
        self.folder.write_json("resolved.json", {"hyperparameters": hyperparameters, **origin} | known | settled)

    def _together(self) -> dict[str, int]:
        several = len(self.setup.pairs)
        return {"together": several} if several > 1 else {}

    def begin(self, state: State) -> tuple[State, Progress]:
        """State and progress of the newest intact checkpoint, or of the start."""
        generic = jax.vmap(self.setup.methods[self.e].generic_variables)
        best = jax.tree.map(jnp.copy, generic(state.servers)) if self.setup.keeps_best else ()
        restored = self.checkpoint.begin(state, best) if self.asked.config.resume else None
        start = Progress(0, new_history(self.setup.federations[self.e].num_clients), best)
        return restored or (state, start)

    def conclude(self, run: Run, result: Result) -> Result | UserError:
        """Write the summary and the curves."""
        config = self.asked.config
        head = {
            "method": config.method, "dataset": config.dataset, "seed": config.seed, "rounds": run.round,
            "lanes": run.simulation.program.lanes,
        }  # fmt: skip
        summary = head | result | self.setup.more_results(run) | self._cost(run) | self._together()
        try:
            self.folder.write_json(SUMMARY, summary)
        except UserError as error:
            return error
        title = f"{config.method}, {config.task or config.dataset}, seed {config.seed}"
        draw_curves(run.history.rows, self.folder.path / "curves.png", title)
        return summary

    def _cost(self, run: Run) -> Result:
        seconds = np.array([row["seconds"] for row in run.history.rows])
        typical = float(np.median(seconds[1:] if len(seconds) > 1 else seconds)) if len(seconds) else None
        _, batches = run.simulation.jobs(0)
        together = len(self.setup.pairs)
        size = len(batches) // together
        samples = sum(int((b >= 0).sum()) for b in batches[self.e * size : (self.e + 1) * size])
        memory = peak_memory_mb()
        return {
            "seconds_per_round": typical,
            "compile_seconds": self.setup.clock.seconds / together,
            "compilations": run.simulation.compilations,
            "samples_per_second": samples / typical if typical else None,
            "peak_memory_mb": memory["host"],
            "device_peak_memory_mb": memory["device"],
            "wall_seconds": (time.perf_counter() - self.setup.started) / together,
            **describe_machine(),
        }


def _joined(trees: Sequence[Any]) -> Any:
    """Trees of the experiments one after another."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *trees)


def resume(folder: str | Path, *, callbacks: Sequence[Any] = (), progress: bool = False) -> History:
    """Continue an interrupted run to its last round; on a CPU to the bits that it would have had.

    Args:
      folder: of the run.
      callbacks: as for `simulate`; those that have a state take it from the checkpoint.
      progress: whether a bar is shown.

    Returns:
      As `load_run`.

    Raises:
      UserError: there is no run, or it cannot be continued.
    """
    config, method = read_run(Path(folder))
    config = dataclasses.replace(config, resume=Path(folder), run_dir=Path(folder))
    shown = [bar()] if progress else []
    run(config, method, callbacks=as_callbacks(callbacks), last=shown)
    return load_run(folder)


def load_run(folder: str | Path) -> History:
    """A run from its folder, as `simulate` would have returned it: its rounds, and the models of its last checkpoint.

    Raises:
      UserError: there is no run, or no intact checkpoint.
    """
    folder = Path(folder)
    config, method = read_run(folder)
    config = dataclasses.replace(config, resume=folder, run_dir=folder, devices="auto")
    parts = setup([(config, method)])
    start, generic = parts.simulation.start(), jax.vmap(parts.methods[0].generic_variables)
    best = jax.eval_shape(generic, start.servers) if parts.keeps_best else ()
    with Checkpoints(folder / "checkpoints", read_only=True) as checkpoints:
        restored = checkpoints.restore((start.servers, best), (start.clients, start.statistics))
    if restored is None:
        raise UserError(f"{folder} has no checkpoint left: run it again.")
    files = RunFolder(folder)
    pa = {row["round"]: row["pa_per_client"] for row in files.rows(CLIENTS)}
    rows = [row | {"pa_per_client": pa.get(row["round"])} for row in files.rows() if row["round"] <= restored.round]
    state = start._replace(servers=restored.server[0], clients=restored.clients[0], statistics=restored.clients[1])
    return History(
        config.method, parts.methods[0], parts.federations[0], config, rows, state, files.read_json(SUMMARY) or {},
        parts.simulation,
    )  # fmt: skip
