"""FedTGP: as FedProto, but the server trains the global prototypes with a margin, so that they stay apart.

Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data and Model
Heterogeneity in Federated Learning", AAAI 2024.
Sent: the prototypes [C, D] and which exist [C], down and up. A client keeps its model.
Follows the published code: the margin is the largest distance of a class centre to its nearest neighbour (the paper's
is the largest distance of all: `margin=farthest`), prediction is by the nearest prototype of any class, defaults are
the script's. The server's network has a prototype for every class; that of a class that no client owns is only pushed
away. Clients may have models of several architectures (`models`) with the same number of features (`features`); models
of one architecture start alike. Until prototypes exist, clients predict with their classifiers.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.losses.prototypes import adaptive_margin, equal_shares, margin_cross_entropy
from fedjax_pcdd.methods.method import Message, Summary, Traits, hyperparameter
from fedjax_pcdd.methods.near_prototypes import NearPrototypes
from fedjax_pcdd.methods.prototypical import class_statistics
from fedjax_pcdd.methods.server_training import train_in_passes
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.models.generator import generate_prototypes, initialise_prototypes


class Server(NamedTuple):
    """The initial model; the network of prototypes, its output [C, D], and which are in use [C]: none or all."""

    variables: Any
    generator: Any
    prototypes: jax.Array
    valid: jax.Array


@struct.dataclass
class FedTGP(NearPrototypes):
    """L = CE + lambda / (B D) * sum_b ||z_b - g_{y_b}||^2 on a model that never leaves its client."""

    lam: float = hyperparameter(10.0, symbol="lambda", help="weight of the distance to the prototypes", low=0.0)
    margin_limit: float = hyperparameter(100.0, symbol="tau", help="largest margin between classes", low=0.0)
    margin: Literal["nearest", "farthest"] = hyperparameter(
        "nearest", help="margin: largest distance between nearest centres (code), or of any two (paper)", static=True
    )
    server_epochs: int = hyperparameter(
        100, symbol="S", help="passes over the uploaded prototypes a round; the published parser has 1000", low=0,
        static=True,
    )  # fmt: skip
    server_batch: int = hyperparameter(10, help="uploaded prototypes of a step of the server", low=1, static=True)
    prototype_lr: float | None = hyperparameter(
        None, help="learning rate of the server's SGD; by default that of the clients", low=0.0
    )
    predict: Literal["prototype", "own", "classifier"] = hyperparameter(
        "prototype", help="prediction by the nearest prototype, for PA of own classes only, or by the classifier",
        static=True,
    )  # fmt: skip

    def traits(self):
        """As for all methods that keep models near prototypes, which here come from a pass over the local data."""
        traits = Traits("Zhang et al., AAAI 2024", summary=Summary())
        return self.kept(traits, classifies=self.predict == "classifier")

    def configure(self, setting, hyper):
        """Advice: prototypes have no effect without the distance to them, or without training on the server."""
        if float(self.lam) == 0:
            return self, ["FedTGP with `lam=0` trains models that never see a prototype: choose `lam` above 0."]
        if self.server_epochs == 0:
            return self, ["FedTGP with `server_epochs=0` has random prototypes: choose 1 or more."]
        return self, []

    def init_server(self, setting, variables, class_counts, key):
        """A fresh network as wide as the features, whose prototypes are not in use yet."""
        generator = initialise_prototypes(key, setting.num_classes, setting.feature_dim, setting.feature_dim)
        valid = jnp.zeros(setting.num_classes, bool)
        return Server(variables, generator, generate_prototypes(generator), valid)

    def summarise(self, variables, batch, context):
        """Class sums [C, D] and counts [C] of the features under the final weights."""
        return class_statistics(variables, batch, context)

    def upload(self, variables, summary, context):
        """Keep the model, send the prototypes [C, D] and which exist [C]."""
        prototypes, owned = equal_shares(**summary)
        return variables, Message(each=(prototypes, owned > 0))

    def aggregate(self, server, message, weights, context):
        """Train the network on the uploaded prototypes."""
        prototypes, owned = message.each  # of a client that did not train: none
        owners, count = jnp.sum(owned, axis=0), jnp.sum(owned)
        centres = jnp.sum(jnp.where(owned[..., None], prototypes, 0), axis=0) / jnp.maximum(owners, 1)[:, None]
        margin = adaptive_margin(centres, owners > 0, self.margin_limit, self.margin)
        uploaded, labels = prototypes.reshape(owned.size, -1), jnp.tile(jnp.arange(owned.shape[1]), len(owned))
        most = len(owned) * context.setting.most_classes  # that can have been uploaded

        def loss(params, index, mask):
            targets = generate_prototypes(params)
            return margin_cross_entropy(uploaded[index], labels[index], targets, margin, mask=mask)

        def order(epoch):
            keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(context.key, epoch), context.clients)
            lots = jax.vmap(lambda key: jax.random.uniform(key, owned.shape[1:]))(keys)  # for any order of clients
            return jnp.argsort(jnp.where(owned, lots, 2).ravel())[:most]

        lr = context.hyper.lr if self.prototype_lr is None else self.prototype_lr
        options = {"epochs": self.server_epochs, "size": self.server_batch}
        generator = train_in_passes(server.generator, loss, order, count, optax.sgd(lr), **options)
        valid = server.valid | (count > 0)
        return server._replace(generator=generator, prototypes=generate_prototypes(generator), valid=valid)

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        """Minus the distances to the prototypes; the logits if there are none yet, or if these are asked for."""
        outputs, _ = forward(model, variables, images, train=False)
        if self.predict == "classifier":
            return outputs.logits
        own_classes = self.predict == "own" and scope == "personal"
        scores = self.nearest(outputs.features, server, facts if own_classes else None)
        return jnp.where(jnp.any(server.valid), scores, outputs.logits)
