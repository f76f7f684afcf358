"""The leaderboard: every method on the same data with equally many trials, chosen on validation samples.

A cell is a network, a split and a method. The method's trials run with the first seed; the one whose best round is
best on the validation samples, the first of equals, runs with the other seeds. No setting is chosen on test samples,
and a run that diverges is a result. If a method has no global model, GA is the mean of the clients' models, and there
is no GA of the best round, since each client has its own best round by its own tests.
"""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from fedjax_pcdd import __version__, methods
from fedjax_pcdd.analysis.traffic import traffic
from fedjax_pcdd.api.grid import Experiment
from fedjax_pcdd.api.sweep import run_stages
from fedjax_pcdd.engine.executables import compiled_once
from fedjax_pcdd.errors import UserError, is_there, nearest
from fedjax_pcdd.methods.wrappers import with_defaults
from fedjax_pcdd.registry import is_import_path, short_name
from fedjax_pcdd.report.standings import MEASURES, SECONDS
from fedjax_pcdd.training.build import build_model, load, public_outputs
from fedjax_pcdd.training.fields import load_mapping, read_text, write_text
from fedjax_pcdd.training.metrics import DIGITS
from fedjax_pcdd.training.options import configure
from fedjax_pcdd.training.outside import origins_of
from fedjax_pcdd.training.presets import PAPERS
from fedjax_pcdd.training.progress import pa_name

PLAN = PAPERS / "leaderboard.yaml"
KEYS = {  # of every result
    **dict.fromkeys(("network", "split", "method"), str), **dict.fromkeys(("trials", "seeds"), list),
    "chosen": dict | None, "floats": int | float,
}  # fmt: skip
OWN = ("run", "splits", "networks")  # sections that every plan must have; the others default to the packaged plan's
NETWORK = "{network}"  # in a trial: the cell's network, for a method that needs a further model


class Plan(NamedTuple):
    """What is run; options by field name, as in a YAML file."""

    run: dict[str, Any]  # options of every run
    splits: dict[str, dict[str, Any]]  # further options of each split
    networks: list[str]
    seeds: int
    trials: dict[str, list[dict[str, Any]]]  # by method, one's own by its class; "default" for those that are not named
    scores: dict[str, list[str]]  # by method likewise: what a trial is chosen by; later ones break ties
    public: dict[str, dict[str, Any]]  # by data set: options of methods that need public images

    def trials_of(self, method: str, network: str) -> list[dict[str, Any]]:
        """The settings that a method tries on a network."""
        listed = _entry(self.trials, method)
        return [{name: network if value == NETWORK else value for name, value in trial.items()} for trial in listed]

    def scores_of(self, method: str) -> list[str]:
        """Entries of a summary by which a trial is chosen."""
        return _entry(self.scores, method)


def _entry(section: Mapping[str, Any], method: str) -> Any:
    """What a section has for a method: under its name, under that of its class alone, or for those it does not name."""
    return section.get(method, section.get(short_name(method), section["default"]))


class Cell(NamedTuple):
    """One entry of the leaderboard."""

    network: str
    split: str
    method: str

    def path(self, results: Path) -> Path:
        """Path of its result."""
        network, split, method = (n.replace("/", "_") for n in (self.network, self.split, short_name(self.method)))
        return results / network / split / f"{method}.json"


