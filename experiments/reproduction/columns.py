"""Results as columns: the rows of a paper's table on one split, ours over the seeds beside the printed numbers."""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_pcdd.report.expected import Expected, kind
from fedjax_pcdd.report.statistics import Difference, paired
from fedjax_pcdd.report.tables import over_seeds
from reproduction.verdicts import rank_correlation

BASELINE = "fedavg"
# Metric of the expected tables -> entry of a result with the mean of its last ten rounds, as a share.
LAST_TEN = {"ga_pct": "ga_mean_last10", "ga_fraction": "ga_mean_last10", "pa_pct": "pa_mean_last10"}
FACTORS = {"ga_fraction": 100.0}  # shares are shown in percent
FIRST = "0.1"  # the version of results that name none

Result = Mapping[str, Any]
Expectations = Mapping[str, Sequence[Expected]]  # by table


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
    def versions(self) -> dict[int, str]:
        """Of the project that ran each seed."""
        return {r["seed"]: r.get("version", FIRST) for r in self.results}

    @property
    def superseded(self) -> dict[str, str]:
        """Options that it was run with and that its preset no longer has."""
        return dict(self.results[0].get("superseded", {}))

    @property
    def processors(self) -> dict[int, str]:
        """That ran each seed."""
        return {r["seed"]: processor(r["machine"]) for r in self.results}

    @property
    def command(self) -> str:
        """What repeats it, all seeds; "" for a mean over splits."""
        alike: dict[str, list[Result]] = {}
        for one in self.results:
            if text := one.get("command"):
                alike.setdefault(re.sub(r"--seed=[0-9]+", "--seed=$seed", text), []).append(one)
        return "; ".join(
            own[0]["command"] if len(own) == 1 else f"for seed in {_seeds(own)}; do {text}; done"
            for text, own in alike.items()
        )


def _seeds(several: Sequence[Result]) -> str:
    return " ".join(str(one["seed"]) for one in several)


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

    def over_baseline(self, row: Row, metric: str) -> Difference | None:
        """Paired difference to FedAvg; None for FedAvg itself or without it."""
        base = self.row(BASELINE)
        return None if base is None or row.name == BASELINE else difference(row, base, metric)

    def order(self, metric: str, printed: Mapping[str, float]) -> tuple[float | None, int, tuple[int, ...]]:
        """Rank correlation of our means with the printed numbers, over how many rows, and of which seeds.

        The means are over the seeds that all rows have: other seeds have other partitions, some easier than others.
        """
        known = [(row.values(metric), printed[row.name]) for row in self.rows if row.name in printed]
        rows = [(values, paper) for values, paper in known if values]
        seeds = sorted(set.intersection(*(set(values) for values, _ in rows))) if rows else []
        means = [(over_seeds(values[seed] for seed in seeds).mean, paper) for values, paper in rows]
        pairs = [(ours, paper) for ours, paper in means if ours is not None]
        return rank_correlation([ours for ours, _ in pairs], [paper for _, paper in pairs]), len(pairs), tuple(seeds)


def difference(
    higher: Row, lower: Row, metric: str, *, last_ten: bool = False, seeds: Container[int] | None = None
) -> Difference | None:
    """The paired difference of two rows, None without a pair.

    A pair are two runs of one seed and of one version of the project: another version may sum in another order, which
    after many rounds moves an accuracy by as much as a setting does. So may another processor: such pairs are counted.

    Args:
      higher, lower: the difference is the first less the second.
      metric: of the expected tables.
      last_ten: take the mean of the last ten rounds.
      seeds: those that count, by default all.
    """
    ours, theirs = (row.last_ten(metric) if last_ten else row.values(metric) for row in (higher, lower))
    alike = {seed for seed, version in higher.versions.items() if lower.versions.get(seed) == version}
    counted = [seed for seed in ours if seed in alike and (seeds is None or seed in seeds)]
    delta = paired({seed: ours[seed] for seed in counted}, theirs)
    first, second = higher.processors, lower.processors
    return delta and delta._replace(mixed=sum(first[seed] != second[seed] for seed in delta.seeds))


