"""Class counts that a client sends: of the samples that it owns, or of those that it has seen in training."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.losses.membership import membership
from fedjax_pcdd.methods.method import Context, Method, Tree, hyperparameter
from fedjax_pcdd.methods.parts import SEEN, without_collection


@struct.dataclass
class LabelCounts(Method):
    """A method whose clients send class counts [C]; its server has `variables`, and a field `known` [C]."""

    label_counts: Literal["owned", "seen"] = hyperparameter(
        "owned", help="class counts: of the samples owned, or of those seen in training and 1 more", static=True
    )

    def download(self, server, client):
        """The global model and, if the labels seen are counted, their counts [C], which start at 1."""
        if self.label_counts == "owned":
            return server.variables
        return {**server.variables, SEEN: {"labels": jnp.ones(server.known.shape)}}

    def local_update(self, evaluate, step, variables, batch, context):
        """FedAvg's step, and the counts [C] of the labels seen so far, if these are counted."""
        loss, state, update = super().local_update(evaluate, step, variables, batch, context)
        if self.label_counts == "seen":
            members = membership(batch.labels, context.setting.num_classes, batch.mask).of_samples
            state = {**state, SEEN: {"labels": variables[SEEN]["labels"] + jnp.sum(members, axis=0)}}
        return loss, state, update

    def split(self, variables: Tree, context: Context) -> tuple[Tree, jax.Array]:
        """The model, and the class counts [C] that are sent."""
        counts = context.facts.class_counts if self.label_counts == "owned" else variables[SEEN]["labels"]
        return without_collection(variables, SEEN), counts

    def samples(self, counts: jax.Array, present: jax.Array) -> jax.Array:
        """Samples of each class [C] in the counts [S, C] of the clients that are present [S] bool."""
        initial = 0 if self.label_counts == "owned" else jnp.sum(present)
        return jnp.sum(jnp.where(present[:, None], counts, 0), axis=0) - initial
