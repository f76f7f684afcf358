"""What the length of training decides: GA at the scale `long`, ten rounds at a time, as tables and a picture."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedjax_pcdd.analysis.curves import curve, frame, look
from fedjax_pcdd.report.plots import GREY, as_svg
from fedjax_pcdd.report.tables import NOTHING, Cell, Table, markdown, over_seeds
from fedjax_pcdd.report.tables import Column as Heading
from fedjax_pcdd.report.tables import Row as Line
from reproduction.columns import BASELINE, Column, Row, difference

SCALE, EVERY = "long", 10
FILE = "images/reproduction_long.svg"
WIDTH, HEIGHT, BELOW, ABOVE = 7.6, 3.0, 0.5, 0.65  # inches; the last two are beside the axes
HEADING = f"""## Ten rounds at a time

GA at the scale `{SCALE}` in percent, over the rounds that end with the one named (10: the mean of rounds 1 to 10), as
mean and standard deviation over the seeds; differences as mean and standard error over pairs of a seed. Nothing is
chosen on test samples here, and no p-values are given, as the columns follow each other.
"""


class Length(NamedTuple):
    """A row of the plan with its GA in blocks of rounds.

    Args:
      label: method and, if it is not the table's, reading.
      row: its results, whose metrics are the mean GA of each block in percent, by the block's last round.
    """

    label: str
    row: Row


def lengths_section(columns: Sequence[Column]) -> tuple[list[str], dict[str, str]]:
    """A section of the page, and its picture as SVG by file name; both empty without results.

    Args:
      columns: all, of every scale and reading.
    """
    splits: dict[str, list[Length]] = {}
    for column in columns:
        if column.scale == SCALE:
            splits.setdefault(column.split, []).extend(_length(column, row) for row in column.rows)
    splits = {split: lengths for split, lengths in splits.items() if any(map(_blocks, lengths))}
    if not splits:
        return [], {}
    words = "GA by ten rounds at the length of the papers: " + "; ".join(
        f"{split} {', '.join(length.label for length in lengths)}" for split, lengths in splits.items()
    )
    tables = [markdown(_table(split, lengths)) for split, lengths in splits.items()]
    return [HEADING, *tables, f"![{words}]({FILE})", ""], {FILE: _picture(splits, words)}


def _length(column: Column, row: Row) -> Length:
    name = row.label if column.tag in ("", row.name) else f"{row.label} {column.tag}"
    return Length(name, row._replace(results=tuple({**result, "metrics": _means(result)} for result in row.results)))


def _means(result: Mapping) -> dict[str, float]:
    """Mean GA in percent of each full block of rounds, by the block's last round; over the rounds that were tested."""
    ga = np.array(result.get("ga") or [], float)
    blocks = {end: ga[end - EVERY : end] for end in range(EVERY, len(ga) + 1, EVERY)}
    return {str(end): 100 * float(np.nanmean(block)) for end, block in blocks.items() if not np.isnan(block).all()}


def _blocks(length: Length) -> list[str]:
    """The last rounds of the blocks that any seed has."""
    return sorted({end for result in length.row.results for end in result["metrics"]}, key=int)


def _table(split: str, lengths: Sequence[Length]) -> Table:
    ends = sorted({end for length in lengths for end in _blocks(length)}, key=int)
    lines = [Line(each.label, tuple(over_seeds(each.row.values(end).values()) for end in ends)) for each in lengths]
    bases = [each.row for each in lengths if each.label == BASELINE]
    for each in lengths:
        for base in bases if each.row not in bases else ():
            deltas = [difference(each.row, base, end) for end in ends]
            cells = tuple(Cell(text=NOTHING if delta is None else str(delta)) for delta in deltas)
            lines.append(Line(f"{each.label} less {BASELINE}", cells))
    return Table(f"{split} · GA of ten rounds, %", tuple(Heading(end) for end in ends), tuple(lines))


def _picture(splits: Mapping[str, Sequence[Length]], words: str) -> str:
    """The curves, a panel for each split."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    # No automatic layout: it uses the widths of letters, which depend on the fonts of a machine.
    share = 1 / len(splits)
    for place, (split, lengths) in enumerate(splits.items()):
        area = (share * (place + 0.13), BELOW / HEIGHT, 0.84 * share, 1 - (BELOW + ABOVE) / HEIGHT)
        axes = figure.add_axes(area)
        for index, length in enumerate(lengths):
            _draw(axes, index, length)
        frame(axes, title=split, upwards="GA (%)" * (place == 0), colour=GREY)
        axes.title.set_color(GREY)
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1.1), ncols=2, frameon=False, fontsize=7, labelcolor=GREY,
            borderaxespad=0.2,
        )  # fmt: skip
    return as_svg(figure, words)


def _draw(axes: Axes, index: int, length: Length) -> None:
    colour, style = look(index)
    ends = _blocks(length)
    cells = [over_seeds(length.row.values(end).values()) for end in ends]
    means = np.array([np.nan if cell.mean is None else cell.mean for cell in cells])
    deviation = np.array([cell.std or 0.0 for cell in cells])
    line = {"color": colour, "linestyle": style, "label": length.label}
    curve(axes, np.array(ends, int), means, deviation=deviation, **line)
