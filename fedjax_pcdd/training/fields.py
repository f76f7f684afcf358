"""Options, made from dataclass fields: type, bounds and help text, and how a value is read from text or YAML.

Run options and the hyper-parameters of methods are both such fields, so the command line, Python, preset files and
recorded configurations share one way to read a value and one way to refuse it.
"""

import contextlib
import dataclasses
import functools
import math
import operator
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union

import numpy as np
import yaml

from fedjax_pcdd.errors import UserError, at_once, check_file, expanded, nearest, shortened, unreadable


def run_option(default: Any, group: str, help: str, *, low=None, high=None, above=None, below=None) -> Any:
    """A field of a dataclass of options: heading in the help, meaning and unit, inclusive and exclusive bounds."""
    metadata = {"group": group, "help": help, "low": low, "high": high, "above": above, "below": below}
    return dataclasses.field(default=default, metadata=metadata)


LARGEST = 3.4028235e38  # largest float32
FEW = 8  # choices that fit into an error message


@dataclasses.dataclass(frozen=True)
class Option:
    """One field, as parsers and the help see it; `kind` is its type without None, `optional` whether it may be None."""

    name: str
    kind: Any
    optional: bool
    default: Any
    group: str = ""
    help: str = ""
    symbol: str = ""
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    several: bool = False  # a single value may contain commas


@functools.cache
def options_of(cls: type) -> dict[str, Option]:
    """The options of a dataclass by field name, in the order of the fields; UserError for an unknown annotation."""
    try:
        hints = typing.get_type_hints(cls)
    except NameError as error:
        raise UserError(
            f"{cls.__name__} has a field of an unknown type ({error}): import it outside of `if TYPE_CHECKING`."
        ) from error
    options = {}
    for field in dataclasses.fields(cls):
        kinds = members(hints[field.name])
        optional = types.NoneType in kinds or field.default is None
        kind = Union[tuple(member for member in kinds if member is not types.NoneType)]  # noqa: UP007
        metadata = {key: value for key, value in field.metadata.items() if key in Option.__dataclass_fields__}
        options[field.name] = Option(field.name, kind, optional, field.default, **metadata)
    return options


def members(kind: Any) -> tuple:
    """The types of a union, or the one type."""
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def is_plain(kind: Any) -> bool:
    """Whether values of a type are numbers, strings, paths or choices, so that they can be read from text."""
    return all(part in _WORDS or typing.get_origin(part) is Literal for part in members(kind))


def is_written(value: Any) -> bool:
    """Whether a configuration can hold a value: a number or text of Python's own class, a path, or None."""
    return type(value) in (bool, int, float, str, types.NoneType) or isinstance(value, Path)


def choices(kind: Any) -> list:
    """The values that a type lists as literals; none if it lists none."""
    return [choice for part in members(kind) if typing.get_origin(part) is Literal for choice in typing.get_args(part)]


NOT_PLAIN = "cannot be an option: declare it as int, float, bool, str, Path or Literal, or use the class in Python"


def convert(option: Option, text: str | None, label: str | None = None) -> Any:
    """The checked value of an option, from what the user wrote.

    Args:
      text: as written; None stands for no value, and so does "none" unless it is a choice of its own.
      label: how error messages begin; None for the field's name.

    Raises:
      UserError: wrong type, no such choice, or out of bounds.
    """
    label = label or f"`{option.name}`"
    if text is None or (option.optional and text.lower() == "none" and "none" not in choices(option.kind)):
        if not option.optional:
            raise UserError(f"{label} takes {_expected(option)}, so it cannot be empty.")
        return None
    if not (kinds := [kind for kind in members(option.kind) if is_plain(kind)]):
        raise UserError(f"{label} {NOT_PLAIN}.")
    for kind in kinds:
        try:
            value = _read(kind, text)
        except ValueError:
            continue
        check(option, value, label)
        return value
    short = text if len(text) <= 60 else text[:57] + "..."
    hint = ": several values are for a sweep" if _SEVERAL.fullmatch(text) else ""
    raise UserError(f"{label} takes {_expected(option)}, not {short!r}{hint}.")


