"""Sweeps: a grid of runs from one command line, resumable, with a table of means over seeds.

    fedjax-pcdd sweep --method=fedavg,fedgela --beta=0.1,0.5 --seed=0:5 --ew=1e3,1e4

Every option may list several values with commas, integers also as a range FIRST:END without END. An option that only
some of the methods have goes to those. Each experiment is a run of its own in a folder of its own, as `run` has.
Experiments that differ in nothing but numbers (seed, partition, learning rate, hyper-parameters) are trained together,
as one compiled program; programs run one after another. Results are those of single runs but for rounding, and the
seconds of an experiment are its share. Finished experiments are not run again, not even by a larger grid in the same
folder; what was interrupted continues. The table of the experiments that a command names is written to summary.csv.

A preset with a `grid` (fedmr/table9) is searched: each hyper-parameter in turn, at the best values of those before it.
"""

import csv
import io
import math
import os
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table as RichTable

from fedjax_pcdd.api.grid import Experiment, stages, summarise
from fedjax_pcdd.cli.help import information
from fedjax_pcdd.cli.messages import flag, guarded, invocation, sentence, starting, warn
from fedjax_pcdd.cli.options import scan
from fedjax_pcdd.cli.run import GRACE, origin
from fedjax_pcdd.errors import UserError, imported, in_one_line, writing
from fedjax_pcdd.report.tables import Cell, Column, Row, Table, terminal, texts
from fedjax_pcdd.screen import Screen
from fedjax_pcdd.training.config import RUN
from fedjax_pcdd.training.fields import Option, convert, write_text
from fedjax_pcdd.training.metrics import MEASURES

if TYPE_CHECKING:
    from fedjax_pcdd.api.sweep_folder import Standing, Sweep

CONSOLE = Screen()
_TRACEBACK = "Traceback (most recent call last)"
ENDED = (0, 1)  # exit codes of workers that reached their end; 1: of experiments that failed
MISSING = {"failed": "failed", "without_pa": "without PA"}  # counts in a row of the table, in words
# Parameters that submitit has for every scheduler; all others get the prefix `slurm_`.
COMMON = ("name", "timeout_min", "cpus_per_task", "gpus_per_node", "tasks_per_node", "mem_gb", "nodes")
OPTIONS = {
    "together": Option("together", Literal["auto"] | int, False, "auto", low=1),
    "workers": Option("workers", int, False, 1, low=1),
    "launcher": Option("launcher", Literal["processes", "slurm", "local"], False, "processes"),
    "sweep_dir": Option("sweep_dir", Path, True, None),
    "status": Option("status", bool, False, False),
}
HELP = f"""{__doc__}
--sweep-dir=DIR     the sweep's folder; by default one below runs/ that is named by the grid, whatever its seeds
--together=N        most experiments that are trained together, 1: one after another; auto, the default: as many as fit
                    into memory, up to 16
--workers=N         processes that divide the experiments, each with its share of the cores, or one GPU
--launcher=slurm    starts the workers as jobs of Slurm through submitit, whose parameters are --slurm.NAME=VALUE, as
                    --slurm.partition=gpu; local: processes through submitit
--status            shows who does what, what is done, failed and left, and trains nothing; with the sweep's folder and
                    no other options, of the experiments that have begun

The same command on other machines that see the folder divides the work with this one. All other options are those of
run."""


def as_table(rows: Sequence[Mapping[str, Any]], shown: Sequence[str] = ()) -> RichTable:
    """A table for the terminal, in percent; `shown` names options."""
    from fedjax_pcdd.training.progress import with_pa_named  # which loads JAX

    criteria = dict.fromkeys(row["selected_on"] for row in rows if row["selected_on"])
    headings = [with_pa_named(measure.replace("_", " ").upper(), rows) for measure in MEASURES]
    columns = [Column("seeds"), *map(Column, headings), *[Column("best by")] * (len(criteria) > 1)]
    lines = []
    for row in rows:
        missing = [f"{row[name]} {text}" for name, text in MISSING.items() if row[name]]
        seeds = f"{row['seeds']} ({', '.join(missing)})" if missing else str(row["seeds"])
        cells = [Cell(text=seeds), *(Cell(row[measure], row[f"{measure}_std"]) for measure in MEASURES)]
        cells += [Cell(text=row["selected_on"].removesuffix(" samples"))] * (len(criteria) > 1)
        label = " ".join([row["experiment"], *(f"{name}={row[name]}" for name in shown)])
        lines.append(Row(label, tuple(cells)))
    title = f"percent; best rounds chosen by {next(iter(criteria))}" if len(criteria) == 1 else "percent"
    return terminal(Table(title, tuple(columns), tuple(lines), stub="experiment"))


