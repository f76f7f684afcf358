"""The tables of a report: each group's own, and the papers' with our means over seeds beside the printed numbers.

Accuracies are in percent, except where a paper prints shares. Standard deviations are those of a sample (n - 1).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np

from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.report.expected import FLATTERED, METRICS, PA, PA_LAST, TARGET_METRICS, Expected, kind, measured, title
from fedjax_pcdd.report.grouping import (
    Group,
    Names,
    alike_in_pa,
    counted,
    differing,
    label,
    listed_by,
    pa_kind,
    shared,
    unlike,
)
from fedjax_pcdd.report.tables import Cell, Column, Row, Table, over_seeds, ranked
from fedjax_pcdd.report.targets import BEST, REFERENCE, RULES, Rule, reached
from fedjax_pcdd.training.config import RunConfig
from fedjax_pcdd.training.metrics import CHOSEN_BY, chosen_by, selection
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
OWN_MODELS = (
    "GA best of methods without a global model is a mean over the clients' own models, each in its best round of PA: "
    "beside others nothing is marked."
)

Runs = Sequence[RunRecord]
Key = tuple[str, str]  # split and metric of a printed number


class Accuracy(NamedTuple):
    """A column of accuracies."""

    heading: str
    entry: str  # of summary.json
    moment: str = ""  # name of PA measured at that moment; "" for GA


def own_table(group: Group) -> Table:
    """Best and last GA and PA of each experiment of a group, its seconds per round, and speed-ups over FedAvg."""
    experiments = [(entry.names, entry.runs) for entry in group.entries]
    targets = REFERENCE in (method for (method, _, _), _ in experiments) and len(experiments) > 1
    rule = RULES.get(group.preset or "", BEST)
    accuracies = _accuracies([run.result for _, runs in experiments for run in runs])
    columns = [Column(x.heading, x.entry, best=-1 if x.entry == "pa_std" else 1) for x in accuracies]
    columns.append(Column("s a round", SECONDS, digits=3))
    if targets:
        columns += [_column(TARGET_METRICS[0], "rounds to target"), _column(TARGET_METRICS[1], "speed-up")]
    rows = {}
    for names, runs in experiments:
        rows[names] = [
            over_seeds([_value(r.result, x) for r in runs], [_origin(r, _entry(r.result, x)) for r in runs], 100.0)
            for x in accuracies
        ]
        rows[names].append(over_seeds([run.result.get(SECONDS) for run in runs], map(_origin, runs)))
        if targets:
            rows[names] += target_cells(names, runs, experiments, rule)
    chosen = _differing(group, selection, "Best rounds are chosen by", CHOSEN_BY)
    notes = [_differing(group, lambda result: result.get("pa_protocol"), "PA:"), chosen]
    all_runs = [run for entry in group.entries for run in entry.runs]
    notes += [_whose(all_runs), *[rule.sentence, MISSED] * targets, *unlike(all_runs)]
    return _table(group.title, columns, rows, " ".join(filter(None, notes)))


def _accuracies(summaries: Sequence[Mapping[str, Any]]) -> list[Accuracy]:
    """The columns of accuracies; if PA was measured at several moments, each of them has its own."""
    moments = pa_names(summaries)
    names = [*moments, *({IN_TRAINING} - {*moments})] if len(moments) > 1 else moments
    ga = [Accuracy(heading, entry) for entry, heading in ACCURACIES.items() if entry.startswith("ga")]
    pa = [(heading, entry) for entry, heading in ACCURACIES.items() if entry.startswith("pa")]
    columns = ga + [Accuracy(heading.replace("PA", name), entry, name) for name in names for heading, entry in pa]
    spread = [
        Accuracy(heading.replace("PA", name) if len(moments) > 1 else heading, entry, name)
        for name in moments
        for entry, heading in SPREAD.items()
    ]
    return columns + [column for column in spread if any(_value(summary, column) is not None for summary in summaries)]


def _value(summary: Mapping[str, Any], column: Accuracy) -> float | None:
    """An accuracy in a summary; None if PA was not measured at the moment that the heading names."""
    return summary.get(_entry(summary, column))


def _entry(summary: Mapping[str, Any], column: Accuracy) -> str:
    """The entry of a summary that a column shows, "" if PA was not measured at the moment that the heading names."""
    prefix = pa_entries(summary).get(column.moment) if column.moment else "ga"
    return prefix + column.entry[2:] if prefix else ""


def _origin(run: RunRecord, entry: str = "") -> tuple[int, int, tuple[Any, ...]]:
    """What makes the number of a run comparable with that of another.

    That is its length, its seed, the choice of the best round and, for an entry of summary.json, whose GA is the best
    or by which protocol PA was measured.
    """
    own_models = entry == "ga_best" and "ga_best_mean" in run.result
    protocol = pa_kind(run)[2] if entry.startswith("pa_") and entry in ACCURACIES | SPREAD else ""
    return run.rounds_done, run.seed, (selection(run.result), run.config.get("eval_every", 1), own_models, protocol)


def _whose(runs: Runs) -> str:
    """A remark if GA best is of the global model in some runs and of the clients' own in others, else ""."""
    return OWN_MODELS if len({"ga_best_mean" in run.result for run in runs}) > 1 else ""


