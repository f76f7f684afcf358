"""Many experiments, each in a folder of its own: what shares a program is trained together, what is finished stays.

A sweep that was interrupted continues where it was, and each of its folders can be continued alone. Several processes,
on one machine or many with a shared file system, may work on one folder: each claims the experiments that it runs,
takes over those of processes that died, and ends with the results of all.
"""

import hashlib
import math
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from fedjax_pcdd.api.grid import WHOLE, Experiment, stages, summarise
from fedjax_pcdd.api.history import History
from fedjax_pcdd.api.records import Asked, Result
from fedjax_pcdd.api.runs import check_same, load_run, run, run_together, warn
from fedjax_pcdd.data.augment import draws_once
from fedjax_pcdd.data.partition import has_clients
from fedjax_pcdd.engine.devices import available_memory
from fedjax_pcdd.engine.executables import compiled_once
from fedjax_pcdd.errors import Say, UserError, as_path, is_there, shortened, writing, yes_or_no
from fedjax_pcdd.methods import Method
from fedjax_pcdd.training.config import FOLDERS, NOT_COMPUTED, RUN, RunConfig, values
from fedjax_pcdd.training.fields import Option, convert, with_commas, write_text
from fedjax_pcdd.training.folder import CLAIMS, CONFIG, RunFolder, failure_file, failure_of
from fedjax_pcdd.training.lock import InUse, Lock, owner
from fedjax_pcdd.training.named_arrays import bytes_of
from fedjax_pcdd.training.options import configure
from fedjax_pcdd.training.presets import read_run
from fedjax_pcdd.training.progress import CellBar, PartOfSweep, SweepBar
from fedjax_pcdd.training.setup import Pair, Setup
from fedjax_pcdd.training.tasks import has_participants

# Run options that may differ within a program, beside a method's traced hyper-parameters: numbers of the local
# training, and who owns which sample.
FREE = {
    *("seed", "lr", "momentum", "weight_decay", "grad_clip"),
    *("partition", "beta", "classes_per_client", "min_samples", "retry", "doubled", *FOLDERS),
}

MOST = 16  # more gain little
COPIES = 6  # of a state: before and after a round, what its jobs wrote, the best one, and two for a checkpoint
TOGETHER = Option("together", int, True, None, low=1)
PAUSE = 1.0  # seconds between two looks at what other processes have done
ELSEWHERE = "another folder for the sweep"  # for a folder that cannot be written
Failed = Callable[[str, UserError], None]  # told of the name of an experiment that failed, and why


class Standing(NamedTuple):
    """How far an experiment is."""

    name: str
    state: str  # done, running, failed, or waiting
    round: int
    rounds: int
    by: str | None = None  # who runs it
    seconds: float | None = None  # of training to go, None where no round tells


