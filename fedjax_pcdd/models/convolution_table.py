"""Which form each operation of a convolution takes: by what was timed on a run's device, else by a packaged table.

`convolution_table.json` beside this file is written by `python -m benchmarks.convolutions --update`. It lists, for each
backend, the shapes that were measured, one a line: kernel, strides, channels in and out and image side of the layer,
and for each of its operations the choice [single, lanes] that was faster than the default rule by a tenth or more. An
operation that is not named runs best, or within that tenth, by the default rule. A backend without shapes was not
measured. All was measured in float32 and holds for other types, batches, paddings and numbers of lanes too.

Forms that were timed on the device of a run are static data, which the model brings along: `Classifier.convolutions`
holds them, and while the model is traced `client_conv` takes its forms from them. Equal choices give equal programs, so
a run that notes them can be continued bit for bit.
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
FAR = 2.0  # doublings beyond which a measured shape says nothing


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
        return rule_for(jax.default_backend(), self.name, self.window, self.inputs, self.outputs)


@dataclass(frozen=True)
class Choices:
    """Rules for some operations; others have those of the packaged table."""

    timed: tuple[tuple[Operation, Rule], ...] = ()

    def rule(self, asked: Operation) -> Rule:
        """That of the same operation timed with the nearest number of lanes, then batch."""
        same = asked[:4], asked.dtype
        known = [(operation, rule) for operation, rule in self.timed if (operation[:4], operation.dtype) == same]
        return min(known, key=lambda pair: _apart(pair[0], asked))[1] if known else asked.default


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
    return [op._asdict() | {"window": op.window._asdict(), "rule": list(rule)} for op, rule in choices.timed]


def from_json(entries: list[Mapping[str, Any]]) -> Choices:
    """What `as_json` gave; ValueError, KeyError or TypeError for anything else."""
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
    """JSON's lists as tuples."""
    if isinstance(value, Mapping):
        return {name: _tuples(entry) for name, entry in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    """The packaged table: for each backend what it was "measured" on, null for nothing, and its "shapes"."""
    return json.loads(TABLE.read_text())


def rule_for(backend: str, operation: str, window: Window, inputs: int, outputs: int) -> Rule:
    """The packaged choice for an operation: that of the nearest measured shape, else the default rule's.

    A form that does not fit the shape, as blocks of columns under a stride, becomes "direct". The backend is named as
    by `jax.default_backend()`, the rest as in `Operation`.
    """
    shapes = table().get(backend, {}).get("shapes", ())
    # The first of equally near ones.
    distances = [(distance(shape, window, inputs, outputs), i) for i, shape in enumerate(shapes)]
    least, i = min(distances, default=(math.inf, 0))
    if least > FAR or operation not in shapes[i]:
        return default_rule(backend, operation, window, inputs, outputs)
    single, together = shapes[i][operation]
    return Rule(single if fits(single, operation, window, inputs, outputs) else "direct", together)


def default_rule(backend: str, operation: str, window: Window, inputs: int, outputs: int) -> Rule:
    """The rule for shapes of which the table knows nothing; arguments as for `rule_for`.

    On one CPU core XLA's convolution is slow where it makes few channels (5x5, 3 to 6: four times slower than
    in blocks), and its weight gradient is up to 2.5 times slower than matrix products by kernel row.

    On a GPU, lanes are grouped convolutions but for weight gradients, which are matrix products: cuDNN computes the
    weight gradient of a grouped convolution group by group, by Fourier transforms. Measured on an H200 in TF32, ten
    lanes: a round of W1 takes 0.53 and of ResNet18 0.50 of the time for it, but one of W2, with 5x5 kernels and 32 to
    64 channels, 1.25, which timing on the device mends. For a TPU the rule is predicted, not measured: on a v5e XLA
    itself expects a third of the cycles for grouped convolutions of the smallest of these.
    """
    if backend != "cpu":
        return Rule("direct", "gemm" if (backend, operation) == ("gpu", "weight_gradient") else "grouped")
    if block_width(*made(operation, window, inputs, outputs)) > 1:
        return Rule("blocked", "loop")
    return Rule("rows" if operation == "weight_gradient" and outputs >= 32 else "direct", "loop")


def distance(shape: Mapping[str, Any], window: Window, inputs: int, outputs: int) -> float:
    """Doublings, or halvings, between a shape of the table and a layer: in channels in, in channels out, in image side.

    These three add up; height and width count half each. Infinite where kernels or strides differ.

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
