"""docs/ambiguities.md: what the papers leave open, what we do, and what other readings were measured to change."""

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
one seed the nearer one in bold. One seed's differences are mostly noise."""


class Measured(NamedTuple):
    """Where other readings were run.

    Args:
      table, split: the column that they depart from.
      rows: methods, as `fedmr`.
      tags: of the readings.
      base: tag of the column with the default.
    """

    table: str
    split: str
    rows: tuple[str, ...]
    tags: tuple[str, ...]
    base: str = ""


class Ambiguity(NamedTuple):
    """One thing that is open.

    Args:
      paper, question: what it is about.
      evidence: what paper and code say.
      default: what we do.
      other: options that give other readings.
      measured: where they were run, None where they were not.
    """

    paper: str
    question: str
    evidence: str
    default: str
    other: tuple[str, ...]
    measured: Measured | None = None


class Effect(NamedTuple):
    """What a reading changes in one row, at one scale."""

    scale: str
    tag: str
    row: str
    best: Difference
    last_ten: Difference


def read_ambiguities(path: Path) -> list[Ambiguity]:
    """The ambiguities in a YAML file; UserError where one has a wrong or missing key."""
    ambiguities = []
    for number, entry in enumerate(load_mapping(read_text(path), str(path)).get("ambiguities", []), 1):
        where = f"ambiguity {number} of {path}"
        given: dict[str, Any] = as_mapping(entry, where)
        given["other"] = tuple(given.get("other", ()))
        try:
            if "measured" in given:
                part: dict[str, Any] = as_mapping(given["measured"], f"'measured' of {where}")
                part |= {name: tuple(part[name]) for name in ("rows", "tags")}
                given["measured"] = Measured(**part)
            ambiguities.append(Ambiguity(**given))
        except (KeyError, TypeError):
            raise UserError(f"{where} has a key too many or too few: see the first ones.") from None
    return ambiguities


def tags_of(ambiguities: Iterable[Ambiguity]) -> set[str]:
    """The tags of all readings."""
    return {tag for one in ambiguities if one.measured for tag in one.measured.tags}


def effects(measured: Measured, columns: Sequence[Column]) -> list[Effect]:
    """What the readings change, in each row and at each scale that has them."""
    changes = []
    for tag in measured.tags:
        for column in columns:
            base = _column(columns, column.scale, measured, measured.base)
            if (column.table, column.split, column.tag) != (measured.table, measured.split, tag) or base is None:
                continue
            for name in measured.rows:
                changed = _change(column.row(name), base.row(name))
                changes += [Effect(column.scale, tag, name, *changed)] if changed else []
    return changes


def _column(columns: Sequence[Column], scale: str, measured: Measured, tag: str) -> Column | None:
    wanted = (scale, measured.table, measured.split, tag)
    return next((one for one in columns if (one.scale, one.table, one.split, one.tag) == wanted), None)


def _change(other: Row | None, default: Row | None) -> tuple[Difference, Difference] | None:
    if other is None or default is None:
        return None
    best, ten = (difference(other, default, METRIC, last_ten=ten) for ten in (False, True))
    return None if best is None or ten is None else (best, ten)


def ambiguities_page(
    ambiguities: Sequence[Ambiguity], columns: Sequence[Column], expected: Expectations, results: Sequence[Result]
) -> str:
    """The text of the page."""
    lines = [INTRODUCTION, *_selection(results), *_closest(ambiguities, columns, expected)]
    for paper in dict.fromkeys(one.paper for one in ambiguities):
        lines += [f"## {paper}", ""]
        for one in (one for one in ambiguities if one.paper == paper):
            lines += _entry(one, columns)
    return "\n".join(lines).rstrip() + "\n"


