"""Analyses of runs on a data set: tables and pictures from run folders (`fedjax-pcdd analyse`)."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fedjax_pcdd.analysis.burden import Burden, draw_burdens
from fedjax_pcdd.analysis.pictures import draw, draw_bilateral, draw_columns
from fedjax_pcdd.analysis.traffic import COLUMNS, Traffic, as_printed, in_words, upload
from fedjax_pcdd.analysis.traffic import traffic as counted
from fedjax_pcdd.data import sources
from fedjax_pcdd.data.lists import load_partition
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.registry import short_name
from fedjax_pcdd.report.collect import RunRecord, readable
from fedjax_pcdd.report.expected import EIGENVALUES, EXPECTED, read_expected
from fedjax_pcdd.report.grouping import PARTITION, data_of, differing, newest
from fedjax_pcdd.report.tables import Cell, markdown, over_seeds, shown, texts
from fedjax_pcdd.report.targets import BEST, LAST, REFERENCE, reached
from fedjax_pcdd.training.build import build_model, default_model, public_outputs
from fedjax_pcdd.training.config import RUN, parse_config
from fedjax_pcdd.training.folder import TRACK, RunFolder
from fedjax_pcdd.training.metrics import DIGITS, selection
from fedjax_pcdd.training.progress import with_pa_named

Options = dict[str, str]
TABLE3 = "fedmr/table3"
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
        pairs = readable(records, lambda record: _rows_of(record, name))
        records = [record for record, _ in pairs]
        rows = {label: run_rows for label, (_, run_rows) in zip(labels_of(records), pairs, strict=True)}
        if given.get("by_split") == "true":
            groups: dict[str, dict[str, Any]] = {}
            for track_rows, record in zip(rows.values(), records, strict=True):
                group = groups.setdefault(_partition_of(record), {})
                group[str(record.path) if record.path.name in group else record.path.name] = track_rows
            draw_columns(name, groups, given["output"])
        elif "output" in given:
            draw(name, rows if len(rows) > 1 else {"": next(iter(rows.values()))}, given["output"])
        heads = ["run", "round", *(head for head, _, _ in COLUMNS_OF[name])]
        lines = []
        for label, (*_, last) in rows.items():
            cells = [_number((last[name].get(model) or {}).get(key)) for _, model, key in COLUMNS_OF[name]]
            lines.append([label, str(last["round"]), *cells])
        if name in PRINTED:
            heads.append("paper")
            for line, record in zip(lines, records, strict=True):
                line.append(_number(_paper(record, PRINTED[name])))
        return table(heads, lines)

    return work


def _rows_of(record: RunRecord, name: str) -> list[dict[str, Any]]:
    """Lines of track.jsonl that have a quantity; if there are none, one line from the run's last checkpoint."""
    rows = [row for row in RunFolder(record.path).rows(TRACK) if name in row]
    return rows or [_last(record, name)]


def _last(record: RunRecord, name: str) -> dict[str, Any]:
    from fedjax_pcdd.api.runs import load_run  # only these analyses restore checkpoints
    from fedjax_pcdd.training.tracking import Tracker

    history = load_run(record.path)
    round, simulation = len(history.rows), history.simulation
    tracker, plan = Tracker([name], simulation, history.config.seed), simulation.plan(round)
    return {"round": round, **tracker.entry(history.state, plan[1], tracker.before(round, history.state, plan))}


def _counted(record: RunRecord) -> tuple[Traffic, dict[str, str], int, str]:
    """What a run's method sends, keeps and holds in a round, in numbers and in words, and how many clients a round has.

    Last comes "at most " if it sends less in all but the last rounds, which are the ones that are counted.

    Raises:
      UserError: it is a run over the domains of a task, or its data set is not available.
    """
    config, method = parse_config(record.text, str(record.path / "config.yaml"))
    if "model" in record.resolved.get("given", ()):
        raise UserError(f"{record.path} was trained on a module of Python's, which is not counted: leave it out.")
    if config.task is not None:
        raise UserError(f"{record.path} is a run over the domains of a task, which are not counted: leave it out.")
    dataset = sources.load(config.dataset, config.data_dir)
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
    return counts, words, cohort, "at most " * bool((summary := method.traits().summary) and summary.last)


