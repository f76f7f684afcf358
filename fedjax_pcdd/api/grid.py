"""Grids: every combination of the values that options list, and the means of their results over seeds."""

import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fedjax_pcdd import methods
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.registry import short_name
from fedjax_pcdd.report.tables import over_seeds
from fedjax_pcdd.training.config import RUN
from fedjax_pcdd.training.fields import Option, members, options_of
from fedjax_pcdd.training.metrics import DIGITS, MEASURES, chosen_by
from fedjax_pcdd.training.options import configure, in_any_case, method_of, own_values
from fedjax_pcdd.training.presets import listed_as, read_preset

# Options whose commas belong to the value.
WHOLE = ("lr_steps", "models", "track", "loggers", "data_dir", "preset", "split", "variant")
_RANGE = re.compile(r"(\d{1,20})\s*:\s*(\d{1,20})")
MOST = 100_000  # limit on the values of an option, and on the experiments
LONGEST = 230  # bytes of a folder's name: that of the lock beside it is longer, and few file systems take more than 255
SEARCH = {  # options of a search beside its space
    "trials": Option("trials", int, False, 20, low=1),
    "metric": Option("metric", Literal["ga", "pa"], False, "ga"),
    "together": Option("together", int, False, 1, low=1),
    "search_seed": Option("search_seed", int, False, 0, low=0),
}


class Experiment(NamedTuple):
    """One point of the grid."""

    name: str  # of its folder
    group: str  # shared by repetitions with other seeds
    given: dict[str, str]  # options as written
    earlier: str | None = None  # name of the folder of the same run, if another grid began it


def values_of(name: str, text: str, method: str = "") -> list[str]:
    """The values that an option lists; some options, a method's own among them, have commas within a value.

    >>> values_of("seed", "0:3")
    ['0', '1', '2']
    >>> values_of("seed", "0:3,2")
    ['0', '1', '2']
    >>> values_of("beta", "0.1,0.5,0.10")
    ['0.1', '0.5']
    >>> values_of("models", "mlp,simple_cnn")
    ['mlp,simple_cnn']
    >>> values_of("layers", "head,backbone/fc2", "fedper"), values_of("layers", "0,1", "fedgela")
    (['head,backbone/fc2'], ['0', '1'])
    """
    option = (options_of(methods.get(method)) if method else {}).get(name) or RUN.get(name)
    if name in WHOLE or (option is not None and option.several):
        return [text]
    numeric = option is None or not {int, float}.isdisjoint(members(option.kind))
    values: list[str] = []
    for part in map(str.strip, text.split(",")):
        bounds = _RANGE.fullmatch(part) if numeric else None
        first, end = (int(bounds[1]), int(bounds[2])) if bounds else (0, 1)
        if len(values) + end - first > MOST:
            raise UserError(f"lists more than {MOST} values: leave some out.", field=name)
        values += map(str, range(first, end)) if bounds else [part]
    if not values or "" in values:
        raise UserError(f"`{name}={text}` lists an empty value or range: correct it.")
    distinct: dict[Any, str] = {}
    for value in values:
        distinct.setdefault(_meant(name, value, method), value)
    return list(distinct.values())


def _meant(name: str, text: str, method: str) -> Any:
    """The value that a text stands for, however it is spelled; a wrong text, which `configure` refuses, as it is."""
    try:
        return own_values({name: text}, method or RUN["method"].default).get(name, text)
    except UserError:
        return text


def expand(given: Mapping[str, str], named: Iterable[str] = ()) -> list[Experiment]:
    """All points of the grid, methods first; an option that no method has goes to all, and `configure` refuses it.

    Args:
      given: options as on the command line.
      named: options that belong to the experiments' names although they have one value.

    Raises:
      UserError: two of them would share a folder.
    """
    listed = values_of("method", given["method"]) if "method" in given else None
    texts = {name: text for name, text in given.items() if name != "method"}
    names = [method_of(given)] if listed is None else list(dict.fromkeys(in_any_case(name, METHODS) for name in listed))
    short = {method: short_name(method) for method in names}
    short = short if len(set(short.values())) == len(short) else {method: method for method in names}
    experiments = []
    for method, own_texts in _divided(texts, names).items():
        values = {n: values_of(n, text, method) for n, text in own_texts.items()}
        if len(experiments) + math.prod(map(len, values.values())) > MOST:
            raise UserError(f"these are more than {MOST} experiments: list fewer values.")
        for point in itertools.product(*values.values()):
            options = dict(zip(values, point, strict=True))
            varied = [name for name in values if len(values[name]) > 1 or name in named]
            label = [f"{name.replace('_', '-')}={options[name]}" for name in varied if name != "seed"]
            group = "-".join([short[method], *label]).replace("/", "_")
            name = f"{group}-s{options['seed']}" if "seed" in options else group
            experiments.append(Experiment(name, group, {"method": method, **options}))
    _check_names(experiments)
    return experiments


