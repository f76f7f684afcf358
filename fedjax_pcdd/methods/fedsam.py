"""FedSAM: every local step descends with the gradient at the worst point nearby, so clients settle in flat regions.

Qu et al., "Generalized Federated Learning via Sharpness Aware Minimization", ICML 2022, algorithm 1; the same idea in
Caldarola et al., ECCV 2022. Sent: as in FedAvg. Clients keep nothing. A step costs two gradients. `X+sam` is X with the
same perturbation, along the gradient of X's whole objective; X's corrections of gradients act on the second one.
Follows the paper except for the weights: n_k (`weights=uniform` is the paper's). Published codes update running
statistics in both passes (option), differ in the constant added to the norm, and clip at 10 (`grad_clip=10`), which
ours does not by default.
"""

import optax
from flax import struct

from fedjax_pcdd.methods.method import hyperparameter
from fedjax_pcdd.methods.sharpness import SharpnessAware, ascent


@struct.dataclass
class FedSAM(SharpnessAware):
    """g = grad F(w + rho grad F(w) / ||grad F(w)||)."""

    paper = "Qu et al., ICML 2022"

    adaptive: bool = hyperparameter(False, help="perturb each weight in proportion to its size", static=True)

    def configure(self, setting, hyper):
        """Advice: without a perturbation the second pass is for nothing."""
        method, advice = super().configure(setting, hyper)
        same = "FedSAM with `rho=0` perturbs nothing at twice the cost: set `rho` above 0."
        return method, [*advice, same] if self.rho == 0 else advice

    def point(self, params, gradients, context):
        """w + e."""
        return optax.tree.add(params, ascent(gradients, params, self.rho, adaptive=self.adaptive))
