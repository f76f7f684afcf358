"""YAML mappings of options: keys in the spelling of fields, values checked, and what is wrong said in a sentence."""

from collections.abc import Mapping
from typing import Any

import yaml

from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.training.fields import Option, convert


def load_mapping(text: str, source: str) -> dict[str, Any]:
    """A YAML mapping with its keys in the spelling of fields; UserError where it is none."""
    try:
        mapping = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"{source} is not valid YAML{where}: correct it.") from None
    return as_mapping(mapping, source)


def as_mapping(value: Any, source: str) -> dict[str, Any]:
    """The keys of a mapping in the spelling of fields (`batch-size` is `batch_size`), {} for nothing."""
    if not isinstance(value, dict | None):
        raise UserError(f"{source} must hold `name: value` lines, not {str(value)[:40]!r}.")
    return {str(key).replace("-", "_"): item for key, item in (value or {}).items()}


def convert_all(given: Mapping[str, Any], known: Mapping[str, Option], source: str) -> dict[str, Any]:
    """Checked values from YAML ones; UserError names the key and the source."""
    result = {}
    for name, value in given.items():
        if name not in known:
            raise UserError(f"unknown key '{name}' in {source}: {short_nearest(name, known)}")
        if isinstance(value, dict | list):
            raise UserError(f"'{name}' in {source} takes one value, not several.")
        text = value if value is None or isinstance(value, str) else str(value)
        result[name] = convert(known[name], text, f"'{name}' in {source}")
    return result


def short_nearest(name: str, known: Mapping[str, Any], *, few: int = 8) -> str:
    """As `nearest`, but a reference to the help where the list of choices would fill the screen."""
    text = nearest(name, known)
    return text if text.startswith("did") or len(known) <= few else "--help lists what there is."
