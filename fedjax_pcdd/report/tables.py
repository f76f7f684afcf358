"""One table for every output: numbers over seeds, with those of a paper beside them, and their look in each format.

Terminal, Markdown, LaTeX (with the package booktabs) and CSV are written here; page.html has the macro for HTML.
"""

import csv
import io
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
from rich.table import Table as RichTable
from rich.text import Text

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.metrics import DIGITS

CSV_COLUMNS = (
    *("table", "method", "variant", "settings", "column", "metric", "mean", "std", "seeds"),
    *("paper", "paper_std", "difference", "rank", "note"),
)
NOTHING = "–"
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "·": r"$\cdot$"}
_LATEX |= {"±": r"$\pm$", "−": "$-$", "–": "--"}
_LATEX |= {sign: "\\" + sign for sign in "&%$#_{}"}


class Column(NamedTuple):
    """One column of a table."""

    heading: str
    metric: str = ""  # its name in the CSV
    digits: int = 2  # after the point
    best: int = 0  # 1 if the largest number is the best, -1 if the smallest is, 0 if none is better than another
    left: bool = False  # whether it holds text, which is left-aligned


PLAIN = Column("")


@dataclass(frozen=True)
class Cell:
    """One entry of a table."""

    mean: float | None = None  # over n seeds
    std: float | None = None  # over n seeds, None for fewer than two
    n: int = 0
    text: str | None = None  # what is shown in place of a number
    beside: "Cell | None" = None  # what the paper prints for it
    rank: int = 0  # 1 for the best of its column, 2 for the second best, else 0
    note: str = ""  # a remark on it
    origin: frozenset[Hashable] = frozenset()  # of each run of the mean its length, its seed and what else may differ

    @property
    def difference(self) -> float | None:
        """Our mean minus the paper's."""
        paper_mean = self.beside and self.beside.mean
        return None if self.mean is None or paper_mean is None else self.mean - paper_mean

    @property
    def hint(self) -> str:
        """Number of seeds, and the note, as text."""
        return "; ".join(filter(None, [f"{self.n} seed{'s' * (self.n != 1)}" if self.n else "", self.note]))


class Row(NamedTuple):
    """One line; `names` are method, variant and settings for the CSV."""

    label: str
    cells: tuple[Cell, ...]
    names: tuple[str, str, str] = ("", "", "")


