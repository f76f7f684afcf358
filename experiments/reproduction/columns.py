"""Results as columns: the rows of a paper's table on one split, ours over the seeds beside the printed numbers."""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from fedjax_pcdd.report.expected import PA, Expected, kind
from fedjax_pcdd.report.statistics import Difference, paired
from fedjax_pcdd.report.tables import over_seeds
from fedjax_pcdd.training.progress import pa_epochs, tuned_epochs
from reproduction.verdicts import rank_correlation

BASELINE = "fedavg"
# Metric of the expected tables -> a result's entry with the mean of its last ten rounds, as a share.
LAST_TEN = {"ga_pct": "ga_mean_last10", "ga_fraction": "ga_mean_last10", "pa_pct": "pa_mean_last10"}
FACTORS = {"ga_fraction": 100.0}  # shares are shown in percent
FIRST = "0.1"  # the version of results that do not name theirs

Result = Mapping[str, Any]
Expectations = Mapping[str, Sequence[Expected]]  # by table
Epochs = int | None | tuple[int | None, ...]  # of a row, or of each split that it is the mean of


class Row(NamedTuple):
    """One method or variant with one group of settings.

    Args:
      method, variant: as on the command line; variant "" if there is none.
      settings: settings over the preset that not all rows of its table share, as `ew=4`.
      results: finished, one a seed, in order of the seeds.
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
        """The values of a metric of the expected tables, by seed."""
        factor = FACTORS.get(metric, 1.0)
        return {r["seed"]: factor * r["metrics"][metric] for r in self.results if metric in r["metrics"]}

    def last_ten(self, metric: str) -> dict[int, float]:
        """The mean of the last ten rounds, for an accuracy of the best round, in percent, by seed."""
        name = LAST_TEN.get(metric, "")
        return {r["seed"]: 100.0 * r[name] for r in self.results if r.get(name) is not None}

    def last_pa(self, metric: str = PA) -> dict[int, float]:
        """PA in the last round, in percent, by seed; after fine-tuning where PA is."""
        return {r["seed"]: 100.0 * r["pa_last"] for r in self.results if r.get("pa_last") is not None}

    @property
    def images(self) -> str:
        """The data set or task that it was run on in place of the table's, "" if on the table's."""
        over_preset = self.results[0].get("over_preset", {})
        return over_preset.get("dataset") or over_preset.get("task", "")

    @property
    def tuned(self) -> bool:
        """Whether PA is that of the fine-tuned global model."""
        return tuned_epochs(self.results[0]) is not None

    @property
    def pa_epochs(self) -> Epochs:
        """Local epochs between the server's model and the test of PA."""
        return self.results[0].get("pa_epochs", _pa_epochs(self.results[0]))

    @property
    def versions(self) -> dict[int, str]:
        """The version of the project that ran each seed."""
        return {r["seed"]: r.get("version", FIRST) for r in self.results}

    @property
    def superseded(self) -> dict[str, str]:
        """Options that it was run with, where its preset has changed since."""
        return dict(self.results[0].get("superseded", {}))

    @property
    def processors(self) -> dict[int, str]:
        """The processor that ran each seed."""
        return {r["seed"]: processor(r["machine"]) for r in self.results}

    @property
    def command(self) -> str:
        """The command that repeats the row for all seeds; "" for a mean over splits."""
        by_command: dict[str, list[Result]] = {}
        for result in self.results:
            if text := result.get("command"):
                by_command.setdefault(re.sub(r"--seed=[0-9]+", "--seed=$seed", text), []).append(result)
        return "; ".join(
            group[0]["command"] if len(group) == 1 else f"for seed in {_seeds(group)}; do {text}; done"
            for text, group in by_command.items()
        )


def _pa_epochs(result: Result) -> int | None:
    return pa_epochs(result, result.get("options", {}).get("local_epochs"))


def _seeds(results: Sequence[Result]) -> str:
    return " ".join(str(result["seed"]) for result in results)


