"""One experiment: the request for it, and the record that is kept of it in memory or in its own folder."""

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.analysis.curves import draw_curves
from fedjax_pcdd.data.federation import heat_map
from fedjax_pcdd.engine.program import State
from fedjax_pcdd.errors import Say, UserError
from fedjax_pcdd.methods import Method
from fedjax_pcdd.training import loggers
from fedjax_pcdd.training.accuracies import LastRound
from fedjax_pcdd.training.callbacks import Metrics, Profile
from fedjax_pcdd.training.checkpoint import Checkpoints
from fedjax_pcdd.training.config import RunConfig, dump
from fedjax_pcdd.training.folder import SUMMARY, TRACK, Records, RunFolder, describe_machine, peak_memory_mb
from fedjax_pcdd.training.hosts import agree
from fedjax_pcdd.training.inputs import check_inputs, read_resolved, write_resolved
from fedjax_pcdd.training.loop import Callback, Progress, Run
from fedjax_pcdd.training.metrics import LAST, new_history
from fedjax_pcdd.training.saving import Checkpoint, check_space, required_bytes
from fedjax_pcdd.training.setup import NOTHING, Given, Setup
from fedjax_pcdd.training.tracking import Tracking, names_of

Result = dict[str, Any]


APART = "experiments on different data need sweeps in folders of their own"


class Asked(NamedTuple):
    """A request for one experiment: new, or continued if its configuration has `resume`; in memory without a folder."""

    config: RunConfig
    method: Method
    origin: Mapping[str, Any] = {}  # for resolved.json: the command, and the cell of a preset that it stands for
    callbacks: Sequence[Callback] = ()  # in addition to those that the options ask for
    last: Sequence[Callback] = ()  # called after a round is written and, if one is due, handed to a checkpoint
    given: Given = NOTHING
    noted: Mapping[str, Any] | None = None  # for a run in memory: what was settled when it began
    data: tuple[str, Path] | None = None  # in a sweep: digest of the data set, and the experiment that has it


class Record:
    """The record of one experiment, in memory or in a folder."""

    callbacks: Sequence[Callback]  # of the experiment, in the order of their calls
    noted: Mapping[str, Any] | None  # what was settled when the run began, None before

    def __init__(self, asked: Asked, setup: Setup, e: int, state: State, say: Say):
        """Args: e: index of the experiment in the setup; state: that of the experiment before the first round."""
        self.asked, self.setup, self.e, self.noted, self.say = asked, setup, e, asked.noted, say
        self._first = [(callback, copy.deepcopy(callback.state())) for callback in (*asked.callbacks, *asked.last)]

    def close(self) -> None:
        """Release the files."""

    def resolve(self, notes: Mapping[str, Any]) -> None:
        """Note what the options left open."""
        self.noted = notes

    def begin(self, state: State) -> tuple[State, Progress]:
        """State and progress from which training begins."""
        return state, Progress(0, new_history(self.setup.federations[self.e].num_clients), self._best(state))

    def _best(self, state: State) -> Any:
        generic = jax.vmap(self.setup.methods[self.e].generic_variables)
        return jax.tree.map(jnp.copy, generic(state.servers)) if self.setup.keeps_best else ()

    def continued(self) -> Asked:
        """The request that continues the run, with the callbacks as they were at the start."""
        for callback, state in self._first:
            if state is not None:
                callback.restore(state)
        return self.asked._replace(noted=self.noted)

    def conclude(self, run: Run, result: Result) -> Result | UserError:
        """The summary of a finished run."""
        return self._summary(run, result | {"compilations": run.simulation.compilations})

    def _summary(self, run: Run, result: Result) -> Result:
        config, lanes = self.asked.config, run.simulation.program.lanes
        head = {"method": config.method, "dataset": config.dataset, "seed": config.seed, "rounds": run.round}
        return head | {"lanes": lanes} | result


def check_given(names: Sequence[str], given: Given, folder: Path) -> None:
    """UserError if an object that a run in Python was trained on is missing."""
    missing = ", ".join(f"{name}=..." for name in names if getattr(given, name) is None)
    if missing:
        raise UserError(f"{folder} was trained on objects of Python's: use fp.resume or fp.load_run with {missing}.")


def _metrics(callbacks: Sequence[Callback]) -> list[Metrics]:
    return [callback for callback in callbacks if isinstance(callback, Metrics)]


