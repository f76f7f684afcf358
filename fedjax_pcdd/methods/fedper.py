"""FedPer: base layers are averaged, the last layers stay with the client; both are trained together.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019.
Sent: the base layers each way, with their running statistics. A client keeps its last layers, at first the common ones;
with `start=random` the entries of each array are shuffled for each client: another draw of the same distribution.
Differs from FedRep in that it has no phases. Follows the paper with weights n_k and one personal layer, the classifier
(`layers=head,backbone/fc2` has two); momentum and weight decay act on all layers. GA is the mean over clients of their
best models on the global test set. PA is measured during training; `fine_tune_layers` measures it once more after
further training of the own layers alone, with fixed base layers.
"""

import dataclasses
from typing import Literal

import jax
from flax import struct

from fedjax_pcdd.methods.method import hyperparameter
from fedjax_pcdd.methods.split_model import SplitModel


@struct.dataclass
class FedPer(SplitModel):
    """Cross-entropy; `layers` are personal."""

    start: Literal["common", "random"] = hyperparameter(
        "common", help="first own layers: the same for all clients, or of each client's own", static=True
    )
    fine_tune_layers: bool = hyperparameter(
        False,
        help="after the last round every client trains its own layers for `fine_tune_epochs` (0: none)",
        static=True,
    )

    def traits(self):
        """As for any model with parts of the client's own."""
        return super().traits()._replace(paper="Arivazhagan et al., 2019", fine_tunes=self.fine_tune_layers)

    def own(self, part):
        """The last layers."""
        return self.last(part)

    def init_client(self, setting, server, facts, key):
        """The common initial layers, or with their entries shuffled; UserError for a layer that does not exist."""
        client = super().init_client(setting, server, facts, key)
        if self.start == "common":
            return client
        leaves, structure = jax.tree.flatten(client["params"])
        keys = jax.random.split(key, len(leaves))
        shuffled = [jax.random.permutation(k, x.ravel()).reshape(x.shape) for k, x in zip(keys, leaves, strict=True)]
        return {**client, "params": structure.unflatten(shuffled)}

    def fine_tuner(self, setting, epochs):
        """Training of the own layers alone."""
        return OwnLayers(**{field.name: getattr(self, field.name) for field in dataclasses.fields(FedPer)})


@struct.dataclass
class OwnLayers(FedPer):
    """FedPer with fixed base layers."""

    def trainable(self, params, context):
        """The client's own layers."""
        return jax.tree.map_with_path(lambda path, _: self._is_own(path), params)

    def local_update(self, evaluate, step, variables, batch, context):
        """As in FedAvg; running statistics of base layers stay fixed as well."""
        loss, state, update = super().local_update(evaluate, step, variables, batch, context)
        old_state = {name: variables[name] for name in state}
        state = jax.tree.map_with_path(lambda path, new, old: new if self._is_own(path[1:]) else old, state, old_state)
        return loss, state, update

    def _is_own(self, path):
        return self.own("/".join(key.key for key in path))
