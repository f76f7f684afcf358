"""Forms of a model's convolutions that were timed on the device of a run: static data, which the model brings along.

`Classifier.convolutions` holds them, and while the model is traced `client_conv` takes its forms from them; a model
without any takes those of `convolution_table`. Equal choices give equal programs, so a run that notes them can be
continued bit for bit.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from fedjax_pcdd.models.convolution_forms import FORMS, Window
from fedjax_pcdd.models.convolution_table import LANES, Rule, rule_for


class Operation(NamedTuple):
    """One of the three operations of a layer, as it is computed in a step.

    Attributes:
      name: "forward", "input_gradient" or "weight_gradient".
      window: geometry of the layer's forward convolution.
      inputs: I, channels of the layer's input.
      outputs: O, channels of its output.
      batch: B.
      lanes: L, how many of them are computed as one; 1 for a single one.
      dtype: of the operands, as "float32".
    """

    name: str
    window: Window
    inputs: int
    outputs: int
    batch: int
    lanes: int
    dtype: str

    @property
    def default(self) -> Rule:
        """The rule of the packaged table."""
        window, channels = self.window, (self.inputs, self.outputs)
        return rule_for(jax.default_backend(), self.name, window, *channels, self.lanes, self.dtype)


@dataclass(frozen=True)
class Choices:
    """Rules for some operations; others have those of the packaged table."""

    timed: tuple[tuple[Operation, Rule], ...] = ()

    def rule(self, asked: Operation) -> Rule:
        """That of the same operation timed with the nearest number of lanes, then batch."""
        same = asked[:4], asked.dtype
        known = [(operation, rule) for operation, rule in self.timed if (operation[:4], operation.dtype) == same]
        if not known:
            return asked.default
        return min(known, key=lambda pair: _apart(pair[0], asked))[1]


class Listing:
    """Choices of nothing, which remember what they were asked for; each is equal to itself alone."""

    def __init__(self):
        self.asked: list[Operation] = []

    def rule(self, asked: Operation) -> Rule:
        """That of the packaged table."""
        self.asked.append(asked)
        return asked.default


def _apart(a: Operation, b: Operation) -> tuple[float, float]:
    """Doublings, or halvings, between two numbers of lanes and two batches."""
    return abs(math.log2(a.lanes / b.lanes)), abs(math.log2(a.batch / b.batch))


_in_use: ContextVar[Choices | Listing] = ContextVar("choices", default=Choices())  # noqa: B039 - frozen


def in_use() -> Choices | Listing:
    """Those of the model that is being traced."""
    return _in_use.get()


@contextmanager
def choosing(choices: Choices | Listing | None) -> Iterator[None]:
    """Trace a model under these choices; None changes nothing."""
    token = _in_use.set(in_use() if choices is None else choices)
    try:
        yield
    finally:
        _in_use.reset(token)


def as_json(choices: Choices) -> list[dict[str, Any]]:
    """For a file: a mapping for each operation, with its rule."""
    return [
        operation._asdict() | {"window": operation.window._asdict(), "rule": list(rule)}
        for operation, rule in choices.timed
    ]


def from_json(entries: list[Mapping[str, Any]]) -> Choices:
    """What `as_json` gave; ValueError, KeyError or TypeError for anything else."""
    return Choices(tuple(map(_entry, entries)))


def _entry(entry: Mapping[str, Any]) -> tuple[Operation, Rule]:
    fields: dict[str, Any] = {name: entry[name] for name in Operation._fields} | {
        "window": Window(**_tuples(entry["window"]))
    }
    operation, rule = Operation(**fields), Rule(*entry["rule"])
    if rule.single not in FORMS[operation.name] or rule.lanes not in LANES:
        raise ValueError(f"there is no form {rule.single}, {rule.lanes} of {operation.name}")
    if not min(operation.inputs, operation.outputs, operation.batch, operation.lanes) >= 1:
        raise ValueError(f"{operation} has no such size")
    return operation, rule


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples."""
    if isinstance(value, Mapping):
        return {name: _tuples(entry) for name, entry in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
