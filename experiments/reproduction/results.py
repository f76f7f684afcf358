"""What is kept of a cell: one small JSON file, committed, from which the page is made."""

import json
import platform
import shlex
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from fedjax_pcdd import __version__
from fedjax_pcdd.cli.messages import flag
from fedjax_pcdd.cli.options import configure, scan
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.collect import RunRecord
from fedjax_pcdd.report.expected import PA_LAST, measured, read_expected
from fedjax_pcdd.report.grouping import INDIFFERENT
from fedjax_pcdd.training.config import RUN, values
from fedjax_pcdd.training.fields import options_of, write_text
from fedjax_pcdd.training.folder import PACKAGES
from fedjax_pcdd.training.protocols import needs_epochs
from reproduction.plan import Cell

KEPT = (
    *("ga_best", "ga_best_round", "ga_last", "ga_mean_last10"),
    *("pa_best", "pa_best_round", "pa_last", "pa_mean_last10", "pa_protocol"),
    *("domains", "inter", "intra", "seconds_per_round", "compile_seconds", "lanes", "together"),
)
OTHERS = ("methods", "leaderboard")  # folders with results of other kinds
# Options that every result names, whether or not they are the preset's.
SHOWN = ("dataset", "model", "rounds", "local_epochs", "batch_size", "lr", "train_samples", "test_samples")


def result_path(folder: Path, cell: Cell) -> Path:
    """Where the result of a cell lies."""
    return folder / cell.table / f"{cell.name}.json"


def read_result(path: Path) -> dict[str, Any]:
    """One result; UserError where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        raise UserError(f"{path} cannot be read: remove it and run its cell again.") from None


def has_result(folder: Path, cell: Cell, *, current: bool = False) -> bool:
    """Whether a cell has a result; with `current` one of this version."""
    path = result_path(folder, cell)
    return path.is_file() and (not current or is_current(read_result(path)))


def is_current(result: Mapping[str, Any]) -> bool:
    """Whether a result is of this version; versions up to 0.1 were not written down."""
    return result.get("version") == __version__


def read_results(folder: Path) -> list[dict[str, Any]]:
    """All results of the papers' tables below a folder, in the order of their paths."""
    paths = sorted(folder.rglob("*.json"))
    return [read_result(path) for path in paths if path.relative_to(folder).parts[0] not in OTHERS]


def write_result(folder: Path, cell: Cell, result: Mapping[str, Any]) -> None:
    """Write the result of a cell at once or not at all."""
    write_text(result_path(folder, cell), json.dumps(result, indent=1) + "\n", "another `results_dir`")


def command(cell: Cell, config: Mapping[str, Any]) -> str:
    """What repeats the cell alone; DATA is the folder of the data sets."""
    given = {**cell.given, **({} if config["dataset"] == "digits" and not config["task"] else {"data_dir": "DATA"})}
    return shlex.join(
        ["python", "experiments/run.py", *(f"--{name.replace('_', '-')}={value}" for name, value in given.items())]
    )


def superseded(result: Mapping[str, Any], presets: Path) -> dict[str, str]:
    """What a preset or a default had otherwise when a result was run, as on the command line.

    Args:
      result: as it was written; options that are younger than it had their defaults.
      presets: folder of the presets of today.
    """
    given = {**scan(shlex.split(result["command"])[2:]), "data_dir": "."}
    config, method = configure(given, presets)
    today, usual = decisive(values(config, method)), RUN | options_of(type(method))
    then = decisive({name: option.default for name, option in usual.items()}) | result["decisive"]
    plain: dict[str, Any] = {"None": "none", "True": "true", "False": "false"}
    return {name: plain.get(then[name], then[name]) for name in today if then[name] != today[name]}


def as_run(result: Mapping[str, Any], presets: Path) -> dict[str, Any]:
    """A result whose command repeats it today, and which has what its preset no longer has among its settings."""
    then = superseded(result, presets)
    added = shlex.join(flag(name) + f"={value}" for name, value in then.items())
    command = f"{result['command']} {added}".rstrip()
    return {**result, "command": command, "over_preset": {**result["over_preset"], **then}, "superseded": then}


