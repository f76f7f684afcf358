"""Many experiments, each in a folder of its own: what shares a program is trained together, what is finished stays.

A sweep that was interrupted continues where it was, and each of its folders can be continued alone.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_pcdd.api.runs import Asked, Result, run, run_together
from fedjax_pcdd.engine.devices import free_memory
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import Method
from fedjax_pcdd.training.build import Pair, Setup
from fedjax_pcdd.training.checkpoint import size
from fedjax_pcdd.training.config import FOLDERS, RUN, RunConfig
from fedjax_pcdd.training.folder import CONFIG, SUMMARY
from fedjax_pcdd.training.presets import read_run
from fedjax_pcdd.training.progress import PartOfSweep, SweepBar
from fedjax_pcdd.training.tasks import has_participants

# Run options that may differ within a program, beside a method's traced hyper-parameters: numbers of the local
# training, and who owns which sample.
FREE = {
    *("seed", "lr", "momentum", "weight_decay", "grad_clip"),
    *("partition", "beta", "classes_per_client", "min_samples", "retry", "doubled", *FOLDERS),
}

MOST = 16  # more gain little
COPIES = 6  # of a state: before and after a round, what its jobs wrote, the best one, and two for a checkpoint


class Planned(NamedTuple):
    """One experiment of a sweep."""

    name: str  # of its folder
    config: RunConfig
    method: Method
    origin: Mapping[str, Any] = {}  # as in `Asked`


class Sweep:
    """Runs what is not finished of the experiments.

    Attributes:
      results: by name what summary.json holds, or the error of a failure.
    """

    def __init__(self, planned: Sequence[Planned], folder: Path, failed: Callable[[str, UserError], None]):
        """Look what is finished.

        Args:
          folder: where each experiment has a folder of its name.
          failed: told of the name of an experiment that failed, and why.
        """
        self.folder, self._failed = folder, failed
        self.results: dict[str, Result | UserError] = {}
        self.left = {one.name: asked for one in planned if (asked := self._asked(one)) is not None}

    def _asked(self, planned: Planned) -> Asked | None:
        """What is to be run of an experiment: all, the rest, or nothing, which is None."""
        folder = self.folder / planned.name
        if (folder / SUMMARY).is_file():
            self.results[planned.name] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
            return None
        config, method, lies = planned.config, planned.method, {"run_dir": folder}
        try:
            if (folder / CONFIG).is_file():
                (config, method), lies = read_run(folder), {"run_dir": folder, "resume": folder}
        except UserError as error:
            self._note(planned.name, error)
            return None
        return Asked(dataclasses.replace(config, **lies, quiet=True), method, planned.origin)

    def _note(self, name: str, result: Result | UserError) -> None:
        self.results[name] = result
        if isinstance(result, UserError):
            self._failed(name, result)

    def run(self, bar: SweepBar, together: int | None = None) -> dict[str, Result | UserError]:
        """Run it all.

        Args:
          bar: told of every round.
          together: most experiments in one program, None for as many as fit into memory.
        """
        names, asked = list(self.left), list(self.left.values())
        with bar:
            for group in groups([(one.config, one.method) for one in asked]):
                first = asked[group[0]]
                most = together or (affordable(first.config, first.method) if len(group) > 1 else 1)
                for part in portions(group, most):
                    self._run_part({names[i]: asked[i] for i in part}, bar)
        return self.results

    def _run_part(self, asked: Mapping[str, Asked], bar: SweepBar) -> None:
        """Run experiments together, or one by one where there is but one or some cannot be prepared."""
        shown = {name: one._replace(last=[PartOfSweep(bar, name)]) for name, one in asked.items()}
        try:
            results = run_together(list(shown.values()), _silent) if len(shown) > 1 else []
        except UserError:
            results = []  # alone, it is said of the one that it concerns
        for name, result in zip(shown, results, strict=False):
            self._note(name, result)
        for name, one in shown.items():
            if name not in self.results:
                self._run_alone(name, one)
            bar.end(name)

    def _run_alone(self, name: str, asked: Asked) -> None:
        # It may have been started with others, and even have been finished.
        again = self._asked(Planned(name, asked.config, asked.method, asked.origin))
        if again is not None:
            try:
                self._note(name, run(again.config, again.method, again.origin, last=asked.last, say=_silent))
            except UserError as error:
                self._note(name, error)


def _silent(sentence: str) -> None:
    """A sweep says nothing of single settings."""


def program_key(config: RunConfig, method: Method) -> Hashable:
    """Equal for experiments that share a program; None for one that runs alone.

    A run alone are participants with models of their own, tasks, client states in host memory, what is tracked or
    profiled, what writes to something that a process has but once, and servers that train on public images: hundreds of
    steps of Adam make another order of summation more than rounding.
    """
    single = (
        config.client_state == "host"
        or config.wandb
        or config.loggers
        or config.track
        or config.profile
        or method.traits().public
    )
    if single or has_participants(config, method):
        return None
    fixed = tuple(getattr(config, name) for name in RUN if name not in FREE)
    drawn = config.seed if config.train_samples or config.test_samples else None  # the data set depends on it
    return jax.tree.structure(method), fixed, config.partition == "natural", drawn, config.resume is not None


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
    return int(max(1, min(MOST, free_bytes() / 2 / max(1, COPIES * size(state)))))


def free_bytes() -> float:
    """Free memory of the device, of the machine where computing shares its memory; infinite where unknown."""
    if (own := free_memory()) < math.inf:
        return own
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), math.inf)
