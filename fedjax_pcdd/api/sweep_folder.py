"""Many experiments, each in its own folder: those that share a program are trained together, finished ones are kept.

An interrupted sweep continues where it stopped, and each of its folders can be continued alone. Several processes, on
one machine or on many with a shared file system, may work on one folder: each claims the experiments that it runs,
takes over those of processes that died, and ends with the results of all.
"""

import gc
import hashlib
import time
import traceback
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from fedjax_pcdd.api.programs import affordable, groups, portions, program_key
from fedjax_pcdd.api.records import APART, Asked, Result, untracked
from fedjax_pcdd.api.runs import check_same, run, run_together, warn
from fedjax_pcdd.engine.executables import compiled_once
from fedjax_pcdd.errors import Say, UserError, in_one_line, is_there, writing
from fedjax_pcdd.methods import Method
from fedjax_pcdd.training.config import NOT_COMPUTED, RunConfig, values
from fedjax_pcdd.training.fields import write_text
from fedjax_pcdd.training.folder import CLAIMS, CONFIG, LOCK, RunFolder, failure_file, failure_of
from fedjax_pcdd.training.inputs import RESOLVED
from fedjax_pcdd.training.lock import InUse, Lock, owner
from fedjax_pcdd.training.presets import read_run
from fedjax_pcdd.training.progress import SweepBar
from fedjax_pcdd.training.setup import Pair

PAUSE = 1.0  # seconds between two looks at what other processes have done
ELSEWHERE = "another folder for the sweep"  # advised if a folder cannot be written
Failed = Callable[[str, UserError], None]  # called with the name of a failed experiment and its error


class Standing(NamedTuple):
    """The progress of an experiment."""

    name: str
    state: str  # done, running, failed, or waiting
    round: int
    rounds: int
    by: str | None = None  # the process that runs it
    seconds: float | None = None  # of training left, None before the first timed round