def identity(cell: Cell, config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a result that is known before the run; `config` are its options by field name."""
    return {
        "scale": cell.scale, "table": cell.table, "split": cell.split, "method": cell.method,
        "variant": cell.variant, "tag": cell.tag, "seed": cell.seed, "command": command(cell, config),
        "over_preset": {name: value for name, value in cell.settings.items() if name not in INDIFFERENT},
        "options": {name: config[name] for name in SHOWN},
        "hyperparameters": {name: value for name, value in config.items() if name not in RUN},
    }  # fmt: skip


def decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """The options that decide what a run computes, and its seed."""
    left_out = INDIFFERENT - {"seed"}
    return {name: str(value) for name, value in sorted(config.items()) if name not in left_out}


def finished(cell: Cell, record: RunRecord, expected: Path) -> dict[str, Any]:
    """The result of a finished run, with what it has in the place of any paper's numbers; tables share runs."""
    summary = record.result
    metrics = [*printed_metrics(expected), *([PA_LAST] if needs_epochs(record.config["pa_protocol"]) else [])]
    numbers = {metric: measured(record, metric) for metric in metrics}
    seconds = sum(row["seconds"] + row.get("eval_seconds", 0.0) for row in record.rows)
    return {
        "status": "finished",
        "version": __version__,
        **identity(cell, record.config),
        "hyperparameters": record.resolved.get("hyperparameters", {}),
        **{name: _rounded(summary[name]) for name in KEPT if summary.get(name) is not None},
        "metrics": {name: _rounded(value) for name, value in numbers.items() if value is not None},
        "ga": [_rounded(row["ga"]) for row in record.rows if row.get("ga") is not None],
        "seconds": round(seconds, 1),
        "machine": machine(),
        "decisive": decisive(record.config),
    }


def failed(cell: Cell, config: Mapping[str, Any], sentence: str) -> dict[str, Any]:
    """The result of a run that could not reach its end."""
    known = {"status": "failed", "version": __version__, **identity(cell, config), "sentence": sentence}
    return {**known, "machine": machine(), "decisive": decisive(config)}


def printed_metrics(expected: Path) -> list[str]:
    """Every metric of the papers' tables."""
    tables = sorted(path.stem for path in expected.glob("*.csv") if not path.stem.endswith("_counts"))
    return list(dict.fromkeys(one.metric for table in tables for one in read_expected(expected, table)))


def repeated(
    cell: Cell, config: Mapping[str, Any], others: Iterable[Mapping[str, Any]], needed: str | None = None
) -> dict[str, Any] | None:
    """The result of a cell that another table has had already, if there is one with the same options.

    Args:
      cell: which one.
      config: its options by field name.
      others: results so far; options that are younger than they have their defaults.
      needed: a metric that it must have.
    """
    wanted, usual = decisive(config), decisive({name: option.default for name, option in RUN.items()})
    for other in others:
        if usual | other["decisive"] == usual | wanted and (needed is None or needed in other.get("metrics", ())):
            own = {name: value for name, value in identity(cell, config).items() if name != "hyperparameters"}
            origin = (other["table"], other["split"], other["variant"], other["tag"])
            return {**other, **own, "same_run_as": " ".join(part for part in origin if part)}
    return None


def machine() -> dict[str, Any]:
    """What it ran on: device and versions."""
    device = jax.devices()[0]
    versions = {name: metadata.version(name) for name in PACKAGES}
    return {
        "backend": jax.default_backend(), "device": device.device_kind, "processor": processor(),
        "python": platform.python_version(), "versions": versions,
    }  # fmt: skip


def processor() -> str:
    """The kind of processor, as Linux names it, else its architecture."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _rounded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    return round(value, 5) if isinstance(value, float) else value