def sweep_main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep that the arguments describe; exit code 1 if an experiment failed, else as of `guarded`."""
    return guarded(_main, argv)


def _main(argv: Sequence[str]) -> int:
    slurm = [word for word in argv if word.startswith("--slurm.")]
    with starting():
        options = scan([word for word in argv if word not in slurm], own=OPTIONS)
    if text := HELP if "help" in options else information(options):
        print(text)
        return 0
    settings, results = own_options(options, OPTIONS), {}
    quiet = convert(RUN["quiet"], options.get("quiet", "false"))
    most = None if settings["together"] == "auto" else settings["together"]  # None: as many as fit
    if slurm and settings["launcher"] == "processes":
        raise UserError(f"{slurm[0]} is for jobs of Slurm: add --launcher=slurm, or leave it out.")
    words = [f"{flag(name)}={text}" for name, text in options.items()]
    if of_what_has_begun(options, settings):
        return 0

    standings: list[Standing] = []

    def before(stage_sweep: "Sweep", folder: Path) -> bool:
        if settings["status"]:
            return all_over(stage_sweep, standings, results)
        if stage_sweep.left and not results and (settings["workers"] > 1 or settings["launcher"] != "processes"):
            from fedjax_pcdd.api.programs import MOST
            from fedjax_pcdd.training.folder import CLAIMS

            share = most or min(MOST, math.ceil(len(stage_sweep.left) / settings["workers"]))
            command = [sys.executable, "-m", "fedjax_pcdd", "sweep", *words, f"--sweep-dir={folder}"]
            launch([*command, f"--together={share}"], folder / CLAIMS, settings, slurm)
        return True

    folder, experiments = train(stages(options, results), results, settings["sweep_dir"], most, before, quiet=quiet)
    if settings["status"]:
        CONSOLE.print(terminal(status(standings)))
        return 0
    return conclude(folder, summarise(experiments, results), quiet=quiet)


def of_what_has_begun(options: Mapping[str, str], settings: Mapping[str, Any]) -> bool:
    """Whether a command names a folder alone and asks for the status of what has begun in it, which is then shown.

    Raises:
      UserError: there are experiments, but their status is not asked for; or it is asked for, and there are none.
    """
    folder = settings["sweep_dir"]
    if folder is None or options.keys() - {"quiet"}:
        return False
    from fedjax_pcdd.api.sweep_folder import CONFIG, Sweep, begun

    if not settings["status"]:
        if any(folder.glob(f"*/{CONFIG}")):
            raise UserError(
                f"{folder} holds experiments, and not the command that made them: repeat that one, or ask for `status`."
            )
        return False
    begun_sweep = Sweep(begun(folder), folder, _failed)
    CONSOLE.print(terminal(status(begun_sweep.standings())))
    CONSOLE.print("These have begun: repeat the sweep's options to see those that have not.", highlight=False)
    return True


def own_options(given: dict[str, str], known: Mapping[str, Option]) -> dict[str, Any]:
    """The values of a command's own options, which are removed from `given`.

    Raises:
      UserError: a wrong value, or an option that is for one run alone.
    """
    for name in ("run_dir", "resume"):
        if name in given:
            raise UserError("is for one run: use `sweep_dir` for a sweep's folder.", field=name)
    if "coordinator" in given:
        raise UserError("`coordinator` is for one run: a sweep is one process, which can use several `devices`.")
    return {name: convert(option, given.pop(name, str(option.default))) for name, option in known.items()}


def train(
    steps: Iterable[list[Experiment]], results: dict[str, Any], folder: Path | None, together: int | None = None,
    before: Callable[["Sweep", Path], bool] = lambda part, folder: True, *, quiet: bool = False,
) -> tuple[Path, list[Experiment]]:  # fmt: skip
    """`api.sweep.run_stages` with what a command adds: signals, origins, warnings, and a bar unless quiet."""
    with starting():
        from fedjax_pcdd.api import sweep  # JAX programs are not needed for the help

    reporters: Any = {"failed": _failed, "say": warn}
    console = Console(quiet=True) if quiet else CONSOLE
    with stopped_by_signals():
        return sweep.run_stages(
            steps, results, folder, together, console=console, origin=_origin, before=before, **reporters
        )


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """A context in which a signal lets rounds end and be saved; the sentence is that the same command continues."""
    from fedjax_pcdd.training import interrupts

    try:
        with interrupts.watch(GRACE, lambda: "stopped in the midst of a round: the same command continues."):
            yield
    except KeyboardInterrupt as stop:
        stop.args = ("the same command continues.",)
        raise


def conclude(
    folder: Path, rows: Sequence[Mapping[str, Any]], shown: Sequence[str] = (), *, file: str = "summary.csv",
    quiet: bool = False,
) -> int:  # fmt: skip
    """Write and, unless quiet, show the table; return the exit code, 1 if an experiment failed."""
    from fedjax_pcdd.api.sweep_folder import ELSEWHERE

    lines = io.StringIO()
    writer = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(folder / file, lines.getvalue(), ELSEWHERE)
    if not quiet:
        CONSOLE.print(as_table(rows, shown))
        print(f"written to {folder / file}; report: {invocation('report')} {shlex.quote(str(folder))}")
    return 1 if any(row["failed"] for row in rows) else 0


def _origin(experiment: Experiment) -> dict[str, Any]:
    return origin(experiment.given, [f"{flag(name)}={value}" for name, value in experiment.given.items()])


def _failed(name: str, error: UserError) -> None:
    print(f"{name}: {sentence(error.sentence)}", file=sys.stderr)


def status(standings: Sequence["Standing"]) -> Table:
    """A table of what each experiment has done, what it has left, and which process runs it."""
    lines = []
    for run in standings:
        to_go = "" if run.seconds is None else str(timedelta(seconds=math.ceil(run.seconds)))
        lines.append([run.name, run.state, f"{run.round} of {run.rounds}", to_go, run.by or ""])
    counts = Counter(run.state for run in standings)
    title = ", ".join(f"{counts[state]} {state}" for state in ("done", "running", "waiting", "failed"))
    return texts(title, ("experiment", "state", "rounds", "to go", "by"), lines, left=("state", "by"))


def all_over(part: "Sweep", standings: list["Standing"], results: dict[str, Any]) -> bool:
    """Add the progress of a stage; whether all of it is over, so that a status goes on to what follows from it.

    What has failed counts as such, and is not tried again.
    """
    standings += (found := part.standings())
    results |= {run.name: None for run in found if run.state == "failed"}
    if over := part.left.keys() <= results.keys():
        part.left.clear()
    return over


def launch(command: Sequence[str], logs: Path, own: Mapping[str, Any], slurm: Sequence[str]) -> None:
    """Start workers that divide a sweep, and wait for them; the others or the caller do what a dead one leaves."""
    from fedjax_pcdd.api.sweep_folder import ELSEWHERE

    with writing(logs.parent, ELSEWHERE):
        logs.mkdir(parents=True, exist_ok=True)
    if own["launcher"] == "processes":
        processes(command, logs, own["workers"])
        return
    submitit = imported("submitit", "slurm")
    settings = {}
    for word in slurm:
        name, _, text = word.removeprefix("--slurm.").replace("-", "_").partition("=")
        settings[name if name in COMMON else f"slurm_{name}"] = int(text) if text.isdecimal() else text
    try:
        executor = submitit.AutoExecutor(folder=logs / "jobs", cluster=own["launcher"])
        executor.update_parameters(**{"name": "fedjax-pcdd"} | settings)
        function = submitit.helpers.CommandFunction(list(command), verbose=False)
        jobs = [executor.submit(function) for _ in range(own["workers"])]
    except Exception as error:  # schedulers raise all kinds of errors
        raise UserError(f"the workers cannot be started: {in_one_line(error).rstrip('?.')}.") from error
    for job in jobs:
        job.wait()


def processes(command: Sequence[str], logs: Path, count: int) -> None:
    """Workers on this machine, each with its share of the cores, or one GPU in turn."""
    may_share = hasattr(os, "sched_setaffinity")  # not on every system
    cores = sorted(os.sched_getaffinity(0)) if may_share else list(range(os.cpu_count() or 1))
    gpus = visible_gpus()
    started: list[subprocess.Popen] = []
    try:
        for i in range(count):
            share = cores[i * len(cores) // count : (i + 1) * len(cores) // count] or [cores[i % len(cores)]]
            gpu_variable = {"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} if gpus else {}
            if may_share:
                os.sched_setaffinity(0, share)  # which a child inherits
            with open(logs / f"worker-{i}.log", "w") as log:
                started.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | gpu_variable))
        for i, process in enumerate(started):
            code, log = process.wait(), logs / f"worker-{i}.log"
            if code not in ENDED or _TRACEBACK in log.read_text(encoding="utf-8", errors="replace"):
                print(f"Process {i} of {count} ended early (code {code}): its last words are in {log}. "
                      "What it left is done by the others, or by this one.", file=sys.stderr)  # fmt: skip
    finally:
        if may_share:
            os.sched_setaffinity(0, cores)
        for process in started:
            process.terminate()


def visible_gpus() -> list[str]:
    """Numbers of the GPUs that a process may use, found without occupying one."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [number for number in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if number.strip()]
    return sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