def labels_of(records: Sequence[RunRecord]) -> list[str]:
    """Names of the folders, or their whole paths if two have the same name."""
    names = [record.path.name for record in records]
    return names if len(set(names)) == len(names) else [str(record.path) for record in records]


def traffic(records: list[RunRecord], given: Options) -> str:
    """What a client sends in a round and in all, or what the papers print of it (FedMR, Table 3)."""
    if given.get("preset", TABLE3) != TABLE3:
        raise UserError(f"uploads are printed in {TABLE3} alone: leave `preset` out, or name runs.")
    if not records:
        return _table3()
    if "preset" in given:
        raise UserError("is for what the papers print: leave it out beside runs.", field="preset")
    lines, pairs = [], readable(records, _counted)
    records = [record for record, _ in pairs]
    for label, record, (_, (counts, words, cohort, at_most)) in zip(labels_of(records), records, pairs, strict=True):
        megabytes = 4e-6 * (counts.up + counts.down) * cohort
        in_all = f"{at_most}{megabytes * record.rounds_done:.1f}"
        lines.append([label, words["down"], words["up"], f"{megabytes:.2f}", in_all])
    return table(["run", "sent down", "sent up", "MB a round", "MB in all"], lines)


def _table3() -> str:
    cells = read_expected(EXPECTED, TABLE3)
    expected = {(number.split, number.method, number.metric): number.value for number in cells}
    names = dict.fromkeys((number.method, number.metric) for number in cells)
    lines = []
    for split, column in COLUMNS.items():
        sent = upload(column)
        numbers = (sent.without_prototypes / 1e6, sent.with_prototypes / 1e6)
        exact = [f"{value:.6f}" for value in numbers] + [f"{100 * sent.prototypes / sent.without_prototypes:.4f}"]
        printed = as_printed(sent)
        paper = [expected[(split, *name)] or 0.0 for name in names]
        lines.append([split, *exact, " / ".join(f"{x:.3f}" for x in printed), " / ".join(f"{x:.3f}" for x in paper)])
    heads = ["", "without (millions)", "with prototypes", "additional %", "rounded as the paper does", "paper"]
    return table(heads, lines)


def rounds(records: list[RunRecord], given: Options) -> str:
    """Rounds to FedAvg's accuracy and the speed-up (FedMR, Table 4; FedRL, Table 2)."""
    target = given.get("target", "best")
    if target not in ("best", "last"):
        raise UserError(f"takes best or last, not {target!r}.", field="target")
    rule = BEST if target == "best" else LAST
    references = [record for record in records if record.method == REFERENCE]
    if not references:
        raise UserError("the target is FedAvg's accuracy: name the folder of a run of fedavg too.")
    lines = []
    for label, record in zip(labels_of(records), records, strict=True):
        result = reached(record, references, rule)
        numbers = ["-", "-"] if result is None else ["never" if x is None else _number(x) for x in result]
        paper = [_number(_paper(record, metric)) for metric in ("rounds_to_target", "speedup")]
        lines.append([label, *numbers, *paper])
    text = table(["run", "rounds", "speed-up", "paper: rounds", "speed-up"], lines)
    return f"{text}\n{rule.sentence}"


def burden(records: list[RunRecord], given: Options) -> str:
    """Memory and time of a client (FedMR, Figure 4; FedRL, Table 3)."""
    lines, ratios, pairs = [], {}, readable(records, _counted)
    members: dict[str, list[RunRecord]] = {}
    records = [record for record, _ in pairs]
    for label, record, (_, (counts, words, _, _)) in zip(labels_of(records), records, pairs, strict=True):
        summary = record.result
        reference = _reference(record, records)
        seconds = summary.get("seconds_local") or summary.get("seconds_per_round")
        reference_result = (reference and reference.summary) or {}
        reference_seconds = reference_result.get("seconds_local") or reference_result.get("seconds_per_round")
        ratio = seconds / reference_seconds if seconds and reference_seconds else None
        memory = summary.get("device_peak_memory_mb") or summary.get("peak_memory_mb")
        cells = [f"{4e-6 * counts.held:.2f}", words["client"], *map(_number, (seconds, ratio))]
        paper = [_paper(record, "seconds_per_round", method) for method in (record.method, REFERENCE)]
        lines.append([label, words["held"], *cells, _ratio(*paper), _number(memory)])
        name = f"{record.method} {record.resolved.get('variant') or ''}".rstrip()
        ratios.setdefault(name, []).append((record.partition, counts.held, ratio, summary["ga_best"]))
        members.setdefault(name, []).append(record)
    if "output" in given:
        _check_settings(members)
        draw_burdens(_burdens(ratios), given["output"])
    heads = ["run", "held in training", "MB", "kept between rounds", "s a round", "times FedAvg", "paper", "peak MB"]
    return table(heads, lines)


