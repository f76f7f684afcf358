"""The layers that all models are built from, and the fields that modules share.

Letters: B batch, C channels, H x W image, h x w output. Initialisation and batch norm follow the papers'
reference framework, not Flax's defaults.
"""

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.nn.initializers import Initializer

from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.models.convolution import client_conv

_EPSILON = 1e-5


def linear_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Uniform within +-1 / sqrt(fan_in) for a kernel [..., in, out]; fan_in is the product of all axes but the last."""
    return linear_bias_init(math.prod(shape[:-1]))(key, shape, dtype)


def linear_bias_init(fan_in: int) -> Initializer:
    """Uniform within +-1 / sqrt(fan_in), for the bias of a layer with that many inputs to each output."""

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        del out_sharding
        return jax.random.uniform(key, shape, dtype, -(fan_in**-0.5), fan_in**-0.5)

    return init


def conv_init(key: jax.Array, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Normal with std sqrt(2 / fan_out) for a kernel [kh, kw, in, out], fan_out = kh * kw * out."""
    fan_out = shape[0] * shape[1] * shape[3]
    return math.sqrt(2 / fan_out) * jax.random.normal(key, shape, dtype)


KERNEL_INITS = {"uniform": linear_init, "fan_out": conv_init}
"""Kernel initialisers for networks with a field `kernel_init`: the reference framework's, or that of He et al."""


