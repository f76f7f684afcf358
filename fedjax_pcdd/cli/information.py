"""What the command line shows instead of a run: the help of a method, and lists of what there is."""

import contextlib
import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro

from fedjax_pcdd import methods
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.training.config import GROUPS, RESERVED, RUN
from fedjax_pcdd.training.fields import Option, bounds, convert, options_of

LISTS = tuple(name for name in RESERVED if name.startswith("list_"))

_ANY_METHOD = Literal[tuple(METHODS)]  # pyright: ignore[reportInvalidTypeForm]

# First-stage options: they decide which others there are. `method` is one too, and part of the run.
_SELECTION = [
    Option("method", _ANY_METHOD, False, "fedavg", help="what is trained; its options are in the last group"),
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
    asked = [switch.name for switch in switches if convert(switch, given[switch.name], switch.flag)]
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
    first = [
        dataclasses.replace(option, default=method) if option.name == "method" else option for option in _SELECTION
    ]
    groups = {"selection": _form("What to run, and where its defaults come from.", first)}
    for group, text in GROUPS.items():
        groups[group] = _form(text, [option for option in RUN.values() if option.group == group])
    own = list(options_of(cls).values())
    if own:
        paper = cls().traits().paper
        groups[method] = _form(
            f"Hyper-parameters of {method} ({paper})." if paper else f"Hyper-parameters of {method}.", own
        )
    fields = [
        (name, tyro.conf.OmitArgPrefixes[form], dataclasses.field(default_factory=form))
        for name, form in groups.items()
    ]
    return _rendered(dataclasses.make_dataclass("Options", fields), _description(method, bool(own)))


def _description(method: str, has_own: bool) -> str:
    others = ", ".join(name for name in METHODS if name != method)
    own = f"The last group holds the hyper-parameters of {method}" if has_own else f"{method} has no hyper-parameters"
    return (
        "Federated learning under partially class-disjoint data: trains one method on one partition. "
        f"{own}; --method=NAME --help shows those of {others}. "
        "NAME+prototypes is a method that averages models with a contrast to class prototypes."
    )


def _form(text: str, options: Sequence[Option]) -> type:
    """A dataclass that tyro shows as one group."""
    fields: list[Any] = [(option.name, _shown_type(option), option.default) for option in options]
    return dataclasses.make_dataclass("Group", fields, namespace={"__doc__": text})


def _shown_type(option: Option) -> Any:
    limits = bounds(option)
    text = (f"{option.symbol}: " if option.symbol else "") + option.help + (f" [{limits}]" if limits else "")
    # Where the default is None, the text says what that means.
    hint = "" if option.default is None else f"(default: {option.default})"
    if option.name in LISTS:
        return Annotated[bool, tyro.conf.arg(help=text, help_behavior_hint=""), tyro.conf.FlagCreatePairsOff]
    kind = option.kind | None if option.optional else option.kind
    return Annotated[kind, tyro.conf.arg(help=text, help_behavior_hint=hint)]


def _rendered(form: type, description: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        tyro.cli(form, prog="run.py", description=description, args=["--help"])
    return text.getvalue().rstrip()
