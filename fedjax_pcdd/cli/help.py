"""What the command line shows instead of a run: the help of a method, and lists of what is available."""

import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedjax_pcdd import methods
from fedjax_pcdd.cli.messages import invocation
from fedjax_pcdd.cli.options import LISTS, entries, width
from fedjax_pcdd.methods import METHODS, SERVER_OPTIMISERS
from fedjax_pcdd.methods.wrappers import with_defaults
from fedjax_pcdd.training.config import GROUPS, RUN
from fedjax_pcdd.training.fields import Option, convert, options_of
from fedjax_pcdd.training.options import SERVER, in_any_case

COUNTS = Path(__file__).with_name("traffic.json")  # written by docs/hooks/catalogue.py

# First-stage options, which decide what the others are. `method` is one of them and also part of the run.
_PRESET = "settings of a published table, as fedmr/table1, or a YAML file, as a config.yaml; options beside it win"
_SELECTION = [
    Option("method", str, False, "fedavg", help="what is trained; its options are in the last group"),
    Option(SERVER, str, False, "none", help=f"adam is method=NAME+adam, and so on: {', '.join(SERVER_OPTIMISERS)}"),
    Option("preset", str, True, None, help=_PRESET),
    Option("split", str, True, None, help="split of the preset, as P10C2"),
    Option("variant", str, True, None, help="variant of a method, where the preset has several, as intra-only"),
    Option("list_methods", bool, False, False, help="list the methods and exit"),
    Option("list_datasets", bool, False, False, help="list the data sets and exit"),
    Option("list_models", bool, False, False, help="list the models and exit"),
    Option("list_tasks", bool, False, False, help="list the tasks by domain and exit"),
]


class MethodRow(NamedTuple):
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


def method_rows() -> list[MethodRow]:
    """All registered methods; question marks for methods whose traffic has not been counted."""
    counts, rows = json.loads(COUNTS.read_text()), []
    for name, cls in methods.every().items():
        traffic = [counts.get(name, {}).get(key, "?") for key in ("down", "up", "client", "held")]
        traits, file = with_defaults(cls).traits(), cls.__module__.replace(".", "/") + ".py"
        status = "reconstruction" if "reconstructed" in traits.paper else "complete"
        rows.append(MethodRow._make((name, traits.paper, traits.target, *traffic, file, status)))
    return rows


def information(given: Mapping[str, str]) -> str:
    """The list or the help that arguments ask for, "" if they ask for a run."""
    switches = [Option(name, bool, False, False) for name in (*LISTS, "help") if name in given]
    names = [switch.name for switch in switches if convert(switch, given[switch.name])]
    if not names:
        return ""
    return help_text(in_any_case(given.get("method", "fedavg"), METHODS)) if names[0] == "help" else _list(names[0])


def _list(name: str) -> str:
    if name == "list_methods":
        header, rows = ("method", "optimises", "sent up", "kept", "paper"), method_rows()
        lines = [(row.name, row.optimises, row.up, row.client) for row in rows]
        used_width = sum(2 + max(map(len, column)) for column in zip(header[:-1], *lines, strict=True))
        return table(
            header, [(*line, _cut(row.paper, width() - used_width)) for line, row in zip(lines, rows, strict=True)]
        )
    if name == "list_datasets":
        from fedjax_pcdd.data.sources import DATASETS

        return table(("data set", "what it is"), DATASETS.items())
    if name == "list_tasks":
        from fedjax_pcdd.data.domains import TASKS

        rows = [(task, f"{recipe.description}: {', '.join(recipe.domains)}") for task, recipe in TASKS.items()]
        return table(("task", "what it is: its participants"), rows)
    from fedjax_pcdd.models import MODELS

    return table(("model", "what it is"), MODELS.items())


def _cut(paper: str, room: int) -> str:
    return paper if len(paper) <= room else f"{paper[: room - 1].rstrip()}…"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Plain columns; text that exceeds the width of the terminal continues below its column.

    >>> print(table(("a", "b"), [("one", "two")]))
    a    b
    one  two
    """
    rows = [header, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
    indent = " " * sum(size + 2 for size in widths)
    lines = []
    for *first, last in rows:
        head = "".join(f"{cell:{size}}  " for cell, size in zip(first, widths, strict=True))
        lines += textwrap.wrap(last, width(), initial_indent=head, subsequent_indent=indent) or [head.rstrip()]
    return "\n".join(lines)


def help_text(method: str) -> str:
    """All run options in groups, then the hyper-parameters of a method; UserError for an unknown one."""
    cls = methods.get(method)
    groups = [("selection", "What to run, and where its defaults come from.", _SELECTION)]
    groups += [(name, text, [x for x in RUN.values() if x.group == name]) for name, text in GROUPS.items()]
    own_options = list(options_of(cls).values())
    if own_options:
        paper = with_defaults(cls).traits().paper
        groups.append((method, f"Hyper-parameters of {method}" + (f" ({paper})." if paper else "."), own_options))
    sections = [
        f"usage: {invocation('run')} [--NAME=VALUE ...]",
        textwrap.fill(_description(method, bool(own_options)), width()),
    ]
    sections += [f"{group} options: {text}\n{entries(options)}" for group, text, options in groups]
    return "\n\n".join(sections)


def _description(method: str, has_own: bool) -> str:
    other_methods = ", ".join(name for name in METHODS if name != method)
    default = " (the default)" if method == RUN["method"].default else ""
    own = "whose options are in the last group" if has_own else "which has no options of its own"
    return (
        "Federated learning under partially class-disjoint data: trains one method on one partition. "
        f"The method is {method}{default}, {own}; --method=NAME --help shows those of another: {other_methods}. "
        f"NAME+SUFFIX is a method with something added, as moon+prototypes: {', '.join(methods.known_suffixes())}."
    )