class MemoryRecord(Record):
    """The record of an experiment in memory: only what the callbacks keep."""

    def __init__(self, asked: Asked, setup: Setup, e: int, state: State, say: Say):
        super().__init__(asked, setup, e, state, say)
        accuracies = setup.accuracies(e, per_client=True)
        last_round = LastRound([accuracies, *_metrics(asked.callbacks)])
        self.callbacks = [accuracies, *asked.callbacks, last_round, *asked.last]


def _the_same_everywhere(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What several processes must agree on, of the inputs of a run; files by their content, wherever they are."""
    single = ("options", "files", "onlookers", "versions")  # options are compared when processes meet
    files = sorted(inputs["files"].values())
    versions = {f"`{name}`'s version": version for name, version in inputs["versions"].items()}
    whole = {f"the {name}": value for name, value in inputs.items() if name not in single}
    return whole | versions | {"the content of a file of your own": files}


def untracked(config: RunConfig, folder: RunFolder) -> list[str]:
    """A sentence if a finished run is asked to track what it did not track when it was trained."""
    with suppress(UserError):  # a damaged file says nothing
        tracked = {name for row in folder.rows(TRACK) for name in row}
        if config.track and (missing := [name for name in names_of(config.track) if name not in tracked]):
            end = (
                "records rounds as they are trained, so nothing of a run that is finished: train it in another folder."
            )
            return [f"`track={','.join(missing)}` {end}"]
    return []


def unmeasured(callbacks: Sequence[Callback], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence if metrics are asked of a finished run whose rounds do not have them."""
    asked = [name for metrics in _metrics(callbacks) for name in metrics.functions]
    missing = [name for name in asked if not any(name in row for row in rows)]
    return [f"the run is finished without '{name}': metrics are measured as it is trained." for name in missing[:1]]


def _lost(callbacks: Sequence[Callback]) -> list[str]:
    """Metrics that a run had before it was interrupted, and that it does not have any more."""
    return [f"the metric '{name}'" for metrics in _metrics(callbacks) for name in metrics.lost]


def _kept(folder: Path, checkpoints: Checkpoints) -> str:
    """The end of a sentence about a model that is not finite."""
    round = checkpoints.newest_full
    status = "no checkpoint was written" if round is None else f"the checkpoint of round {round} is good"
    return f"; in {folder} {status}"


class FolderRecord(Record):
    """The record of an experiment in a folder: the folder, and the callbacks that fill it."""

    _before: Mapping[str, Any] = {}  # summary of a run that had already ended: the costs in it stay, and what they mean

    def __init__(self, asked: Asked, setup: Setup, e: int, state: State, say: Say):
        """Open or create the folder; UserError before anything is written."""
        super().__init__(asked, setup, e, state, say)
        config = asked.config
        self.inputs = setup.inputs(e, config, asked.method)
        agree(_the_same_everywhere(self.inputs))
        with ExitStack() as opened:
            self.folder = RunFolder.open(config.resume) if config.resume else self._created(state)
            opened.callback(self.folder.close)
            every = setup.pace if config.checkpoint_every == "auto" else config.checkpoint_every
            checkpoints = Checkpoints(
                self.folder.path / "checkpoints", keep=config.keep, every=every,
                clients_every=config.checkpoint_clients_every, say=say,
            )  # fmt: skip
            opened.callback(checkpoints.close)
            self.noted = read_resolved(self.folder, checkpoints.newest_record)
            if config.resume and checkpoints.newest_full is None and self.folder.summary() is not None:
                finished = f"the run in {self.folder.path} is finished, and its checkpoints are gone"
                raise UserError(f"{finished}: its results stay as they are; to train it anew, start another run.")
            check_given((self.noted or {}).get("given", ()), asked.given, self.folder.path)
            check_inputs((self.noted or {}).get("inputs"), self.inputs, self.folder.path, say)
            if asked.data and asked.data[0] != self.inputs["data set"]:
                raise UserError(f"the data set is not the one that {asked.data[1]} was trained on: {APART}.")
            self.folder.keep_partition(setup.federations[e], heat_map)
            accuracies = setup.accuracies(e, kept=partial(_kept, self.folder.path, checkpoints))
            checkpointed = [accuracies, *asked.callbacks]
            self.checkpoint = Checkpoint(checkpoints, checkpointed)
            last_round = LastRound([accuracies, *_metrics(asked.callbacks)])
            final_callbacks = [last_round, *self._writers(), self.checkpoint]
            self.callbacks = [*checkpointed, *final_callbacks, *asked.last]
            self.close = opened.pop_all().close

    def _created(self, state: State) -> RunFolder:
        config = self.asked.config
        path = Path(config.run_dir or ".")
        size = required_bytes((state.servers, state.servers), (state.clients, state.statistics))
        check_space(path, size * (config.keep + 1) * len(self.setup.pairs))
        # A later call shows its progress unless it is asked not to, and finds the data wherever it is made.
        written = replace(config, quiet=False, data_dir=config.data_dir and config.data_dir.absolute())
        return RunFolder.create(path, dump(written, self.asked.method))

    def _writers(self) -> list[Callback]:
        config, folder = self.asked.config, self.folder
        writers: list[Callback] = [Records(folder), *self.setup.pictures(folder)]
        if config.track:
            names, every, local = names_of(config.track), config.track_every, config.track_local
            writers.append(Tracking(names, folder, every=every, local=local, seed=config.seed))
        writers += loggers.made(config, folder.path)
        return [*writers, Profile(folder.path / "profile")] if config.profile else writers

    def continued(self) -> Asked:
        """The request that continues from the newest checkpoint, or from the start."""
        path = self.folder.path
        return super().continued()._replace(config=replace(self.asked.config, resume=path, run_dir=path))

    def resolve(self, notes: Mapping[str, Any]) -> None:
        """Note in resolved.json what the options left open; earlier notes of a continued run stay."""
        hyperparameters = {
            name: x if isinstance(x, str | int | None) else str(x) if isinstance(x, Path) else float(x)
            for name, x in asdict(self.setup.methods[self.e]).items()
        }
        first = {"hyperparameters": hyperparameters, "inputs": self.inputs, **self.asked.origin}
        resolved = first | dict(self.noted or {})
        self.noted = self.checkpoint.resolved = resolved | dict(notes) | self._together()
        write_resolved(self.folder, self.noted)

    def _together(self) -> dict[str, int]:
        count = len(self.setup.pairs)
        return {"together": count} if count > 1 else {}

    def begin(self, state: State) -> tuple[State, Progress]:
        """State and progress of the newest intact checkpoint, or of the start."""
        resumed = self.checkpoint.begin(state, self._best(state)) if self.asked.config.resume else None
        check_inputs(self.checkpoint.began_with, self.inputs, self.folder.path, self.say)
        start = resumed or super().begin(state)
        if start[1].stopped or start[1].round >= self.asked.config.rounds:
            with suppress(UserError):  # a damaged one is written anew
                self._before = self.folder.summary() or {}
            lacking = unmeasured(self.asked.callbacks, start[1].history.rows)
            for sentence in untracked(self.asked.config, self.folder) + lacking:
                self.say(sentence)
        elif missing := self.checkpoint.missing + _lost(self.asked.callbacks):
            names = ", ".join(missing)
            self.say(
                f"{self.folder.path} was trained with {names}: to go on with it, resume in Python with the metrics and "
                "callbacks that it had."
            )
        return start

    def conclude(self, run: Run, result: Result) -> Result | UserError:
        """Write the summary and the curves."""
        config = self.asked.config
        costs = {"compilations": run.simulation.compilations, **self._cost(run)}
        costs |= {} if self._before else self._together()
        costs |= {name: self._before[name] for name in ("lanes", "together", *costs) if name in self._before}
        summary = self._summary(run, result | self.setup.more_results(run) | costs)
        try:
            self.folder.write_json(SUMMARY, summary)
            title = f"{config.method}, {config.task or config.dataset}, seed {config.seed}"
            best = {name: run.history.best(name)[1] for name in ("ga", "pa")}
            self.folder.draw("curves.png", lambda path: draw_curves(run.history.rows, path, title, best))
        except UserError as error:
            return error
        return summary

    def _cost(self, run: Run) -> Result:
        rows = run.history.rows[1:] or run.history.rows
        seconds = np.array([row["seconds"] for row in rows])
        # Only of the last rounds, as counting draws their batches again. The median, as one of them may have compiled.
        last = [(run.runs.samples(row["round"] - 1)[self.e], row["seconds"]) for row in rows[-LAST:]]
        rates = [samples / duration for samples, duration in last if samples]
        together, memory = len(self.setup.pairs), peak_memory_mb()
        return {
            "seconds_per_round": float(np.median(seconds)) if len(seconds) else None,
            "seconds_local": float(seconds.mean()) if len(seconds) else None,
            "compile_seconds": self.setup.clock.seconds / together,
            "samples_per_second": float(np.median(rates)) if rates else None,
            "peak_memory_mb": memory["host"],
            "device_peak_memory_mb": memory["device"],
            "wall_seconds": (time.perf_counter() - self.setup.started) / together,
            **describe_machine(),
        }
