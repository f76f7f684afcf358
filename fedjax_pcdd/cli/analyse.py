"""Figures and tables of the papers that are not accuracies, from the folders of finished runs.

    python experiments/analyse.py angles RUN...     classifier angles (FedGELA, Figure 2); --output=PICTURE.png
    python experiments/analyse.py features RUN...   feature angles (FedGELA, Figures 3 and 5); --output=PICTURE.png
    python experiments/analyse.py spectrum RUN...   eigenvalues of the features (FedMR, Table 7); --output=PICTURE.png
    python experiments/analyse.py intra RUN...      intra-class loss (FedMR, Figure 7); --output=PICTURE.png
    python experiments/analyse.py traffic           uploads with and without prototypes (FedMR, Table 3), as with
                                                    --preset=fedmr/table3
    python experiments/analyse.py traffic RUN...    what runs sent
    python experiments/analyse.py rounds RUN...     rounds to FedAvg's accuracy (FedMR, Table 4; FedRL, Table 2);
                                                    --target=best or last
    python experiments/analyse.py burden RUN...     memory and time of a client (FedMR, Figure 4; FedRL, Table 3)
    python experiments/analyse.py bilateral RUN...  GA and PA against E_W (FedGELA, Figure 4); --output=PICTURE.png
    python experiments/analyse.py partition ...     heat map (FedMR, Figures 5 and 6) from the options of a run, as
                                                    --partition=pcdd --clients=10; --output=PICTURE.png

RUN is the folder of a run, or one that holds such folders. What --track wrote is read; a run without it is looked at in
its last checkpoint, where the clients' models are those after the local training of one further round.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pcdd.analysis.bilateral import bilateral, draw_bilateral
from fedjax_pcdd.analysis.communication import COLUMNS, as_printed, upload
from fedjax_pcdd.analysis.pictures import draw
from fedjax_pcdd.analysis.quantities import QUANTITIES
from fedjax_pcdd.analysis.traffic import Traffic, in_words, traffic
from fedjax_pcdd.cli.options import configure, flag, guarded, scan
from fedjax_pcdd.data import sources
from fedjax_pcdd.data.federation import heat_map, load_partition
from fedjax_pcdd.errors import UserError, failed_write, nearest
from fedjax_pcdd.report.collect import RunRecord, collect
from fedjax_pcdd.report.expected import read_expected
from fedjax_pcdd.report.tables import markdown, texts
from fedjax_pcdd.report.targets import BEST, LAST, REFERENCE, reached
from fedjax_pcdd.training.build import build_model, default_model
from fedjax_pcdd.training.config import RUN, parse_config
from fedjax_pcdd.training.folder import TRACK, RunFolder

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
}  # fmt: skip


class Command(NamedTuple):
    """What a word of the command line does with runs and options; it returns what is to be printed."""

    work: Callable[[list[RunRecord], Options, Path], str]
    options: tuple[str, ...] = ()
    alone: bool = False  # whether it works without any run


def analyse_main(experiments: Path, argv: Sequence[str] | None = None) -> int:
    """Print a table and draw a picture.

    Args:
      experiments: folder with `presets` and `expected`.
      argv: arguments without the program's name; None for those of the process.

    Returns:
      Exit code: 0, or 2 for a mistake of the user (one sentence on stderr).
    """
    return guarded(lambda: _main(list(sys.argv[1:] if argv is None else argv), experiments))


def _main(arguments: list[str], experiments: Path) -> None:
    if not arguments or {"-h", "--help"} & set(arguments):
        flags = [flag(option.name) for option in RUN.values() if option.group == "data"]
        print((__doc__ or "") + (f"\nOptions of partition: {', '.join(flags)}" if "partition" in arguments else ""))
        return
    try:
        print(_run(arguments[0], arguments[1:], experiments))
    except OSError as error:
        raise failed_write(error, Path(error.filename or ".")) from error


def _run(name: str, arguments: list[str], experiments: Path) -> str:
    if name == "partition":
        return _partition(scan(arguments), experiments)
    if name not in COMMANDS:
        raise UserError(f"there is no analysis '{name}': {nearest(name, [*COMMANDS, 'partition'])}")
    command = COMMANDS[name]
    given = scan([word for word in arguments if word.startswith("--")])
    for option in given:
        if option not in command.options:
            known = ", ".join(f"--{one}" for one in command.options) or "none"
            raise UserError(f"{name} has no option {flag(option)}: its options are {known}.")
    paths = [word for word in arguments if not word.startswith("--")]
    if not paths and not command.alone:
        raise UserError("name at least one folder of runs, as runs/.")
    return command.work(_finished(collect(paths)) if paths else [], given, experiments)


def _finished(records: list[RunRecord]) -> list[RunRecord]:
    finished = [record for record in records if record.summary is not None]
    if not finished:
        raise UserError(f"{records[0].path} is unfinished: continue it with run.py --resume={records[0].path}.")
    return finished


def _tracked(name: str) -> Command:
    """The table and the picture of a quantity."""

    def work(records: list[RunRecord], given: Options, experiments: Path) -> str:
        rows = {label: _rows_of(record, name) for label, record in zip(_labels(records), records, strict=True)}
        if "output" in given:
            draw(name, rows if len(rows) > 1 else {"": next(iter(rows.values()))}, given["output"])
        heads = ["run", "round", *(head for head, _, _ in COLUMNS_OF[name])]
        lines = []
        for label, (*_, last) in rows.items():
            cells = [_number((last[name].get(model) or {}).get(key)) for _, model, key in COLUMNS_OF[name]]
            lines.append([label, str(last["round"]), *cells])
        if name == "spectrum":
            heads.append("paper")
            for line, record in zip(lines, records, strict=True):
                line.append(_number(_paper(record, "eigenvalue_variance", experiments)))
        return table(heads, lines)

    return Command(work, ("output",))


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


def _traffic(records: list[RunRecord], given: Options, experiments: Path) -> str:
    if given.get("preset", TABLE3) != TABLE3:
        raise UserError(f"uploads are printed in {TABLE3} alone: leave `preset` out, or name runs.")
    if not records:
        return _table3(experiments)
    lines = []
    for label, record in zip(_labels(records), records, strict=True):
        counts, words, cohort = _counted(record)
        megabytes = 4e-6 * (counts.up + counts.down) * cohort
        lines.append([label, words["down"], words["up"], f"{megabytes:.2f}", f"{megabytes * record.rounds_done:.1f}"])
    return table(["run", "sent down", "sent up", "MB a round", "MB in all"], lines)


def _table3(experiments: Path) -> str:
    cells = read_expected(experiments / "expected", TABLE3)
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


def _rounds(records: list[RunRecord], given: Options, experiments: Path) -> str:
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
        paper = [_number(_paper(record, metric, experiments)) for metric in ("rounds_to_target", "speedup")]
        lines.append([label, *texts, *paper])
    text = table(["run", "rounds", "speed-up", "paper: rounds", "speed-up"], lines)
    return f"{text}\n{rule.sentence}"


def _burden(records: list[RunRecord], given: Options, experiments: Path) -> str:
    lines = []
    for label, record in zip(_labels(records), records, strict=True):
        (counts, words, _), summary = _counted(record), record.summary or {}
        reference = _reference(record, records)
        seconds = summary.get("seconds_per_round")
        ratio = seconds / reference.summary["seconds_per_round"] if reference and reference.summary else None
        memory = summary.get("device_peak_memory_mb") or summary.get("peak_memory_mb")
        cells = [f"{4e-6 * counts.held:.2f}", words["client"], *map(_number, (seconds, ratio))]
        paper = [_paper(record, "seconds_per_round", experiments, method) for method in (record.method, REFERENCE)]
        lines.append([label, words["held"], *cells, _ratio(*paper), _number(memory)])
    heads = ["run", "held in training", "MB", "kept between rounds", "s a round", "times FedAvg", "paper", "peak MB"]
    return table(heads, lines)


def _reference(record: RunRecord, records: list[RunRecord]) -> RunRecord | None:
    """The run of FedAvg on the same partition and machine."""
    fitting = (one for one in records if one.method == REFERENCE and one.partition == record.partition)
    return next(fitting, None)


def _bilateral(records: list[RunRecord], given: Options, experiments: Path) -> str:
    groups: dict[str, list[tuple[float, float, float]]] = {}
    for record in records:
        ew = record.resolved.get("hyperparameters", {}).get("ew")
        summary = record.summary or {}
        if ew is not None and summary.get("ga_best") is not None and summary.get("pa_best") is not None:
            label = f"{record.dataset} {record.config['partition']}"
            label += f" {record.config['beta']:g}" if record.config["partition"] == "dirichlet" else ""
            groups.setdefault(label, []).append((ew, summary["ga_best"], summary["pa_best"]))
    if not groups:
        raise UserError("none of these runs has an E_W: sweep one, as sweep.py --method=fedgela --ew=1,4,16.")
    curves = {label: bilateral(points) for label, points in groups.items()}
    if "output" in given:
        draw_bilateral(curves, given["output"])
    lines = []
    for label, one in curves.items():
        for ew, ga, ga_std, pa, pa_std, seeds in zip(*one, strict=True):
            percent = [f"{100 * mean:.2f}" + (f" ± {100 * std:.2f}" if seeds > 1 else "") for mean, std in
                       ((ga, ga_std), (pa, pa_std))]  # fmt: skip
            lines.append([label, f"{ew:g}", *percent, str(seeds)])
    return table(["", "E_W", "GA best (%)", "PA best (%)", "seeds"], lines)


def _partition(given: Options, experiments: Path) -> str:
    from fedjax_pcdd.training.build import federate

    output = given.pop("output", "partition.png")
    federation = federate(configure(given, experiments / "presets")[0])
    heat_map(federation, output)
    owned = (federation.class_counts > 0).sum(1)
    return f"{federation.num_clients} clients with {owned.min()} to {owned.max()} classes: written to {output}"


def _paper(record: RunRecord, metric: str, experiments: Path, method: str | None = None) -> float | None:
    """The printed number of the cell that a run stands for, None where it stands for none."""
    if record.preset is None:
        return None
    cell = (record.resolved.get("split") or "", method or record.method, record.resolved.get("variant") or "", metric)
    numbers = read_expected(experiments / "expected", record.preset)
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


COMMANDS = {name: _tracked(name) for name in QUANTITIES} | {
    "traffic": Command(_traffic, ("preset",), alone=True),
    "rounds": Command(_rounds, ("target",)),
    "burden": Command(_burden),
    "bilateral": Command(_bilateral, ("output",)),
}
