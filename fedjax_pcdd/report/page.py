"""`report.html`: everything in one file that needs no other and no network."""

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.report.curves import curves, inline, legend
from fedjax_pcdd.report.formats import beside, own
from fedjax_pcdd.report.grouping import Group
from fedjax_pcdd.report.tables import Cell, Table, own_table

TEMPLATE = Path(__file__).with_name("page.html")
LEGEND = (
    "Mean ± standard deviation over seeds, below it the paper's number and the difference to it where there is one. "
    "The best mean of a column is bold, the second best underlined. A click on a heading sorts."
)
BORDERS = {"-": "solid", "--": "dashed", ":": "dotted", "-.": "double"}
MACHINE = ("versions", "backend", "device", "devices", "platform", "cpus", "peak_memory_mb", "device_peak_memory_mb")


def page(groups: Sequence[Group], papers: Sequence[Table], runs: Sequence[RunRecord], notes: Iterable[str]) -> str:
    """The whole page.

    Args:
      groups: finished runs.
      papers: tables beside the papers' numbers.
      runs: all runs, unfinished ones too.
      notes: sentences above the tables.
    """
    sections = [("tables", "Beside the papers", "".join(map(_table, papers)))] if papers else []
    sections += [(f"group{i}", group.title, _group(group, i)) for i, group in enumerate(groups)]
    sections.append(("runs", "Runs", _runs(runs)))
    waiting = sum(run.summary is None for run in runs)
    subtitle = f"{len(runs) - waiting} finished runs, {waiting} unfinished. {LEGEND}"
    parts = [f'<section id="{name}"><h2>{escape(title)}</h2>{body}</section>' for name, title, body in sections]
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title="Federated runs", subtitle=escape(subtitle), body=said + "\n".join(parts),
        contents="".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in sections),
    )  # fmt: skip


def _group(group: Group, index: int) -> str:
    """Table, curves, accuracies by class and client, and partitions of a group."""
    named = zip(group.labels, group.entries, strict=True)
    members = [(name, run) for name, entry in named for run in entry.runs]
    runs = [(f"{name}, seed {run.seed}", run) for name, run in members]
    return "".join([
        _table(own_table(group), titled=False),
        _curves(group, index),
        _shares("GA by class, last evaluation, %", "class", [(name, _last(run, "ga_per_class")) for name, run in runs]),
        _shares("PA by client, best, %", "client", [(name, _clients(run)) for name, run in runs]),
        _partitions(members),
    ])  # fmt: skip


def _table(table: Table, titled: bool = True) -> str:
    rows = []
    for row, name in zip(table.rows, table.labels, strict=True):
        cells = [_cell(one, metric) for one, metric in zip(row.cells, table.metrics, strict=True)]
        rows.append(f"<tr><td>{escape(name)}</td>{''.join(cells)}</tr>")
    title = f"<h3>{escape(table.title)}</h3>" if titled else ""
    note = f"<p>{escape(table.remarks)}</p>" if table.remarks else ""
    return title + note + _sortable(["method", *table.columns], rows)


def _cell(one: Cell, metric: str) -> str:
    text = own(one, metric)
    text = {1: f"<b>{text}</b>", 2: f"<u>{text}</u>"}.get(one.rank, text)
    paper = beside(one, metric)
    small = f"<small>paper {paper}</small>" if paper else ""
    value = "" if one.mean is None else f' data-v="{one.mean!r}"'
    hint = [f"{one.seeds} seed{'s' * (one.seeds != 1)}"] if one.seeds else []
    hint += [f"not reached by {one.missed} of them"] if one.missed else []
    hint += [one.note] if one.note else []
    return f'<td{value} title="{escape("; ".join(hint))}">{text}{small}</td>'


def _sortable(headings: Sequence[str], rows: Iterable[str], kind: str = "") -> str:
    """A table of which a click on a heading sorts the rows; the first column stays in sight."""
    head = "".join(f'<th scope="col"><button type="button">{escape(text)}</button></th>' for text in headings)
    table = f"<table{kind}><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="wide" tabindex="0" role="region" aria-label="table">{table}</div>'


