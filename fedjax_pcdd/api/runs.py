"""Runs in memory or in folders: new, continued or loaded; one alone, or several as one compiled program.

Each experiment that is written has its own folder, with the same files whether or not it is trained with others, and
can be resumed alone. An experiment that shares a program reports its share of the seconds, so that the sum over all is
what they cost. Letters: E experiments, K clients.
"""

import gc
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pcdd.api.history import History
from fedjax_pcdd.api.records import Asked, FolderRecord, MemoryRecord, Record, Result, check_given
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.engine.devices import OutOfMemory, in_sentences
from fedjax_pcdd.engine.program import State
from fedjax_pcdd.errors import Say, UserError, as_path, is_there, nearest, shortened, spelled, unreadable
from fedjax_pcdd.methods import Method
from fedjax_pcdd.registry import short_name
from fedjax_pcdd.training import loggers
from fedjax_pcdd.training.callbacks import Metrics, as_callbacks
from fedjax_pcdd.training.checkpoint import Checkpoints
from fedjax_pcdd.training.config import RunConfig, difference, values
from fedjax_pcdd.training.device_choices import fewer_lanes
from fedjax_pcdd.training.folder import CLIENTS, LOCK, RunFolder
from fedjax_pcdd.training.inputs import RESOLVED, check_inputs
from fedjax_pcdd.training.lock import owner
from fedjax_pcdd.training.loop import Callback, Each, Run, loop, own_state
from fedjax_pcdd.training.metrics import result
from fedjax_pcdd.training.presets import read_run
from fedjax_pcdd.training.progress import bars
from fedjax_pcdd.training.setup import Given, Pair
from fedjax_pcdd.training.tasks import setup


class LastRoundLost(UserError):
    """A finished run has no intact checkpoint of its last round; a resume trains it again."""


def warn(sentence: str) -> None:
    """Show a sentence to the user of the Python interface, as a warning."""
    warnings.warn(spelled(sentence), stacklevel=3)


def run(
    config: RunConfig, method: Method, origin: Mapping[str, Any] | None = None, callbacks: Sequence[Callback] = (),
    last: Sequence[Callback] = (), say: Say = warn, data: tuple[str, Path] | None = None,
) -> Result:  # fmt: skip
    """Run, or resume, one experiment, with arguments as in `Asked`; returns its summary, as in summary.json.

    `say` is called with a sentence for each setting that has no effect, or that the method advises against.

    Raises:
      UserError: a setting that cannot work, or a loss that is no longer finite.
    """
    (summary,) = run_together([Asked(config, method, origin or {}, callbacks, last, data=data)], say)
    if isinstance(summary, UserError):
        raise summary
    return summary


def run_together(
    asked: Sequence[Asked],
    say: Say = warn,
    finish: Callable[["Record", Run, Result], Any] = lambda _, __, result: result,
) -> list[Any]:
    """Run, or resume, experiments that share a program (`programs.program_key`).

    Interrupted experiments are trained together with those that stand at the same round, and those that a callback
    had ended are concluded together. If the device runs out of memory, training continues from the newest checkpoint
    (in memory: from the start) with half of the lanes, which resolved.json then notes.

    Args:
      asked: all in folders, or one in memory.
      say: as in `run`.
      finish: turns an experiment's record, run and summary into what is returned for it.

    Returns:
      For each experiment what `finish` returned, or the error with which it failed, which stops none of the others.

    Raises:
      UserError: an experiment cannot be prepared or continued (then none has trained), or the device fails.
    """
    continued: list[Asked] = []
    with ExitStack() as opened:
        with in_sentences("preparing the run"):
            session = Session(asked, say, opened)
        standings = [(progress.round, progress.stopped) for progress in session.since]
        if len(set(standings)) == 1:
            try:
                with in_sentences("training"):
                    runs = session.train()
                    results = zip(session.records, runs, session.results(runs), strict=True)
                    return [r if isinstance(r, Exception) else finish(record, run, r) for record, run, r in results]
            except OutOfMemory as error:
                continued = session.with_fewer_lanes(error)
    del session  # and what it holds on the device
    if continued:
        gc.collect()  # the error and the runs whose frames it holds refer to each other
        return run_together(continued, say, finish)
    outcomes: dict[int, Any] = {}
    for shared in dict.fromkeys(standings):
        members = [e for e, standing in enumerate(standings) if standing == shared]
        outcomes |= zip(members, run_together([asked[e] for e in members], say, finish), strict=True)
    return [outcomes[e] for e in range(len(asked))]


