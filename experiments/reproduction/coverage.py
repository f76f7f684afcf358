"""docs/coverage.md: each table and figure of the four papers, its command, and where its result is."""

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
    """One of them.

    Args:
      paper, item: as `FedMR`, `Table 1`.
      kind: of `KINDS`.
      shows: in words.
      command: what makes it; None where there is nothing to make.
      scale: at which it was run, None where it was not; `results` for what results/ has of a table.
      result: where it is; of a table its name, as `fedmr/table1`.
    """

    paper: str
    item: str
    kind: str
    shows: str
    command: str | None = None
    scale: str | None = None
    result: str | None = None


def read_coverage(path: Path, results: Iterable[Result]) -> list[Item]:
    """The items of a YAML file, with the scales at which results of a table are known.

    Raises:
      UserError: a wrong or missing key.
    """
    scales: dict[str, dict[str, None]] = {}
    for one in results:
        if one["status"] == "finished":
            scales.setdefault(one["table"], {})[one["scale"]] = None
    items = []
    for number, entry in enumerate(load_mapping(read_text(path), str(path)).get("items", []), 1):
        where = f"item {number} of {path}"
        given: dict[str, Any] = as_mapping(entry, where)
        try:
            item = Item(**given)
        except TypeError:
            raise UserError(f"{where} needs the keys {', '.join(Item._fields[:4])}, and may have the others.") from None
        if item.kind not in KINDS or (item.command is None) != (item.kind == "diagram"):
            raise UserError(f"{where}: its kind is one of {', '.join(KINDS)}, and all but diagrams have a command.")
        if item.scale == FROM_RESULTS:
            known = sorted(scales.get(item.result or "", ()))
            anchors = [f"{PAGE}#{(item.result or '').replace('/', '')}-scale-{scale}" for scale in known]
            item = item._replace(scale=", ".join(known) or None, result=", ".join(anchors) or None)
        items.append(item)
    return items


def as_json(items: Iterable[Item]) -> list[dict[str, str | None]]:
    """What `--coverage --json` prints."""
    return [{name: value for name, value in one._asdict().items() if name != "shows"} for one in items]


def coverage_page(items: Sequence[Item]) -> str:
    """The text of the page."""
    data = [one for one in items if one.kind != "diagram"]
    ran = sum(bool(one.scale) for one in data)
    count = f"{len(items)} items, {len(data)} of them with data: all have a command, {ran} were run."
    lines = [INTRODUCTION, count, ""]
    for paper in dict.fromkeys(one.paper for one in items):
        own = [one for one in items if one.paper == paper]
        rows = [[escaped(one.item), escaped(one.shows), *_ran(one)] for one in own]
        heads = ("shows", "run", "result")
        lines += [f"## {paper}", "", markdown(texts("", ("", *heads), rows, left=heads), escape=str)]
        lines += ["<details><summary>Commands</summary>", ""]
        for one in own:
            if one.command:
                lines += [f"{one.item}:", "", *(f"    {step}" for step in steps(one.command)), ""]
        lines += ["</details>", ""]
    return "\n".join(lines).rstrip() + "\n"


def steps(command: str) -> list[str]:
    """The single commands of a line.

    >>> steps("python a.py --x=1 && python b.py")
    ['python a.py --x=1', 'python b.py']
    """
    return command.split(" && ")


def _ran(one: Item) -> tuple[str, str]:
    if one.kind == "diagram":
        return "a diagram", ""
    if not one.scale or not one.result:
        return "not run", ""
    links = [f"[{Path(link.partition('#')[0]).name}]({link.removeprefix('docs/')})" for link in one.result.split(", ")]
    return one.scale, ", ".join(links)