def _column(metric: str, heading: str) -> Column:
    properties = METRICS[kind(metric)]
    return Column(heading, metric, properties.digits, properties.best)


def _table(title: str, columns: Sequence[Column], rows: Mapping[Names, Sequence[Cell]], note: str) -> Table:
    """A table; settings that all experiments with numbers share are stated once, above it."""
    same = shared(names for names, cells in rows.items() if any(cell.mean is not None for cell in cells))
    remarks = " ".join(filter(None, [f"Not as the preset in all runs: {same}." if same else "", note, _of_seeds(rows)]))
    lines = tuple(Row(label(names, same), tuple(cells), names) for names, cells in rows.items())
    return ranked(Table(title, tuple(columns), lines, remarks))


def _of_seeds(rows: Mapping[Any, Iterable[Cell]]) -> str:
    """A remark if rows are means over different seeds, else ""."""
    numbers = {cell.n for cells in rows.values() for cell in cells if cell.mean is not None}
    if len(numbers) > 1:
        return f"Means are over {min(numbers)} to {max(numbers)} seeds; among such nothing is marked."
    columns = zip(*rows.values(), strict=True)
    seeds = [{frozenset(seed for _, seed, *_ in cell.origin) for cell in column if cell.origin} for column in columns]
    return "Means are over different seeds; among such nothing is marked." if any(len(s) > 1 for s in seeds) else ""


def pivot(runs: Runs, rows: str, columns: str | None, metric: str) -> Table:
    """A table of two options: the mean of a metric over the seeds of each combination of their values.

    Args:
      runs: only finished ones count; of a repeated seed, only the newest.
      rows, columns: options or hyper-parameters; a single column of numbers where `columns` is None.
      metric: entry of summary.json; accuracies are shown in percent.

    Raises:
      UserError: no run has such an option, or such an entry.
    """
    finished = counted(run for run in runs if run.summary is not None)
    option_names = {name: None for run in finished for name in run.config}
    for field, name in (("rows", rows), ("columns", columns)):
        if name is not None and name not in option_names:
            raise UserError(f"takes an option of the runs, not '{name}': {nearest(name, option_names)}", field=field)
    entries = {name: None for run in finished for name, x in run.result.items() if _is_number(x)}
    if metric not in entries:
        raise UserError(f"takes an entry of summary.json, not '{metric}': {nearest(metric, entries)}", field="metric")
    members = listed_by(((r.config.get(rows), r.config.get(columns) if columns else metric), r) for r in finished)
    labels, heads = (_in_order(dict.fromkeys(key[i] for key in members)) for i in (0, 1))
    is_share = metric.startswith(("ga_", "pa_")) and not metric.endswith("_round")
    varied = {name for cell in members.values() for name in differing([run.settings for run in cell])}
    varied |= {*differing([run.settings for run in finished])} & {field.name for field in fields(RunConfig)}
    varied, lines = sorted(varied - {rows, columns, "preset"}), []
    for value in labels:
        cells = [_mean_of(members.get((value, head), ()), metric, varied, 100.0 if is_share else 1.0) for head in heads]
        lines.append(Row(_written(value), tuple(cells), (_written(value), "", "")))
    remark = f"Runs also differ in {', '.join(varied)}; among cells of unlike ones nothing is marked." if varied else ""
    if metric == "ga_best":
        remark = f"{remark} {_whose(finished)}".strip()
    if metric.endswith("_best"):
        remark = f"{remark} Best rounds are chosen by {chosen_by(run.result for run in finished)}.".strip()
    if rows != "seed":
        remark = f"{remark} {_of_seeds({row.label: row.cells for row in lines})}".strip()
    direction = 0 if rows == "seed" else -1 if metric == "pa_std" else int(is_share)  # no seed is better than another
    if metric.startswith("pa_") and not alike_in_pa({pa_kind(run) for run in finished}):
        remark, direction = f"{remark} PA is of different quantities: nothing is marked.".strip(), 0
    names = [f"{columns}={_written(x)}" if columns else str(x) for x in heads]
    digits = 3 if metric == SECONDS else 2  # as in a group's own table
    headings = tuple(Column(name, metric, digits, direction) for name in names)
    name = with_pa_named((ACCURACIES | SPREAD).get(metric, metric), [run.result for run in finished])
    title = f"{name}{', %,' if is_share else ''} by {rows}{f' and {columns}' if columns else ''}"
    return ranked(Table(title, headings, tuple(lines), remark, stub=rows))


