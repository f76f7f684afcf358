"""GoogLeNet with batch norm for images of about 32x32.

Szegedy et al., "Going Deeper with Convolutions", CVPR 2015, table 1, in the form of the FCCL paper's code: one 3x3
convolution as stem, two 3x3 in place of each 5x5, a norm after every convolution, which keeps its bias, and
neither dropout nor auxiliary heads.

Kernels and biases start uniform within +-1 / sqrt(fan_in), as in the reference framework. Trainable parameters for
3 channels and 10 classes (those of a convolution include its bias and the 2 C of its norm):

    stem 5 760; modules 165 552, 424 096; 386 016, 462 936, 523 912, 611 072, 952 704; 1 127 808, 1 496 144
    head 10 250, together 6 166 250 (in the original's names: 3a, 3b; 4a to 4e; 5a, 5b)
"""

from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax.numpy as jnp

from fedjax_pcdd.models.layers import ConvNorm, Normalised, global_average, max_pool


class Widths(NamedTuple):
    """Output channels of the four branches of an inception module, and of the 1x1 convolutions before them."""

    direct: int
    reduce3: int
    conv3: int
    reduce5: int
    conv5: int
    pool: int


GROUPS = (
    (Widths(64, 96, 128, 16, 32, 32), Widths(128, 128, 192, 32, 96, 64)),
    (
        Widths(192, 96, 208, 16, 48, 64),
        Widths(160, 112, 224, 24, 64, 64),
        Widths(128, 128, 256, 24, 64, 64),
        Widths(112, 144, 288, 32, 64, 64),
        Widths(256, 160, 320, 32, 128, 128),
    ),
    (Widths(256, 160, 320, 32, 128, 128), Widths(384, 192, 384, 48, 128, 128)),
)
"""The inception modules of GoogLeNet; the sides are halved between groups."""


class Inception(Normalised):
    """Four branches side by side: [B, H, W, in] to [B, H, W, direct + conv3 + conv5 + pool].

    conv1x1; conv1x1 - conv3x3; conv1x1 - conv3x3 - conv3x3; max-pool 3x3 - conv1x1; norm and ReLU after each.
    """

    widths: Widths

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        widths = self.widths

        def conv(x, name, features, kernel=1):
            return ConvNorm(features, kernel, use_bias=True, name=name, **self.shared)(x, train=train, mask=mask)

        direct = conv(x, "direct", widths.direct)
        three = conv(conv(x, "reduce3", widths.reduce3), "conv3", widths.conv3, 3)
        five = conv(conv(x, "reduce5", widths.reduce5), "conv5_1", widths.conv5, 3)
        five = conv(five, "conv5_2", widths.conv5, 3)
        pooled = conv(max_pool(x, 3, 1, 1), "pool", widths.pool)
        return jnp.concatenate([direct, three, five, pooled], axis=-1)


class GoogLeNet(Normalised):
    """[B, H, W, channels] to [B, D], the global average in at least float32; D: output channels of the last module.

    Attributes:
      groups: of inception modules, with a 3x3 max-pool of stride 2 between them.
      stem: channels of the first convolution.
    """

    groups: Sequence[Sequence[Widths]] = GROUPS
    stem: int = 192

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        x = ConvNorm(self.stem, 3, use_bias=True, name="stem", **self.shared)(x, train=train, mask=mask)
        for g, group in enumerate(self.groups, 1):
            if g > 1:
                x = max_pool(x, 3, 2, 1)
            for i, widths in enumerate(group, 1):
                block = Inception(widths, name=f"group{g}_module{i}", **self.shared)
                x = block(self.kept(x), train=train, mask=mask)
        return self.kept(global_average(x))