class Session:
    """Experiments that share one program, from their options to their results."""

    def __init__(self, asked: Sequence[Asked], say: Say, opened: ExitStack):
        """Prepare all experiments, open or create their folders, and restore the newest checkpoints."""
        loggers.check(asked[0].config)
        self.say = say
        self.setup = setup([(request.config, request.method) for request in asked], asked[0].given)
        for e in range(len(asked)):
            for sentence in self.setup.advice(e):
                say(sentence)
        state = self.setup.start()
        self.records: list[Record] = []  # what is kept of each [E]
        for e, request in enumerate(asked):
            in_memory = request.config.run_dir is None and request.config.resume is None
            kind = MemoryRecord if in_memory else FolderRecord
            record = kind(request, self.setup, e, self._own(state, e), say)
            opened.callback(record.close)
            self.records.append(record)
        notes = max((r.noted for r in self.records if r.noted), key=lambda notes: notes["lanes"], default=None)
        self.setup.settle(state, notes, say)
        for record in self.records:
            record.resolve(self.setup.notes())
        starts = [record.begin(self._own(state, e)) for e, record in enumerate(self.records)]
        self.since = [progress for _, progress in starts]  # of each, before training begins from `state` [E]
        resumed = any(progress.round for progress in self.since)
        self.state = _joined([start for start, _ in starts]) if resumed else self.setup.prepared(state)

    def _own(self, state: State, e: int) -> State:
        shared = len(self.setup.pairs) > 1
        return own_state(state, e, self.setup.federations[e].num_clients) if shared else state

    def train(self) -> list[Run]:
        """Train to the end; the run of an experiment that fails among others has its error."""
        callbacks = [record.callbacks for record in self.records]
        loop_callbacks = callbacks[0] if len(callbacks) == 1 else [Each(callbacks)]
        since, self.since = self.since, []  # not kept: its best models are replaced by better ones
        state, self.state = self.state, State((), (), ())  # its buffers are donated
        ended = loop(self.setup.simulation, state, self.setup.config.rounds, loop_callbacks, since)
        return [ended] if isinstance(ended, Run) else ended

    def with_fewer_lanes(self, error: OutOfMemory) -> list[Asked]:
        """Requests that continue the experiments with half of the lanes.

        Raises:
          OutOfMemory: the given error, if there is only one lane, or if other processes would have to know.
        """
        notes = self.setup.notes()
        notes["lanes"] = fewer_lanes(notes["lanes"], error, self.say)
        for record in self.records:
            record.resolve(notes)
        if jax.process_count() > 1:
            raise error
        return [record.continued() for record in self.records]

    def results(self, runs: Sequence[Run]) -> list[Result | UserError]:
        """Fine-tune if the protocol of PA asks for it, and write all results."""
        results = [result(run.history, run.method) for run in runs]
        if not all(run.error for run in runs):
            best = _joined([run.best for run in runs]) if self.setup.keeps_best else None
            state = _joined([run.state for run in runs]) if any(run.stopped for run in runs) else runs[0].runs.state
            # As an experiment alone: the order of samples in fine-tuning follows from the rounds that it was trained.
            ended = {run.round for run in runs if not run.error}
            concluded = {rounds: self.setup.concluded(rounds, state, best, results) for rounds in ended}
            results = [concluded.get(run.round, results)[e] for e, run in enumerate(runs)]
        for run, result_of_run in zip(runs, results, strict=True):
            if not run.error and (client := result_of_run.get("diverged_client")) is not None:
                advice = "so that PA has no value: choose a smaller `lr`, or set `grad_clip`."
                self.say(f"fine-tuning diverged: the loss of client {client} is not finite, {advice}")
        outcomes = zip(self.records, runs, results, strict=True)
        return [run.error or record.conclude(run, result) for record, run, result in outcomes]  # pyright: ignore