def _curves(group: Group, index: int) -> str:
    figures = []
    for name in ("ga", "pa", "loss"):
        svg = curves(group, name)
        if svg is not None:
            figures.append(f"<figure>{inline(svg, f'g{index}{name}')}</figure>")
    lines = [
        f'<li><i style="border-top-style:{BORDERS[style]};border-color:{colour}"></i>{escape(text)}</li>'
        for colour, style, text in legend(group)
    ]
    caption = "<p>Mean over seeds, with a band of one standard deviation; PA of the models as they are in training.</p>"
    key = f'<ul class="key">{"".join(lines)}</ul>'
    return f'<h3>Learning curves</h3>{caption}{key}<div class="side">{"".join(figures)}</div>'


def _last(run: RunRecord, name: str) -> list[float | None]:
    """The newest list of this name in metrics.jsonl."""
    return next((row[name] for row in reversed(run.rows) if row.get(name)), [])


def _clients(run: RunRecord) -> list[float | None]:
    """Those whose mean is the best PA of the tables; of older runs the last ones in training."""
    newest = run.clients[-1].get("pa_per_client", []) if run.clients else []
    return (run.summary or {}).get("pa_best_per_client", newest)


def _shares(title: str, what: str, found: Sequence[tuple[str, list[float | None]]]) -> str:
    """Shares [n] of each run in a row, darker where larger; "" without any."""
    width = max((len(shares) for _, shares in found), default=0)
    if not width:
        return ""
    rows = []
    for name, shares in found:
        cells = [_share(value) for value in [*shares, *[None] * (width - len(shares))]]
        rows.append(f"<tr><td>{escape(name)}</td>{''.join(cells)}</tr>")
    headings = ["run", *(f"{what} {i}" for i in range(width))]
    return f"<h3>{escape(title)}</h3>" + _sortable(headings, rows, ' class="heat"')


def _share(value: float | None) -> str:
    if value is None:
        return "<td>–</td>"
    return f'<td data-v="{value!r}" style="--share:{60 * value:.1f}%">{100 * value:.1f}</td>'


def _partitions(members: Sequence[tuple[str, RunRecord]]) -> str:
    """Each picture once, with the seeds and names of the runs that have it."""
    found: dict[bytes, dict[int, list[str]]] = {}
    for name, run in members:
        picture = run.heat_map
        if picture is not None:
            found.setdefault(picture, {}).setdefault(run.seed, []).append(name)
    figures = []
    for picture, holders in found.items():
        text = escape("; ".join(f"seed {seed}: {', '.join(names)}" for seed, names in holders.items()))
        alt, data = f"training samples of each class at each client, {text}", base64.b64encode(picture).decode()
        figures.append(
            f'<figure><img alt="{alt}" src="data:image/png;base64,{data}"><figcaption>{text}</figcaption></figure>'
        )
    return f'<h3>Partitions</h3><div class="side">{"".join(figures)}</div>' if figures else ""


def _runs(runs: Sequence[RunRecord]) -> str:
    rows = []
    for run in runs:
        summary = run.summary or {}
        shares = [_share(summary.get(name)) for name in ("ga_best", "pa_best")]
        state = "finished" if run.summary is not None else "unfinished"
        done = f'<td data-v="{run.rounds_done}">{run.rounds_done} of {run.config["rounds"]}</td>'
        texts = [str(run.path), run.method, run.dataset, run.preset or "–", run.resolved.get("split") or "–"]
        cells = "".join(f"<td>{escape(text)}</td>" for text in [*texts, state])
        rows.append(f'<tr>{cells}<td data-v="{run.seed}">{run.seed}</td>{done}{"".join(shares)}</tr>')
    headings = ("run", "method", "data", "preset", "split", "state", "seed", "rounds", "GA best", "PA best")
    return (
        _sortable(headings, rows, ' class="runs"') + "<h3>Command and configuration</h3>" + "".join(map(_details, runs))
    )


def _details(run: RunRecord) -> str:
    """Command, configuration, hyper-parameters as used, and machine of a run."""
    machine = {name: (run.summary or {}).get(name) for name in MACHINE if name in (run.summary or {})}
    recorded = (
        "" if run.resolved.get("command") else "<p>The command was not recorded; this one has the same options.</p>"
    )
    return (
        f"<details><summary>{escape(str(run.path))}</summary>{recorded}"
        f'<pre class="command">{escape(run.command)}</pre><h3>config.yaml</h3><pre>{escape(run.text)}</pre>'
        f"<h3>As used</h3><pre>{_json(run.resolved)}</pre>"
        + (f"<h3>Machine</h3><pre>{_json(machine)}</pre>" if machine else "")
        + "</details>"
    )


def _json(value: Any) -> str:
    return escape(json.dumps(value, indent=2, ensure_ascii=False))
