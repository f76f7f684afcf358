"""Figures and tables of the papers that are not accuracies, from the folders of finished runs.

    fedjax-pcdd analyse angles RUN...     classifier angles (FedGELA, Figure 2); --output=PICTURE.png
    fedjax-pcdd analyse features RUN...   feature angles (FedGELA, Figures 3 and 5); --output=PICTURE.png
    fedjax-pcdd analyse spectrum RUN...   eigenvalues of the features (FedMR, Table 7); --output=PICTURE.png
    fedjax-pcdd analyse intra RUN...      intra-class loss (FedMR, Figure 7); --output=PICTURE.png
    fedjax-pcdd analyse gradients RUN...  norms of gradients, clipped steps, weights; --output=PICTURE.png
    fedjax-pcdd analyse traffic           uploads with and without prototypes (FedMR, Table 3), as with
                                                    --preset=fedmr/table3
    fedjax-pcdd analyse traffic RUN...    what runs sent
    fedjax-pcdd analyse rounds RUN...     rounds to FedAvg's accuracy (FedMR, Table 4; FedRL, Table 2);
                                                    --target=best or last
    fedjax-pcdd analyse burden RUN...     memory and time of a client (FedMR, Figure 4; FedRL, Table 3);
                                                    --output=PICTURE.png
    fedjax-pcdd analyse bilateral RUN...  GA and PA against E_W (FedGELA, Figure 4); --output=PICTURE.png
    fedjax-pcdd analyse grid RUN...       the best weights of a search beside the printed ones (FedMR, Tables
                                                    9 and 10)
    fedjax-pcdd analyse partition ...     heat maps (FedMR, Figures 5 and 6; FedRL, Figure 3) from the
                                                    options of a run, as --partition=pcdd --clients=10; a panel for
                                                    each value of --split or --beta; --counts=FILE draws counts in
                                                    place of a data set; --output=PICTURE.png
    fedjax-pcdd analyse tasks RUN...      own domain and local objective by round (FCCL, Figure 6)
    fedjax-pcdd analyse ablation RUN...   by public images and continual learning (FCCL, Figures 7 and 8)
    fedjax-pcdd analyse correlation RUN   logits of public and of own images (FCCL, Figure 5); --clip-colours
    fedjax-pcdd analyse embedding RUN...  features of two participants in the plane (FCCL, Figure 4)

The last four draw with --output=PICTURE.png, too; features and angles with --by-split beside it draw a column for each
partition (FedGELA, Figure 5).
RUN is the folder of a run, or one that holds such folders. What --track wrote is read; a run without it is looked at in
its last checkpoint, where the clients' models are those after the local training of one further round.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pcdd.analysis.burden import Burden, draw_burdens
from fedjax_pcdd.analysis.pictures import Bilateral, bilateral, draw, draw_bilateral, draw_columns
from fedjax_pcdd.analysis.quantities import QUANTITIES
from fedjax_pcdd.analysis.traffic import COLUMNS, Traffic, as_printed, in_words, traffic, upload
from fedjax_pcdd.cli.messages import flag, guarded
from fedjax_pcdd.cli.options import configure, scan
from fedjax_pcdd.cli.task_analyses import Lines, ablation, correlation, embedding, tasks
from fedjax_pcdd.data import sources
from fedjax_pcdd.data.federation import heat_maps, map_of, read_counts
from fedjax_pcdd.data.lists import load_partition
from fedjax_pcdd.errors import UserError, failed_write, nearest
from fedjax_pcdd.report.collect import RunRecord, collect
from fedjax_pcdd.report.expected import read_expected
from fedjax_pcdd.report.tables import markdown, texts
from fedjax_pcdd.report.targets import BEST, LAST, REFERENCE, reached
from fedjax_pcdd.training.build import build_model, default_model
from fedjax_pcdd.training.config import RUN, parse_config
from fedjax_pcdd.training.folder import TRACK, RunFolder
from fedjax_pcdd.training.presets import PAPERS
from fedjax_pcdd.training.progress import with_pa_named

Options = dict[str, str]
TABLE3 = "fedmr/table3"
# Columns of the quantities' tables: heading, `global` or `local`, key.
COLUMNS_OF = {
    "angles": [(f"{key}, {model}", model, key) for key in ("existing", "missing") for model in ("global", "local")],
    "features": [("all, global", "global", "all"), ("existing, global", "global", "existing"),
                 ("existing, local", "local", "existing")],
    "spectrum": [("variance", "global", "variance"), ("live dimensions", "global", "dimensions"),
                 ("within classes", "global", "class_variance"), ("clients' models", "local", "variance")],
    "intra": [("global", "global", "loss"), ("local", "local", "loss")],
    "gradients": [("norm of gradients", "local", "norm"), ("clipped steps", "local", "clipped"),
                  ("weights, local", "local", "weights"), ("weights, global", "global", "weights")],
}  # fmt: skip


class Command(NamedTuple):
    """What a word of the command line does with runs and options; it returns what is to be printed."""

    work: Callable[[list[RunRecord], Options, Path], str]
    options: tuple[str, ...] = ()
    alone: bool = False  # whether it works without any run


def analyse_main(argv: Sequence[str] | None = None, papers: Path = PAPERS) -> int:
    """Print a table and draw a picture.

    Args:
      argv: arguments without the program's name; None for those of the process.
      papers: folder with `presets` and `expected`.

    Returns:
      Exit code: 0, or 2 for a mistake of the user (one sentence on stderr).
    """
    return guarded(lambda: _main(list(sys.argv[1:] if argv is None else argv), papers))


def _main(arguments: list[str], papers: Path) -> None:
    if not arguments or {"-h", "--help"} & set(arguments):
        flags = [flag(option.name) for option in RUN.values() if option.group == "data"]
        print((__doc__ or "") + (f"\nOptions of partition: {', '.join(flags)}" if "partition" in arguments else ""))
        return
    try:
        print(_run(arguments[0], arguments[1:], papers))
    except OSError as error:
        raise failed_write(error, Path(error.filename or ".")) from error


def _run(name: str, arguments: list[str], papers: Path) -> str:
    if name == "partition":
        return _partition(scan(arguments), papers)
    if name not in COMMANDS:
        raise UserError(f"there is no analysis '{name}': {nearest(name, [*COMMANDS, 'partition'])}")
    command = COMMANDS[name]
    given = scan([word for word in arguments if word.startswith("--")], {"by_split", "clip_colours"})
    for option in given:
        if option not in command.options:
            known = ", ".join(flag(one) for one in command.options) or "none"
            raise UserError(f"{name} has no option {flag(option)}: its options are {known}.")
    paths = [word for word in arguments if not word.startswith("--")]
    if not paths and not command.alone:
        raise UserError("name at least one folder of runs, as runs/.")
    return command.work(_finished(collect(paths)) if paths else [], given, papers)


def _finished(records: list[RunRecord]) -> list[RunRecord]:
    finished = [record for record in records if record.summary is not None]
    if not finished:
        raise UserError(f"{records[0].path} is unfinished: continue it with `resume={records[0].path}`.")
    return finished


def _tracked(name: str) -> Command:
    """The table and the picture of a quantity."""

    def work(records: list[RunRecord], given: Options, papers: Path) -> str:
        rows = {label: _rows_of(record, name) for label, record in zip(_labels(records), records, strict=True)}
        if "output" in given and given.get("by_split") == "true":
            groups: dict[str, dict[str, Any]] = {}
            for own, record in zip(rows.values(), records, strict=True):
                groups.setdefault(_partition_of(record), {})[record.path.name] = own
            draw_columns(name, groups, given["output"])
        elif "output" in given:
            draw(name, rows if len(rows) > 1 else {"": next(iter(rows.values()))}, given["output"])
        heads = ["run", "round", *(head for head, _, _ in COLUMNS_OF[name])]
        lines = []
        for label, (*_, last) in rows.items():
            cells = [_number((last[name].get(model) or {}).get(key)) for _, model, key in COLUMNS_OF[name]]
            lines.append([label, str(last["round"]), *cells])
        if name == "spectrum":
            heads.append("paper")
            for line, record in zip(lines, records, strict=True):
                line.append(_number(_paper(record, "eigenvalue_variance", papers)))
        return table(heads, lines)

    return Command(work, ("output", "by_split"))


def _rows_of(record: RunRecord, name: str) -> list[dict[str, Any]]:
    """Lines of track.jsonl that have a quantity; where there are none, one of the run's last checkpoint."""
    tracked = [row for row in RunFolder(record.path).rows(TRACK) if name in row]
    return tracked or [_last(record, name)]


