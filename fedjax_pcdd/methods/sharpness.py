"""What methods that look for flat minima share: a local step with the gradient at a nearby point, where loss is higher.

The first gradient, at w, is raw: neither clipped nor decayed; it says where to look. The second one, there, on the same
batch with the same augmentation and dropout, is clipped, decayed, and taken at w.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.methods.method import Context, Method, Tree, hyperparameter

TINY = 1e-12  # added to a norm that divides: a gradient of 0 perturbs nothing


def of_length(direction: Tree, length: jax.Array | float) -> Tree:
    """length * d / ||d||, one norm over all leaves; 0 where d is 0."""
    return optax.tree.scale(length / (optax.tree.norm(direction) + TINY), direction)


def ascent(gradients: Tree, params: Tree, rho: jax.Array | float, *, adaptive: bool = False) -> Tree:
    """The perturbation e = rho g / ||g||, or rho w^2 g / || |w| g ||: as long as weights are large."""
    if not adaptive:
        return of_length(gradients, rho)
    scaled = jax.tree.map(lambda w, g: jnp.abs(w) * g, params, gradients)
    return jax.tree.map(lambda w, e: jnp.abs(w) * e, params, of_length(scaled, rho))


def moved_to(variables: Tree, params: Tree) -> Tree:
    """The variables with other parameters."""
    return {**variables, "params": params}


@struct.dataclass
class SharpnessAware(Method):
    """Two gradients a step; where the second one is taken, and what becomes of it, is left to the methods."""

    rho: float = hyperparameter(0.05, symbol="rho", help="length of the perturbation of the weights", low=0.0)
    statistics: Literal["first", "both"] = hyperparameter(
        "first", help="running statistics: of the pass at w, or of that and then of the perturbed pass", static=True
    )

    def point(self, params: Tree, gradients: Tree, context: Context) -> Tree:
        """Parameters at which the second gradient is taken."""
        return optax.tree.add(params, ascent(gradients, params, self.rho))

    def descent(self, gradients: Tree, context: Context) -> Tree:
        """What is handed to the optimiser, from the second gradient."""
        return gradients

    def local_update(self, evaluate, step, variables, batch, context):
        """The gradient at the perturbed point, taken from w; the loss is that at w."""
        loss, state, gradients = evaluate(variables)
        perturbed = moved_to(variables, self.point(variables["params"], gradients, context))
        if self.statistics == "first":
            return loss, state, step(self.descent(evaluate(perturbed).gradients, context))
        _, state, gradients = evaluate(perturbed | state)
        return loss, state, step(self.descent(gradients, context))
