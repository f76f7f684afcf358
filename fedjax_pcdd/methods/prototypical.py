"""What methods share whose clients send the mean feature of each of their classes (FedProc, FedProto).

Local prototypes are taken under the final local weights, in eval mode, from images that are not augmented; or, as
published code has it, from the features seen in the last local epoch, in train mode, while the weights move.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.losses.prototypes import class_sums, equal_shares, merge_prototypes
from fedjax_pcdd.methods.method import Method, Tree, hyperparameter
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.trees import add_scaled, zeros_like

SEEN = "seen"  # collection of the variables with the sums over the last local epoch


class Server(NamedTuple):
    """Model (the initial one where nobody sends any), prototypes [C, D], and which of them exist [C]."""

    variables: Tree
    prototypes: jax.Array
    valid: jax.Array


@struct.dataclass
class Prototypical(Method):
    """Where local prototypes come from, and how the server merges them."""

    prototype_features: Literal["final", "last_epoch"] = hyperparameter(
        "final", help="local prototypes under the final weights, or from the features of the last epoch", static=True
    )
    prototype_weights: Literal["samples", "equal"] = hyperparameter(
        "samples", help="weights of the owners of a class in its prototype: n_kc, or equal", static=True
    )
    stale: Literal["carry", "drop"] = hyperparameter(
        "carry", help="a class that nobody sends in a round keeps its prototype, or loses it", static=True
    )

    @property
    def summary_augmented(self):
        """A pass over the local data yields the prototypes, unless they were collected during training."""
        return False if self.prototype_features == "final" else None

    def init_server(self, setting, variables, class_counts, key):
        """No prototype exists yet."""
        prototypes = jnp.zeros((setting.num_classes, setting.feature_dim))
        return Server(variables, prototypes, jnp.zeros(setting.num_classes, bool))

    def begin(self, variables: Tree, server: Server) -> Tree:
        """The variables to start from, with empty sums where they are collected during training."""
        if self.prototype_features == "final":
            return variables
        return {**variables, SEEN: zeros_like({"sums": server.prototypes, "counts": server.prototypes[:, 0]})}

    def download(self, server, client):
        """The global model."""
        return self.begin(server.variables, server)

    def observe(self, variables, outputs, batch, context):
        """Class sums [C, D] and counts [C] of the features seen in the last local epoch."""
        if self.prototype_features == "final":
            return {}
        sums, counts = class_sums(outputs.features, batch.labels, context.setting.num_classes, mask=batch.mask)
        last = context.epoch == context.setting.epochs - 1
        return {SEEN: add_scaled(variables[SEEN], {"sums": sums, "counts": counts}, last)}

    def summarise(self, variables, batch, context):
        """Class sums [C, D] and counts [C] of the features under the final weights."""
        outputs, _ = forward(context.model, variables, batch.images, train=False)
        sums, counts = class_sums(outputs.features, batch.labels, context.setting.num_classes, mask=batch.mask)
        return {"sums": sums, "counts": counts}

    def split(self, variables: Tree, summary: Tree) -> tuple[Tree, tuple[jax.Array, jax.Array]]:
        """The model, and the class sums [C, D] and counts [C] that are sent."""
        found = variables.get(SEEN, summary)
        sent = found["sums"], found["counts"]
        model = {name: tree for name, tree in variables.items() if name != SEEN}
        return model, equal_shares(*sent) if self.prototype_weights == "equal" else sent

    def aggregate(self, server, message, weights):
        """g_c, the mean over the participants that own c of their prototypes, by `prototype_weights`."""
        sums, counts = message.total
        prototypes, valid = merge_prototypes(sums, counts, server.prototypes, server.valid, stale=self.stale)
        return server._replace(prototypes=prototypes, valid=valid)
