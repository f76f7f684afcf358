"""Searches: Optuna suggests settings by the results of those before, each a trial in the folder of a sweep.

Nothing else is stored. A suggestion follows from the space, a seed, its number and the results before it, so a search
that was interrupted makes the same ones again, and their results stand in the folder.
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
from fedjax_pcdd.errors import UserError, as_path, yes_or_no
from fedjax_pcdd.training.config import RESERVED
from fedjax_pcdd.training.fields import convert, with_commas
from fedjax_pcdd.training.options import configure, method_of, own_values

ON_TEST = (
    "trials are chosen on test samples, so the best one's accuracy is too good: "
    "`select_on=validation` with `validation=0.1` chooses on training samples that are held out."
)
EXAMPLE = "`lr=0.01:0.3:log`"
ALONE = {"seed", *WHOLE, *RESERVED}  # options that are not searched


class Trial(NamedTuple):
    """One suggestion, repeated with every seed."""

    name: str
    options: dict[str, str]  # those that are searched
    experiments: list[Experiment]


class Search:
    """The trials of one search.

    Attributes:
      trials: suggested so far, without what was suggested before.
      chosen_on: what best rounds are chosen by, as `RunConfig.chosen_on`.
      on_test: whether trials are chosen on test samples.
    """

    def __init__(self, given: Mapping[str, str], results: Mapping[str, Any], *, metric: str = "ga", seed: int = 0):
        """A search of options as they are written.

        Args:
          given: LOW:HIGH and LOW:HIGH:log are bounds (both included), values with commas are choices; those of `seed`
            are repetitions.
          results: by name, filled with those of a stage before the next is asked for; a failure counts as 0.
          metric: "ga" or "pa", of which the best round counts.
          seed: of the suggestions.

        Raises:
          UserError: Optuna is missing, nothing is searched, or a value that its option does not take.
        """
        self._results, self._seed, self.trials = results, seed, []
        method = method_of({name: text for name, text in given.items() if name in ("method", "preset", "variant")})
        spaces = {name: _space(name, text, method) for name, text in given.items()}
        self._spaces = {name: space for name, space in spaces.items() if space is not None}
        self._fixed = {name: text for name, text in given.items() if name not in self._spaces}
        if not self._spaces:
            raise UserError(f"there is nothing to search: give an option bounds, as {EXAMPLE}, or several values.")
        some = {name: _written(space, _first(space)) for name, space in self._spaces.items()}
        self.chosen_on = configure(self._trial("", some).experiments[0].given)[0].chosen_on
        self.on_test = self.chosen_on != "validation"
        self._measure = f"{metric}_best" if self.on_test else f"{metric}_validation_best"

    def stages(self, count: int, together: int = 1) -> Iterator[list[Experiment]]:
        """The experiments of so many suggestions at a time, until there were `count`; one of old is not run again."""
        for first in range(0, count, together):
            told = [self._told(trial) for trial in self.trials]
            numbers, before = range(first, min(first + together, count)), len(self.trials)
            for number in numbers:
                options = self._suggestion(told, number)
                if options not in [trial.options for trial in self.trials]:
                    self.trials.append(self._trial(f"trial-{number:03}", options))
            if len(self.trials) > before:
                yield [one for trial in self.trials[before:] for one in trial.experiments]

    def _suggestion(self, told: list, number: int) -> dict[str, str]:
        """The options of a trial, as they are written."""
        optuna = _optuna()
        seed = int(np.random.SeedSequence([self._seed, number]).generate_state(1)[0])
        study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=seed))
        study.add_trials(told)
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
        """What is maximised, a share: the mean over its seeds."""
        outcomes = [self._results[one.name] for one in trial.experiments]
        return fmean((one.get(self._measure) if isinstance(one, dict) else None) or 0.0 for one in outcomes)

    def ranking(self) -> list[Trial]:
        """The trials that have results, the best one first."""
        done = [trial for trial in self.trials if all(one.name in self._results for one in trial.experiments)]
        return sorted(done, key=self.score, reverse=True)

    def rows(self) -> list[dict[str, Any]]:
        """Rows as those of a sweep, the best one first, with the options that are searched."""
        return [{**summarise(trial.experiments, self._results)[0], **trial.options} for trial in self.ranking()]

    def best(self) -> dict[str, str]:
        """The searched options of the best trial; UserError where none finished."""
        first = self.ranking()[0]
        if not self.score(first):
            raise UserError("no trial of the search came to an end: what stopped them is said above.")
        return first.options


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UserError("optuna is missing: pip install 'fedjax-pcdd[search]'.") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # a study says on stderr that it begins
    return optuna


def _space(name: str, text: str, method: str) -> Any:
    """The distribution of an option; None where it has one value."""
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
    whole = isinstance(low, int) and isinstance(high, int)
    kind = distributions.IntDistribution if whole else distributions.FloatDistribution
    return kind(low, high, log=log)


def _bounds(text: str) -> list[str]:
    """LOW and HIGH of what is written as bounds, else nothing.

    >>> _bounds("0.01:0.3:log"), _bounds("1:5"), _bounds("net.py:Net")
    (['0.01', '0.3'], ['1', '5'], [])
    """
    parts = text.removesuffix(":log").split(":")
    try:
        return parts if len(parts) == 2 and [float(part) for part in parts] else []
    except ValueError:
        return []


def _first(space: Any) -> Any:
    return space.low if hasattr(space, "low") else space.choices[0]


def _written(space: Any, value: Any) -> str:
    """A suggestion; a number with three digits, which is within its bounds."""
    return str(min(max(float(f"{value:.3g}"), space.low), space.high) if isinstance(value, float) else value)


class SearchResults(Results):
    """What came of a search: as the `Results` of a sweep.

    Attributes:
      best: the searched options of the best trial, as they are written.
    """

    def __init__(self, folder: Path, experiments: Sequence[Experiment], results: Mapping[str, Any], search: Search):
        super().__init__(folder, experiments, results)
        self._search, self.best = search, search.best()

    def table(self) -> list[dict[str, Any]]:
        """Means and standard deviations over seeds in percent, one row a trial with its options, the best one first."""
        return self._search.rows()


def search(
    space: Mapping[str, Any], trials: int = 20, *, folder: str | Path | None = None, metric: Literal["ga", "pa"] = "ga",
    search_seed: int = 0, together: int = 1, progress: bool = False,
) -> SearchResults:  # fmt: skip
    """Search options by Optuna's tree-structured Parzen estimator, after ten random trials.

    Args:
      space: options of the command line by their names in Python. A tuple (low, high) or (low, high, "log") are bounds,
        both included; a list or a range are choices, those of `seed` repetitions, over which a trial is a mean.
      trials: suggestions in all; the same call with more of them goes on where this one ended.
      folder: of the sweep that the trials are, where nothing that is finished is run again; None for one below runs/
        that is named by the first of them.
      metric: what is maximised, its best round chosen on the samples that `select_on` names: test or validation.
      search_seed: of the suggestions.
      together: trials that are suggested at once and trained as one program where they can be.
      progress: whether a bar is shown.

    Returns:
      What came of it: the results of a sweep, and the searched options of the best trial.

    Raises:
      UserError: a mistake in the space, a folder that holds other experiments, no trial that ended, or Optuna (the
        extra `search`) is missing.
    """
    arguments = {"trials": trials, "metric": metric, "search_seed": search_seed, "together": together}
    read = {name: convert(SEARCH[name], str(value)) for name, value in arguments.items()}
    console = Console(quiet=not yes_or_no(progress, "progress"))
    results: dict[str, Any] = {}
    where, known = None if folder is None else as_path(folder, "folder"), options_of_grid(space, "space")
    given = {name: ":".join(map(str, x)) if isinstance(x, tuple) else with_commas(x) for name, x in known.items()}
    own = Search(given, results, metric=read["metric"], seed=read["search_seed"])
    if own.on_test:
        warn(ON_TEST)
    steps = own.stages(read["trials"], read["together"])
    return SearchResults(*run_stages(steps, results, where, console=console), results, own)
