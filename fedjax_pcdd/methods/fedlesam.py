"""FedLESAM: clients perturb their weights along the old global model minus the new one, without a second gradient.

Fan et al., "Locally Estimated Global Perturbations are Better than Local Perturbations for Federated Sharpness-aware
Minimization", ICML 2024. Sent: as in FedAvg. A client keeps the global model that it received last (P). `X+lesam` is X
with the same perturbation, as in the paper for SCAFFOLD (FedLESAM-S) and FedDyn (-D): what X adds to a gradient is
taken at w, and X's client state is kept beside the received model.
Follows the paper; the published code takes the server's last update for all clients (`memory=server`, then 2P are sent
down and clients keep nothing) and divides by the sum of the layers' norms (`norm=sum`). As published it also passes one
vector where a list of tensors is meant, a mistake that is not offered here.
Published runs clip at 10 (`grad_clip=10`), ours do not by default.
"""

from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.checks import scalar
from fedjax_pcdd.methods.method import Context, Method, Tree, hyperparameter
from fedjax_pcdd.methods.own_layers import shared_part
from fedjax_pcdd.methods.sharpness import TINY, Nearby, of_length
from fedjax_pcdd.methods.wrappers import averages_models, extended
from fedjax_pcdd.trees import where, zeros_like


class Client(NamedTuple):
    """X's state (FedAvg's is ()), the parameters received last, and whether any were received."""

    own: Tree
    received: Tree
    seen: jax.Array


@struct.dataclass
class FedLESAM(Nearby):
    """g = grad F(w + e), e = rho (w_old - w^t) / ||w_old - w^t||, constant over the round."""

    paper = "Fan et al., ICML 2024"

    keeps: ClassVar[Any] = Client

    rho: float = hyperparameter(0.1, symbol="rho", help="length of the perturbation; 0 is FedAvg", low=0.0)
    memory: Literal["client", "server"] = hyperparameter(
        "client", help="w_old: received by the client when it last took part, or w^{t-1} for all", static=True
    )
    norm: Literal["global", "sum"] = hyperparameter(
        "global", help="the divisor: one norm, or the sum of those of the layers' tensors", static=True
    )

    @classmethod
    def unsuitable(cls, other):
        """The reason, if there is no global model to look back to, or a step is not of one model."""
        return super().unsuitable(other) or super(Nearby, cls).unsuitable(other)  # Nearby's reasons, then Addition's

    def configure(self, setting, hyper):
        """Advice: without a perturbation the old model is kept for nothing; UserError if X averages no models so."""
        method, advice = super().configure(setting, hyper)
        if not averages_models(method):
            raise UserError("FedLESAM needs a method that averages models in this form: drop the suffix.")
        idle = "FedLESAM with `rho=0` perturbs nothing and keeps a model more: set it above 0."
        return method, [*advice, idle] if self.rho == 0 else advice

    def init_server(self, setting, variables, class_counts, key):
        """X's server and, with `memory=server`, the parameters before its last step: none was taken yet."""
        server: Any = super().init_server(setting, variables, class_counts, key)
        if self.memory == "client":
            return server
        return extended(server, previous=server.variables["params"])

    def init_client(self, setting, server, facts, key):
        """X's state and, with `memory=client`, the parameters received last: none yet."""
        state = super().init_client(setting, server, facts, key)
        if self.memory == "server":
            return state
        return Client(state, zeros_like(server.variables["params"]), jnp.zeros((), bool))

    def perturbation(self, context: Context) -> Tree:
        """e, structured as the sent parameters; 0 at a client's first participation and if the model did not move."""
        start = _shared(context.start, context)
        if self.memory == "server":
            old = context.server.previous
        else:
            old = where(context.client.seen, context.client.received, start)
        back = shared_part(context.setting, optax.tree.sub(old, start))
        if self.norm == "global":
            return of_length(back, self.rho)
        total = sum(jnp.linalg.norm(x.ravel()) for x in jax.tree.leaves(back))
        return optax.tree.scale(self.rho / (total + TINY), back)

    def local_update(self, evaluate, step, variables, batch, context):
        """X's step with the gradient at w + e in place of that at w."""

        def elsewhere(variables):
            params, e = variables["params"], self.perturbation(context)
            perturbed = {**params, **optax.tree.add({part: params[part] for part in e}, e)}
            evaluated = evaluate({**variables, "params": perturbed})
            if type(self).regulariser is Method.regulariser:
                return evaluated
            gradient = jax.grad(lambda p: scalar(self, "regulariser", self.regulariser(p, context)))
            change = optax.tree.sub(gradient(params), gradient(perturbed))
            return evaluated._replace(gradients=optax.tree.add(evaluated.gradients, change))

        return super().local_update(elsewhere, step, variables, batch, context)

    def upload(self, variables, summary, context):
        """X's state and message; with `memory=client`, the received parameters are kept too."""
        if self.memory == "server":
            return super().upload(variables, summary, context)
        state, message = super().upload(variables, summary, context._replace(client=context.client.own))
        return Client(state, _shared(context.start, context), jnp.ones((), bool)), message

    def aggregate(self, server, message, weights, context):
        """X's aggregation; with `memory=server`, the parameters before it are kept."""
        result: Any = super().aggregate(server, message, weights, context)
        return result if self.memory == "client" else result._replace(previous=server.variables["params"])


def _shared(variables: Tree, context: Context) -> Tree:
    """Those of the parameters that the server has."""
    return {part: variables["params"][part] for part in context.server.variables["params"]}
