"""The tables of a report: each group's own, and the papers' with our means over seeds beside the printed numbers.

Accuracies are in percent but where a paper prints shares. A standard deviation is that of a sample (n - 1).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.report.expected import (
    FLATTERED,
    METRICS,
    PA,
    PA_LAST,
    TARGET_METRICS,
    Expected,
    Metric,
    kind,
    measured,
    title,
)
from fedjax_pcdd.report.grouping import Group, Names, counted, differing, label, shared
from fedjax_pcdd.report.tables import Cell, Column, Row, Table, over_seeds, ranked
from fedjax_pcdd.report.targets import BEST, REFERENCE, RULES, Rule, reached
from fedjax_pcdd.training.progress import IN_TRAINING, pa_entries, pa_names, with_pa_named
from fedjax_pcdd.training.protocols import needs_epochs

# Entry of summary.json -> heading, for those that are accuracies.
ACCURACIES = {
    "ga_best": "GA best",
    "ga_last": "GA last",
    "ga_mean_last10": "GA mean of last 10",
    "pa_best": "PA best",
    "pa_last": "PA last",
}
SPREAD = {"pa_std": "PA std over clients", "pa_worst10": "PA of the worst tenth"}
SECONDS = "seconds_per_round"
HELD_OUT = "Best round, chosen by validation samples that are kept out of training."
MISSED = "/: not reached, by at least one seed."

Runs = Sequence[RunRecord]
Key = tuple[str, str]  # split and metric of a printed number


class Accuracy(NamedTuple):
    """A column of accuracies."""

    heading: str
    entry: str  # of summary.json
    moment: str = ""  # what PA is called that is measured then; "" for GA


def own_table(group: Group) -> Table:
    """Best and last of GA and PA of each experiment of a group, its seconds a round, and speed-ups over FedAvg."""
    known = [(entry.names, entry.runs) for entry in group.entries]
    targets = REFERENCE in (method for (method, _, _), _ in known) and len(known) > 1
    rule = RULES.get(group.preset or "", BEST)
    summaries = [run.result for _, runs in known for run in runs]
    accuracies = _accuracies(summaries)
    columns = [Column(one.heading, one.entry, best=1) for one in accuracies]
    spread = {n: heading for n, heading in SPREAD.items() if any(one.get(n) is not None for one in summaries)}
    columns += [Column(heading, name, best=-1 if name == "pa_std" else 1) for name, heading in spread.items()]
    columns.append(Column("s a round", SECONDS))
    if targets:
        columns += [_column(TARGET_METRICS[0], "rounds to target"), _column(TARGET_METRICS[1], "speed-up")]
    rows = {}
    for names, runs in known:
        rows[names] = [_accuracy(runs, one) for one in accuracies]
        rows[names] += [_of_summary(runs, name, 100.0) for name in spread]
        rows[names].append(_of_summary(runs, SECONDS, 1.0))
        if targets:
            rows[names] += target_cells(runs, _references(known, names), rule)
    chosen = _differing(group, "selected_on", "Best rounds are chosen by samples of")
    notes = [_differing(group, "pa_protocol", "PA"), chosen, *[rule.sentence, MISSED] * targets]
    return _table(group.title, columns, rows, " ".join(filter(None, notes)))


def _accuracies(summaries: Iterable[Mapping[str, Any]]) -> list[Accuracy]:
    """The columns; where PA was measured at several moments, each of these has its own."""
    names = pa_names(summaries)
    names = [*names, *({IN_TRAINING} - {*names})] if len(names) > 1 else names
    ga = [Accuracy(heading, entry) for entry, heading in ACCURACIES.items() if entry.startswith("ga")]
    pa = [(heading, entry) for entry, heading in ACCURACIES.items() if entry.startswith("pa")]
    return ga + [Accuracy(heading.replace("PA", name), entry, name) for name in names for heading, entry in pa]


def _accuracy(runs: Runs, asked: Accuracy) -> Cell:
    """Of runs in percent; nothing where PA was not measured at the moment that the heading names."""
    shares = []
    for summary in (run.result for run in runs):
        begins = pa_entries(summary).get(asked.moment) if asked.moment else "ga"
        shares.append(summary.get(begins + asked.entry[2:]) if begins else None)
    return over_seeds(shares, _lengths(runs), 100.0)


def _of_summary(runs: Runs, name: str, factor: float) -> Cell:
    return over_seeds((run.result.get(name) for run in runs), _lengths(runs), factor)


def _lengths(runs: Iterable[RunRecord]) -> set[int]:
    return {run.config["rounds"] for run in runs}


def _column(metric: str, heading: str) -> Column:
    known = METRICS[kind(metric)]
    return Column(heading, metric, known.digits, known.best)


def _table(title: str, columns: Sequence[Column], rows: Mapping[Names, Sequence[Cell]], note: str) -> Table:
    """Settings that all experiments with numbers of their own have are said once, above it."""
    same = shared(names for names, cells in rows.items() if any(cell.mean is not None for cell in cells))
    remarks = " ".join(filter(None, [f"Not as the preset in all runs: {same}." if same else "", note, _of_seeds(rows)]))
    lines = tuple(Row(label(names, same), tuple(cells), names) for names, cells in rows.items())
    return ranked(Table(title, tuple(columns), lines, remarks))


def _of_seeds(rows: Mapping[Any, Iterable[Cell]]) -> str:
    """Says where rows are means over several numbers of seeds."""
    seeds = {cell.n for cells in rows.values() for cell in cells if cell.mean is not None}
    return f"Means are over {min(seeds)} to {max(seeds)} seeds; among such nothing is marked." if len(seeds) > 1 else ""


def pivot(runs: Runs, rows: str, columns: str | None, metric: str) -> Table:
    """A table of two options: the mean of a metric over the seeds of each combination of their values.

    Args:
      runs: finished ones count; of a repeated seed the newest.
      rows, columns: options or hyper-parameters; a single column of numbers where `columns` is None.
      metric: entry of summary.json; accuracies are shown in percent.

    Raises:
      UserError: no run has such an option, or such an entry.
    """
    finished = counted(run for run in runs if run.summary is not None)
    known = {name: None for run in finished for name in run.config}
    for field, name in (("rows", rows), ("columns", columns)):
        if name is not None and name not in known:
            raise UserError(f"takes an option of the runs, not '{name}': {nearest(name, known)}", field=field)
    numbers = {name: None for run in finished for name, x in run.result.items() if _is_number(x)}
    if metric not in numbers:
        raise UserError(f"takes an entry of summary.json, not '{metric}': {nearest(metric, numbers)}", field="metric")
    members: dict[tuple[Any, Any], list[RunRecord]] = {}
    for run in finished:
        members.setdefault((run.config.get(rows), run.config.get(columns) if columns else metric), []).append(run)
    labels, heads = (list(dict.fromkeys(key[i] for key in members)) for i in (0, 1))
    heads = sorted(heads) if all(map(_is_number, heads)) else heads
    share = metric.startswith(("ga_", "pa_")) and not metric.endswith("_round")
    lines = []
    for one in labels:
        cells = [_of_summary(members.get((one, head), ()), metric, 100.0 if share else 1.0) for head in heads]
        lines.append(Row(str(one), tuple(cells), (str(one), "", "")))
    others = {name for own in members.values() for name in differing([run.config for run in own])} - {rows, columns}
    remark = f"Cells are means over runs that also differ in {', '.join(sorted(others))}." if others else ""
    if metric.endswith("_best"):
        chosen = dict.fromkeys(run.result.get("selected_on", "test") for run in finished)
        remark = f"{remark} Best rounds are chosen by samples of: {'; '.join(chosen)}.".strip()
    remark = f"{remark} {_of_seeds({row.label: row.cells for row in lines})}".strip()
    direction = 0 if rows == "seed" else -1 if metric == "pa_std" else int(share)  # no seed is better than another
    headings = tuple(Column(f"{columns}={head}" if columns else str(head), metric, best=direction) for head in heads)
    name = with_pa_named(ACCURACIES.get(metric, metric), [run.result for run in finished])
    title = f"{name}{', %,' if share else ''} by {rows}{f' and {columns}' if columns else ''}"
    return ranked(Table(title, headings, tuple(lines), remark, stub=rows))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def target_cells(runs: Runs, references: Runs, rule: Rule) -> tuple[Cell, Cell]:
    """Rounds to the target and speed-up over seeds; no mean where one of them never reached it."""
    results = [one for run in runs if (one := reached(run, references, rule)) is not None]
    missed = sum(rounds is None for rounds, _ in results)
    if missed:
        never = Cell(n=len(results), text="/", note=f"not reached by {missed} of them")
        return never, never
    rounds, faster = (over_seeds((one[i] for one in results), _lengths(runs)) for i in (0, 1))
    return rounds, faster


def _references(known: Iterable[tuple[Names, Runs]], names: Names) -> list[RunRecord]:
    """FedAvg's runs: those that differ from a preset as these do, or all where there are none."""
    fitting = [(own[2] == names[2], run) for own, runs in known if own[0] == REFERENCE for run in runs]
    return [run for same, run in fitting if same] or [run for _, run in fitting]


