"""Tables as Markdown, CSV and LaTeX (with the package booktabs)."""

import csv
import io
from collections.abc import Sequence

from fedjax_pcdd.report.expected import DIGITS
from fedjax_pcdd.report.tables import NOT_RANKED, Cell, Table

CSV_COLUMNS = (
    *("table", "method", "variant", "settings", "column", "metric", "mean", "std", "seeds"),
    *("paper", "paper_std", "difference", "rank", "note"),
)
LEGEND = (
    "Mean ± standard deviation over seeds; in brackets the paper's number and the difference to it. "
    "The best mean of a column is bold, the second best underlined."
)
_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "·": r"$\cdot$"}
_LATEX |= {"±": r"$\pm$", "−": "$-$", "–": "--"}
_LATEX |= {sign: "\\" + sign for sign in "&%$#_{}"}


def own(one: Cell, metric: str = "") -> str:
    """Mean and deviation; a target that some seed has not reached is a stroke, as in FedRL's Table 2.

    >>> own(Cell(74.214, 0.41, 3)), own(Cell(missed=1), "rounds_to_target")
    ('74.21 ± 0.41', '/')
    """
    if one.mean is None:
        return "/" if one.missed else "–"
    digits = DIGITS.get(metric, 2)
    return f"{one.mean:.{digits}f}" + ("" if one.std is None else f" ± {one.std:.{digits}f}")


def beside(one: Cell, metric: str = "") -> str:
    """The paper's number, and the difference where both are there and machines do not matter.

    >>> beside(Cell(74.0, None, 1, paper=75.5, paper_std=0.2))
    '75.50 ± 0.20, −1.50'
    """
    if one.paper is None:
        return "/" if one.paper_missed else ""
    text = own(Cell(one.paper, one.paper_std), metric)
    if one.difference is None or metric in NOT_RANKED:
        return text
    return f"{text}, {one.difference:+.{DIGITS.get(metric, 2)}f}".replace("-", "−")


def markdown(table: Table) -> str:
    """One GitHub table under its title."""
    lines = [f"### {table.title}", "", *([table.remarks, ""] if table.remarks else [])]
    lines.append(_piped(["method", *table.columns]))
    lines.append("|---|" + "---:|" * len(table.columns))
    for row, name in zip(table.rows, table.labels, strict=True):
        cells = [_in_markdown(one, metric) for one, metric in zip(row.cells, table.metrics, strict=True)]
        lines.append(_piped([name.replace("|", "\\|"), *cells]))
    return "\n".join(lines) + "\n"


def _piped(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _in_markdown(one: Cell, metric: str) -> str:
    text = own(one, metric)
    text = {1: f"**{text}**", 2: f"<u>{text}</u>"}.get(one.rank, text)
    paper = beside(one, metric)
    return f"{text} ({paper})" if paper else text


def comma_separated(tables: Sequence[Table]) -> str:
    """All tables as one tidy CSV, one number a row, nothing rounded."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_COLUMNS)
    for table in tables:
        for row in table.rows:
            for column, metric, one in zip(table.columns, table.metrics, row.cells, strict=True):
                if own(one) == "–" and not beside(one):
                    continue
                names = (table.title, row.method, row.variant, row.settings, column, metric)
                numbers = (one.mean, one.std, one.seeds, one.paper, one.paper_std, one.difference, one.rank or None)
                writer.writerow([*names, *numbers, one.note])
    return text.getvalue()


def latex(table: Table) -> str:
    """One floating table."""
    head = " & ".join(map(escaped, ["method", *table.columns]))
    caption = ". ".join(map(escaped, filter(None, (table.title, table.remarks.removesuffix(".")))))
    lines = [
        r"\begin{table}", r"\centering", rf"\caption{{{caption}}}",
        rf"\begin{{tabular}}{{l{'r' * len(table.columns)}}}", r"\toprule", head + r" \\", r"\midrule",
    ]  # fmt: skip
    for row, name in zip(table.rows, table.labels, strict=True):
        cells = [_in_latex(one, metric) for one, metric in zip(row.cells, table.metrics, strict=True)]
        lines.append(" & ".join([escaped(name), *cells]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"


def _in_latex(one: Cell, metric: str) -> str:
    text = escaped(own(one, metric))
    text = {1: rf"\textbf{{{text}}}", 2: rf"\underline{{{text}}}"}.get(one.rank, text)
    paper = beside(one, metric)
    return f"{text} ({escaped(paper)})" if paper else text


def escaped(text: str) -> str:
    """Plain text for LaTeX.

    >>> print(escaped("mu_1 = 5 %"))
    mu\\_1 = 5 \\%
    """
    return "".join(_LATEX.get(letter, letter) for letter in text)
