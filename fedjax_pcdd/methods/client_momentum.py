"""What FedCM and MoFedSAM share: local gradients are mixed with the federation's mean direction of the last round.

Delta^{t+1} = (w^t - m^t) / (sum_k p_k eta tau_k), with m^t the mean of the clients' models: it has the units of a
gradient and contains the weight decay of the steps. The published code has no momentum; with it, Delta would grow by a
factor of up to (1 - share) / (1 - rho) a round if tau_k were the number of steps, so tau_k is FedNova's a_k, which
without momentum equals the number of steps.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Context, Derived, Message, Method, Tree, hyperparameter
from fedjax_pcdd.methods.own_layers import shared_part
from fedjax_pcdd.methods.steps import effective_steps, kept_advice, momentum_advice, optimiser_advice
from fedjax_pcdd.trees import zeros_like


class Server(NamedTuple):
    """Global model, and the mean direction Delta, structured as the parameters."""

    variables: Tree
    direction: Tree


class Sent(NamedTuple):
    """The model, eta * tau_k, and the client's own direction if directions are averaged (else ())."""

    variables: Tree
    length: jax.Array
    direction: Tree


@struct.dataclass
class ClientMomentum(Method):
    """The server's side of both methods, which themselves define the client's own share of a local gradient."""

    eta_g: float = hyperparameter(1.0, symbol="eta_g", help="learning rate of the server", low=0.0)
    direction: Literal["mean_steps", "per_client"] = hyperparameter(
        "mean_steps",
        help="mean update over the mean of eta tau_k, or the mean of each update over its own",
        static=True,
    )
    step_normaliser: Literal["steps", "a_k"] = hyperparameter(
        "a_k", symbol="tau_k", help="steps made, or FedNova's a_k, the same but that it counts momentum", static=True
    )
    warm: bool = hyperparameter(False, help="plain gradients in the first round, which has no direction", static=True)

    def share(self) -> Any:
        """The share of a local gradient that is the client's own, in (0, 1]."""
        raise NotImplementedError

    def configure(self, setting, hyper):
        """UserError for a share of 0, which ignores all data; advice on a direction that momentum stretches."""
        method, advice = super().configure(setting, hyper)
        name = type(self).__name__
        if self.share() == 0:
            raise UserError(f"{name} without a share of the clients' own gradients learns nothing: set it above 0.")
        stretched = "and `step_normaliser=steps` makes its direction about {:.3g} times a gradient and diverges"
        on_momentum = momentum_advice(name, hyper.momentum, effect=stretched) if self.step_normaliser == "steps" else []
        return method, [*advice, *optimiser_advice(name, hyper), *on_momentum, *kept_advice(name, setting, hyper)]

    def init_server(self, setting, variables, class_counts, key):
        """Delta = 0."""
        return Server(variables, zeros_like(variables["params"]))

    def mixed(self, gradients: Tree, context: Context) -> Tree:
        """share * g + (1 - share) * Delta."""
        share = jnp.where(context.round == 0, 1.0, self.share()) if self.warm else self.share()
        direction = context.server.direction
        mixture = jax.tree.map(lambda g, d: (share * g + (1 - share) * d).astype(g.dtype), gradients, direction)
        return shared_part(context.setting, mixture, gradients)

    def upload(self, variables, summary, context):
        """w_k and eta tau_k; the client's own direction if those are averaged."""
        hyper, plain = context.hyper, self.step_normaliser == "steps"
        steps = context.step if plain else effective_steps(context.step, hyper.momentum, most=context.setting.steps)
        length = jnp.asarray(steps * hyper.lr, jnp.result_type(float))
        direction = ()
        if self.direction == "per_client":
            moved = optax.tree.sub(context.start["params"], variables["params"])
            direction = Derived(optax.tree.scale(1 / length, moved))
        return context.client, Message(mean=Sent(variables, length, direction))

    def aggregate(self, server, message, weights, context):
        """w + eta_g (m - w), and the direction of w - m; statistics are a plain mean."""
        mean, length, direction = message.mean
        old_share = 1 - self.eta_g
        old, new = server.variables["params"], mean["params"]
        if self.direction == "mean_steps":
            direction = Derived(optax.tree.scale(1 / length, optax.tree.sub(old, new)))
        params = jax.tree.map(lambda w, m: m + old_share * (w - m), old, new)
        return server._replace(variables={**mean, "params": params}, direction=direction.value)
