"""FedMR: cross-entropy plus decorrelation inside each class and a margin between classes (manifold reshaping).

Fan et al., "Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping", TMLR 2023, section 3.3.
Sent: as in FedAvg, and the prototypes [C, D] and which exist [C] down, per-class feature sums [C, D] and counts [C] up.
The intra-class loss follows the published code (the tabulated mu1 fits only that form), the inter-class loss the
printed formula, since the code has none; the other readings are options. Prototypes: mean feature of all local samples
under the final local weights, in eval mode, without augmentation. What FedVLS's paper calls FedMR is `terms=intra`,
`mu1=0.001`, `weight_decay=0`.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.decorrelation import intra_class
from fedjax_pcdd.losses.prototypes import inter_class, random_subset
from fedjax_pcdd.methods.method import Message, Summary, Tree, hyperparameter
from fedjax_pcdd.methods.prototypical import Prototypical


class Server(NamedTuple):
    """Global model, prototypes [C, D], which of them exist [C], and which clients submit theirs [K]."""

    variables: Tree
    prototypes: jax.Array
    valid: jax.Array
    submits: jax.Array


INTER, MEAN = {"terms": ("both", "inter")}, {"prototypes": ("mean",)}  # what some hyper-parameters need


@struct.dataclass
class FedMR(Prototypical):
    """L = CE + mu1 * L_intra + mu2 * L_inter."""

    mu1: float | None = hyperparameter(
        None,
        symbol="mu_1",
        help="weight of the intra-class loss; by default 0.1, or 0.01 below 256 features",
        low=0.0,
        needs={"terms": ("both", "intra")},
    )
    mu2: float = hyperparameter(1e-4, symbol="mu_2", help="weight of the inter-class loss", low=0.0, needs=INTER)
    prototypes: Literal["mean", "onehot"] = hyperparameter(
        "mean", help="of the features of a class, or the c-th unit vector, fixed (section 4.4; D >= C)", static=True
    )
    terms: Literal["both", "intra", "inter"] = hyperparameter(
        "both", help="which terms are trained: intra alone sends no prototypes", static=True
    )
    form: Literal["offdiag", "frobenius"] = hyperparameter(
        "offdiag",
        help="intra-class loss of the published code, or as printed (eq. 3)",
        static=True,
        needs={"terms": ("both", "intra")},
    )
    negatives: Literal["local", "all"] = hyperparameter(
        "local",
        help="rival classes of the inter-class loss: the client's own, or all with a prototype",
        static=True,
        needs=INTER,
    )
    lite: int | None = hyperparameter(
        None,
        symbol="n",
        help="samples of a batch in the inter-class loss; by default all",
        low=0,
        static=True,
        needs=INTER,
    )
    submitters: float = hyperparameter(
        1.0,
        help="share of the clients that submit prototypes, chosen once; their number is rounded, halves to even",
        low=0.0,
        high=1.0,
        static=True,
        needs=INTER | MEAN,
    )
    prototype_inputs: Literal["plain", "augmented"] = hyperparameter(
        "plain", help="images that prototypes are computed from", static=True, needs=INTER | MEAN
    )
    prototype_mode: Literal["eval", "train"] = hyperparameter(
        "eval",
        help="batch norm in that pass: running statistics, or those of batches of B",
        static=True,
        needs=INTER | MEAN,
    )

    def traits(self):
        """Prototypes come from a pass over the local data, in training mode if it uses batch statistics."""
        summary = Summary(self.prototype_inputs == "augmented", self.prototype_mode == "train")
        no_pass = self.terms == "intra" or self.prototypes == "onehot"
        return super().traits()._replace(paper="Fan et al., TMLR 2023", summary=None if no_pass else summary)

    def configure(self, setting, hyper):
        """The tabulated mu1 belongs to D >= 512 with batch norm; small models need less.

        Raises:
          UserError: unit vectors for more classes than features.
        """
        if self.prototypes == "onehot" and setting.feature_dim < setting.num_classes:
            raise UserError(
                f"`prototypes=onehot` needs a feature for each of the {setting.num_classes} classes, and the model has "
                f"{setting.feature_dim}: choose a wider one."
            )
        mu1 = self.mu1 if self.mu1 is not None else (0.1 if setting.feature_dim >= 256 else 0.01)
        return dataclasses.replace(self, mu1=mu1), []

    def init_server(self, setting, variables, class_counts, key):
        """Means are not valid yet, unit vectors are; round(submitters * K) clients are chosen to submit prototypes."""
        clients = setting.num_clients
        submits = jax.random.permutation(key, clients) < round(self.submitters * clients)
        server = Server(*super().init_server(setting, variables, class_counts, key), submits)
        if self.prototypes == "mean":
            return server
        classes, features = server.prototypes.shape
        return server._replace(prototypes=jnp.eye(classes, features), valid=jnp.ones_like(server.valid))

    def penalty(self, variables, outputs, batch, context):
        """mu1 * L_intra + mu2 * L_inter on the features of the batch, a scalar (section 3.3)."""
        classes = context.setting.num_classes
        value: Any = 0.0
        mu1: Any = self.mu1
        if self.terms != "inter":
            value += mu1 * intra_class(outputs.features, batch.labels, classes, form=self.form, mask=batch.mask)
        if self.terms != "intra":
            value += self.mu2 * self._inter(outputs, batch, context)
        return value

    def _inter(self, outputs, batch, context):
        server, counts = context.server, context.facts.class_counts
        mask = batch.mask if self.lite is None else random_subset(context.keys.method, batch.mask, self.lite)
        rivals = counts > 0 if self.negatives == "local" else jnp.ones(counts.shape, bool)
        return inter_class(outputs.features, batch.labels, server.prototypes, server.valid, rivals, mask=mask)

    def upload(self, variables, summary, context):
        """The model, and the class sums if this client submits them."""
        submits = context.server.submits[context.facts.client]
        total = jax.tree.map(lambda x: jnp.where(submits, x, 0), summary)
        return context.client, Message(mean=variables, total=total)

    def aggregate(self, server, message, weights, context):
        """The weighted mean of the models, and the prototypes of the submitting clients merged."""
        server = server._replace(variables=message.mean)
        return server if self.traits().summary is None else super().aggregate(server, message, weights, context)
