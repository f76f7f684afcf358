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
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rich.console import Console
from rich.table import Table as RichTable

from fedjax_pcdd import methods
from fedjax_pcdd.cli.options import PRESETS, configure, scan
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import Method
from fedjax_pcdd.report.tables import Cell, Column, Row, Table, over_seeds, terminal
from fedjax_pcdd.training.config import RunConfig
from fedjax_pcdd.training.fields import Option, convert, options_of
from fedjax_pcdd.training.progress import Bar, SweepBar

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
    found: list[str] = []
    for part in text.split(","):
        first, colon, end = part.partition(":")
        if colon and first.strip().isdecimal() and end.strip().isdecimal():
            found += [str(i) for i in range(int(first), int(end))]
        else:
            found.append(part.strip())
    if not found or "" in found:
        raise UserError(f"--{name.replace('_', '-')}={text} lists an empty value or range: correct it.")
    return found


def expand(given: Mapping[str, str]) -> list[Experiment]:
    """All points of the grid, methods first; UserError for an option that no method has, found by `configure`."""
    listed = {name: values_of(name, text) for name, text in given.items()}
    names = listed.pop("method", ["fedavg"])
    owned = {method: set(options_of(methods.get(method))) for method in names}
    some = set().union(*owned.values())
    found = []
    for method in names:
        own = {name: values for name, values in listed.items() if name not in some or name in owned[method]}
        for point in itertools.product(*own.values()):
            options = dict(zip(own, point, strict=True))
            varied = [name for name in own if len(own[name]) > 1]
            label = [f"{name.replace('_', '-')}={options[name]}" for name in varied if name != "seed"]
            group = "-".join([method, *label]).replace("/", "_")
            name = f"{group}-s{options['seed']}" if "seed" in options else group
            found.append(Experiment(name, group, {"method": method, **options}))
    return found


class Sweep:
    """Runs what is not finished of the experiments, together what shares a program."""

    def __init__(self, experiments: Sequence[Experiment], folder: Path, presets: Path, console: Console):
        """Look what is finished.

        Args:
          folder: where each experiment has a folder of its name.
          presets: folder of the presets.
          console: told of failures.
        """
        self.folder, self.presets, self.console = folder, presets, console
        self.results: dict[str, Any] = {}  # by name what summary.json holds, or the sentence of a failure
        self.pairs: dict[str, tuple[RunConfig, Method]] = {}
        self.left = [e for e in experiments if not self._is_over(e)]

    def _is_finished(self, experiment: Experiment) -> bool:
        done = self.folder / experiment.name / "summary.json"
        if done.is_file():
            self.results[experiment.name] = json.loads(done.read_text())
        return done.is_file()

    def _is_over(self, experiment: Experiment) -> bool:
        """Whether it is finished, or cannot even be configured."""
        if self._is_finished(experiment):
            return True
        try:
            self.pairs[experiment.name] = self._configured(experiment)
        except UserError as error:
            self._failed(experiment, error)
            return True
        return False

    def _configured(self, experiment: Experiment) -> tuple[RunConfig, Method]:
        folder = self.folder / experiment.name
        started = (folder / "config.yaml").is_file()
        where = {"resume": str(folder)} if started else {**experiment.given, "run_dir": str(folder)}
        return configure(where | {"quiet": "true"}, self.presets)

    def _failed(self, experiment: Experiment, error: Any) -> None:
        self.results[experiment.name] = str(error)
        self.console.print(f"{experiment.name}: {error}", markup=False)

    def run(self, together: int | None = None) -> dict[str, Any]:
        """Run it all.

        Args:
          together: most experiments in one program, None for as many as fit into memory.

        Returns:
          For each experiment by name what its summary.json holds, or the sentence with which it failed.
        """
        from fedjax_pcdd.api import sharing  # nothing of JAX is needed for mistakes

        pairs = [self.pairs[e.name] for e in self.left]
        with SweepBar({name: config.rounds for name, (config, _) in self.pairs.items()}, self.console) as bar:
            for group in sharing.groups(pairs):
                most = together or (sharing.affordable(*pairs[group[0]]) if len(group) > 1 else 1)
                for part in sharing.portions(group, most):
                    self._run_part([self.left[i] for i in part], bar)
        return self.results

    def _run_part(self, experiments: Sequence[Experiment], bar: SweepBar) -> None:
        """Run experiments together, or one by one where there is but one or some cannot be prepared."""
        from fedjax_pcdd.api.joint import Asked, run_together

        if len(experiments) > 1:
            asked = [Asked(*self.pairs[e.name], _origin(e), bar.of(e.name)) for e in experiments]
            with suppress(UserError):  # alone, it is said of the one that it concerns
                for experiment, result in zip(experiments, run_together(asked), strict=True):
                    if isinstance(result, str):
                        self._failed(experiment, result)
                    else:
                        self.results[experiment.name] = result
        for experiment in experiments:
            if experiment.name not in self.results and not self._is_finished(experiment):
                self._run_alone(experiment, bar.of(experiment.name))
            bar.end(experiment.name)

    def _run_alone(self, experiment: Experiment, bar: Bar) -> None:
        from fedjax_pcdd.api import launch

        try:
            pair = self._configured(experiment)  # it may have been started with others
            self.results[experiment.name] = launch.run(*pair, _origin(experiment), bar)
        except UserError as error:
            self._failed(experiment, error)


def _origin(experiment: Experiment) -> dict[str, Any]:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in experiment.given.items()]
    cell = {name: experiment.given.get(name) for name in ("preset", "split", "variant")}
    return {**cell, "command": shlex.join(["python", "experiments/run.py", *arguments])}


def summarise(experiments: Sequence[Experiment], results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Mean and standard deviation (of a sample, ddof 1) over the seeds of each group, in percent."""
    rows = []
    for group, members in itertools.groupby(sorted(experiments, key=lambda e: e.group), key=lambda e: e.group):
        found = [results[e.name] for e in members]
        finished = [r for r in found if isinstance(r, dict)]
        row: dict[str, Any] = {"experiment": group, "seeds": len(finished), "failed": len(found) - len(finished)}
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
    console = Console()
    try:
        given = scan(sys.argv[1:] if argv is None else argv)
        if "help" in given:
            print(HELP)
            return 0
        folder = Path(given.pop("sweep_dir", "runs/sweep"))
        for name in ("run_dir", "resume"):
            if name in given:
                raise UserError(f"--{name.replace('_', '-')} is for one run: use --sweep-dir for a sweep's folder.")
        if "coordinator" in given:
            raise UserError("--coordinator is for one run: a sweep is one process, which can use several --devices.")
        together = convert(TOGETHER, given.pop("together", "auto"), "--together")
        experiments = expand(given)
        for experiment in experiments:
            configure(experiment.given, presets)
        results = Sweep(experiments, folder, presets, console).run(None if together == "auto" else together)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command continues.", file=sys.stderr)
        return 130
    rows = summarise(experiments, results)
    (folder / "summary.csv").write_text(as_csv(rows))
    console.print(as_table(rows))
    print(f"written to {folder / 'summary.csv'}; report: python experiments/report.py {folder}")
    return 1 if any(row["failed"] for row in rows) else 0
