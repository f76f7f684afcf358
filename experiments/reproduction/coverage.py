"""docs/coverage.md: each table and figure of the four papers with its command and the place of its result."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.report.tables import escaped, markdown, texts
from fedjax_pcdd.training.fields import as_mapping, load_mapping, read_text
from reproduction.columns import Result

KINDS = ("table", "figure", "text", "theorem", "diagram")
FROM_RESULTS = "results"
PAGE = "docs/reproduction.md"
INTRODUCTION = """# Coverage of the papers

Written by `python experiments/reproduce.py --page` from `experiments/reproduction/coverage.yaml` and `results/`; do
not edit it. `python experiments/reproduce.py --coverage --json` gives the list.

Every table, figure and theorem of the four papers, and what their texts claim besides: what it shows, whether it was
run, at which scale, and where the result is. Commands are for a clone with the data sets in its folder `data`
([data.md](data.md)). They have the papers' settings, which mostly need a GPU; for smaller ones, `run.py` and
`sweep.py` take options such as `--model=simple_cnn --rounds=20` (in a task `--models`), `reproduce.py` another
`--scale`. `reproduce.py --scale=paper` runs a whole table, `sweep.py` one split of it. The scale `paper` is the
paper's own, `digits` means the built-in digits, and `cpu`, `mid`, `long` and `full` are those of
[reproduction.md](reproduction.md). A diagram has no data.
"""


class Item(NamedTuple):
    """A table, figure, theorem or claim of the text of one paper.

    Args:
      paper, item: as `FedMR`, `Table 1`.
      kind: one of `KINDS`.
      shows: what it shows, in words.
      command: the command that makes it; None if there is nothing to make.
      scale: the scale at which it was run, None if it was not; `results` stands for all that results/ has of a table.
      result: where the result is; for a table its name, as `fedmr/table1`.
    """

    paper: str
    item: str
    kind: str
    shows: str
    command: str | None = None
    scale: str | None = None
    result: str | None = None


def read_coverage(path: Path, results: Iterable[Result]) -> list[Item]:
    """The items of a YAML file, each table with the scales at which it has results.

    Raises:
      UserError: a wrong or missing key.
    """
    scales: dict[str, dict[str, None]] = {}
    for result in results:
        if result["status"] == "finished":
            scales.setdefault(result["table"], {})[result["scale"]] = None
    items = []
    for number, entry in enumerate(load_mapping(read_text(path), str(path)).get("items", []), 1):
        location = f"item {number} of {path}"
        fields: dict[str, Any] = as_mapping(entry, location)
        try:
            item = Item(**fields)
        except TypeError:
            raise UserError(
                f"{location} needs the keys {', '.join(Item._fields[:4])}, and may have the others."
            ) from None
        if item.kind not in KINDS or (item.command is None) != (item.kind == "diagram"):
            raise UserError(f"{location}: its kind is one of {', '.join(KINDS)}, and all but diagrams have a command.")
        if item.scale == FROM_RESULTS:
            known_scales = sorted(scales.get(item.result or "", ()))
            anchors = [f"{PAGE}#{(item.result or '').replace('/', '')}-scale-{scale}" for scale in known_scales]
            item = item._replace(scale=", ".join(known_scales) or None, result=", ".join(anchors) or None)
        items.append(item)
    return items


def as_json(items: Iterable[Item]) -> list[dict[str, str | None]]:
    """What `--coverage --json` prints."""
    return [{name: value for name, value in item._asdict().items() if name != "shows"} for item in items]


def coverage_page(items: Sequence[Item]) -> str:
    """The text of the page."""
    data = [item for item in items if item.kind != "diagram"]
    run_count = sum(bool(item.scale) for item in data)
    count = f"{len(items)} items, {len(data)} of them with data: all have a command, {run_count} were run."
    lines = [INTRODUCTION, count, ""]
    for paper in dict.fromkeys(item.paper for item in items):
        paper_items = [item for item in items if item.paper == paper]
        rows = [[escaped(item.item), escaped(item.shows), *_ran(item)] for item in paper_items]
        headings = ("shows", "run", "result")
        lines += [f"## {paper}", "", markdown(texts("", ("", *headings), rows, left=headings), escape=str)]
        lines += ["<details><summary>Commands</summary>", ""]
        for item in paper_items:
            if item.command:
                lines += [f"{item.item}:", "", *(f"    {step}" for step in steps(item.command)), ""]
        lines += ["</details>", ""]
    return "\n".join(lines).rstrip() + "\n"


def steps(command: str) -> list[str]:
    """The single commands of a line.

    >>> steps("python a.py --x=1 && python b.py")
    ['python a.py --x=1', 'python b.py']
    """
    return command.split(" && ")


def _ran(item: Item) -> tuple[str, str]:
    if item.kind == "diagram":
        return "a diagram", ""
    if not item.scale or not item.result:
        return "not run", ""
    links = [f"[{Path(link.partition('#')[0]).name}]({link.removeprefix('docs/')})" for link in item.result.split(", ")]
    return item.scale, ", ".join(links)