class Column(NamedTuple):
    """The rows of one paper's table on one split, at one scale.

    Args:
      scale, table, split: where it belongs; split "" if the preset has none.
      tag: how it departs from the table, "" if it does not.
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
        """The row of a method, or of `method variant`; the first if there are several with other settings."""
        return next((row for row in self.rows if row.name == name), None)

    def over_baseline(self, row: Row, metric: str) -> Difference | None:
        """Paired difference to FedAvg; None for FedAvg itself or without it."""
        base = self.row(BASELINE)
        return None if base is None or row.name == BASELINE else difference(row, base, metric)

    def like_baseline(self, row: Row, metric: str) -> bool:
        """Whether the metric is the same quantity as FedAvg's."""
        base = self.row(BASELINE)
        return base is None or alike(row, base, metric)

    def order(self, metric: str, printed: Mapping[str, float]) -> tuple[float | None, int, tuple[int, ...]]:
        """Rank correlation of our means with the printed numbers, the number of rows, and the seeds.

        The means are over the seeds that all rows have: other seeds have other partitions, some easier than others.
        """
        printed_rows = [(row.values(metric), printed[row.name]) for row in self.rows if row.name in printed]
        rows = [(values, paper) for values, paper in printed_rows if values]
        seeds = sorted(set.intersection(*(set(values) for values, _ in rows))) if rows else []
        means = [(over_seeds(values[seed] for seed in seeds).mean, paper) for values, paper in rows]
        pairs = [(ours, paper) for ours, paper in means if ours is not None]
        return rank_correlation([ours for ours, _ in pairs], [paper for _, paper in pairs]), len(pairs), tuple(seeds)


def alike(one: Row, other: Row, metric: str) -> bool:
    """Whether a metric is the same quantity in both rows: PA follows equally many local epochs."""
    return kind(metric) != kind(PA) or one.pa_epochs == other.pa_epochs


def difference(
    higher: Row, lower: Row, metric: str, *, of: Literal["best", "last ten", "last"] = "best",
    seeds: Container[int] | None = None,
) -> Difference | None:  # fmt: skip
    """The paired difference of two rows, None without a pair.

    A pair is two runs of one seed and of one version of the project: another version may sum in another order, which
    after many rounds moves an accuracy by as much as a setting does. So may another processor, but such pairs are kept
    and counted in `mixed`.

    Args:
      higher, lower: the difference is the first minus the second.
      metric: a metric of the expected tables.
      of: which rounds: the best one, the mean of the last ten, or, of PA, the last one.
      seeds: the seeds to use, by default all.
    """
    read = {"best": Row.values, "last ten": Row.last_ten, "last": Row.last_pa}[of]
    higher_values, lower_values = (read(row, metric) for row in (higher, lower))
    same_version = {seed for seed, version in higher.versions.items() if lower.versions.get(seed) == version}
    counted = [seed for seed in higher_values if seed in same_version and (seeds is None or seed in seeds)]
    delta = paired({seed: higher_values[seed] for seed in counted}, lower_values)
    higher_processors, lower_processors = higher.processors, lower.processors
    return delta and delta._replace(
        mixed=sum(higher_processors[seed] != lower_processors[seed] for seed in delta.seeds)
    )


def processor(machine: Mapping[str, Any]) -> str:
    """The kind of device; for a CPU the kind of its processor, if it is known."""
    return str(machine.get("processor", "cpu") if machine["device"] == "cpu" else machine["device"])


def columns(results: Iterable[Result], expected: Expectations) -> list[Column]:
    """All results as columns by scale, table, split and tag; splits and rows are in the paper's order.

    Args:
      results: as `read_results` gives them.
      expected: by table, for the order of splits and methods.
    """
    members: dict[tuple[str, str, str, str], list[Result]] = {}
    for result in results:
        members.setdefault((result["scale"], result["table"], result["split"] or "", result["tag"]), []).append(result)
    ordered = sorted(members, key=lambda key: _rank(key, expected.get(key[1], ())))
    return [_column(key, members[key], expected.get(key[1], ())) for key in ordered]


