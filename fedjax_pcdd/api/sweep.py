"""Sweeps: every combination of options, run in the folder of a sweep."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fedjax_pcdd import methods
from fedjax_pcdd.api.grid import WHOLE, Experiment, methods_of, stages, summarise
from fedjax_pcdd.api.history import History
from fedjax_pcdd.api.records import Asked
from fedjax_pcdd.api.runs import load_run, warn
from fedjax_pcdd.api.sweep_folder import Failed, Sweep, content_of, folder_of, runs_in
from fedjax_pcdd.engine.executables import compiled_once
from fedjax_pcdd.errors import Say, UserError, as_path, is_there, shortened, yes_or_no
from fedjax_pcdd.methods import Method
from fedjax_pcdd.training.config import RESERVED, RUN
from fedjax_pcdd.training.fields import Option, convert, options_of, with_commas
from fedjax_pcdd.training.folder import CONFIG
from fedjax_pcdd.training.options import configure
from fedjax_pcdd.training.progress import CellBar, SweepBar

ONE_VALUE = "takes one value in a sweep, as its commas belong to it."
TOGETHER = Option("together", int, True, None, low=1)


class Results(dict[str, Any]):
    """The results of a sweep: by experiment name the summary, as in summary.json, or the error with which it failed.

    Attributes:
      folder: where each experiment has a folder of its name, or of that which another grid gave it.
    """

    def __init__(self, folder: Path, experiments: Sequence[Experiment], results: Mapping[str, Any]):
        super().__init__(results)
        self.folder, self._experiments = folder, experiments
        self._earlier = {e.name: e.earlier for e in experiments if e.earlier}

    def table(self) -> list[dict[str, Any]]:
        """Means and standard deviations over seeds in percent, one row per setting; `pandas.DataFrame` takes it."""
        return summarise(self._experiments, self)

    def load(self, name: str) -> History:
        """The history of an experiment, as from `fp.load_run`."""
        return load_run(self.folder / self._earlier.get(name, name))


def sweep(
    grid: Mapping[str, Any], *, folder: str | Path | None = None, together: int | None = None, progress: bool = False
) -> Results:
    """Run every combination of options, each in its own folder; finished experiments are not run again.

    Args:
      grid: options of the command line by their names in Python, each a single value, or a list, tuple or range of
        values; an option that only some of the methods have goes to those.
      folder: of the sweep; None for one below runs/ that is named by the grid.
      together: most experiments that are trained as one program; None for as many as fit into memory.
      progress: whether a progress bar is shown.

    Returns:
      By name the summary of each experiment, or the error with which it failed.

    Raises:
      UserError: a mistake in the grid, or a folder that holds other experiments; nothing is run then.
    """
    options, results = options_of_grid(grid, "grid"), {}
    console = Console(quiet=not yes_or_no(progress, "progress"))
    if together is not None:
        together = convert(TOGETHER, str(together))
    sweep_path = None if folder is None else as_path(folder, "folder").absolute()
    steps = stages({name: with_commas(value) for name, value in options.items()}, results)
    return Results(*run_stages(steps, results, sweep_path, together, console=console), results)


def options_of_grid(given: Any, field: str) -> Mapping[str, Any]:
    """The options, whose values are names or numbers; UserError for anything else, and for options of single runs."""
    if not isinstance(given, Mapping):
        raise UserError(f"takes a dictionary of options, not {shortened(given)}.", field=field)
    for name, value in given.items():
        if not isinstance(name, str):
            raise UserError(f"takes options by their names, not {shortened(name)}.", field=field)
        if name in ("run_dir", "resume", "coordinator"):
            raise UserError("is for one run: use `folder` for a sweep's.", field=name)
        if name in RESERVED and name not in WHOLE:
            raise UserError("is for the command line: drop it.", field=name)
        if name in WHOLE and isinstance(value, list | tuple | range) and len(value) > 1:
            raise UserError(ONE_VALUE, field=name)
        for item in value if isinstance(value, list | tuple | range) else [value]:
            if not isinstance(item, str | bool | int | float | np.number | Path | None):
                hint = ""
                if isinstance(item, np.ndarray):
                    hint = ": write `.tolist()` behind it"
                elif isinstance(item, Method):
                    hint = ": give its name, and its hyper-parameters as options"
                raise UserError(f"takes names and numbers in a sweep, not {shortened(item)}{hint}.", field=str(name))
    _check_lists(given)
    return given


def _check_lists(given: Mapping[str, Any]) -> None:
    """UserError if an option whose values have commas of their own, in one of the methods, has a list of values."""
    lists = {n for n, x in given.items() if n not in RUN and isinstance(x, list | tuple | range) and len(x) > 1}
    for method in methods_of({name: with_commas(value) for name, value in given.items()}) if lists else ():
        for name, option in options_of(methods.get(method)).items():
            if name in lists and option.several:
                raise UserError(ONE_VALUE, field=name)


@compiled_once()
def run_stages(
    steps: Iterable[list[Experiment]], results: dict[str, Any], folder: Path | None, together: int | None = None, *,
    console: Console, origin: Callable[[Experiment], Mapping[str, Any]] = lambda experiment: {},
    failed: Failed = lambda name, error: warn(f"{name}: {error.sentence}"), say: Say = warn,
    before: Callable[[Sweep, Path], bool] = lambda part, folder: True,
) -> tuple[Path, list[Experiment]]:  # fmt: skip
    """Run stages one after another in a folder, None for one named by the first; return it and all experiments.

    Args:
      steps: the stages; the next is requested when the results of those before it are there.
      results: by experiment name, filled here.
      together: as in `sweep`.
      console: of the progress bar; a quiet one shows none.
      origin: of an experiment, as in `Asked`.
      failed, say: as in `Sweep`.
      before: called before each stage; if it returns False, neither this stage nor a later one is run.
    """
    experiments: list[Experiment] = []
    cell, present = CellBar() if console.is_jupyter and not console.quiet else None, None
    for stage in steps:
        pairs = [configure(experiment.given) for experiment in stage]
        folder = folder or folder_of(pairs)
        planned = {
            experiment.name: Asked(*pair, origin(experiment)) for experiment, pair in zip(stage, pairs, strict=True)
        }
        if new := [name for name in planned if not is_there(folder / name / CONFIG)]:
            present = runs_in(folder) if present is None else present
        earlier = {name: found for name in new if (found := (present or {}).get(content_of(*planned[name][:2])))}
        stage_sweep = Sweep(planned, folder, failed, say, earlier)
        if not before(stage_sweep, folder):
            break
        experiments += [experiment._replace(earlier=earlier.get(experiment.name)) for experiment in stage]
        rounds = {name: request.config.rounds for name, request in stage_sweep.left.items()}
        results |= (outcomes := stage_sweep.run(SweepBar(rounds, console, cell), together))
        if present is not None:  # a later stage may have the same runs
            done = [name for name, outcome in outcomes.items() if isinstance(outcome, dict)]
            present |= {content_of(*planned[name][:2]): earlier.get(name, name) for name in done}
    return folder or Path(), experiments
