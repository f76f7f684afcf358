"""A convolution that keeps its speed inside loops and under a lane axis.

Letters: B batch, H x W image, h x w output, I and O channels, L lanes. Layout is NHWC x HWIO.

XLA on CPUs rewrites the transposed forms of a convolution's gradients only at the entry of a program, not in
the body of a loop, and a vmap over weights makes a grouped convolution, whose weight gradient is slow there.
So the two gradients are written here as ordinary convolutions, and each of the three operations (forward,
input gradient, weight gradient) defines how it runs under vmap; `convolution_table` chooses its form.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_pcdd.models import convolution_forms as forms
from fedjax_pcdd.models.convolution_forms import LAYOUT, Pair, Window
from fedjax_pcdd.models.convolution_table import Choices, Listing, Operation, Rule, in_use


def client_conv(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[Pair],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
    **unusual: Any,
) -> jax.Array:
    """`lax.conv_general_dilated` for training steps with a lane axis.

    For Flax: `nn.Conv(..., conv_general_dilated=client_conv)`. Takes [B, H, W, I] and
    [kh, kw, I / feature_group_count, O], and returns [B, h, w, O]; without dimension numbers the layout is NHWC x HWIO.
    Dilated convolutions, other layouts and other ranks are passed to XLA unchanged, and grouped ones too except on
    CPUs: there XLA's gradients of a depthwise convolution in a loop are hundreds of times slower than products of
    shifted images, which are used instead. Supports reverse-mode differentiation, once.

    >>> client_conv(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5)), (1, 1), "VALID").shape
    (1, 2, 2, 5)
    """
    if dimension_numbers is None and lhs.ndim == 4:
        dimension_numbers = LAYOUT
    unusual = {name: value for name, value in unusual.items() if value is not None}
    dilated = {*(lhs_dilation or ()), *(rhs_dilation or ())} - {1}
    grouped_in_xla = feature_group_count != 1 and jax.default_backend() != "cpu"
    unsupported = dilated or grouped_in_xla or unusual or not _is_nhwc(lhs, rhs, dimension_numbers)
    window = None if unsupported else plain_window(lhs, rhs, window_strides, padding, precision)
    if window is None:
        return lax.conv_general_dilated(
            lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers,
            feature_group_count=feature_group_count, precision=precision, **unusual,
        )  # fmt: skip
    if feature_group_count != 1:
        return _in_groups(lhs, rhs, window, feature_group_count)
    if rhs.shape[:2] == (1, 1) and window.pads == ((0, 0), (0, 0)):
        return jnp.matmul(_every(lhs, window.strides), rhs[0, 0], precision=precision)
    return _convolve(lhs, rhs, window, in_use())


def _every(x: jax.Array, strides: Pair) -> jax.Array:
    """The pixels that a 1x1 convolution reads: [B, H, W, C] to [B, h, w, C].

    XLA's compiler for GPUs crashes the process if a strided slice of an array that has other users too enters a matrix
    product (openxla/xla issue 47381), as in a residual block's shortcut: there the slice is materialised first.
    """
    if strides == (1, 1):
        return x
    sliced = x[:, :: strides[0], :: strides[1]]
    return sliced if jax.default_backend() == "cpu" else lax.optimization_barrier(sliced)


def _in_groups(lhs: jax.Array, rhs: jax.Array, window: Window, groups: int) -> jax.Array:
    if rhs.shape[2:] == (1, groups):
        return forms.depthwise(lhs, rhs, window)
    group_operands = zip(jnp.split(lhs, groups, 3), jnp.split(rhs, groups, 3), strict=True)
    outputs = [client_conv(x, w, window.strides, window.pads, precision=window.precision) for x, w in group_operands]
    return jnp.concatenate(outputs, axis=3)


def _is_nhwc(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any) -> bool:
    shapes = lhs.shape, rhs.shape
    return lhs.ndim == 4 and (
        lax.conv_dimension_numbers(*shapes, dimension_numbers) == lax.conv_dimension_numbers(*shapes, LAYOUT)
    )


def plain_window(lhs, rhs, strides, padding, precision: Any = None) -> Window | None:
    """The geometry of an ordinary convolution; None if padding is negative."""
    image, kernel, (height, width) = lhs.shape[1:3], rhs.shape[:2], strides
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(image, kernel, strides, padding)
    (top, bottom), (left, right) = padding
    pads = ((int(top), int(bottom)), (int(left), int(right)))
    if min(*pads[0], *pads[1]) < 0:
        return None
    # Gradients are traced outside the context that set the precision of the forward pass.
    surrounding = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    return Window(image, kernel, (height, width), pads, precision or surrounding)


# Differentiation rules outside, vmap rules inside: custom_vmap has no reverse mode.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolve(x, w, window, choices):
    return _operation("forward", window, choices)(x, w)


def _convolve_backward(window, choices, residuals, dy):
    x, w = residuals
    return _operation("input_gradient", window, choices)(dy, w), _operation("weight_gradient", window, choices)(x, dy)


_convolve.defvjp(lambda x, w, *static: (_convolve(x, w, *static), (x, w)), _convolve_backward)


@functools.cache
def _operation(name: str, window: Window, choices: Choices | Listing) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """One of the three operations as a function of its two operands, with its own rule under vmap."""
    compute, folds = _OPERATIONS[name]

    def rule(a, b, lanes=1) -> Rule:
        inputs = a.shape[3] if name == "weight_gradient" else b.shape[2]
        return choices.rule(Operation(name, window, inputs, b.shape[3], a.shape[0], lanes, str(a.dtype)))

    @jax.custom_batching.custom_vmap
    def operation(a, b):
        return compute(rule(a, b).single, a, b, window)

    @operation.def_vmap
    def over_lanes(lanes, batched, a, b):
        if not all(batched):
            fold_axis, unfold_axis = folds[0 if batched[0] else 1]
            folded = operation(_fold(a, fold_axis), b) if batched[0] else operation(a, _fold(b, fold_axis))
            return _unfold(folded, unfold_axis, lanes), True
        lane_form = rule(a[0], b[0], lanes).lanes
        if lane_form == "loop":
            return lax.map(lambda operands: operation(*operands), (a, b)), True
        form = "gemm" if lane_form == "gemm" else "direct"
        return jax.vmap(lambda a, b: compute(form, a, b, window))(a, b), True

    return operation


def _fold(array: jax.Array, axis: int) -> jax.Array:
    """Merge the leading lane axis into an axis of the single-lane array."""
    moved = jnp.moveaxis(array, 0, axis)
    return moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])


def _unfold(array: jax.Array, axis: int, lanes: int) -> jax.Array:
    split = array.reshape(*array.shape[:axis], lanes, -1, *array.shape[axis + 1 :])
    return jnp.moveaxis(split, axis, 0)


# For each operation: its function, and for each operand the axis into which lanes are folded if the other operand is
# shared by all lanes, and the axis of the result from which they are unfolded.
_OPERATIONS = {
    "forward": (forms.forward, ((0, 0), (3, 3))),
    "input_gradient": (forms.input_gradient, ((0, 0), (2, 3))),
    "weight_gradient": (forms.weight_gradient, ((3, 2), (3, 3))),
}
