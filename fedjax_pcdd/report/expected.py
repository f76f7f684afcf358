"""The papers' numbers, and the corresponding values of a run."""

import csv
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

from fedjax_pcdd.data.domains import TASKS
from fedjax_pcdd.errors import is_there
from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.training.presets import PAPERS, read_preset

EXPECTED = PAPERS / "expected"
FLATTERED = "Best round, chosen on the test data as in the papers, which flatters every number."


class Metric(NamedTuple):
    """A metric of the expected tables."""

    title: str  # of its table; metrics with the same title share one
    entry: str = ""  # of summary.json; "" if it is recorded elsewhere
    factor: float = 1.0  # what turns the entry into the metric's unit
    heading: str = ""  # of its column beside the split
    digits: int = 2  # after the point
    best: int = 1  # 1 if the largest is the best, -1 if the smallest is, 0 if it depends on the machine
    note: str = ""  # what to know about its table


EIGENVALUES = "eigenvalue_variance"  # of the global model's features after the last round, where they were tracked
TARGET_METRICS = ("rounds_to_target", "speedup")  # see targets.py
PA, PA_LAST = "pa_pct", "pa_last_pct"  # the second beside the first, if the protocol of PA chooses on tests
METRICS = {
    "ga_pct": Metric("generic accuracy (GA), best round, %", "ga_best", 100.0, note=FLATTERED),
    "pa_pct": Metric("personal accuracy (PA), best round, %", "pa_best", 100.0, note=FLATTERED),
    PA_LAST: Metric("personal accuracy (PA), best round, %", "pa_last_best", 100.0, heading="last", note=FLATTERED),
    "ga_fraction": Metric("generic accuracy (GA), best round, share", "ga_best", digits=4, note=FLATTERED),
    "seconds_per_round": Metric("seconds a round, on other machines than the paper's", "seconds_per_round", best=0),
    "compute_seconds": Metric("seconds of training a round, on other machines", "seconds_local", best=0),
    "inter_top1_pct": Metric("inter-domain accuracy, last round, %"),
    "intra_top1_pct": Metric("intra-domain accuracy, last round, %"),
    "inter_top5_pct": Metric("inter-domain top-5 accuracy, last round, %"),
    "intra_top5_pct": Metric("intra-domain top-5 accuracy, last round, %"),
    EIGENVALUES: Metric(
        "variance of the 50 largest eigenvalues", digits=1, best=-1,
        note="Of the features of test images after the last round, of runs that tracked the spectrum alone.",
    ),
    "rounds_to_target": Metric("rounds to FedAvg's accuracy, and speed-up", heading="rounds", digits=0, best=-1),
    "speedup": Metric("rounds to FedAvg's accuracy, and speed-up", heading="speed-up"),
}  # fmt: skip


class Expected(NamedTuple):
    """One printed number; `splits` are those that it is the mean of, () if it is no mean."""

    split: str
    method: str
    variant: str
    metric: str
    value: float | None
    std: float | None
    note: str
    splits: tuple[str, ...]


def read_expected(folder: Path, preset: str) -> list[Expected]:
    """What the paper prints in the table of a preset, [] if nothing is recorded; presets are beside the folder."""
    path = folder / f"{preset.replace('/', '_')}.csv"
    if not is_there(path):
        return []
    presets = folder.parent / "presets"
    splits = read_preset(preset, presets).splits if (presets / f"{preset}.yaml").is_file() else ()
    with open(path, newline="", encoding="utf-8") as file:
        return [_expected(row, splits) for row in csv.DictReader(file)]


def _expected(row: dict[str, str], splits: Container[str]) -> Expected:
    """A line of a table whose preset has these splits; a mean of something else, as of domains, is only a note."""
    first_note = row["note"].split(";")[0]
    split_names = tuple(first_note.removeprefix("mean of ").split()) if first_note.startswith("mean of ") else ()
    splits_of_mean = split_names if all(part in splits for part in split_names) else ()
    value, std = (float(row[name]) if row[name] else None for name in ("value", "std"))
    return Expected(row["split"], row["method"], row["variant"], row["metric"], value, std, row["note"], splits_of_mean)


def kind(metric: str) -> str:
    """A metric without its domain.

    >>> kind("inter_top1_pct:mnist")
    'inter_top1_pct'
    """
    return metric.partition(":")[0]


def title(metric: str) -> str | None:
    """Title of the table that a metric belongs to; None if no run folder has it."""
    return METRICS[kind(metric)].title if kind(metric) in METRICS else None


def measured(run: RunRecord, metric: str) -> float | None:
    """The value of a finished run for a metric of the expected tables, in its unit; None if it has none."""
    if metric == EIGENVALUES:
        row = run.tracked[-1] if run.tracked else {}
        spectrum = (row.get("spectrum") or {}).get("global") or {}
        return spectrum.get("variance") if row.get("round") == run.rounds_done else None
    if "_top" in metric:
        return _of_domain(run, metric)
    properties = METRICS.get(metric)
    value = run.result.get(properties.entry) if properties else None
    return None if properties is None or value is None else properties.factor * value


def _of_domain(run: RunRecord, metric: str) -> float | None:
    name, _, domain = metric.partition(":")
    scope, top, _ = name.split("_")
    if domain == "mean":
        value = run.rows[-1].get(f"{scope}_{top}") if run.rows else None
        return None if value is None else 100 * value
    summary, recipe = run.result, TASKS.get(str(run.config["task"]))
    if recipe is None or top != f"top{recipe.top}" or domain not in summary.get("domains", ()):
        return None
    return 100 * summary[scope][summary["domains"].index(domain)]