def processor(machine: Mapping[str, Any]) -> str:
    """The kind of device, of a CPU that of its processor where it is known."""
    return str(machine.get("processor", "cpu") if machine["device"] == "cpu" else machine["device"])


def columns(results: Iterable[Result], expected: Expectations) -> list[Column]:
    """All results by scale, table, split and tag, in the order of their paths but rows in the paper's.

    Args:
      results: as `read_results` gives them.
      expected: by table, for the order of splits and methods.
    """
    members: dict[tuple[str, str, str, str], list[Result]] = {}
    for one in results:
        members.setdefault((one["scale"], one["table"], one["split"] or "", one["tag"]), []).append(one)
    ordered = sorted(members, key=lambda key: _rank(key, expected.get(key[1], ())))
    return [_column(key, members[key], expected.get(key[1], ())) for key in ordered]


def _rank(key: tuple[str, str, str, str], expected: Sequence[Expected]) -> tuple:
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


def with_means(columns: Sequence[Column], expected: Expectations) -> list[Column]:
    """Beside the columns one for each mean over splits that a paper prints, where these have a row in common."""
    known = {(one.scale, one.table, one.split, one.tag): one for one in columns}
    means = []
    for scale, table in dict.fromkeys((one.scale, one.table) for one in columns if not one.tag):
        for split, parts in {one.split: one.splits for one in expected.get(table, ()) if one.splits}.items():
            members = [known[key] for part in parts if (key := (scale, table, part, "")) in known]
            rows = _mean_rows(members) if len(members) == len(parts) else ()
            means += [Column(scale, table, split, "", rows, ())] if rows else []
    return [*columns, *means]


def _mean_rows(members: Sequence[Column]) -> tuple[Row, ...]:
    """Rows that all splits have, with the seeds that all splits have."""
    rows = []
    for first in members[0].rows:
        same = [row for one in members if (row := one.row(first.name)) is not None]
        by_seed = [{r["seed"]: r for r in row.results} for row in same]
        seeds = sorted(set.intersection(*map(set, by_seed))) if len(same) == len(members) else []
        results = tuple(_mean_result(seed, [results[seed] for results in by_seed]) for seed in seeds)
        rows += [first._replace(results=results)] if results else []
    return tuple(rows)


def _mean_result(seed: int, results: Sequence[Result]) -> Result:
    """A result whose accuracies are the means of these."""
    last = _means([{name: r[name] for name in LAST_TEN.values() if r.get(name) is not None} for r in results])
    version = ", ".join(sorted({r.get("version", FIRST) for r in results}))
    machine = {"device": ", ".join(processor(r["machine"]) for r in results)}
    metrics = _means([r["metrics"] for r in results])
    return {"seed": seed, "version": version, "machine": machine, "metrics": metrics, **last}


def _means(mappings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the numbers that all have."""
    names = [name for name in mappings[0] if all(name in one for one in mappings)]
    return {name: sum(one[name] for one in mappings) / len(mappings) for name in names}


def common(settings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The options that all have with the same value."""
    every = list(settings)
    first = every[0] if every else {}
    return {name: value for name, value in first.items() if all(one.get(name) == value for one in every)}


def in_words(settings: Mapping[str, str]) -> str:
    """Options as `ew=4, rounds=30`."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def printed(expected: Sequence[Expected], split: str, metric: str) -> dict[str, float]:
    """The paper's numbers on a split, by `method variant`; shares in percent.

    A mean over domains that a table has not is the mean of the numbers that it has for them.
    """
    own = [one for one in expected if one.split == split]
    same = [one for one in own if one.metric == metric]
    if not same and metric.endswith(":mean"):
        same = [one for one in own if kind(one.metric) == kind(metric)]
    numbers: dict[str, list[float]] = {}
    for one in same:
        if one.value is not None:
            numbers.setdefault(f"{one.method} {one.variant}".rstrip(), []).append(FACTORS.get(metric, 1.0) * one.value)
    return {name: sum(several) / len(several) for name, several in numbers.items()}
