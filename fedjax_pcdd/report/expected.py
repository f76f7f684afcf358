"""The papers' numbers, and what a run has in their place."""

import csv
from pathlib import Path
from typing import NamedTuple

from fedjax_pcdd.data.recipes import TASKS
from fedjax_pcdd.report.collect import RunRecord

# Metric of the expected tables -> entry of summary.json and its factor. Papers report the best round.
SUMMARY_VALUES = {
    "ga_pct": ("ga_best", 100.0),
    "pa_pct": ("pa_best", 100.0),
    "ga_fraction": ("ga_best", 1.0),
    "seconds_per_round": ("seconds_per_round", 1.0),
}
DOMAIN_METRICS = ("inter_top1_pct", "intra_top1_pct", "inter_top5_pct", "intra_top5_pct")
EIGENVALUES = "eigenvalue_variance"  # of the global model's features after the last round, by `track=spectrum`
TARGET_METRICS = ("rounds_to_target", "speedup")  # see targets.py
NOT_RANKED = ("seconds_per_round",)
LOWER_IS_BETTER = ("rounds_to_target", EIGENVALUES)
# Metrics with the same title share a table.
TITLES = {
    "ga_pct": "generic accuracy (GA), best round, %",
    "pa_pct": "personal accuracy (PA), best round, %",
    "ga_fraction": "generic accuracy (GA), best round, share",
    "seconds_per_round": "seconds a round, on other machines than the paper's",
    "inter_top1_pct": "inter-domain accuracy, last round, %",
    "intra_top1_pct": "intra-domain accuracy, last round, %",
    "inter_top5_pct": "inter-domain top-5 accuracy, last round, %",
    "intra_top5_pct": "intra-domain top-5 accuracy, last round, %",
    EIGENVALUES: "variance of the 50 largest eigenvalues",
    "rounds_to_target": "rounds to FedAvg's accuracy, and speed-up",
    "speedup": "rounds to FedAvg's accuracy, and speed-up",
}
# How a column is called beside its split, and digits after the point where they are not 2.
HEADINGS = {"rounds_to_target": "rounds", "speedup": "speed-up"}
DIGITS = {"ga_fraction": 4, EIGENVALUES: 1, "rounds_to_target": 0}


class Expected(NamedTuple):
    """One printed number; `splits` are those that it is the mean of, () for a number of its own."""

    split: str
    method: str
    variant: str
    metric: str
    value: float | None
    std: float | None
    note: str
    splits: tuple[str, ...]


def read_expected(folder: Path, preset: str) -> list[Expected]:
    """What the paper prints in the table of a preset, [] where nothing is recorded."""
    path = folder / f"{preset.replace('/', '_')}.csv"
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return [_expected(row) for row in csv.DictReader(file)]


def _expected(row: dict[str, str]) -> Expected:
    first = row["note"].split(";")[0]
    splits = tuple(first.removeprefix("mean of ").split()) if first.startswith("mean of ") else ()
    value, std = (float(row[name]) if row[name] else None for name in ("value", "std"))
    return Expected(row["split"], row["method"], row["variant"], row["metric"], value, std, row["note"], splits)


def kind(metric: str) -> str:
    """A metric without its domain.

    >>> kind("inter_top1_pct:mnist")
    'inter_top1_pct'
    """
    return metric.partition(":")[0]


def measured(run: RunRecord, metric: str) -> float | None:
    """What a finished run has for a metric of the expected tables, in its unit; None where it has nothing."""
    if kind(metric) in DOMAIN_METRICS:
        return _of_domain(run, metric)
    if metric == EIGENVALUES:
        return _of_spectrum(run)
    name, factor = SUMMARY_VALUES.get(metric, ("", 1.0))
    value = (run.summary or {}).get(name)
    return None if value is None else factor * value


def _of_spectrum(run: RunRecord) -> float | None:
    row = run.tracked[-1] if run.tracked else {}
    spectrum = (row.get("spectrum") or {}).get("global") or {}
    return spectrum.get("variance") if row.get("round") == run.rounds_done else None


def _of_domain(run: RunRecord, metric: str) -> float | None:
    name, _, domain = metric.partition(":")
    which, top, _ = name.split("_")
    if domain == "mean":
        value = run.rows[-1].get(f"{which}_{top}") if run.rows else None
        return None if value is None else 100 * value
    summary, recipe = run.summary or {}, TASKS.get(str(run.config["task"]))
    if recipe is None or top != f"top{recipe.top}" or domain not in summary.get("domains", ()):
        return None
    return 100 * summary[which][summary["domains"].index(domain)]
