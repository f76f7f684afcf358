"""Residual networks for images of about 32x32: a 3x3 stem of stride 1, no max-pool.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, in the form of the FedMR and FedGELA papers' code,
and with blocks (1, 1, 1, 1) and (2, 1, 1, 1), ResNet10 and ResNet12, in that of the FCCL paper's.

Kernels start normal with standard deviation sqrt(2 / fan_out). Trainable parameters on 3 channels, with 10 classes (a
convolution counts with the 2 C of its norm): stem 1 856; the first block of each stage 73 984, 230 144, 919 040,
3 673 088; a further one of the first stage 73 984; head 5 130. ResNet10 has 4 903 242, ResNet12 4 977 226.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn

from fedjax_pcdd.models.blocks import Normalised, global_average
from fedjax_pcdd.models.layers import Conv, conv_init, norm


def _conv(features: int, size: int, stride: int, name: str, types: dict[str, Any]) -> Conv:
    return Conv(features, size, stride, size // 2, use_bias=False, kernel_init=conv_init, name=name, **types)


class BasicBlock(Normalised):
    """conv3x3 - norm - ReLU - conv3x3 - norm, plus shortcut, ReLU: [B, H, W, in] to [B, h, w, features].

    h = ceil(H / stride). The shortcut is a 1x1 convolution with norm where the shape changes.
    """

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        """Runs one block; mask [B] is 1 for samples that enter batch statistics."""

        def conv_norm(x, size, stride, name):
            out = _conv(self.features, size, stride, f"conv{name}", self.types)(x)
            return norm(self.norm)(name=f"norm{name}", **self.types)(out, train=train, mask=mask)

        y = nn.relu(conv_norm(x, 3, self.stride, "1"))
        y = conv_norm(y, 3, 1, "2")
        if x.shape != y.shape:
            x = conv_norm(x, 1, self.stride, "_shortcut")
        return nn.relu(y + x)


class Bottleneck(Normalised):
    """conv1x1 - conv3x3 - conv1x1 with norms and ReLU between, plus shortcut, ReLU: to [B, h, w, 4 * features].

    The stride is that of the 3x3 convolution. The shortcut is as in a basic block.
    """

    features: int
    stride: int = 1

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        """Runs one block; mask [B] is 1 for samples that enter batch statistics."""

        def conv_norm(x, features, size, stride, name):
            out = _conv(features, size, stride, f"conv{name}", self.types)(x)
            return norm(self.norm)(name=f"norm{name}", **self.types)(out, train=train, mask=mask)

        y = nn.relu(conv_norm(x, self.features, 1, 1, "1"))
        y = nn.relu(conv_norm(y, self.features, 3, self.stride, "2"))
        y = conv_norm(y, 4 * self.features, 1, 1, "3")
        if x.shape != y.shape:
            x = conv_norm(x, 4 * self.features, 1, self.stride, "_shortcut")
        return nn.relu(y + x)


class ResNet(Normalised):
    """[B, H, W, channels] to [B, D], the global average in at least float32.

    D = width * 2 ** (len(blocks) - 1), four times that with bottlenecks.

    Attributes:
      blocks: blocks of each stage; a stage after the first halves the sides and doubles the channels.
      width: channels of the first stage; 64 with blocks (2, 2, 2, 2) is ResNet18.
      bottleneck: whether the blocks are bottlenecks; with blocks (3, 4, 6, 3) that is ResNet50.
    """

    blocks: Sequence[int] = (2, 2, 2, 2)
    width: int = 64
    bottleneck: bool = False

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        """Runs [B, H, W, channels]; mask [B] is 1 for samples that enter batch statistics."""
        block = Bottleneck if self.bottleneck else BasicBlock
        x = _conv(self.width, 3, 1, "stem", self.types)(x)
        x = nn.relu(norm(self.norm)(name="stem_norm", **self.types)(x, train=train, mask=mask))
        for stage, count in enumerate(self.blocks):
            self.sow("intermediates", "layers", x)
            for i in range(count):
                stride = 2 if stage and i == 0 else 1
                name = f"stage{stage + 1}_block{i + 1}"
                x = block(self.width * 2**stage, stride, name=name, **self.shared)(x, train=train, mask=mask)
        x = global_average(x)
        self.sow("intermediates", "layers", x)
        return x