class Sweep:
    """Runs what is not finished of the experiments.

    Attributes:
      results: by name what summary.json holds, or the error of a failure.
      left: what is to be run of the others.
    """

    def __init__(self, planned: Mapping[str, Asked], folder: Path, failed: Failed, say: Say = warn):
        """Look what is finished.

        Args:
          planned: what to run, by its name.
          folder: where each experiment has a folder of its name.
          failed: told of the name of an experiment that failed, and why.
          say: told, once each, of the sentences that the runs would say alone.

        Raises:
          UserError: a folder holds another experiment than is planned for it, or is none; nothing is run then.
        """
        if any(is_there(path, Path.exists) and not path.is_dir() for path in (folder, *folder.parents)):
            raise UserError(f"{folder} cannot be a folder, for there is a file: choose another one for the sweep.")
        if is_there(folder / CONFIG):
            raise UserError(f"{folder} is the folder of a run: choose another one for the sweep.")
        self.folder, self._failed, self._planned = folder, failed, planned
        self.results: dict[str, Result | UserError] = {}
        self._say, self._said = say, set()
        self._most: dict[Hashable, int] = {}  # experiments in one program, by its key
        self._known = {name: self._failure(name) for name in self._planned}  # of sweeps before this one
        self.left = {name: asked for name in self._planned if (asked := self._asked(name)) is not None}

    def standings(self) -> list[Standing]:
        """How far each experiment is, and with whom."""
        return [self._standing(name, planned.config.rounds) for name, planned in self._planned.items()]

    def _standing(self, name: str, rounds: int) -> Standing:
        rows = RunFolder(self.folder / name).rows()
        seconds = sorted(row["seconds"] for row in rows if row.get("seconds") is not None)
        by = owner(self.folder / CLAIMS / f"{name}.lock")
        done = rows[-1]["round"] if rows else 0
        if isinstance(self.results.get(name), dict):
            return Standing(name, "done", done, rounds)
        left = (rounds - done) * seconds[len(seconds) // 2] if seconds else None
        state = "running" if by else "failed" if self._failure(name) else "waiting"
        return Standing(name, state, done, rounds, by, left)

    def _asked(self, name: str) -> Asked | None:
        """What is to be run of an experiment: all, the rest, or nothing, which is None."""
        planned, folder = self._planned[name], self.folder / name
        lies: dict[str, Any] = {"run_dir": folder}
        try:
            if is_there(folder / CONFIG):
                lies["resume"] = folder
                check_same(read_run(folder), (planned.config, planned.method), folder)
            if (summary := RunFolder(folder).summary()) is not None:
                if "resume" not in lies:
                    raise UserError(f"{folder} has lost its {CONFIG}, its results may be of anything: remove it.")
                self.results[name] = summary
                return None
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{folder} has files that cannot be read: remove it, or choose another folder.") from error
        return planned._replace(config=replace(planned.config, **lies, quiet=True))

    def _failure(self, name: str) -> str | None:
        return failure_of(self.folder / name)

    def _note(self, name: str, result: Result | UserError) -> None:
        self.results[name] = result
        self.left.pop(name, None)
        if isinstance(result, UserError):
            self._failed(name, result)

    @compiled_once()
    def run(self, bar: SweepBar, together: int | None = None) -> dict[str, Result | UserError]:
        """Run it all, or wait for what other processes run of it.

        Args:
          bar: told of every round.
          together: most experiments in one program, None for as many as fit into memory.
        """
        with writing(self.folder, ELSEWHERE):
            (self.folder / CLAIMS).mkdir(parents=True, exist_ok=True)
        with bar:
            while self.left:
                if not self._pass(bar, together):
                    time.sleep(PAUSE)
        return self.results

    def _pass(self, bar: SweepBar, together: int | None) -> bool:
        """Run what nobody else does; whether there was anything."""
        asked, names, ran = list(self.left.values()), list(self.left), False
        for group in groups([(one.config, one.method) for one in asked]):
            for part in portions(group, self._affordable(asked[group[0]], len(group), together)):
                with ExitStack() as claims:
                    mine = {names[i]: one for i in part if (one := self._claimed(names[i], claims, bar)) is not None}
                    if mine:
                        self._run_part(mine, bar)
                        ran = True
        return ran

    def _affordable(self, first: Asked, members: int, together: int | None) -> int:
        key = program_key(first.config, first.method)
        if first.config.validation is not None:  # whose samples differ by partition
            return 1
        if together:
            return together
        if members > 1 and key not in self._most:
            self._most[key] = affordable(first.config, first.method)
        return self._most.get(key, 1)

    def _claimed(self, name: str, claims: ExitStack, bar: SweepBar) -> Asked | None:
        """What is to be run of an experiment, by nobody but this process; None where another one is at it or done."""
        try:
            claims.enter_context(Lock.take(self.folder / CLAIMS / f"{name}.lock", wait=0))
        except InUse:
            return None
        asked, failure = self._asked(name), self._failure(name)
        if asked is not None and failure in (None, self._known[name]):
            return asked
        self._note(name, UserError(failure) if asked is not None and failure else self.results[name])
        bar.end(name)
        return None

    def _run_part(self, asked: Mapping[str, Asked], bar: SweepBar) -> None:
        """Run experiments together, or one by one where there is but one or some cannot be prepared."""
        shown = {name: one._replace(last=[PartOfSweep(bar, name)]) for name, one in asked.items()}
        try:
            results = run_together(list(shown.values()), self._say_once) if len(shown) > 1 else []
        except UserError:
            results = []  # alone, it is said of the one that it concerns
        for name, result in zip(shown, results, strict=False):
            self._conclude(name, result)
        for name, one in shown.items():
            # It may have been started with others, and even have been finished.
            if name in self.left and (again := self._asked(name)) is not None:
                try:
                    result = run(again.config, again.method, again.origin, last=one.last, say=self._say_once)
                except UserError as error:
                    result = error
                self._conclude(name, result)
            self.left.pop(name, None)
            bar.end(name)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)

    def _conclude(self, name: str, result: Result | UserError) -> None:
        """Note a result, and a failure for other processes, too."""
        file = failure_file(self.folder / name)
        if isinstance(result, UserError):
            # The failure that this sweep found there, come again, looks different: to others it is a new one.
            again = self._known[name] == result.sentence
            write_text(file, f"{result.sentence}\n" if again else result.sentence, ELSEWHERE)
        else:
            with writing(file, ELSEWHERE):
                file.unlink(missing_ok=True)
        self._note(name, result)


