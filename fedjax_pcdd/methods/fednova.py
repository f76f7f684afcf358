"""FedNova: clients that made more steps do not pull the mean towards themselves (normalised averaging).

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS 2020.
Sent: as in FedAvg, and the scalar a_k up. Clients keep nothing.
Follows the formula of the benchmark code, which is also the paper's: a_k counts momentum. It is the sum of the
gradients' coefficients, which equals the paper's l1 norm as long as none is negative. Running statistics are averaged
as in FedAvg; the benchmark code normalises them like parameters (option). Weight decay is part of the gradient and not
corrected for. a_k is that of SGD; with Adam it is the number of steps, reduced by mu as for SGD without momentum. For
d_k a client holds w^t beside w, 2P, where FedMR's Figure 4 counts P.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.methods.method import Message, Method, Traits, Tree, hyperparameter
from fedjax_pcdd.methods.steps import effective_steps
from fedjax_pcdd.trees import squared_distance


class Sent(NamedTuple):
    """d_k = (w^t - w_k) / a_k, what is averaged plainly, and the client's part of the server's step length."""

    direction: Tree
    plain: Tree
    steps: jax.Array


@struct.dataclass
class FedNova(Method):
    """w <- w - (sum_k p_k a_k) * (sum_k p_k d_k)."""

    mu: float = hyperparameter(0.0, symbol="mu", help="weight of a proximal term, which a_k accounts for", low=0.0)
    tau_eff: Literal["a_k", "steps"] = hyperparameter(
        "a_k",
        symbol="tau_eff",
        help="length of the server's step: the mean of a_k, or of the steps made (the paper's with a proximal term)",
        static=True,
    )
    normalise_statistics: bool = hyperparameter(
        False, help="treat running statistics like parameters, as the benchmark code does", static=True
    )

    def traits(self):
        """FedAvg's traits, with the paper."""
        return Traits("Wang et al., NeurIPS 2020")

    def configure(self, setting, hyper):
        """Advice on a proximal term whose steps overshoot its centre, so that a_k may be 0, and on kept momentum."""
        pull = float(hyper.lr * self.mu)
        overshoot = f"`mu={self.mu:g}` times `lr` is {pull:.3g}, so steps go past the global model: lower `mu`."
        uncounted = (
            "FedNova with `optimizer_state=kept` counts steps as if momentum began anew, so that clients with few "
            "steps weigh too much: drop `optimizer_state`, or set `momentum=0`."
        )
        kept = setting.keeps_optimiser and float(hyper.momentum) >= 0.1
        return self, [overshoot] * (pull >= 1) + [uncounted] * kept

    def regulariser(self, params, context):
        """(mu / 2) * ||w - w^t||^2, a scalar."""
        return 0.5 * self.mu * squared_distance(params, context.start["params"])

    def upload(self, variables, summary, context):
        """d_k, a_k and the statistics; a client without steps sends nothing and has no weight."""
        hyper = context.hyper
        a = effective_steps(context.step, hyper.momentum, hyper.lr * self.mu, most=context.setting.steps)
        names = variables if self.normalise_statistics else ("params",)
        direction = {k: jax.tree.map(lambda x, y: (x - y) / a, context.start[k], variables[k]) for k in names}
        plain = {k: v for k, v in variables.items() if k not in direction}
        steps = a if self.tau_eff == "a_k" else jnp.asarray(context.step, a.dtype)
        return context.client, Message(mean=Sent(direction, plain, steps))

    def aggregate(self, server, message, weights, context):
        """w - (sum p a) (sum p d); the statistics are a plain mean."""
        direction, plain, steps = message.mean
        moved = {k: jax.tree.map(lambda x, d: x - steps * d, server.variables[k], d) for k, d in direction.items()}
        return server._replace(variables={**plain, **moved})
