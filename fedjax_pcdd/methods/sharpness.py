"""What methods that look for flat minima share: a local step with the gradient at a nearby point of higher loss.

The first gradient, at w, is raw (neither clipped nor decayed): it determines that point. The second one, at that point,
on the same batch with the same augmentation and dropout, is clipped and decayed, and the step is taken from w.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Context, Evaluated, Tree, hyperparameter
from fedjax_pcdd.methods.wrappers import Addition, with_defaults

TINY = 1e-12  # added to a norm in a denominator, so that a gradient of 0 perturbs nothing


def of_length(direction: Tree, length: jax.Array | float) -> Tree:
    """length * d / ||d||, one norm over all leaves; 0 where d is 0."""
    return optax.tree.scale(length / (optax.tree.norm(direction) + TINY), direction)


def ascent(gradients: Tree, params: Tree, rho: jax.Array | float, *, adaptive: bool = False) -> Tree:
    """The perturbation e = rho g / ||g||, or if adaptive rho w^2 g / || |w| g ||, which is larger for large weights."""
    if not adaptive:
        return of_length(gradients, rho)
    scaled = jax.tree.map(lambda w, g: jnp.abs(w) * g, params, gradients)
    return jax.tree.map(lambda w, e: jnp.abs(w) * e, params, of_length(scaled, rho))


@struct.dataclass
class Nearby(Addition):
    """FedAvg, or the method that it is in front of, with gradients from another point than the step is taken from."""

    @classmethod
    def unsuitable(cls, other):
        """The reason, if a step is not of one model on its own objective."""
        if issubclass(other, Nearby):
            return "perturbs the weights already, so drop the suffix."
        traits = with_defaults(other).traits()
        refused = traits.apart or traits.exchange != "never"
        return "trains two models at a time, or on what others sent, so drop the suffix." if refused else ""


@struct.dataclass
class SharpnessAware(Nearby):
    """Two gradients a step; where the second one is taken, and how it is used, is left to the methods."""

    rho: float = hyperparameter(0.05, symbol="rho", help="length of the perturbation of the weights", low=0.0)
    statistics: Literal["first", "both"] = hyperparameter(
        "first", help="running statistics: of the pass at w, or of that and then of the perturbed pass", static=True
    )

    def configure(self, setting, hyper):
        """As X; UserError if it trains on what others sent in this form."""
        method, advice = super().configure(setting, hyper)
        if method.traits().exchange != "never":
            raise UserError(
                "a perturbation needs a method that trains on local data alone in this form: drop the suffix."
            )
        return method, advice

    def point(self, params: Tree, gradients: Tree, context: Context) -> Tree:
        """Parameters at which the second gradient is taken."""
        return optax.tree.add(params, ascent(gradients, params, self.rho))

    def descent(self, gradients: Tree, context: Context) -> Tree:
        """The gradient for the optimiser, from the second gradient."""
        return gradients

    def local_update(self, evaluate, step, variables, batch, context):
        """X's step with the gradient at the perturbed point in place of that at w; the loss is that at w."""

        def elsewhere(variables):
            loss, state, gradients = evaluate(variables)
            moving = self.trainable(variables["params"], context)
            uphill = gradients if moving is None else jax.tree.map(lambda m, g: jnp.where(m, g, 0), moving, gradients)
            perturbed = {**variables, "params": self.point(variables["params"], uphill, context)}
            # Running statistics alone: what a method collects besides is of the first pass.
            running = ["batch_stats"] if self.statistics == "both" and "batch_stats" in state else []
            second = evaluate(perturbed | {name: state[name] for name in running})
            new_state = state | {name: second.state[name] for name in running}
            return Evaluated(loss, new_state, self.descent(second.gradients, context))

        return super().local_update(elsewhere, step, variables, batch, context)
