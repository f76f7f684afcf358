"""EfficientNet-B0, with a stem of stride 1 for images of about 32x32 or of stride 2 for larger ones.

Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", ICML 2019, table 1; methods
sheet, section 4. Without the original's dropout and stochastic depth, of which the federated papers do not speak.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn

from fedjax_pcdd.models.blocks import ConvNorm, Normalised, Typed, global_average
from fedjax_pcdd.models.layers import Linear, conv_init


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


def _conv(features: int, name: str, **form: Any) -> ConvNorm:
    """A convolution with norm and SiLU, unless the form says otherwise."""
    return ConvNorm(features, name=name, **{"activation": nn.silu, "kernel_init": conv_init, **form})


class SqueezeExcite(Typed):
    """Scales each channel by a gate in (0, 1) computed from the means of all: [B, H, W, C] to the same."""

    squeezed: int

    @nn.compact
    def __call__(self, x):
        """[B, H, W, C] to [B, H, W, C]."""
        hidden = nn.silu(Linear(self.squeezed, name="squeeze", **self.types)(x.mean((1, 2))))
        gate = nn.sigmoid(Linear(x.shape[-1], name="excite", **self.types)(hidden))
        return x * gate[:, None, None, :]


class InvertedBlock(Normalised):
    """Expansion, depthwise convolution, squeeze and excitation, projection; plus the input where the shape stays.

    Attributes:
      stage: with the stride of this block.
    """

    stage: Stage

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        """Runs one block; mask [B] is 1 for samples that enter batch statistics."""
        expand, kernel, stride, features, _ = self.stage
        inputs, wide = x.shape[-1], x.shape[-1] * expand

        def conv(y, name, features, **form):
            return _conv(features, name, **form, **self.shared)(y, train=train, mask=mask)

        y = conv(x, "expand", wide) if expand > 1 else x
        y = conv(y, "depthwise", wide, kernel=kernel, stride=stride, groups=wide)
        y = SqueezeExcite(inputs // 4, name="gate", **self.types)(y)
        y = conv(y, "project", features, activation=None)
        return x + y if x.shape == y.shape else y


class EfficientNet(Normalised):
    """[B, H, W, channels] to [B, last], the global average in at least float32, or to [B, projection].

    Attributes:
      stages: of inverted blocks.
      stem_stride: 1 for small images.
      last: channels of the 1x1 convolution before the average.
      projection: width of a linear layer after it, 640 in the FedMR paper's ISIC model; None for none.
    """

    stages: Sequence[Stage] = B0
    stem_stride: int = 1
    last: int = 1280
    projection: int | None = None

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        """Runs [B, H, W, channels]; mask [B] is 1 for samples that enter batch statistics."""
        x = _conv(32, "stem", kernel=3, stride=self.stem_stride, **self.shared)(x, train=train, mask=mask)
        self.sow("intermediates", "layers", x)
        for s, stage in enumerate(self.stages, 1):
            for i in range(stage.blocks):
                block = stage._replace(stride=1 if i else stage.stride)
                x = InvertedBlock(block, name=f"stage{s}_block{i + 1}", **self.shared)(x, train=train, mask=mask)
            self.sow("intermediates", "layers", x)
        x = _conv(self.last, "last", **self.shared)(x, train=train, mask=mask)
        x = global_average(x)
        self.sow("intermediates", "layers", x)
        if self.projection is not None:
            x = Linear(self.projection, name="projection", **self.types)(x)
            self.sow("intermediates", "layers", x)
        return x