def _in_order(option_values: Iterable[Any]) -> list[Any]:
    """Numbers in rising order, and none after them; anything else as it is."""
    listed = list(option_values)
    numeric = all(value is None or _is_number(value) for value in listed)
    return sorted(listed, key=lambda value: (value is None, value or 0)) if numeric else listed


def _written(value: Any) -> str:
    return "none" if value is None else str(value)


def _mean_of(runs: Runs, metric: str, varied: Sequence[str], factor: float) -> Cell:
    """Mean over the seeds of the mean over each seed's runs, which differ in the options `varied`."""
    measured_runs = [run for run in runs if (x := run.result.get(metric)) is not None and np.isfinite(x)]
    by_seed = listed_by((run.seed, run) for run in measured_runs)
    means = [sum(run.result[metric] for run in members) / len(members) for members in by_seed.values()]
    origins = [
        (None, seed, frozenset((_origin(run, metric), str([run.settings.get(x) for x in varied])) for run in members))
        for seed, members in by_seed.items()
    ]
    return over_seeds(means, origins, factor)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def target_cells(names: Names, runs: Runs, experiments: Iterable[tuple[Names, Runs]], rule: Rule) -> tuple[Cell, Cell]:
    """Rounds to the target and speed-up over seeds; no mean where one of them never reached it.

    References are those of FedAvg's runs that differ from a preset as these do, or all if there are none.
    """
    fedavg = [(other[2] == names[2], run) for other, members in experiments if other[0] == REFERENCE for run in members]
    references = [run for same_settings, run in fedavg if same_settings] or [run for _, run in fedavg]
    outcomes = [(run, outcome) for run in runs if (outcome := reached(run, references, rule)) is not None]
    missed = sum(rounds is None for _, (rounds, _) in outcomes)
    if missed:
        never = Cell(n=len(outcomes), text="/", note=f"not reached by {missed} of them")
        return never, never
    origins = [_origin(run) for run, _ in outcomes]
    rounds, speedups = (over_seeds((outcome[i] for _, outcome in outcomes), origins) for i in (0, 1))
    return rounds, speedups


def _differing(
    group: Group, of: Callable[[Mapping[str, Any]], str | None], head: str, written: Mapping[str, str] = {}
) -> str:
    """A property of the summaries, such as how PA was measured; if it differs, with the experiments."""
    labels_by_value: dict[str, list[str]] = {}
    for name, entry in zip(group.labels, group.entries, strict=True):
        for value in dict.fromkeys(of(run.result) for run in entry.runs):
            if value is not None:
                labels_by_value.setdefault(value, []).append(name)
    words = [
        f"{written.get(value, value)} ({', '.join(labels)})" if len(labels_by_value) > 1 else written.get(value, value)
        for value, labels in labels_by_value.items()
    ]
    return f"{head} {'; '.join(words)}." if words else ""


def paper_tables(preset: str, groups: Sequence[Group], expected: Sequence[Expected]) -> list[Table]:
    """The tables of a paper, one per metric: methods as rows, splits as columns, at least one of which was run.

    Args:
      preset: as `fedmr/table1`.
      groups: those of this preset.
      expected: what the paper prints there.
    """
    runs = {(entry.names, group.split): entry.runs for group in groups for entry in group.entries}
    chosen_on_tests = any(needs_epochs(run.config.get("pa_protocol")) for members in runs.values() for run in members)
    splits, tables = {group.split for group in groups}, []
    for name in dict.fromkeys(title(number.metric) for number in expected):
        printed = [number for number in expected if title(number.metric) == name]
        splits_of = {(number.split, number.metric): number.splits or (number.split,) for number in printed}
        columns = {key: parts for key, parts in splits_of.items() if splits.issuperset(parts)}
        if chosen_on_tests and any(metric == PA for _, metric in columns):
            columns = {
                key: parts for (split, metric), parts in columns.items() for key in [(split, metric), (split, PA_LAST)]
            }
        if name and columns:
            tables.append(_paper_table(preset, columns, runs, printed))
    return tables


