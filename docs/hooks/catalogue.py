"""The README's table of methods; what is sent and kept is counted from the program.

    python docs/hooks/catalogue.py README.md

counts anew (a minute), writes the counts where the command line reads them, and the table into the README. Counted on
an MLP with 10 classes and 5000 public images, with every option at its default.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fedjax_pcdd import models
from fedjax_pcdd.analysis.traffic import in_words, traffic
from fedjax_pcdd.cli.help import COUNTS, MethodRow, method_rows
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.report import tables

BLOCK = re.compile(r"(<!-- methods -->\n).*?(<!-- /methods -->)", re.DOTALL)
HEADER = ("name", "paper", "optimises", "sent down", "sent up", "a client keeps", "held in training", "file", "status")


def count() -> dict[str, dict[str, str]]:
    """The counts of every method, in words."""
    plain = models.build("mlp", num_classes=10, image_shape=(28, 28, 1))
    counts = {}
    for name, cls in METHODS.items():
        sizes = traffic(cls(), plain, (28, 28, 1))
        counts[name] = {key: in_words(getattr(sizes, key), sizes, 10) for key in ("up", "down", "client", "held")}
    return counts


def markdown(methods: Sequence[MethodRow]) -> str:
    """The table for the README."""
    lines = [row._replace(file=f"[{Path(row.file).name}]({row.file})") for row in methods]
    return tables.markdown(tables.texts("", HEADER, lines, left=HEADER), escape=str)


def main(readme: Path) -> None:
    """Count, and write the counts and the table."""
    COUNTS.write_text(json.dumps(count(), indent=1) + "\n")
    table = markdown(method_rows())
    readme.write_text(BLOCK.sub(lambda block: block[1] + table + block[2], readme.read_text()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
