"""The form of each convolution operation: as timed on a run's device, else from a packaged table.

`convolution_table.json` beside this file is written by `python -m benchmarks.convolutions --update`. It lists, for each
backend, the measured shapes, one per line: kernel, strides, channels in and out and image side of the layer, and for
each of its operations the choice [single, lanes] if that was faster than the default rule by a tenth or more. For an
operation that is not listed the default rule is best, or within that tenth. A backend without shapes was not measured.
Everything was measured in float32 and is used for other dtypes, batches, paddings and numbers of lanes too.

Forms that were timed on the device of a run are static data of the model: `Classifier.convolutions` holds them, and
`client_conv` takes its forms from there while the model is traced. Equal choices give equal programs, so a run that
records them can be continued bit for bit.
"""

import functools
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_pcdd.models.convolution_forms import FORMS, Window, block_width, fits, made

TABLE = Path(__file__).with_suffix(".json")
LANES = ("loop", "gemm", "grouped")
FAR = 2.0  # doublings beyond which a measured shape is not used


class Rule(NamedTuple):
    """How an operation runs.

    Attributes:
      single: form of one convolution, of `convolution_forms.FORMS`.
      lanes: how a batch of convolutions runs, "loop" (one after another), "gemm" (batched matrix products) or
        "grouped" (XLA's grouped convolution).
    """

    single: str
    lanes: str


