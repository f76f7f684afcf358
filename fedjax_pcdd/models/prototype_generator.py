"""A small network that has a vector for each class: what FedTGP trains on the server.

Letters: C classes, D features, P samples that it is trained on.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pcdd.models.layers import Linear


class PrototypeGenerator(nn.Module):
    """An embedding of each class - Linear - ReLU - Linear: [C, D].

    Attributes:
      classes: C.
      features: D.
      hidden: width between the linear layers.
      param_dtype: of the parameters.
    """

    classes: int
    features: int
    hidden: int
    param_dtype: Any = jnp.float32

    @nn.compact
    def __call__(self) -> jax.Array:
        """[C, D]."""
        types = {"param_dtype": self.param_dtype}
        shape = self.classes, self.features
        x = self.param("embedding", nn.initializers.normal(1.0), shape, self.param_dtype)
        x = nn.relu(Linear(self.hidden, name="fc1", **types)(x))
        return Linear(self.features, name="fc2", **types)(x)


def initialise_prototypes(key: jax.Array, classes: int, features: int, hidden: int) -> Any:
    """Fresh parameters, in the default float type."""
    return PrototypeGenerator(classes, features, hidden, jnp.result_type(float)).init(key)["params"]


def generate_prototypes(params: Any) -> jax.Array:
    """The vectors [C, D] of all classes."""
    classes, features = params["embedding"].shape
    hidden = params["fc1"]["bias"].size
    return PrototypeGenerator(classes, features, hidden).apply({"params": params})  # pyright: ignore[reportReturnType]


def train_prototypes(
    params: Any,
    objective: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    order: Callable[[jax.Array], jax.Array],
    count: jax.Array | int,
    lr: jax.Array | float,
    *,
    epochs: int,
    size: int,
) -> Any:
    """Plain SGD on batches, of which the last one of an epoch may be smaller.

    Args:
      params: as `initialise_prototypes` gives them.
      objective: scalar of (prototypes [C, D], which samples a batch has [size], which of these count [size]).
      order: the samples [P] of an epoch; those that count are the first ones.
      count: how many count; may be traced. Without any the parameters stay as they are.
      lr: learning rate.
      epochs: passes over them.
      size: B, samples of a batch.
    """

    def epoch(e, params):
        samples = order(e)

        def step(j, params):
            at = j * size + jnp.arange(size)
            index = samples[jnp.minimum(at, len(samples) - 1)]
            gradients = jax.grad(lambda p: objective(generate_prototypes(p), index, at < count))(params)
            return jax.tree.map(lambda p, g: p - (lr * g).astype(p.dtype), params, gradients)

        return jax.lax.fori_loop(0, (count + size - 1) // size, step, params)

    return jax.lax.fori_loop(0, epochs, epoch, params)
