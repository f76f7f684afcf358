"""What the convolutional backbones share: their fields, and a convolution with norm and activation.

Letters: B batch, H x W image, h x w output.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pcdd.models.layers import Conv, linear_init, norm


class Typed(nn.Module, kw_only=True):
    """Fields of every module that computes; all are given by keyword.

    Attributes:
      dtype: of the computation; None promotes.
      param_dtype: of the parameters.
    """

    dtype: Any = None
    param_dtype: Any = jnp.float32

    @property
    def types(self) -> dict[str, Any]:
        """The two types, for the layers inside."""
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


class Normalised(Typed, kw_only=True):
    """A module with normalisation layers.

    Attributes:
      norm: "batch" or "group".
    """

    norm: str = "batch"

    @property
    def shared(self) -> dict[str, Any]:
        """Norm and types, for the blocks inside."""
        return {"norm": self.norm, **self.types}


class ConvNorm(Normalised):
    """Convolution, norm, activation: [B, H, W, in] to [B, h, w, features], h = ceil(H / stride).

    Attributes:
      features: output channels.
      kernel: odd side of the kernel, padded by half of it.
      stride: of both sides.
      groups: of channels, each convolved by itself.
      activation: None for none.
      use_bias: of the convolution.
      kernel_init: `linear_init` or `conv_init`.
    """

    features: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    activation: Callable[[jax.Array], jax.Array] | None = nn.relu
    use_bias: bool = False
    kernel_init: Callable[..., jax.Array] = linear_init

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        """Runs the three; mask [B] is 1 for samples that enter batch statistics."""
        conv = Conv(
            self.features, self.kernel, self.stride, self.kernel // 2, use_bias=self.use_bias, groups=self.groups,
            kernel_init=self.kernel_init, name="conv", **self.types,
        )  # fmt: skip
        x = norm(self.norm)(name="norm", **self.types)(conv(x), train=train, mask=mask)
        return x if self.activation is None else self.activation(x)


def global_average(x: jax.Array) -> jax.Array:
    """[B, H, W, C] to [B, C], in at least float32."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32)).mean((1, 2))
