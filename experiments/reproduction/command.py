"""The command line of experiments/reproduce.py."""

# ruff: noqa: RUF009 - run_option is a dataclass field, not a value

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedjax_pcdd.cli.messages import flag
from fedjax_pcdd.cli.options import command
from fedjax_pcdd.cli.sweep import processes
from fedjax_pcdd.errors import UserError, is_there, nearest
from fedjax_pcdd.report.tables import markdown, texts
from fedjax_pcdd.training.fields import run_option
from fedjax_pcdd.training.presets import PAPERS
from reproduction.plan import Cell, check, read_plan

CPU_PLANS = ("cpu", "mid", "long", "full")
OF_ALL = ("page", "coverage", "claims")  # options that ask for something of all results


@dataclasses.dataclass(frozen=True)
class Options:
    """Run the unfinished cells of a plan, one after another, and keep a small file of results of each.

    The same command goes on where it was interrupted, until every cell has its result. Several at once, on one machine
    or many with a shared file system, divide the cells that are left.
    """

    scale: str | None = run_option(
        None,
        "",
        "the plan: cpu (small; the default), mid (a residual network), long (as long as the papers), full (the papers' "
        "settings for the small networks), gpu (those, most wanted first), paper (every cell of every preset), or a "
        "YAML file",
    )
    only: str | None = run_option(
        None, "", "only cells whose table and name begin so, as fedmr/table1 or fedmr/table1/cpu-P10C2"
    )
    claim: str | None = run_option(None, "", "only cells that a claim of the papers is about, by its text in `claims`")
    budget_minutes: float | None = run_option(
        None, "", "stop after this time; a cell in the making continues with the next call", above=0
    )
    workers: int = run_option(1, "", "processes that divide the cells, each with its share of the cores", low=1)
    together: int = run_option(
        1, "", "most cells of one program that are trained together, compiled once; 1: each alone, so that its command "
        "repeats its numbers bit for bit, as those of several are but for rounding", low=1
    )  # fmt: skip
    again: bool = run_option(
        False, "", "run also cells whose result is of another version of this project, and replace it; `runs_dir` must "
        "not have their runs"
    )  # fmt: skip
    data_dir: Path | None = run_option(None, "", "folder of the data sets, as of run.py")
    runs_dir: Path = run_option(Path("runs/reproduce"), "", "folder of the run folders, with their checkpoints")
    results_dir: Path = run_option(Path("results"), "", "folder of the results")
    list: bool = run_option(False, "", "list the cells and what is done")
    status: bool = run_option(
        False, "", "say in one line what is done and left, for how long, and who runs what; without `scale` and "
        "`only` of all plans for a CPU"
    )  # fmt: skip
    dry_run: bool = run_option(False, "", "print the commands of the unfinished cells")
    page: bool = run_option(
        False, "", "write docs/reproduction.md, ambiguities.md and coverage.md from the results, and run nothing"
    )
    coverage: bool = run_option(False, "", "list what the papers show: its command, where it was run, its result")
    claims: bool = run_option(False, "", "list the papers' claims, and what the results say of them")
    json: bool = run_option(False, "", "print the list of `coverage` or `claims` as JSON")
    docs_dir: Path = run_option(Path("docs"), "", "folder of the pages")


def reproduce_main(experiments: Path, argv: Sequence[str] | None = None, papers: Path = PAPERS) -> int:
    """Do what the arguments ask for.

    Args:
      experiments: folder with `reproduction`.
      argv: arguments without the program's name; None takes those of the process.
      papers: folder with `presets` and `expected`.

    Returns:
      Exit code: 0, 2 for a mistake of the user (one sentence on stderr), 130 for an interrupt.
    """
    return command(Options, lambda options: _act(options, experiments, papers), argv, "reproduce.py")


def _check(options: Options) -> None:
    """Raise UserError for options that would be ignored, and for pages of nothing."""
    asked = [name for name in (*OF_ALL, "status", "list", "dry_run") if getattr(options, name)]
    if len(asked) > 1:
        raise UserError(f"`{asked[0]}` and `{asked[1]}` ask for different things: choose one.")
    chosen = [name for name in ("scale", "only", "claim") if getattr(options, name) is not None]
    if chosen and {*asked} & {*OF_ALL}:
        raise UserError(f"`{chosen[0]}` chooses cells, and `{asked[0]}` is of all results: leave it out.")
    if options.page and not is_there(options.results_dir, Path.is_dir):
        raise UserError(f"there is no folder {options.results_dir}: name that of the results.", field="results_dir")


