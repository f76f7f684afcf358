"""MobileNetV2 for images of about 32x32.

Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018, table 2, in the form of the FCCL
paper's code: the stem and the stage of 24 channels have stride 1, ReLU takes the place of ReLU6, the first block
expands too (by 1), and every block of stride 1 has a shortcut, a 1x1 convolution with norm where channels change.

Kernels start uniform within +-1 / sqrt(fan_in), as in the reference framework. Trainable parameters for 3 channels and
10 classes (those of a 1x1 or 3x3 convolution include the 2 C of its norm):

    stem 928; stages 2 528, 14 400, 39 696, 183 872, 309 504, 795 264, 525 760; last 412 160; head 12 810
    together 2 296 922
"""

from collections.abc import Sequence

import flax.linen as nn

from fedjax_pcdd.models.layers import ConvNorm, Normalised, global_average

V2 = ((1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""The stages of MobileNetV2 for small images: expansion, output channels, blocks, stride of the first block."""


class InvertedBlock(Normalised):
    """conv1x1 - depthwise conv3x3 - conv1x1 with norms: [B, H, W, in] to [B, h, w, features], h = ceil(H / stride).

    ReLU follows the first two. With stride 1 the input is added.

    Attributes:
      features: output channels.
      expand: factor of the inner channels over the input's.
      stride: of the depthwise convolution.
    """

    features: int
    expand: int
    stride: int = 1

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        wide = self.expand * x.shape[-1]

        def conv(x, name, features, **options):
            return ConvNorm(features, name=name, **options, **self.shared)(x, train=train, mask=mask)

        y = conv(x, "expand", wide)
        y = conv(y, "depthwise", wide, kernel=3, stride=self.stride, groups=wide)
        y = conv(y, "project", self.features, activation=None)
        if self.stride != 1:
            return y
        if x.shape != y.shape:
            x = conv(x, "shortcut", self.features, activation=None)
        return x + y


class MobileNet(Normalised):
    """[B, H, W, channels] to [B, last], the global average in at least float32.

    Attributes:
      stages: of inverted blocks, as in `V2`.
      stem: channels of the first convolution.
      last: channels of the 1x1 convolution before the average.
    """

    stages: Sequence[tuple[int, int, int, int]] = V2
    stem: int = 32
    last: int = 1280

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        x = self.kept(ConvNorm(self.stem, 3, name="stem", **self.shared)(x, train=train, mask=mask))
        for s, (expand, features, blocks, stride) in enumerate(self.stages, 1):
            for i in range(blocks):
                name = f"stage{s}_block{i + 1}"
                block = InvertedBlock(features, expand, 1 if i else stride, name=name, **self.shared)
                x = block(x, train=train, mask=mask)
            x = self.kept(x)
        x = ConvNorm(self.last, name="last", **self.shared)(x, train=train, mask=mask)
        return self.kept(global_average(x))
