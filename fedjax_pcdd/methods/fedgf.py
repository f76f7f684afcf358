"""FedGF: gradients are taken between the client's and the global worst nearby point, by how far clients diverged.

Lee and Yoon, "Rethinking the Flat Minima Searching in Federated Learning", ICML 2024.
Sent: the model, the one before and the scalar c down (2P), the model and the scalar ||w_k - w^t|| up. Clients keep
nothing, the server one model. A step costs two gradients.
Follows the published code, which has no momentum. The threshold is in units of the parameters, so a suitable one grows
with learning rate and steps; each round's metrics have the mean ||w_k - w^t|| as `divergence` and c as `share`. At
c = 1 all steps of a round take their gradients at the same point, so nothing limits how far momentum carries them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.methods.method import Message, Traits, Tree, hyperparameter
from fedjax_pcdd.methods.own_layers import shared_part
from fedjax_pcdd.methods.sharpness import SharpnessAware, ascent, of_length
from fedjax_pcdd.methods.steps import momentum_advice
from fedjax_pcdd.trees import squared_distance


class Server(NamedTuple):
    """Global model; parameters before, share c, mean divergence; which rounds diverged [W], rounds so far."""

    variables: Tree
    previous: Tree
    share: jax.Array
    divergence: jax.Array
    window: jax.Array
    rounds: jax.Array


@struct.dataclass
class FedGF(SharpnessAware):
    """g = grad F(c w~ + (1 - c) (w + e)), w~ = w^t + rho_g (w^{t-1} - w^t) / ||w^{t-1} - w^t||, e as in FedSAM."""

    global_rho: float | None = hyperparameter(
        None, symbol="rho_g", help="length of the global perturbation; by default rho", low=0.0
    )
    threshold: float = hyperparameter(
        0.2, symbol="T_D", help="mean ||w_k - w^t|| above which a round counts as diverged; FedSAM where none is"
    )
    window: int = hyperparameter(30, symbol="W", help="last rounds whose diverged part is c", static=True, low=1)

    def traits(self):
        """FedAvg's traits, with two more metrics a round."""
        return Traits("Lee and Yoon, ICML 2024", recorded=("divergence", "share"))

    def configure(self, setting, hyper):
        """The default of rho_g; advice on a threshold that every round exceeds, on rho = 0 and on momentum."""
        advice = []
        if self.threshold < 0:
            advice.append(
                "FedGF with `threshold` below 0 never looks at the clients' own perturbation: set it above 0."
            )
        if self.rho == 0 and not self.global_rho:
            advice.append(
                "FedGF with `rho=0` perturbs nothing, yet looks between two models at two gradients a step: set "
                "`rho` above 0."
            )
        chance = "goes about {:.3g} times as far along gradients that do not follow its steps once all rounds diverge"
        if self.threshold < float("inf"):  # FedSAM, in which no round diverges
            ends = f"{chance}, and has ended at chance"
            advice += momentum_advice("FedGF", hyper.momentum, "a higher `threshold`", ends)
        return self.replace(global_rho=self._global_rho()), advice  # pyright: ignore[reportAttributeAccessIssue]

    def _global_rho(self):
        return self.rho if self.global_rho is None else self.global_rho

    def init_server(self, setting, variables, class_counts, key):
        """Nothing has diverged yet."""
        zero = jnp.zeros((), jnp.result_type(float))
        return Server(
            variables, variables["params"], zero, zero, jnp.zeros(self.window, bool), jnp.zeros((), jnp.int32)
        )

    def far_point(self, params, previous, setting):
        """w~, from w^t and w^{t-1}."""
        back = shared_part(setting, optax.tree.sub(previous, params))
        return optax.tree.add(params, of_length(back, self._global_rho()))

    def point(self, params, gradients, context):
        """c w~ + (1 - c) (w + e)."""
        # Made here, not by the server, as a step of the server (`fedgf+adam`) comes after `aggregate`.
        far = self.far_point(context.start["params"], context.server.previous, context.setting)
        near, c = optax.tree.add(params, ascent(gradients, params, self.rho)), context.server.share
        between = jax.tree.map(lambda far, near: (c * far + (1 - c) * near).astype(near.dtype), far, near)
        return shared_part(context.setting, between, near)

    def upload(self, variables, summary, context):
        """The model, and ||w_k - w^t||."""
        distance = jnp.sqrt(squared_distance(variables["params"], context.start["params"]))
        return context.client, Message(mean=variables, total=distance)

    def aggregate(self, server, message, weights, context):
        """The mean model, w^t, and c from the unweighted mean divergence of the last W rounds."""
        divergence = message.total / jnp.maximum(context.count, 1)
        window = server.window.at[server.rounds % self.window].set(divergence > self.threshold)
        rounds = server.rounds + 1
        share = window.sum() / jnp.minimum(rounds, self.window)
        dtype = server.share.dtype
        return server._replace(
            variables=message.mean,
            previous=server.variables["params"],
            share=share.astype(dtype),
            divergence=divergence.astype(dtype),
            window=window,
            rounds=rounds,
        )
