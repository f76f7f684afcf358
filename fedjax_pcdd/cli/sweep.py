"""Sweeps: a grid of runs from one command line, resumable, with a table of means over seeds.

    python experiments/sweep.py --method=fedavg,fedgela --beta=0.1,0.5 --seed=0:5 --ew=1e3,1e4

Every option may list several values with commas, integers also as a range FIRST:END without END. An option that only
some of the methods have goes to those. Each experiment is a run of its own in a folder of its own, as `run.py` has.
Experiments that differ in nothing but numbers (seed, partition, learning rate, hyper-parameters) are trained together,
as one compiled program; programs run one after another. Results are those of single runs but for rounding, and the
seconds of an experiment are its share. What is finished is not run again; what was interrupted continues.
"""

import csv
import io
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table as RichTable

from fedjax_pcdd import methods
from fedjax_pcdd.cli.options import PRESETS, configure, flag, guarded, scan, sentence
from fedjax_pcdd.cli.run import origin
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.registry import short_name
from fedjax_pcdd.report.tables import Cell, Column, Row, Table, over_seeds, terminal
from fedjax_pcdd.training.fields import Option, convert, options_of

WHOLE = ("lr_steps", "models", "track", "data_dir", "preset", "split", "variant")  # their commas belong to the value
MEASURES = ("ga_best", "ga_last", "pa_best", "pa_last")
TOGETHER = Option("together", Literal["auto"] | int, False, "auto", low=1)
HELP = f"""{__doc__}
--sweep-dir=DIR is the sweep's folder (default runs/sweep). --together=N trains at most N experiments together, 1 one
after another; auto, the default, as many as fit into memory, up to 16. All other options are those of run.py."""


class Experiment(NamedTuple):
    """One point of the grid."""

    name: str  # of its folder
    group: str  # what repetitions with other seeds share
    given: dict[str, str]  # options as on the command line


def values_of(name: str, text: str) -> list[str]:
    """The values that an option lists.

    >>> values_of("seed", "0:3")
    ['0', '1', '2']
    >>> values_of("beta", "0.1,0.5")
    ['0.1', '0.5']
    >>> values_of("models", "mlp,simple_cnn")
    ['mlp,simple_cnn']
    """
    if name in WHOLE:
        return [text]
    values: list[str] = []
    for part in text.split(","):
        first, colon, end = part.partition(":")
        if colon and first.strip().isdecimal() and end.strip().isdecimal():
            values += [str(i) for i in range(int(first), int(end))]
        else:
            values.append(part.strip())
    if not values or "" in values:
        raise UserError(f"`{name}={text}` lists an empty value or range: correct it.")
    return values


def expand(given: Mapping[str, str]) -> list[Experiment]:
    """All points of the grid, methods first; UserError for an option that no method has, which `configure` refuses."""
    listed = {name: values_of(name, text) for name, text in given.items()}
    names = listed.pop("method", ["fedavg"])
    short = {method: short_name(method) for method in names}
    short = short if len(set(short.values())) == len(short) else {method: method for method in names}
    owned = {method: set(options_of(methods.get(method))) for method in names}
    some = set().union(*owned.values())
    experiments = []
    for method in names:
        own = {name: values for name, values in listed.items() if name not in some or name in owned[method]}
        for point in itertools.product(*own.values()):
            options = dict(zip(own, point, strict=True))
            varied = [name for name in own if len(own[name]) > 1]
            label = [f"{name.replace('_', '-')}={options[name]}" for name in varied if name != "seed"]
            group = "-".join([short[method], *label]).replace("/", "_")
            name = f"{group}-s{options['seed']}" if "seed" in options else group
            experiments.append(Experiment(name, group, {"method": method, **options}))
    return experiments


def summarise(experiments: Sequence[Experiment], results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Mean and standard deviation (of a sample, ddof 1) over the seeds of each group, in percent."""
    rows = []
    for group, members in itertools.groupby(sorted(experiments, key=lambda e: e.group), key=lambda e: e.group):
        outcomes = [results[e.name] for e in members]
        finished = [r for r in outcomes if isinstance(r, dict)]
        row: dict[str, Any] = {"experiment": group, "seeds": len(finished), "failed": len(outcomes) - len(finished)}
        for measure in MEASURES:
            cell = over_seeds(100 * r[measure] if r.get(measure) is not None else None for r in finished)
            row |= {measure: cell.mean, f"{measure}_std": cell.std}
        rows.append(row)
    return rows


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each group."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_table(rows: Sequence[Mapping[str, Any]]) -> RichTable:
    """For the terminal, in percent."""
    columns = [Column("seeds"), *(Column(measure.replace("_", " ").upper()) for measure in MEASURES)]
    lines = []
    for row in rows:
        failed = f" ({row['failed']} failed)" if row["failed"] else ""
        cells = [Cell(row[measure], row[f"{measure}_std"]) for measure in MEASURES]
        lines.append(Row(row["experiment"], (Cell(text=f"{row['seeds']}{failed}"), *cells)))
    return terminal(Table("", tuple(columns), tuple(lines), stub="experiment"))


def sweep_main(argv: Sequence[str] | None = None, presets: Path = PRESETS) -> int:
    """Run the sweep that the arguments describe.

    Returns:
      Exit code: 0; 1 where an experiment failed; 2 for a mistake of the user, before anything runs; 130 if interrupted.
    """
    argv = sys.argv[1:] if argv is None else argv
    return guarded(lambda: _main(argv, presets))


def _main(argv: Sequence[str], presets: Path) -> int:
    given = scan(argv)
    if "help" in given:
        print(HELP)
        return 0
    folder = Path(given.pop("sweep_dir", "runs/sweep"))
    for name in ("run_dir", "resume"):
        if name in given:
            raise UserError("is for one run: use `sweep_dir` for a sweep's folder.", field=name)
    if "coordinator" in given:
        raise UserError("`coordinator` is for one run: a sweep is one process, which can use several `devices`.")
    together = convert(TOGETHER, given.pop("together", "auto"))
    experiments = expand(given)
    results = _run(experiments, folder, presets, None if together == "auto" else together)
    rows = summarise(experiments, results)
    (folder / "summary.csv").write_text(as_csv(rows))
    Console().print(as_table(rows))
    print(f"written to {folder / 'summary.csv'}; report: python experiments/report.py {folder}")
    return 1 if any(row["failed"] for row in rows) else 0


def _run(experiments: Sequence[Experiment], folder: Path, presets: Path, together: int | None) -> dict[str, Any]:
    """The results by name, each what summary.json holds, or an error."""
    configured = [configure(one.given, presets) for one in experiments]
    from fedjax_pcdd.api.sweep import Planned, Sweep  # JAX programs are not needed for mistakes
    from fedjax_pcdd.training.progress import SweepBar

    planned = []
    for one, pair in zip(experiments, configured, strict=True):
        arguments = [f"{flag(name)}={value}" for name, value in one.given.items()]
        planned.append(Planned(one.name, *pair, origin(one.given, arguments)))
    console = Console()

    def failed(name: str, error: UserError) -> None:
        console.print(f"{name}: {sentence(error.sentence)}", markup=False)

    sweep = Sweep(planned, folder, failed)
    bar = SweepBar({name: one.config.rounds for name, one in sweep.left.items()}, console)
    try:
        return sweep.run(bar, together)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command continues.") from None
