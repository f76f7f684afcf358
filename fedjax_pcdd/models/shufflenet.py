"""ShuffleNet with grouped 1x1 convolutions for images of about 32x32.

Zhang et al., "ShuffleNet: An Extremely Efficient Convolutional Neural Network for Mobile Devices", CVPR 2018, table 1
with 2 groups, in the form of the FCCL paper's code: a 1x1 convolution of stride 1 as stem, no max-pool, and ReLU also
after the depthwise convolution, where the paper has none.

Kernels start uniform within +-1 / sqrt(fan_in), as in the reference framework. Trainable parameters for 3 channels,
10 classes and 2 groups (those of a convolution include the 2 C of its norm):

    stem 120; stages 39 002, 305 750, 534 700; head 8 010; together 887 582
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pcdd.models.layers import ConvNorm, Normalised, average_pool, global_average


def shuffle(x: jax.Array, groups: int) -> jax.Array:
    """Interleave the channels of groups: the first of each, the second of each, ...; [..., C] to the same shape.

    >>> shuffle(jnp.arange(6), 2).tolist()
    [0, 3, 1, 4, 2, 5]
    """
    return x.reshape(*x.shape[:-1], groups, -1).swapaxes(-1, -2).reshape(x.shape)


class ShuffleBlock(Normalised):
    """conv1x1 - shuffle - depthwise conv3x3 - conv1x1 with norms and ReLU: [B, H, W, in] to [B, h, w, features].

    With stride 2 the input, averaged over 3x3 windows, is appended as channels; with stride 1 it is added.

    Attributes:
      features: output channels; more than the input's with stride 2, equally many with stride 1.
      stride: 1 or 2.
      groups: of the last 1x1 convolution.
      entry_groups: of the first 1x1 convolution and the shuffle.
    """

    features: int
    stride: int = 1
    groups: int = 2
    entry_groups: int = 2

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        branch_features = self.features if self.stride == 1 else self.features - x.shape[-1]
        narrow = branch_features // 4

        def conv(x, name, features, **options):
            return ConvNorm(features, name=name, **options, **self.shared)(x, train=train, mask=mask)

        y = shuffle(conv(x, "reduce", narrow, groups=self.entry_groups), self.entry_groups)
        y = conv(y, "depthwise", narrow, kernel=3, stride=self.stride, groups=narrow)
        y = conv(y, "expand", branch_features, groups=self.groups, activation=None)
        if self.stride == 1:
            return nn.relu(y + x)
        return nn.relu(jnp.concatenate([y, average_pool(x, 3, 2, 1)], axis=-1))


class ShuffleNet(Normalised):
    """[B, H, W, channels] to [B, widths[-1]], the global average in at least float32.

    Attributes:
      widths: channels of each stage; each stage halves the sides.
      blocks: number of blocks of each stage.
      groups: of the 1x1 convolutions; the very first one is not grouped, as it has few inputs.
      stem: channels of the first convolution.
    """

    widths: Sequence[int] = (200, 400, 800)
    blocks: Sequence[int] = (4, 8, 4)
    groups: int = 2
    stem: int = 24

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        x = ConvNorm(self.stem, name="stem", **self.shared)(x, train=train, mask=mask)
        for s, (width, count) in enumerate(zip(self.widths, self.blocks, strict=True), 1):
            x = self.kept(x)
            for i in range(count):
                entry_groups, name = 1 if s == 1 and i == 0 else self.groups, f"stage{s}_block{i + 1}"
                block = ShuffleBlock(width, 1 if i else 2, self.groups, entry_groups, name=name, **self.shared)
                x = block(x, train=train, mask=mask)
        return self.kept(global_average(x))