class Typed(nn.Module, kw_only=True):
    """Fields of every module that computes; all are keyword-only.

    Attributes:
      dtype: of the computation; None promotes.
      param_dtype: of the parameters.
    """

    dtype: Any = None
    param_dtype: Any = jnp.float32

    @property
    def types(self) -> dict[str, Any]:
        """Both types as keyword arguments for inner layers."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}

    def kept(self, x: jax.Array) -> jax.Array:
        """Return x unchanged, and record it as one of the layers that `classifier.layers` returns."""
        self.sow("intermediates", "layers", x)
        return x


class Normalised(Typed, kw_only=True):
    """A module with normalisation layers: `norm` is "batch" or "group".

    It is called as `module(x, train=..., mask=...)`: the mask [B] is 1 for samples that enter batch statistics.
    """

    norm: str = "batch"

    @property
    def shared(self) -> dict[str, Any]:
        """Norm and types as keyword arguments for inner blocks."""
        return {"norm": self.norm, **self.types}


class Linear(Typed):
    """A dense layer: [..., in] to [..., features]; by default its kernel is initialised by `linear_init`."""

    features: int
    use_bias: bool = True
    kernel_init: Callable[..., jax.Array] = linear_init
    bias_init: Callable[..., jax.Array] | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x, kernel, bias = _weights(self, x, (x.shape[-1], self.features), self.kernel_init, self.bias_init)
        return x @ kernel if bias is None else x @ kernel + bias


class Conv(Typed):
    """A convolution by `client_conv`: [B, H, W, in] to [B, h, w, features].

    Attributes:
      features: output channels.
      kernel_size: side of the square kernel.
      stride: of both sides.
      padding: "SAME", "VALID", the number of zeros at each edge, or the numbers before and after, for both axes.
      use_bias: bias initialised as `linear_bias_init`.
      groups: of channels, each convolved separately; as many as input channels for a depthwise convolution.
      kernel_init: `linear_init` or `conv_init`.
    """

    features: int
    kernel_size: int
    stride: int = 1
    padding: str | int | tuple[int, int] = "SAME"
    use_bias: bool = True
    groups: int = 1
    kernel_init: Callable[..., jax.Array] = linear_init

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (self.kernel_size, self.kernel_size, x.shape[-1] // self.groups, self.features)
        return self.convolve(*_weights(self, x, shape, self.kernel_init))

    @property
    def geometry(self) -> tuple[tuple[int, int], Any]:
        """Strides and padding, as `client_conv` takes them."""
        padding = (self.padding, self.padding) if isinstance(self.padding, int) else self.padding
        return (self.stride, self.stride), padding if isinstance(padding, str) else (padding, padding)

    def convolve(self, x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
        """The layer as a function of its parameters."""
        strides, padding = self.geometry
        out = client_conv(x, kernel, strides, padding, feature_group_count=self.groups)
        return out if bias is None else out + bias


def _weights(layer: Any, x: jax.Array, shape: tuple[int, ...], kernel_init: Callable, bias_init: Any = None) -> Any:
    """The input, the kernel [..., in, out] of this shape, and the bias [out] or None, all promoted to one dtype."""
    kernel = _param(layer, "kernel", kernel_init, shape)
    bias_init = bias_init or linear_bias_init(math.prod(shape[:-1]))
    bias = _param(layer, "bias", bias_init, shape[-1:]) if layer.use_bias else None
    return promote_dtype(x, kernel, bias, dtype=layer.dtype)


def _param(layer: Any, name: str, init: Callable, shape: tuple[int, ...]) -> jax.Array:
    """A parameter. If it exists, Flax traces the initialiser only for its shape; zeros are cheaper to trace."""
    if layer.has_variable("params", name):
        init = nn.initializers.zeros
    return layer.param(name, init, shape, layer.param_dtype)


class BatchNorm(Typed):
    """Batch norm as in the reference framework: [B, ..., C] to the same shape; the mask [B] is 1 for valid samples.

    Training normalises by the biased variance of the batch; the running variance uses the unbiased one, and
    new = 0.9 old + 0.1 batch. The statistics, at least float32, are the collection
    "batch_stats" with `mean` and `var` [C]. Masked samples do not enter them and leave as the bias; a batch without a
    valid sample leaves the running statistics unchanged.

    Attributes:
      epsilon: added to the variance.
      momentum: share of the batch in the running statistics.
    """

    epsilon: float = _EPSILON
    momentum: float = 0.1

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        scale, bias, out_dtype = _affine(self, x)
        precise = jnp.promote_types(jnp.float32, self.param_dtype)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, scale.shape, precise)
        running_var = self.variable("batch_stats", "var", jnp.ones, scale.shape, precise)
        x = x.astype(jnp.promote_types(precise, x.dtype))
        mean, var = running_mean.value, running_var.value
        if train and not self.is_initializing():
            mean, var, count = _moments(x, mask)
            unbiased = var * count / jnp.maximum(count - 1, 1)
            for running, batch in ((running_mean, mean), (running_var, unbiased)):
                updated = (1 - self.momentum) * running.value + self.momentum * batch
                running.value = jnp.where(count > 0, updated, running.value).astype(precise)
            if mask is not None:
                # With one valid element the variance is 0: what is masked would grow by 316 in every layer, to inf.
                x = jnp.where(_by_row(mask, x) > 0, x, mean)
        return ((x - mean) * (jax.lax.rsqrt(var + self.epsilon) * scale) + bias).astype(out_dtype)


def _affine(layer: Typed, x: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
    """Scale [C] and bias [C] of a normalisation layer, and the dtype of its result."""
    scale = layer.param("scale", nn.initializers.ones, x.shape[-1:], layer.param_dtype)
    bias = layer.param("bias", nn.initializers.zeros, x.shape[-1:], layer.param_dtype)
    return scale, bias, layer.dtype or jnp.promote_types(x.dtype, layer.param_dtype)


def _moments(x: jax.Array, mask: jax.Array | None):
    """Mean [C], biased variance [C] and number of valid elements per channel of [B, ..., C]."""
    axes = tuple(range(x.ndim - 1))
    weights = jnp.ones(x.shape[0], x.dtype) if mask is None else mask.astype(x.dtype)
    count = weights.sum() * math.prod(x.shape[1:-1])
    share = _by_row(weights / jnp.maximum(count, 1), x)
    mean = (share * x).sum(axes)
    return mean, (share * jnp.square(x - mean)).sum(axes), count


def _by_row(values: jax.Array, x: jax.Array) -> jax.Array:
    """Values [B] with as many axes as x [B, ...]."""
    return values.reshape(-1, *[1] * (x.ndim - 1))


class GroupNorm(Typed):
    """Group norm, each sample by itself: [B, ..., C] to the same; the most groups, up to 32, that divide C."""

    @nn.compact
    def __call__(self, x, *, train: bool = False, mask=None):
        del train, mask
        scale, bias, out_dtype = _affine(self, x)
        channels = x.shape[-1]
        groups = next(g for g in range(min(32, channels), 0, -1) if channels % g == 0)
        grouped = x.astype(jnp.promote_types(jnp.float32, x.dtype)).reshape(*x.shape[:-1], groups, -1)
        axes = (*range(1, x.ndim - 1), x.ndim)
        centred = grouped - grouped.mean(axes, keepdims=True)
        var = jnp.square(centred).mean(axes, keepdims=True)
        normal = (centred * jax.lax.rsqrt(var + _EPSILON)).reshape(x.shape)
        return (normal * scale + bias).astype(out_dtype)


_NORMS = {"batch": BatchNorm, "group": GroupNorm, "slow_batch": partial(BatchNorm, epsilon=1e-3, momentum=0.01)}


def norm(kind: str) -> Callable[..., BatchNorm | GroupNorm]:
    """The norm layer "batch", "group", or "slow_batch" (of networks from TensorFlow); UserError for other names."""
    if kind not in _NORMS:
        raise UserError(f"Unknown normalisation '{kind}': {nearest(kind, _NORMS)}")
    return _NORMS[kind]


class ConvNorm(Normalised):
    """Convolution, norm, activation: [B, H, W, in] to [B, h, w, features], h = ceil(H / stride).

    Attributes:
      features: output channels.
      kernel: odd side of the kernel.
      stride: of both sides.
      padding: as for `Conv`; None for half of the kernel at each edge.
      groups: of channels, each convolved separately.
      activation: None for no activation.
      use_bias: whether the convolution has a bias.
      kernel_init: `linear_init` or `conv_init`.
    """

    features: int
    kernel: int = 1
    stride: int = 1
    padding: int | tuple[int, int] | None = None
    groups: int = 1
    activation: Callable[[jax.Array], jax.Array] | None = nn.relu
    use_bias: bool = False
    kernel_init: Callable[..., jax.Array] = linear_init

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        padding = self.kernel // 2 if self.padding is None else self.padding
        conv = Conv(
            self.features, self.kernel, self.stride, padding, use_bias=self.use_bias, groups=self.groups,
            kernel_init=self.kernel_init, name="conv", **self.types,
        )  # fmt: skip
        x = norm(self.norm)(name="norm", **self.types)(conv(x), train=train, mask=mask)
        return x if self.activation is None else self.activation(x)


def global_average(x: jax.Array) -> jax.Array:
    """[B, H, W, C] to [B, C], in at least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)).mean((1, 2))


