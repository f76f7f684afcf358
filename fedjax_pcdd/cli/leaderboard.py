"""The leaderboard from the command line: cells without a result are run, and the tables are shown or written."""

# ruff: noqa: RUF009 - run_option is a dataclass field, not a value

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from fedjax_pcdd.analysis.ranks import Ranks, draw_ranks, ranks
from fedjax_pcdd.cli.messages import flag, invocation, starting
from fedjax_pcdd.cli.options import command, scan
from fedjax_pcdd.cli.sweep import processes, stopped_by_signals
from fedjax_pcdd.errors import UserError, is_there, nearest, writing
from fedjax_pcdd.report import standings
from fedjax_pcdd.report.statistics import holm
from fedjax_pcdd.report.tables import Cell, Column, Row, Table, between, markdown, terminal
from fedjax_pcdd.screen import Screen
from fedjax_pcdd.training.fields import read_text, run_option, write_text
from fedjax_pcdd.training.options import in_any_case

BASELINE = "fedavg"  # the method with which the ranks of the others are compared
BEGIN, END = "<!-- leaderboard: begin -->\n", "<!-- leaderboard: end -->\n"


@dataclass(frozen=True)
class Options:
    """Every method on the same data with as many trials, chosen on validation samples; the same command continues.

    Several methods, splits or networks have commas between.

    fedjax-pcdd leaderboard --data-dir=DATA --method=mine.py:Mine    a method of one's own, beside those with results
    """

    method: str | None = run_option(None, "", "methods, with commas between; all by default")
    split: str | None = run_option(None, "", "splits of the plan; all by default")
    network: str | None = run_option(None, "", "networks of the plan; all by default")
    data_dir: Path | None = run_option(None, "", "folder of the data sets")
    plan: Path | None = run_option(None, "", "YAML file of splits, settings and trials in place of the packaged one")
    results: Path = run_option(Path("results/leaderboard"), "", "folder of the results")
    runs_dir: Path = run_option(Path("runs/leaderboard"), "", "folder of the runs")
    budget_minutes: float | None = run_option(None, "", "begin no cell after this time", above=0)
    workers: int = run_option(1, "", "processes that divide the work", low=1)
    status: bool = run_option(False, "", "say in one line how far it is, and run nothing")
    page: Path | None = run_option(
        None, "", "write the tables to this Markdown file and the ranks' pictures beside it, and run nothing"
    )


def leaderboard_main(argv: Sequence[str] | None = None) -> int:
    """Do what the arguments ask for; exit code 0, 2 for a mistake of the user, 130 or 143 if interrupted."""
    argv = sys.argv[1:] if argv is None else argv
    return command(Options, lambda options: _act(options, argv), argv, invocation("leaderboard"))


def _act(options: Options, argv: Sequence[str]) -> None:
    with starting():
        from fedjax_pcdd import methods
        from fedjax_pcdd.api import leaderboard  # JAX programs are not needed for the help and for mistakes

    if options.status and options.page:
        raise UserError("writes the tables, and `status` shows one line: give one of them.", field="page")
    path = options.plan or leaderboard.PLAN
    plan = leaderboard.read_plan(path)
    written = [in_any_case(name.strip(), methods.METHODS) for name in (options.method or "").split(",")]
    names = list(methods.METHODS) if options.method is None else list(dict.fromkeys(written))
    for name in names:
        methods.get(name)
    networks = _chosen("network", options.network, plan.networks)
    splits = _chosen("split", options.split, list(plan.splits))
    cells = [leaderboard.Cell(network, split, name) for network in networks for split in splits for name in names]
    console = Screen()
    leaderboard.check_names(plan, names, [r["method"] for r in leaderboard.read_results(options.results)], path)
    if not (options.status or options.page):
        with stopped_by_signals():
            _complete(options, argv, plan, cells, console)
    results = leaderboard.read_results(options.results)
    for result in results:
        if result["network"] in networks and result["split"] in splits:
            leaderboard.check_plan(plan, result, leaderboard.cell_of(result).path(options.results))
    done = sum(leaderboard.has_result(plan, cell, options.results) for cell in cells)
    if not options.status:
        tables = [standings.table(network, split, results) for network in networks for split in splits]
        tables = [table for table in tables if table.rows]
        if options.page:
            with writing(options.page, "another `page`"):
                rankings = [
                    part for network in networks for part in _ranking(options.page, network, *standings.over_splits(
                        results, [cell for cell in cells if cell.network == network]))
                ]  # fmt: skip
            _write(options.page, [*rankings, *map(markdown, tables)])
        else:
            for table in tables:
                console.print(terminal(standings.brief(table)))
    print(f"{done} of {len(cells)} cells have a result.")