def _act(options: Options, experiments: Path, papers: Path) -> None:
    from reproduction.cells import Folders  # JAX is not needed for the help and for mistakes

    _check(options)
    if options.page:
        from reproduction.pages import write_pages

        for path in write_pages(options.results_dir, experiments, options.docs_dir):
            print(f"written: {path}")
        return
    if options.coverage or options.claims:
        print(_listed(options, experiments, papers))
        return
    if options.json:
        raise UserError("`json` is of a list: add `coverage` or `claims`.")
    folders = Folders(
        options.runs_dir, options.results_dir, options.data_dir, papers / "presets", papers / "expected", options.again
    )
    if options.status:
        from reproduction.status import status_line

        selective = options.scale or options.only or options.claim
        names, claim = [options.scale or "cpu"] if selective else CPU_PLANS, _claim(options.claim, experiments)
        plans = [read_plan(name, experiments / "reproduction", folders.presets) for name in names]
        selected = [plan._replace(cells=tuple(_chosen(plan.cells, options.only, claim))) for plan in plans]
        print(status_line(selected, folders))
        return
    plan = read_plan(options.scale or "cpu", experiments / "reproduction", folders.presets)
    cells = _chosen(plan.cells, options.only, _claim(options.claim, experiments))
    if options.list or options.dry_run:
        _show(cells, folders, commands=options.dry_run)
    else:
        _run(options, experiments, cells, folders)


def _run(options: Options, experiments: Path, cells: Sequence[Cell], folders: Any) -> None:
    """Run the cells that have no result, in several processes if asked to."""
    from reproduction import session
    from reproduction.cells import OutOfTime, deadline
    from reproduction.sharing import claims

    unfinished = session.unfinished(cells, folders)
    check(unfinished, folders.presets)
    seconds = None if options.budget_minutes is None else 60 * options.budget_minutes
    budget, stopped = session.Budget(seconds), False
    if options.workers > 1 and unfinished:
        logs = claims(folders)
        print(f"{options.workers} processes, whose words are in {logs}/worker-N.log", flush=True)
        try:
            with deadline(None):  # if this process is told to end, so are they
                processes(_worker(options, experiments), logs, options.workers)
        except OutOfTime:
            stopped = True
    if not stopped:  # also the cells that a process left when it died
        outcome = session.work_off(cells, folders, budget, lambda text: print(text, flush=True), options.together)
        stopped = outcome.out_of_time
    remaining = len(session.unfinished(cells, folders))
    print(f"{len(unfinished) - remaining} cells done, {remaining} left{', the time is spent' if stopped else ''}.")


def _worker(options: Options, experiments: Path) -> list[str]:
    """The command of one of the processes that divide the cells."""
    names = ("scale", "only", "claim", "budget_minutes", "together", "again", "data_dir", "runs_dir", "results_dir")
    options_given = {name: value for name in names if (value := getattr(options, name)) is not None}
    script = str(experiments / "reproduce.py")
    return [sys.executable, script, *(f"{flag(name)}={value}" for name, value in options_given.items())]


def _listed(options: Options, experiments: Path, papers: Path) -> str:
    """The list of what the papers show, or of their claims, as a table or as JSON."""
    from reproduction import coverage, pages
    from reproduction.claims_json import as_json

    folder = experiments / "reproduction"
    known = pages.known(options.results_dir, experiments)
    if options.coverage:
        rows = coverage.as_json(coverage.read_coverage(folder / "coverage.yaml", known.results))
    else:
        cells = [cell for name in CPU_PLANS for cell in read_plan(name, folder, papers / "presets").cells]
        planned = {(cell.table, cell.split or "") for cell in cells}
        rows = as_json(known.findings, planned, known.departures, known.needs)
    if options.json:
        return json.dumps(rows, indent=1)
    headings = [name for name in rows[0] if not name.endswith("command")]
    lines = [["-" if row[name] is None else str(row[name]) for name in headings] for row in rows]
    return markdown(texts("", headings, lines, left=headings), aligned=True)


def _claim(text: str | None, experiments: Path) -> Any:
    """The claim with this text, None without a text; UserError if there is no such claim."""
    from reproduction.claims import read_claims

    claims = {claim.text: claim for claim in read_claims(experiments / "reproduction" / "claims.yaml")} if text else {}
    if text and text not in claims:
        raise UserError(f"names no claim by '{text}': {nearest(text, list(claims))}", field="claim")
    return claims.get(text or "")


def _chosen(cells: Sequence[Cell], only: str | None, claim: Any = None) -> list[Cell]:
    """The cells whose table and name begin with `only` and which the claim is about."""
    from reproduction.only_gpu import about

    prefix = f"{only}/" if only in {cell.table for cell in cells} else only or ""  # Table 1 must not match Table 11
    selected = [cell for cell in cells if f"{cell.table}/{cell.name}".startswith(prefix)]
    selected = [cell for cell in selected if claim is None or about(claim, cell)]
    if not selected:
        tables = ", ".join(dict.fromkeys(cell.table for cell in cells))
        filters = [f"`only={only}`"] * bool(only) + ([f"`claim={claim.text}`"] if claim else [])
        raise UserError(f"{' with '.join(filters)} leaves no cell: the plan has {tables}.")
    return selected


def _show(cells: Sequence[Cell], folders, *, commands: bool) -> None:
    from fedjax_pcdd.training.config import values
    from reproduction import results, session
    from reproduction.plan import configured

    unfinished = session.unfinished(cells, folders)
    if commands:
        for cell in unfinished:
            print(results.command(cell, values(*configured(cell, folders.presets))))
        return
    for cell in cells:
        path = results.result_path(folders.results, cell)
        state = results.read_result(path)["status"] if path.is_file() else "waiting"
        print(f"{state:8} {cell.table} {cell.name}")
    print(f"{len(cells) - len(unfinished)} of {len(cells)} cells done")
