"""How arguments are read, refused and explained; those of a run in two stages, method and preset first.

Generated from dataclasses (`RunConfig`, a method, the form of a command), so that a new field appears automatically.
"""

import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedjax_pcdd import methods
from fedjax_pcdd.cli.messages import flag, guarded, sentence, warn
from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods import METHODS, Method
from fedjax_pcdd.registry import is_import_path
from fedjax_pcdd.training import options
from fedjax_pcdd.training.config import NOT_COMPUTED, RESERVED, RUN, RunConfig, build
from fedjax_pcdd.training.config import values as values_of
from fedjax_pcdd.training.fields import Option, bounds, choices, convert, members, options_of
from fedjax_pcdd.training.options import SERVER
from fedjax_pcdd.training.presets import PRESETS, read_run

LISTS = tuple(name for name in RESERVED if name.startswith("list_"))


def scan(
    argv: Sequence[str], switches: set[str] | None = None, words: list[str] | None = None, own: Collection[str] = ()
) -> dict[str, str]:
    """Parse `--x=v`, `--x v`, `--flag` and `--no-flag` into name -> text; the last occurrence of a name wins.

    Args:
      switches: options that take no value; None for those of runs.
      words: collects what is no option; None if only options are allowed.
      own: options of the command; beside those of runs if `switches` is None, where they are those of a grid: as its
        options take lists, one that is given twice may be meant as such and is warned about.

    Raises:
      UserError: something that is no option, an option without its value, or one that is nearly an own one.
    """
    texts, remaining, is_run = {}, list(argv), switches is None
    classes = _named_method(argv) if is_run else []
    known = {*_names(classes), *own} if is_run else own
    switches = _switches(classes) if switches is None else switches
    while remaining:
        token = remaining.pop(0)
        if token == "-h":
            token = "--help"
        if words is not None and not token.startswith("-"):
            if not token.strip():
                raise UserError("an argument is empty: name what it stands for, or leave it out.")
            words.append(token)
            continue
        if not token.startswith("--") or token == "--":
            raise UserError(f"unexpected '{token}': options are written --name=value.")
        word, equals, text = token.partition("=")
        name = word[2:].replace("-", "_")
        name = name.lower() if name.isupper() else name
        if not equals and name in switches:
            text = "true"
        elif name.removeprefix("no_") in switches and name not in switches:
            if equals:
                raise UserError(f"{word} takes no value: write {word} alone.")
            name, text = name.removeprefix("no_"), "false"
        elif not equals:
            if not remaining or remaining[0].startswith("--"):
                raise UserError(_without_value(name, known))
            text = remaining.pop(0)
        if is_run and own and texts.setdefault(name, text) != text:
            warn(f"`{name}` is given more than once: the last one counts. Several values have commas between them.")
        texts[name] = text
    for name in texts if is_run else ():
        if name not in known and nearest(name, known) in {f"did you mean '{option}'?" for option in own}:
            raise UserError(options.no_option(name, own))
    return options.with_server(texts) if is_run and not {"resume", "help"} & texts.keys() else texts


def _named_method(argv: Sequence[str]) -> list[type[Method]]:
    """Classes of the external methods that arguments name (a sweep several), whose options are not known in advance."""
    words = [word.partition("=") for word in argv]
    pairs = list(pairwise([*words, ("", "", "")]))

    def listed(name: str) -> list[str]:
        texts = [text or following for (option, _, text), (following, _, _) in pairs if option == name]
        return texts[-1].split(",") if texts else []

    server_names = [f"fedavg+{name}" for name in listed("--server-optimizer") if is_import_path(name)]
    method_names = [name for name in listed("--method") if is_import_path(methods.plain_name(name))]
    return [methods.get(name) for name in [*method_names, *server_names]]


def _switches(classes: Sequence[type[Method]]) -> set[str]:
    option_groups = [RUN, *map(options_of, [*methods.every().values(), *classes])]
    names = {option.name for options in option_groups for option in options.values() if option.kind is bool}
    return names | {"help", "status", *LISTS}


def _names(classes: Sequence[type[Method]]) -> set[str]:
    """Options of runs, of all methods and of these."""
    return {*RUN, *RESERVED, SERVER}.union(*map(options_of, [*methods.every().values(), *classes]))


def _without_value(name: str, names: Collection[str]) -> str:
    return f"`{name}` needs a value: write `{name}=VALUE`." if name in names else options.no_option(name, names)


def configure(given: Mapping[str, str], presets: Path = PRESETS) -> tuple[RunConfig, Method]:
    """Configuration and method of a new run, or of a recorded one."""
    return _resumed(given) if "resume" in given else options.configure(given, presets)


