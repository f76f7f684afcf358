"""The three operations of a convolution for one lane: forward, input gradient, weight gradient.

Each has several equivalent forms: "direct" (an XLA convolution), "gemm" (im2col and one matrix product),
"blocked" (a convolution over blocks of neighbouring columns, which have more channels) and, for the weight gradient,
"rows" (one matrix product per kernel row), "pieces" and "blocked_pieces" (the direct and the blocked form for a few
images at a time, which stay in a CPU's cache). A form that an operation lacks runs as "direct".

Letters: B batch, H x W image, h x w output, I and O channels. Layout is NHWC x HWIO.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LAYOUT = ("NHWC", "HWIO", "NHWC")
FORMS = {
    "forward": ("direct", "gemm", "blocked"),
    "input_gradient": ("direct", "gemm", "blocked"),
    "weight_gradient": ("direct", "gemm", "blocked", "rows", "pieces", "blocked_pieces"),
}
PIECE = 2**20  # maximum size in bytes of both operands
Pair = tuple[int, int]


class Window(NamedTuple):
    """The static geometry of a convolution, height before width; pads are ((low, high), (low, high))."""

    image: Pair
    kernel: Pair
    strides: Pair
    pads: tuple[Pair, Pair]
    precision: Any = None
    dilation: Pair = (1, 1)

    def axes(self):
        """For height and width: image side, kernel side, stride, (low, high), dilation of the image."""
        return zip(self.image, self.kernel, self.strides, self.pads, self.dilation, strict=True)

    @property
    def out(self) -> Pair:
        """(h, w)."""
        height, width = (((n - 1) * d + 1 + lo + hi - k) // s + 1 for n, k, s, (lo, hi), d in self.axes())
        return height, width

    @property
    def backward(self) -> "Window":
        """The window in which the input gradient is a convolution of the output's cotangent."""
        sizes = zip(self.axes(), self.out, strict=True)
        top, left = ((k - 1 - lo, n - 1 - (o - 1) * s + lo) for (n, k, s, (lo, _), _), o in sizes)
        return Window(self.out, self.kernel, (1, 1), (top, left), self.precision, self.strides)


def made(operation: str, window: Window, inputs: int, outputs: int) -> tuple[Window, int]:
    """The window and the output channels of the convolution that computes an operation of a layer."""
    return (window.backward, inputs) if operation == "input_gradient" else (window, outputs)


def fits(form: str, operation: str, window: Window, inputs: int, outputs: int) -> bool:
    """Whether an operation of a layer, from I = inputs to O = outputs channels, can take a form."""
    if form in ("blocked", "blocked_pieces"):
        return block_width(*made(operation, window, inputs, outputs)) > 1
    return form in FORMS[operation]


def forward(form: str, x, w, window: Window):
    """[B, H, W, I] and [kh, kw, I, O] to [B, h, w, O]."""
    if form == "blocked":
        out = forward_in_blocks(x, w, window, range(block_width(window, w.shape[3])))
        return out.reshape(x.shape[0], *window.out, w.shape[3])
    if form == "gemm":
        return jnp.matmul(_patches(x, window), w.reshape(-1, w.shape[3]), precision=window.precision)
    return lax.conv_general_dilated(
        x, w, window.strides, window.pads, window.dilation, dimension_numbers=LAYOUT, precision=window.precision
    )


def input_gradient(form: str, dy, w, window: Window):
    """[B, h, w, O] and [kh, kw, I, O] to [B, H, W, I]."""
    if form == "gemm":
        image = jax.ShapeDtypeStruct((dy.shape[0], *window.image, w.shape[2]), dy.dtype)
        patches = jnp.matmul(dy, w.reshape(-1, w.shape[3]).T, precision=window.precision)
        return jax.linear_transpose(lambda x: _patches(x, window), image)(patches)[0]
    return forward(form, dy, w[::-1, ::-1].swapaxes(2, 3), window.backward)


