"""Residual networks for images of about 32x32: a 3x3 stem of stride 1, no max-pool.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016; methods sheet, section 4.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from fedjax_pcdd.models.layers import Conv, conv_init, norm


class BasicBlock(nn.Module):
    """conv3x3 - norm - ReLU - conv3x3 - norm, plus shortcut, ReLU: [B, H, W, in] to [B, h, w, features].

    h = ceil(H / stride). The shortcut is a 1x1 convolution with norm where the shape changes.
    """

    features: int
    stride: int = 1
    norm: str = "batch"
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        """Runs one block; mask [B] is 1 for samples that enter batch statistics."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}

        def conv_norm(x, size, stride, name):
            out = Conv(self.features, size, stride, size // 2, False, conv_init, name=f"conv{name}", **types)(x)
            return norm(self.norm)(name=f"norm{name}", **types)(out, train=train, mask=mask)

        y = nn.relu(conv_norm(x, 3, self.stride, "1"))
        y = conv_norm(y, 3, 1, "2")
        if x.shape != y.shape:
            x = conv_norm(x, 1, self.stride, "_shortcut")
        return nn.relu(y + x)


class ResNet(nn.Module):
    """[B, H, W, channels] to [B, width * 2 ** (len(blocks) - 1)], the global average in at least float32.

    Attributes:
      blocks: basic blocks of each stage; a stage after the first halves the sides and doubles the channels.
      width: channels of the first stage; 64 with blocks (2, 2, 2, 2) is ResNet18.
      norm: "batch" or "group".
      dtype: of the computation; None promotes.
      param_dtype: of the parameters.
    """

    blocks: Sequence[int] = (2, 2, 2, 2)
    width: int = 64
    norm: str = "batch"
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        """Runs [B, H, W, channels]; mask [B] is 1 for samples that enter batch statistics."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        x = Conv(self.width, 3, 1, 1, False, conv_init, name="stem", **types)(x)
        x = nn.relu(norm(self.norm)(name="stem_norm", **types)(x, train=train, mask=mask))
        for stage, count in enumerate(self.blocks):
            for i in range(count):
                stride = 2 if stage and i == 0 else 1
                name = f"stage{stage + 1}_block{i + 1}"
                block = BasicBlock(self.width * 2**stage, stride, self.norm, name=name, **types)
                x = block(x, train=train, mask=mask)
        return x.astype(jnp.promote_types(x.dtype, jnp.float32)).mean((1, 2))
