"""docs/reproduction.md: what was run of the papers' tables, beside the printed numbers, and which claims held."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fedjax_pcdd.report.expected import TITLES, Expected, kind
from fedjax_pcdd.report.tables import cell
from reproduction.claims import Count, Finding, ordered
from reproduction.statistics import VERDICTS
from reproduction.tables import BASELINE, LAST_TEN, Column, Result, Row, common, in_words, printed

INTRODUCTION = """# Reproduction

Written by `python experiments/reproduce.py --page` from `results/` and `experiments/expected/`; do not edit it.

What the papers claim, what they print, and what came out here. Every row has the command that repeats it (`DATA` is the
folder of the data sets, [data.md](data.md)); `python experiments/reproduce.py` runs all of them, and what is missing
([presets.md](presets.md)). Other readings of what the papers leave open are in [ambiguities.md](ambiguities.md).

How to read it:

- The scale `cpu` is a small network on a few thousand images for a few rounds: its numbers are no reproduction of the
  printed ones, and a claim that does not hold there is not refuted. Only the papers' own settings can confirm or refute
  them: the scale `full`, of the table whose network is small enough for a CPU, and `gpu`, mostly ResNet18.
- Accuracies in percent, GA on the global test set, PA on the clients' own. "Best" is the best round, chosen on the
  test data as in the papers, which flatters every number; the mean of the last ten rounds does not. PA of a method
  without a personal model is that of the fine-tuned global model; its mean of last ten is that of the local models.
- ± is the standard deviation over seeds beside a mean, the standard error beside a difference. Differences are paired
  by seed. A claim *held* or *did not hold* where the difference is at least two standard errors from zero (with two or
  three seeds that is a weak test), otherwise it is *not distinguishable*; with one seed only the sign is said.
- A command repeats its number bit for bit with the same version of this project and of JAX on the same kind of machine.
  Another order of summation rounds differently, and after many rounds a single round's accuracy may be points away.
