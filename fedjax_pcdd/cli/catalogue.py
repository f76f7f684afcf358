"""The table of methods, for the README and the command line; what is sent and kept is counted from the program.

    python -m fedjax_pcdd.cli.catalogue README.md

counts anew (a minute), writes the counts beside this file, where `--list-methods` reads them, and the table into the
README. Counted on an MLP with 10 classes and 5000 public images, with every option at its default.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.report import tables

COUNTS = Path(__file__).with_name("traffic.json")
BLOCK = re.compile(r"(<!-- methods -->\n).*?(<!-- /methods -->)", re.DOTALL)
HEADER = ("name", "paper", "optimises", "sent down", "sent up", "a client keeps", "held in training", "file", "status")


class Row(NamedTuple):
    """One method; counts in P (parameters and running statistics), C classes, D features, N public images."""

    name: str
    paper: str
    optimises: str
    down: str
    up: str
    client: str
    held: str
    file: str
    status: str


def rows(counts: Mapping[str, Mapping[str, str]] | None = None) -> list[Row]:
    """All registered methods; a method that has not been counted yet has question marks."""
    known: Mapping[str, Mapping[str, str]] = json.loads(COUNTS.read_text()) if counts is None else counts
    lines = []
    for name, cls in METHODS.items():
        down, up, client, held = (known.get(name, {}).get(key, "?") for key in ("down", "up", "client", "held"))
        traits = cls().traits()
        status = "reconstruction" if "reconstructed" in traits.paper else "complete"
        file = cls.__module__.replace(".", "/") + ".py"
        lines.append(Row(name, traits.paper, traits.target, down, up, client, held, file, status))
    return lines


def count() -> dict[str, dict[str, str]]:
    """The counts of every method, in words."""
    from fedjax_pcdd import models
    from fedjax_pcdd.analysis.traffic import in_words, traffic

    plain = models.build("mlp", num_classes=10, image_shape=(28, 28, 1))
    counts = {}
    for name, cls in METHODS.items():
        sizes = traffic(cls(), plain, (28, 28, 1))
        counts[name] = {key: in_words(getattr(sizes, key), sizes, 10) for key in ("up", "down", "client", "held")}
    return counts


def markdown(methods: list[Row]) -> str:
    """The table for the README."""
    lines = [row._replace(file=f"[{Path(row.file).name}]({row.file})") for row in methods]
    return tables.markdown(tables.texts("", HEADER, lines, left=HEADER), escape=str)


def with_table(text: str, table: str) -> str:
    """A README whose block of methods is the table."""
    return BLOCK.sub(lambda block: block[1] + table + block[2], text)


def main(readme: Path) -> None:
    """Count, and write counts and table."""
    counts = count()
    COUNTS.write_text(json.dumps(counts, indent=1) + "\n")
    readme.write_text(with_table(readme.read_text(), markdown(rows(counts))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
