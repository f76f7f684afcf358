"""Small convolutional networks: two 5x5 convolutions with ReLU and 2x2 max-pool, then linear layers."""

from functools import partial

import flax.linen as nn

from fedjax_pcdd.models.layers import Linear, Typed
from fedjax_pcdd.models.pooled_convolution import PooledConv


class CNN(Typed):
    """[B, H, W, channels] to [B, hidden[-1]].

    Attributes:
      channels: output channels of the two convolutions.
      hidden: widths of the linear layers, each with ReLU.
      padding: of the convolutions.
    """

    channels: tuple[int, int]
    hidden: tuple[int, ...]
    padding: str

    @nn.compact
    def __call__(self, x, *, train: bool = False, mask=None):
        del train, mask
        for i, width in enumerate(self.channels, 1):
            x = self.kept(PooledConv(width, 5, padding=self.padding, name=f"conv{i}", **self.types)(x))
        x = x.transpose(0, 3, 1, 2).reshape(x.shape[0], -1)  # channels first, as published weights are ordered
        for i, width in enumerate(self.hidden, 1):
            x = self.kept(nn.relu(Linear(width, name=f"fc{i}", **self.types)(x)))
        return x


simple_cnn = partial(CNN, (6, 16), (120, 84), "VALID")
"""The CNN of MOON and FedRL: 62 006 parameters on 32x32x3 with 10 classes."""
fedrl_cnn = partial(CNN, (6, 16), (120,), "VALID")
"""The CNN of FedRL on MNIST and Fashion-MNIST, sizes inferred: 34 622 parameters on 28x28x1 with 10 classes."""
mcmahan_cnn = partial(CNN, (32, 64), (512,), "SAME")
"""The CNN of McMahan et al., AISTATS 2017: 1 663 370 parameters on 28x28x1 with 10 classes."""
femnist_cnn = partial(CNN, (32, 64), (2048,), "SAME")
"""The CNN of LEAF, Caldas et al., 2018: 6 603 710 parameters on 28x28x1 with 62 classes."""
