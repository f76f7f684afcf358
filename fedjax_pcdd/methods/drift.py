"""FedDyn, FedDC and FedSMOO: each client accumulates its drift, and the server adds the mean drift of all clients.

w^{t+1} = (1/S) sum_{cohort} w_k + (1/N) sum_{all N clients} v_k, with the drift v_k the sum of a client's w_k - w^t so
far. That acts as a server momentum, near 1 if alpha is small; without this server step, alpha -> 0 gives FedAvg.
"""

from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.methods.method import Context, Message, Method, Tree, hyperparameter
from fedjax_pcdd.methods.server_step import ServerStep
from fedjax_pcdd.trees import zeros_like


class Server(NamedTuple):
    """Cloud model, mean drift of all clients, and what some settings add (else ())."""

    variables: Tree
    drift: Tree  # structured as the parameters; () if the server only averages
    latest: Tree  # mean of the latest models of all clients, if that is evaluated
    state: Tree


class Client(NamedTuple):
    """The client's drift v_k, its last model, and what a method adds (else ())."""

    drift: Tree
    latest: Tree
    state: Tree


class Sent(NamedTuple):
    """Contributions to the server's fields."""

    drift: Tree  # () if clients are weighted by `Method.weight`: it then follows from the mean of their steps
    latest: Tree
    state: Tree


def size_factor(context: Context) -> jax.Array:
    """nu_k = N n_k / n, a scalar; 1 where all clients have equally many samples."""
    facts = context.facts
    return context.setting.num_clients * (facts.num_samples / facts.federation_counts.sum())  # N n_k may exceed int32


@struct.dataclass
class Drifting(Method):
    """The server's side of these methods, which themselves define the client's objective."""

    keeps_state: ClassVar[bool] = False  # whether the field `state` of server and clients is a tree like the parameters

    eval: Literal["selected_mean", "all_mean", "cloud"] = hyperparameter(
        "selected_mean",
        help="model that GA is read from, the others being recorded beside it: mean of the cohort's models, mean of "
        "every client's latest one (the original plots; clients keep and send it, so only then it is there), or the "
        "server's",
        static=True,
    )

    server_step: Literal["full", "none"] = hyperparameter(
        "full",
        help="the algorithm's, or none: the models are averaged, by n_k, and what clients keep acts on them alone",
        static=True,
    )

    @property
    def _averages(self) -> bool:
        return self.server_step == "none"

    @property
    def _evaluated(self) -> str:
        """The model that GA is read from: if another server step follows, the cohort's mean is not kept."""
        return "cloud" if self.eval == "selected_mean" and isinstance(self, ServerStep) else self.eval

    def unread(self) -> list[str]:
        """Advice on an option that does nothing."""
        if self._averages:
            advice = f"`eval={self.eval}` does nothing with `server_step=none`, which leaves one model."
            return [advice] * (self.eval != type(self).eval)
        advice = "GA is that of the server's model, as its other step does not keep the mean of the cohort's (`eval`)."
        return [advice] * (self._evaluated != self.eval)

    def weight(self, facts):
        """The mean over the cohort is unweighted, except with `server_step=none`."""
        return super().weight(facts) if self._averages else jnp.ones((), jnp.result_type(float))

    def init_server(self, setting, variables, class_counts, key):
        """No drift yet; clients that have never taken part count with w^0. What a method adds starts at 0."""
        state = zeros_like(variables["params"]) if self.keeps_state else ()
        if self._averages:
            return Server(variables, (), (), state)
        latest = variables if self.eval == "all_mean" else ()
        return Server(variables, zeros_like(variables["params"]), latest, state)

    def init_client(self, setting, server, facts, key):
        """No drift yet, and 0 for what a method adds."""
        return Client(zeros_like(server.variables["params"]), server.latest, zeros_like(server.state))

    def pace(self) -> jax.Array | float:
        """The factor of w_k - w^t in the growth of a drift."""
        return 1.0

    def upload(self, variables, summary, context):
        """The model as its change from w^t, and this client's share of changes that do not follow from their mean."""
        client, share = context.client, 1 / context.setting.num_clients
        moved = optax.tree.sub(variables["params"], context.start["params"])
        grown = optax.tree.scale(self.pace(), moved)
        drift_change = () if context.setting.own_weights or self._averages else optax.tree.scale(share, grown)
        latest = variables if client.latest else ()
        latest_change = optax.tree.scale(share, optax.tree.sub(latest, client.latest))
        client = client._replace(drift=optax.tree.add(client.drift, grown), latest=latest)
        return client, Message(mean={**variables, "params": moved}, total=Sent(drift_change, latest_change, ()))

    def aggregate(self, server, message, weights, context):
        """w = mean of the cohort (+ mean drift of all); running statistics are the cohort's mean."""
        step, change = message.mean["params"], message.total.drift
        if self._averages:
            params = optax.tree.add(server.variables["params"], step)
            return server._replace(variables={**message.mean, "params": params})
        if change == ():
            change = optax.tree.scale(self.pace() * context.count / context.setting.num_clients, step)
        drift = optax.tree.add(server.drift, change)
        params = optax.tree.add(server.variables["params"], optax.tree.add(step, drift))
        latest = optax.tree.add(server.latest, message.total.latest)
        return server._replace(variables={**message.mean, "params": params}, drift=drift, latest=latest)

    def _models(self, server: Server) -> dict[str, Tree]:
        """Variables of the models that `eval` can name; the cohort's mean is the cloud model without the drift."""
        if self._averages:
            return {self._evaluated: server.variables}
        models = {"cloud": server.variables}
        if not isinstance(self, ServerStep):
            mean = optax.tree.sub(server.variables["params"], server.drift)
            models["selected_mean"] = {**server.variables, "params": mean}
        return {**models, "all_mean": server.latest} if self.eval == "all_mean" else models

    def generic_variables(self, server):
        """The model that `eval` names."""
        return self._models(server)[self._evaluated]

    def further_models(self, server):
        """The models that `eval` does not name; the clients' latest ones are not kept just for this."""
        return {name: model for name, model in self._models(server).items() if name != self._evaluated}
