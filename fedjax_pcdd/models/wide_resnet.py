"""Wide residual networks with pre-activation blocks and dropout, for images of about 32x32.

Zagoruyko and Komodakis, "Wide Residual Networks", BMVC 2016, in the form of the FedMR paper's code: every
convolution has a bias, the second one of a block has the stride, and the running statistics of the last batch norm
follow the batch nine times faster than the others.
"""

import flax.linen as nn

from fedjax_pcdd.models.layers import Conv, Normalised, global_average, norm


class WideBlock(Normalised):
    """norm - ReLU - conv3x3 - dropout - norm - ReLU - conv3x3, plus shortcut: [B, H, W, in] to [B, h, w, features].

    h = ceil(H / stride). The shortcut is a 1x1 convolution of the raw input if the shape changes. Without a key there
    is no dropout.
    """

    features: int
    stride: int = 1
    dropout: float = 0.3

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        def activated(x, name):
            return nn.relu(norm(self.norm)(name=name, **self.types)(x, train=train, mask=mask))

        y = Conv(self.features, 3, 1, 1, name="conv1", **self.types)(activated(x, "norm1"))
        y = nn.Dropout(self.dropout, deterministic=not train or not self.has_rng("dropout"))(y)
        y = Conv(self.features, 3, self.stride, 1, name="conv2", **self.types)(activated(y, "norm2"))
        if x.shape != y.shape:
            x = Conv(self.features, 1, self.stride, 0, name="conv_shortcut", **self.types)(x)
        return y + x


class WideResNet(Normalised):
    """[B, H, W, channels] to [B, 64 * widen], the global average in at least float32.

    Attributes:
      blocks: number in each of the three groups; 4 with widen 10 is WRN-28-10.
      widen: factor of the groups' channels, 16, 32 and 64; groups after the first halve the sides.
      dropout: rate between the convolutions of a block.
    """

    blocks: int = 4
    widen: int = 10
    dropout: float = 0.3

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        x = Conv(16, 3, 1, 1, name="stem", **self.types)(x)
        for group in range(3):
            x = self.kept(x)
            for i in range(self.blocks):
                stride, name = 2 if group and i == 0 else 1, f"group{group + 1}_block{i + 1}"
                block = WideBlock(16 * 2**group * self.widen, stride, self.dropout, name=name, **self.shared)
                x = block(x, train=train, mask=mask)
        norm_options = {"momentum": 0.9} if self.norm == "batch" else {}
        x = nn.relu(norm(self.norm)(name="norm", **norm_options, **self.types)(x, train=train, mask=mask))
        return self.kept(global_average(x))