def begun(folder: Path) -> dict[str, Asked]:
    """The experiments of a sweep's folder that have begun, by name; UserError where there are none."""
    runs = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if not runs:
        raise UserError(f"{folder} has no experiments that have begun: name a sweep's folder.")
    return {run.name: Asked(*read_run(run)) for run in runs}


def sweep_folder(pairs: Sequence[Pair]) -> Path:
    """Where a sweep lies that names no folder: by its content but for the seeds, so that more of these join it."""
    indifferent = {*NOT_COMPUTED, "seed"}
    content = {str([(n, v) for n, v in values(*pair).items() if n not in indifferent]) for pair in pairs}
    digest = hashlib.sha256("\n".join(sorted(content)).encode()).hexdigest()
    return Path("runs") / f"sweep-{digest[:8]}"


def program_key(config: RunConfig, method: Method) -> Hashable:
    """Equal for experiments that share a program; None for one that runs alone.

    A run alone are participants with models of their own, tasks, client states in host memory, what is tracked or
    profiled, what writes to something that a process has but once, and servers that train on public images: hundreds of
    steps of Adam make another order of summation more than rounding.
    """
    single = (
        config.client_state != "device"
        or config.wandb
        or config.mlflow
        or config.loggers
        or config.track
        or config.profile
        or method.traits().public
    )
    if single or has_participants(config, method):
        return None
    fixed = tuple(getattr(config, name) for name in RUN if name not in FREE)
    of_seed = config.train_samples or config.test_samples or (config.augment and draws_once(config.dataset))
    drawn = config.seed if of_seed else None  # the data set depends on it, or how it is augmented
    own_clients = config.partition if has_clients(config.partition) else None  # as many as it says
    return jax.tree.structure(method), fixed, own_clients, drawn, config.resume is not None


def groups(pairs: Sequence[Pair]) -> list[list[int]]:
    """Numbers of the experiments that share a program, in the order of their first."""
    members: dict[Hashable, list[int]] = {}
    for number, pair in enumerate(pairs):
        key = program_key(*pair)
        members.setdefault(("alone", number) if key is None else key, []).append(number)
    return list(members.values())


def portions(group: Sequence[int], most: int) -> list[list[int]]:
    """A group in parts of about equal size, none larger than `most`.

    >>> portions(range(5), 3)
    [[0, 1, 2], [3, 4]]
    """
    part = math.ceil(len(group) / math.ceil(len(group) / most))
    return [list(group[i : i + part]) for i in range(0, len(group), part)]


def affordable(config: RunConfig, method: Method) -> int:
    """How many experiments like this one are worth training together and fit into half of the free memory."""
    try:
        state = Setup([(config, method)]).simulation.start()
    except UserError:
        return 1  # it is said when it runs
    return int(max(1, min(MOST, available_memory() / 2 / max(1, COPIES * bytes_of(state)))))


