"""Searches: Optuna suggests settings based on earlier results; each is a trial in the folder of a sweep.

Nothing else is stored. A suggestion depends only on the space, a seed, its number and the results before it; a trial
that has begun keeps the options in its folder, for what failed before it may have succeeded since.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console

from fedjax_pcdd.api.grid import SEARCH, WHOLE, Experiment, summarise, values_of
from fedjax_pcdd.api.runs import warn
from fedjax_pcdd.api.sweep import Results, options_of_grid, run_stages
from fedjax_pcdd.api.sweep_folder import folder_of
from fedjax_pcdd.errors import UserError, as_path, imported, yes_or_no
from fedjax_pcdd.training.config import RESERVED, values
from fedjax_pcdd.training.fields import convert, with_commas
from fedjax_pcdd.training.folder import CONFIG
from fedjax_pcdd.training.metrics import DIGITS
from fedjax_pcdd.training.options import configure, method_of, own_values
from fedjax_pcdd.training.presets import read_run
from fedjax_pcdd.training.protocols import needs_epochs, protocol_of

ON_TEST = (
    "trials are chosen on test samples, so the best one's accuracy is too good: `select_on=validation` with "
    "`validation=0.1`, and for PA `pa_protocol=last`, chooses on training samples that are held out."
)
EXAMPLE = "`lr=0.01:0.3:log`"
ALONE = {"seed", "select_on", "select_by", *WHOLE, *RESERVED}  # options that are not searched


class Trial(NamedTuple):
    """One suggestion, repeated with every seed."""

    name: str
    options: dict[str, str]  # the searched ones
    experiments: list[Experiment]


class Search:
    """The trials of one search."""

    def __init__(self, given: Mapping[str, str], results: Mapping[str, Any], *, metric: str = "ga", seed: int = 0):
        """Set up a search of options as written.

        Args:
          given: LOW:HIGH and LOW:HIGH:log are bounds (both included), values with commas are choices; those of `seed`
            are repetitions.
          results: by experiment name; the caller adds those of a stage before it requests the next. A failure counts
            as 0.
          metric: "ga" or "pa", whose best round counts.
          seed: of the suggestions.

        Raises:
          UserError: Optuna is missing, nothing is searched, or an option does not take one of its values.
        """
        self._results, self._seed = results, seed
        self.trials: list[Trial] = []  # suggested so far, without repeated suggestions
        self._method = method_of({n: text for n, text in given.items() if n in ("method", "preset", "variant")})
        spaces = {name: _space(name, text, self._method) for name, text in given.items()}
        self._spaces = {name: space for name, space in spaces.items() if space is not None}
        self._fixed = {name: text for name, text in given.items() if name not in self._spaces}
        if not self._spaces:
            raise UserError(f"there is nothing to search: give an option bounds, as {EXAMPLE}, or several values.")
        first_options = {name: _written(space, _first(space)) for name, space in self._spaces.items()}
        config, first_method = configure(self._trial("", first_options).experiments[0].given)
        on_validation = config.select_on == "validation"
        # Some protocols of PA choose epochs on test samples, wherever the round is chosen.
        tested = metric == "pa" and needs_epochs(protocol_of(config.pa_protocol, first_method.traits()))
        self.on_test = tested or not on_validation  # whether trials are chosen on test samples
        self._measure = f"{metric}_validation_best" if on_validation else f"{metric}_best"

    def stages(self, count: int, together: int = 1, folder: Path | None = None) -> Iterator[list[Experiment]]:
        """Yield the experiments of `together` suggestions at a time, `count` in all; repeated ones are skipped.

        Trials that have begun in the folder, None for one named by the first stage, are not suggested anew.
        """
        for first in range(0, count, together):
            observed = [self._told(trial) for trial in self.trials]
            numbers, before = range(first, min(first + together, count)), len(self.trials)
            for number in numbers:
                name = f"trial-{number:03}"
                options = (folder and self._begun(folder, name)) or self._suggestion(observed, number)
                if options not in [trial.options for trial in self.trials]:
                    self.trials.append(self._trial(name, options))
            if stage := [experiment for trial in self.trials[before:] for experiment in trial.experiments]:
                folder = folder or folder_of([configure(experiment.given) for experiment in stage])
                yield stage

    def _begun(self, folder: Path, name: str) -> dict[str, str] | None:
        """The searched options of a trial in a folder, as written; None if it is not there or not of this space."""
        found = [*folder.glob(f"{name}/{CONFIG}"), *sorted(folder.glob(f"{name}-s*/{CONFIG}"))]
        recorded = values(*read_run(found[0].parent)) if found else {}
        texts = {n: _recorded(space, n, recorded.get(n), self._method) for n, space in self._spaces.items()}
        options = {name: text for name, text in texts.items() if text is not None}
        return options if options.keys() == texts.keys() else None

    def _suggestion(self, observed: list, number: int) -> dict[str, str]:
        """The options of a trial, as written."""
        optuna = _optuna()
        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        study.add_trials(observed)
        return {name: _written(self._spaces[name], value) for name, value in study.ask(self._spaces).params.items()}

    def _trial(self, name: str, options: dict[str, str]) -> Trial:
        given = self._fixed | options
        seeds = values_of("seed", given["seed"]) if "seed" in given else []
        repeated = [Experiment(f"{name}-s{seed}", name, given | {"seed": seed}) for seed in seeds]
        return Trial(name, options, repeated or [Experiment(name, name, given)])

    def _told(self, trial: Trial) -> Any:
        kinds = {name: type(getattr(space, "low", "")) for name, space in self._spaces.items()}
        values = {name: kind(trial.options[name]) for name, kind in kinds.items()}
        return _optuna().create_trial(params=values, distributions=self._spaces, value=self.score(trial))

    def score(self, trial: Trial) -> float:
        """The share that is maximised: the mean over the seeds of a trial."""
        outcomes = [self._results[experiment.name] for experiment in trial.experiments]
        return fmean((outcome.get(self._measure) if isinstance(outcome, dict) else None) or 0.0 for outcome in outcomes)

    def ranking(self) -> list[Trial]:
        """The trials that have results, the best one first."""
        done = [trial for trial in self.trials if all(e.name in self._results for e in trial.experiments)]
        return sorted(done, key=lambda trial: round(self.score(trial), DIGITS), reverse=True)

    def rows(self) -> list[dict[str, Any]]:
        """Rows like those of a sweep, the best trial first, with the searched options."""
        return [{**summarise(trial.experiments, self._results)[0], **trial.options} for trial in self.ranking()]

    def best(self) -> dict[str, str]:
        """The searched options of the best trial; UserError if none finished."""
        first = self.ranking()[0]
        if not self.score(first):
            raise UserError("no trial of the search came to an end: what stopped them is said above.")
        return first.options


def _optuna() -> Any:
    optuna = imported("optuna", "search")
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # a study announces itself on stderr
    return optuna


def _space(name: str, text: str, method: str) -> Any:
    """The distribution of an option; None if it has one value."""
    bounds = _bounds(text)
    if not bounds and _bounds(text.rpartition(":")[0]):
        raise UserError(f"`{name}={text}` has bounds and something else: write them as {EXAMPLE}, or without :log.")
    if name in ALONE or not (bounds or "," in text):
        return None
    if name == "method":
        raise UserError("is one in a search, of whose options it is: name one.", field="method")
    distributions = _optuna().distributions
    if not bounds:
        choices = values_of(name, text, method)
        if len(choices) == 1:
            return None
        for choice in choices:
            own_values({name: choice}, method)
        return distributions.CategoricalDistribution(choices)
    low, high = (own_values({name: bound}, method)[name] for bound in bounds)
    log = text.endswith(":log")
    if not isinstance(low, int | float) or isinstance(low, bool):
        raise UserError("has no values between two: list them with commas.", field=name)
    if low >= high or (log and low <= 0):
        raise UserError(f"`{name}={text}` must rise{' from above 0' if log else ''}: write bounds as {EXAMPLE}.")
    integers = isinstance(low, int) and isinstance(high, int)
    kind = distributions.IntDistribution if integers else distributions.FloatDistribution
    return kind(low, high, log=log)


def _bounds(text: str) -> list[str]:
    """LOW and HIGH of a text that is written as bounds, else [].

    >>> _bounds("0.01:0.3:log"), _bounds("1:5"), _bounds("net.py:Net")
    (['0.01', '0.3'], ['1', '5'], [])
    """
    bounds = text.removesuffix(":log").split(":")
    try:
        return bounds if len(bounds) == 2 and [float(part) for part in bounds] else []
    except ValueError:
        return []


def _first(space: Any) -> Any:
    return space.low if hasattr(space, "low") else space.choices[0]


def _written(space: Any, value: Any) -> str:
    """A suggested value as text; a float is rounded to three significant digits within its bounds."""
    return str(min(max(float(f"{value:.3g}"), space.low), space.high) if isinstance(value, float) else value)


def _recorded(space: Any, name: str, value: Any, method: str) -> str | None:
    """A recorded value as the space writes it; None if it is not in the space."""
    if hasattr(space, "choices"):
        return next((text for text in space.choices if own_values({name: text}, method)[name] == value), None)
    return str(value) if type(value) is type(space.low) and space.low <= value <= space.high else None


class SearchResults(Results):
    """The results of a search, like the `Results` of a sweep.

    Attributes:
      best: the searched options of the best trial, as they are written.
    """

    def __init__(self, folder: Path, experiments: Sequence[Experiment], results: Mapping[str, Any], search: Search):
        super().__init__(folder, experiments, results)
        self._search, self.best = search, search.best()

    def table(self) -> list[dict[str, Any]]:
        """Means and standard deviations over seeds in percent, one row per trial with its options, the best first."""
        return self._search.rows()


def search(
    space: Mapping[str, Any], trials: int = 20, *, folder: str | Path | None = None, metric: Literal["ga", "pa"] = "ga",
    search_seed: int = 0, together: int = 1, progress: bool = False,
) -> SearchResults:  # fmt: skip
    """Search options by Optuna's tree-structured Parzen estimator, after ten random trials.

    Args:
      space: options of the command line by their names in Python. A tuple (low, high) or (low, high, "log") gives
        bounds, both included; a list or a range gives choices, for `seed` repetitions over which a trial is averaged.
      trials: suggestions in all; the same call with more of them continues where this one ended.
      folder: of the sweep that the trials form, where finished experiments are not run again; None for one below runs/
        that is named by the first trial.
      metric: what is maximised, its best round chosen on the samples that `select_on` names: test or validation.
      search_seed: of the suggestions.
      together: trials that are suggested at once and, if possible, trained as one program.
      progress: whether a progress bar is shown.

    Returns:
      The results of the sweep, and the searched options of the best trial.

    Raises:
      UserError: a mistake in the space, a folder that holds other experiments, no trial that finished, or Optuna (the
        extra `search`) is missing.
    """
    arguments = {"trials": trials, "metric": metric, "search_seed": search_seed, "together": together}
    parsed = {name: convert(SEARCH[name], str(value)) for name, value in arguments.items()}
    console = Console(quiet=not yes_or_no(progress, "progress"))
    results: dict[str, Any] = {}
    sweep_path = None if folder is None else as_path(folder, "folder").absolute()
    options = options_of_grid(space, "space")
    bounds = {name for name, x in options.items() if isinstance(x, tuple) and name not in ALONE}
    texts = {name: ":".join(map(str, x)) if name in bounds else with_commas(x) for name, x in options.items()}
    searcher = Search(texts, results, metric=parsed["metric"], seed=parsed["search_seed"])
    if searcher.on_test:
        warn(ON_TEST)
    steps = searcher.stages(parsed["trials"], parsed["together"], sweep_path)
    return SearchResults(*run_stages(steps, results, sweep_path, console=console), results, searcher)