def _last(record: RunRecord, name: str) -> dict[str, Any]:
    from fedjax_pcdd.api.runs import load_run  # only these analyses restore checkpoints
    from fedjax_pcdd.training.tracking import Tracker

    history = load_run(record.path)
    round, simulation = len(history.rows), history.simulation
    tracker, plan = Tracker([name], simulation, history.config.seed), simulation.plan(round)
    return {"round": round, **tracker.entry(history.state, plan[1], tracker.before(round, history.state, plan))}


def _counted(record: RunRecord) -> tuple[Traffic, dict[str, str], int]:
    """What a run's method sends, keeps and holds, in numbers and in words, and how many clients a round has.

    Raises:
      UserError: it is a run over the domains of a task, or its data set is not at hand.
    """
    config, method = parse_config(record.text, str(record.path / "config.yaml"))
    if config.task is not None:
        raise UserError(f"{record.path} is a run over the domains of a task, which are not counted: leave it out.")
    dataset = sources.load(config.dataset, config.data_dir)
    name = (config.models or config.model or default_model(dataset)).split(",")[0]
    counts = traffic(method, build_model(config, name, dataset), dataset.x_train.shape[1:])
    names = ("up", "down", "client", "held")
    cohort = config.cohort or len(load_partition(record.path / "partition.npz").train)
    return counts, {one: in_words(getattr(counts, one), counts, dataset.num_classes) for one in names}, cohort


