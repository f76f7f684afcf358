"""The generated pages of docs/, made from results, expected numbers and YAML files of prose."""

from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pcdd.report.expected import EXPECTED, read_expected
from fedjax_pcdd.training.fields import write_text
from fedjax_pcdd.training.presets import PRESETS
from reproduction.ambiguities import Ambiguity, ambiguities_page, read_ambiguities, tags_of
from reproduction.claims import Claim, Finding, counts, findings, read_claims
from reproduction.columns import Column, Expectations, columns, with_means
from reproduction.coverage import coverage_page, read_coverage
from reproduction.figures import figures_section
from reproduction.hinges import Departure, departures, hinges_section
from reproduction.lengths import lengths_section
from reproduction.only_gpu import Need, gpu_section, needs, predicted_hours
from reproduction.plan import read_plan
from reproduction.results import as_run, read_results
from reproduction.results_page import results_page
from reproduction.sharing import run_name
from reproduction.status import left_over
from reproduction.summary import Facts, summary_section


class Known(NamedTuple):
    """What the results say: all results, all columns, those of the papers' tables, the printed numbers, and the claims.

    Also the claims under other settings, those that only a GPU can decide, and the ambiguities.
    """

    results: list[dict[str, Any]]
    every: list[Column]
    tables: list[Column]
    expected: Expectations
    claims: list[Claim]
    findings: list[Finding]
    departures: list[Departure]
    needs: list[Need]
    ambiguities: list[Ambiguity]


def known(results: Path, experiments: Path) -> Known:
    """Read results and prose.

    Args:
      results: folder of results; it may not exist yet.
      experiments: folder with `reproduction`.

    Raises:
      UserError: a file that cannot be read.
    """
    rows = [as_run(result, PRESETS) for result in read_results(results)]
    ambiguities = read_ambiguities(experiments / "reproduction" / "ambiguities.yaml")
    claims = read_claims(experiments / "reproduction" / "claims.yaml")
    names = dict.fromkeys([*(result["table"] for result in rows), *(claim.table for claim in claims)])
    expected = {table: read_expected(EXPECTED, table) for table in names}
    every = columns(rows, expected)
    readings = tags_of(ambiguities) - {tag for claim in claims for tag in claim.tags}  # they belong to no paper's table
    tables = with_means([column for column in every if column.tag not in readings], expected)
    all_findings = findings(claims, tables, expected)
    all_departures = departures(claims, every)
    plans = {name: read_plan(name, experiments / "reproduction", PRESETS).cells for name in ("paper", "full", "gpu")}
    all_needs = needs(
        all_findings, plans, predicted_hours(experiments.parent, PRESETS), lambda cell: run_name(cell, PRESETS)
    )
    return Known(rows, every, tables, expected, claims, all_findings, all_departures, all_needs, ambiguities)


def pages(results: Path, experiments: Path) -> dict[str, str]:
    """The text of every generated page and picture by its path in docs/; arguments and errors as those of `known`."""
    all_known, prose = known(results, experiments), experiments / "reproduction"
    rows, tables, expected = all_known.results, all_known.tables, all_known.expected
    facts = Facts(rows, all_known.findings, all_known.departures, all_known.needs)
    figure_lines, pictures = figures_section(all_known.findings)
    length_lines, curves = lengths_section(all_known.every)
    hinges = hinges_section(all_known.claims, all_known.departures)
    sections = [*figure_lines, *hinges, *length_lines, *gpu_section(all_known.needs)]
    all_counts = counts(tables, expected)
    plans = [scale for scale in dict.fromkeys(row["scale"] for row in rows) if (prose / f"{scale}.yaml").is_file()]
    left = {scale: left_over(read_plan(scale, prose, PRESETS), results) for scale in plans}
    page = results_page(rows, tables, expected, all_known.findings, all_counts, summary_section(facts), sections, left)
    items = read_coverage(prose / "coverage.yaml", rows)
    return {
        "reproduction.md": page,
        "ambiguities.md": ambiguities_page(all_known.ambiguities, all_known.every, expected, rows),
        "coverage.md": coverage_page(items),
        **pictures,
        **curves,
    }


def write_pages(results: Path, experiments: Path, docs: Path) -> list[Path]:
    """Write the generated pages into a folder and return their paths."""
    files = pages(results, experiments)
    for name, text in files.items():
        write_text(docs / name, text, "another `docs_dir`")
    return [docs / name for name in files]
