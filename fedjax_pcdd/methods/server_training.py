"""Training on the server: of a model on public images, by a loss of its logits; of a few parameters on what clients
have sent.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from fedjax_pcdd.methods.method import Keys, ServerContext, Tree
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.trees import where


def train_on_public(
    variables: Tree,
    loss: Callable[[jax.Array, jax.Array], jax.Array],
    context: ServerContext,
    optimiser: optax.GradientTransformation,
    *,
    steps: int,
    size: int,
) -> Tree:
    """The model after some steps on random batches of public images, augmented and in training mode.

    Args:
      variables: of the model; running statistics move too.
      loss: maps (logits [B, C], indices of their public images [B]) to a scalar.
      context: the model, the public images, and the key of all draws.
      optimiser: of the parameters; it starts anew.
      steps: number of steps.
      size: B, images of a step, drawn without replacement.
    """
    public = context.public
    assert public is not None  # checked by the engine
    num_images = public.images.shape[0]

    def step(t, carry):
        variables, state = carry
        keys = Keys.of(jax.random.fold_in(context.key, t))
        # `jax.random.choice` would sort all images in every step, which took most of the time.
        _, index = jax.lax.top_k(jax.random.uniform(keys.method, (num_images,)), size)
        images = public.prepare(index, keys.augment)

        def objective(params):
            model, start = context.model, {**variables, "params": params}
            outputs, statistics = forward(model, start, images, train=True, key=keys.dropout)
            return loss(outputs.logits, index), statistics

        gradients, statistics = jax.grad(objective, has_aux=True)(variables["params"])
        updates, state = optimiser.update(gradients, state)
        params = optax.apply_updates(variables["params"], updates)
        return {**variables, **statistics, "params": params}, state

    start = variables, optimiser.init(variables["params"])
    return jax.lax.fori_loop(0, steps, step, start)[0]


def train_in_passes(
    params: Tree,
    loss: Callable[[Tree, jax.Array, jax.Array], jax.Array],
    order: Callable[[jax.Array], jax.Array],
    count: jax.Array | int,
    optimiser: optax.GradientTransformation,
    *,
    epochs: int,
    size: int,
) -> Tree:
    """The parameters after some passes over N samples in batches, of which the last one of a pass may be smaller.

    Args:
      params: to start from.
      loss: maps (params, indices of a batch's samples [B], which of these count [B]) to a scalar.
      order: maps an epoch to the order of its samples [N]; those that count come first.
      count: how many count; may be traced. If there are none, the parameters stay as they are.
      optimiser: of the parameters; it starts anew.
      epochs: passes.
      size: B.
    """

    def epoch(e, carry):
        samples = order(e)

        def step(j, carry):
            params, state = carry
            positions = j * size + jnp.arange(size)
            index = samples[jnp.minimum(positions, len(samples) - 1)]
            updates, state = optimiser.update(jax.grad(loss)(params, index, positions < count), state, params)
            return optax.apply_updates(params, updates), state

        return _first_steps((count + size - 1) // size, -(-len(samples) // size), step, carry)

    return jax.lax.fori_loop(0, epochs, epoch, (params, optimiser.init(params)))[0]


def _first_steps(number: jax.Array | int, most: int, step: Callable[[jax.Array, Tree], Tree], carry: Tree) -> Tree:
    """The carry after the first `number` of `most` steps; a CPU skips the others.

    Elsewhere the host would have to check before each step whether there is another, so the others run without effect.
    """
    if jax.default_backend() == "cpu":
        return jax.lax.fori_loop(0, number, step, carry)
    return jax.lax.fori_loop(0, most, lambda i, carry: where(i < number, step(i, carry), carry), carry)