def _differing(group: Group, key: str, head: str) -> str:
    """What the summaries have under a key, as how PA was measured, and of which experiments where that differs."""
    names: dict[str, list[str]] = {}
    for name, entry in zip(group.labels, group.entries, strict=True):
        for protocol in dict.fromkeys(run.result.get(key) for run in entry.runs):
            if protocol is not None:
                names.setdefault(protocol, []).append(name)
    words = [f"{protocol} ({', '.join(own)})" if len(names) > 1 else protocol for protocol, own in names.items()]
    return f"{head}: {'; '.join(words)}." if words else ""


def paper_tables(preset: str, groups: Sequence[Group], expected: Sequence[Expected]) -> list[Table]:
    """The tables of a paper, one a metric: methods down, splits across, of which at least one was run.

    Args:
      preset: as `fedmr/table1`.
      groups: those of this preset.
      expected: what the paper prints there.
    """
    runs = {(entry.names, group.split): entry.runs for group in groups for entry in group.entries}
    splits, tables = {group.split for group in groups}, []
    for name in dict.fromkeys(title(one.metric) for one in expected):
        printed = [one for one in expected if title(one.metric) == name]
        parts = {(one.split, one.metric): one.splits or (one.split,) for one in printed}
        columns = {key: several for key, several in parts.items() if splits.issuperset(several)}
        if any(metric == PA for _, metric in columns) and _chooses(runs):
            columns = {
                key: own for (split, metric), own in columns.items() for key in [(split, metric), (split, PA_LAST)]
            }
        if name and columns:
            tables.append(_paper_table(preset, columns, runs, printed))
    return tables