def _paper_table(
    preset: str,
    columns: Mapping[Key, Sequence[str]],
    runs: Mapping[tuple[Names, str | None], Runs],
    printed: Iterable[Expected],
) -> Table:
    """Args: columns: for each, the splits that it is the mean of; runs: by experiment and split."""
    paper = {(n.method, n.variant, n.split, n.metric): n for n in printed if (n.split, n.metric) in columns}
    rule, metric = RULES.get(preset, BEST), METRICS[kind(next(iter(columns))[1])]
    rows = {}
    for names in _row_names({part for parts in columns.values() for part in parts}, runs, paper):
        cells = [_ours(names, key, parts, runs, rule) for key, parts in columns.items()]
        rows[names] = [_beside(cell, paper.get((*names[:2], *key))) for cell, key in zip(cells, columns, strict=True)]
    headings = {name: METRICS[kind(name)].heading or name.partition(":")[2] for _, name in columns}
    heads = [_column(name, f"{split} {headings[name]}".strip()) for split, name in columns]
    note = metric.note
    if note == FLATTERED:
        all_runs = [run for members in runs.values() for run in members]
        whose = _whose(all_runs) if metric.entry == "ga_best" else ""
        note = f"{_selection([run.result for run in all_runs])} {whose}".strip()
    elif metric.title == title(TARGET_METRICS[0]):
        note = f"{rule.sentence} {MISSED}"
    return _table(f"{preset}: {metric.title}", heads, rows, note)


def _selection(summaries: Sequence[Mapping[str, Any]]) -> str:
    """How the best rounds of a paper's table were chosen."""
    criteria = {selection(summary) for summary in summaries}
    if criteria == {"test"}:
        return FLATTERED
    if criteria == {"validation"}:
        return HELD_OUT
    unlike = ", which differs between runs: nothing is marked" if len(criteria) > 1 else ""
    return f"Best round, chosen by {chosen_by(summaries)}{unlike}."


def _ours(names: Names, key: Key, parts: Sequence[str], runs: Mapping, rule: Rule) -> Cell:
    """Our cell over the seeds: of one split, or of the mean over splits for seeds that were run on all of them."""
    split, metric = key
    if metric in TARGET_METRICS:
        experiments = [(entry_names, members) for (entry_names, part), members in runs.items() if part == split]
        return target_cells(names, runs.get((names, split), ()), experiments, rule)[TARGET_METRICS.index(metric)]
    by_seed = [{run.seed: run for run in runs.get((names, part), ())} for part in parts]
    joint = [[part[seed] for part in by_seed] for seed in by_seed[0] if all(seed in part for part in by_seed)]
    measurements = [[x for run in seed_runs if (x := measured(run, metric)) is not None] for seed_runs in joint]
    means = [sum(values) / len(parts) if len(values) == len(parts) else None for values in measurements]
    entry = METRICS[kind(metric)].entry
    origins = [tuple(zip(*(_origin(run, entry) for run in seed_runs), strict=True)) for seed_runs in joint]
    return over_seeds(means, origins)


def _beside(ours: Cell, printed: Expected | None) -> Cell:
    if printed is None:
        return ours
    missed = printed.value is None and printed.metric in TARGET_METRICS
    note = "; ".join(filter(None, (ours.note, printed.note)))
    return replace(ours, beside=Cell(printed.value, printed.std, text="/" if missed else None), note=note)


def _row_names(splits: set[str], runs: Mapping, printed: Iterable[tuple[str, str, str, str]]) -> list[Names]:
    """Methods in the paper's order, then those that only we ran; each with the settings that were run, if any."""
    ours = list(dict.fromkeys(names for names, split in runs if split in splits))
    rows = dict.fromkeys([*(key[:2] for key in printed), *(names[:2] for names in ours)])
    by_row = {row: [names for names in ours if names[:2] == row] for row in rows}
    return [names for row, run_names in by_row.items() for names in (run_names or [(*row, "")])]