def read_plan(path: Path = PLAN) -> Plan:
    """Read a plan from a YAML file; `seeds`, `trials`, `scores` and `public` default to the packaged plan's.

    Raises:
      UserError: the file is no valid plan.
    """
    sections = load_mapping(read_text(path), str(path))
    for name in OWN:
        if name not in sections:
            raise UserError(f"{path} needs a section '{name}': compare it with {PLAN}.")
    for name in sections:
        if name not in Plan._fields:
            raise UserError(f"unknown section '{name}' in {path}: it has {', '.join(Plan._fields)}.")
    packaged = {} if path == PLAN else read_plan()._asdict()
    plan = Plan(**{**packaged, **sections})
    _check_kinds(plan, path)
    for name in ("trials", "scores"):
        if "default" not in getattr(plan, name):
            raise UserError(f"'{name}' in {path} needs an entry 'default', for methods that it does not name.")
    number = len(plan.trials["default"])
    if other := [name for name, listed in plan.trials.items() if len(listed) != number]:
        has = f"'{other[0]}' has {len(plan.trials[other[0]])} and 'default' {number}"
        raise UserError(f"'trials' in {path} must list as many settings for each method: {has}.")
    for name, split in plan.splits.items():
        run_options = {**plan.run, **split}
        if run_options.get("select_on") != "validation" or not run_options.get("validation"):
            raise UserError(f"{path} chooses nothing on '{name}': give `validation` and `select_on: validation`.")
    return plan


def check_names(plan: Plan, given: Sequence[str], with_results: Sequence[str], path: Path) -> None:
    """UserError for trials or scores of a name that no method has, such as that of the decorator in a given file."""
    own = {name for method in (*given, *with_results) for name in (method, short_name(method))}
    known = {"default", *own, *methods.METHODS}
    by_file = [methods.METHODS.find(plain) for name in given if is_import_path(plain := methods.plain_name(name))]
    for section in ("trials", "scores"):
        for name in getattr(plan, section):
            plain = methods.plain_name(name)
            decorated = name not in own and plain in methods.METHODS and methods.METHODS.find(plain) in by_file
            if decorated or not (name in known or plain in known or is_import_path(plain)):
                hint = nearest(name, sorted(known - {plain}))
                raise UserError(
                    f"'{section}' in {path} names no method by '{name}': {hint} One of your own has the name of its "
                    "class, as Mine of mine.py:Mine."
                )


def _check_kinds(plan: Plan, path: Path) -> None:
    for name in ("run", "splits", "trials", "scores", "public"):
        if not isinstance(getattr(plan, name), dict):
            raise UserError(f"'{name}' in {path} must be a mapping.")
    for name, settings in (("splits", plan.splits), ("public", plan.public)):
        if wrong := [key for key, section in settings.items() if not isinstance(section, dict)]:
            raise UserError(f"'{wrong[0]}' of '{name}' in {path} must be a mapping of options.")
    for name, kind, what in (("trials", dict, "mappings of options"), ("scores", str, "entries of a run's summary")):
        for method, listed in getattr(plan, name).items():
            if not (isinstance(listed, list) and listed and all(isinstance(item, kind) for item in listed)):
                raise UserError(f"the {name} of '{method}' in {path} must be a list of {what}.")
    mappings = [plan.run, plan.splits, plan.trials, plan.scores, *plan.splits.values(), *plan.public.values()]
    mappings += chain(*plan.trials.values())
    names = [*chain(*mappings), *(plan.networks if isinstance(plan.networks, list) else ())]
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise UserError(f"{path} has '{wrong[0]}' in place of a name: put it in quotes.")
    if not (isinstance(plan.networks, list) and plan.networks and plan.splits):
        raise UserError(f"{path} must list at least one network and one split.")
    if type(plan.seeds) is not int or plan.seeds < 1:
        raise UserError(f"'seeds' in {path} must be a number of seeds, at least 1.")


def options(plan: Plan, cell: Cell, trial: Mapping[str, Any], seed: int, more: Mapping[str, str]) -> dict[str, str]:
    """The options of one run, as on the command line."""
    needs_public = with_defaults(methods.get(cell.method)).traits().needs_public
    return _settings(plan, cell, trial, public=needs_public) | {"seed": str(seed)} | dict(more)


