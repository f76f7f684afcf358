"""The leaderboard's results as tables, and as accuracies for `analysis.ranks`.

A result is a mapping as `api.leaderboard.read_results` returns it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np

from fedjax_pcdd.registry import short_name
from fedjax_pcdd.report.tables import Cell, Column, Row, Table, over_seeds, ranked

GA = {"ga_best": "GA best", "ga_last": "GA last", "ga_mean_last10": "GA, last 10"}
PA = {"pa_best": "PA best", "pa_std": "spread of PA", "pa_worst10": "PA, worst tenth"}
MEASURES = (*GA, *PA)
SECONDS = "seconds_per_round"
LOCAL = "*"  # after the name of a method without a global model


def brief(whole: Table) -> Table:
    """The columns that fit on a console: best rounds, the last ten, what was chosen, and failures if there are any."""
    endings = ("best", GA["ga_mean_last10"], "chosen")
    fits = [column.heading.endswith(endings) for column in whole.columns]
    fits[-1] = any(row.cells[-1].text for row in whole.rows)
    rows = tuple(row._replace(cells=tuple(compress(row.cells, fits))) for row in whole.rows)
    return replace(whole, columns=tuple(compress(whole.columns, fits)), rows=rows)


def table(network: str, split: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """All methods of a network and a split, by the mean GA of the last ten rounds; those with failed seeds last."""
    cell_results = [result for result in results if (result["network"], result["split"]) == (network, split)]
    moments = [pa for pa in dict.fromkeys(result.get("pa", "PA") for result in cell_results) if pa]
    measures = {("", name): heading for name, heading in GA.items()}
    measures |= {(pa, name): heading.replace("PA", pa) for pa in moments for name, heading in PA.items()}
    rows: dict[tuple[bool, float, str], Row] = {}
    for result in cell_results:
        cells = [_accuracy(result, *measure) for measure in measures]
        if not result.get("global_model", True):
            cells[0] = Cell()
        seconds = over_seeds(seed.get(SECONDS) for seed in result["seeds"])
        chosen = ", ".join(f"{name} {value}" for name, value in (result["chosen"] or {}).items())
        failed = any("failed" in seed for seed in result["seeds"]) or not result["seeds"]
        rows[failed, -(cells[2].mean or 0.0), result["method"]] = Row(label(result), (
            *cells, seconds, Cell(result["floats"]), Cell(text=chosen), Cell(text=_failures(result)),
        ))  # fmt: skip
    columns = (
        *(Column(text, digits=1, best=0 if name == "pa_std" else 1) for (_, name), text in measures.items()),
        Column("seconds a round"), Column("floats sent", digits=0), Column("chosen", left=True), Column("", left=True),
    )  # fmt: skip
    finished = ranked(Table(f"{split}, {network}", columns, tuple(rows[key] for key in sorted(rows) if not key[0])))
    return replace(finished, rows=(*finished.rows, *(rows[key] for key in sorted(rows) if key[0])))


def label(result: Mapping[str, Any]) -> str:
    """The name of a method, with a mark if it has no global model."""
    return short_name(result["method"]) + (LOCAL if not result.get("global_model", True) else "")


def _accuracy(result: Mapping[str, Any], moment: str, name: str) -> Cell:
    """A measure over seeds in percent; empty for a PA that was measured at another moment."""
    seeds = result["seeds"] if moment in ("", result.get("pa", "PA")) else ()
    return over_seeds((seed.get(name) for seed in seeds), factor=100.0)


def _failures(result: Mapping[str, Any]) -> str:
    counts = {kind: sum("failed" in run for run in result[kind]) for kind in ("trials", "seeds")}
    return "; ".join(f"{n} of {len(result[kind])} {kind} failed" for kind, n in counts.items() if n)


def over_splits(
    results: Sequence[Mapping[str, Any]], cells: Sequence[tuple[str, str, str]]
) -> tuple[list[str], list[str], np.ndarray, list[str]]:
    """Mean GA of the last ten rounds, for `ranks`, of the methods that have a result of all seeds on every split.

    Args:
      cells: network, split and method of the plan, of one network; splits on which none of its methods has a result
        are left out.

    Returns:
      M methods, B splits, accuracies [M, B, seeds], -inf for a run that failed, and the methods that lack a result.
    """
    by_cell = {(result["network"], result["split"], result["method"]): result for result in results}
    pairs = list(dict.fromkeys(cell[:2] for cell in cells if cell in by_cell))
    split_results = [result for result in results if (result["network"], result["split"]) in pairs]
    method_names = dict.fromkeys(result["method"] for result in split_results)
    num_seeds = max((len(result["seeds"]) for result in split_results), default=1)
    names = [
        name for name in method_names
        if all((result := by_cell.get((*pair, name))) and len(result["seeds"]) in (0, num_seeds) for pair in pairs)
    ]  # fmt: skip
    scores = [[_scores(by_cell[*pair, name], num_seeds) for pair in pairs] for name in names]
    accuracies = np.reshape(np.array(scores), (len(names), len(pairs), num_seeds))
    lacking = [name for name in method_names if name not in names]
    return [label(by_cell[*pairs[0], name]) for name in names], [split for _, split in pairs], accuracies, lacking


def _scores(result: Mapping[str, Any], seeds: int) -> list[float]:
    """GA of the last ten rounds of each seed, -inf for one that failed, and for all where every trial did."""
    values = [-np.inf if run.get("ga_mean_last10") is None else run["ga_mean_last10"] for run in result["seeds"]]
    return values or [-np.inf] * seeds
