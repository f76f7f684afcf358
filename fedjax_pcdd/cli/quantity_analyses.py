"""Analyses of what was tracked in training: tables and pictures of quantities by round."""

from collections.abc import Callable
from typing import Any

from fedjax_pcdd.analysis.pictures import draw, draw_columns
from fedjax_pcdd.cli.analysis_text import Options, labels_of, number, partition_of, printed, table
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.collect import RunRecord, readable
from fedjax_pcdd.report.expected import EIGENVALUES

_BOTH = [(f"{key}, {model}", model, key) for key in ("existing", "missing") for model in ("global", "local")]
# Columns of the quantities' tables: heading, `global` or `local`, key.
COLUMNS_OF = {
    "classes": _BOTH, "angles": _BOTH,
    "features": [("all, global", "global", "all"), ("existing, global", "global", "existing"),
                 ("existing, local", "local", "existing")],
    "spectrum": [("variance", "global", "variance"), ("live dimensions", "global", "dimensions"),
                 ("within classes", "global", "class_variance"), ("clients' models", "local", "variance")],
    "intra": [("global", "global", "loss"), ("local", "local", "loss")],
    "gradients": [("norm of gradients", "local", "norm"), ("clipped steps", "local", "clipped"),
                  ("weights, local", "local", "weights"), ("weights, global", "global", "weights")],
}  # fmt: skip
PRINTED = {"spectrum": EIGENVALUES}  # quantity -> metric under which a paper prints a number of it


def tracked(name: str) -> Callable[[list[RunRecord], Options], str]:
    """The function that makes the table and the picture of a quantity."""

    def work(records: list[RunRecord], given: Options) -> str:
        if given.get("by_split") == "true" and "output" not in given:
            raise UserError("draws a column for each partition: name the picture with `output`.", field="by_split")
        labels, runs = labels_of(records), readable(records, lambda record: _rows_of(record, name))
        rows = {labels[record.path]: run_rows for record, run_rows in runs}
        if given.get("by_split") == "true":
            groups: dict[str, dict[str, Any]] = {}
            for record, track_rows in runs:
                group = groups.setdefault(partition_of(record), {})
                group[str(record.path) if record.path.name in group else record.path.name] = track_rows
            draw_columns(name, groups, given["output"])
        elif "output" in given:
            draw(name, rows if len(rows) > 1 else {"": next(iter(rows.values()))}, given["output"])
        heads = ["run", "round", *(head for head, _, _ in COLUMNS_OF[name])]
        lines = []
        for label, (*_, last) in rows.items():
            cells = [number((last[name].get(model) or {}).get(key)) for _, model, key in COLUMNS_OF[name]]
            lines.append([label, str(last["round"]), *cells])
        if name in PRINTED:
            heads.append("paper")
            for line, (record, _) in zip(lines, runs, strict=True):
                line.append(number(printed(record, PRINTED[name])))
        return table(heads, lines)

    return work


def _rows_of(record: RunRecord, name: str) -> list[dict[str, Any]]:
    """Lines of track.jsonl that have a quantity; if there are none, one line from the run's last checkpoint."""
    return [row for row in record.tracked if name in row] or [_last(record, name)]


def _last(record: RunRecord, name: str) -> dict[str, Any]:
    from fedjax_pcdd.api.runs import load_run  # only these analyses restore checkpoints
    from fedjax_pcdd.training.tracking import Tracker

    history = load_run(record.path)
    round, simulation = len(history.rows), history.simulation
    tracker, plan = Tracker([name], simulation, history.config.seed), simulation.plan(round)
    return {"round": round, **tracker.entry(history.state, plan[1], tracker.before(round, history.state, plan))}
