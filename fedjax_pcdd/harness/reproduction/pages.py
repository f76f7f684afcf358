"""docs/reproduction.md and docs/ambiguities.md, made from results, expected numbers and two YAML files of prose."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedjax_pcdd.errors import failed_write
from fedjax_pcdd.harness.reproduction.ambiguities import ambiguities_page, read_ambiguities, tags_of
from fedjax_pcdd.harness.reproduction.averages import averages
from fedjax_pcdd.harness.reproduction.claims import counts, findings, read_claims
from fedjax_pcdd.harness.reproduction.reproduction_page import reproduction_page
from fedjax_pcdd.harness.reproduction.results import read_results
from fedjax_pcdd.harness.reproduction.tables import columns
from fedjax_pcdd.report.expected import Expected, read_expected


def pages(results: Path, experiments: Path) -> dict[str, str]:
    """The text of every generated page by its file name.

    Args:
      results: folder of results; it may not exist yet.
      experiments: folder with `expected` and `reproduce`.

    Raises:
      UserError: a file that cannot be read.
    """
    found = read_results(results)
    expected: Mapping[str, Sequence[Expected]] = {
        table: read_expected(experiments / "expected", table) for table in dict.fromkeys(one["table"] for one in found)
    }
    texts = read_ambiguities(experiments / "reproduce" / "ambiguities.yaml")
    claims = read_claims(experiments / "reproduce" / "claims.yaml")
    expected |= {c.table: read_expected(experiments / "expected", c.table) for c in claims}
    every = columns(found, expected)
    readings = tags_of(texts) - {tag for claim in claims for tag in claim.tags}  # they belong to no paper's table
    tables = averages([one for one in every if one.tag not in readings], expected)
    return {
        "reproduction.md": reproduction_page(
            found, tables, expected, findings(claims, tables, expected), counts(tables, expected)
        ),
        "ambiguities.md": ambiguities_page(texts, every, expected, found),
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
