"""`report.html`: everything in one file, which needs no other file and no network; page.html is its template."""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from fedjax_pcdd.analysis.curves import CURVES
from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.report.contents import own_table
from fedjax_pcdd.report.grouping import Group
from fedjax_pcdd.report.plots import curves, inline, legend
from fedjax_pcdd.report.tables import NOTHING, Cell, Column, Row, Table, aside, shown
from fedjax_pcdd.training.progress import pa_name, with_pa_named

BORDERS = {"-": "solid", "--": "dashed", ":": "dotted", "-.": "double"}
MACHINE = ("versions", "backend", "device", "devices", "platform", "cpus", "peak_memory_mb", "device_peak_memory_mb")
MOST_COLUMNS = 1000  # clients or classes of a table: a cell is some 130 bytes of the page
RUN_COLUMNS = (
    *(Column(heading, left=True) for heading in ("method", "data", "preset", "split", "state")),
    *(Column("seed", digits=0), Column("rounds"), Column("GA best", digits=1), Column("PA best", digits=1)),
    Column("measured", left=True),
)


def page(
    groups: Sequence[Group],
    papers: Sequence[Table],
    runs: Sequence[RunRecord],
    notes: Iterable[str],
    commands: Mapping[Path, str],
    own: Sequence[Table] = (),
) -> str:
    """The whole page.

    Args:
      groups: finished runs.
      papers: tables beside the papers' numbers.
      runs: all runs, unfinished ones too.
      notes: sentences above the tables.
      commands: how to start each run, by its folder.
      own: tables that a user asked for, which come first.
    """
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.lstrip_blocks = True
    environment.globals |= {
        "shown": shown, "aside": aside, "own_table": own_table, "legend": legend, "borders": BORDERS,
        "figures": _figures, "shares": _shares, "partitions": _partitions, "machine": _machine,
        "indented": partial(json.dumps, indent=2, ensure_ascii=False),
    }  # fmt: skip
    return environment.get_template("page.html").render(
        title="Federated runs", own=own, groups=groups, papers=papers, runs=runs, table_of_runs=_table_of_runs(runs),
        states=Counter(run.state for run in runs), notes=notes, commands=commands,
    )  # fmt: skip


def _figures(group: Group, index: int) -> list[Markup]:
    pictures = [(name, curves(group, name)) for name in CURVES]
    return [Markup(inline(svg, f"g{index}{name}")) for name, svg in pictures if svg is not None]


def _members(group: Group) -> list[tuple[str, RunRecord]]:
    """Every run with the name of its experiment."""
    return [(name, run) for name, entry in zip(group.labels, group.entries, strict=True) for run in entry.runs]


def _shares(group: Group) -> list[Table]:
    """Accuracies by class and by client, of the runs that have them."""
    runs = [(f"{name}, seed {run.seed}", run) for name, run in _members(group)]
    summaries = [run.result for _, run in runs]
    by_class = [(name, _last(run, "ga_per_class")) for name, run in runs]
    by_client = [(name, _clients(run)) for name, run in runs]
    tables = [
        _share_table("GA by class, last evaluation, %", "class", by_class),
        _share_table(with_pa_named("PA by client, best, %", summaries), "client", by_client),
    ]
    return [table for table in tables if table.columns]


def _last(run: RunRecord, name: str) -> list[float | None]:
    """The newest list of this name in metrics.jsonl."""
    return next((row[name] for row in reversed(run.rows) if row.get(name)), [])


def _clients(run: RunRecord) -> list[float | None]:
    """PA of the clients whose mean is the best PA of the tables; for older runs the last one in training."""
    newest = run.clients[-1].get("pa_per_client", []) if run.clients else []
    return run.result.get("pa_best_per_client", newest)


def _share_table(title: str, unit: str, members: Sequence[tuple[str, list[float | None]]]) -> Table:
    """A table with the shares [n] of each run in a row, or with the first of very many."""
    longest = max((len(shares) for _, shares in members), default=0)
    width = min(longest, MOST_COLUMNS)
    title += f"; the first {width} of {longest}" * (longest > width)
    columns = tuple(Column(f"{unit} {i}", digits=1) for i in range(width))
    rows = [(name, [*shares[:width], *[None] * (width - len(shares))]) for name, shares in members]
    return Table(title, columns, tuple(Row(name, tuple(map(_percent, shares))) for name, shares in rows), stub="run")


def _percent(share: float | None) -> Cell:
    return Cell() if share is None else Cell(100 * share)


def _partitions(group: Group) -> list[tuple[str, str]]:
    """Each picture once, in base64, with the seeds and names of the runs that have it."""
    holders: dict[bytes, dict[int, list[str]]] = {}
    for name, run in _members(group):
        if run.heat_map is not None:
            holders.setdefault(run.heat_map, {}).setdefault(run.seed, []).append(name)
    return [
        (
            base64.b64encode(picture).decode(),
            "; ".join(f"seed {seed}: {', '.join(labels)}" for seed, labels in names.items()),
        )
        for picture, names in holders.items()
    ]


def _table_of_runs(runs: Sequence[RunRecord]) -> Table:
    rows = []
    for run in runs:
        words = (run.method, run.dataset, run.preset or NOTHING, run.resolved.get("split") or NOTHING, run.state)
        done = Cell(run.rounds_done, text=f"{run.rounds_done} of {run.config['rounds']}")
        best = [_percent(run.result.get(name)) for name in ("ga_best", "pa_best")]
        measured = Cell(text=pa_name(run.summary).removeprefix("PA").strip() or NOTHING if run.summary else NOTHING)
        rows.append(Row(str(run.path), (*(Cell(text=word) for word in words), Cell(run.seed), done, *best, measured)))
    finished = [run.summary for run in runs if run.summary is not None]
    columns = tuple(column._replace(heading=with_pa_named(column.heading, finished)) for column in RUN_COLUMNS)
    return Table("Runs", columns, tuple(rows), stub="run")


def _machine(run: RunRecord) -> dict[str, Any]:
    return {name: run.result[name] for name in MACHINE if name in run.result}
