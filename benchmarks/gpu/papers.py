"""Part 3, the papers: ResNet18 on Fashion-MNIST, two classes a client, at the papers' settings, as far as time allows.

As a run takes long, there are stages: all runs of a group come to round 10, then to 30, then to their end, so that
methods are compared at equal rounds whenever the time runs out. A run stops at a checkpoint and goes on in the next
stage.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import training
from benchmarks.gpu.items import Item
from benchmarks.gpu.workers import Lacking
from benchmarks.gpu.works import device
from fedjax_pcdd.training.folder import RunFolder

STAGES = (10, 30, 100)
FMNIST = {"dataset": "fashion_mnist", "augment": False}

# Readings of FedGELA's scale, in the order in which they are to be tried: with a root or linear, its energy, and how
# features are normalised. The papers' presets have the third.
GELA = {
    "linear 1e5": {"scale": "linear", "ew": 1e5},
    "as the README": {"normalise": "batch", "scale": "linear", "ew": 1e5, "weights": "batches", "batch_size": 64},
    "root 1e4": {"scale": "sqrt", "ew": 1e4},
    "batch norm, linear 5": {"normalise": "batch", "scale": "linear", "ew": 5.0},
    "linear 5": {"scale": "linear", "ew": 5.0},
}


def groups(split: str) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Runs of a split by name: FedMR's table, FedGELA's with its first readings, and its other readings."""
    fedmr_runs = {
        f"fedavg {split}": _preset("fedmr/table1", split, "fedavg"),
        f"fedmr {split}": _preset("fedmr/table1", split, "fedmr"),
        f"fedmr {split}, all rivals": _preset("fedmr/table1", split, "fedmr") | {"negatives": "all"},
    }
    clients = {"clients": fedmr_runs[f"fedavg {split}"]["clients"]} | FMNIST
    fedavg, fedgela = (_preset("fedgela/table5", "cifar10-P10C2", name) | clients for name in ("fedavg", "fedgela"))
    readings = {f"fedgela {split}, {name}": fedgela | reading for name, reading in GELA.items()}
    first_readings, other_readings = dict(list(readings.items())[:3]), dict(list(readings.items())[3:])
    return fedmr_runs, {f"fedavg {split}, two layers": fedavg, **first_readings}, other_readings


def _preset(name: str, split: str, method: str) -> dict[str, Any]:
    """The options of a cell of a table."""
    from fedjax_pcdd.training.presets import preset_values, read_preset

    return {**preset_values(read_preset(name), method, split), "method": method, "seed": 0}


def printed(split: str, method: str) -> float | None:
    """The GA that FedMR's Table 1 prints, in percent; None if it prints none."""
    from fedjax_pcdd.report.expected import EXPECTED, read_expected

    rows = read_expected(EXPECTED, "fedmr/table1")
    return next((row.value for row in rows if (row.split, row.method) == (split, method)), None)


def items(rehearse: bool, data: Path | None, runs: Path, results: Sequence[Mapping[str, Any]]) -> list[Item]:
    """The steps of part 3, most valuable first; each is a run up to a round."""
    ten, five = groups("P10C2"), groups("P5C2")
    order = [ten[0], five[0], ten[1], ten[2], five[1], five[2]]
    common: dict[str, Any] = {"precision": "tf32", "lanes": best_lanes(results)}
    common["data_dir"] = str(data) if data else None
    stages: tuple[int, ...] = STAGES
    if rehearse:
        order = [dict(list(ten[0].items())[1:2])]
        common |= {"model": "mlp", "train_samples": 400, "test_samples": 40, "rounds": 3, "local_epochs": 1}
        common |= {"batch_size": 20, "fine_tune_epochs": 0}
        stages = (1, 3)
    steps = []
    for group in order:
        for stage in stages:
            for name, options in group.items():
                arguments = {"run": name, "options": options | common, "runs": str(runs), "upto": stage}
                steps.append(Item(f"{name}, to round {stage}", train, arguments, 600, interruptible=True))
    return steps


def best_lanes(results: Sequence[Mapping[str, Any]]) -> int:
    """The number of lanes that was fastest for ResNet18 in part 2; until that is measured one, the safe choice."""
    setting = {"status": "ok", "workload": "w3", "method": "fedavg", "precision": "tf32"}
    measured = [r for r in results if setting.items() <= r.items() and r["form"] in (None, "timed")]
    return min(measured, key=lambda r: r["median_s"])["lanes"] if measured else 1


def train(run: str, options: dict[str, Any], runs: str, upto: int, seconds: float) -> dict[str, Any]:
    """Train a run up to a round or until the seconds are over, and return how far it has come.

    Raises:
      Lacking: the data set is not where it should be.
    """
    from fedjax_pcdd.data import sources
    from fedjax_pcdd.errors import UserError

    try:
        sources.load(options["dataset"], options["data_dir"])
    except UserError as error:
        raise Lacking(str(error)) from None
    folder = Path(runs) / run.replace(" ", "_").replace(",", "")
    folder.parent.mkdir(parents=True, exist_ok=True)
    training.train(options, folder, last=upto if upto < options["rounds"] else None, seconds=seconds)
    rows, summary = RunFolder(folder).rows(), RunFolder(folder).summary()
    reached = len(rows) >= min(upto, options["rounds"])
    split = f"P{options['clients']}C{options['classes_per_client']}"
    plain = options.get("neck", 0) == 0 and options["method"] != "fedgela"
    record = {"run": run, "rounds": len(rows), "of": options["rounds"], "lanes": options["lanes"]}
    record |= {"status": "ok"} if reached else {"status": "interrupted", "reason": f"after round {len(rows)}"}
    record["printed_ga_pct"] = printed(split, options["method"]) if plain else None
    return record | _accuracies(rows, summary) | device()


def _accuracies(rows: list[dict[str, Any]], result: Mapping[str, Any] | None) -> dict[str, Any]:
    """GA and PA so far: the best, and the mean of the last ten rounds; seconds a round; the summary's PA at the end."""
    record: dict[str, Any] = {}
    if rows:
        record["seconds_per_round"] = statistics.median(row["seconds"] for row in rows)
    for name in ("ga", "pa"):
        values = [row[name] for row in rows if row[name] is not None]
        if values:
            record |= {f"{name}_best": max(values), f"{name}_mean_last10": sum(values[-10:]) / len(values[-10:])}
            record[f"{name}_curve"] = [round(value, 4) for value in values]
    return record | ({"pa_summary": result["pa_best"], "pa_protocol": result["pa_protocol"]} if result else {})