def max_pool(x: jax.Array, window: int, stride: int | None = None, padding: int = 0) -> jax.Array:
    """The maximum of each window: [B, H, W, C] to [B, h, w, C], h = (H + 2 padding - window) // stride + 1.

    Computed as the maximum of strided slices; its gradient is many times faster than that of a reduction over windows.

    Args:
      x: [B, H, W, C].
      window: side of the windows.
      stride: between windows, None for `window`; pixels left over at the end are dropped.
      padding: pixels at each edge, which never are the maximum.

    >>> max_pool(jnp.arange(9.0).reshape(1, 3, 3, 1), 2)
    Array([[[[4.]]]], dtype=float32)
    """
    return functools.reduce(jnp.maximum, _window_slices(x, window, stride or window, padding, -jnp.inf))


def average_pool(x: jax.Array, window: int, stride: int, padding: int) -> jax.Array:
    """The mean of each window, with the zeros of the padding counted; shapes as in `max_pool`."""
    return functools.reduce(jnp.add, _window_slices(x, window, stride, padding, 0)) / window**2


def _window_slices(x: jax.Array, window: int, stride: int, padding: int, fill: float) -> list[jax.Array]:
    """For each position in a window, the pixels of all windows at it: window ** 2 arrays [B, h, w, C]."""
    if padding:
        x = jnp.pad(x, ((0, 0), (padding,) * 2, (padding,) * 2, (0, 0)), constant_values=fill)
    height, width = (((side - window) // stride + 1) * stride for side in x.shape[1:3])
    positions = [(i, j) for i in range(window) for j in range(window)]
    return [x[:, i : i + height : stride, j : j + width : stride] for i, j in positions]
