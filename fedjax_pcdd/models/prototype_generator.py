"""A small network that has a vector for each class: what FedTGP trains on the server.

Letters: C classes, D features.
"""

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
