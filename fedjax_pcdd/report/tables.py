"""Tables of means over seeds, beside the papers' numbers.

Accuracies are in percent but where a paper prints shares. A standard deviation is that of a sample (n - 1).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.report.expected import (
    EIGENVALUES,
    HEADINGS,
    SUMMARY_VALUES,
    TARGET_METRICS,
    TITLES,
    Expected,
    kind,
    measured,
)
from fedjax_pcdd.report.grouping import Group, label, shared
from fedjax_pcdd.report.targets import BEST, REFERENCE, RULES, Rule, reached

# Columns of a group's own table: entry of summary.json, heading, factor.
COLUMNS = (
    ("ga_best", "GA best", 100.0),
    ("ga_last", "GA last", 100.0),
    ("ga_mean_last10", "GA mean of last 10", 100.0),
    ("pa_best", "PA best", 100.0),
    ("pa_last", "PA last", 100.0),
    ("seconds_per_round", "s a round", 1.0),
)
# Entry of summary.json -> heading, for those that are accuracies.
ACCURACIES = {name: heading for name, heading, _ in COLUMNS if name != "seconds_per_round"}
TARGET_COLUMNS = ("rounds to target", "speed-up")
NOT_RANKED = ("seconds_per_round",)
LOWER_IS_BETTER = ("rounds_to_target", EIGENVALUES)


@dataclass(frozen=True)
class Cell:
    """One number of a table.

    Args:
      mean, std: over `seeds` runs; std None for fewer than two.
      paper, paper_std: what the paper prints.
      rank: 1 for the best of its column, 2 for the second best, else 0.
      note: the caveat of the paper's number.
      missed: how many of the seeds never reached the target; then there is no mean.
      paper_missed: whether the paper says that of its own.
    """

    mean: float | None = None
    std: float | None = None
    seeds: int = 0
    paper: float | None = None
    paper_std: float | None = None
    rank: int = 0
    note: str = ""
    missed: int = 0
    paper_missed: bool = False

    @property
    def difference(self) -> float | None:
        """Ours less the paper's."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper


@dataclass(frozen=True)
class Row:
    """One experiment, `cells` in the order of the columns."""

    method: str
    variant: str
    settings: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """Experiments down, columns across; `metrics` names the metric of each column."""

    title: str
    columns: tuple[str, ...]
    metrics: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""

    @property
    def shared(self) -> str:
        """Settings that all experiments with numbers of their own have."""
        return shared(row.settings for row in self.rows if any(one.mean is not None for one in row.cells))

    @property
    def labels(self) -> list[str]:
        """The name of each row, without the shared settings."""
        return [label(row.method, row.variant, row.settings, self.shared) for row in self.rows]

    @property
    def remarks(self) -> str:
        """What to print above it: how all runs differ from the preset, and the note."""
        return " ".join(
            filter(None, [f"Not as the preset in all runs: {self.shared}." if self.shared else "", self.note])
        )


def cell(values: Iterable[float | None]) -> Cell:
    """Mean and deviation of the values that are there.

    >>> cell([1.0, None, 3.0]) == Cell(mean=2.0, std=2**0.5, seeds=2)
    True
    """
    known = np.array([value for value in values if value is not None], float)
    if not len(known):
        return Cell()
    return Cell(float(known.mean()), float(known.std(ddof=1)) if len(known) > 1 else None, len(known))


def target_cells(runs: Sequence[RunRecord], references: Sequence[RunRecord], rule: Rule) -> tuple[Cell, Cell]:
    """Rounds to the target and speed-up over seeds; no mean where one of them never reached it."""
    found = [one for run in runs if (one := reached(run, references, rule)) is not None]
    missed = sum(rounds is None for rounds, _ in found)
    if missed:
        never = Cell(seeds=len(found), missed=missed)
        return never, never
    return cell(rounds for rounds, _ in found), cell(faster for _, faster in found)


def own_table(group: Group) -> Table:
    """Best and last of GA and PA of each experiment of a group, its seconds a round, and speed-ups over FedAvg."""
    targets = REFERENCE in (entry.method for entry in group.entries) and len(group.entries) > 1
    rule = RULES.get(group.preset or "", BEST)
    rows = []
    for entry in group.entries:
        cells = tuple(
            cell(_scaled((run.summary or {}).get(name), factor) for run in entry.runs) for name, _, factor in COLUMNS
        )
        if targets:
            known = [(one.method, one.settings, one.runs) for one in group.entries]
            cells += target_cells(entry.runs, _references(known, entry.settings), rule)
        rows.append(Row(entry.method, entry.variant, entry.settings, cells))
    headings = tuple(heading for _, heading, _ in COLUMNS) + TARGET_COLUMNS * targets
    metrics = tuple(name for name, _, _ in COLUMNS) + TARGET_METRICS * targets
    note = " ".join([_protocols(group), *[_note(TARGET_METRICS[0], rule)] * targets]).strip()
    return _marked(Table(group.title, headings, metrics, tuple(rows), note))


def _references(known: Iterable[tuple[str, str, Sequence[RunRecord]]], settings: str) -> list[RunRecord]:
    """FedAvg's among runs with their method and settings, first those with the same settings."""
    found = [(own != settings, runs) for method, own, runs in known if method == REFERENCE]
    return [run for _, runs in sorted(found, key=lambda one: one[0]) for run in runs]


