"""Training of a model on the server, which has no labels: on public images, towards what a loss says of its logits."""

from collections.abc import Callable

import jax
import optax

from fedjax_pcdd.methods.method import Keys, ServerContext, Tree
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
