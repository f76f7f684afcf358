"""Whether parsed JSON is what a run writes: a damaged file may be valid JSON and hold something else."""

import re
from collections.abc import Mapping
from typing import Any

_NUMBERS = re.compile(r"(ga|pa)_.*(best|last|last10|std|worst10|round|clients)|seconds_\w+|\w*peak_memory_mb")
_WORDS = ("method", "pa_protocol", "selected_on")


def is_summary(value: Mapping[str, Any]) -> bool:
    """Whether a value is the result of a run, with accuracies and costs that are numbers or null.

    >>> is_summary({"method": "fedavg", "rounds": 2, "ga_best": 0.5}), is_summary({})
    (True, False)
    """
    rounds = value.get("rounds")
    has_required = {"method", "ga_best"} <= value.keys() and type(rounds) is int and rounds > 0
    words = all(isinstance(value.get(name, ""), str) for name in _WORDS)
    numbers = all(_is_number(entry) for name, entry in value.items() if _NUMBERS.fullmatch(name))
    return has_required and words and numbers and _is_list(value.get("pa_best_per_client"))


def is_line(row: Mapping[str, Any], before: int) -> bool:
    """Whether a row is of a round later than `before`, with accuracies and costs that are numbers or null.

    >>> [is_line({"round": 2, "ga": ga}, before) for ga, before in ((0.5, 1), (None, 1), ("x", 1), (0.5, 2))]
    [True, True, False, False]
    """
    lists = (value for name, value in row.items() if name.startswith(("ga_", "pa_")) or name == "clients")
    pa = row.get("pa")  # with many clients a list, for the client numbers in `clients`
    return (
        type(row["round"]) is int
        and row["round"] > before
        and all(_is_number(row.get(name)) for name in ("ga", "loss", "seconds"))
        and all(_is_number(value) or _is_list(value) for value in lists)
        and (_is_number(pa) or ("clients" in row and _is_list(pa)))
    )


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _is_list(value: Any) -> bool:
    # By type first, as there may be a number for each of many clients.
    return value is None or (
        isinstance(value, list) and (set(map(type, value)) <= {float, type(None)} or all(map(_is_number, value)))
    )