def weight_gradient(form: str, x, dy, window: Window):
    """[B, H, W, I] and [B, h, w, O] to [kh, kw, I, O]."""
    shape = (*window.kernel, x.shape[3], dy.shape[3])
    if form.startswith("blocked"):
        columns = range(block_width(window, dy.shape[3]))
        dy = dy.reshape(*dy.shape[:2], -1, len(columns) * shape[3])
        return weight_gradient_in_blocks(form, x, dy, window, columns)
    if form == "gemm":
        return _inner(_patches(x, window), dy, window.precision).reshape(shape)
    if form == "rows":
        columns = jnp.concatenate(_shifts(_padded(x, window), window, 2), axis=-1)
        rows = [_inner(row, dy, window.precision) for row in _shifts(columns, window, 1)]
        return jnp.stack(rows).reshape(shape)
    return _total(form, functools.partial(_padded, window=window), x, dy, window.strides, window.precision)


def _total(form: str, *operands):
    return (_in_pieces if form.endswith("pieces") else _at_once)(*operands)


def _at_once(prepare, x, dy, strides, precision):
    """The weight gradient, as a convolution of the prepared and transposed input with the cotangent."""
    gradient = _direct(prepare(x).transpose(3, 1, 2, 0), dy.transpose(1, 2, 0, 3), precision, strides)
    return gradient.transpose(1, 2, 0, 3)


def _in_pieces(prepare, x, dy, strides, precision):
    """As `_at_once`, summed in at least float32 over equally large pieces of the batch."""
    size = _piece(x.shape[0], (x.nbytes + dy.nbytes) // x.shape[0])
    pieces = [array.reshape(-1, size, *array.shape[1:]) for array in (x, dy)]
    compute = functools.partial(_at_once, prepare, strides=strides, precision=precision)
    total = jax.eval_shape(compute, *(piece[0] for piece in pieces))

    def add(total, piece):
        return total + compute(*piece), None

    zero = jnp.zeros(total.shape, jnp.promote_types(total.dtype, jnp.float32))
    return lax.scan(add, zero, pieces)[0].astype(total.dtype)


def _piece(batch: int, image: int) -> int:
    """Images in a piece: of the divisors of the batch size that fit, the largest multiple of 4, else of 2, else of 1.

    The images of a piece are the channels of its convolution, and odd numbers of channels are slow.

    >>> _piece(100, 30_000), _piece(50, 262_144), _piece(7, 2**20)
    (20, 2, 1)
    """
    divisors = [n for n in range(1, batch + 1) if batch % n == 0 and (n == 1 or n * image <= PIECE)]
    return max(divisors, key=lambda n: (math.gcd(n, 4), n))


def depthwise(x, w, window: Window):
    """[B, H, W, C] and [kh, kw, 1, C] to [B, h, w, C], summed over the kernel's positions in at least float32."""
    rows = _shifts(_padded(x, window), window, 1)
    shifted = [patch for row in rows for patch in _shifts(row, window, 2)]
    precise = jnp.promote_types(x.dtype, jnp.float32)
    weights = w.reshape(-1, w.shape[3]).astype(precise)
    products = [patch.astype(precise) * weights[i] for i, patch in enumerate(shifted)]
    return functools.reduce(jnp.add, products).astype(x.dtype)


def _direct(x, w, precision, dilation=(1, 1)):
    form = {"rhs_dilation": dilation, "dimension_numbers": LAYOUT, "precision": precision}
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", **form)


def _inner(a, b, precision):
    """[..., M] and [..., N] to [M, N]."""
    return jnp.matmul(a.reshape(-1, a.shape[-1]).T, b.reshape(-1, b.shape[-1]), precision=precision)


def _padded(x, window: Window):
    """The padded input, without pixels that no window reaches."""
    edges = zip(window.axes(), window.out, strict=True)
    edges = [(lo, (o - 1) * s + k - lo - (n - 1) * d - 1, d - 1) for (n, k, s, (lo, _), d), o in edges]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])


