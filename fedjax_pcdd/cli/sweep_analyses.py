"""Analyses of sweeps over a hyper-parameter: accuracies against E_W, the best values beside the printed ones."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedjax_pcdd.analysis.pictures import draw_bilateral
from fedjax_pcdd.cli.analysis_text import Options, number, partition_of, printed, table
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.report.grouping import differing, listed_by, newest, of_common_seeds
from fedjax_pcdd.report.tables import Cell, over_seeds, shown
from fedjax_pcdd.report.targets import REFERENCE
from fedjax_pcdd.training.config import RUN
from fedjax_pcdd.training.metrics import DIGITS, selection
from fedjax_pcdd.training.progress import with_pa_named


def bilateral(records: list[RunRecord], given: Options) -> str:
    """GA and PA against E_W (FedGELA, Figure 4)."""
    groups, fedavg = _by_ew(records)
    if not groups:
        raise UserError("none of these runs has an E_W: sweep `ew=1,4,16` of fedgela.")
    curves = {key: {ew: _over_seeds(by_ew[ew]) for ew in sorted(by_ew)} for key, by_ew in groups.items()}
    means = {setting: _over_seeds(runs) for setting, runs in fedavg.items()}
    labels = {key: f"{key[0]} ({key[1]})" if key[1] else key[0] for key in groups}
    swept = [run for by_ew in groups.values() for runs in by_ew.values() for run in runs]
    fedavg_runs = [run for runs in fedavg.values() for run in runs]
    pa, reference = (with_pa_named("PA", [run.result for run in runs]) for runs in (swept, fedavg_runs))
    fedavg_pa = "FedAvg" if reference == pa else f"FedAvg, {reference}"
    if "output" in given:
        references = {labels[k]: [cell.mean or 0.0 for cell in means[k[0]]] for k in groups if k[0] in means}
        numbers = {
            labels[key]: np.array(
                [[ew, *(x or 0.0 for cell in cells for x in (cell.mean, cell.std))] for ew, cells in curve.items()]
            )
            for key, curve in curves.items()
        }
        draw_bilateral(numbers, references, given["output"], pa=pa, reference=fedavg_pa)
    cells = [(labels[key], f"{ew:g}", *ga_and_pa) for key, curve in curves.items() for ew, ga_and_pa in curve.items()]
    cells += [(name, fedavg_pa, *(replace(cell, std=None) for cell in ga_and_pa)) for name, ga_and_pa in means.items()]
    lines = [[label, at, shown(ga_cell), shown(pa_cell), str(ga_cell.n)] for label, at, ga_cell, pa_cell in cells]
    by = " or ".join(dict.fromkeys(selection(record.result) for record in records))
    return table(["", "E_W", f"GA best on {by} (%)", f"{pa} best on {by} (%)", "seeds"], lines)


def _over_seeds(runs: Sequence[RunRecord]) -> tuple[Cell, Cell]:
    """GA and PA in percent, of the newest run of each seed."""
    summaries = [run.result for run in newest(runs)]
    ga, pa = (over_seeds((summary[name] for summary in summaries), factor=100.0) for name in ("ga_best", "pa_best"))
    return ga, pa


def _ew(record: RunRecord) -> float | None:
    return record.resolved.get("hyperparameters", {}).get("ew")


def _by_ew(
    records: list[RunRecord],
) -> tuple[dict[tuple[str, str], dict[float, list[RunRecord]]], dict[str, list[RunRecord]]]:
    """Runs with each E_W, by partition (with the run options that differ) and own settings; FedAvg's by partition."""
    groups: dict[tuple[str, str], dict[float, list[RunRecord]]] = {}
    fedavg: dict[str, list[RunRecord]] = {}
    of_partition = {"method", "dataset", "partition", "beta", "classes_per_client", "clients"}
    varied = [name for name in differing([r.config for r in records]) if name in RUN and name not in of_partition]
    swept = listed_by((run.method, run.config) for run in records if _ew(run) is not None)
    excluded = {*RUN, "ew", "scale"}
    method_options = {method: [n for n in differing(x) if n not in excluded] for method, x in swept.items()}
    for record in records:
        ew, summary = _ew(record), record.result
        if None in (summary.get("ga_best"), summary.get("pa_best")) or (ew is None and record.method != REFERENCE):
            continue
        setting = ", ".join([partition_of(record), *(f"{name}={record.config.get(name)}" for name in varied)])
        if ew is None:
            fedavg.setdefault(setting, []).append(record)
            continue
        parts = [record.method] * (len(method_options) > 1)
        parts += [f"{n}={record.config.get(n)}" for n in method_options[record.method]]
        parts += ["linear"] * (record.resolved["hyperparameters"].get("scale") == "linear")
        groups.setdefault((setting, ", ".join(parts)), {}).setdefault(ew, []).append(record)
    return groups, fedavg


