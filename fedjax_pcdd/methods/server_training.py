"""Training on the server: of a model on public images, towards what a loss says of its logits; of a few parameters on
what clients have sent.
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
      loss: scalar of (logits [B, C], which public images they are of [B]).
      context: the model, the public images, and the key of all draws.
      optimiser: of the parameters, new.
      steps: number of steps.
      size: B, images of a step, drawn without replacement.
    """
    public = context.public
    assert public is not None  # the engine has seen to it
    number = public.images.shape[0]

    def step(t, carry):
        variables, state = carry
        keys = Keys.of(jax.random.fold_in(context.key, t))
        index = jax.random.choice(keys.method, number, (size,), replace=False)
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
      params: at first.
      loss: scalar of (params, which samples a batch has [B], which of these count [B]).
      order: the samples [N] of an epoch; those that count are the first ones.
      count: how many count; may be traced. Without any the parameters stay as they are.
      optimiser: of the parameters, new.
      epochs: passes.
      size: B.
    """

    def epoch(e, carry):
        samples = order(e)

        def step(j, carry):
            params, state = carry
            at = j * size + jnp.arange(size)
            index = samples[jnp.minimum(at, len(samples) - 1)]
            updates, state = optimiser.update(jax.grad(loss)(params, index, at < count), state, params)
            return optax.apply_updates(params, updates), state

        return _first_steps((count + size - 1) // size, -(-len(samples) // size), step, carry)

    return jax.lax.fori_loop(0, epochs, epoch, (params, optimiser.init(params)))[0]


def _first_steps(number: jax.Array | int, most: int, step: Callable[[jax.Array, Tree], Tree], carry: Tree) -> Tree:
    """The carry after the first so many of `most` steps, the others of which a CPU leaves out.

    Elsewhere the host would have to ask before each step whether there is another, so the others change nothing.
    """
    if jax.default_backend() == "cpu":
        return jax.lax.fori_loop(0, number, step, carry)
    return jax.lax.fori_loop(0, most, lambda i, carry: where(i < number, step(i, carry), carry), carry)
