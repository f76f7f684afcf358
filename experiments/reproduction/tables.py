"""Results as tables: the rows of a paper's table on one split, ours over the seeds beside the printed numbers."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_pcdd.report.expected import Expected
from reproduction.statistics import Difference, difference, rank_correlation

BASELINE = "fedavg"
# Metric of the expected tables -> entry of a result with the mean of its last ten rounds, as a share.
LAST_TEN = {"ga_pct": "ga_mean_last10", "ga_fraction": "ga_mean_last10", "pa_pct": "pa_mean_last10"}
FACTORS = {"ga_fraction": 100.0}  # shares are shown in percent

Result = Mapping[str, Any]


class Row(NamedTuple):
    """One method or variant with one group of settings.

    Args:
      method, variant: as on the command line, variant "" without.
      settings: what it has over the preset that others in its table have not, as `ew=4`.
      results: finished, one a seed, by rising seed.
    """

    method: str
    variant: str
    settings: str
    results: tuple[Result, ...]

    @property
    def name(self) -> str:
        """Method and variant."""
        return f"{self.method} {self.variant}".rstrip()

    @property
    def label(self) -> str:
        """Method, variant and settings."""
        return f"{self.name} ({self.settings})" if self.settings else self.name

    def values(self, metric: str) -> dict[int, float]:
        """What it has for a metric of the expected tables, by seed."""
        factor = FACTORS.get(metric, 1.0)
        return {r["seed"]: factor * r["metrics"][metric] for r in self.results if metric in r["metrics"]}

    def last_ten(self, metric: str) -> dict[int, float]:
        """The mean of the last ten rounds in place of an accuracy of the best one, in percent, by seed."""
        name = LAST_TEN.get(metric, "")
        return {r["seed"]: 100.0 * r[name] for r in self.results if r.get(name) is not None}

    @property
    def command(self) -> str:
        """What repeats it, all seeds."""
        one = self.results[0]["command"]
        if len(self.results) == 1:
            return one
        seeds = " ".join(str(r["seed"]) for r in self.results)
        return f"for seed in {seeds}; do {re.sub(r'--seed=[0-9]+', '--seed=$seed', one)}; done"


class Column(NamedTuple):
    """The rows of one paper's table on one split, at one scale.

    Args:
      scale, table, split: where it belongs; split "" where the preset has none.
      tag: how it departs from the table, "" where it does not.
      rows: in the paper's order.
      failed: results of cells that did not reach their end.
    """

    scale: str
    table: str
    split: str
    tag: str
    rows: tuple[Row, ...]
    failed: tuple[Result, ...]

    def row(self, name: str) -> Row | None:
        """The row of a method, or of `method variant`; the first where there are several with other settings."""
        return next((row for row in self.rows if row.name == name), None)

    def over_baseline(self, row: Row, metric: str, *, last_ten: bool = False) -> Difference | None:
        """Paired difference to FedAvg; None for FedAvg itself or without it."""
        base = self.row(BASELINE)
        if base is None or row.name == base.name:
            return None
        if last_ten:
            return difference(row.last_ten(metric), base.last_ten(metric))
        return difference(row.values(metric), base.values(metric))

    def order(self, metric: str, printed: Mapping[str, float]) -> tuple[float | None, int]:
        """Rank correlation of our means with the printed numbers, and over how many rows."""
        pairs = [
            (float(np.mean(list(values.values()))), printed[row.name])
            for row in self.rows
            if (values := row.values(metric)) and row.name in printed
        ]
        return rank_correlation([ours for ours, _ in pairs], [paper for _, paper in pairs]), len(pairs)


def columns(results: Iterable[Result], expected: Mapping[str, Sequence[Expected]]) -> list[Column]:
    """All results by scale, table, split and tag, in the order of their paths but rows in the paper's.

    Args:
      results: as `read_results` gives them.
      expected: by table, for the order of splits and methods.
    """
    found: dict[tuple[str, str, str, str], list[Result]] = {}
    for one in results:
        found.setdefault((one["scale"], one["table"], one["split"] or "", one["tag"]), []).append(one)
    ordered = sorted(found, key=lambda key: _place(key, expected.get(key[1], ())))
    return [_column(key, found[key], expected.get(key[1], ())) for key in ordered]


def _place(key: tuple[str, str, str, str], expected: Sequence[Expected]) -> tuple:
    scale, table, split, tag = key
    splits = list(dict.fromkeys(one.split for one in expected))
    numbers = tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", table))
    return scale, numbers, tag != "", tag, splits.index(split) if split in splits else len(splits), split


def _column(key: tuple[str, str, str, str], members: Sequence[Result], expected: Sequence[Expected]) -> Column:
    done = [one for one in members if one["status"] == "finished"]
    shared = common(one["over_preset"] for one in done)
    rows: dict[tuple[str, str, str], list[Result]] = {}
    for one in sorted(done, key=lambda one: one["seed"]):
        own = {name: value for name, value in one["over_preset"].items() if name not in shared}
        rows.setdefault((one["method"], one["variant"] or "", in_words(own)), []).append(one)
    order = list(dict.fromkeys((one.method, one.variant) for one in expected))
    names = sorted(rows, key=lambda name: order.index(name[:2]) if name[:2] in order else len(order))
    failed = tuple(one for one in members if one["status"] == "failed")
    return Column(*key, tuple(Row(*name, tuple(rows[name])) for name in names), failed)


def common(settings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The options that all have with the same value."""
    every = list(settings)
    first = every[0] if every else {}
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in every)}


def in_words(settings: Mapping[str, str]) -> str:
    """Options as `ew=4, rounds=30`."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def printed(expected: Sequence[Expected], split: str, metric: str) -> dict[str, float]:
    """The paper's numbers on a split, by `method variant`; shares in percent."""
    return {
        f"{one.method} {one.variant}".rstrip(): FACTORS.get(metric, 1.0) * one.value
        for one in expected
        if one.split == split and one.metric == metric and one.value is not None
    }