def _rank(key: tuple[str, str, str, str], expected: Sequence[Expected]) -> tuple:
    scale, table, split, tag = key
    splits = list(dict.fromkeys(expectation.split for expectation in expected))
    numbers = tuple(int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", table))
    return scale, numbers, tag != "", tag, splits.index(split) if split in splits else len(splits), split


def _column(key: tuple[str, str, str, str], members: Sequence[Result], expected: Sequence[Expected]) -> Column:
    finished = [result for result in members if result["status"] == "finished"]
    shared = common(result["over_preset"] for result in finished)
    rows: dict[tuple[str, str, str], list[Result]] = {}
    for result in sorted(finished, key=lambda result: result["seed"]):
        own_settings = {name: value for name, value in result["over_preset"].items() if name not in shared}
        rows.setdefault((result["method"], result["variant"] or "", in_words(own_settings)), []).append(result)
    order = list(dict.fromkeys((expectation.method, expectation.variant) for expectation in expected))
    names = sorted(rows, key=lambda name: order.index(name[:2]) if name[:2] in order else len(order))
    failed = tuple(result for result in members if result["status"] == "failed")
    return Column(*key, tuple(Row(*name, tuple(rows[name])) for name in names), failed)


def with_means(columns: Sequence[Column], expected: Expectations) -> list[Column]:
    """The columns, and one more for each mean over splits that a paper prints, if these splits share a row."""
    by_key = {(column.scale, column.table, column.split, column.tag): column for column in columns}
    means = []
    for scale, table in dict.fromkeys((column.scale, column.table) for column in columns if not column.tag):
        for split, averaged in {
            expectation.split: expectation.splits for expectation in expected.get(table, ()) if expectation.splits
        }.items():
            members = [by_key[key] for member in averaged if (key := (scale, table, member, "")) in by_key]
            rows = _mean_rows(members) if len(members) == len(averaged) else ()
            means += [Column(scale, table, split, "", rows, ())] if rows else []
    return [*columns, *means]


def _mean_rows(members: Sequence[Column]) -> tuple[Row, ...]:
    """Rows that all splits have, with the seeds that all splits have."""
    rows = []
    for first in members[0].rows:
        same_rows = [row for column in members if (row := column.row(first.name)) is not None]
        by_seed = [{r["seed"]: r for r in row.results} for row in same_rows]
        seeds = sorted(set.intersection(*map(set, by_seed))) if len(same_rows) == len(members) else []
        results = tuple(_mean_result(seed, [results[seed] for results in by_seed]) for seed in seeds)
        rows += [first._replace(results=results)] if results else []
    return tuple(rows)


def _mean_result(seed: int, results: Sequence[Result]) -> Result:
    """A result whose accuracies are the means of these."""
    last = _means([{name: r[name] for name in LAST_TEN.values() if r.get(name) is not None} for r in results])
    version = ", ".join(sorted({r.get("version", FIRST) for r in results}))
    machine = {"device": ", ".join(processor(r["machine"]) for r in results)}
    metrics = _means([r["metrics"] for r in results])
    epochs = tuple(map(_pa_epochs, results))
    return {"seed": seed, "version": version, "machine": machine, "metrics": metrics, "pa_epochs": epochs, **last}


def _means(mappings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The means of the numbers that all mappings have."""
    names = [name for name in mappings[0] if all(name in mapping for mapping in mappings)]
    return {name: sum(mapping[name] for mapping in mappings) / len(mappings) for name in names}


def common(settings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The options that all settings have with the same value."""
    all_settings = list(settings)
    first = all_settings[0] if all_settings else {}
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in all_settings)}


def in_words(settings: Mapping[str, str]) -> str:
    """Options as `ew=4, rounds=30`."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def printed(expected: Sequence[Expected], split: str, metric: str) -> dict[str, float]:
    """The paper's numbers on a split, by `method variant`; shares in percent.

    If the table lacks a mean over domains, it is computed from the numbers of the domains.
    """
    on_split = [expectation for expectation in expected if expectation.split == split]
    of_metric = [expectation for expectation in on_split if expectation.metric == metric]
    if not of_metric and metric.endswith(":mean"):
        of_metric = [expectation for expectation in on_split if kind(expectation.metric) == kind(metric)]
    numbers: dict[str, list[float]] = {}
    for expectation in of_metric:
        if expectation.value is not None:
            numbers.setdefault(f"{expectation.method} {expectation.variant}".rstrip(), []).append(
                FACTORS.get(metric, 1.0) * expectation.value
            )
    return {name: sum(values) / len(values) for name, values in numbers.items()}
