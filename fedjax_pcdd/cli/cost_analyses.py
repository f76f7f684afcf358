"""Analyses of what runs cost: what is sent, rounds to an accuracy, memory and time of a client."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from fedjax_pcdd.analysis.burden import Burden, draw_burdens
from fedjax_pcdd.analysis.traffic import COLUMNS, Traffic, as_printed, in_words, upload
from fedjax_pcdd.analysis.traffic import traffic as counted
from fedjax_pcdd.cli.analysis_text import Options, labels_of, number, printed, table
from fedjax_pcdd.data import sources
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.lists import load_partition
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.collect import RunRecord, readable
from fedjax_pcdd.report.expected import EXPECTED, read_expected
from fedjax_pcdd.report.grouping import PARTITION, differing
from fedjax_pcdd.report.targets import BEST, LAST, REFERENCE, reached
from fedjax_pcdd.training.build import build_model, default_model, public_outputs
from fedjax_pcdd.training.config import parse_config

TABLE3 = "fedmr/table3"


def traffic(records: list[RunRecord], given: Options) -> str:
    """What a client sends in a round and in all, or what the papers print of it (FedMR, Table 3)."""
    if given.get("preset", TABLE3) != TABLE3:
        raise UserError(f"uploads are printed in {TABLE3} alone: leave `preset` out, or name runs.")
    if not records:
        return _table3()
    if "preset" in given:
        raise UserError("is for what the papers print: leave it out beside runs.", field="preset")
    lines, labels = [], labels_of(records)
    for record, costs in _all_counted(records):
        megabytes = 4e-6 * (costs.floats.up + costs.floats.down) * costs.cohort
        in_all = "at most " * costs.last_only + f"{megabytes * record.rounds_done:.1f}"
        words = (costs.words["down"], costs.words["up"])
        lines.append([labels[record.path], *words, f"{megabytes:.2f}", in_all])
    return table(["run", "sent down", "sent up", "MB a round", "MB in all"], lines)


def _table3() -> str:
    cells = read_expected(EXPECTED, TABLE3)
    expected = {(cell.split, cell.method, cell.metric): cell.value for cell in cells}
    names = dict.fromkeys((cell.method, cell.metric) for cell in cells)
    lines = []
    for split, column in COLUMNS.items():
        sent = upload(column)
        numbers = (sent.without_prototypes / 1e6, sent.with_prototypes / 1e6)
        exact = [f"{value:.6f}" for value in numbers] + [f"{100 * sent.prototypes / sent.without_prototypes:.4f}"]
        paper = [expected[(split, *name)] or 0.0 for name in names]
        rounded = [" / ".join(f"{x:.3f}" for x in millions) for millions in (as_printed(sent), paper)]
        lines.append([split, *exact, *rounded])
    heads = ["", "without (millions)", "with prototypes", "additional %", "rounded as the paper does", "paper"]
    return table(heads, lines)


class Costs(NamedTuple):
    """What a client of a run sends, keeps and holds in a round."""

    floats: Traffic
    words: dict[str, str]  # by the names of these numbers
    cohort: int  # how many clients a round has
    last_only: bool  # whether only the last rounds send as much


def _all_counted(records: Sequence[RunRecord]) -> list[tuple[RunRecord, Costs]]:
    """The costs of each run that can be counted; a data set that runs in a row share is read once."""
    return readable(records, partial(_counted, load=lru_cache(maxsize=1)(sources.load)))


def _counted(record: RunRecord, load: Callable[..., Dataset]) -> Costs:
    """The costs of a run's clients, counted by tracing its method; UserError where that cannot be done."""
    config, method = parse_config(record.text, str(record.path / "config.yaml"))
    if "model" in record.resolved.get("given", ()):
        raise UserError(f"{record.path} was trained on a module of Python's, which is not counted: leave it out.")
    if config.task is not None:
        raise UserError(f"{record.path} is a run over the domains of a task, which are not counted: leave it out.")
    dataset = load(config.dataset, config.data_dir)
    (name, *others) = dict.fromkeys((config.models or config.model or default_model(dataset)).split(","))
    if others:
        raise UserError(f"{record.path} has participants with different models, which are not counted: leave it out.")
    model, shape = build_model(config, name, dataset), dataset.x_train.shape[1:]
    counts = counted(method, model, shape, public_outputs(config, method))
    names = ("up", "down", "client", "held")
    if record.partition is None:
        raise UserError(f"{record.path} has no partition.npz: resume the run, or leave it out.")
    cohort = config.cohort or len(load_partition(record.path / "partition.npz").train)
    words = {field: in_words(getattr(counts, field), counts, dataset.num_classes) for field in names}
    summary = method.traits().summary
    return Costs(counts, words, cohort, last_only=summary is not None and bool(summary.last))


