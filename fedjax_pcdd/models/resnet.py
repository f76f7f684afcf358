"""Residual networks for images of about 32x32: a 3x3 stem, with stride 1 in the published ones, and no max-pool.

He et al., "Deep Residual Learning for Image Recognition", CVPR 2016, in the form of the FedMR and FedGELA papers' code;
ResNet10 and ResNet12, with blocks (1, 1, 1, 1) and (2, 1, 1, 1), in the form of the FCCL paper's.

Kernels start normal with standard deviation sqrt(2 / fan_out), uniform within +-1 / sqrt(fan_in) in FCCL's. With blocks
(1, 1, 1) of 16, 32 and 64 channels it is ResNet8, with 78 042 parameters. Trainable parameters of the others for 3
channels and 10 classes (those of a convolution include the 2 C of its norm): stem 1 856; the first block of each stage
73 984, 230 144, 919 040, 3 673 088; a further one of the first stage 73 984; head 5 130. ResNet10 has 4 903 242,
ResNet12 4 977 226.
"""

from collections.abc import Sequence

import flax.linen as nn

from fedjax_pcdd.models.layers import KERNEL_INITS, Conv, Normalised, global_average, norm


class _Residual(Normalised, kw_only=True):
    """Convolutions with norms, named as in the published weights; `kernel_init` is a key of `KERNEL_INITS`."""

    kernel_init: str = "fan_out"

    def conv_norm(self, x, features, size, stride, names, train, mask):
        """Convolution and norm with two names: [B, H, W, in] to [B, ceil(H / stride), ceil(W / stride), features]."""
        options = {"use_bias": False, "kernel_init": KERNEL_INITS[self.kernel_init], **self.types}
        x = Conv(features, size, stride, size // 2, name=names[0], **options)(x)
        return norm(self.norm)(name=names[1], **self.types)(x, train=train, mask=mask)


class Block(_Residual):
    """Convolutions with norms and ReLU between, plus shortcut, ReLU: [B, H, W, in] to [B, h, w, out].

    conv3x3 - conv3x3, out = features; or with a bottleneck conv1x1 - conv3x3 - conv1x1, out = 4 * features. The stride
    is that of the first conv3x3, h = ceil(H / stride). The shortcut is a 1x1 convolution with norm if the shape
    changes.
    """

    features: int
    stride: int = 1
    bottleneck: bool = False

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        forms = [(self.features, 3, self.stride), (self.features, 3, 1)]  # channels, side and stride of the kernel
        if self.bottleneck:
            forms = [(self.features, 1, 1), (self.features, 3, self.stride), (4 * self.features, 1, 1)]
        y = x
        for i, form in enumerate(forms, 1):
            y = self.conv_norm(y if i == 1 else nn.relu(y), *form, (f"conv{i}", f"norm{i}"), train, mask)
        if x.shape != y.shape:
            x = self.conv_norm(x, y.shape[-1], 1, self.stride, ("conv_shortcut", "norm_shortcut"), train, mask)
        return nn.relu(y + x)


class ResNet(_Residual):
    """[B, H, W, channels] to [B, D], the global average in at least float32.

    D = width * 2 ** (len(blocks) - 1), four times that with bottlenecks.

    Attributes:
      blocks: blocks of each stage; a stage after the first halves the sides and doubles the channels.
      width: channels of the first stage; 64 with blocks (2, 2, 2, 2) is ResNet18.
      stem_stride: of the stem; with 2 every convolution except the stem has a quarter of the work.
      bottleneck: whether the blocks are bottlenecks; with blocks (3, 4, 6, 3) that is ResNet50.
    """

    blocks: Sequence[int] = (2, 2, 2, 2)
    width: int = 64
    stem_stride: int = 1
    bottleneck: bool = False

    @nn.compact
    def __call__(self, x, *, train: bool, mask=None):
        x = nn.relu(self.conv_norm(x, self.width, 3, self.stem_stride, ("stem", "stem_norm"), train, mask))
        for stage, count in enumerate(self.blocks):
            x = self.kept(x)
            for i in range(count):
                stride = 2 if stage and i == 0 else 1
                options = {"bottleneck": self.bottleneck, "kernel_init": self.kernel_init, **self.shared}
                block = Block(self.width * 2**stage, stride, name=f"stage{stage + 1}_block{i + 1}", **options)
                x = block(x, train=train, mask=mask)
        return self.kept(global_average(x))