def _entry(one: Ambiguity, columns: Sequence[Column]) -> list[str]:
    lines = [f"**{one.question}.** {one.evidence.strip()}", "", f"- Default: {one.default.strip()}"]
    if one.other:
        lines.append(f"- Other readings: {', '.join(f'`{option}`' for option in one.other)}")
    if one.measured is None:
        return [*lines, ""]
    measured = effects(one.measured, columns)
    where = f"{one.measured.table} {one.measured.split} {one.measured.base}".rstrip()
    lines.append(f"- Measured on {where}:" if measured else f"- Not measured yet (planned on {where}).")
    for effect in measured:
        seeds = f"{len(effect.best.seeds)} seed{'s' * (len(effect.best.seeds) > 1)}"
        name = f"`{effect.tag}`, {effect.row}, scale {effect.scale}, {seeds}"
        lines.append(f"  - {name}: best {effect.best}, last ten {effect.last_ten}")
    return [*lines, ""]


def _selection(results: Sequence[Result]) -> list[str]:
    """How much choosing the best round adds."""
    lines = ["## Best or last round", "", SELECTION, ""]
    needed = {"ga_best", "ga_best_round", "ga_last", "ga_mean_last10"}
    known = [r for r in results if "same_run_as" not in r and all(r.get(name) is not None for name in needed)]
    for scale in dict.fromkeys(r["scale"] for r in known):
        own = [r for r in known if r["scale"] == scale]
        last, ten = (100 * np.mean([r["ga_best"] - r[name] for r in own]) for name in ("ga_last", "ga_mean_last10"))
        runs = f"{len(own)} run{'s' * (len(own) != 1)}"
        lines.append(f"- Scale {scale}, {runs}: {last:.2f} points over the last, {ten:.2f} over the last ten.")
    return [*lines, *([] if known else ["- Not measured yet."]), ""]


def _closest(ambiguities: Sequence[Ambiguity], columns: Sequence[Column], expected: Expectations) -> list[str]:
    """Which reading comes closest to the printed difference to FedAvg."""
    tags: dict[tuple[str, str, str, str], list[str]] = {}
    for m, row in _readings(ambiguities):
        tags.setdefault((m.table, m.split, m.base, row), []).extend(m.tags)
    lines = []
    for (table, split, base, row), own in tags.items():
        numbers = printed(expected.get(table, ()), split, METRIC)
        measured = Measured(table, split, (row,), tuple(own), base)
        for scale in dict.fromkeys(one.scale for one in columns):
            lines += _gaps(columns, scale, measured, numbers)
    left = tuple(Heading(text, left=True) for text in ("split", "method", "scale", "reading"))
    right = tuple(Heading(text) for text in ("seeds", "ours", "default's", "paper", "apart", "default's"))
    table = markdown(Table("", left + right, tuple(lines), stub="table")) if lines else "Not measured yet.\n"
    return ["## Which reading comes closest to the papers", "", CLOSEST, "", table]


def _readings(ambiguities: Iterable[Ambiguity]) -> list[tuple[Measured, str]]:
    """Where readings of a method other than FedAvg are measured, and the method."""
    return [(one.measured, row) for one in ambiguities if one.measured for row in one.measured.rows if row != BASELINE]


def _gaps(columns: Sequence[Column], scale: str, measured: Measured, numbers: Mapping[str, float]) -> list[Line]:
    """A line for each reading, the nearer to the paper of it and the default in bold."""
    row = measured.rows[0]
    default = _column(columns, scale, measured, measured.base)
    usual, plain = (default.row(name) if default else None for name in (row, BASELINE))
    if usual is None or plain is None or not {row, BASELINE} <= numbers.keys():
        return []
    paper, lines = numbers[row] - numbers[BASELINE], []
    for tag in measured.tags:
        column = _column(columns, scale, measured, tag)
        ours = column.row(row) if column else None
        over = difference(ours, (column and column.row(BASELINE)) or plain, METRIC) if ours else None
        before = over and difference(usual, plain, METRIC, seeds=over.seeds)
        if over is None or before is None or over.seeds != before.seeds:
            continue
        gaps = [abs(one.mean - paper) for one in (over, before)]
        words = (measured.split, row, scale, tag, str(len(over.seeds)), str(over), str(before), signed(paper))
        apart = [Cell(text=f"{gap:.2f}", rank=int(len(over.seeds) > 1 and gap == min(gaps))) for gap in gaps]
        lines.append(Line(measured.table, (*(Cell(text=word) for word in words), *apart)))
    return lines
