"""FedSMOO: FedDyn's consensus on the weights, and one on the perturbation of the weights.

Sun et al., "Dynamic Regularized Sharpness Aware Minimization in Federated Learning: Approaching Global Consistency and
Smooth Landscape", ICML 2023. Sent: the model and the perturbation s down (2P), the model and the dual mu_k
up (2P). A client keeps its drift h_k and its dual mu_k (2P). A step costs two gradients.
Follows the authors' code, including the signs of the dual, except for clipping: the whole corrected gradient is
clipped, where the code leaves lambda w to the weight decay (`quadratic=decay`). The evaluated model is the server's;
FedDyn's mean of the cohort is recorded beside it. Published runs clip at 10 (`grad_clip=10`), ours do not by default.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.methods.drift import Drifting
from fedjax_pcdd.methods.method import Traits, hyperparameter
from fedjax_pcdd.methods.own_layers import shared_part
from fedjax_pcdd.methods.parts import without_collection
from fedjax_pcdd.methods.sharpness import of_length
from fedjax_pcdd.trees import zeros_like

DUAL = "dual"  # the collection of the variables in which local steps change mu_k


@struct.dataclass
class FedSMOO(Drifting):
    """g = grad F(w + e) + lambda (h_k + w - w^t), e = rho d / ||d|| with d = grad F(w) - mu_k - s; mu_k += e - s."""

    keeps_state = True  # s and mu_k

    rho: float = hyperparameter(0.1, symbol="rho", help="length of the perturbation; 0 is FedDyn", low=0.0)
    lam: float = hyperparameter(
        0.1, symbol="lambda", help="weight of the dynamic regulariser; 0 is without drifts", low=0.0
    )
    quadratic: Literal["clipped", "decay"] = hyperparameter(
        "clipped", help="lambda w with the gradient, or after its clipping, beside the weight decay", static=True
    )
    eval: Literal["selected_mean", "all_mean", "cloud"] = hyperparameter(
        "cloud", help="model that GA is read from, as in FedDyn; the others are recorded beside it", static=True
    )

    def traits(self):
        """FedAvg's traits, with the paper."""
        return Traits("Sun et al., ICML 2023")

    def configure(self, setting, hyper):
        """Advice on what is left without one of its parts, and on an `eval` without effect."""
        method, advice = super().configure(setting, hyper)
        advice = [*advice, *self.unread()]
        if self.rho == 0:
            advice = [*advice, "FedSMOO with `rho=0` is FedDyn at twice the cost: set `rho` above 0."]
        return method, advice

    def pace(self) -> Any:
        """No drift accumulates at lambda = 0."""
        return jnp.where(jnp.asarray(self.lam) > 0, 1.0, 0.0)

    def download(self, server, client):
        """The cloud model, and the dual."""
        return {**server.variables, DUAL: client.state}

    def local_update(self, evaluate, step, variables, batch, context):
        """Perturbation and dual from the gradient at w, then the corrected gradient at w + e."""
        params, consensus = variables["params"], context.server.state
        loss, state, gradients = evaluate(variables)
        uphill = jax.tree.map(lambda g, mu, s: g - mu - s, gradients, variables[DUAL], consensus)
        e = of_length(uphill, self.rho)
        dual = shared_part(context.setting, jax.tree.map(lambda mu, e, s: mu + e - s, variables[DUAL], e, consensus))
        second = evaluate({**variables, "params": optax.tree.add(params, e)}).gradients
        decays = self.quadratic == "decay"
        clipped = zeros_like(params) if decays else params
        tie = jax.tree.map(lambda h, w, start: h + w - start, context.client.drift, clipped, context.start["params"])
        tie, decayed = (shared_part(context.setting, tree) for tree in (tie, params))
        unclipped = {"unclipped": optax.tree.scale(self.lam, decayed)} if decays else {}
        return loss, {**state, DUAL: dual}, step(optax.tree.add_scale(second, self.lam, tie), **unclipped)

    def upload(self, variables, summary, context):
        """As in `Drifting`, and the dual."""
        dual = variables[DUAL]
        client, message = super().upload(without_collection(variables, DUAL), summary, context)
        return client._replace(state=dual), message._replace(total=message.total._replace(state=dual))

    def aggregate(self, server, message, weights, context):
        """As in `Drifting`, and s = rho u / ||u||, with u the mean dual of the cohort."""
        mean = optax.tree.scale(1 / jnp.maximum(context.count, 1), message.total.state)
        return super().aggregate(server, message, weights, context)._replace(state=of_length(mean, self.rho))