def _joined(trees: Sequence[Any]) -> Any:
    """The trees of all experiments, concatenated along their leading axis."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *trees)


def resume(
    folder: str | Path, *, callbacks: Sequence[Any] = (), metrics: Mapping[str, Callable[[Run], float]] | None = None,
    progress: bool = False, **objects: Any,
) -> History:  # fmt: skip
    """Continue an interrupted run to its last round; on a CPU bit for bit as if it had not been interrupted.

    Args:
      folder: of the run.
      callbacks: as for `simulate`; those with a state restore it from the checkpoint, and a warning names any that the
        run had and that is not passed.
      metrics: as for `simulate`; rounds that were trained without them have no values.
      progress: whether a progress bar is shown.
      objects: as for `load_run`.

    Returns:
      As `load_run`.

    Raises:
      UserError: there is no run, or it cannot be continued.
    """
    run_callbacks, last = [*([] if metrics is None else [Metrics(metrics)]), *as_callbacks(callbacks)], bars(progress)
    request = recorded(as_path(folder, "folder").absolute(), objects, "resume")
    return finished(request._replace(callbacks=run_callbacks, last=last))


def finished(asked: Asked, label: str | None = None) -> History:
    """Run one experiment to its end and return its history; UserError if it fails."""

    def history(record: Record, run: Run, summary: Result) -> History:
        of_clients = clients_in(record.folder) if isinstance(record, FolderRecord) else {}
        return history_of(run, record.asked, of_clients, label, summary)

    (history_or_error,) = run_together([asked], finish=history)
    if isinstance(history_or_error, Exception):
        raise history_or_error
    return history_or_error


def history_of(
    run: Run, asked: Asked, of_clients: Mapping[int, Any], label: str | None = None,
    summary: Mapping[str, Any] = MappingProxyType({}),
) -> History:  # fmt: skip
    """The history of a run, finished or not; `of_clients` has the PA of each client by round, for rows that lack it."""
    config, rows = asked.config, with_clients(run.history.rows, of_clients)
    label = label or short_name(config.method)
    return History(
        label, run.method, run.federation, config, rows, run.state, dict(summary), run.simulation, asked.given
    )


def clients_in(folder: RunFolder) -> dict[int, Any]:
    """PA of each client by round, from the folder of a run."""
    return {row["round"]: row.get("pa_per_client") for row in folder.rows(CLIENTS)}


def with_clients(rows: Sequence[Mapping[str, Any]], of_clients: Mapping[int, Any]) -> list[dict[str, Any]]:
    """The rows with the accuracies of the clients added."""
    return [{"pa_per_client": of_clients.get(row["round"]), **row} for row in rows]


def recorded(folder: Path, objects: Mapping[str, Any], asks: str = "load_run") -> Asked:
    """The request that continues a run, with the objects that config.yaml cannot describe.

    UserError, in which `asks` is the function that was called, if one is missing or unknown.
    """
    config, method = read_run(folder)
    for name in objects:
        if name not in Given._fields:
            raise UserError(f"{asks} takes no argument '{name}': {nearest(name, Given._fields)}")
    if not isinstance(objects.get("federation"), Federation | None):
        raise UserError(f"takes what fp.partition returns, not {shortened(objects['federation'])}.", field="federation")
    given, resolved = Given(**objects), {}
    with suppress(UserError):  # if damaged: the newest checkpoint has the same notes, and digests differ
        resolved = RunFolder(folder).read_json(RESOLVED) or {}
    check_given(resolved.get("given", ()), given, folder)
    return Asked(replace(config, resume=folder, run_dir=folder), method, given=given)


def check_same(recorded: Pair, wanted: Pair, folder: Path) -> None:
    """UserError that names the options in which the run in a folder differs from the wanted one."""
    old, new = values(*recorded), values(*wanted)
    fields = difference(recorded, wanted)
    if fields:
        differences = ", ".join(f"`{name}` was {old.get(name)}, not {new.get(name)}" for name in fields[:4])
        remainder = f", and {len(fields) - 4} more differ" if len(fields) > 4 else ""
        raise UserError(
            f"{folder} holds another run: {differences}{remainder}. Choose another folder, or the options it has."
        )


def _check_readable(checkpoints: Path) -> None:
    for path in (checkpoints, *checkpoints.glob("*")):
        try:
            _ = path.is_dir() and os.listdir(path)
        except OSError as error:
            raise unreadable(error, path) from error


def load_run(folder: str | Path, **objects: Any) -> History:
    """Load a run from its folder as `simulate` would have returned it, up to its newest checkpoint.

    Args:
      folder: of the run.
      objects: `federation`, `model` and `pipeline`, if `simulate` was given ones that no option describes.

    Raises:
      UserError: there is no run, no intact checkpoint (of a finished run: of its last round), or an object is missing.
    """
    files = RunFolder(as_path(folder, "folder"))
    for _ in range(2):
        try:
            return _loaded(files, objects)
        except UserError:  # a run that goes on may have removed the checkpoint that was being read
            if not is_there(files.path / LOCK) or owner(files.path / LOCK) is None:
                raise
    return _loaded(files, objects)


def _loaded(files: RunFolder, objects: Mapping[str, Any]) -> History:
    request = recorded(files.path, objects)
    config = replace(request.config, device="auto", devices="auto")
    prepared = setup([(config, request.method)], request.given)
    start, generic = prepared.start(), jax.vmap(prepared.methods[0].generic_variables)
    best = jax.eval_shape(generic, start.servers) if prepared.keeps_best else ()
    _check_readable(files.path / "checkpoints")
    with Checkpoints(files.path / "checkpoints", read_only=True) as checkpoints:
        restored = checkpoints.restore((start.servers, best), (start.clients, start.statistics))
    if restored is None and files.summary() is not None:
        raise UserError(
            f"{files.path} is finished, and its checkpoints are gone: for its models, run it in a new folder."
        )
    if restored is None:
        raise UserError(f"{files.path} has no checkpoint left, or none yet: resume it, which then begins anew.")
    summary = files.summary() or {}
    if summary.get("rounds", 0) > restored.round:
        lost = "is finished, and the checkpoint of its last round is damaged or gone: resume it."
        raise LastRoundLost(f"{files.path} {lost}")
    resolved = restored.history.get("resolved", {})
    check_given(resolved.get("given", ()), request.given, files.path)
    check_inputs(resolved.get("inputs"), prepared.inputs(0, config, request.method), files.path, warn)
    rows = with_clients(files.rows(rounds=restored.round)[: restored.round], clients_in(files))
    state = start._replace(servers=restored.server[0], clients=restored.clients[0], statistics=restored.clients[1])
    return History(
        short_name(config.method), prepared.methods[0], prepared.federations[0], config, rows, state, summary,
        prepared.simulation, request.given,
    )  # fmt: skip
