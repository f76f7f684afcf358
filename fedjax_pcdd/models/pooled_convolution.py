"""Convolution, ReLU and 2x2 max-pool in one, with gradients that are fast for few channels on a CPU.

If a convolution runs in blocks of columns (`convolution_forms`), the columns are ordered so that the two columns of a
window lie half a block apart. The maximum and its gradient then work on half blocks rather than on the few channels of
a single column, which are too few for vector instructions.

Letters: B batch, H x W image, h x w output of the convolution, I and O channels, n columns in a block.
"""

import functools

import jax
import jax.numpy as jnp

from fedjax_pcdd.models import convolution_forms as forms
from fedjax_pcdd.models.convolution import plain_window
from fedjax_pcdd.models.convolution_forms import Window, block_width
from fedjax_pcdd.models.convolution_table import Choices, Listing, Operation, in_use
from fedjax_pcdd.models.layers import Conv, max_pool

FEW_CHANNELS = 16  # with fewer, the gradient by positions is slower than that of slices in a training step


class PooledConv(Conv):
    """`Conv`, then `relu_max_pool`: [B, H, W, in] to [B, h // 2, w // 2, features]."""

    def convolve(self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        """The layer as a function of its parameters."""
        window = plain_window(x, kernel, *self.geometry) if self.groups == 1 else None
        if window is None or not _fits(window, x, kernel):
            return relu_max_pool(super().convolve(x, kernel, bias))
        blocks = jnp.asarray(_in_blocks(x, kernel, window, in_use()))
        batch, height, width, channels = blocks.shape
        best = largest(blocks.reshape(batch, height // 2, 2, width, 2, channels // 2))
        best = best.reshape(batch, height // 2, -1, self.features)
        return jax.nn.relu(best if bias is None else best + bias)  # the bias does not affect which one is largest


def relu_max_pool(x: jax.Array) -> jax.Array:
    """ReLU and 2x2 max-pool: [B, H, W, C] to [B, H // 2, W // 2, C]; an odd edge is dropped.

    Of equal maxima the first, row by row, gets the whole gradient; with few channels they share it. If none is above 0,
    there is no gradient.

    >>> relu_max_pool(jnp.arange(9.0).reshape(1, 3, 3, 1) - 3)
    Array([[[[1.]]]], dtype=float32)
    """
    x = jax.nn.relu(x)
    if x.shape[3] < FEW_CHANNELS:
        return max_pool(x, 2)
    height, width = x.shape[1] // 2, x.shape[2] // 2
    return largest(x[:, : 2 * height, : 2 * width].reshape(x.shape[0], height, 2, width, 2, x.shape[3]))


@jax.custom_vjp
def largest(windows: jax.Array) -> jax.Array:
    """Maximum of each 2x2 window: [B, h, 2, w, 2, C] to [B, h, w, C]; of equal ones the first gets the gradient."""
    return _largest_and_position(windows)[0]


def _largest_and_position(windows):
    """The maximum and its position, counted row by row, in one dtype: vectors of two dtypes are slow."""
    best, *others = (windows[:, :, i, :, j] for i in range(2) for j in range(2))
    position = jnp.zeros_like(best)
    for number, other in enumerate(others, 1):
        position = jnp.where(other > best, jnp.asarray(number, position.dtype), position)
        best = jnp.maximum(best, other)
    return best, position


def _largest_backward(position, dy):
    positions = jnp.arange(4, dtype=position.dtype).reshape(1, 1, 2, 1, 2, 1)
    return (jnp.where(position[:, :, None, :, None] == positions, dy[:, :, None, :, None], 0),)


largest.defvjp(_largest_and_position, _largest_backward)


def _fits(window: Window, x: jax.Array, w: jax.Array) -> bool:
    """Whether the convolution runs in blocks and 2x2 windows tile its output."""
    if _rule(in_use(), "forward", window, x, w) != "blocked":
        return False
    return window.out[0] % 2 == 0 and block_width(window, w.shape[3]) % 2 == 0


def _rule(choices: Choices | Listing, name: str, window: Window, x: jax.Array, w: jax.Array) -> str:
    """The form of an operation for a single lane."""
    inputs, outputs = w.shape[2:]
    return choices.rule(Operation(name, window, inputs, outputs, x.shape[0], 1, str(x.dtype))).single


def _order(window: Window, outputs: int) -> tuple[int, ...]:
    """Column order in a block, left columns of the windows first: (0, 2, 1, 3)."""
    width = block_width(window, outputs)
    return (*range(0, width, 2), *range(1, width, 2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _in_blocks(x, w, window: Window, choices: Choices | Listing):
    """[B, H, W, I] and [kh, kw, I, O] to [B, h, w / n, n * O]."""
    del choices
    columns = _order(window, w.shape[3])
    return jax.custom_batching.sequential_vmap(lambda x, w: forms.forward_in_blocks(x, w, window, columns))(x, w)


def _in_blocks_backward(window: Window, choices: Choices | Listing, operands, dz):
    return jax.custom_batching.sequential_vmap(functools.partial(_gradients, window, choices))(*operands, dz)


def _gradients(window: Window, choices: Choices | Listing, x, w, dz):
    columns = _order(window, w.shape[3])
    sides = dz.reshape(*dz.shape[:3], 2, len(columns) // 2, w.shape[3])  # left columns of windows, then right ones
    dy = sides.swapaxes(3, 4).reshape(dz.shape[0], *window.out, w.shape[3])
    input_form, weight_form = (_rule(choices, name, window, x, w) for name in ("input_gradient", "weight_gradient"))
    if weight_form.startswith("blocked"):
        dw = forms.weight_gradient_in_blocks(weight_form, x, dz, window, columns)
    else:
        dw = forms.weight_gradient(weight_form, x, dy, window)
    return forms.input_gradient(input_form, dy, w, window), dw


_in_blocks.defvjp(lambda x, w, *static: (_in_blocks(x, w, *static), (x, w)), _in_blocks_backward)