def _check_settings(members: dict[str, list[RunRecord]]) -> None:
    """UserError if runs that would be one point of a picture differ in more than data, partition and seed."""
    for name, runs in members.items():
        if differences := [n for n in differing([run.config for run in runs]) if n not in ("dataset", *PARTITION)]:
            raise UserError(f"a picture has one point for {name}, and its runs differ in {', '.join(differences)}.")


def _burdens(runs: dict[str, list[tuple]]) -> list[Burden]:
    """Means of each method over the partitions that all methods have; of the ratio of times, the geometric mean."""
    common = set.intersection(*({entry[0] for entry in entries} for entries in runs.values()))
    if not common or any(ratio is None for entries in runs.values() for _, _, ratio, _ in entries):
        raise UserError("a picture needs one partition that all methods have, FedAvg among them.")
    burdens = []
    for name, entries in runs.items():
        held, ratios, ga = zip(*(entry[1:] for entry in entries if entry[0] in common), strict=True)
        if None in ga:
            raise UserError(f"a picture needs GA of all runs, and one of {name} has none: leave it out.")
        burdens.append(Burden(name, float(np.mean(held)), float(np.exp(np.mean(np.log(ratios)))), float(np.mean(ga))))
    return burdens


def _reference(record: RunRecord, records: list[RunRecord]) -> RunRecord | None:
    """The run of FedAvg with the same model and training on the same partition and kind of machine."""
    same_options = ("model", "models", "local_epochs", "local_steps", "batch_size", "cohort")

    def compared(run: RunRecord) -> list[Any]:
        machine = [run.result.get(name) for name in ("device", "platform", "cpus")]
        return [run.partition, *(run.config.get(name) for name in same_options), *machine]

    return next((run for run in records if run.method == REFERENCE and compared(run) == compared(record)), None)


def bilateral(records: list[RunRecord], given: Options) -> str:
    """GA and PA against E_W (FedGELA, Figure 4)."""
    groups, fedavg = _by_ew(records)
    if not groups:
        raise UserError("none of these runs has an E_W: sweep `ew=1,4,16` of fedgela.")
    curves = {key: {ew: _over_seeds(by_ew[ew]) for ew in sorted(by_ew)} for key, by_ew in groups.items()}
    means = {setting: _over_seeds(runs) for setting, runs in fedavg.items()}
    labels = {key: f"{key[0]} ({key[1]})" if key[1] else key[0] for key in groups}
    swept = [run for by_ew in groups.values() for runs in by_ew.values() for run in runs]
    fedavg_runs = [run for runs in fedavg.values() for run in runs]
    pa, reference = (with_pa_named("PA", [run.result for run in runs]) for runs in (swept, fedavg_runs))
    fedavg_pa = "FedAvg" if reference == pa else f"FedAvg, {reference}"
    if "output" in given:
        references = {labels[k]: [cell.mean or 0.0 for cell in means[k[0]]] for k in groups if k[0] in means}
        numbers = {
            labels[key]: np.array(
                [[ew, *(x or 0.0 for cell in cells for x in (cell.mean, cell.std))] for ew, cells in curve.items()]
            )
            for key, curve in curves.items()
        }
        draw_bilateral(numbers, references, given["output"], pa=pa, reference=fedavg_pa)
    cells = [(labels[key], f"{ew:g}", *ga_and_pa) for key, curve in curves.items() for ew, ga_and_pa in curve.items()]
    cells += [(name, fedavg_pa, *(replace(cell, std=None) for cell in ga_and_pa)) for name, ga_and_pa in means.items()]
    lines = [[label, at, shown(ga_cell), shown(pa_cell), str(ga_cell.n)] for label, at, ga_cell, pa_cell in cells]
    by = _chosen_on(records)
    return table(["", "E_W", f"GA best on {by} (%)", f"{pa} best on {by} (%)", "seeds"], lines)


