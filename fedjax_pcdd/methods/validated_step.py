"""A number that is chosen anew in each step: the one that gives the least loss on the client's validation samples."""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Context, Method, Tree
from fedjax_pcdd.models.classifier import forward


def numbers_in(option: str, text: str) -> list[float]:
    """The numbers in an option; UserError if it is not a list of numbers from 0 up.

    >>> numbers_in("lambda_candidates", "0.1,1,2")
    [0.1, 1.0, 2.0]
    """
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1.0]
    if not all(0 <= number < math.inf for number in numbers):
        raise UserError(f"`{option}={text}` must be numbers from 0 up, as `{option}=0.1,1,2`.")
    return numbers


def least(candidates: Sequence[float], left: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The candidate, a scalar, with the least loss `left(candidate)`: the first among equals; NaN counts as inf."""
    numbers = jnp.asarray(candidates)
    losses = jax.lax.map(left, numbers)
    return numbers[jnp.argmin(jnp.where(jnp.isnan(losses), jnp.inf, losses))]


def validation_loss(method: Method, variables: Tree, context: Context) -> jax.Array:
    """A method's supervised loss in eval mode, summed over the client's validation samples; 0 without any.

    The method must set `Traits.validation`.
    """

    def of_batch(batch):
        outputs, _ = forward(context.model, variables, batch.images, train=False, mask=batch.mask)
        return method.classification(outputs, batch, context) * batch.mask.sum()

    assert context.validation is not None  # checked by the engine
    return context.validation(of_batch)