@dataclass(frozen=True)
class Table:
    """Rows below headings, the first of which, `stub`, is that of the rows' labels."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    remarks: str = ""
    stub: str = "method"

    @property
    def headings(self) -> list[str]:
        """All headings, with that of the labels."""
        return [self.stub, *(column.heading for column in self.columns)]

    @property
    def left(self) -> list[bool]:
        """Which columns are left-aligned, with that of the labels."""
        return [True, *(column.left for column in self.columns)]


def over_seeds(values: Iterable[float | None], origins: Iterable[Hashable] = (), factor: float = 1.0) -> Cell:
    """Mean and sample deviation of the values that exist and are finite, times a factor, as 100 for shares in percent.

    Args:
      values: one for each seed.
      origins: of each value, for `Cell.origin`; () if all cells are of the same seeds.

    >>> over_seeds([1.0, None, 3.0]) == Cell(mean=2.0, std=2**0.5, n=2)
    True
    """
    pairs = [pair for pair in zip_longest(values, origins) if pair[0] is not None and np.isfinite(pair[0])]
    if not pairs:
        return Cell()
    finite = factor * np.array([value for value, _ in pairs], float)
    std = float(finite.std(ddof=1)) if len(finite) > 1 else None
    origin = frozenset(origin for _, origin in pairs if origin is not None)
    return Cell(float(finite.mean()), std, len(finite), origin=origin)


def texts(title: str, headings: Sequence[str], lines: Iterable[Sequence[str]], left: Sequence[str] = ()) -> Table:
    """A table of texts; columns are right-aligned except the first and those named in `left`."""
    columns = tuple(Column(heading, left=heading in left) for heading in headings[1:])
    rows = tuple(Row(first, tuple(Cell(text=text) for text in cells)) for first, *cells in lines)
    return Table(title, columns, rows, stub=headings[0])


def shown(cell: Cell, column: Column = PLAIN) -> str:
    """Mean and deviation of a cell, as text.

    >>> shown(Cell(74.214, 0.41, 3)), shown(Cell(text="/")), shown(Cell())
    ('74.21 ± 0.41', '/', '–')
    """
    if cell.text is not None or cell.mean is None:
        return NOTHING if cell.text is None else cell.text
    text = f"{cell.mean:.{column.digits}f}" + ("" if cell.std is None else f" ± {cell.std:.{column.digits}f}")
    return text.replace("-", "−")


def aside(cell: Cell, column: Column = PLAIN) -> str:
    """The paper's number, and the difference if both exist and one can be better than the other.

    >>> aside(Cell(74.0, beside=Cell(75.5, 0.2)), Column("GA", best=1))
    '75.50 ± 0.20, −1.50'
    """
    if cell.beside is None or cell.beside == Cell():
        return ""
    text = shown(cell.beside, column)
    if cell.difference is None or not column.best:
        return text
    return f"{text}, {cell.difference:+.{column.digits}f}".replace("-", "−")


def ranked(table: Table) -> Table:
    """The table with the best and second best of each column marked.

    Nothing is marked among fewer than two numbers, nor if those of a column differ in their number or their origin, as
    means over other seeds or of runs of another length.
    """
    ranks = [_ranks([row.cells[c] for row in table.rows], column.best) for c, column in enumerate(table.columns)]
    rows = tuple(
        row._replace(cells=tuple(replace(cell, rank=ranks[c][r]) for c, cell in enumerate(row.cells)))
        for r, row in enumerate(table.rows)
    )
    return replace(table, rows=rows)


def _ranks(cells: Sequence[Cell], best: int) -> list[int]:
    """1 for the best, 2 for the second best, the same for equal ones, else 0."""
    means = [None if cell.mean is None else round(cell.mean, DIGITS) for cell in cells]
    numbers = [mean for mean in means if mean is not None]
    origins = {(cell.n, cell.origin) for cell in cells if cell.mean is not None}
    if not best or len(numbers) < 2 or len(origins) > 1:
        return [0] * len(cells)
    leading = sorted(set(numbers), reverse=best > 0)[:2]
    return [leading.index(mean) + 1 if mean in leading else 0 for mean in means]


def between(text: str, marks: tuple[str, str], inner: str, source: str) -> str:
    """The text of a page with `inner` between its two marks, in place of what is there.

    Raises:
      UserError: it lacks one of the marks, or they are in the wrong order; `source` is the name of the page.

    >>> between("a [b]", ("[", "]"), "c", "page.md")
    'a [\\nc\\n]'
    """
    before, begin, after_begin = text.partition(marks[0])
    _, end, after = after_begin.partition(marks[1])
    if not (begin and end):
        raise UserError(f"{source} needs the lines {' and '.join(mark.strip() for mark in marks)}: add them.")
    return f"{before}{begin}\n{inner}\n{end}{after}"


def escaped(text: str) -> str:
    """Plain text for Markdown, in a table too.

    >>> print(escaped("a|b *c* <d> mu_1 _e_ [f](g) [0, 1]"))
    a\\|b \\*c\\* &lt;d&gt; mu_1 \\_e\\_ [f\\](g) [0, 1]
    """
    text = " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())
    return re.sub(r"([\\`*|~]|](?=[(\[:])|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", text)


def terminal(table: Table) -> RichTable:
    """The table for a console."""
    rich = RichTable(title=table.title or None, title_justify="left")
    for i, (heading, left) in enumerate(zip(table.headings, table.left, strict=True)):
        # Labels fold instead of losing their ends, so that they can be told apart at any width.
        rich.add_column(Text(heading), justify="left" if left else "right", overflow="ellipsis" if i else "fold")
    for line in _lines(table, ("{}",) * 3, str):
        rich.add_row(*map(Text, line))
    return rich


def markdown(table: Table, *, aligned: bool = False, escape: Callable[[str], str] = escaped) -> str:
    """One GitHub table under its title.

    Args:
      aligned: whether to pad columns, so that it reads as text too.
      escape: turns the text of a cell into Markdown; `str` for cells that are Markdown.
    """
    lines = [[escape(heading) for heading in table.headings], *_lines(table, ("{}", "**{}**", "<u>{}</u>"), escape)]
    widths = [max(map(len, column)) if aligned else 0 for column in zip(*lines, strict=True)]
    rule = ["-" * (width + 2) for width in widths] if aligned else ["---" if left else "---:" for left in table.left]
    piped = ["| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines]
    head = [f"### {escape(table.title)}", ""] * bool(table.title) + [escape(table.remarks), ""] * bool(table.remarks)
    return "\n".join([*head, piped[0], f"|{'|'.join(rule)}|", *piped[1:]]) + "\n"


def _lines(table: Table, marks: Sequence[str], escape: Callable[[str], str]) -> list[list[str]]:
    """The rows as text: numbers marked by their rank, those of the paper in brackets after them."""
    lines = []
    for row in table.rows:
        line = [escape(row.label)]
        for cell, column in zip(row.cells, table.columns, strict=True):
            text, paper = marks[cell.rank].format(escape(shown(cell, column))), aside(cell, column)
            line.append(f"{text} ({escape(paper)})" if paper else text)
        lines.append(line)
    return lines


def code(text: str) -> str:
    """Text as a code span of Markdown, whatever it contains.

    >>> code("runs/a`b")
    '``runs/a`b``'
    """
    fence = "`" * (1 + max((len(ticks) for ticks in re.findall("`+", text)), default=0))
    gap = " " * (text.startswith("`") or text.endswith("`"))
    return f"{fence}{gap}{' '.join(text.splitlines())}{gap}{fence}"


def latex(table: Table) -> str:
    """The table as a floating table of LaTeX."""
    lines = _lines(table, ("{}", r"\textbf{{{}}}", r"\underline{{{}}}"), for_latex)
    rows = [" & ".join(line) + r" \\" for line in [[*map(for_latex, table.headings)], *lines]]
    caption = ". ".join(map(for_latex, filter(None, (table.title, table.remarks.removesuffix(".")))))
    layout = "".join("l" if left else "r" for left in table.left)
    return "\n".join([
        r"\begin{table}", r"\centering", rf"\caption{{{caption}}}", rf"\begin{{tabular}}{{{layout}}}", r"\toprule",
        rows[0], r"\midrule", *rows[1:], r"\bottomrule", r"\end{tabular}", r"\end{table}", "",
    ])  # fmt: skip


def for_latex(text: str) -> str:
    """Plain text for LaTeX.

    >>> print(for_latex("mu_1\\n\\n= 5 %"))
    mu\\_1 = 5 \\%
    """
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))  # a caption has no blank line


def comma_separated(tables: Sequence[Table]) -> str:
    """All tables as one tidy CSV, one number a row, nothing rounded."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in tables:
        for row in table.rows:
            for column, cell in zip(table.columns, row.cells, strict=True):
                if shown(cell) == NOTHING and not aside(cell):
                    continue
                paper = cell.beside or Cell()
                numbers = (cell.mean, cell.std, cell.n, paper.mean, paper.std, cell.difference, cell.rank or None)
                writer.writerow([table.title, *row.names, column.heading, column.metric, *numbers, cell.note])
    return text.getvalue()