def _settings(plan: Plan, cell: Cell, trial: Mapping[str, Any], *, public: bool) -> dict[str, str]:
    """The options without the seed; `public` adds those of methods that need public images."""
    split = plan.splits[cell.split]
    public_options = plan.public.get(str(split.get("dataset")), {}) if public else {}
    settings = {"method": cell.method, "model": cell.network, **plan.run, **split, **public_options, **trial}
    return {name: str(value) for name, value in settings.items()}


def _command(settings: Mapping[str, str]) -> str:
    words = [f"--{name.replace('_', '-')}={text}" for name, text in settings.items()]
    return shlex.join(["fedjax-pcdd", "sweep", *words])


@compiled_once()
def run_cell(plan: Plan, cell: Cell, runs: Path, more: Mapping[str, str], console: Console) -> dict[str, Any]:
    """Run a cell, or continue it where it stopped, in a folder below `runs`, and return its result.

    `more` are options of every run that do not change its result, such as the folder of the data sets.
    """
    trials, folder = plan.trials_of(cell.method, cell.network), cell.path(runs).with_suffix("")
    trial_results = _run(plan, cell, [(i, 0) for i in range(len(trials))], folder, more, console)
    names = plan.scores_of(cell.method)
    best = _best(trial_results, names)
    finished = isinstance(trial_results[best], dict)
    other_seeds = [(best, seed) for seed in range(1, plan.seeds)] if finished else []
    seed_results = [trial_results[best], *_run(plan, cell, other_seeds, folder, more, console)] if finished else []
    return {
        **cell._asdict(),
        "trials": [
            {"options": trial, "score": result.get(names[0]), **{name: result.get(name) for name in names[1:]}}
            if isinstance(result, dict) else {"options": trial, "failed": _told(result, folder)}
            for trial, result in zip(trials, trial_results, strict=True)
        ],
        "global_model": with_defaults(methods.get(cell.method)).traits().global_model,
        "chosen": trials[best] if finished else None,
        "seeds": [
            {"seed": seed, **{name: result.get(name) for name in (*MEASURES, SECONDS)}}
            if isinstance(result, dict) else {"seed": seed, "failed": _told(result, folder)}
            for seed, result in enumerate(seed_results)
        ],
        "pa": next((pa_name(result) for result in seed_results if isinstance(result, dict)), None),
        "floats": sent(plan, cell, trials[best], more),
        "command": _command(options(plan, cell, trials[best], 0, {}) | {"seed": f"0:{plan.seeds}"}),
        **({"outside": outside} if (outside := _outside(plan, cell)) else {}),
        "version": __version__,
        "host": next((result["platform"] for result in seed_results if isinstance(result, dict)), None),
    }  # fmt: skip


def _best(trial_results: Sequence[dict[str, Any] | UserError], score_names: Sequence[str]) -> int:
    """Index of the trial with the largest scores, the first of equals; failed trials rank last.

    Raises:
      UserError: a trial that did not fail lacks a score.
    """
    for result in trial_results:
        if missing := [name for name in score_names if isinstance(result, dict) and result.get(name) is None]:
            raise UserError(f"a run has no '{missing[0]}' in its summary: name another entry in the plan's `scores`.")
    failed = dict.fromkeys(score_names, -math.inf)
    results = [result if isinstance(result, dict) else failed for result in trial_results]
    scores = [[round(result[name], DIGITS) for name in score_names] for result in results]
    return scores.index(max(scores))


def _told(error: UserError, folder: Path) -> str:
    """Why a run failed, without the path of the runs."""
    return error.sentence.replace(f"{folder}/", "")


def _run(
    plan: Plan, cell: Cell, points: Sequence[tuple[int, int]], folder: Path, more: Mapping[str, str], console: Console
) -> list[dict[str, Any] | UserError]:
    trials = plan.trials_of(cell.method, cell.network)
    names = [f"trial{i}-s{seed}" for i, seed in points]
    run_options = [options(plan, cell, trials[i], seed, more) for i, seed in points]
    stage, results = [Experiment(name, name, given) for name, given in zip(names, run_options, strict=True)], {}
    run_stages([stage], results, folder, console=console, failed=lambda *_: None, say=lambda _: None)
    return [results[name] for name in names]


