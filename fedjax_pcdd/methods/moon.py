"""MOON: representations are pulled towards the global model's and pushed away from the client's previous model's.

Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021, section 3.3.
Sent: as in FedAvg. A client keeps its model after its last participation (option: after the last several).
The received and the previous model see the same augmented batch in eval mode, each with its own running statistics.
Representation: the classifier's input, so that all methods train the same model (as in FedMR); option: the paper's
projection head. A client without a previous model has no contrast, as in the first round of the published code.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.losses.contrastive import model_contrast
from fedjax_pcdd.methods.method import Message, Method, Traits, Tree, hyperparameter
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.trees import select


class Client(NamedTuple):
    """Variables of the last P local models [P, ...], newest first, and how many of them were trained."""

    models: Tree
    count: jax.Array


@struct.dataclass
class MOON(Method):
    """L = CE + mu * L_con (eq. 3 and 4)."""

    mu: float = hyperparameter(5.0, symbol="mu", help="weight of the contrast", low=0.0)
    tau: float = hyperparameter(0.5, symbol="tau", help="temperature of the contrast", above=0.0)
    previous: int = hyperparameter(
        1, symbol="P", help="previous models of a client in the contrast", low=1, static=True
    )
    first_time: Literal["skip", "initial"] = hyperparameter(
        "skip",
        help="a client's first participation: no contrast, or after the first round one with the initial model",
        static=True,
    )
    projection: int | None = hyperparameter(
        None,
        help="width of a two-layer projection head before the classifier (256 in the paper); by default none",
        low=1,
        static=True,
    )

    def traits(self):
        """FedAvg's traits, with the paper."""
        return Traits("Li et al., CVPR 2021")

    def build(self, model):
        """The model, with the paper's projection head if `projection` is set."""
        return model if self.projection is None else model.clone(neck=2, neck_width=self.projection)

    def init_client(self, setting, server, facts, key):
        """P copies of the initial model, none of them trained."""
        models = jax.tree.map(lambda x: jnp.repeat(x[None], self.previous, axis=0), server.variables)
        return Client(models, jnp.zeros((), jnp.int32))

    def _valid_models(self, context):
        """How many previous models enter the contrast in this round."""
        count = context.client.count
        if self.first_time == "skip":
            return count
        return jnp.where((count == 0) & (context.round > 0), 1, count)

    def penalty(self, variables, outputs, batch, context):
        """mu * L_con, a scalar (eq. 3)."""

        def represent(variables):
            return forward(context.model, variables, batch.images, train=False)[0].features

        models = context.client.models
        negatives = jnp.stack([represent(select(models, p)) for p in range(self.previous)])
        valid = jnp.arange(self.previous) < self._valid_models(context)
        positives = represent(context.received)
        return self.mu * model_contrast(outputs.features, positives, negatives, valid, self.tau, mask=batch.mask)

    def upload(self, variables, summary, context):
        """Send the model, and keep it as the newest of the previous ones."""
        old = context.client.models
        models = jax.tree.map(lambda new, x: jnp.concatenate([new[None], x[:-1]]), variables, old)
        count = jnp.minimum(self._valid_models(context) + 1, self.previous)
        return Client(models, count), Message(mean=variables)
