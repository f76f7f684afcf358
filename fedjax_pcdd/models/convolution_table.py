"""Which form each operation of a convolution takes, looked up by backend and shape; nothing is timed here.

`convolution_table.json` beside this file is written by `python -m benchmarks.convolutions --update`. It lists, for each
backend, the shapes that were measured, one a line: kernel, strides, channels in and out and image side of the layer,
and for each of its operations the choice [single, lanes] that was faster than the default rule by a tenth or more. An
operation that is not named runs best, or within that tenth, by the default rule. A backend without shapes was not
measured. All was measured in float32 and holds for other types, batches and paddings too.
"""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_pcdd.models.convolution_forms import Window, block_width, fits, made

TABLE = Path(__file__).with_suffix(".json")
LANES = ("loop", "gemm", "grouped")
FAR = 2.0  # doublings beyond which a measured shape says nothing


class Rule(NamedTuple):
    """How an operation runs.

    Attributes:
      single: form of one convolution, "direct", "gemm", "blocked" or "rows"; see `convolution_forms`.
      lanes: how a batch of convolutions runs, "loop" (one after another), "gemm" (batched matrix products) or
        "grouped" (XLA's grouped convolution).
    """

    single: str
    lanes: str


def rule_for(
    backend: str, operation: str, window: Window, inputs: int, outputs: int, lanes: int = 1, dtype: str = "float32"
) -> Rule:
    """The choice for one operation of a layer: that of the nearest measured shape, else the default rule's.

    A form that does not fit the shape, as blocks of columns under a stride, becomes "direct".

    Args:
      backend: as `jax.default_backend()`.
      operation: "forward", "input_gradient" or "weight_gradient".
      window: geometry of the layer's forward convolution.
      inputs: I, channels of the layer's input.
      outputs: O, channels of its output.
      lanes: L, 1 where there is no lane axis.
      dtype: of the operands. The table's entries hold for all lanes and types.
    """
    chosen = nearest(table().get(backend, {}).get("shapes", ()), window, inputs, outputs).get(operation)
    if chosen is None:
        return default_rule(backend, operation, window, inputs, outputs, lanes, dtype)
    single, together = chosen
    return Rule(single if fits(single, operation, window, inputs, outputs) else "direct", together)


def default_rule(
    backend: str, operation: str, window: Window, inputs: int, outputs: int, lanes: int = 1, dtype: str = "float32"
) -> Rule:
    """The rule for shapes of which the table knows nothing; arguments as for `rule_for`.

    On one CPU core XLA's convolution is slow where it makes few channels (5x5, 3 to 6: four times slower than
    in blocks), and its weight gradient is up to 2.5 times slower than matrix products by kernel row.

    The rule for other backends is predicted, not measured. By the kernels that XLA compiles for an H100, and the bytes
    and operations of each, grouped convolutions take 0.3 to 0.7 of the time of matrix products for small CNNs in 10
    lanes and for ResNet18 in TF32, and as long in float32: products write all patches to memory first. On a TPU v5e
    XLA itself expects a third of the cycles for the smallest of these. All that holds if a group of few channels is as
    fast as a dense convolution, which only the device can tell.
    """
    del lanes, dtype
    if backend != "cpu":
        return Rule("direct", "grouped")
    if block_width(*made(operation, window, inputs, outputs)) > 1:
        return Rule("blocked", "loop")
    return Rule("rows" if operation == "weight_gradient" and outputs >= 32 else "direct", "loop")


@functools.cache
def table() -> dict[str, dict[str, Any]]:
    """The packaged table: for each backend what it was "measured" on, null for nothing, and its "shapes"."""
    return json.loads(TABLE.read_text())


def nearest(shapes, window: Window, inputs: int, outputs: int) -> Mapping[str, Any]:
    """The measured shape at the least distance, the first of equals; empty where none is within `FAR`."""
    distances = [(distance(shape, window, inputs, outputs), i) for i, shape in enumerate(shapes)]
    least, i = min(distances, default=(math.inf, 0))
    return shapes[i] if least <= FAR else {}


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
