"""docs/ambiguities.md: what the papers leave open, what we do, and the measured effect of other readings."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.statistics import Difference, signed
from fedjax_pcdd.report.tables import Cell, Table, markdown
from fedjax_pcdd.report.tables import Column as Heading
from fedjax_pcdd.report.tables import Row as Line
from fedjax_pcdd.training.fields import as_mapping, load_mapping, read_text
from reproduction.columns import BASELINE, Column, Expectations, Result, Row, difference, printed

METRIC = "ga_pct"
INTRODUCTION = """# What the papers do not say

Written by `python experiments/reproduce.py --page` from `experiments/reproduction/ambiguities.yaml` and `results/`; do
not edit it.

Where a paper is silent, or says one thing and its published code does another, something has to be chosen. Here is what
is open, our default, the option that gives the other reading, and, where it was run, what that changes: GA in percent
points against the default, paired by seed, best round and mean of the last ten. Only runs of one version of this
project are a pair. Sizes of the runs are in [reproduction.md](reproduction.md); what a small network shows need not
hold for a large one.
"""
SELECTION = """\
The papers report the best round, chosen on the test data, or do not say. Best less last, and less the mean
of the last ten, over all runs with a global model:"""
CLOSEST = """\
The best GA of the method less FedAvg's under the same reading (under the default, if the reading is of the method
alone), the same under the default on the same seeds, and how far both are from the printed difference; with more than
one seed the nearer one in bold. One seed's differences are mostly noise. With `fmnist` behind a split, ours are of
Fashion-MNIST, the paper's of CIFAR-10."""


class Measured(NamedTuple):
    """Where other readings were run.

    Args:
      table, split: the column that the readings depart from.
      rows: methods, as `fedmr`.
      tags: tags of the readings.
      base: tag of the column that has the default.
    """

    table: str
    split: str
    rows: tuple[str, ...]
    tags: tuple[str, ...]
    base: str = ""


class Ambiguity(NamedTuple):
    """One open question.

    Args:
      paper, question: the paper, and what it leaves open.
      evidence: what the paper and its code say.
      default: what we do.
      other: options that give the other readings.
      measured: where these were run, None if they were not.
    """

    paper: str
    question: str
    evidence: str
    default: str
    other: tuple[str, ...]
    measured: Measured | None = None


class Effect(NamedTuple):
    """What a reading changes in one row at one scale."""

    scale: str
    tag: str
    row: str
    best: Difference
    last_ten: Difference


def read_ambiguities(path: Path) -> list[Ambiguity]:
    """The ambiguities in a YAML file; UserError if one has a wrong or missing key."""
    ambiguities = []
    for number, entry in enumerate(load_mapping(read_text(path), str(path)).get("ambiguities", []), 1):
        location = f"ambiguity {number} of {path}"
        fields: dict[str, Any] = as_mapping(entry, location)
        fields["other"] = tuple(fields.get("other", ()))
        try:
            if "measured" in fields:
                measured: dict[str, Any] = as_mapping(fields["measured"], f"'measured' of {location}")
                measured |= {name: tuple(measured[name]) for name in ("rows", "tags")}
                fields["measured"] = Measured(**measured)
            ambiguities.append(Ambiguity(**fields))
        except (KeyError, TypeError):
            raise UserError(f"{location} has a key too many or too few: see the first ones.") from None
    return ambiguities


def tags_of(ambiguities: Iterable[Ambiguity]) -> set[str]:
    """The tags of all readings."""
    return {tag for ambiguity in ambiguities if ambiguity.measured for tag in ambiguity.measured.tags}


def effects(measured: Measured, columns: Sequence[Column]) -> list[Effect]:
    """What the readings change, in each row and at each scale that has them."""
    changes = []
    for tag in measured.tags:
        for column in columns:
            base = _column(columns, column.scale, measured, measured.base)
            if (column.table, column.split, column.tag) != (measured.table, measured.split, tag) or base is None:
                continue
            for name in measured.rows:
                differences = _change(column.row(name), base.row(name))
                changes += [Effect(column.scale, tag, name, *differences)] if differences else []
    return changes


def _column(columns: Sequence[Column], scale: str, measured: Measured, tag: str) -> Column | None:
    key = (scale, measured.table, measured.split, tag)
    return next((column for column in columns if (column.scale, column.table, column.split, column.tag) == key), None)


def _change(reading: Row | None, default: Row | None) -> tuple[Difference, Difference] | None:
    if reading is None or default is None or reading.images != default.images:
        return None
    best, last_ten = (difference(reading, default, METRIC, of=rounds) for rounds in ("best", "last ten"))
    return None if best is None or last_ten is None else (best, last_ten)


def ambiguities_page(
    ambiguities: Sequence[Ambiguity], columns: Sequence[Column], expected: Expectations, results: Sequence[Result]
) -> str:
    """The text of the page."""
    lines = [INTRODUCTION, *_selection(results), *_closest(ambiguities, columns, expected)]
    for paper in dict.fromkeys(ambiguity.paper for ambiguity in ambiguities):
        lines += [f"## {paper}", ""]
        for ambiguity in (ambiguity for ambiguity in ambiguities if ambiguity.paper == paper):
            lines += _entry(ambiguity, columns)
    return "\n".join(lines).rstrip() + "\n"