def _chooses(runs: Mapping[tuple[Names, str | None], Runs]) -> bool:
    """Whether PA of any run is of an epoch that was chosen on tests."""
    return any(needs_epochs(run.config.get("pa_protocol")) for own in runs.values() for run in own)


def _paper_table(
    preset: str,
    columns: Mapping[Key, Sequence[str]],
    runs: Mapping[tuple[Names, str | None], Runs],
    printed: Iterable[Expected],
) -> Table:
    """Args: columns: the splits that each is the mean of; runs: of an experiment on a split."""
    theirs = {
        (one.method, one.variant, one.split, one.metric): one for one in printed if (one.split, one.metric) in columns
    }
    rule, metric = RULES.get(preset, BEST), METRICS[kind(next(iter(columns))[1])]
    rows = {}
    for names in _row_names({part for parts in columns.values() for part in parts}, runs, theirs):
        cells = [_ours(names, key, parts, runs, rule) for key, parts in columns.items()]
        rows[names] = [_beside(cell, theirs.get((*names[:2], *key))) for cell, key in zip(cells, columns, strict=True)]
    heads = [_column(name, f"{split} {_heading(name)}".strip()) for split, name in columns]
    validated = any(run.result.get("selected_on") == "validation" for own in runs.values() for run in own)
    note = HELD_OUT if validated and metric.note == FLATTERED else metric.note
    return _table(f"{preset}: {metric.title}", heads, rows, note or _target_note(metric, rule))


def _heading(metric: str) -> str:
    return METRICS[kind(metric)].heading or metric.partition(":")[2]


def _target_note(metric: Metric, rule: Rule) -> str:
    return f"{rule.sentence} {MISSED}" if metric.title == title(TARGET_METRICS[0]) else ""


def _ours(names: Names, key: Key, parts: Sequence[str], runs: Mapping, rule: Rule) -> Cell:
    """Over the seeds: of one split, or of the mean over splits where a seed was run on all of them."""
    split, metric = key
    if metric in TARGET_METRICS:
        known = [(own, members) for (own, where), members in runs.items() if where == split]
        cells = target_cells(runs.get((names, split), ()), _references(known, names), rule)
        return cells[TARGET_METRICS.index(metric)]
    members = [runs.get((names, part), ()) for part in parts]
    by_seed = [{run.seed: measured(run, metric) for run in several} for several in members]
    values = [[part.get(seed) for part in by_seed] for seed in by_seed[0]]
    known = [[value for value in several if value is not None] for several in values]
    means = [sum(several) / len(parts) for several in known if len(several) == len(parts)]
    return over_seeds(means, _lengths(run for several in members for run in several))


def _beside(ours: Cell, printed: Expected | None) -> Cell:
    if printed is None:
        return ours
    missed = printed.value is None and printed.metric in TARGET_METRICS
    note = "; ".join(filter(None, (ours.note, printed.note)))
    return replace(ours, beside=Cell(printed.value, printed.std, text="/" if missed else None), note=note)


def _row_names(splits: set[str], runs: Mapping, printed: Iterable[tuple[str, str, str, str]]) -> list[Names]:
    """Methods in the paper's order, then ours alone; each with the settings that were run, if any."""
    ours = list(dict.fromkeys(names for names, split in runs if split in splits))
    rows = dict.fromkeys([*(one[:2] for one in printed), *(names[:2] for names in ours)])
    by_row = {row: [names for names in ours if names[:2] == row] for row in rows}
    return [names for row, known in by_row.items() for names in (known or [(*row, "")])]
