"""docs/reproduction.md and docs/ambiguities.md, made from results, expected numbers and two YAML files of prose."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedjax_pcdd.errors import failed_write
from fedjax_pcdd.report.expected import Expected, read_expected
from reproduction.ambiguities import ambiguities_page, read_ambiguities, tags_of
from reproduction.claims import counts, findings, read_claims
from reproduction.columns import columns, with_means
from reproduction.results import read_results
from reproduction.results_page import results_page


def pages(results: Path, experiments: Path) -> dict[str, str]:
    """The text of every generated page by its file name.

    Args:
      results: folder of results; it may not exist yet.
      experiments: folder with `expected` and `reproduction`.

    Raises:
      UserError: a file that cannot be read.
    """
    known = read_results(results)
    expected: Mapping[str, Sequence[Expected]] = {
        table: read_expected(experiments / "expected", table) for table in dict.fromkeys(one["table"] for one in known)
    }
    texts = read_ambiguities(experiments / "reproduction" / "ambiguities.yaml")
    claims = read_claims(experiments / "reproduction" / "claims.yaml")
    expected |= {c.table: read_expected(experiments / "expected", c.table) for c in claims}
    every = columns(known, expected)
    readings = tags_of(texts) - {tag for claim in claims for tag in claim.tags}  # they belong to no paper's table
    tables = with_means([one for one in every if one.tag not in readings], expected)
    return {
        "reproduction.md": results_page(
            known, tables, expected, findings(claims, tables, expected), counts(tables, expected)
        ),
        "ambiguities.md": ambiguities_page(texts, every, expected, known),
    }


def write_pages(results: Path, experiments: Path, docs: Path) -> list[Path]:
    """Write the generated pages into a folder and say where they are."""
    written = []
    for name, text in pages(results, experiments).items():
        path = docs / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise failed_write(error, path) from error
        written.append(path)
    return written