def _over_seeds(runs: Sequence[RunRecord]) -> tuple[Cell, Cell]:
    """GA and PA in percent, of the newest run of each seed."""
    summaries = [run.result for run in newest(runs)]
    ga, pa = (over_seeds((summary[name] for summary in summaries), factor=100.0) for name in ("ga_best", "pa_best"))
    return ga, pa


def _ew(record: RunRecord) -> float | None:
    return record.resolved.get("hyperparameters", {}).get("ew")


def _by_ew(
    records: list[RunRecord],
) -> tuple[dict[tuple[str, str], dict[float, list[RunRecord]]], dict[str, list[RunRecord]]]:
    """Runs with each E_W, by partition (with the run options that differ) and own settings; FedAvg's by partition."""
    groups: dict[tuple[str, str], dict[float, list[RunRecord]]] = {}
    fedavg: dict[str, list[RunRecord]] = {}
    of_partition = {"method", "dataset", "partition", "beta", "classes_per_client", "clients"}
    varied = [name for name in differing([r.config for r in records]) if name in RUN and name not in of_partition]
    swept, excluded = [run for run in records if _ew(run) is not None], {*RUN, "ew", "scale"}
    method_options = {
        method: [n for n in differing([run.config for run in swept if run.method == method]) if n not in excluded]
        for method in dict.fromkeys(run.method for run in swept)
    }
    for record in records:
        ew, summary = _ew(record), record.result
        if None in (summary.get("ga_best"), summary.get("pa_best")) or (ew is None and record.method != REFERENCE):
            continue
        setting = ", ".join([_partition_of(record), *(f"{name}={record.config.get(name)}" for name in varied)])
        if ew is None:
            fedavg.setdefault(setting, []).append(record)
            continue
        parts = [record.method] * (len(method_options) > 1) + [
            f"{n}={record.config.get(n)}" for n in method_options[record.method]
        ]
        parts += ["linear"] * (record.resolved["hyperparameters"].get("scale") == "linear")
        groups.setdefault((setting, ", ".join(parts)), {}).setdefault(ew, []).append(record)
    return groups, fedavg


def _chosen_on(records: list[RunRecord]) -> str:
    """What the best rounds of the runs were chosen on."""
    return " or ".join(dict.fromkeys(selection(record.result) for record in records))


def _partition_of(record: RunRecord) -> str:
    """Data set, partition and number of clients, as `cifar10 dirichlet0.1, 10 clients` or `cifar10 P10C2`."""
    dataset, tag = data_of(record)
    partition, clients = record.config["partition"], record.config["clients"]
    tag = partition if tag == short_name(partition) else tag  # files in different folders may have the same name
    return f"{dataset} {tag}, {clients} clients" if clients and f"P{clients}C" not in tag else f"{dataset} {tag}"