def _labels(records: list[RunRecord]) -> list[str]:
    """Names of the folders, or their whole paths where two have the same name."""
    names = [record.path.name for record in records]
    return names if len(set(names)) == len(names) else [str(record.path) for record in records]


def _traffic(records: list[RunRecord], given: Options, papers: Path) -> str:
    if given.get("preset", TABLE3) != TABLE3:
        raise UserError(f"uploads are printed in {TABLE3} alone: leave `preset` out, or name runs.")
    if not records:
        return _table3(papers)
    lines = []
    for label, record in zip(_labels(records), records, strict=True):
        counts, words, cohort = _counted(record)
        megabytes = 4e-6 * (counts.up + counts.down) * cohort
        lines.append([label, words["down"], words["up"], f"{megabytes:.2f}", f"{megabytes * record.rounds_done:.1f}"])
    return table(["run", "sent down", "sent up", "MB a round", "MB in all"], lines)


def _table3(papers: Path) -> str:
    cells = read_expected(papers / "expected", TABLE3)
    expected = {(one.split, one.method, one.metric): one.value for one in cells}
    names = [("fedavg", "upload_millions"), ("fedmr", "upload_millions"), ("fedmr", "extra_upload_pct")]
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


def _rounds(records: list[RunRecord], given: Options, papers: Path) -> str:
    wanted = given.get("target", "best")
    if wanted not in ("best", "last"):
        raise UserError(f"takes best or last, not {wanted!r}.", field="target")
    rule = BEST if wanted == "best" else LAST
    references = [record for record in records if record.method == REFERENCE]
    if not references:
        raise UserError("the target is FedAvg's accuracy: name the folder of a run of fedavg too.")
    lines = []
    for label, record in zip(_labels(records), records, strict=True):
        result = reached(record, references, rule)
        texts = ["-", "-"] if result is None else ["never" if x is None else _number(x) for x in result]
        paper = [_number(_paper(record, metric, papers)) for metric in ("rounds_to_target", "speedup")]
        lines.append([label, *texts, *paper])
    text = table(["run", "rounds", "speed-up", "paper: rounds", "speed-up"], lines)
    return f"{text}\n{rule.sentence}"


def _burden(records: list[RunRecord], given: Options, papers: Path) -> str:
    lines, ratios = [], {}
    for label, record in zip(_labels(records), records, strict=True):
        (counts, words, _), summary = _counted(record), record.summary or {}
        reference = _reference(record, records)
        seconds = summary.get("seconds_local") or summary.get("seconds_per_round")
        base = (reference and reference.summary) or {}
        ratio = seconds / (base.get("seconds_local") or base["seconds_per_round"]) if base else None
        memory = summary.get("device_peak_memory_mb") or summary.get("peak_memory_mb")
        cells = [f"{4e-6 * counts.held:.2f}", words["client"], *map(_number, (seconds, ratio))]
        paper = [_paper(record, "seconds_per_round", papers, method) for method in (record.method, REFERENCE)]
        lines.append([label, words["held"], *cells, _ratio(*paper), _number(memory)])
        name = f"{record.method} {record.resolved.get('variant') or ''}".rstrip()
        ratios.setdefault(name, []).append((record.partition, counts.held, ratio, summary["ga_best"]))
    if "output" in given:
        draw_burdens(_burdens(ratios), given["output"])
    heads = ["run", "held in training", "MB", "kept between rounds", "s a round", "times FedAvg", "paper", "peak MB"]
    return table(heads, lines)


