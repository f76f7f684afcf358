"""FedDyn: a linear and a proximal term make the stationary points of each client's objective the federation's.

Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021, algorithm 1.
Sent: as in FedAvg. A client keeps its drift v_k (P); the paper's gradient memory is lambda_k = -alpha v_k, its server
state h = -alpha * mean(v_k), so nothing is ever divided by alpha.
Follows the paper's common alpha and plain mean; the published code's alpha_k = alpha / nu_k is an option, its clipping
at 10 the default. alpha = 0, where the paper's server step is undefined, is FedAvg, with uniform weights unless
`server_step=none`. The server's step acts as a momentum of 1 - eta K alpha / (1 - rho) on top of the clients'; without
local momentum, as published, FedDyn trains.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.methods.drift import Drifting, size_factor
from fedjax_pcdd.methods.method import Derived, Traits, hyperparameter
from fedjax_pcdd.trees import squared_distance


@struct.dataclass
class FedDyn(Drifting):
    """L = CE - <lambda_k, w> + (alpha_k / 2) * ||w - w^t||^2."""

    alpha: float = hyperparameter(
        0.01, symbol="alpha", help="weight of the regulariser; 0 is FedAvg, uniform unless `server_step=none`", low=0.0
    )
    alpha_scaling: Literal["common", "inverse_size"] = hyperparameter(
        "common", help="one alpha, or alpha / (N n_k / n) on client k as in the published code", static=True
    )
    weighted_statistics: bool = hyperparameter(
        False, help="average running statistics by n_k, not equally", static=True, needs={"server_step": ("full",)}
    )

    def traits(self):
        """Clipped as in the published code."""
        return Traits("Acar et al., ICLR 2021", clip=10.0)

    def configure(self, setting, hyper):
        """Advice: alpha = 0 has no dynamic regularisation; with both momenta, accuracy may end at chance level."""
        advice, rho = self.unread(), float(hyper.momentum)
        if self.alpha <= 0:
            advice += ["FedDyn with `alpha=0` is FedAvg: choose `alpha` above 0 for FedDyn itself."]
        elif rho >= 0.1 and not self._averages:
            server = max(0.0, 1 - float(hyper.lr) * setting.steps * self.alpha / (1 - rho))
            advice += [
                f"FedDyn with `momentum={rho:g}` has a server momentum of about {server:.4g} beside it and has ended "
                "at chance: set `server_step=none`, or `momentum=0` as the paper has it."
            ]
        return self, advice

    def regulariser(self, params, context):
        """alpha_k * (<v_k, w> + ||w - w^t||^2 / 2), a scalar; <v_k, w> is -<lambda_k, w> / alpha_k."""
        alpha = self.alpha / size_factor(context) if self.alpha_scaling == "inverse_size" else self.alpha
        tied = 0.5 * squared_distance(params, context.start["params"])
        return alpha * (optax.tree.vdot(context.client.drift, params) + tied)

    def pace(self):
        """Nothing accumulates at alpha = 0."""
        return jnp.where(jnp.asarray(self.alpha) > 0, 1.0, 0.0)

    def upload(self, variables, summary, context):
        """As in `Drifting`, and the statistics times n_k if they are weighted."""
        client, message = super().upload(variables, summary, context)
        if self.weighted_statistics:
            samples = context.facts.num_samples
            statistics = {k: v for k, v in variables.items() if k != "params"}
            state = Derived((optax.tree.scale(samples, statistics), samples))
            message = message._replace(total=message.total._replace(state=state))
        return client, message

    def aggregate(self, server, message, weights, context):
        """w = mean(w_k) - h / alpha."""
        server = super().aggregate(server, message, weights, context)
        if self.weighted_statistics:
            total, samples = message.total.state.value
            statistics = jax.tree.map(lambda x: x / jnp.maximum(samples, 1), total)
            server = server._replace(variables=server.variables | statistics)
        return server