def rounds(records: list[RunRecord], given: Options) -> str:
    """Rounds to FedAvg's accuracy and the speed-up (FedMR, Table 4; FedRL, Table 2)."""
    target = given.get("target", "best")
    if target not in ("best", "last"):
        raise UserError(f"takes best or last, not {target!r}.", field="target")
    rule = BEST if target == "best" else LAST
    references = [record for record in records if record.method == REFERENCE]
    if not references:
        raise UserError("the target is FedAvg's accuracy: name the folder of a run of fedavg too.")
    lines, labels = [], labels_of(records)
    for record in records:
        result = reached(record, references, rule)
        numbers = ["-", "-"] if result is None else ["never" if x is None else number(x) for x in result]
        paper = [number(printed(record, metric)) for metric in ("rounds_to_target", "speedup")]
        lines.append([labels[record.path], *numbers, *paper])
    text = table(["run", "rounds", "speed-up", "paper: rounds", "speed-up"], lines)
    return f"{text}\n{rule.sentence}"


def burden(records: list[RunRecord], given: Options) -> str:
    """Memory and time of a client (FedMR, Figure 4; FedRL, Table 3)."""
    lines, labels, pairs = [], labels_of(records), _all_counted(records)
    points: dict[str, list[tuple[RunRecord, int, float | None]]] = {}
    records = [record for record, _ in pairs]
    for record, costs in pairs:
        results = record.result, _reference(record, records)
        seconds, reference_seconds = (x.get("seconds_local") or x.get("seconds_per_round") for x in results)
        ratio = _ratio(seconds, reference_seconds)
        memory = record.result.get("device_peak_memory_mb") or record.result.get("peak_memory_mb")
        cells = [f"{4e-6 * costs.floats.held:.2f}", costs.words["client"], *map(number, (seconds, ratio))]
        paper = [printed(record, "seconds_per_round", method) for method in (record.method, REFERENCE)]
        lines.append([labels[record.path], costs.words["held"], *cells, number(_ratio(*paper)), number(memory)])
        name = f"{record.method} {record.resolved.get('variant') or ''}".rstrip()
        points.setdefault(name, []).append((record, costs.floats.held, ratio))
    if "output" in given:
        draw_burdens(_burdens(points), given["output"])
    heads = ["run", "held in training", "MB", "kept between rounds", "s a round", "times FedAvg", "paper", "peak MB"]
    return table(heads, lines)


def _burdens(points: dict[str, list[tuple[RunRecord, int, float | None]]]) -> list[Burden]:
    """Means of each method over the partitions that all methods have; of the ratio of times, the geometric mean."""
    for name, entries in points.items():
        configs = [run.config for run, _, _ in entries]
        if differences := [n for n in differing(configs) if n not in ("dataset", *PARTITION)]:
            raise UserError(f"a picture has one point for {name}, and its runs differ in {', '.join(differences)}.")
    common = set.intersection(*({run.partition for run, _, _ in entries} for entries in points.values()))
    if not common or any(ratio is None for entries in points.values() for _, _, ratio in entries):
        raise UserError("a picture needs one partition that all methods have, FedAvg among them.")
    burdens = []
    for name, entries in points.items():
        runs, held, ratios = zip(*(entry for entry in entries if entry[0].partition in common), strict=True)
        ga = [run.result["ga_best"] for run in runs]
        if None in ga:
            raise UserError(f"a picture needs GA of all runs, and one of {name} has none: leave it out.")
        burdens.append(Burden(name, float(np.mean(held)), float(np.exp(np.mean(np.log(ratios)))), float(np.mean(ga))))
    return burdens


def _reference(record: RunRecord, records: list[RunRecord]) -> dict[str, Any]:
    """The result of FedAvg with the same model and training on the same partition and kind of machine, {} if none."""
    same_options = ("model", "models", "local_epochs", "local_steps", "batch_size", "cohort")

    def compared(run: RunRecord) -> list[Any]:
        machine = [run.result.get(name) for name in ("device", "platform", "cpus")]
        return [run.partition, *(run.config.get(name) for name in same_options), *machine]

    return next((run.result for run in records if run.method == REFERENCE and compared(run) == compared(record)), {})


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value and reference else None
