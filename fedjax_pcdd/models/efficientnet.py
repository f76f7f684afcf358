"""EfficientNet-B0, with a stem of stride 1 for images of about 32x32 or of stride 2 for larger ones.

Tan and Le, "EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks", ICML 2019, table 1. In the form
of the FCCL paper's code it has no convolution after the last stage, hence 320 features, and a dropout of 0.2 before the
head; kernels start uniform. With 10 classes it has 3 598 598 trainable parameters. The code's 3 599 686 include 1 088
more, of a 1x1 convolution with norm in the first block that is never called. Its stochastic depth ("drop-connect") has
no effect, as the counter by which its rate grows is never advanced: `drop_connect` is 0 unless 0.2 is requested.
The form of other papers has a last convolution of 1280 channels, kernels of `conv_init`, and no dropout. The form in
the benchmark FLamby has dropout 0.2, drop-connect 0.2, norms with epsilon 1e-3 and momentum 0.01, and TensorFlow's
padding for images of 224 x 224, whatever their side: with a stride of 2, one zero fewer before the image.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn

from fedjax_pcdd.models.layers import KERNEL_INITS, ConvNorm, Linear, Normalised, Typed, global_average


class Stage(NamedTuple):
    """Blocks of one stage; the stride is that of the first block."""

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


def _padding(kernel: int, stride: int, uneven: bool) -> tuple[int, int]:
    """Zeros before and after an image: half of the kernel, or TensorFlow's padding of sides divisible by the stride.

    >>> _padding(5, 2, False), _padding(5, 2, True), _padding(5, 1, True)
    ((2, 2), (1, 2), (2, 2))
    """
    total = kernel - stride if uneven else 2 * (kernel // 2)
    return total // 2, total - total // 2


class SqueezeExcite(Typed):
    """Scales each channel by a gate in (0, 1) computed from the means of all: [B, H, W, C] to the same."""

    squeezed: int

    @nn.compact
    def __call__(self, x):
        hidden = nn.silu(Linear(self.squeezed, name="squeeze", **self.types)(x.mean((1, 2))))
        gate = nn.sigmoid(Linear(x.shape[-1], name="excite", **self.types)(hidden))
        return x * gate[:, None, None, :]


class InvertedBlock(Normalised):
    """Expansion, depthwise convolution, squeeze and excitation, projection; plus the input if the shape is kept."""

    stage: Stage  # with the stride of this block
    kernel_init: str = "fan_out"
    drop: float = 0.0  # probability that a sample keeps only its input
    uneven: bool = False

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        expand, kernel, stride, features, _ = self.stage
        inputs, wide = x.shape[-1], x.shape[-1] * expand

        def conv(y, name, features, **form):
            form = {"activation": nn.silu, "kernel_init": KERNEL_INITS[self.kernel_init], **form, **self.shared}
            return ConvNorm(features, name=name, **form)(y, train=train, mask=mask)

        y = conv(x, "expand", wide) if expand > 1 else x
        padding = _padding(kernel, stride, self.uneven)
        y = conv(y, "depthwise", wide, kernel=kernel, stride=stride, padding=padding, groups=wide)
        y = SqueezeExcite(inputs // 4, name="gate", **self.types)(y)
        y = conv(y, "project", features, activation=None)
        if x.shape != y.shape:
            return y
        return x + nn.Dropout(self.drop, (1, 2, 3), not train or not self.has_rng("dropout"))(y)


class EfficientNet(Normalised):
    """[B, H, W, channels] to [B, D], the global average in at least float32, or its projection.

    Attributes:
      stages: of inverted blocks.
      stem_stride: 1 for small images.
      last: channels of the 1x1 convolution before the average; None leaves it out.
      projection: width of a linear layer after the average, 640 in the FedMR paper's ISIC model; None leaves it out.
      dropout: rate for the features in training.
      drop_connect: final rate of stochastic depth; block j of n has j / n of it.
      kernel_init: of `KERNEL_INITS`.
      uneven: pad as TensorFlow does, see `_padding`.
    """

    stages: Sequence[Stage] = B0
    stem_stride: int = 1
    last: int | None = 1280
    projection: int | None = None
    dropout: float = 0.0
    drop_connect: float = 0.0
    kernel_init: str = "fan_out"
    uneven: bool = False

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        conv_options = {"activation": nn.silu, "kernel_init": KERNEL_INITS[self.kernel_init], **self.shared}
        block_options = {"kernel_init": self.kernel_init, "uneven": self.uneven, **self.shared}
        padding = _padding(3, self.stem_stride, self.uneven)
        stem = ConvNorm(32, 3, self.stem_stride, padding, name="stem", **conv_options)
        x = self.kept(stem(x, train=train, mask=mask))
        total, index = sum(stage.blocks for stage in self.stages), 0
        for s, stage in enumerate(self.stages, 1):
            for i in range(stage.blocks):
                block_stage, drop = stage._replace(stride=1 if i else stage.stride), self.drop_connect * index / total
                block = InvertedBlock(block_stage, drop=drop, name=f"stage{s}_block{i + 1}", **block_options)
                x, index = block(x, train=train, mask=mask), index + 1
            x = self.kept(x)
        if self.last is not None:
            x = ConvNorm(self.last, name="last", **conv_options)(x, train=train, mask=mask)
        x = self.kept(global_average(x))
        x = nn.Dropout(self.dropout, deterministic=not train or not self.has_rng("dropout"))(x)
        if self.projection is not None:
            x = self.kept(Linear(self.projection, name="projection", **self.types)(x))
        return x


def flamby_efficientnet(norm: str = "batch", **types: Any) -> EfficientNet:
    """The benchmark FLamby's network for Fed-ISIC2019; `types` are further arguments of `EfficientNet`."""
    kind = "slow_batch" if norm == "batch" else norm
    return EfficientNet(stem_stride=2, dropout=0.2, drop_connect=0.2, uneven=True, norm=kind, **types)