def _entry(ambiguity: Ambiguity, columns: Sequence[Column]) -> list[str]:
    lines = [f"**{ambiguity.question}.** {ambiguity.evidence.strip()}", "", f"- Default: {ambiguity.default.strip()}"]
    if ambiguity.other:
        lines.append(f"- Other readings: {', '.join(f'`{option}`' for option in ambiguity.other)}")
    if ambiguity.measured is None:
        return [*lines, ""]
    changes = effects(ambiguity.measured, columns)
    planned_on = f"{ambiguity.measured.table} {ambiguity.measured.split} {ambiguity.measured.base}".rstrip()
    lines.append(f"- Measured on {planned_on}:" if changes else f"- Not measured yet (planned on {planned_on}).")
    for effect in changes:
        seeds = f"{len(effect.best.seeds)} seed{'s' * (len(effect.best.seeds) > 1)}"
        name = f"`{effect.tag}`, {effect.row}, scale {effect.scale}, {seeds}"
        lines.append(f"  - {name}: best {effect.best}, last ten {effect.last_ten}")
    return [*lines, ""]


def _selection(results: Sequence[Result]) -> list[str]:
    """How much accuracy choosing the best round adds."""
    lines = ["## Best or last round", "", SELECTION, ""]
    needed = {"ga_best", "ga_best_round", "ga_last", "ga_mean_last10"}
    complete = [r for r in results if "same_run_as" not in r and all(r.get(name) is not None for name in needed)]
    for scale in dict.fromkeys(r["scale"] for r in complete):
        at_scale = [r for r in complete if r["scale"] == scale]
        over_last, over_last_ten = (
            100 * np.mean([r["ga_best"] - r[name] for r in at_scale]) for name in ("ga_last", "ga_mean_last10")
        )
        count = f"{len(at_scale)} run{'s' * (len(at_scale) != 1)}"
        lines.append(
            f"- Scale {scale}, {count}: {over_last:.2f} points over the last, {over_last_ten:.2f} over the last ten."
        )
    return [*lines, *([] if complete else ["- Not measured yet."]), ""]


def _closest(ambiguities: Sequence[Ambiguity], columns: Sequence[Column], expected: Expectations) -> list[str]:
    """Which reading comes closest to the printed difference to FedAvg."""
    tags: dict[tuple[str, str, str, str], list[str]] = {}
    for measured in (ambiguity.measured for ambiguity in ambiguities if ambiguity.measured):
        for row in (row for row in measured.rows if row != BASELINE):
            tags.setdefault((measured.table, measured.split, measured.base, row), []).extend(measured.tags)
    lines = []
    for (table, split, base, row), reading_tags in tags.items():
        numbers = printed(expected.get(table, ()), split, METRIC)
        measured = Measured(table, split, (row,), tuple(reading_tags), base)
        for scale in dict.fromkeys(column.scale for column in columns):
            lines += _gaps(columns, scale, measured, numbers)
    left_aligned = tuple(Heading(text, left=True) for text in ("split", "method", "scale", "reading"))
    right_aligned = tuple(Heading(text) for text in ("seeds", "ours", "default's", "paper", "apart", "default's"))
    table = Table("", left_aligned + right_aligned, tuple(lines), stub="table")
    text = markdown(table) if lines else "Not measured yet.\n"
    return ["## Which reading comes closest to the papers", "", CLOSEST, "", text]


def _gaps(columns: Sequence[Column], scale: str, measured: Measured, numbers: Mapping[str, float]) -> list[Line]:
    """A line for each reading; of the reading and the default, the one nearer to the paper is bold."""
    row = measured.rows[0]
    default = _column(columns, scale, measured, measured.base)
    default_row, baseline = (default.row(name) if default else None for name in (row, BASELINE))
    if default_row is None or baseline is None or not {row, BASELINE} <= numbers.keys():
        return []
    paper, lines = numbers[row] - numbers[BASELINE], []
    for tag in measured.tags:
        column = _column(columns, scale, measured, tag)
        reading_row = column.row(row) if column else None
        if column is None or reading_row is None or reading_row.images != default_row.images:
            continue
        reading_delta = difference(reading_row, column.row(BASELINE) or baseline, METRIC)
        default_delta = reading_delta and difference(default_row, baseline, METRIC, seeds=reading_delta.seeds)
        if reading_delta is None or default_delta is None or reading_delta.seeds != default_delta.seeds:
            continue
        gaps, seeds = [abs(delta.mean - paper) for delta in (reading_delta, default_delta)], len(reading_delta.seeds)
        differences = str(reading_delta), str(default_delta), signed(paper)
        texts = (f"{measured.split} {measured.base}".rstrip(), row, scale, tag, str(seeds), *differences)
        gap_cells = [Cell(text=f"{gap:.2f}", rank=int(seeds > 1 and gap == min(gaps))) for gap in gaps]
        lines.append(Line(measured.table, (*(Cell(text=text) for text in texts), *gap_cells)))
    return lines