def _resumed(given: Mapping[str, str]) -> tuple[RunConfig, Method]:
    """The recorded run; other options that are given may not change its results."""
    for name in ("preset", "split", "variant", "run_dir", SERVER):
        if name in given:
            raise UserError(f"continues a run as it was started: drop `{name}`.", field="resume")
    folder = convert(RUN["resume"], given["resume"])
    if folder is None:
        raise UserError("takes the folder of a run, not none.", field="resume")
    recorded = read_run(folder)
    old = values_of(*recorded)
    if options.in_any_case(given.get("method", old["method"]), METHODS) != old["method"]:
        methods.get(given["method"])
        raise UserError(_changed({"method": given["method"]}, old))
    own = options.own_values(given, old["method"])
    if changed := [name for name in old if name not in NOT_COMPUTED and own.get(name, old[name]) != old[name]]:
        raise UserError(_changed({name: own[name] for name in changed}, old))
    return build(old | own | {"resume": folder, "run_dir": folder})


def _changed(new: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    changes = [f"`{name}` was {old[name]} in this run, not {value}" for name, value in new.items()]
    it = "it" if len(changes) == 1 else "them"
    return f"{', '.join(changes)}: resume without {it}, or start a new run with `run_dir`."


def command(form: Any, work: Callable[[Any], Any], argv: Sequence[str] | None, program: str) -> int:
    """Parse the arguments of a command other than `run` and do its work.

    Args:
      form: a dataclass whose fields are the options; a field `runs` holds the other words, which the help calls RUN, or
        by the form's attribute `WORD`.
      work: called with the options.
      argv: arguments without the program's name; None for those of the process.
      program: name of the command, for the help.

    Returns:
      Exit code, as `guarded`.
    """

    def parse_and_work(arguments: Sequence[str]) -> None:
        if (options := _parsed(form, arguments, program)) is not None:
            work(options)

    return guarded(parse_and_work, argv)


def _parsed(form: Any, argv: Sequence[str], program: str) -> Any:
    """The options as an instance of the form; None if the help was printed."""
    form_options = dict(options_of(form))
    runs = form_options.pop("runs", None)
    words: list[str] | None = None if runs is None else []
    switches = {name for name, option in form_options.items() if option.kind is bool} | {"help"}
    texts = scan(argv, switches, words, own=form_options)
    if "help" in texts:
        word = getattr(form, "WORD", "RUN")
        usage = f"usage: {program} [--NAME=VALUE ...]" + (f" {word}...\n\n{word}: {runs.help}" if runs else "")
        print("\n\n".join([usage, inspect.cleandoc(form.__doc__), entries(form_options.values())]))
        return None
    for name in texts:
        if name not in form_options:
            raise UserError(options.no_option(name, [*form_options, "help"]))
    values: dict[str, Any] = {name: convert(form_options[name], text) for name, text in texts.items()}
    return form(**values) if words is None else form(runs=tuple(map(Path, words)), **values)


def entries(options: Iterable[Option]) -> str:
    """The help of options, each on lines of its own: its values, meaning, bounds and default."""
    return "\n".join(_entry(option, width()) for option in options)


def width() -> int:
    """Width of the help, in columns."""
    return max(60, min(120, shutil.get_terminal_size().columns))


def _entry(option: Option, width: int) -> str:
    limits, symbol = bounds(option), f"{option.symbol}: " if option.symbol else ""
    text = symbol + sentence(option.help) + (f" [{limits}]" if limits else "")
    if option.default is dataclasses.MISSING:
        text += " (no default)"
    elif option.default not in (None, "") and option.name not in LISTS:  # the text says what None means
        text += f" (default: {option.default})"
    head, indent = f"  {_form(option)}", " " * 28
    first_line = head.ljust(len(indent)) if len(head) < len(indent) - 1 else f"{head}\n{indent}"
    lines = textwrap.wrap(text, width - len(indent), break_long_words=False, break_on_hyphens=False)
    return first_line + f"\n{indent}".join(lines)


def _form(option: Option) -> str:
    """How an option is written.

    >>> from typing import Literal
    >>> _form(Option("retry", bool, False, True)), _form(Option("lanes", Literal["auto"] | int, False, "auto"))
    ('--retry, --no-retry', '--lanes auto|INT')
    """
    name = flag(option.name)
    if option.kind is bool:
        return name if option.name in LISTS else f"{name}, --no-{name[2:]}"
    placeholders = {int: "INT", float: "FLOAT", str: "NAME", Path: "PATH"}
    values = [
        *map(str, choices(option.kind)),
        *(placeholders[part] for part in members(option.kind) if part in placeholders),
    ]
    return f"{name} {'|'.join(values)}"