def _complete(options: Options, argv: Sequence[str], plan: Any, cells: Sequence[Any], console: Console) -> None:
    """Run the cells that have no result, in several processes if `workers` asks for them."""
    from fedjax_pcdd.api import leaderboard

    common_options = {"data_dir": str(options.data_dir)} if options.data_dir else {}
    for cell in cells:  # mistakes are reported before anything runs
        for trial in plan.trials_of(cell.method, cell.network):
            try:
                leaderboard.configure(leaderboard.options(plan, cell, trial, 0, common_options))
            except UserError as error:
                raise UserError(f"{cell.method} by {options.plan or leaderboard.PLAN}: {error}") from None
        leaderboard.has_result(plan, cell, options.results)
    end = time.monotonic() + 60 * options.budget_minutes if options.budget_minutes else float("inf")
    if options.workers > 1:
        arguments = scan(argv, {"status", "help"})
        words = [f"{flag(name)}={text}" for name, text in arguments.items() if name != "workers"]
        with writing(options.runs_dir, "another `runs_dir`"):
            options.runs_dir.mkdir(parents=True, exist_ok=True)
        processes([sys.executable, "-m", "fedjax_pcdd", "leaderboard", *words], options.runs_dir, options.workers)
    for cell in cells:  # several processes may work on them, since each claims its runs
        if not leaderboard.has_result(plan, cell, options.results) and time.monotonic() < end:
            result = leaderboard.run_cell(plan, cell, options.runs_dir, common_options, console)
            leaderboard.write_result(result, cell.path(options.results))
            console.print(Text(f"{cell.network}, {cell.split}: {cell.method}"))


def _chosen(option: str, text: str | None, available: Sequence[str]) -> list[str]:
    names = list(available) if text is None else list(dict.fromkeys(map(str.strip, text.split(","))))
    for name in names:
        if name not in available:
            raise UserError(f"names no {option} of the plan by '{name}': {nearest(name, available)}", field=option)
    return names


def _ranking(
    page: Path, network: str, names: list[str], splits: list[str], scores: np.ndarray, lacking: list[str]
) -> list[str]:
    """A network's ranks as Markdown, with a picture beside the page; no ranks of fewer than two methods or no seed."""
    left_out = f"Without a rank in {network}, as not all splits and seeds have a result: {', '.join(lacking)}."
    if len(names) < 2 or not scores.size:  # no split, or all trials of all methods failed
        return [f"{left_out}\n"] * bool(lacking)
    baseline = names.index(BASELINE) if BASELINE in names else None
    ranked = ranks(scores, baseline=baseline)
    picture = page.parent / "images" / f"{page.stem}_{network.replace('/', '_')}.png"
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw_ranks(names, ranked, picture)
    tests = (
        f" P-values are of the differences from {BASELINE}, by flipping the signs of those of the splits"
        " (of a single split, of its seeds), alone and adjusted by Holm for all methods here."
    )
    remarks = (
        f"By the GA of the last ten rounds, over {', '.join(splits)}; 95 % intervals, by drawing splits and seeds "
        f"again.{tests * (baseline is not None)} {standings.LOCAL}: without a global model, so that GA is the mean of "
        "the clients' models."
    )
    if len(splits) > 1:
        remarks += f" Mean ranks that differ by less than {ranked.critical:.1f} are not told apart at 5 % (Nemenyi)."
    else:
        remarks += " Of one split only seeds are drawn again, so that the choice of the split is not covered."
    remarks += f" {left_out}" * bool(lacking)
    table = replace(_ranks_table(names, ranked, baseline), title=f"Ranks, {network}", remarks=remarks)
    image = f"![Mean ranks of {len(names)} methods with their intervals, {network}](images/{picture.name})\n"
    return [markdown(table), image]


def _ranks_table(names: list[str], ranked: Ranks, baseline: int | None) -> Table:
    """The methods by rising mean rank, with the intervals, and p-values of the differences from the baseline."""
    over, p = ranked.over, ranked.p
    adjusted = [] if p is None else holm([None if np.isnan(value) else float(value) for value in p])
    rows = []
    for i in ranked.mean.argsort(kind="stable"):
        spans = [f"{ranked.low[i]:.1f} to {ranked.high[i]:.1f}"]
        if over is not None and p is not None:
            compared = (" to ".join(f"{end:+.1f}" for end in over[i]), f"{p[i]:.3f}", f"{adjusted[i] or 0.0:.3f}")
            spans += compared if i != baseline else ("", "", "")
        rows.append(Row(names[i], (Cell(float(ranked.mean[i])), *(Cell(text=span) for span in spans))))
    headings = ("interval", *((f"less {BASELINE}'s", "p", "p, Holm") if over is not None else ()))
    return Table("", (Column("mean rank", digits=1), *map(Column, headings)), tuple(rows))


def _write(path: Path, parts: Sequence[str]) -> None:
    """Write the parts between the two marks of a page, or as a page of their own."""
    text = read_text(path) if is_there(path) else f"# Leaderboard\n\n{BEGIN}{END}"
    content = "\n".join(parts) or "No method has a result yet.\n"
    write_text(path, between(text, (BEGIN, END), content, str(path)), "another `page`")
    print(f"written: {path}")