def grid(records: list[RunRecord], given: Options) -> str:
    """The best weights of a search beside the printed ones (FedMR, Tables 9 and 10)."""
    cells: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        cells.setdefault((record.resolved.get("split") or _partition_of(record), record.method), []).append(record)
    lines = []
    for (split, method), method_runs in cells.items():
        if unknown := [run for run in method_runs if "hyperparameters" not in run.resolved]:
            raise UserError(f"{unknown[0].path / 'resolved.json'} has no hyper-parameters: leave the run out.")
        hyperparameters = [run.resolved["hyperparameters"] for run in method_runs]
        for name in [n for n in hyperparameters[0] if len({str(h.get(n)) for h in hyperparameters}) > 1]:
            searched, sets = _searched([run for run in method_runs if _is_measured(run, name)], name)
            if not searched:
                continue
            held_out = all(run.result.get("selected_on") == "validation" for runs in searched.values() for run in runs)
            means = _means(searched, "ga_best")
            scores = _means(searched, "ga_validation_best") if held_out else means
            best = max(scores, key=lambda value: round(scores[value], DIGITS))
            paper = _paper(method_runs[0], name)
            gain = 100 * (means[best] - means[paper]) if paper in means else None
            best_text = _number(best) if isinstance(best, int | float) else str(best)
            numbers = [best_text, "validation" if held_out else "test", f"{100 * means[best]:.2f}"]
            which = name if sets == 1 else f"{name} (largest of {sets} sets of runs)"
            seeds = str(len(searched[best]))
            lines.append([split, method, which, *numbers, seeds, _number(paper), _number(gain)])
    if not lines:
        raise UserError(
            "no runs of one method and one seed differ in a single hyper-parameter: name those of a sweep over it."
        )
    heads = ["split", "method", "", "best", "chosen on", "GA best (%)", "seeds", "paper", "GA over the paper's"]
    return table(heads, lines)


def _is_measured(run: RunRecord, name: str) -> bool:
    """Whether a run has a value of a hyper-parameter and a best GA; stderr names one that has not."""
    if name in run.resolved["hyperparameters"] and run.result.get("ga_best") is not None:
        return True
    print(f"left out: {run.path} has no {name}, or no best GA.", file=sys.stderr)
    return False


def _means(runs_by_value: dict[Any, list[RunRecord]], measure: str) -> dict[Any, float]:
    """Means over the runs of an entry of the summaries, by the values of a hyper-parameter."""
    return {value: float(np.mean([run.result[measure] for run in runs])) for value, runs in runs_by_value.items()}


def _searched(records: list[RunRecord], name: str) -> tuple[dict[Any, list[RunRecord]], int]:
    """The largest set of runs that differ in one hyper-parameter (and the seed), and in no other option.

    Returns:
      Runs of the set by the value of the hyper-parameter, all of the same seeds; {} if no value has another beside it.
      Then the number of such sets.
    """
    sets: dict[str, dict[Any, list[RunRecord]]] = {}
    other_options = [option for option in differing([record.settings for record in records]) if option != name]
    for record in records:
        members = sets.setdefault(str([record.settings.get(option) for option in other_options]), {})
        members.setdefault(record.resolved["hyperparameters"][name], []).append(record)
    compared = [paired for members in sets.values() if len(members) > 1 and (paired := of_common_seeds(members))]
    return max(compared, key=lambda members: sum(map(len, members.values())), default={}), len(compared)


def of_common_seeds(members: dict[Any, list[RunRecord]]) -> dict[Any, list[RunRecord]]:
    """The newest runs of each value, of the seeds that all values have; {} if there is no such seed.

    Runs that are left out are named on stderr.
    """
    common = set.intersection(*({run.seed for run in runs} for runs in members.values()))
    kept = {value: [run for run in newest(runs) if run.seed in common] for value, runs in members.items()}
    for run in [run for value, runs in members.items() for run in runs if run not in kept[value]]:
        why = "repeats a seed" if run.seed in common else f"has a seed, {run.seed}, that the others beside it have not"
        print(f"left out: {run.path} {why}.", file=sys.stderr)
    return kept if common else {}


def _paper(record: RunRecord, metric: str, method: str | None = None) -> float | None:
    """The printed number of the cell that a run stands for, None if it stands for none."""
    if record.preset is None:
        return None
    cell = (record.resolved.get("split") or "", method or record.method, record.resolved.get("variant") or "", metric)
    numbers = read_expected(EXPECTED, record.preset)
    return next((n.value for n in numbers if (n.split, n.method, n.variant, n.metric) == cell), None)


def _ratio(value: float | None, reference: float | None) -> str:
    return _number(value / reference if value and reference else None)


def _number(value: Any) -> str:
    """A number with four significant digits, - for None.

    >>> _number(None), _number(12), _number(0.123456), _number(1234.56)
    ('-', '12', '0.1235', '1235')
    """
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned so that it reads as text too."""
    return markdown(texts("", heads, lines), aligned=True).rstrip()