_SEVERAL = re.compile(r"\d+:\d+|[^,]+(,[^,]+)+")  # several values, as a sweep takes them


def _read(kind: Any, text: str) -> Any:
    """The value of a text in one type; ValueError if it is not of this type."""
    if kind is Path:
        if not text or "\0" in text:
            raise ValueError(text)
        return expanded(text)  # a shell does not expand the ~ of an option
    values = {"true": True, "false": False} if kind is bool else {str(choice): choice for choice in choices(kind)}
    if not values:
        return kind(text)
    text = text.lower() if kind is bool else text
    if text not in values:
        raise ValueError(text)
    return values[text]


def check(option: Option, value: Any, label: str | None = None) -> None:
    """Raise UserError if a number is not finite or out of the option's bounds; other values pass."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    label = label or f"`{option.name}`"
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{label} must be a finite number, not {value}.")
    if isinstance(value, float) and abs(value) > LARGEST:
        raise UserError(f"{label} must be at most {LARGEST:.2g}, as numbers are float32, not {value:.12g}.")
    if isinstance(value, int) and not (option.high is not None or -(2**31) <= value < 2**31):
        raise UserError(f"{label} must be at most 2147483647, not {_short(value)}.")
    if not all(bound is None or compare(value, bound) for _, compare, bound in _limits(option)):
        raise UserError(f"{label} must be {bounds(option)}, not {_short(value)}.")


def _short(value: float) -> str:
    """A number as error messages show it: an integer may have more digits than a float holds."""
    return shortened(value) if isinstance(value, int) else f"{value:.12g}"


def bounds(option: Option) -> str:
    """The bounds in words, "" if there are none.

    >>> bounds(Option("momentum", float, False, 0.9, low=0, below=1))
    'at least 0 and below 1'
    """
    return " and ".join(f"{words} {bound:.12g}" for words, _, bound in _limits(option) if bound is not None)


def _limits(option: Option) -> tuple[tuple[str, Callable, float | None], ...]:
    return (
        ("at least", operator.ge, option.low), ("above", operator.gt, option.above),
        ("at most", operator.le, option.high), ("below", operator.lt, option.below),
    )  # fmt: skip


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a name", Path: "a path"}


def _expected(option: Option) -> str:
    """What the option takes, in words.

    >>> _expected(Option("lanes", Literal["auto"] | int, False, "auto"))
    'auto or an integer'
    """
    words = [str(choice) for choice in choices(option.kind)]
    words += [_WORDS[part] for part in members(option.kind) if part in _WORDS]
    words += ["none"] if option.optional else []
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]


class _UniqueKeys:
    """Refuses a key that is given twice, which YAML leaves open."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict:
        keys = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                problem = f"the key '{key.value}' is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)  # type: ignore[misc]


class _Loader(_UniqueKeys, yaml.SafeLoader): ...


_C: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _FastLoader(_UniqueKeys, _C): ...


def _decimal(loader: Any, node: Any) -> Any:
    """A number in decimal digits; what else is one in YAML 1.1, as 1:4 (64) and 010 (8), is a text as written."""
    text, kind = loader.construct_scalar(node), node.tag.rpartition(":")[2]
    if ":" in text or (kind == "int" and not re.fullmatch(r"[-+]?(0|[1-9][\d_]*)", text)):
        return text
    return getattr(loader, f"construct_yaml_{kind}")(node)


for _loader in (_Loader, _FastLoader):
    for _kind in ("int", "float"):
        _loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _decimal)


def _load(text: str) -> Any:
    """What YAML holds. The loader in C is seven times faster, but refuses the names of files that are not UTF-8."""
    with contextlib.suppress(yaml.YAMLError):
        return yaml.load(text, _FastLoader)
    return yaml.load(text, _Loader)


def load_mapping(text: str, source: str) -> dict[str, Any]:
    """A YAML mapping with its keys spelled as fields; UserError if it is not a mapping."""
    try:
        mapping = _load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        # The end of the text, where something that was opened is missed, counts as its last line.
        where = f" at line {1 + min(mark.line, text.rstrip().count(chr(10)))}" if mark else ""
        duplicate = f" ({error.problem})" if isinstance(error, yaml.constructor.ConstructorError) else ""
        too_deep = " (it is nested too deeply)" if isinstance(error, RecursionError) else ""
        raise UserError(f"{source} is not valid YAML{where}{duplicate or too_deep}: correct it.") from None
    return as_mapping(mapping, source)


