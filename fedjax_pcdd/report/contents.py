"""The tables of a report: each group's own, and the papers' with our means over seeds beside the printed numbers.

Accuracies are in percent but where a paper prints shares. A standard deviation is that of a sample (n - 1).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.report.expected import (
    DIGITS,
    EIGENVALUES,
    HEADINGS,
    LOWER_IS_BETTER,
    NOT_RANKED,
    SUMMARY_VALUES,
    TARGET_METRICS,
    TITLES,
    Expected,
    kind,
    measured,
)
from fedjax_pcdd.report.grouping import Group, Names, label, shared
from fedjax_pcdd.report.tables import Cell, Column, Row, Table, over_seeds, ranked
from fedjax_pcdd.report.targets import BEST, REFERENCE, RULES, Rule, reached

# Entry of summary.json -> heading, for those that are accuracies.
ACCURACIES = {
    "ga_best": "GA best",
    "ga_last": "GA last",
    "ga_mean_last10": "GA mean of last 10",
    "pa_best": "PA best",
    "pa_last": "PA last",
}
SECONDS = "seconds_per_round"
TARGET_HEADINGS = dict(zip(TARGET_METRICS, ("rounds to target", "speed-up"), strict=True))

Known = Sequence[tuple[Names, Sequence[RunRecord]]]  # experiments with their runs


def own_table(group: Group) -> Table:
    """Best and last of GA and PA of each experiment of a group, its seconds a round, and speed-ups over FedAvg."""
    known = [(entry.names, entry.runs) for entry in group.entries]
    targets = REFERENCE in (method for (method, _, _), _ in known) and len(known) > 1
    rule = RULES.get(group.preset or "", BEST)
    columns = [_column(name, heading) for name, heading in (ACCURACIES | {SECONDS: "s a round"}).items()]
    columns += [_column(name, heading) for name, heading in TARGET_HEADINGS.items() if targets]
    rows = {}
    for names, runs in known:
        rows[names] = [_of_summary(runs, name, 100.0) for name in ACCURACIES]
        rows[names].append(_of_summary(runs, SECONDS, 1.0))
        if targets:
            rows[names] += target_cells(runs, _references(known, names), rule)
    note = " ".join(filter(None, [_protocols(group), _note(TARGET_METRICS[0], rule) if targets else ""]))
    return _table(group.title, columns, rows, note)


def _of_summary(runs: Sequence[RunRecord], name: str, factor: float) -> Cell:
    values = [(run.summary or {}).get(name) for run in runs]
    return over_seeds((None if value is None else factor * value for value in values), _lengths(runs))


def _lengths(runs: Iterable[RunRecord]) -> set[int]:
    return {run.config["rounds"] for run in runs}


def _column(metric: str, heading: str) -> Column:
    best = 0 if metric in NOT_RANKED else -1 if metric in LOWER_IS_BETTER else 1
    return Column(heading, metric, DIGITS.get(metric, 2), best)


def _table(title: str, columns: Sequence[Column], rows: Mapping[Names, Sequence[Cell]], note: str) -> Table:
    """Settings that all experiments with numbers of their own have are said once, above it."""
    same = shared(names for names, cells in rows.items() if any(cell.mean is not None for cell in cells))
    remarks = " ".join(filter(None, [f"Not as the preset in all runs: {same}." if same else "", note]))
    lines = tuple(Row(label(names, same), tuple(cells), names) for names, cells in rows.items())
    return ranked(Table(title, tuple(columns), lines, remarks))


def target_cells(runs: Sequence[RunRecord], references: Sequence[RunRecord], rule: Rule) -> tuple[Cell, Cell]:
    """Rounds to the target and speed-up over seeds; no mean where one of them never reached it."""
    results = [one for run in runs if (one := reached(run, references, rule)) is not None]
    missed = sum(rounds is None for rounds, _ in results)
    if missed:
        never = Cell(n=len(results), text="/", note=f"not reached by {missed} of them")
        return never, never
    rounds, faster = (over_seeds((one[i] for one in results), _lengths(runs)) for i in (0, 1))
    return rounds, faster


def _references(known: Known, names: Names) -> list[RunRecord]:
    """FedAvg's runs, first those with the same settings."""
    fitting = [(own[2] != names[2], runs) for own, runs in known if own[0] == REFERENCE]
    return [run for _, runs in sorted(fitting, key=lambda one: one[0]) for run in runs]


