"""The command lines of experiments/report.py and experiments/compare.py."""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import tyro

from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.report.collect import RunRecord, collect
from fedjax_pcdd.report.compare import as_markdown, compare
from fedjax_pcdd.report.curves import curves
from fedjax_pcdd.report.expected import TITLES, kind, read_expected
from fedjax_pcdd.report.formats import LEGEND, comma_separated, latex, markdown
from fedjax_pcdd.report.grouping import Cells, Group, group
from fedjax_pcdd.report.page import page
from fedjax_pcdd.report.tables import Table, own_table, paper_tables


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Tables, curves and one HTML page over the folders of runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs, or folders that hold such folders"""
    preset: str | None = None
    """only the runs of this published table, as fedmr/table1; by default every run where it was recorded"""
    output: Path = Path("report")
    """folder for report.html, report.md, report.csv, report.tex and the curves"""


@dataclasses.dataclass(frozen=True)
class CompareOptions:
    """Paired comparison with the first run's method, over the same seeds and partitions."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """folders of runs, or folders that hold such folders; the first one is what the others are compared with"""
    confidence: float = 0.95
    """of the bootstrap intervals"""


def report_main(experiments: Path, argv: Sequence[str] | None = None) -> int:
    """Write a report.

    Args:
      experiments: folder with `presets` and `expected`.
      argv: arguments without the program's name; None for those of the process.

    Returns:
      Exit code: 0, or 2 for a mistake of the user (one sentence on stderr).
    """
    return _guarded(lambda: write_report(_parse(ReportOptions, argv, "report.py"), experiments))


def compare_main(argv: Sequence[str] | None = None) -> int:
    """Print a comparison; arguments and exit code as `report_main`."""
    return _guarded(lambda: _compare(_parse(CompareOptions, argv, "compare.py")))


def _guarded(work: Callable[[], Any]) -> int:
    try:
        work()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except SystemExit:  # after the help
        return 0
    return 0


def _parse(form: type, argv: Sequence[str] | None, program: str) -> Any:
    """The options; SystemExit after the help, UserError for a mistake."""
    argv = list(sys.argv[1:] if argv is None else argv)
    known = [f"--{field.name}" for field in dataclasses.fields(form) if field.name != "runs"] + ["--help", "-h"]
    for token in argv:
        flag = token.partition("=")[0]
        if flag.startswith("-") and flag not in known:
            raise UserError(f"there is no option {flag}: {nearest(flag, known[:-1])}")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            options = tyro.cli(form, prog=program, args=argv)
    except SystemExit as stop:
        if stop.code:
            raise UserError(f"{program} does not understand '{' '.join(argv)}': --help shows its options.") from None
        raise
    if not options.runs:
        raise UserError("name at least one folder of runs, as runs/.")
    return options


def write_report(options: ReportOptions, experiments: Path) -> list[Path]:
    """Write every file of a report and say where they are.

    Raises:
      UserError: no runs, a folder that is none, an unknown preset, or a folder that cannot be written.
    """
    runs, cells = collect(options.runs), Cells(experiments / "presets")
    preset = options.preset and options.preset.removesuffix(".yaml")
    if preset:
        cells.preset(preset)
    groups = group(runs, cells, preset)
    if preset and not groups:
        raise UserError(f"none of the {len(runs)} runs is a finished one of {preset}: leave --preset out to see them.")
    papers, unread = _papers(groups, experiments / "expected")
    notes = [*_notes(runs, groups), *unread]
    files = _files(groups, papers, runs, notes)
    _write(options.output, files)
    for note in notes:
        print(note)
    print(f"written to {options.output}: {', '.join(name for name in files if '/' not in name)}")
    return [options.output / name for name in files]


def _papers(groups: Sequence[Group], expected: Path) -> tuple[list[Table], list[str]]:
    """The papers' tables that have runs, and a sentence about printed numbers that run folders do not have."""
    tables, notes = [], []
    for preset in dict.fromkeys(one.preset for one in groups if one.preset):
        numbers = read_expected(expected, preset)
        tables += paper_tables(preset, [one for one in groups if one.preset == preset], numbers)
        unread = dict.fromkeys(kind(one.metric) for one in numbers if kind(one.metric) not in TITLES)
        if unread:
            notes.append(f"{preset} also prints {', '.join(unread)}, which is not read from run folders.")
    return tables, notes


def _notes(runs: Sequence[RunRecord], groups: Sequence[Group]) -> list[str]:
    """What a reader has to know about single runs."""
    notes = [
        f"{run.path} is unfinished: {run.rounds_done} of {run.config['rounds']} rounds; it is in no table."
        for run in runs
        if run.summary is None
    ]
    entries = [entry for one in groups for entry in one.entries]
    for entry in entries:
        notes += [f"{run.path} repeats seed {run.seed} of a newer run and does not count." for run in entry.repeated]
    counted = sum(len(entry.runs) + len(entry.repeated) for entry in entries)
    left = sum(run.summary is not None for run in runs) - counted
    if left:
        notes.append(f"{left} finished runs do not belong to this preset and are left out.")
    if any(len(entry.runs) == 1 for entry in entries):
        notes.append("Where there is one seed alone, differences are mostly noise; compare.py tells with several.")
    return notes


def _files(groups, papers, runs, notes) -> dict[str, str]:
    """Text of every file by its name."""
    own_tables = [own_table(one) for one in groups]
    tables = [*papers, *own_tables]
    pictures = {}
    for index, one in enumerate(groups):
        for name in ("ga", "pa", "loss"):
            svg = curves(one, name, key=True)
            if svg is not None:
                pictures[f"curves/{index}-{name}.svg"] = svg
    lines = ["# Federated runs", "", LEGEND, "", *(f"- {note}" for note in notes), "", *map(markdown, papers)]
    for index, table in enumerate(own_tables):
        lines.append(markdown(table))
        lines += [f"![curves]({name})" for name in pictures if name.startswith(f"curves/{index}-")] + [""]
    lines += ["### Runs", "", *(f"- `{run.path}`: `{run.command}`" for run in runs)]
    return {
        "report.html": page(groups, papers, runs, notes),
        "report.md": "\n".join(lines) + "\n",
        "report.csv": comma_separated(tables),
        "report.tex": "\n".join(map(latex, tables)),
        **pictures,
    }


def _write(folder: Path, files: dict[str, str]) -> None:
    try:
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): choose another --output.") from error


def _compare(options: CompareOptions) -> None:
    comparisons, notes = compare(collect(options.runs), options.confidence)
    print(as_markdown(comparisons, options.confidence))
    for note in notes:
        print(note)
