"""Multi-layer perceptron. With one hidden layer of 200 on 28x28 digits: 159 010 parameters."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from fedjax_pcdd.models.layers import Linear


class MLP(nn.Module):
    """Flattens [B, ...] and applies linear layers with ReLU; gives [B, hidden[-1]].

    Attributes:
      hidden: widths of the layers.
      dtype: of the computation; None promotes.
      param_dtype: of the parameters.
    """

    hidden: tuple[int, ...] = (200,)
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, *, train: bool = False, mask=None):
        """Runs [B, ...]; train and mask change nothing."""
        del train, mask
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(self.hidden, 1):
            x = nn.relu(Linear(width, dtype=self.dtype, param_dtype=self.param_dtype, name=f"fc{i}")(x))
            self.sow("intermediates", "layers", x)
        return x