def as_mapping(value: Any, source: str) -> dict[str, Any]:
    """A mapping with its keys spelled as fields (`batch-size` becomes `batch_size`); {} for None.

    Raises:
      UserError: it is not a mapping, or gives a key in both spellings.
    """
    if not isinstance(value, dict | None):
        raise UserError(f"{source} must hold `name: value` lines, not {str(value)[:40]!r}.")
    fields: dict[str, Any] = {}
    for key, item in (value or {}).items():
        name = str(key).replace("-", "_")
        if name in fields:
            raise UserError(f"{source} gives the key '{name}' twice: correct it.")
        fields[name] = item
    return fields


def convert_all(given: Mapping[str, Any], known: Mapping[str, Option], source: str) -> dict[str, Any]:
    """Checked values of YAML values; a UserError names the key and the source."""
    result = {}
    for name, value in given.items():
        if name not in known:
            raise UserError(f"unknown key '{name}' in {source}: {short_nearest(name, known)}")
        if isinstance(value, dict | list):
            raise UserError(f"'{name}' in {source} takes one value, not several.")
        text = value if value is None or isinstance(value, str) else str(value)
        result[name] = convert(known[name], text, f"'{name}' in {source}")
    return result


def short_nearest(name: str, known: Mapping[str, Any]) -> str:
    """As `nearest`, but with a reference to the help if the list of choices would fill the screen."""
    text = nearest(name, known)
    return text if text.startswith("did") or len(known) <= FEW else "`help` lists what there is."


def names_in(text: str | None) -> list[str]:
    """The names in a text, separated by commas; none for None or a blank text. Two commas have an empty name between.

    >>> names_in("angles, mine.py:Sharpness")
    ['angles', 'mine.py:Sharpness']
    """
    return [name.strip() for name in text.split(",")] if text and text.strip() else []


def read_text(path: Path) -> str:
    """The text of a file; UserError if it cannot be read."""
    check_file(path)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{path} cannot be read (it is not text).") from None
    except OSError as error:
        raise unreadable(error, path) from None


def write_text(path: Path, text: str, instead: str) -> None:
    """Write a file atomically, in a folder that may be new; UserError, which says to choose `instead`, if it fails."""
    text = re.sub("[\ud800-\udc7f\udd00-\udfff]", "\N{REPLACEMENT CHARACTER}", text)  # half characters of a JSON file
    with at_once(path, instead, parents=True) as temporary:
        temporary.write_bytes(text.encode("utf-8", "surrogateescape"))  # folder names may have bytes that are not UTF-8


def with_commas(value: Any) -> str:
    """Values separated by commas, as the command line lists them."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple | range) else str(value)


_ELSEWHERE = {  # where an object goes that an option names
    "augmentation": ": register it by `@fp.register_augmentation`, and give its name",
    "public": ": register a function that returns it by `@fp.register_dataset`, and give its name",
    "models": ": `model` takes modules",
}


def _check_written(option: Option, value: Any) -> None:
    """UserError for an object that cannot be written as text, such as a function or an array [n]."""
    written = isinstance(value, str | bool | int | float | np.generic | os.PathLike)
    if not (written or getattr(value, "ndim", None) == 0):
        hint = _ELSEWHERE.get(option.name, "")
        raise UserError(f"takes names and numbers, not {shortened(value)}{hint}.", field=option.name)


def read_value(option: Option, value: Any) -> Any:
    """The checked value of an option; a list stands for values with commas. UserError for objects."""
    if isinstance(value, list | tuple | range):
        if not value:
            raise UserError("takes at least one value: drop the empty list.", field=option.name)
        for item in value:
            _check_written(option, item)
        value = with_commas(value)
    elif value is not None:
        _check_written(option, value)
    return convert(option, None if value is None else str(value))
