"""Arguments of a run, in two stages: method and preset first, then the options that follow from them.

Everything is generated from `RunConfig` and the method's dataclass; a new hyper-parameter appears by itself.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedjax_pcdd import methods
from fedjax_pcdd.errors import UserError, nearest, spelled
from fedjax_pcdd.methods import METHODS, Method
from fedjax_pcdd.registry import is_import_path
from fedjax_pcdd.training.config import (
    FOLDERS,
    MAY_CHANGE,
    RESERVED,
    RUN,
    TASK_DEFAULTS,
    RunConfig,
    build,
    difference,
    values,
)
from fedjax_pcdd.training.fields import convert, options_of
from fedjax_pcdd.training.presets import preset_method, preset_values, read_preset, read_run

PRESETS = Path("experiments/presets")
LISTS = tuple(name for name in RESERVED if name.startswith("list_"))


def flag(name: str) -> str:
    """A field as an option, as `--batch-size`."""
    return "--" + name.replace("_", "-")


def sentence(text: str) -> str:
    """A sentence with its fields as options.

    >>> sentence("`batch_size` must be at least 1 with `bn=local`.")
    '--batch-size must be at least 1 with --bn=local.'
    """
    return spelled(text, flag)


def guarded(work: Callable[[], int | None]) -> int:
    """The exit code of a command: its own; 2 for a mistake of the user and 130 for an interrupt, said in a sentence."""
    try:
        return work() or 0
    except UserError as error:
        print(sentence(error.sentence), file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        advice = f"; {stop}" if str(stop) else "."
        print(sentence(f"stopped{advice}"), file=sys.stderr)
        return 130


def parse(argv: Sequence[str], presets: Path = PRESETS) -> tuple[RunConfig, Method]:
    """Configuration and method that arguments stand for; UserError for any mistake in them."""
    return configure(scan(argv), presets)


def scan(argv: Sequence[str], switches: set[str] | None = None, words: list[str] | None = None) -> dict[str, str]:
    """Arguments as name -> text, the last one winning; `--x=v`, `--x v`, `--flag` and `--no-flag`.

    Args:
      switches: options that take no value; None for those of runs.
      words: takes what is no option; None where there may be no such words.

    Raises:
      UserError: something that is no option, or an option without its value.
    """
    given, rest = {}, list(argv)
    switches = _switches(_named_method(argv)) if switches is None else switches
    while rest:
        token = rest.pop(0)
        if token == "-h":
            token = "--help"
        if words is not None and not token.startswith("-"):
            words.append(token)
            continue
        if not token.startswith("--") or token == "--":
            raise UserError(f"unexpected '{token}': options are written --name=value.")
        word, equals, text = token.partition("=")
        name = word[2:].replace("-", "_")
        if not equals and name in switches:
            text = "true"
        elif name.removeprefix("no_") in switches and name not in switches:
            if equals:
                raise UserError(f"{word} takes no value: write {word} alone.")
            name, text = name.removeprefix("no_"), "false"
        elif not equals:
            if not rest or rest[0].startswith("--"):
                raise UserError(_without_value(name))
            text = rest.pop(0)
        given[name] = text
    return given


def _named_method(argv: Sequence[str]) -> list[type[Method]]:
    """The classes of methods from outside that arguments name (a sweep several), whose options are not known before."""
    words = [word.partition("=") for word in argv]
    pairs = pairwise([*words, ("", "", "")])
    names = [text or following for (option, _, text), (following, _, _) in pairs if option == "--method"]
    several = [name for listed in names[-1:] for name in listed.split(",")]
    return [methods.get(name) for name in several if is_import_path(methods.plain_name(name))]


def _switches(named: Sequence[type[Method]]) -> set[str]:
    """Names of all options that are true or false."""
    every = [RUN, *map(options_of, [*METHODS.values(), *named])]
    names = {option.name for options in every for option in options.values() if option.kind is bool}
    return names | {"help", *LISTS}


def _without_value(name: str) -> str:
    known = {*RUN, *RESERVED, *(field for cls in METHODS.values() for field in options_of(cls))}
    return f"`{name}` needs a value: write `{name}=VALUE`." if name in known else no_option(name, known)


def no_option(name: str, known: Sequence[str] | set[str]) -> str:
    """A sentence about an option that there is not, with the nearest that there is."""
    advice = nearest(name, known)
    close = advice.replace("_", "-").replace("'", "'--", 1) if advice.startswith("did") else "--help lists them all."
    return f"there is no option {flag(name)}: {close}"


def configure(given: Mapping[str, str], presets: Path) -> tuple[RunConfig, Method]:
    """Second stage: defaults, then the preset or the recorded run, then what was given."""
    if "resume" in given:
        return _resumed(given)
    chosen = read_preset(given["preset"], presets) if "preset" in given else None
    for option in ("split", "variant"):
        if chosen is None and option in given:
            raise UserError(f"chooses a {option} of a preset: add `preset`, or drop it.", field=option)
    fixed = preset_method(chosen, given.get("variant")) if chosen else None
    name = given.get("method", fixed or RUN["method"].default)
    own = _own_values(given, name)
    base = preset_values(chosen, name, given.get("split"), given.get("variant")) if chosen else {}
    task = (base | own).get("task")
    if task:
        _check_task(own)
    return build((TASK_DEFAULTS if task else {}) | base | own | {"method": name})


def _check_task(own: Mapping[str, Any]) -> None:
    """UserError where options say how a data set is spread over clients, beside a task."""
    for name in own:
        if name in RUN and RUN[name].group == "data" and name != "data_dir":
            raise UserError(f"a task brings its own data and participants: drop `{name}`, or `task`.")


def _own_values(given: Mapping[str, str], method: str) -> dict[str, Any]:
    """Checked values of the run options and of the method's hyper-parameters among the arguments."""
    known = RUN | options_of(methods.get(method))
    result = {}
    for name, text in given.items():
        if name in known:
            result[name] = convert(known[name], text)
        elif name not in RESERVED:
            raise UserError(_foreign(name, method, [*known, *RESERVED]))
    return result


