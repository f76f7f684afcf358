"""What FedAvgM and FedAdam's family share: an optimiser takes the server's model minus the clients' mean as a gradient.

The mean is that of the method X to which this server is added (`X+avgm`, `X+adam`, ...), so it is weighted as in X.
Running statistics and other state of the server are X's and never go through the optimiser.
"""

from typing import Any

import jax
import optax
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.checks import of_kind
from fedjax_pcdd.methods.drift import Drifting
from fedjax_pcdd.methods.method import hyperparameter
from fedjax_pcdd.methods.server_step import ServerStep
from fedjax_pcdd.methods.wrappers import extended


@struct.dataclass
class ServerOptimised(ServerStep):
    """w <- w - server_lr * rule(w - m), m the parameters that X's own server would have."""

    server_lr: float = hyperparameter(1.0, symbol="eta", help="learning rate of the server", low=0.0)

    def server_rule(self) -> optax.GradientTransformation:
        """The optimiser's transformation of the pseudo-gradient, as `optax.scale_by_adam()`.

        Without the learning rate, whose sign in optax (as in `optax.adam(0.1)`) would let the server ascend.
        """
        return optax.identity()

    def configure(self, setting, hyper):
        """UserError for moments that do not decay; advice on a server that does not move, and on two server steps."""
        method, advice = super().configure(setting, hyper)
        for name in ("server_momentum", "server_beta1", "server_beta2"):
            if (decay := getattr(self, name, 0.0)) >= 1:
                raise UserError(f"`{name}={decay:g}` lets moments grow or stand still: choose less than 1.")
        of_kind(self, "server_rule", self.server_rule(), optax.GradientTransformation)
        if self.server_lr == 0:
            advice = [*advice, "`server_lr=0` leaves the server's parameters where they are: set it above 0."]
        drifts = isinstance(self, Drifting) and self.server_step == "full"
        if drifts or getattr(self, "eta_g", 1.0) != 1:
            sentence = "both the method's own server step and the optimiser's act on every mean"
            advice = [*advice, f"{sentence}: the drift or `eta_g` counts twice, so tune `server_lr` with it."]
        return method, advice

    def init_server(self, setting, variables, class_counts, key):
        """X's server, and the moments before the first gradient."""
        server: Any = super().init_server(setting, variables, class_counts, key)
        return extended(server, moments=self.server_rule().init(server.variables["params"]))

    def aggregate(self, server, message, weights, context):
        """m + (g - eta * rule(g)), g = w - m the pseudo-gradient; bitwise m where rule(g) is g and eta is 1."""
        result: Any = super().aggregate(server, message, weights, context)
        mean, old = result.variables["params"], server.variables["params"]
        gradient = optax.tree.sub(old, mean)
        direction, moments = self.server_rule().update(gradient, server.moments, old)
        params = jax.tree.map(lambda m, g, d: m + (g - self.server_lr * d).astype(m.dtype), mean, gradient, direction)
        return result._replace(variables={**result.variables, "params": params}, moments=moments)