def _divided(given: Mapping[str, str], names: Iterable[str]) -> dict[str, dict[str, str]]:
    """By method the options that go to it: all except those that only others of these methods have."""
    owned = {method: set(options_of(methods.get(method))) for method in names}
    owned_by_any = set().union(*owned.values())
    return {m: {n: x for n, x in given.items() if n in owned[m] or n not in owned_by_any} for m in owned}


def _check_names(experiments: Sequence[Experiment]) -> None:
    """UserError if two experiments would share a folder, or if the name of a folder is too long."""
    by_name: dict[str, Experiment] = {}
    for experiment in experiments:
        if len(os.fsencode(experiment.name)) > LONGEST:
            advice = "vary fewer options at once, or give shorter values"
            raise UserError(
                f"the folder {experiment.name[:40]}... would have more than {LONGEST} bytes in its name: {advice}."
            )
        if (other := by_name.setdefault(experiment.name, experiment)) is not experiment:
            pairs = (
                f"`{n}={x}` and `{n}={experiment.given[n]}`" for n, x in other.given.items() if x != experiment.given[n]
            )
            raise UserError(f"{', '.join(pairs)} would share the folder {experiment.name}: give them in two sweeps.")


def methods_of(given: Mapping[str, str]) -> list[str]:
    """The methods of a sweep: those given, else those that its preset searches, else the one of `method_of`."""
    searched = read_preset(given["preset"]).grid if "preset" in given else {}
    names = values_of("method", given.get("method", ",".join(searched) or method_of(given)))
    return list(dict.fromkeys(in_any_case(name, METHODS) for name in names))


def stages(given: Mapping[str, str], results: Mapping[str, Any]) -> Iterator[list[Experiment]]:
    """Yield the stages of a sweep: the whole grid, or one for each hyper-parameter that a preset searches, in order.

    Args:
      given: options as on the command line; a hyper-parameter among them is not searched.
      results: by experiment name; the caller adds those of a stage before it requests the next. The best value is that
        with the highest mean GA, on validation samples if these select the runs' best rounds.
    """
    preset, method_names = read_preset(given["preset"]) if "preset" in given else None, methods_of(given)
    grid = {method: preset.grid.get(listed_as(preset, method), {}) for method in method_names} if preset else {}
    searched = {method: [name for name in grid.get(method, {}) if name not in given] for method in method_names}
    if not any(searched.values()):
        yield expand(given)
        return
    if several := next((name for name in ("select_on", "select_by") if "," in given.get(name, "")), None):
        raise UserError("chooses the rounds that a search compares: give one value.", field=several)
    fixed = {method: own | {"method": method} for method, own in _divided(given, method_names).items()}
    for depth in range(max(map(len, searched.values()))):
        stage = []
        for method, names in searched.items():
            if depth < len(names):
                searching = {names[depth]: ",".join(map(str, grid[method][names[depth]]))}
                stage += expand(fixed[method] | searching, names[:depth])
            elif not names and not depth:
                stage += expand(fixed[method])
        yield stage
        chosen_on = configure(stage[0].given)[0].select_on
        measure = "ga_validation_best" if chosen_on == "validation" else "ga_best"
        rows = summarise(stage, results)
        shares = {row["experiment"]: row["seeds"] / (row["seeds"] + row["failed"]) for row in rows}  # a failure is 0
        score = {(name := row["experiment"]): round((row[measure] or 0.0) * shares[name], DIGITS) for row in rows}
        for method, names in searched.items():
            if depth < len(names):  # of equal ones the first
                best = max((e for e in stage if e.given["method"] == method), key=lambda e: score[e.group])
                fixed[method][names[depth]] = best.given[names[depth]]


def summarise(experiments: Sequence[Experiment], results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Mean and standard deviation (of a sample, ddof 1) over the seeds of each group, in percent."""
    rows = []
    for group, repeated in itertools.groupby(sorted(experiments, key=lambda e: e.group), key=lambda e: e.group):
        outcomes = [results[e.name] for e in repeated]
        finished = [r for r in outcomes if isinstance(r, dict)]
        row: dict[str, Any] = {"experiment": group, "seeds": len(finished), "failed": len(outcomes) - len(finished)}
        row["without_pa"] = sum("diverged_client" in r for r in finished)  # means of PA are over the others
        row["selected_on"] = chosen_by(finished)
        row["pa_protocol"] = "; ".join(dict.fromkeys(r["pa_protocol"] for r in finished if "pa_protocol" in r))
        for measure in (*MEASURES, "ga_validation_best"):
            cell = over_seeds((r.get(measure) for r in finished), factor=100.0)
            row |= {measure: cell.mean, f"{measure}_std": cell.std}
        rows.append(row)
    return rows
