"""The commands `report` and `compare`."""

# ruff: noqa: RUF009 - run_option is a dataclass field, not a value

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from fedjax_pcdd.analysis.curves import CURVES
from fedjax_pcdd.cli.messages import flag, invocation, sentence
from fedjax_pcdd.cli.options import command
from fedjax_pcdd.errors import UserError, printable
from fedjax_pcdd.report.collect import RunRecord, collect
from fedjax_pcdd.report.compare import compare, comparison_tables
from fedjax_pcdd.report.contents import own_table, paper_tables, pivot
from fedjax_pcdd.report.expected import kind, read_expected, title
from fedjax_pcdd.report.grouping import Cells, Group, group
from fedjax_pcdd.report.page import page
from fedjax_pcdd.report.plots import curves, in_words
from fedjax_pcdd.report.tables import Table, code, comma_separated, escaped, latex, markdown
from fedjax_pcdd.training.fields import run_option, write_text
from fedjax_pcdd.training.folder import CONFIG
from fedjax_pcdd.training.presets import PAPERS

LEGEND = (
    "Mean ± standard deviation over seeds; in brackets the paper's number and the difference to it. "
    "The best mean of a column is bold, the second best underlined; nothing is marked among runs of different lengths."
)


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Tables, curves and one HTML page over the folders of runs."""

    runs: tuple[Path, ...] = run_option((), "", "folders of runs, or folders that hold such folders")
    preset: str | None = run_option(
        None,
        "",
        "only the runs of this published table, as fedmr/table1; by default each run stands under the one that it was "
        "started with",
    )
    rows: str | None = run_option(None, "", "option whose values are the rows of a table of your own, as method")
    columns: str | None = run_option(None, "", "option whose values are its columns, as beta")
    metric: str = run_option("ga_best", "", "what stands in its cells: an entry of summary.json, mean over seeds")
    output: Path = run_option(
        Path("report"), "", "folder for report.html, report.md, report.csv, report.tex and the curves"
    )


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """Paired comparison with the first run's method, over the same seeds and partitions."""

    runs: tuple[Path, ...] = run_option(
        (), "", "folders of runs, or folders that hold such folders; the first is what the others are compared with"
    )
    confidence: float = run_option(0.95, "", "of the intervals; 1 minus it is the significance level of the verdicts")


def report_main(argv: Sequence[str] | None = None, papers: Path = PAPERS) -> int:
    """Write a report; `papers` holds `presets` and `expected`. Exit code 0, or 2 for a mistake of the user."""
    return command(ReportOptions, lambda options: _report(options, papers), argv, invocation("report"))


def compare_main(argv: Sequence[str] | None = None) -> int:
    """Print a comparison; exit code as for `report_main`."""
    return command(CompareOptions, _compare, argv, invocation("compare"))


def _compare(options: CompareOptions) -> None:
    runs = collect(options.runs)
    first = next(path for path in options.runs if path.is_dir())
    if not runs[0].path.is_relative_to(first):
        raise UserError(f"{first} cannot be read, with which the others are compared: name another run first.")
    comparisons, notes = compare(runs, options.confidence)
    tables = comparison_tables(comparisons, options.confidence)
    print("\n".join([*map(markdown, tables), *notes]))


def _report(options: ReportOptions, papers_folder: Path) -> None:
    runs, cells = collect(options.runs), Cells(papers_folder / "presets")
    preset = options.preset and options.preset.removesuffix(".yaml")
    if preset:
        cells.preset(preset)
    groups = group(runs, cells, preset)
    if preset and not groups:
        raise UserError(f"none of the {len(runs)} runs is a finished one of {preset}: leave --preset out to see them.")
    papers, unread_notes = _papers(groups, papers_folder / "expected")
    notes = [*_notes(runs, groups), *unread_notes]
    if not options.rows:
        for name in ("columns", "metric"):
            if getattr(options, name) != getattr(ReportOptions, name):
                raise UserError("needs `rows`, as `rows=method`.", field=name)
    rows, columns, metric = ((name or "").replace("-", "_") for name in (options.rows, options.columns, options.metric))
    counted_runs = [run for run_group in groups for entry in run_group.entries for run in entry.runs]
    pivots = [pivot(counted_runs, rows, columns or None, metric)] if rows else []
    files = _files(groups, papers, runs, notes, pivots)
    for name, text in files.items():
        write_text(options.output / name, text, "another `output`")
    names = ", ".join(name for name in files if "/" not in name)
    print(printable("\n".join([*notes, f"written to {options.output}: {names}"])))


