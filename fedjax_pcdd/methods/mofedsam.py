"""MoFedSAM: FedSAM's gradient at the worst point nearby, mixed with the federation's last mean direction.

Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022.
Sent: as FedCM, the model and the direction down (2P), the model and a scalar up. Clients keep nothing. A step costs two
gradients. The defaults follow a published code of later authors; the server averages (eta_g = 1), and by default
nothing is clipped (theirs is, at 10).
"""

from typing import Any

from flax import struct

from fedjax_pcdd.methods.client_momentum import ClientMomentum
from fedjax_pcdd.methods.method import Traits, hyperparameter
from fedjax_pcdd.methods.sharpness import SharpnessAware


@struct.dataclass
class MoFedSAM(SharpnessAware, ClientMomentum):
    """g = beta grad F(w + e) + (1 - beta) Delta, e from the plain gradient as in FedSAM."""

    rho: float = hyperparameter(0.1, symbol="rho", help="length of the perturbation of the weights", low=0.0)
    alpha: float = hyperparameter(
        0.1, symbol="beta", help="the client's share of a gradient; 1 is FedSAM", above=0.0, high=1.0
    )

    def traits(self):
        """FedAvg's traits, with the paper."""
        return Traits("Qu et al., ICML 2022")

    def configure(self, setting, hyper):
        """As in FedCM; advice: without a perturbation it is FedCM at twice the cost."""
        method, advice = super().configure(setting, hyper)
        same = "MoFedSAM with `rho=0` is FedCM at twice the cost: set `rho` above 0, or use `method=fedcm`."
        return method, [*advice, same] if self.rho == 0 else advice

    def share(self) -> Any:
        """beta."""
        return self.alpha

    def descent(self, gradients, context):
        """The mixture."""
        return self.mixed(gradients, context)
