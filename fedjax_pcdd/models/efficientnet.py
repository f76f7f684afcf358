"""EfficientNet-B0, with a stem of stride 1 for images of about 32x32 or of stride 2 for larger ones.

Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", ICML 2019, table 1; methods
sheet, section 4. Without the original's dropout and stochastic depth, of which the federated papers do not speak.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from fedjax_pcdd.models.layers import Conv, Linear, conv_init, norm


class Stage(NamedTuple):
    """Blocks of one stage; the first has the stride."""

    expand: int
    kernel: int
    stride: int
    features: int
    blocks: int


B0 = (
    Stage(1, 3, 1, 16, 1),
    Stage(6, 3, 2, 24, 2),
    Stage(6, 5, 2, 40, 2),
    Stage(6, 3, 2, 80, 3),
    Stage(6, 5, 1, 112, 3),
    Stage(6, 5, 2, 192, 4),
    Stage(6, 3, 1, 320, 1),
)
"""The stages of EfficientNet-B0."""


class ConvNorm(nn.Module):
    """A convolution without bias, norm, and SiLU if it is `active`: [B, H, W, in] to [B, h, w, features]."""

    features: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    active: bool = True
    norm: str = "batch"
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        """Runs the three; mask [B] is 1 for samples that enter batch statistics."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        conv = Conv(
            self.features, self.kernel, self.stride, self.kernel // 2, use_bias=False, groups=self.groups,
            kernel_init=conv_init, name="conv", **types,
        )  # fmt: skip
        x = norm(self.norm)(name="norm", **types)(conv(x), train=train, mask=mask)
        return nn.silu(x) if self.active else x


class SqueezeExcite(nn.Module):
    """Scales each channel by a gate in (0, 1) computed from the means of all: [B, H, W, C] to the same."""

    squeezed: int
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x):
        """[B, H, W, C] to [B, H, W, C]."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        hidden = nn.silu(Linear(self.squeezed, name="squeeze", **types)(x.mean((1, 2))))
        gate = nn.sigmoid(Linear(x.shape[-1], name="excite", **types)(hidden))
        return x * gate[:, None, None, :]


class InvertedBlock(nn.Module):
    """Expansion, depthwise convolution, squeeze and excitation, projection; plus the input where the shape stays.

    Attributes:
      stage: with the stride of this block.
    """

    stage: Stage
    norm: str = "batch"
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        """Runs one block; mask [B] is 1 for samples that enter batch statistics."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        expand, kernel, stride, features, _ = self.stage
        inputs, wide = x.shape[-1], x.shape[-1] * expand

        def conv(y, name, features, **form):
            layer = ConvNorm(features, norm=self.norm, name=name, **form, **types)
            return layer(y, train=train, mask=mask)

        y = conv(x, "expand", wide) if expand > 1 else x
        y = conv(y, "depthwise", wide, kernel=kernel, stride=stride, groups=wide)
        y = SqueezeExcite(inputs // 4, name="gate", **types)(y)
        y = conv(y, "project", features, active=False)
        return x + y if x.shape == y.shape else y


class EfficientNet(nn.Module):
    """[B, H, W, channels] to [B, last], the global average in at least float32, or to [B, projection].

    Attributes:
      stages: of inverted blocks.
      stem_stride: 1 for small images.
      last: channels of the 1x1 convolution before the average.
      projection: width of a linear layer after it, 640 in the FedMR paper's ISIC model; None for none.
      norm: "batch" or "group".
      dtype: of the computation; None promotes.
      param_dtype: of the parameters.
    """

    stages: Sequence[Stage] = B0
    stem_stride: int = 1
    last: int = 1280
    projection: int | None = None
    norm: str = "batch"
    dtype: Any = None
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        """Runs [B, H, W, channels]; mask [B] is 1 for samples that enter batch statistics."""
        types = {"dtype": self.dtype, "param_dtype": self.param_dtype}
        ends = {"norm": self.norm, **types}
        x = ConvNorm(32, 3, self.stem_stride, name="stem", **ends)(x, train=train, mask=mask)
        self.sow("intermediates", "layers", x)
        for s, stage in enumerate(self.stages, 1):
            for i in range(stage.blocks):
                block = stage._replace(stride=1 if i else stage.stride)
                x = InvertedBlock(block, name=f"stage{s}_block{i + 1}", **ends)(x, train=train, mask=mask)
            self.sow("intermediates", "layers", x)
        x = ConvNorm(self.last, name="last", **ends)(x, train=train, mask=mask)
        x = x.astype(jnp.promote_types(x.dtype, jnp.float32)).mean((1, 2))
        self.sow("intermediates", "layers", x)
        if self.projection is not None:
            x = Linear(self.projection, name="projection", **types)(x)
            self.sow("intermediates", "layers", x)
        return x
