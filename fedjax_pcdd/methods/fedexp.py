"""FedExP: the server extrapolates beyond the clients' mean, the further the more they disagree.

Jhunjhunwala et al., "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023.
Sent: as in FedAvg (or X in `X+exp`), and the scalar ||w_k - w^t||^2 up. Clients keep nothing.
Follows the paper's step. The evaluated model is, as in its code, the mean of the last two iterates, as every second one
overshoots; training continues from the last iterate. epsilon shrinks with the square of the learning rate's decay, as
in the code, which also multiplies it by the cohort's size (option); weights are n_k (`weights=uniform` is the paper's).
Published runs clip at 10 (`grad_clip=10`), ours do not by default.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.methods.method import Tree, hyperparameter
from fedjax_pcdd.methods.own_layers import shared_part
from fedjax_pcdd.methods.server_step import ServerStep
from fedjax_pcdd.methods.wrappers import extended
from fedjax_pcdd.trees import squared_distance, where


class Measured(NamedTuple):
    """What X averages, and ||w_k - w^t||^2."""

    own: Tree
    moved: jax.Array


@struct.dataclass
class FedExP(ServerStep):
    """w <- w + max(1, sum_k p_k ||d_k||^2 / (2 (||d||^2 + epsilon))) d, with d_k = w_k - w and d of X's aggregate."""

    paper = "Jhunjhunwala et al., ICLR 2023"

    epsilon: float = hyperparameter(1e-3, symbol="epsilon", help="added to ||d||^2; large is FedAvg", low=0.0)
    epsilon_decay: bool = hyperparameter(
        True, help="epsilon times the square of the learning rate over its first", static=True
    )
    epsilon_times_cohort: bool = hyperparameter(
        False, help="epsilon times the number of participants, as the published code", static=True
    )
    iterate: Literal["average", "last"] = hyperparameter(
        "average", help="GA of the mean of the last two iterates, or of the last; the other is recorded beside it",
        static=True,
    )  # fmt: skip

    def traits(self):
        """X's, with eta_g in every round's metrics."""
        traits = super().traits()
        return traits._replace(recorded=(*traits.recorded, "extrapolation"))

    def init_server(self, setting, variables, class_counts, key):
        """X's server; the evaluated model, the step's length, and the first learning rate, 0 before the first round."""
        server: Any = super().init_server(setting, variables, class_counts, key)
        one = jnp.ones((), jnp.result_type(float))
        return extended(server, averaged=server.variables, extrapolation=one, first_lr=0 * one)

    def upload(self, variables, summary, context):
        """X's message, and the squared length of the update of the parameters that the server has."""
        client, message = super().upload(variables, summary, context)
        shared = context.server.variables["params"]
        models = [{part: tree["params"][part] for part in shared} for tree in (variables, context.start)]
        return client, message._replace(mean=Measured(message.mean, squared_distance(*models)))

    def aggregate(self, server, message, weights, context):
        """X's aggregation, then further along its step."""
        plain_mean, moved = message.mean
        result: Any = super().aggregate(server, message._replace(mean=plain_mean), weights, context)
        old, mean = server.variables["params"], result.variables["params"]
        lr, is_first = jnp.asarray(context.hyper.lr, server.first_lr.dtype), server.first_lr == 0
        first_lr = jnp.where(is_first, lr, server.first_lr)
        step = squared_distance(*(shared_part(context.setting, tree) for tree in (mean, old)))
        length = self._extrapolation(moved, step, lr / first_lr, context.count)
        params = optax.tree.add_scale(mean, length - 1, shared_part(context.setting, optax.tree.sub(mean, old)))
        variables = {**result.variables, "params": params}
        halfway = jax.tree.map(lambda new, old: 0.5 * (new + old), variables, server.variables)
        averaged = where(is_first, variables, halfway)
        return result._replace(
            variables=variables, averaged=averaged, extrapolation=length.astype(lr.dtype), first_lr=first_lr
        )

    def _extrapolation(self, moved, step, decay, count):
        """eta_g, a scalar of at least 1; 1 where nothing moved."""
        epsilon = self.epsilon * (decay**2 if self.epsilon_decay else 1) * (count if self.epsilon_times_cohort else 1)
        divisor = 2 * (step + epsilon)
        return jnp.maximum(1.0, jnp.where(divisor > 0, moved / jnp.where(divisor > 0, divisor, 1), 1))

    def _iterates(self, server) -> dict[str, Tree]:
        last = super().generic_variables(server)
        return {"average": super().generic_variables(server._replace(variables=server.averaged)), "last": last}

    def generic_variables(self, server):
        """The model that `iterate` names."""
        return self._iterates(server)[self.iterate]

    def further_models(self, server):
        """X's, and the model that `iterate` does not name."""
        iterates = {name: model for name, model in self._iterates(server).items() if name != self.iterate}
        return super().further_models(server) | iterates
