"""FedProx: a proximal term keeps local weights near the received ones.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, eq. 2.
Sent: as in FedAvg. A client keeps nothing between rounds (it holds the received weights while it trains).
Follows the paper; running statistics are not part of the penalty.
"""

from flax import struct

from fedjax_pcdd.methods.method import Method, Traits, hyperparameter
from fedjax_pcdd.trees import squared_distance


@struct.dataclass
class FedProx(Method):
    """FedAvg plus (mu / 2) * ||w - w^t||^2 in the local objective."""

    mu: float = hyperparameter(0.01, symbol="mu", help="weight of the proximal term", low=0.0)

    def traits(self):
        """FedAvg's traits, with the paper."""
        return Traits("Li et al., MLSys 2020")

    def regulariser(self, params, context):
        """Proximal term, a scalar; its gradient is mu * (w - w^t) (eq. 2)."""
        return 0.5 * self.mu * squared_distance(params, context.start["params"])