def _protocols(group: Group) -> str:
    """How PA was measured, and of which experiments where that differs."""
    found: dict[str, list[str]] = {}
    for name, entry in zip(group.labels, group.entries, strict=True):
        for protocol in dict.fromkeys((run.summary or {}).get("pa_protocol") for run in entry.runs):
            if protocol is not None:
                found.setdefault(protocol, []).append(name)
    said = [f"{how} ({', '.join(names)})" if len(found) > 1 else how for how, names in found.items()]
    return f"PA: {'; '.join(said)}." if said else ""


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else factor * value


def paper_tables(preset: str, groups: Sequence[Group], expected: Sequence[Expected]) -> list[Table]:
    """The tables of a paper, one a metric: methods down, splits across, of which at least one was run.

    Args:
      preset: as `fedmr/table1`.
      groups: those of this preset.
      expected: what the paper prints there.
    """
    runs = {
        (entry.method, entry.variant, entry.settings, group.split): entry.runs
        for group in groups
        for entry in group.entries
    }
    numbers = {(one.split, one.metric, one.method, one.variant): one for one in expected}
    tables = []
    for title in dict.fromkeys(TITLES.get(kind(one.metric)) for one in expected):
        columns = _columns(title, expected, {group.split for group in groups}) if title else {}
        if columns:
            tables.append(_paper_table(preset, columns, runs, numbers))
    return tables


def _columns(title: str, expected: Sequence[Expected], splits: set) -> dict[tuple[str, str], tuple[str, ...]]:
    """(split, metric) of a table's columns -> the splits that it is the mean of."""
    return {
        (one.split, one.metric): one.splits or (one.split,)
        for one in expected
        if TITLES.get(kind(one.metric)) == title and splits.issuperset(one.splits or (one.split,))
    }


def _paper_table(preset: str, columns: Mapping, runs: Mapping, numbers: Mapping) -> Table:
    rule = RULES.get(preset, BEST)
    rows = []
    for method, variant, settings in _row_names(columns, runs, numbers):
        cells = []
        for (split, metric), parts in columns.items():
            printed = numbers.get((split, metric, method, variant))
            several = [runs.get((method, variant, settings, part), ()) for part in parts]
            if metric in TARGET_METRICS:
                known = [(key[0], key[2], found) for key, found in runs.items() if key[3] == split]
                ours = target_cells(several[0], _references(known, settings), rule)[TARGET_METRICS.index(metric)]
            else:
                ours = _over(parts, metric, several)
            cells.append(ours if printed is None else _beside(ours, printed))
        rows.append(Row(method, variant, settings, tuple(cells)))
    headings = tuple(" ".join(filter(None, (split, _heading(metric)))) for split, metric in columns)
    metrics = tuple(metric for _, metric in columns)
    name = kind(metrics[0])
    return _marked(Table(f"{preset}: {TITLES[name]}", headings, metrics, tuple(rows), _note(name, rule)))


def _heading(metric: str) -> str:
    return HEADINGS.get(metric, metric.partition(":")[2])


def _beside(ours: Cell, printed: Expected) -> Cell:
    missed = printed.value is None and printed.metric in TARGET_METRICS
    return replace(ours, paper=printed.value, paper_std=printed.std, note=printed.note, paper_missed=missed)


def _row_names(columns: Mapping, runs: Mapping, numbers: Mapping) -> list[tuple[str, str, str]]:
    """Methods in the paper's order, then ours alone; each with the settings that were run, if any."""
    parts = {part for several in columns.values() for part in several}
    ours = dict.fromkeys(key[:3] for key in runs if key[3] in parts)
    printed = dict.fromkeys(key[2:] for key in numbers if key[:2] in columns)
    ordered = dict.fromkeys([*printed, *(key[:2] for key in ours)])
    found = []
    for names in ordered:
        found += [key for key in ours if key[:2] == names] or [(*names, "")]
    return found


def _over(parts: Sequence[str], metric: str, runs: Sequence[Sequence[RunRecord]]) -> Cell:
    """Over the seeds: of one split, or of the mean over splits where a seed was run on all of them."""
    found = [{run.seed: measured(run, metric) for run in several} for several in runs]
    values = ([value for part in found if (value := part.get(seed)) is not None] for seed in found[0])
    return cell(sum(known) / len(parts) for known in values if len(known) == len(parts))


def _note(name: str, rule: Rule) -> str:
    if name in TARGET_METRICS:
        return f"{rule.sentence} /: not reached, by at least one seed."
    if name == EIGENVALUES:
        return "Of the features of test images after the last round, of runs with --track=spectrum alone."
    if name not in SUMMARY_VALUES or name in NOT_RANKED:
        return ""
    return "Best round, chosen on the test data as in the papers, which flatters every number."


def _marked(table: Table) -> Table:
    """The table with the best and second best of each column; nothing is marked among fewer than two."""
    ranks = [_ranks([row.cells[c].mean for row in table.rows], m) for c, m in enumerate(table.metrics)]
    rows = tuple(
        replace(row, cells=tuple(replace(one, rank=ranks[c][r]) for c, one in enumerate(row.cells)))
        for r, row in enumerate(table.rows)
    )
    return replace(table, rows=rows)


def _ranks(means: Sequence[float | None], metric: str) -> list[int]:
    """1 for the best, 2 for the next, equal ones alike, else 0."""
    known = sorted({mean for mean in means if mean is not None}, reverse=metric not in LOWER_IS_BETTER)
    several = sum(mean is not None for mean in means) > 1
    marks = {value: place + 1 for place, value in enumerate(known[:2])} if several and metric not in NOT_RANKED else {}
    return [0 if mean is None else marks.get(mean, 0) for mean in means]