def _papers(groups: Sequence[Group], expected: Path) -> tuple[list[Table], list[str]]:
    """The papers' tables that have runs, and a sentence per preset on printed numbers that run folders lack."""
    tables, notes = [], []
    for preset in dict.fromkeys(run_group.preset for run_group in groups if run_group.preset):
        numbers = read_expected(expected, preset)
        tables += paper_tables(preset, [run_group for run_group in groups if run_group.preset == preset], numbers)
        unread_metrics = dict.fromkeys(kind(number.metric) for number in numbers if title(number.metric) is None)
        if unread_metrics:
            notes.append(f"{preset} also prints {', '.join(unread_metrics)}, which is not read from run folders.")
    return tables, notes


def _notes(runs: Sequence[RunRecord], groups: Sequence[Group]) -> list[str]:
    """What a reader must know about single runs."""
    notes = []
    for run in [run for run in runs if run.summary is None]:
        done = f"{run.rounds_done} of {run.config['rounds']} rounds"
        failed = f"{run.path} failed after {done} and is in no table: {sentence(run.failure or '')}"
        notes.append(failed if run.failure else f"{run.path} is unfinished: {done}; it is in no table.")
    if any(run.state == "unfinished" for run in runs):
        notes.append(f"What is unfinished goes on with {invocation('run')} {flag('resume')}=FOLDER.")
    entries = [entry for run_group in groups for entry in run_group.entries]
    for entry in entries:
        notes += [f"{run.path} repeats seed {run.seed} of a newer run and does not count." for run in entry.repeated]
    counted = sum(len(entry.runs) + len(entry.repeated) for entry in entries)
    uncounted = sum(run.summary is not None for run in runs) - counted
    if uncounted:
        notes.append(f"{uncounted} finished runs do not belong to this preset and are left out.")
    if any(len(entry.runs) == 1 for entry in entries):
        notes.append("Where there is one seed alone, differences are mostly noise; compare tells with several.")
    return notes


def _files(groups, papers, runs, notes, pivots) -> dict[str, str]:
    """Text of every file by its name."""
    group_tables = [own_table(run_group) for run_group in groups]
    tables = [*pivots, *papers, *group_tables]
    commands = {run.path: command_of(run) for run in runs}
    pictures = {}
    lines = ["# Federated runs", "", LEGEND, "", *(f"- {escaped(note)}" for note in notes), ""]
    lines += map(markdown, [*pivots, *papers])
    for index, (run_group, table) in enumerate(zip(groups, group_tables, strict=True)):
        lines.append(markdown(table))
        for name in CURVES:
            svg = curves(run_group, name, key=True)
            if svg is not None:
                pictures[f"curves/{index}-{name}.svg"] = svg
                lines.append(f"![{escaped(in_words(run_group, name))}](curves/{index}-{name}.svg)")
        lines.append("")
    lines += ["### Runs", "", *(f"- {code(str(path))}: {code(text)}" for path, text in commands.items())]
    return {
        "report.html": page(groups, papers, runs, notes, commands, pivots),
        "report.md": "\n".join(lines) + "\n",
        "report.csv": comma_separated(tables),
        "report.tex": "\n".join(map(latex, tables)),
        **pictures,
    }


def command_of(run: RunRecord) -> str:
    """The command that started a run; if it is not recorded, one with the same options, unless there is none."""
    if run.command is None and run.resolved.get("given"):
        return f"in Python, with its own {', '.join(run.resolved['given'])}"
    return run.command or f"{invocation('run')} {shlex.quote(f'--preset={run.path / CONFIG}')}"
