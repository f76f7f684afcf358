"""FedDC: a client learns its local drift, decouples it from the global model, and corrects its gradient.

Gao et al., "FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and Correction", CVPR 2022.
Sent: the model and the global state Delta down (2P), the model and its part of Delta_k up (2P). A client keeps its
drift h_k and its last update state Delta_k (2P).
Follows the published code: size factor nu_k = N n_k / n, unweighted mean, K_s steps equal for all clients, clipping at
10. The original trains without momentum; with momentum, dividing by K_s diverges, so each client's a_k is the divisor.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.methods.drift import Drifting, size_factor
from fedjax_pcdd.methods.method import Context, Traits, hyperparameter
from fedjax_pcdd.methods.steps import effective_steps, kept_advice, optimiser_advice, state_advice
from fedjax_pcdd.trees import squared_distance


@struct.dataclass
class FedDC(Drifting):
    """L = CE + (alpha_k / 2) * ||w - (w^t - h_k)||^2 + <w, Delta / nu_k - Delta_k>."""

    keeps_state = True  # Delta and Delta_k

    alpha: float = hyperparameter(0.01, symbol="alpha", help="weight of the drift's penalty", low=0.0)
    alpha_scaling: Literal["common", "inverse_size"] = hyperparameter(
        "inverse_size", symbol="nu", help="nu_k = 1, or N n_k / n on client k as in the published code", static=True
    )
    step_normaliser: Literal["auto", "steps", "a_k"] = hyperparameter(
        "auto",
        symbol="K_s",
        help="divisor of a client's update: E ceil(n / (N B)) steps, or FedNova's a_k, which counts momentum; auto: "
        "a_k with momentum",
        static=True,
    )

    def traits(self):
        """Clipped as in the published code."""
        return Traits("Gao et al., CVPR 2022", clip=10.0)

    def configure(self, setting, hyper):
        """Advice: with momentum, an update divided by K_s steps is too large a state."""
        counts_momentum = self.step_normaliser != "steps"
        advice = [*self.unread(), *optimiser_advice("FedDC", hyper), *kept_advice("FedDC", setting, hyper)]
        return self, [*advice, *state_advice("FedDC", setting, hyper, counts_momentum=counts_momentum)]

    def _ratio(self, context: Context):
        return size_factor(context) if self.alpha_scaling == "inverse_size" else 1.0

    def _correction(self, context: Context):
        """Delta / nu_k - Delta_k, structured as the parameters."""
        inverse = 1 / self._ratio(context)
        return jax.tree.map(lambda mean, own: inverse * mean - own, context.server.state, context.client.state)

    def regulariser(self, params, context):
        """Penalised drift and gradient correction, a scalar."""
        centre = optax.tree.sub(context.start["params"], context.client.drift)
        tied = 0.5 * self.alpha / self._ratio(context) * squared_distance(params, centre)
        return tied + optax.tree.vdot(self._correction(context), params)

    def _steps(self, context: Context):
        """K_s or a_k, a scalar."""
        setting, samples = context.setting, context.facts.federation_counts.sum().astype(int)
        steps_per_epoch = -(-samples // (setting.num_clients * setting.batch_size))
        common_steps = context.hyper.local_steps or setting.epochs * steps_per_epoch
        if self.step_normaliser == "steps":
            return common_steps
        momentum = jnp.asarray(context.hyper.momentum)
        own_steps = effective_steps(context.step, momentum, most=context.setting.steps)
        return own_steps if self.step_normaliser == "a_k" else jnp.where(momentum > 0, own_steps, common_steps)

    def upload(self, variables, summary, context):
        """As in `Drifting`; the new state is Delta_k - Delta / nu_k - (w_k - w^t) / (K_s eta).

        What is sent of it is the last term, times nu_k.
        """
        client, message = super().upload(variables, summary, context)
        rate = 1 / (self._steps(context) * context.hyper.lr)
        ratio, moved = self._ratio(context), message.mean["params"]
        state = jax.tree.map(lambda correction, d: -correction - rate * d, self._correction(context), moved)
        sent = optax.tree.scale(-rate * ratio / context.setting.num_clients, moved)
        return client._replace(state=state), message._replace(total=message.total._replace(state=sent))

    def aggregate(self, server, message, weights, context):
        """Delta grows by the mean over all N clients of nu_k times their changes, each with a term -Delta / nu_k."""
        server = super().aggregate(server, message, weights, context)
        silent_share = 1 - context.count / context.setting.num_clients
        return server._replace(state=optax.tree.add_scale(message.total.state, silent_share, server.state))