def _burdens(runs: dict[str, list[tuple]]) -> list[Burden]:
    """Of each method the means over the partitions that all have: of the time's ratio the geometric one."""
    common = set.intersection(*({one[0] for one in own} for own in runs.values()))
    if not common or any(ratio is None for own in runs.values() for _, _, ratio, _ in own):
        raise UserError("a picture needs one partition that all methods have, FedAvg among them.")
    burdens = []
    for name, own in runs.items():
        held, ratios, ga = zip(*(one[1:] for one in own if one[0] in common), strict=True)
        burdens.append(Burden(name, float(np.mean(held)), float(np.exp(np.mean(np.log(ratios)))), float(np.mean(ga))))
    return burdens


def _reference(record: RunRecord, records: list[RunRecord]) -> RunRecord | None:
    """The run of FedAvg on the same partition and machine."""
    fitting = (one for one in records if one.method == REFERENCE and one.partition == record.partition)
    return next(fitting, None)


def _bilateral(records: list[RunRecord], given: Options, papers: Path) -> str:
    groups: dict[str, list[tuple[float, float, float]]] = {}
    fedavg: dict[str, list[tuple[float, float]]] = {}
    summaries: dict[bool, list[dict[str, Any]]] = {True: [], False: []}  # of runs with an E_W, and of FedAvg's
    for record in records:
        summary, hyper = record.summary or {}, record.resolved.get("hyperparameters", {})
        ew, ga, pa = hyper.get("ew"), summary.get("ga_best"), summary.get("pa_best")
        if ga is None or pa is None:
            continue
        if ew is not None or record.method == REFERENCE:
            summaries[ew is not None].append(summary)
        if ew is not None:
            label = _partition_of(record) + (" (linear)" if hyper.get("scale") == "linear" else "")
            groups.setdefault(label, []).append((ew, ga, pa))
        elif record.method == REFERENCE:
            fedavg.setdefault(_partition_of(record), []).append((ga, pa))
    if not groups:
        raise UserError("none of these runs has an E_W: sweep `ew=1,4,16` of fedgela.")
    curves = {label: bilateral(points) for label, points in groups.items()}
    means = {label: np.mean(points, axis=0) for label, points in fedavg.items()}
    references = {label: tuple(means[name]) for label in curves if (name := label.removesuffix(" (linear)")) in means}
    pa, reference = (with_pa_named("PA", summaries[own]) for own in (True, False))
    fedavg_pa = "FedAvg" if reference == pa else f"FedAvg, {reference}"
    if "output" in given:
        draw_bilateral(curves, references, given["output"], pa=pa, reference=fedavg_pa)
    lines = _energies(curves)
    for name, (ga, own) in means.items():
        lines.append([name, fedavg_pa, f"{100 * ga:.2f}", f"{100 * own:.2f}", str(len(fedavg[name]))])
    by = _chosen_on(records)
    return table(["", "E_W", f"GA best on {by} (%)", f"{pa} best on {by} (%)", "seeds"], lines)


def _energies(curves: dict[str, Bilateral]) -> list[list[str]]:
    """A line for each E_W of each curve, in percent."""
    lines = []
    for label, one in curves.items():
        for ew, ga, ga_std, own, own_std, seeds in zip(*one, strict=True):
            percent = [f"{100 * mean:.2f}" + (f" ± {100 * std:.2f}" if seeds > 1 else "") for mean, std in
                       ((ga, ga_std), (own, own_std))]  # fmt: skip
            lines.append([label, f"{ew:g}", *percent, str(seeds)])
    return lines


def _chosen_on(records: list[RunRecord]) -> str:
    """What the best rounds of the runs were chosen by."""
    return " or ".join(dict.fromkeys((one.summary or {}).get("selected_on", "test") for one in records))


def _partition_of(record: RunRecord) -> str:
    """Data set, partition and number of clients, as `cifar10 dirichlet 0.1, 10 clients`."""
    config = record.config
    detail = {"dirichlet": f" {config['beta']:g}", "pcdd": f" {config['classes_per_client']}"}
    name = f"{record.dataset} {config['partition']}{detail.get(config['partition'], '')}"
    return f"{name}, {config['clients']} clients" if config["clients"] else name