class Sweep:
    """Runs the experiments that are not finished."""

    def __init__(
        self, planned: Mapping[str, Asked], folder: Path, failed: Failed, say: Say = warn,
        earlier: Mapping[str, str] = MappingProxyType({}),
    ):  # fmt: skip
        """Find out what is finished.

        Args:
          planned: the experiments, by name.
          folder: where each experiment has a folder of its name.
          failed: called with the name of a failed experiment and its error.
          say: called, once each, with the sentences that single runs would say.
          earlier: by name of an experiment the name of its folder, if that is another.

        Raises:
          UserError: a folder holds another experiment than the planned one, or is no folder; nothing is run then.
        """
        if any(is_there(path, Path.exists) and not path.is_dir() for path in (folder, *folder.parents)):
            raise UserError(f"{folder} cannot be a folder, for there is a file: choose another one for the sweep.")
        if is_there(folder / CONFIG):
            raise UserError(f"{folder} is the folder of a run: choose another one for the sweep.")
        self.folder, self._failed, self._planned, self._earlier = folder, failed, planned, earlier
        # By name the summary, as in summary.json, or the error with which an experiment failed.
        self.results: dict[str, Result | UserError] = {}
        self._say, self._told, self._waiting = say, set(), set()
        self._most: dict[Hashable, int] = {}  # limit on experiments in one program, by the program's key
        self._data: dict[Hashable, tuple[str, Path]] = {}  # of finished experiments: digest of the data, and the folder
        self._known = {name: failure_of(self._path(name)) for name in self._planned}  # failures of earlier sweeps
        # What remains to be run of the others, by name.
        self.left = {name: request for name in self._planned if (request := self._asked(name)) is not None}

    def standings(self) -> list[Standing]:
        """The progress of each experiment, and the process that runs it."""
        return [self._standing(name, planned.config.rounds) for name, planned in self._planned.items()]

    def _standing(self, name: str, rounds: int) -> Standing:
        rows = RunFolder(self._path(name)).rows()
        seconds = sorted(row["seconds"] for row in rows if row.get("seconds") is not None)
        process = owner(_claim(self._path(name)))
        rounds_done = rows[-1]["round"] if rows else 0
        if isinstance(self.results.get(name), dict):
            return Standing(name, "done", rounds_done, rounds)
        seconds_left = (rounds - rounds_done) * seconds[len(seconds) // 2] if seconds else None
        state = "running" if process else "failed" if failure_of(self._path(name)) else "waiting"
        return Standing(name, state, rounds_done, rounds, process, seconds_left)

    def _asked(self, name: str) -> Asked | None:
        """What remains to be run of an experiment, from its start or its checkpoint; None if it is finished."""
        planned, folder = self._planned[name], self._path(name)
        location, recorded = {"run_dir": folder}, None
        if is_there(folder / CONFIG):
            location["resume"], recorded = folder, read_run(folder)
            check_same(recorded, (planned.config, planned.method), folder)
        if (summary := RunFolder(folder).summary()) is not None:
            if recorded is None:
                raise UserError(f"{folder} has lost its {CONFIG}, its results may be of anything: remove it.")
            for sentence in untracked(planned.config, RunFolder(folder)):
                self._say_once(sentence)
            self._check_data(name)
            self.results[name] = summary
            return None
        data = self._data.get(_data_key(planned.config))
        return planned._replace(config=replace(planned.config, quiet=True, **location), data=data)

    def _check_data(self, name: str) -> None:
        """Raise UserError if a finished experiment was trained on other data than those finished before."""
        folder, inputs = self._path(name), {}
        with suppress(UserError):  # damaged: a finished experiment does without it
            inputs = (RunFolder(folder).read_json(RESOLVED) or {}).get("inputs") or {}
        if digest := inputs.get("data set"):
            known, first = self._data.setdefault(_data_key(self._planned[name].config), (digest, folder))
            if digest != known:
                raise UserError(f"{first} and {folder} were trained on different data sets: {APART}.")

    def _path(self, name: str) -> Path:
        return self.folder / self._earlier.get(name, name)

    def _note(self, name: str, result: Result | UserError) -> None:
        self.results[name] = result
        self.left.pop(name, None)
        if isinstance(result, UserError):
            self._failed(name, result)

    @compiled_once()
    def run(self, bar: SweepBar, together: int | None = None) -> dict[str, Result | UserError]:
        """Run all experiments, and wait for those that other processes run.

        Args:
          bar: updated after every round.
          together: most experiments in one program, None for as many as fit into memory.
        """
        if not self.left:
            return self.results
        with writing(self.folder, ELSEWHERE):
            (self.folder / CLAIMS).mkdir(parents=True, exist_ok=True)
        with bar:
            while self.left:
                if not self._pass(bar, together):
                    time.sleep(PAUSE)
        return self.results

    def _pass(self, bar: SweepBar, together: int | None) -> bool:
        """Run what no other process runs; return whether there was anything."""
        requests, names, ran = list(self.left.values()), list(self.left), False
        for group in groups([(request.config, request.method) for request in requests]):
            for portion in portions(group, self._affordable(requests[group[0]], len(group), together)):
                with ExitStack() as claims:
                    claimed = {
                        names[i]: request
                        for i in portion
                        if (request := self._claimed(names[i], claims, bar)) is not None
                    }
                    if claimed:
                        self._run_part(claimed, bar)
                        ran |= not claimed.keys() <= self.left.keys()
        return ran

    def _affordable(self, first: Asked, members: int, together: int | None) -> int:
        key = program_key(first.config, first.method)
        if first.config.validation is not None:  # the validation samples differ by partition
            return 1
        if together:
            return together
        if members > 1 and key not in self._most:
            self._most[key] = affordable(first.config, first.method)
        return self._most.get(key, 1)

    def _claimed(self, name: str, claims: ExitStack, bar: SweepBar) -> Asked | None:
        """Claim an experiment and return what remains to be run; None if another process runs it or has ended it."""
        try:
            if name in self._waiting and self._path(name).is_dir():
                Lock.take(self._path(name) / LOCK, wait=0).release()
            claims.enter_context(Lock.take(_claim(self._path(name)), wait=0))
        except InUse:
            return None
        self._waiting.discard(name)
        request, failure = self._asked(name), failure_of(self._path(name))
        if request is not None and failure in (None, self._known[name]):
            return request
        self._note(name, UserError(failure) if request is not None and failure else self.results[name])
        bar.end(name)
        return None

    def _run_part(self, requests: Mapping[str, Asked], bar: SweepBar) -> None:
        """Run experiments together, or one by one if there is only one or some cannot be prepared.

        One whose folder a run without a claim has open stays among those that are left, for a later pass.
        """
        with_bars = {name: request._replace(last=[bar.part(name)]) for name, request in requests.items()}
        try:
            results = run_together(list(with_bars.values()), self._say_once) if len(with_bars) > 1 else []
        except Exception:
            results = []  # run alone, the experiment that it concerns reports it
            gc.collect()
        for name, result in zip(with_bars, results, strict=False):
            self._conclude(name, result)
        for name, request in with_bars.items():
            # It may have been started with others, and even have been finished.
            if name in self.left and (remaining := self._asked(name)) is not None:
                try:
                    result = run(
                        remaining.config, remaining.method, remaining.origin, last=request.last, say=self._say_once,
                        data=remaining.data,
                    )  # fmt: skip
                except InUse as error:
                    self._say_once(f"{name} waits: {error.sentence}")
                    self._waiting.add(name)
                    continue
                except UserError as error:
                    result = UserError(error.sentence)  # not the frames, which hold the run's data and state
                except Exception as error:  # of a method or another part of the user's: the others go on
                    traceback.print_exc()
                    result = UserError(f"{type(error).__name__}: {in_one_line(error)}.")
                self._conclude(name, result)
            self.left.pop(name, None)
            bar.end(name)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._say(sentence)

    def _conclude(self, name: str, result: Result | UserError) -> None:
        """Note a result; a failure also in a file, for other processes."""
        file = failure_file(self._path(name))
        if isinstance(result, UserError):
            # A failure that this sweep found there and that recurs is written differently: to others it is a new one.
            recurred = self._known[name] == result.sentence
            write_text(file, f"{result.sentence}\n" if recurred else result.sentence, ELSEWHERE)
            gc.collect()  # the run that failed and its error refer to each other
        else:
            with writing(file, ELSEWHERE):
                file.unlink(missing_ok=True)
        self._note(name, result)


def begun(folder: Path) -> dict[str, Asked]:
    """The experiments of a sweep's folder that have begun, by name; UserError if there are none."""
    runs = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if not runs:
        raise UserError(f"{folder} has no experiments that have begun: name a sweep's folder.")
    return {run.name: Asked(*read_run(run)) for run in runs}


def runs_in(folder: Path) -> dict[str, str]:
    """By what they compute, the names of the runs in a sweep's folder, whichever grid they are of.

    Runs of Python's own objects are none of a grid. Of equal runs a finished one comes first. What a process trains
    without a sweep's claim is left to it.
    """
    names, ranks = {}, {}
    for path in sorted(path.parent for path in folder.glob(f"*/{CONFIG}")):
        with suppress(UserError):  # damaged, or of a method that has changed
            pair, run = read_run(path), RunFolder(path)
            if (run.read_json(RESOLVED) or {}).get("given") or (owner(path / LOCK) and owner(_claim(path)) is None):
                continue
            summary, rows = run.summary(), run.rows()
            done = rows[-1]["round"] if rows else 0
            if summary is not None and done < pair[0].rounds:  # a callback ended it
                continue
            content, rank = content_of(*pair), (summary is not None, done)
            if content not in ranks or rank > ranks[content]:
                names[content], ranks[content] = path.name, rank
    return names


def _claim(folder: Path) -> Path:
    """The lock of the sweep that trains the run in a folder."""
    return folder.parent / CLAIMS / f"{folder.name}.lock"


def content_of(config: RunConfig, method: Method, ignored: Collection[str] = NOT_COMPUTED) -> str:
    """A text that is equal for runs that differ in ignored options alone."""
    return str([(name, value) for name, value in values(config, method).items() if name not in ignored])


def folder_of(pairs: Sequence[Pair]) -> Path:
    """Default folder of a sweep, named by its content without the seeds, so that further seeds join it."""
    contents = {content_of(*pair, ignored={*NOT_COMPUTED, "seed"}) for pair in pairs}
    digest = hashlib.sha256("\n".join(sorted(contents)).encode()).hexdigest()
    return Path("runs") / f"sweep-{digest[:8]}"


def _data_key(config: RunConfig) -> Hashable:
    """Equal for experiments that must have the same data set, to the last sample."""
    drawn = config.seed if config.train_samples or config.test_samples or config.task else None
    groups = config.clients if config.partition == "natural" else None
    return config.task, config.dataset, config.train_samples, config.test_samples, drawn, groups
