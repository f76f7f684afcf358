"""An option of the command line, made from a dataclass field: its type, bounds and text, and how it is read.

Run options and the hyper-parameters of methods are both such fields, so the command line, preset files and
recorded configurations share one way to read a value and one way to refuse it.
"""

import contextlib
import dataclasses
import functools
import io
import math
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from fedjax_pcdd.errors import UserError


def run_option(default: Any, group: str, help: str, *, low=None, high=None, above=None, below=None) -> Any:
    """A field of `RunConfig`.

    Args:
      default: used where nothing is given.
      group: heading under which the help shows it.
      help: meaning and unit.
      low, high: inclusive bounds of a number.
      above, below: exclusive bounds of a number.
    """
    metadata = {"group": group, "help": help, "low": low, "high": high, "above": above, "below": below}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class Option:
    """One field as the command line sees it; `kind` is its type without None, which `optional` tells."""

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

    @property
    def flag(self) -> str:
        """Its spelling on the command line, as `--batch-size`."""
        return "--" + self.name.replace("_", "-")


@functools.cache
def options_of(cls: type) -> dict[str, Option]:
    """The options of a dataclass by field name, in the order of the fields."""
    hints = typing.get_type_hints(cls)
    return {field.name: _option(field, hints[field.name]) for field in dataclasses.fields(cls)}


def _option(field: dataclasses.Field, hint: Any) -> Option:
    members = _members(hint)
    kind = Union[tuple(member for member in members if member is not types.NoneType)]  # noqa: UP007
    known = {key: value for key, value in field.metadata.items() if key in Option.__dataclass_fields__}
    return Option(field.name, kind, types.NoneType in members, field.default, **known)


def _members(kind: Any) -> tuple:
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


def _choices(kind: Any) -> list:
    return [choice for part in _members(kind) if typing.get_origin(part) is Literal for choice in typing.get_args(part)]


def convert(option: Option, text: str | None, label: str) -> Any:
    """The checked value of an option from what a user wrote.

    Args:
      option: which one.
      text: as written; None, and "none" where it is no choice of its own, stand for no value.
      label: how a sentence about it begins, as `--lr`.

    Raises:
      UserError: wrong type, no such choice, or out of bounds.
    """
    if text is None or (option.optional and text.lower() == "none" and "none" not in _choices(option.kind)):
        if not option.optional:
            raise UserError(f"{label} takes {_expected(option)}, so it cannot be empty.")
        return None
    try:
        value = _read(option.kind, text.capitalize() if option.kind is bool else text)
    except SystemExit:
        raise UserError(f"{label} takes {_expected(option)}, not {_short(text)!r}.") from None
    check(option, value, label)
    return value


def _read(kind: Any, text: str) -> Any:
    """Tyro's reading of one value; SystemExit where it does not fit the type."""
    import tyro  # only what is written as text needs it: a run from values does not

    form = dataclasses.make_dataclass("Form", [("value", Annotated[kind, tyro.conf.arg(name="value")])])
    flags = (tyro.conf.FlagConversionOff,)
    # Tyro prints its own multi-line box for some mistakes even without console outputs.
    with contextlib.redirect_stderr(io.StringIO()):
        parsed: Any = tyro.cli(form, args=[f"--value={text}"], console_outputs=False, config=flags)
    return parsed.value


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."


def check(option: Option, value: Any, label: str) -> None:
    """UserError where a number is not finite or out of the option's bounds; other values pass."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{label} must be a finite number, not {value}.")
    fits = (
        (option.low is None or value >= option.low)
        and (option.high is None or value <= option.high)
        and (option.above is None or value > option.above)
        and (option.below is None or value < option.below)
    )
    if not fits:
        raise UserError(f"{label} must be {bounds(option)}, not {value:.12g}.")


def bounds(option: Option) -> str:
    """The bounds in words, "" without any.

    >>> bounds(Option("momentum", float, False, 0.9, low=0, below=1))
    'at least 0 and below 1'
    """
    words = {"at least": option.low, "above": option.above, "at most": option.high, "below": option.below}
    return " and ".join(f"{word} {value:.12g}" for word, value in words.items() if value is not None)


_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a name", Path: "a path"}


def _expected(option: Option) -> str:
    """What the option takes, in words.

    >>> _expected(Option("lanes", Literal["auto"] | int, False, "auto"))
    'auto or an integer'
    """
    words = [str(choice) for choice in _choices(option.kind)]
    words += [_WORDS[part] for part in _members(option.kind) if part in _WORDS]
    words += ["none"] if option.optional else []
    return " or ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else words[0]
