"""What methods with class prototypes from their clients share: FedMR, and with more choices FedProc and FedProto.

A local prototype is the mean feature of a class under the final local weights, in eval mode, from images that are not
augmented; or, as in the published code of some methods, of the features seen in the last local epoch, in training mode,
while the weights move. What is sent are sums and counts, which the server adds up.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.losses.prototypes import class_sums, equal_shares, merge_prototypes
from fedjax_pcdd.methods.method import (
    Batch,
    Context,
    Method,
    Summary,
    Traits,
    Tree,
    hyperparameter,
    objective,
    train_forward,
)
from fedjax_pcdd.methods.parts import SEEN, without_collection
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.trees import add_scaled, zeros_like


class Server(NamedTuple):
    """Model (the initial one where no client sends any), prototypes [C, D], and which of them exist [C]."""

    variables: Tree
    prototypes: jax.Array
    valid: jax.Array


def sums_of(features: jax.Array, batch: Batch, classes: int) -> dict[str, jax.Array]:
    """Class sums [C, D] and counts [C] of the features [B, D] of a batch."""
    sums, counts = class_sums(features, batch.labels, classes, mask=batch.mask)
    return {"sums": sums, "counts": counts}


def class_statistics(variables: Tree, batch: Batch, context: Context, *, train: bool = False) -> dict[str, jax.Array]:
    """Class sums [C, D] and counts [C] of the features of a batch under these weights, for `Method.summarise`."""
    key = context.keys.dropout
    outputs, _ = forward(context.model, variables, batch.images, train=train, mask=batch.mask, key=key)
    return sums_of(outputs.features, batch, context.setting.num_classes)


@struct.dataclass
class Prototypical(Method):
    """Prototypes from a pass over the local data after training, merged by the number of samples."""

    stale: Literal["carry", "drop"] = hyperparameter(
        "carry", help="a class that no client sends in a round keeps its prototype, or loses it", static=True
    )

    def traits(self):
        """A pass over the local data yields the prototypes."""
        return Traits(summary=Summary())

    def init_server(self, setting, variables, class_counts, key):
        """No prototype exists yet."""
        prototypes = jnp.zeros((setting.num_classes, setting.feature_dim))
        return Server(variables, prototypes, jnp.zeros(setting.num_classes, bool))

    def summarise(self, variables, batch, context):
        """Class sums [C, D] and counts [C] of the features under the final weights."""
        summary = self.traits().summary
        return class_statistics(variables, batch, context, train=summary is not None and summary.train)

    def aggregate(self, server, message, weights, context):
        """g_c = sum_k n_kc g_kc / sum_k n_kc over the participants that send c; the model is left as it is."""
        sums, counts = message.total["sums"], message.total["counts"]
        prototypes, valid = merge_prototypes(sums, counts, server.prototypes, server.valid, stale=self.stale)
        return server._replace(prototypes=prototypes, valid=valid)


@struct.dataclass
class Selective(Prototypical):
    """Prototypes with a choice of where the local ones come from, and of how the owners of a class are weighted."""

    prototype_features: Literal["final", "last_epoch"] = hyperparameter(
        "final", help="local prototypes under the final weights, or from the features of the last epoch", static=True
    )
    prototype_weights: Literal["samples", "equal"] = hyperparameter(
        "samples", help="weights of the owners of a class in its prototype: n_kc, or equal", static=True
    )

    def traits(self):
        """No pass if the prototypes are collected during training."""
        return Traits(summary=Summary() if self.prototype_features == "final" else None)

    def begin(self, variables: Tree, server: Server) -> Tree:
        """The variables to start from, with empty sums if prototypes are collected during training."""
        if self.prototype_features == "final":
            return variables
        return {**variables, SEEN: zeros_like({"sums": server.prototypes, "counts": server.prototypes[:, 0]})}

    def download(self, server, client):
        """The global model."""
        return self.begin(server.variables, server)

    def loss(self, variables, batch, context):
        """FedAvg's loss, and class sums [C, D] and counts [C] of the features seen in the last local epoch."""
        outputs, state = train_forward(variables, batch, context)
        value = objective(self, variables, outputs, batch, context)
        if self.prototype_features == "last_epoch":
            is_last_epoch = context.epoch == context.epochs - 1
            sums = sums_of(jax.lax.stop_gradient(outputs.features), batch, context.setting.num_classes)
            state = {**state, SEEN: add_scaled(variables[SEEN], sums, is_last_epoch)}
        return value, state

    def split(self, variables: Tree, summary: Tree) -> tuple[Tree, Tree]:
        """The model, and the class sums [C, D] and counts [C] that are sent."""
        sent = variables.get(SEEN, summary)
        model = without_collection(variables, SEEN)
        if self.prototype_weights == "samples":
            return model, sent
        sums, counts = equal_shares(**sent)
        return model, {"sums": sums, "counts": counts}
