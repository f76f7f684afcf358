"""FedAvgM: the server has a momentum of its own.

Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", 2019.
Sent: as in FedAvg, or as X in `X+avgm`. Clients keep nothing, the server its momentum (P).
Follows the paper: heavy-ball momentum, with Nesterov's form as an option; the mean is weighted as in X itself.
"""

import optax
from flax import struct

from fedjax_pcdd.methods.method import hyperparameter
from fedjax_pcdd.methods.server_optimised import ServerOptimised


@struct.dataclass
class FedAvgM(ServerOptimised):
    """b <- beta b + g, w <- w - eta b."""

    paper = "Hsu et al., 2019"

    server_momentum: float = hyperparameter(0.9, symbol="beta", help="the server's momentum", low=0.0)
    server_nesterov: bool = hyperparameter(False, help="w - eta (g + beta b), b being new", static=True)

    def server_rule(self):
        """Heavy-ball momentum, without dampening."""
        return optax.trace(self.server_momentum, self.server_nesterov)
