"""Training of a model on the server, which has no labels: on public images, towards what a loss says of its logits."""

from collections.abc import Callable

import jax
import optax

from fedjax_pcdd.methods.method import ServerContext, Tree
from fedjax_pcdd.models.classifier import forward


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
    number = context.public.images.shape[0]

    def step(t, carry):
        variables, state = carry
        key = jax.random.fold_in(context.key, t)
        index = jax.random.choice(key, number, (size,), replace=False)
        images = context.public.prepare(index, jax.random.fold_in(key, 1))

        def objective(params):
            outputs, seen = forward(context.model, {**variables, "params": params}, images, train=True, key=key)
            return loss(outputs.logits, index), seen

        gradients, seen = jax.grad(objective, has_aux=True)(variables["params"])
        updates, state = optimiser.update(gradients, state)
        params = optax.apply_updates(variables["params"], updates)
        return {**variables, **seen, "params": params}, state

    start = variables, optimiser.init(variables["params"])
    return jax.lax.fori_loop(0, steps, step, start)[0]