def _foreign(name: str, method: str, known: Sequence[str]) -> str:
    owners = [other for other, cls in METHODS.items() if name in options_of(cls)]
    wrappers = [suffix for suffix in methods.WRAPPERS if name in options_of(methods.get(f"fedavg+{suffix}"))]
    if wrappers and not owners:
        owners = [f"{method}+{suffix}" for suffix in wrappers]
    if not owners:
        return no_option(name, known)
    several = ", ".join(owners)
    return f"`{name}` belongs to {several}, not to {method}: drop it or use `method={owners[0]}`."


def _resumed(given: Mapping[str, str]) -> tuple[RunConfig, Method]:
    """The recorded run; what is given beside it may not change its results."""
    for name in ("preset", "split", "variant", "run_dir"):
        if name in given:
            raise UserError(f"continues a run as it was started: drop `{name}`.", field="resume")
    folder = convert(RUN["resume"], given["resume"])
    if folder is None:
        raise UserError("takes the folder of a run, not none.", field="resume")
    recorded = read_run(folder)
    old = values(*recorded)
    if given.get("method", old["method"]) != old["method"]:
        methods.get(given["method"])
        raise UserError(_changed({"method": given["method"]}, old))
    new = old | _own_values(given, old["method"]) | {"resume": folder, "run_dir": folder}
    pair = build(new)
    fields = [name for name in difference(recorded, pair) if name not in MAY_CHANGE and name not in FOLDERS]
    if fields:
        raise UserError(_changed({name: new[name] for name in fields}, old))
    return pair


def _changed(new: Mapping[str, Any], old: Mapping[str, Any]) -> str:
    parts = [f"`{name}` was {old[name]} in this run, not {value}" for name, value in new.items()]
    it = "it" if len(parts) == 1 else "them"
    return f"{', '.join(parts)}: resume without {it}, or start a new run with `run_dir`."
