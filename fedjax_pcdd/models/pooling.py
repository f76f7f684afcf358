"""ReLU and max-pool of two by two together, with a gradient that is fast on a CPU.

Letters: B batch, H x W image, h x w output, C channels.
"""

import jax
import jax.numpy as jnp

from fedjax_pcdd.models.layers import max_pool

FEW_CHANNELS = 16  # below which the gradient by places is slower than that of slices, in a training step


def relu_max_pool(x: jax.Array) -> jax.Array:
    """The largest of each window of two by two, or 0: [B, H, W, C] to [B, h, w, C], h = H // 2; an odd edge is cut.

    Of equal ones, the first has the whole gradient, row by row; with few channels they share it. Where none is above 0,
    nobody has any.

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
    """The largest of each window of two by two: [B, h, 2, w, 2, C] to [B, h, w, C]; the first has the gradient."""
    return _largest_and_place(windows)[0]


def _largest_and_place(windows):
    """The largest, and its place, counted row by row, as numbers of the same type: vectors of two types are slow."""
    best, *others = (windows[:, :, i, :, j] for i in range(2) for j in range(2))
    place = jnp.zeros_like(best)
    for number, other in enumerate(others, 1):
        place = jnp.where(other > best, jnp.asarray(number, place.dtype), place)
        best = jnp.maximum(best, other)
    return best, place


def _largest_backward(place, dy):
    places = jnp.arange(4, dtype=place.dtype).reshape(1, 1, 2, 1, 2, 1)
    return (jnp.where(place[:, :, None, :, None] == places, dy[:, :, None, :, None], 0),)


largest.defvjp(_largest_and_place, _largest_backward)
