"""Small convolutional networks: two 5x5 convolutions with ReLU and 2x2 max-pool, then linear layers."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from fedjax_pcdd.models.layers import Linear
from fedjax_pcdd.models.pooled_convolution import PooledConv


class CNN(nn.Module):
    """[B, H, W, channels] to [B, hidden[-1]].

    Attributes:
      channels: of the two convolutions.
      hidden: widths of the linear layers, each with ReLU.
      padding: of the convolutions.
      dtype: of the computation; None promotes.
      param_dtype: of the parameters.
    """

    channels: tuple[int, int]
    hidden: tuple[int, ...]
    padding: str
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, *, train: bool = False, mask=None):
        """Runs [B, H, W, channels]; train and mask change nothing."""
        del train, mask
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        for i, width in enumerate(self.channels, 1):
            x = PooledConv(width, 5, padding=self.padding, name=f"conv{i}", **types)(x)
            self.sow("intermediates", "layers", x)
        x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)  # channels first, as published weights are ordered
        for i, width in enumerate(self.hidden, 1):
            x = nn.relu(Linear(width, name=f"fc{i}", **types)(x))
            self.sow("intermediates", "layers", x)
        return x


def simple_cnn(**types: Any) -> CNN:
    """The CNN of MOON and FedRL: 62 006 parameters on 32x32x3 with 10 classes."""
    return CNN((6, 16), (120, 84), "VALID", **types)


def fedrl_cnn(**types: Any) -> CNN:
    """The CNN of FedRL on MNIST and Fashion-MNIST, sizes inferred: 34 622 parameters on 28x28x1 with 10 classes."""
    return CNN((6, 16), (120,), "VALID", **types)


def mcmahan_cnn(**types: Any) -> CNN:
    """The CNN of McMahan et al., AISTATS 2017: 1 663 370 parameters on 28x28x1 with 10 classes."""
    return CNN((32, 64), (512,), "SAME", **types)