"""
MOST_NAMED = 4  # splits of a claim that the summary lists


def reproduction_page(
    results: Sequence[Result],
    columns: Sequence[Column],
    expected: Mapping[str, Sequence[Expected]],
    findings: Sequence[Finding],
    counts: Sequence[Count],
) -> str:
    """The text of the page."""
    lines = [INTRODUCTION]
    if not results:
        return "\n".join([*lines, "Nothing has been run yet."]) + "\n"
    lines += [_extent(results), "", *_summary(findings), *_claims(findings), *_counts(counts)]
    for scale, table in dict.fromkeys((one.scale, one.table) for one in columns):
        members = [one for one in columns if (one.scale, one.table) == (scale, table)]
        lines += _table(scale, table, members, expected.get(table, ()), results)
    return "\n".join(lines).rstrip() + "\n"


def _extent(results: Sequence[Result]) -> str:
    """How many runs, and on what."""
    parts = []
    for scale in dict.fromkeys(one["scale"] for one in results):
        own = [one for one in results if one["scale"] == scale]
        runs = sum(one["status"] == "finished" and "same_run_as" not in one for one in own)
        hours = sum(one.get("seconds", 0.0) for one in own if "same_run_as" not in one) / 3600
        shared, failed = (sum(key in one for one in own) for key in ("same_run_as", "sentence"))
        devices = ", ".join(dict.fromkeys(str(one["machine"]["device"]) for one in own))
        said = (shared, "more cells share a run with another table"), (failed, "failed")
        notes = [f"{number} {text}" for number, text in said if number]
        cells = f"; {', '.join(notes)}" if notes else ""
        parts.append(f"Scale `{scale}`: {runs} run{'s' * (runs != 1)}, {hours:.1f} hours on {devices}{cells}.")
    return " ".join(parts)


def _summary(findings: Sequence[Finding]) -> list[str]:
    """Which claims held, which did not, which could not be tried."""
    lines = ["## Which claims held", ""]
    for scale in dict.fromkeys(one.scale for one in findings if one.scale):
        own = [one for one in findings if one.scale == scale]
        lines += [f"At the scale `{scale}`, by the best round:", ""]
        for verdict in ordered(one.verdict for one in own):
            lines.append(f"- **{verdict}**: {_named(one for one in own if one.verdict == verdict)}")
        lines.append("")
    missing = [one for one in findings if one.best is None]
    if missing:
        lines += [f"- **not tried**: {_named(missing)}", ""]
    return lines


def _named(findings: Iterable[Finding]) -> str:
    """Claims with their splits."""
    splits: dict[str, list[str]] = {}
    for one in findings:
        splits.setdefault(one.claim.text, []).append(f"{one.split} {one.tag}".rstrip())
    return "; ".join(f"{text} ({_listed(names)})" for text, names in splits.items()) + "."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= MOST_NAMED else f"{len(names)} splits"


def _claims(findings: Sequence[Finding]) -> list[str]:
    tried = [one for one in findings if one.best is not None]
    if not tried:
        return []
    lines = ["### Claim by claim", "", "Differences in percent points, in the metric of the table."]
    lines += ["", "| claim | table | split | scale | paper | best round | | mean of last ten | |"]
    lines += ["|---|---|---|---|---:|---:|---|---:|---|"]
    for one in tried:
        paper = "–" if one.paper is None else f"{one.paper:+.2f}".replace("-", "−")
        ten = ("–", "") if one.last_ten is None else (str(one.last_ten), one.last_ten.against(one.claimed))
        where = (one.claim.text, one.claim.table, f"{one.split} {one.tag}".rstrip(), one.scale)
        lines.append(_piped([*where, paper, str(one.best), one.verdict, *ten]))
    return [*lines, ""]


def _counts(counts: Sequence[Count]) -> list[str]:
    """All methods against FedAvg, table by table."""
    if not counts:
        return []
    lines = [
        "### Every method against FedAvg",
        "",
        "How many differences to FedAvg have the sign that the paper prints.",
    ]
    lines += ["", f"| table | metric | scale | {' | '.join(VERDICTS)} |", "|---|---|---|" + "---:|" * len(VERDICTS)]
    for one in counts:
        numbers = [str(one.verdicts[verdict]) if one.verdicts[verdict] else "" for verdict in VERDICTS]
        lines.append(_piped([one.table, kind(one.metric), one.scale, *numbers]))
    return [*lines, ""]


def _table(
    scale: str, table: str, members: Sequence[Column], expected: Sequence[Expected], results: Sequence[Result]
) -> list[str]:
    own = [one for one in results if (one["scale"], one["table"]) == (scale, table) and one["status"] == "finished"]
    over = in_words(common(one["over_preset"] for one in own))
    lines = [f"## {table}, scale {scale}", ""]
    lines += [f"Over the preset in all runs: {over}." if over else "As the preset says.", ""]
    for column in members:
        known = {metric for row in column.rows for one in row.results for metric in one["metrics"]}
        for metric in (metric for metric in dict.fromkeys(one.metric for one in expected) if metric in known):
            lines += _split(column, metric, printed(expected, column.split, metric) if not column.tag else {})
        lines += _commands(column)
    return lines


def _split(column: Column, metric: str, numbers: Mapping[str, float]) -> list[str]:
    """One table: methods down."""
    ten = metric in LAST_TEN
    heading = " · ".join(part for part in (column.split, column.tag, _title(metric)) if part)
    marks = ["method", "best" if ten else "ours", *(["mean of last ten"] if ten else []), "seeds"]
    marks += ["paper", "difference", "over FedAvg", "paper's", ""]
    lines = [f"### {heading}", "", _piped(marks), "|---|" + "---:|" * (len(marks) - 2) + "---|"]
    for row in column.rows:
        if row.values(metric):
            lines.append(_piped(_cells(column, row, metric, numbers, ten)))
    order, count = column.order(metric, numbers)
    if order is not None:
        lines += ["", f"Rank correlation with the paper over {count} methods: {order:+.2f}.".replace("-", "−")]
    return [*lines, ""]


def _cells(column: Column, row: Row, metric: str, numbers: Mapping[str, float], ten: bool) -> list[str]:
    values, paper, base = row.values(metric), numbers.get(row.name), numbers.get(BASELINE)
    over = column.over_baseline(row, metric)
    claimed = None if paper is None or base is None or row.name == BASELINE else paper - base
    signed = [f"{value:+.2f}".replace("-", "−") if value is not None else "–" for value in (
        None if paper is None else float(np.mean(list(values.values()))) - paper, claimed)]  # fmt: skip
    return [
        row.label, _mean(values), *([_mean(row.last_ten(metric))] if ten else []), str(len(values)),
        "–" if paper is None else f"{paper:.2f}", signed[0], "–" if over is None else str(over), signed[1],
        "" if over is None or claimed is None else over.against(claimed),
    ]  # fmt: skip


def _mean(values: Mapping[int, float]) -> str:
    one = cell(values.values())
    if one.mean is None:
        return "–"
    return f"{one.mean:.2f}" + ("" if one.std is None else f" ± {one.std:.2f}")


def _commands(column: Column) -> list[str]:
    """What repeats each row, and what failed."""
    lines = [f"- {one['method']} seed {one['seed']} failed: {one['sentence']}" for one in column.failed]
    lines += [""] if lines else []
    commands = [row.command for row in column.rows if row.results[0]["command"]]
    if not commands:
        return lines
    return [
        *lines,
        "<details><summary>Commands</summary>",
        "",
        *(f"    {one}" for one in commands),
        "",
        "</details>",
        "",
    ]


def _title(metric: str) -> str:
    name, _, domain = metric.partition(":")
    titles = TITLES | {"ga_pct": "GA, %", "pa_pct": "PA, %"}
    return f"{titles.get(name, name)} {domain}".rstrip()


def _piped(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
