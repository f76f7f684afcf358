"""Grids: every combination of the values that options list, and the means of their results over seeds."""

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fedjax_pcdd import methods
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.registry import short_name
from fedjax_pcdd.report.tables import over_seeds
from fedjax_pcdd.training.config import RUN
from fedjax_pcdd.training.fields import Option, members, options_of
from fedjax_pcdd.training.metrics import MEASURES
from fedjax_pcdd.training.options import configure, in_any_case, method_of, own_values
from fedjax_pcdd.training.presets import listed_as, read_preset

# Their commas belong to the value.
WHOLE = ("lr_steps", "models", "track", "loggers", "data_dir", "preset", "split", "variant")
_RANGE = re.compile(r"(\d{1,20})\s*:\s*(\d{1,20})")
MOST = 100_000  # values of an option, and experiments
LONGEST = 230  # bytes of a folder's name: of a lock beside it few file systems take more than 255
SEARCH = {  # what a search takes beside its space
    "trials": Option("trials", int, False, 20, low=1),
    "metric": Option("metric", Literal["ga", "pa"], False, "ga"),
    "together": Option("together", int, False, 1, low=1),
    "search_seed": Option("search_seed", int, False, 0, low=0),
}


class Experiment(NamedTuple):
    """One point of the grid."""

    name: str  # of its folder
    group: str  # what repetitions with other seeds share
    given: dict[str, str]  # options as they are written


def values_of(name: str, text: str, method: str = "") -> list[str]:
    """The values that an option lists, of a method's own one some of which may have commas.

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
        numbers = _range(part) if numeric else None
        if len(values) + (1 if numbers is None else numbers.stop - numbers.start) > MOST:
            raise UserError(f"lists more than {MOST} values: leave some out.", field=name)
        values += [part] if numbers is None else map(str, numbers)
    if not values or "" in values:
        raise UserError(f"`{name}={text}` lists an empty value or range: correct it.")
    distinct: dict[Any, str] = {}
    for one in values:
        distinct.setdefault(_meant(name, one, method), one)
    return list(distinct.values())


def _range(text: str) -> range | None:
    """The integers of FIRST:END; None for another text."""
    written = _RANGE.fullmatch(text)
    return range(int(written[1]), int(written[2])) if written else None


def _meant(name: str, text: str, method: str) -> Any:
    """The value that a text stands for, however it is spelled; what is wrong, of which `configure` tells, as it is."""
    try:
        return own_values({name: text}, method or RUN["method"].default).get(name, text)
    except UserError:
        return text


def expand(given: Mapping[str, str]) -> list[Experiment]:
    """All points of the grid, methods first; an option that no method has is in all, and `configure` refuses it.

    Raises:
      UserError: two of them would have one folder.
    """
    named = values_of("method", given["method"]) if "method" in given else None
    texts = {name: text for name, text in given.items() if name != "method"}
    names = [method_of(given)] if named is None else list(dict.fromkeys(in_any_case(one, METHODS) for one in named))
    short = {method: short_name(method) for method in names}
    short = short if len(set(short.values())) == len(short) else {method: method for method in names}
    owned = {method: set(options_of(methods.get(method))) for method in names}
    some = set().union(*owned.values())
    experiments = []
    for method in names:
        own = {n: values_of(n, text, method) for n, text in texts.items() if n not in some or n in owned[method]}
        if len(experiments) + math.prod(map(len, own.values())) > MOST:
            raise UserError(f"these are more than {MOST} experiments: list fewer values.")
        for point in itertools.product(*own.values()):
            options = dict(zip(own, point, strict=True))
            varied = [name for name in own if len(own[name]) > 1]
            label = [f"{name.replace('_', '-')}={options[name]}" for name in varied if name != "seed"]
            group = "-".join([short[method], *label]).replace("/", "_")
            name = f"{group}-s{options['seed']}" if "seed" in options else group
            experiments.append(Experiment(name, group, {"method": method, **options}))
    _check_names(experiments)
    return experiments


def _check_names(experiments: Sequence[Experiment]) -> None:
    """UserError where two have one folder, or the name of one is too long."""
    known: dict[str, Experiment] = {}
    for one in experiments:
        if len(os.fsencode(one.name)) > LONGEST:
            advice = "vary fewer options at once, or give shorter values"
            raise UserError(
                f"the folder {one.name[:40]}... would have more than {LONGEST} bytes in its name: {advice}."
            )
        if (other := known.setdefault(one.name, one)) is not one:
            pairs = (f"`{n}={x}` and `{n}={one.given[n]}`" for n, x in other.given.items() if x != one.given[n])
            raise UserError(f"{', '.join(pairs)} would share the folder {one.name}: give them in two sweeps.")


def stages(given: Mapping[str, str], results: Mapping[str, Any]) -> Iterator[list[Experiment]]:
    """What is run one after another: the whole grid of the options, or what a preset searches of each method.

    Args:
      given: options as on the command line; a hyper-parameter among them is not searched.
      results: by name, filled with those of a stage before the next is asked for; the best is that of the mean GA,
        on validation samples where the runs are selected by these.
    """
    preset = read_preset(given["preset"]) if "preset" in given else None
    grid = preset.grid if preset else {}
    named = values_of("method", given.get("method", ",".join(grid) or method_of(given)))
    named = list(dict.fromkeys(in_any_case(one, METHODS) for one in named))
    owned = {method: set(options_of(methods.get(method))) for method in named}
    some = set().union(*owned.values())
    grid = {method: grid.get(listed_as(preset, method), {}) for method in named} if preset else {}
    searched = {method: [name for name in grid.get(method, {}) if name not in given] for method in named}
    if not any(searched.values()):
        yield expand(given)
        return
    fixed = {m: {n: x for n, x in given.items() if n in owned[m] or n not in some} | {"method": m} for m in named}
    for depth in range(max(map(len, searched.values()))):
        stage = []
        for method, names in searched.items():
            if depth < len(names):
                stage += expand(fixed[method] | {names[depth]: ",".join(map(str, grid[method][names[depth]]))})
            elif not names and not depth:
                stage += expand(fixed[method])
        yield stage
        chosen_on = configure(stage[0].given)[0].select_on
        measure = "ga_validation_best" if chosen_on == "validation" else "ga_best"
        score = {row["experiment"]: row[measure] or 0.0 for row in summarise(stage, results)}
        for one in sorted(stage, key=lambda one: score[one.group]):  # the best of each method comes last
            name = searched[one.given["method"]][depth : depth + 1]
            fixed[one.given["method"]] |= {n: one.given[n] for n in name}


def summarise(experiments: Sequence[Experiment], results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Mean and standard deviation (of a sample, ddof 1) over the seeds of each group, in percent."""
    rows = []
    for group, repeated in itertools.groupby(sorted(experiments, key=lambda e: e.group), key=lambda e: e.group):
        outcomes = [results[e.name] for e in repeated]
        finished = [r for r in outcomes if isinstance(r, dict)]
        row: dict[str, Any] = {"experiment": group, "seeds": len(finished), "failed": len(outcomes) - len(finished)}
        row["pa_protocol"] = "; ".join(dict.fromkeys(r["pa_protocol"] for r in finished if "pa_protocol" in r))
        for measure in (*MEASURES, "ga_validation_best"):
            cell = over_seeds((r.get(measure) for r in finished), factor=100.0)
            row |= {measure: cell.mean, f"{measure}_std": cell.std}
        rows.append(row)
    return rows