class Results(dict[str, Any]):
    """What came of a sweep: by the names of its experiments what summary.json holds, or the error of a failure.

    Attributes:
      folder: where each experiment has a folder of its name.
    """

    def __init__(self, folder: Path, experiments: Sequence[Experiment], results: Mapping[str, Any]):
        super().__init__(results)
        self.folder, self._experiments = folder, experiments

    def table(self) -> list[dict[str, Any]]:
        """Means and standard deviations over seeds in percent, one row a setting; `pandas.DataFrame` takes it."""
        return summarise(self._experiments, self)

    def load(self, name: str) -> History:
        """The history of an experiment, as `fp.load_run`."""
        return load_run(self.folder / name)


def sweep(
    grid: Mapping[str, Any], *, folder: str | Path | None = None, together: int | None = None, progress: bool = False
) -> Results:
    """Run every combination of options, each in a folder of its own; what is finished is not run again.

    Args:
      grid: options of the command line by their names in Python, each one value, or a list, tuple or range of them; one
        that only some of the methods have goes to those.
      folder: of the sweep; None for one below runs/ that is named by the grid.
      together: most experiments that are trained as one program; None for as many as fit into memory.
      progress: whether a bar is shown.

    Returns:
      What came of it: by name the summary of each experiment, or the error with which it failed.

    Raises:
      UserError: a mistake in the grid, or a folder that holds other experiments; nothing is run then.
    """
    given, results = options_of_grid(grid, "grid"), {}
    console = Console(quiet=not yes_or_no(progress, "progress"))
    if together is not None:
        together = convert(TOGETHER, str(together))
    where = None if folder is None else as_path(folder, "folder")
    steps = stages({name: with_commas(value) for name, value in given.items()}, results)
    return Results(*run_stages(steps, results, where, together, console=console), results)


def options_of_grid(given: Any, field: str) -> Mapping[str, Any]:
    """A dictionary of options, each with names or numbers; UserError for anything else, and what is for one run."""
    if not isinstance(given, Mapping):
        raise UserError(f"takes a dictionary of options, not {shortened(given)}.", field=field)
    for name, value in given.items():
        if not isinstance(name, str):
            raise UserError(f"takes options by their names, not {shortened(name)}.", field=field)
        if name in ("run_dir", "resume", "coordinator"):
            raise UserError("is for one run: use `folder` for a sweep's.", field=name)
        if name in WHOLE and isinstance(value, list | tuple | range) and len(value) > 1:
            raise UserError("takes one value in a sweep, as its commas belong to it.", field=name)
        for one in value if isinstance(value, list | tuple | range) else [value]:
            if not isinstance(one, str | bool | int | float | np.number | Path | None):
                raise UserError(f"takes names and numbers in a sweep, not {shortened(one)}.", field=str(name))
    return given


@compiled_once()
def run_stages(
    steps: Iterable[list[Experiment]], results: dict[str, Any], folder: Path | None, together: int | None = None, *,
    console: Console, origin: Callable[[Experiment], Mapping[str, Any]] = lambda one: {},
    failed: Failed = lambda name, error: warn(f"{name}: {error.sentence}"), say: Say = warn,
    before: Callable[[Sweep, Path], bool] = lambda part, folder: True,
) -> tuple[Path, list[Experiment]]:  # fmt: skip
    """Run stages one after another in a folder, None for one named by the first; gives it and all experiments.

    Args:
      steps: what to run; the next is asked for when the results of those before it are there.
      results: by name, filled.
      together: as in `sweep`.
      console: of the bar; a quiet one shows none.
      origin: of an experiment, as in `Asked`.
      failed, say: as of `Sweep`.
      before: called before a stage is run; where it says False nothing more is.
    """
    experiments: list[Experiment] = []
    cell = CellBar() if console.is_jupyter and not console.quiet else None
    for stage in steps:
        pairs = [configure(one.given) for one in stage]
        folder = folder or sweep_folder(pairs)
        planned = {one.name: Asked(*pair, origin(one)) for one, pair in zip(stage, pairs, strict=True)}
        part = Sweep(planned, folder, failed, say)
        if not before(part, folder):
            break
        experiments += stage
        rounds = {name: one.config.rounds for name, one in part.left.items()}
        results |= part.run(SweepBar(rounds, console, cell), together)
    return folder or Path(), experiments