def _shifts(x, window: Window, axis: int):
    """For each kernel row (axis 1) or column (axis 2), the slice of the padded input that it is applied to."""
    stride, length = window.strides[axis - 1], window.out[axis - 1]
    starts = range(window.kernel[axis - 1])
    return [lax.slice_in_dim(x, i, i + (length - 1) * stride + 1, stride, axis) for i in starts]


def _patches(x, window: Window):
    """[B, H, W, I] to [B, h, w, kh * kw * I]."""
    rows = _shifts(_padded(x, window), window, 1)
    return jnp.concatenate([patch for row in rows for patch in _shifts(row, window, 2)], axis=-1)


# Blocks: n neighbouring columns of the image become one column of n * I channels, and the kernel becomes a
# banded one from n * I to n * O channels. The reshapes cost nothing.


def forward_in_blocks(x, w, window: Window, columns: Sequence[int]):
    """[B, H, W, I] and [kh, kw, I, O] to [B, h, w / n, n * O], a block's n columns in the order of `columns`."""
    return _direct(_in_blocks(x, window, len(columns)), _spread(w, columns), window.precision)


def weight_gradient_in_blocks(form: str, x, dy, window: Window, columns: Sequence[int]):
    """[B, H, W, I] and [B, h, w / n, n * O], ordered by `columns`, to [kh, kw, I, O]; "blocked" or "blocked_pieces"."""
    blocks = functools.partial(_in_blocks, window=window, width=len(columns))
    shape = (*window.kernel, x.shape[3], dy.shape[3] // len(columns))
    return _gather(_total(form, blocks, x, dy, (1, 1), window.precision), columns, shape)


def block_width(window: Window, channels: int) -> int:
    """Columns in a block: up to 4, with at most 32 channels and twice the arithmetic; 1 if no block fits."""
    if window.strides != (1, 1) or window.dilation != (1, 1):
        return 1
    kernel = window.kernel[1]
    widths = (n for n in (4, 2) if n * channels <= 32 and window.out[1] % n == 0)
    return next((n for n in widths if n * _reach(kernel, n) <= 2 * kernel), 1)


def _reach(kernel: int, width: int) -> int:
    """Number of column blocks that the windows of one output block touch."""
    return -(-(width + kernel - 1) // width)


@functools.cache
def _band(kernel: int, width: int) -> np.ndarray:
    """[reach, n, n, kw], 1 where kernel column k connects input column (q, r) to output column t."""
    q, r, t, k = np.ogrid[: _reach(kernel, width), :width, :width, :kernel]
    return (q * width + r - t == k).astype(np.float32)


def _in_blocks(x, window: Window, width: int):
    """[B, H, W, I] to the padded [B, H', W' / n, n * I]."""
    x = _padded(x, window)
    columns = (window.out[1] // width + _reach(window.kernel[1], width) - 1) * width
    x = jnp.pad(x, ((0, 0), (0, 0), (0, columns - x.shape[2]), (0, 0)))
    return x.reshape(*x.shape[:2], columns // width, width * x.shape[3])


def _spread(w, columns: Sequence[int]):
    """[kh, kw, I, O] to the banded [kh, reach, n * I, n * O], its output columns ordered."""
    width = len(columns)
    band = _band(w.shape[1], width)[:, :, list(columns)].astype(w.dtype)
    spread = jnp.einsum("qrtk,hkio->hqrito", band, w, precision="highest")
    return spread.reshape(w.shape[0], band.shape[0], width * w.shape[2], width * w.shape[3])


def _gather(gradient, columns: Sequence[int], shape: tuple[int, int, int, int]):
    """The adjoint of `_spread`."""
    kh, kw, inputs, outputs = shape
    width = len(columns)
    band = _band(kw, width)[:, :, list(columns)].astype(gradient.dtype)
    gradient = gradient.reshape(kh, band.shape[0], width, inputs, width, outputs)
    return jnp.einsum("qrtk,hqrito->hkio", band, gradient, precision="highest")