def sent(plan: Plan, cell: Cell, trial: Mapping[str, Any], more: Mapping[str, str]) -> int:
    """Number of scalars that a client and the server send each other in a round."""
    config, method = configure(options(plan, cell, trial, 0, more))
    dataset = load(config)
    model, shape = build_model(config, cell.network, dataset), dataset.x_train.shape[1:]
    counts = traffic(method, model, shape, public_outputs(config, method))
    return counts.up + counts.down


def read_results(results: Path) -> list[dict[str, Any]]:
    """All results below a folder, [] if it does not exist; UserError for a file that holds no result."""
    return [_read_result(path) for path in sorted(results.glob("*/*/[!.]*.json"))]


def _read_result(path: Path) -> dict[str, Any]:
    try:
        result = json.loads(read_text(path))
    except ValueError as error:
        raise UserError(f"{path} is damaged: remove it, and its cell is run again.") from error
    if not isinstance(result, dict) or not _is_result(result):
        raise UserError(f"{path} is not a result of the leaderboard: remove it, or choose another `results`.")
    return result


def _is_result(result: Mapping[str, Any]) -> bool:
    return (
        all(name in result and isinstance(result[name], kind) for name, kind in KEYS.items())
        and all(isinstance(entry, dict) for entry in (*result["trials"], *result["seeds"]))
        and all(isinstance(seed.get(x), int | float | None) for seed in result["seeds"] for x in (*MEASURES, SECONDS))
    )


def has_result(plan: Plan, cell: Cell, results: Path) -> bool:
    """Whether a cell has a result; UserError if its file holds that of another cell or plan."""
    path = cell.path(results)
    if not is_there(path):
        return False
    result = _read_result(path)
    if (other := result["method"]) != cell.method:
        raise UserError(f"{path} is of `method={other}`: rename one of the classes, or choose another `results`.")
    if cell_of(result) != cell:
        raise UserError(f"{path} is of another network or split: rename one, or choose another `results`.")
    check_plan(plan, result, path)
    if result.get("outside", {}) != _outside(plan, cell):
        raise UserError(
            f"{path} was made with another content of {cell.method}: remove it and its runs, or choose another "
            "`results` and `runs_dir`."
        )
    return True


def _outside(plan: Plan, cell: Cell) -> dict[str, str]:
    """SHA-256 of the files that define the external parts of a cell, by the names of the parts."""
    config, _ = configure(options(plan, cell, plan.trials_of(cell.method, cell.network)[0], 0, {}))
    return {name: origin.sha256 for name, origin in origins_of(config).items()}


def cell_of(result: Mapping[str, Any]) -> Cell:
    """The cell that a result belongs to."""
    return Cell(*(result[name] for name in Cell._fields))


def check_plan(plan: Plan, result: Mapping[str, Any], path: Path) -> None:
    """UserError if a result, whose network and split the plan has, tried or ran something else than the plan does.

    The method need not be available, so whether it needs public images is unknown and both commands are accepted.
    """
    cell = cell_of(result)
    trials = plan.trials_of(cell.method, cell.network)
    tried_options = [trial.get("options") for trial in result["trials"]]
    chosen = trials[0] if result["chosen"] is None else result["chosen"]
    seed_range = {"seed": f"0:{plan.seeds}"}
    commands = [_command(_settings(plan, cell, chosen, public=public) | seed_range) for public in (False, True)]
    if tried_options != trials or result.get("command") not in commands:
        raise UserError(f"{path} was made with another plan: choose another `results`, or remove it.")


def write_result(result: Mapping[str, Any], path: Path) -> None:
    """Write a result whole or not at all; UserError if it cannot be written."""
    write_text(path, json.dumps(result, indent=1) + "\n", "another `results`")
