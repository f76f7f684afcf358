"""Networks that a server trains: a generator of features per class (FedGen), and of a vector per class (FedTGP).

Letters: B batch, C classes, D features, N dimensions of the noise.
"""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from fedjax_pcdd.models.layers import BatchNorm, Linear, Typed
from fedjax_pcdd.trees import where


class Generator(Typed):
    """Linear - batch norm - ReLU - Linear on noise [B, N] and one-hot classes [B, C]: to [B, features].

    Attributes:
      hidden: width between the two linear layers.
      features: D, the feature width of the model whose head reads them.
    """

    hidden: int
    features: int

    @nn.compact
    def __call__(self, noise: jax.Array, classes: jax.Array, *, train: bool) -> jax.Array:
        x = Linear(self.hidden, name="fc1", **self.types)(jnp.concatenate([noise, classes], axis=-1))
        x = nn.relu(BatchNorm(name="norm", **self.types)(x, train=train))
        return Linear(self.features, name="fc2", **self.types)(x)


def initialise_generator(key: jax.Array, num_classes: int, features: int, noise_dim: int, hidden: int) -> Any:
    """Fresh variables, "params" and "batch_stats", in the default float type."""
    dtype = jnp.result_type(float)
    inputs = jnp.zeros((1, noise_dim), dtype), jnp.zeros((1, num_classes), dtype)
    return Generator(hidden, features, param_dtype=dtype).init(key, *inputs, train=False)


def generate(
    variables: Any, key: jax.Array, labels: jax.Array, num_classes: int, *, noise: str = "uniform", train: bool = False
) -> tuple[jax.Array, jax.Array, Any]:
    """Generate features for labels [B], C = num_classes.

    Args:
      variables: as `initialise_generator` gives them.
      key: consumed for the noise.
      noise: "uniform" on [0, 1), or "gaussian" (standard normal).
      train: whether batch norm uses the batch's statistics.

    Returns:
      Noise [B, N], features [B, D], and the new {"batch_stats": ...}, {} unless it trains.
    """
    kernel, bias = variables["params"]["fc1"]["kernel"], variables["params"]["fc2"]["bias"]
    draw = jax.random.uniform if noise == "uniform" else jax.random.normal
    values = draw(key, (len(labels), len(kernel) - num_classes), bias.dtype)
    model = Generator(kernel.shape[1], len(bias), param_dtype=bias.dtype)
    classes = jax.nn.one_hot(labels, num_classes, dtype=bias.dtype)
    changing = ["batch_stats"] if train else []
    features, state = model.apply(variables, values, classes, train=train, mutable=changing)
    return values, features, state  # pyright: ignore[reportReturnType]


def draw_labels(key: jax.Array, allowed: jax.Array, size: int) -> jax.Array:
    """Draw `size` labels, uniform over the allowed classes [C]; class 0 if none is allowed."""
    return jax.random.categorical(key, jnp.where(allowed, 0.0, -jnp.inf), shape=(size,))


def adam(lr: jax.Array | float, weight_decay: jax.Array | float) -> optax.GradientTransformation:
    """Adam whose weight decay is added to the gradient."""
    decay = optax.add_decayed_weights(weight_decay)
    return optax.chain(decay, optax.scale_by_adam(), optax.scale_by_learning_rate(lr))


def train_generator(
    generator: Any,
    state: optax.OptState,
    optimiser: optax.GradientTransformation,
    objective: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    key: jax.Array,
    allowed: jax.Array,
    *,
    size: int,
    steps: int,
    noise: str,
) -> tuple[Any, optax.OptState]:
    """Train the generator, in training mode, on labels uniform over the allowed classes.

    Args:
      generator: as `initialise_generator` gives it.
      state: of the optimiser, for the generator's parameters.
      objective: scalar of (noise [B, N], features [B, D], labels [B]).
      key: consumed for labels and noise.
      allowed: [C] bool.
      size: B, features per step.
      noise: as in `generate`.

    Returns:
      The generator and its optimiser's state; both are unchanged if no class is allowed.
    """

    def step(i, carry):
        current, optimiser_state = carry
        label_key, noise_key = jax.random.split(jax.random.fold_in(key, i))
        labels = draw_labels(label_key, allowed, size)

        def loss(params):
            variables = {**current, "params": params}
            values, features, statistics = generate(variables, noise_key, labels, len(allowed), noise=noise, train=True)
            return objective(values, features, labels), statistics

        params = current["params"]
        gradients, statistics = jax.grad(loss, has_aux=True)(params)
        updates, optimiser_state = optimiser.update(gradients, optimiser_state, params)
        return {**statistics, "params": optax.apply_updates(params, updates)}, optimiser_state

    old = generator, state
    return where(jnp.any(allowed), jax.lax.fori_loop(0, steps, step, old), old)


class PrototypeGenerator(Typed):
    """An embedding of each class - Linear - ReLU - Linear: [C, D].

    Attributes:
      classes: C.
      features: D.
      hidden: width between the linear layers.
    """

    classes: int
    features: int
    hidden: int

    @nn.compact
    def __call__(self) -> jax.Array:
        shape = self.classes, self.features
        x = self.param("embedding", nn.initializers.normal(1.0), shape, self.param_dtype)
        x = nn.relu(Linear(self.hidden, name="fc1", **self.types)(x))
        return Linear(self.features, name="fc2", **self.types)(x)


def initialise_prototypes(key: jax.Array, classes: int, features: int, hidden: int) -> Any:
    """Fresh parameters, in the default float type."""
    return PrototypeGenerator(classes, features, hidden, param_dtype=jnp.result_type(float)).init(key)["params"]


def generate_prototypes(params: Any) -> jax.Array:
    """The vectors [C, D] of all classes."""
    classes, features = params["embedding"].shape
    hidden = params["fc1"]["bias"].size
    return PrototypeGenerator(classes, features, hidden).apply({"params": params})  # pyright: ignore[reportReturnType]
