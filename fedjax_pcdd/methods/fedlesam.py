"""FedLESAM: clients look uphill along the old global model minus the new one, which costs no second gradient.

Fan et al., "Locally Estimated Global Perturbations are Better than Local Perturbations for Federated Sharpness-aware
Minimization", ICML 2024. Sent: as FedAvg. A client keeps the global model that it received last (P).
Follows the paper; the published code takes the server's last update for all clients (`memory=server`, then 2P are sent
down and clients keep nothing) and divides by the sum of the layers' norms (`norm=sum`). As published it also
passes one vector where a list of tensors is meant, which is a slip and not offered.
Published runs clip at 10 (`--grad-clip=10`), ours do not unless told to.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.methods.method import Context, Message, Method, Traits, Tree, hyperparameter
from fedjax_pcdd.methods.sharpness import TINY, moved_to, of_length
from fedjax_pcdd.trees import where, zeros_like


class Server(NamedTuple):
    """Global model, and the parameters before its last step where all clients look along that (else ())."""

    variables: Tree
    previous: Tree


class Client(NamedTuple):
    """The parameters received last, and whether there were any."""

    received: Tree
    seen: jax.Array


@struct.dataclass
class FedLESAM(Method):
    """g = grad F(w + e), e = rho (w_old - w^t) / ||w_old - w^t||, constant over the round."""

    rho: float = hyperparameter(0.1, symbol="rho", help="length of the perturbation; 0 is FedAvg", low=0.0)
    memory: Literal["client", "server"] = hyperparameter(
        "client", help="w_old: received by the client when it last took part, or w^{t-1} for all", static=True
    )
    norm: Literal["global", "sum"] = hyperparameter(
        "global", help="the divisor: one norm, or the sum of those of the layers' tensors", static=True
    )

    def traits(self):
        """As FedAvg."""
        return Traits("Fan et al., ICML 2024")

    def configure(self, setting, hyper):
        """Without a perturbation the old model is kept for nothing."""
        return self, [
            "FedLESAM with `rho=0` is FedAvg that keeps a model more: set it above 0."
        ] if self.rho == 0 else []

    def init_server(self, setting, variables, class_counts, key):
        """No step yet."""
        previous = jax.tree.map(jnp.copy, variables["params"]) if self.memory == "server" else ()
        return Server(variables, previous)

    def init_client(self, setting, server, facts, key):
        """Nothing received yet."""
        return Client(zeros_like(server.variables["params"]), jnp.zeros((), bool)) if self.memory == "client" else ()

    def perturbation(self, context: Context) -> Tree:
        """e, as the parameters; 0 at a client's first participation and where the model stood still."""
        start: Any = context.start["params"]
        if self.memory == "server":
            old = context.server.previous
        else:
            old = where(context.client.seen, context.client.received, start)
        back = optax.tree.sub(old, start)
        if self.norm == "global":
            return of_length(back, self.rho)
        total = sum(jnp.linalg.norm(x.ravel()) for x in jax.tree.leaves(back))
        return optax.tree.scale(self.rho / (total + TINY), back)

    def local_update(self, evaluate, step, variables, batch, context):
        """The gradient at w + e, taken from w."""
        perturbed = optax.tree.add(variables["params"], self.perturbation(context))
        loss, state, gradients = evaluate(moved_to(variables, perturbed))
        return loss, state, step(gradients)

    def upload(self, variables, summary, context):
        """The model; kept is the one that was received."""
        received = Client(context.start["params"], jnp.ones((), bool)) if self.memory == "client" else ()
        return received, Message(mean=variables)

    def aggregate(self, server, message, weights, context):
        """The mean."""
        previous = server.variables["params"] if self.memory == "server" else ()
        return server._replace(variables=message.mean, previous=previous)