class Operation(NamedTuple):
    """One of the three operations of a layer, as it is computed in a step.

    Attributes:
      name: "forward", "input_gradient" or "weight_gradient".
      window: geometry of the layer's forward convolution.
      inputs: I, channels of the layer's input.
      outputs: O, channels of its output.
      batch: B.
      lanes: L, number of convolutions that are computed as one; 1 for a single one.
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
        return rule_for(jax.default_backend(), self.name, self.window, self.inputs, self.outputs)


@dataclass(frozen=True)
class Choices:
    """Rules for some operations; others use the packaged table."""

    timed: tuple[tuple[Operation, Rule], ...] = ()

    def rule(self, asked: Operation) -> Rule:
        """The rule of the same operation timed with the nearest number of lanes, then the nearest batch size."""
        key = asked[:4], asked.dtype
        candidates = [(operation, rule) for operation, rule in self.timed if (operation[:4], operation.dtype) == key]
        return min(candidates, key=lambda pair: _apart(pair[0], asked))[1] if candidates else asked.default


class Listing:
    """Empty choices that record the requested operations; an instance is only equal to itself."""

    def __init__(self):
        self.asked: list[Operation] = []

    def rule(self, asked: Operation) -> Rule:
        """The rule of the packaged table."""
        self.asked.append(asked)
        return asked.default


def _apart(a: Operation, b: Operation) -> tuple[float, float]:
    """Doublings or halvings between two operations: in the number of lanes, and in the batch size."""
    return abs(math.log2(a.lanes / b.lanes)), abs(math.log2(a.batch / b.batch))


_in_use: ContextVar[Choices | Listing] = ContextVar("choices", default=Choices())  # noqa: B039 - frozen


def in_use() -> Choices | Listing:
    """The choices of the model that is being traced."""
    return _in_use.get()


@contextmanager
def choosing(choices: Choices | Listing | None) -> Iterator[None]:
    """A context for tracing a model with these choices; None changes nothing."""
    token = _in_use.set(in_use() if choices is None else choices)
    try:
        yield
    finally:
        _in_use.reset(token)


def as_json(choices: Choices) -> list[dict[str, Any]]:
    """Choices as JSON data: a mapping for each operation, with its rule."""
    return [op._asdict() | {"window": op.window._asdict(), "rule": list(rule)} for op, rule in choices.timed]


def from_json(entries: list[Mapping[str, Any]]) -> Choices:
    """Inverse of `as_json`; ValueError, KeyError or TypeError for other data."""
    return Choices(tuple(map(_entry, entries)))


def _entry(entry: Mapping[str, Any]) -> tuple[Operation, Rule]:
    fields: dict[str, Any] = {name: entry[name] for name in Operation._fields}
    fields["window"] = Window(**_tuples(entry["window"]))
    operation = Operation(**fields)
    rule = Rule(*entry["rule"])
    if rule.single not in FORMS[operation.name] or rule.lanes not in LANES:
        raise ValueError(f"there is no form {rule.single}, {rule.lanes} of {operation.name}")
    if not min(operation.inputs, operation.outputs, operation.batch, operation.lanes) >= 1:
        raise ValueError(f"{operation} has no such size")
    return operation, rule


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _tuples(entry) for name, entry in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    """The packaged table: for each backend the device it was "measured" on (null if not measured) and its "shapes"."""
    return json.loads(TABLE.read_text())


def rule_for(backend: str, operation: str, window: Window, inputs: int, outputs: int) -> Rule:
    """The packaged choice for an operation: that of the nearest measured shape, else the default rule.

    A form that does not fit the shape, such as blocks of columns with a stride, becomes "direct". The backend is named
    as by `jax.default_backend()`, the other arguments as in `Operation`.
    """
    shapes = table().get(backend, {}).get("shapes", ())
    # Of equally near shapes the first one.
    distances = [(distance(shape, window, inputs, outputs), i) for i, shape in enumerate(shapes)]
    least, i = min(distances, default=(math.inf, 0))
    if least > FAR or operation not in shapes[i]:
        return default_rule(backend, operation, window, inputs, outputs)
    single, together = shapes[i][operation]
    return Rule(single if fits(single, operation, window, inputs, outputs) else "direct", together)


def default_rule(backend: str, operation: str, window: Window, inputs: int, outputs: int) -> Rule:
    """The rule for shapes that the table does not cover; arguments as for `rule_for`.

    On one CPU core XLA's convolution is slow if it has few output channels (5x5, 3 to 6: four times slower than
    in blocks), and its weight gradient is up to 2.5 times slower than matrix products by kernel row.

    On a GPU, lanes are grouped convolutions except for weight gradients, which are matrix products: cuDNN computes the
    weight gradient of a grouped convolution group by group, by Fourier transforms. Measured on an H200 in TF32 with ten
    lanes, this changes the time of a round by the factor 0.53 for W1, 0.50 for ResNet18, but 1.25 for W2, with 5x5
    kernels and 32 to 64 channels, which timing on the device corrects. For a TPU the rule is predicted, not measured:
    on a v5e XLA itself expects a third of the cycles for grouped convolutions of the smallest of these.
    """
    if backend != "cpu":
        return Rule("direct", "gemm" if (backend, operation) == ("gpu", "weight_gradient") else "grouped")
    if block_width(*made(operation, window, inputs, outputs)) > 1:
        return Rule("blocked", "loop")
    return Rule("rows" if operation == "weight_gradient" and outputs >= 32 else "direct", "loop")


def distance(shape: Mapping[str, Any], window: Window, inputs: int, outputs: int) -> float:
    """Doublings or halvings between a shape of the table and a layer: in input channels, output channels and side.

    The three are added; height and width count half each. Infinite if kernels or strides differ.

    >>> window = Window((28, 28), (5, 5), (1, 1), ((0, 0), (0, 0)))
    >>> shape = {"kernel": [5, 5], "strides": [1, 1], "inputs": 3, "outputs": 8, "image": [14, 28]}
    >>> distance(shape, window, 6, 8)
    1.5
    """
    if (tuple(shape["kernel"]), tuple(shape["strides"])) != (window.kernel, window.strides):
        return math.inf
    pairs = [(shape["inputs"], inputs, 1), (shape["outputs"], outputs, 1)]
    pairs += [(a, b, 0.5) for a, b in zip(shape["image"], window.image, strict=True)]
    return sum(share * abs(math.log2(a / b)) for a, b, share in pairs)