def grid(records: list[RunRecord], given: Options) -> str:
    """The best weights of a search beside the printed ones (FedMR, Tables 9 and 10)."""
    cells = listed_by(((r.resolved.get("split") or partition_of(r), r.method), r) for r in records)
    lines = []
    for (split, method), method_runs in cells.items():
        if unknown := [run for run in method_runs if "hyperparameters" not in run.resolved]:
            raise UserError(f"{unknown[0].path / 'resolved.json'} has no hyper-parameters: leave the run out.")
        hyperparameters = [run.resolved["hyperparameters"] for run in method_runs]
        for name in [n for n in hyperparameters[0] if len({str(h.get(n)) for h in hyperparameters}) > 1]:
            searched, sets = _searched([run for run in method_runs if _is_measured(run, name)], name)
            if not searched:
                continue
            held_out = all(run.result.get("selected_on") == "validation" for runs in searched.values() for run in runs)
            means = _means(searched, "ga_best")
            scores = _means(searched, "ga_validation_best") if held_out else means
            best = max(scores, key=lambda value: round(scores[value], DIGITS))
            paper = printed(method_runs[0], name)
            gain = 100 * (means[best] - means[paper]) if paper in means else None
            best_text = number(best) if isinstance(best, int | float) else str(best)
            numbers = [best_text, "validation" if held_out else "test", f"{100 * means[best]:.2f}"]
            which = name if sets == 1 else f"{name} (largest of {sets} sets of runs)"
            seeds = str(len(searched[best]))
            lines.append([split, method, which, *numbers, seeds, number(paper), number(gain)])
    if not lines:
        raise UserError(
            "no runs of one method and one seed differ in a single hyper-parameter: name those of a sweep over it."
        )
    heads = ["split", "method", "", "best", "chosen on", "GA best (%)", "seeds", "paper", "GA over the paper's"]
    return table(heads, lines)


def _is_measured(run: RunRecord, name: str) -> bool:
    """Whether a run has a value of a hyper-parameter and a best GA; stderr names one that has not."""
    if name in run.resolved["hyperparameters"] and run.result.get("ga_best") is not None:
        return True
    print(f"left out: {run.path} has no {name}, or no best GA.", file=sys.stderr)
    return False


def _means(runs_by_value: dict[Any, list[RunRecord]], measure: str) -> dict[Any, float]:
    """Means over the runs of an entry of the summaries, by the values of a hyper-parameter."""
    return {value: float(np.mean([run.result[measure] for run in runs])) for value, runs in runs_by_value.items()}


def _searched(records: list[RunRecord], name: str) -> tuple[dict[Any, list[RunRecord]], int]:
    """The largest set of runs that differ in one hyper-parameter (and the seed), and in no other option.

    Returns:
      Runs of the set by the value of the hyper-parameter, all of the same seeds; {} if no value has another beside it.
      Then the number of such sets.
    """
    sets: dict[str, dict[Any, list[RunRecord]]] = {}
    other_options = [option for option in differing([record.settings for record in records]) if option != name]
    for record in records:
        members = sets.setdefault(str([record.settings.get(option) for option in other_options]), {})
        members.setdefault(record.resolved["hyperparameters"][name], []).append(record)
    compared = [paired for members in sets.values() if len(members) > 1 and (paired := of_common_seeds(members))]
    return max(compared, key=lambda members: sum(map(len, members.values())), default={}), len(compared)
