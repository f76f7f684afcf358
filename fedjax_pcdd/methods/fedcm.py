"""FedCM: every local gradient is mostly the federation's last mean direction, and only in part the client's own.

Xu et al., "FedCM: Federated Learning with Client-level Momentum", 2021.
Sent: the model and the direction Delta down (2P), the model and the scalar eta tau_k up. Clients keep nothing.
Follows the published code, which has no local momentum, except for the weights, which are n_k, and for tau_k: the steps
that each client made (a_k with momentum), where the code takes those of the first client for all. Clipping acts on the
mixture; weight decay is added in full afterwards. Published runs clip at 10 (`grad_clip=10`), ours do not by default.
"""

from typing import Any

from flax import struct

from fedjax_pcdd.methods.client_momentum import ClientMomentum
from fedjax_pcdd.methods.method import Traits, hyperparameter


@struct.dataclass
class FedCM(ClientMomentum):
    """g = alpha grad F(w) + (1 - alpha) Delta."""

    alpha: float = hyperparameter(
        0.1, symbol="alpha", help="the client's share of a gradient; 1 is FedAvg", above=0.0, high=1.0
    )

    def traits(self):
        """FedAvg's traits, with the paper."""
        return Traits("Xu et al., 2021")

    def share(self) -> Any:
        """alpha."""
        return self.alpha

    def local_update(self, evaluate, step, variables, batch, context):
        """A step along the mixture."""
        loss, state, gradients = evaluate(variables)
        return loss, state, step(self.mixed(gradients, context))