def _protocols(group: Group) -> str:
    """How PA was measured, and of which experiments where that differs."""
    names: dict[str, list[str]] = {}
    for name, entry in zip(group.labels, group.entries, strict=True):
        for protocol in dict.fromkeys((run.summary or {}).get("pa_protocol") for run in entry.runs):
            if protocol is not None:
                names.setdefault(protocol, []).append(name)
    if len(names) > 1:
        return "PA: " + "; ".join(f"{protocol} ({', '.join(own)})" for protocol, own in names.items()) + "."
    return "".join(f"PA: {protocol}." for protocol in names)


def paper_tables(preset: str, groups: Sequence[Group], expected: Sequence[Expected]) -> list[Table]:
    """The tables of a paper, one a metric: methods down, splits across, of which at least one was run.

    Args:
      preset: as `fedmr/table1`.
      groups: those of this preset.
      expected: what the paper prints there.
    """
    runs = {(entry.names, group.split): entry.runs for group in groups for entry in group.entries}
    splits, tables = {group.split for group in groups}, []
    for title in dict.fromkeys(TITLES.get(kind(one.metric)) for one in expected):
        printed = [one for one in expected if TITLES.get(kind(one.metric)) == title]
        columns = {
            (one.split, one.metric): one.splits or (one.split,)
            for one in printed
            if splits.issuperset(one.splits or (one.split,))
        }
        if title and columns:
            tables.append(_paper_table(preset, columns, runs, [one for one in printed if _key(one) in columns]))
    return tables


def _key(one: Expected) -> tuple[str, str]:
    return one.split, one.metric


def _paper_table(preset: str, columns: Mapping, runs: Mapping, printed: Sequence[Expected]) -> Table:
    """Args: columns: (split, metric) -> the splits that it is the mean of; runs: of an experiment on a split."""
    rule, (_, first) = RULES.get(preset, BEST), next(iter(columns))
    theirs = {(_key(one), one.method, one.variant): one for one in printed}
    rows = {}
    for names in _row_names(columns, runs, printed):
        rows[names] = [
            _beside(_ours(names, split, metric, parts, runs, rule), theirs.get(((split, metric), *names[:2])))
            for (split, metric), parts in columns.items()
        ]
    heads = [
        _column(metric, " ".join(filter(None, (split, HEADINGS.get(metric, metric.partition(":")[2])))))
        for split, metric in columns
    ]
    return _table(f"{preset}: {TITLES[kind(first)]}", heads, rows, _note(kind(first), rule))


def _ours(names: Names, split: str, metric: str, parts: Sequence[str], runs: Mapping, rule: Rule) -> Cell:
    if metric in TARGET_METRICS:
        known = [(own, members) for (own, where), members in runs.items() if where == split]
        cells = target_cells(runs.get((names, split), ()), _references(known, names), rule)
        return cells[TARGET_METRICS.index(metric)]
    return _over(parts, lambda run: measured(run, metric), [runs.get((names, part), ()) for part in parts])


def _over(parts: Sequence[str], value: Callable, runs: Sequence[Sequence[RunRecord]]) -> Cell:
    """Over the seeds: of one split, or of the mean over splits where a seed was run on all of them."""
    by_seed = [{run.seed: value(run) for run in several} for several in runs]
    several = ([own for part in by_seed if (own := part.get(seed)) is not None] for seed in by_seed[0])
    lengths = _lengths(run for some in runs for run in some)
    return over_seeds((sum(known) / len(parts) for known in several if len(known) == len(parts)), lengths)


def _beside(ours: Cell, printed: Expected | None) -> Cell:
    if printed is None:
        return ours
    missed = printed.value is None and printed.metric in TARGET_METRICS
    note = "; ".join(filter(None, (ours.note, printed.note)))
    return replace(ours, beside=Cell(printed.value, printed.std, text="/" if missed else None), note=note)


def _row_names(columns: Mapping, runs: Mapping, printed: Sequence[Expected]) -> list[Names]:
    """Methods in the paper's order, then ours alone; each with the settings that were run, if any."""
    parts = {part for several in columns.values() for part in several}
    ours = dict.fromkeys(names for names, split in runs if split in parts)
    ordered = dict.fromkeys([*((one.method, one.variant) for one in printed), *(names[:2] for names in ours)])
    return [
        names for row in ordered for names in ([own for own in ours if own[:2] == row] or [(row[0], row[1], "")])
    ]  # fmt: skip


def _note(name: str, rule: Rule) -> str:
    if name in TARGET_METRICS:
        return f"{rule.sentence} /: not reached, by at least one seed."
    if name == EIGENVALUES:
        return "Of the features of test images after the last round, of runs that tracked the spectrum alone."
    if name not in SUMMARY_VALUES or name in NOT_RANKED:
        return ""
    return "Best round, chosen on the test data as in the papers, which flatters every number."
