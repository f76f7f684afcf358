"""What the command line shows instead of a run: the help of a method, and lists of what there is."""

import dataclasses
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedjax_pcdd import methods
from fedjax_pcdd.cli.options import LISTS, flag, sentence
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.training.config import GROUPS, RUN
from fedjax_pcdd.training.fields import Option, bounds, choices, convert, members, options_of

_PLAIN = {int: "INT", float: "FLOAT", str: "NAME", Path: "PATH"}

# First-stage options: they decide which others there are. `method` is one too, and part of the run.
_SELECTION = [
    Option("method", str, False, "fedavg", help="what is trained; its options are in the last group"),
    Option(
        "preset",
        str,
        True,
        None,
        help="settings of a published table, as fedmr/table1, or a YAML file, also a run's config.yaml; "
        "options given beside it win",
    ),
    Option("split", str, True, None, help="split of the preset, as P10C2"),
    Option("variant", str, True, None, help="variant of a method, where the preset has several, as intra-only"),
    Option("list_methods", bool, False, False, help="list the methods and exit"),
    Option("list_datasets", bool, False, False, help="list the data sets and exit"),
    Option("list_models", bool, False, False, help="list the models and exit"),
    Option("list_tasks", bool, False, False, help="list the tasks by domain and exit"),
]


def information(given: Mapping[str, str]) -> str:
    """The list or the help that arguments ask for, "" if they ask for a run."""
    switches = [Option(name, bool, False, False) for name in (*LISTS, "help") if name in given]
    asked = [switch.name for switch in switches if convert(switch, given[switch.name])]
    if not asked:
        return ""
    return help_text(given.get("method", "fedavg")) if asked[0] == "help" else _list(asked[0])


def _list(name: str) -> str:
    if name == "list_methods":
        from fedjax_pcdd.cli.catalogue import HEADER, rows

        return table(HEADER, rows())
    if name == "list_datasets":
        from fedjax_pcdd.data.sources import DATASETS

        return table(("data set", "what it is"), DATASETS.items())
    if name == "list_tasks":
        from fedjax_pcdd.data.recipes import TASKS

        rows = [(task, recipe.description, ", ".join(recipe.domains)) for task, recipe in TASKS.items()]
        return table(("task", "what it is", "participants"), rows)
    from fedjax_pcdd.models import MODELS

    return table(("model", "what it is"), MODELS.items())


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Plain columns.

    >>> print(table(("a", "b"), [("one", "two")]))
    a    b
    one  two
    """
    rows = [header, *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = ("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def help_text(method: str) -> str:
    """All run options in groups, then the hyper-parameters of a method; UserError for an unknown one."""
    cls = methods.get(method)
    first = [dataclasses.replace(one, default=method) if one.name == "method" else one for one in _SELECTION]
    groups = [("selection", "What to run, and where its defaults come from.", first)]
    for group, text in GROUPS.items():
        groups.append((group, text, [option for option in RUN.values() if option.group == group]))
    own = list(options_of(cls).values())
    if own:
        paper = cls().traits().paper
        groups.append((method, f"Hyper-parameters of {method}" + (f" ({paper})." if paper else "."), own))
    parts = ["usage: run.py [--NAME=VALUE ...]", textwrap.fill(_description(method, bool(own)), _width())]
    parts += [f"{group} options: {text}\n{entries(options)}" for group, text, options in groups]
    return "\n\n".join(parts)


def _description(method: str, has_own: bool) -> str:
    others = ", ".join(name for name in METHODS if name != method)
    own = f"The last group holds the hyper-parameters of {method}" if has_own else f"{method} has no hyper-parameters"
    return (
        "Federated learning under partially class-disjoint data: trains one method on one partition. "
        f"{own}; --method=NAME --help shows those of {others}. "
        "NAME+prototypes is a method that averages models with a contrast to class prototypes."
    )


def entries(options: Iterable[Option]) -> str:
    """The options, each on lines of its own."""
    return "\n".join(_entry(option, _width()) for option in options)


def _width() -> int:
    return max(60, min(120, shutil.get_terminal_size().columns))


def _entry(option: Option, width: int) -> str:
    """An option with its values, meaning, bounds and default."""
    limits, symbol = bounds(option), f"{option.symbol}: " if option.symbol else ""
    text = symbol + sentence(option.help) + (f" [{limits}]" if limits else "")
    if option.default is not None and option.name not in LISTS:  # where it is None, the text says what that means
        text += f" (default: {option.default})"
    head = f"  {_form(option)}"
    indent = " " * 28
    first = head + indent[len(head) :] if len(head) < len(indent) - 1 else f"{head}\n{indent}"
    lines = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False)
    return first + f"\n{indent}".join(lines)


def _form(option: Option) -> str:
    """How an option is written.

    >>> from typing import Literal
    >>> _form(Option("retry", bool, False, True)), _form(Option("lanes", Literal["auto"] | int, False, "auto"))
    ('--retry, --no-retry', '--lanes auto|INT')
    """
    name = flag(option.name)
    if option.kind is bool:
        return name if option.name in LISTS else f"{name}, --no-{name[2:]}"
    values = [*map(str, choices(option.kind)), *(_PLAIN[part] for part in members(option.kind) if part in _PLAIN)]
    return f"{name} {'|'.join(values)}"
