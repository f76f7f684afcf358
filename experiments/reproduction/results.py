"""The result of a cell: one small committed JSON file, from which the page is made."""

import json
import platform
import shlex
import shutil
import subprocess
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
from reproduction.columns import FIRST
from reproduction.plan import Cell

KEPT = (
    *("ga_best", "ga_best_round", "ga_last", "ga_mean_last10"),
    *("pa_best", "pa_best_round", "pa_last", "pa_mean_last10", "pa_protocol"),
    *("domains", "inter", "intra", "seconds_per_round", "compile_seconds", "lanes", "together"),
)
OTHERS = ("methods", "leaderboard")  # folders with results of other kinds
# Options that every result names, whether or not they are those of the preset.
SHOWN = ("dataset", "model", "rounds", "local_epochs", "batch_size", "lr", "train_samples", "test_samples")


def result_path(folder: Path, cell: Cell) -> Path:
    """The file of a cell's result."""
    return folder / cell.table / f"{cell.name}.json"


def read_result(path: Path) -> dict[str, Any]:
    """One result; UserError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        raise UserError(f"{path} cannot be read: remove it and run its cell again.") from None


def has_result(folder: Path, cell: Cell, *, current: bool = False) -> bool:
    """Whether a cell has a result, with `current` one of this version."""
    path = result_path(folder, cell)
    return path.is_file() and (not current or is_current(read_result(path)))


def is_current(result: Mapping[str, Any]) -> bool:
    """Whether a result is of this version; versions up to 0.1 were not written down."""
    return result.get("version") == __version__


def begun_with(record: RunRecord) -> str:
    """The version that began a run; runs of versions up to 0.1 do not say it."""
    return ((record.resolved.get("inputs") or {}).get("versions") or {}).get("fedjax-pcdd", FIRST)


def commit() -> str | None:
    """The commit of the package, with "+" if its files have changed since; None outside a clone."""
    git = ["git", "-C", str(Path(__file__).parents[2])]
    if shutil.which("git") is None:
        return None
    head = subprocess.run([*git, "rev-parse", "--short=7", "HEAD"], capture_output=True, text=True)
    if head.returncode:
        return None
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "fedjax_pcdd"], capture_output=True).returncode
    return head.stdout.strip() + "+" * bool(changed)


def read_results(folder: Path) -> list[dict[str, Any]]:
    """All results of the papers' tables below a folder, in the order of their paths."""
    paths = sorted(path for path in folder.rglob("*.json") if not path.name.startswith("."))  # which are half written
    return [read_result(path) for path in paths if path.relative_to(folder).parts[0] not in OTHERS]


def write_result(folder: Path, cell: Cell, result: Mapping[str, Any]) -> None:
    """Write the result of a cell, whole or not at all."""
    write_text(result_path(folder, cell), json.dumps(result, indent=1) + "\n", "another `results_dir`")


def command(cell: Cell, config: Mapping[str, Any]) -> str:
    """The command that repeats the cell alone; DATA is the folder of the data sets."""
    options = {**cell.given, **({} if config["dataset"] == "digits" and not config["task"] else {"data_dir": "DATA"})}
    return shlex.join(
        ["python", "experiments/run.py", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]
    )


def superseded(result: Mapping[str, Any], presets: Path) -> dict[str, str]:
    """The options that a preset or a default has changed since a result was run, with the old values.

    The values are as on the command line.

    Args:
      result: as it was written; options that are newer than the result count with their defaults.
      presets: folder of the current presets.
    """
    options = {**scan(shlex.split(result["command"])[2:]), "data_dir": "."}
    config, method = configure(options, presets)
    current, known_options = decisive(values(config, method)), RUN | options_of(type(method))
    old = decisive({name: option.default for name, option in known_options.items()}) | result["decisive"]
    literals: dict[str, Any] = {"None": "none", "True": "true", "False": "false"}
    return {name: literals.get(old[name], old[name]) for name in current if old[name] != current[name]}


def as_run(result: Mapping[str, Any], presets: Path) -> dict[str, Any]:
    """The result with a command that repeats it today, and with its superseded options among its settings."""
    old_options = superseded(result, presets)
    added = shlex.join(flag(name) + f"={value}" for name, value in old_options.items())
    command = f"{result['command']} {added}".rstrip()
    return {
        **result,
        "command": command,
        "over_preset": {**result["over_preset"], **old_options},
        "superseded": old_options,
    }


def identity(cell: Cell, config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a result that is known before the run; `config` holds its options by field name."""
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
    """The result of a finished run, with its value for every metric of any paper's tables, as tables share runs."""
    summary = record.result
    metrics = [*printed_metrics(expected), *([PA_LAST] if needs_epochs(record.config["pa_protocol"]) else [])]
    numbers = {metric: measured(record, metric) for metric in metrics}
    seconds = sum(row["seconds"] + row.get("eval_seconds", 0.0) for row in record.rows)
    return {
        "status": "finished",
        "version": begun_with(record),
        "commit": record.resolved.get("commit"),
        **identity(cell, record.config),
        "hyperparameters": record.resolved.get("hyperparameters", {}),
        **{name: _rounded(summary[name]) for name in KEPT if summary.get(name) is not None},
        "metrics": {name: _rounded(value) for name, value in numbers.items() if value is not None},
        "ga": [_rounded(row.get("ga")) for row in record.rows],
        "seconds": round(seconds, 1),
        "machine": machine(),
        "decisive": decisive(record.config),
    }


def failed(cell: Cell, config: Mapping[str, Any], sentence: str) -> dict[str, Any]:
    """The result of a run that could not reach its end."""
    code = {"version": __version__, "commit": commit()}
    result = {"status": "failed", **code, **identity(cell, config), "sentence": sentence}
    return {**result, "machine": machine(), "decisive": decisive(config)}


def printed_metrics(expected: Path) -> list[str]:
    """Every metric of the papers' tables."""
    tables = sorted(path.stem for path in expected.glob("*.csv") if not path.stem.endswith("_counts"))
    return list(dict.fromkeys(expectation.metric for table in tables for expectation in read_expected(expected, table)))


def repeated(
    cell: Cell, config: Mapping[str, Any], others: Iterable[Mapping[str, Any]], needed: str | None = None
) -> dict[str, Any] | None:
    """The result of a cell taken from another table's run with the same options, None if there is none.

    Args:
      cell: the cell without a result.
      config: its options by field name.
      others: results so far; options that are newer than a result count with their defaults.
      needed: a metric that the result must have.
    """
    options, defaults = decisive(config), decisive({name: option.default for name, option in RUN.items()})
    for other in others:
        if defaults | other["decisive"] == defaults | options and (
            needed is None or needed in other.get("metrics", ())
        ):
            cell_fields = {name: value for name, value in identity(cell, config).items() if name != "hyperparameters"}
            origin = (other["table"], other["split"], other["variant"], other["tag"])
            return {**other, **cell_fields, "same_run_as": " ".join(part for part in origin if part)}
    return None


def machine() -> dict[str, Any]:
    """What this process runs on: device and versions."""
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
        return [_rounded(element) for element in value]
    return round(value, 5) if isinstance(value, float) else value
