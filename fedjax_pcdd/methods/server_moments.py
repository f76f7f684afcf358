"""Adaptive server steps as gradient transformations: the printed rules, which optax lacks, and optax's own.

Letters: g the pseudo-gradient, m and v its moments, tau the constant beside the root. Forms of one rule:

    paper  m / (sqrt(v) + tau), v_0 = tau^2 unless given, no bias correction (Reddi et al., algorithm 2)
    optax  `optax.scale_by_adam` and its like with eps = tau
    keras  sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + tau), moments starting as optax's
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pcdd.methods.method import Tree

Form = Literal["paper", "optax", "keras"]
Number = Any  # a float, or a traced scalar
Rule = Callable[[jax.Array, jax.Array], jax.Array]  # (v, g^2) -> the next v

YOGI_START = 1e-6  # first value of both moments in optax and Keras


class Moments(NamedTuple):
    """Number of rounds so far, and the moments, structured as the parameters."""

    count: jax.Array
    mu: Tree
    nu: Tree


def scale_by_moments(
    rule: Rule, beta1: Number, tau: Number, start: tuple[Number, Number], beta2: Number | None = None
) -> optax.GradientTransformation:
    """m / (sqrt(v) + tau), without bias correction of the moments themselves.

    Args:
      rule: computes the next v.
      start: m_0 and v_0 of every coordinate.
      beta2: of Keras's correction, which scales the step; None for no correction.
    """

    def init(params):
        mu, nu = (jax.tree.map(lambda x, value=value: jnp.full_like(x, value), params) for value in start)
        return Moments(jnp.zeros((), jnp.int32), mu, nu)

    def update(updates, state, params=None):
        mu = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mu, updates)
        nu = jax.tree.map(lambda v, g: rule(v, jnp.square(g)), state.nu, updates)
        count = state.count + 1
        factor = 1.0 if beta2 is None else jnp.sqrt(1 - beta2**count) / (1 - beta1**count)
        directions = jax.tree.map(lambda m, v: (factor * m / (jnp.sqrt(v) + tau)).astype(m.dtype), mu, nu)
        return directions, Moments(count, mu, nu)

    return optax.GradientTransformation(init, update)


def without_frozen(optimiser: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimiser, whose moments start at `YOGI_START`, except that layers which never had a gradient do not move."""

    def update(updates, state, params=None):
        directions, after = optimiser.update(updates, state, params)

        def kept(direction, g, v):
            is_frozen = ~jnp.any(g) & jnp.all(v == jnp.asarray(YOGI_START, v.dtype))
            return jnp.where(is_frozen, 0, direction)

        return jax.tree.map(kept, directions, updates, after.nu), after  # pyright: ignore[reportAttributeAccessIssue]

    return optax.GradientTransformation(optimiser.init, update)
