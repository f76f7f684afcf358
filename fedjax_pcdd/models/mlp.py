"""Multi-layer perceptron. With one hidden layer of 200 on 28x28 digits: 159 010 parameters."""

import flax.linen as nn

from fedjax_pcdd.models.layers import Linear, Typed


class MLP(Typed):
    """Flattens [B, ...] and applies linear layers of the widths `hidden` with ReLU; returns [B, hidden[-1]]."""

    hidden: tuple[int, ...] = (200,)

    @nn.compact
    def __call__(self, x, *, train: bool = False, mask=None):
        del train, mask
        x = x.reshape(x.shape[0], -1)
        for i, width in enumerate(self.hidden, 1):
            x = self.kept(nn.relu(Linear(width, name=f"fc{i}", **self.types)(x)))
        return x