def _grid(records: list[RunRecord], given: Options, papers: Path) -> str:
    cells: dict[tuple[str, str], list[RunRecord]] = {}
    for record in records:
        cells.setdefault((record.resolved.get("split") or _partition_of(record), record.method), []).append(record)
    lines = []
    for (split, method), own in cells.items():
        hyper = [one.resolved["hyperparameters"] for one in own]
        for name in [n for n in hyper[0] if len({str(h[n]) for h in hyper}) > 1]:
            searched = _searched(own, name)
            held_out = all((one.summary or {}).get("selected_on") == "validation" for one in searched)
            means = _means_by(searched, name, "ga_best")
            scores = _means_by(searched, name, "ga_validation_best") if held_out else means
            best = max(scores, key=lambda value: scores[value])
            paper = _paper(own[0], name, papers)
            gain = 100 * (means[best] - means[paper]) if paper in means else None
            numbers = [f"{best:g}", "validation" if held_out else "test", f"{100 * means[best]:.2f}"]
            lines.append([split, method, name, *numbers, _number(paper), _number(gain)])
    return table(["split", "method", "", "best", "chosen on", "GA best (%)", "paper", "GA over the paper's"], lines)


def _means_by(records: list[RunRecord], name: str, measure: str) -> dict[float, float]:
    """Means over the seeds of an entry of the summaries, by the values of a hyper-parameter."""
    values: dict[float, list[float]] = {}
    for record in records:
        values.setdefault(record.resolved["hyperparameters"][name], []).append((record.summary or {})[measure])
    return {value: float(np.mean(several)) for value, several in values.items()}


def _searched(records: list[RunRecord], name: str) -> list[RunRecord]:
    """Most of the runs that differ in one hyper-parameter, and in no other."""
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        others = {n: value for n, value in record.resolved["hyperparameters"].items() if n != name}
        groups.setdefault(str(sorted(others.items())), []).append(record)
    return max(groups.values(), key=len)


def _of_task(analysis: Callable[..., Lines]) -> Command:
    """The table and picture of an analysis of tasks."""

    def work(records: list[RunRecord], given: Options, papers: Path) -> str:
        return table(*analysis(records, _labels(records), given.get("output")))

    return Command(work, ("output",))


def _correlation(records: list[RunRecord], given: Options, papers: Path) -> str:
    if "output" in given and len(records) > 1:
        raise UserError("one picture is of one run: name one, or leave `output` out.")
    return table(*correlation(records, _labels(records), given.get("output"), given.get("clip_colours") == "true"))


def _partition(given: Options, papers: Path) -> str:
    from fedjax_pcdd.api.grid import expand
    from fedjax_pcdd.training.build import federate

    output = given.pop("output", "partition.png")
    if "counts" in given:
        maps = [read_counts(Path(given["counts"]))]
    else:
        splits = [{"split": one} for one in given.pop("split", "").split(",") if one] or [{}]
        points = [one.given for split in splits for one in expand(given | split)]
        maps = [map_of(federate(configure(point)[0])) for point in points]
    heat_maps(maps, output)
    owned = [(one.counts > 0).sum(1) for one in maps]
    words = [f"{len(one)} clients with {one.min()} to {one.max()} classes" for one in owned]
    return f"{'; '.join(words)}: written to {output}"


def _paper(record: RunRecord, metric: str, papers: Path, method: str | None = None) -> float | None:
    """The printed number of the cell that a run stands for, None where it stands for none."""
    if record.preset is None:
        return None
    cell = (record.resolved.get("split") or "", method or record.method, record.resolved.get("variant") or "", metric)
    numbers = read_expected(papers / "expected", record.preset)
    return next((one.value for one in numbers if (one.split, one.method, one.variant, one.metric) == cell), None)


def _ratio(value: float | None, reference: float | None) -> str:
    return _number(value / reference if value and reference else None)


def _number(value: Any) -> str:
    """Four digits, - for nothing.

    >>> _number(None), _number(12), _number(0.123456), _number(1234.56)
    ('-', '12', '0.1235', '1235')
    """
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned so that it reads as text too."""
    return markdown(texts("", heads, lines), aligned=True).rstrip()


COMMANDS = (
    {name: _tracked(name) for name in QUANTITIES}
    | {
        "traffic": Command(_traffic, ("preset",), alone=True),
        "rounds": Command(_rounds, ("target",)),
        "burden": Command(_burden, ("output",)),
        "bilateral": Command(_bilateral, ("output",)),
        "grid": Command(_grid),
        "correlation": Command(_correlation, ("output", "clip_colours")),
    }
    | {one.__name__: _of_task(one) for one in (tasks, ablation, embedding)}
)
