"""Any averaging method "with prototypes" (FedMR, Table 8): its own objective plus FedProc's contrast.

The FedMR paper does not define these rows. It calls FedProc the prototype version of FedAvg, so here that of X has the
objective of X + mu * L_gpc, with prototypes sent and merged as in FedProc, beside whatever X sends. Its name is
`method=X+prototypes`, for example `fedprox+prototypes`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.contrastive import prototype_contrast
from fedjax_pcdd.losses.prototypes import merge_prototypes
from fedjax_pcdd.methods.method import Summary, Tree, hyperparameter
from fedjax_pcdd.methods.prototypical import Prototypical, class_statistics
from fedjax_pcdd.methods.wrappers import Addition, averages_models, extended


class Both(NamedTuple):
    """What X sums, and class sums [C, D] and counts [C]."""

    own: Tree
    classes: Tree


@struct.dataclass
class Prototypes(Addition):
    """X's objective + mu * L_gpc, FedProc's contrast to class prototypes."""

    paper = "Fan et al., TMLR 2023, Table 8"

    prototype_mu: float = hyperparameter(1e-4, symbol="mu", help="weight of the contrast to prototypes", low=0.0)
    prototype_tau: float = hyperparameter(0.5, symbol="tau", help="temperature of that contrast", above=0.0)

    @classmethod
    def unsuitable(cls, other):
        """The reason, if there are prototypes already, or no model is averaged."""
        reason = "has prototypes already." if issubclass(other, Prototypical) else ""
        return reason or super().unsuitable(other)

    def traits(self):
        """A pass over the local data yields the prototypes, beside what X takes from it."""
        traits = super().traits()
        return traits._replace(summary=(traits.summary or Summary())._replace(last=0))

    def configure(self, setting, hyper):
        """As X; UserError if it does not average models in this form."""
        if not averages_models(self):
            raise UserError("a contrast to prototypes asks for a method that averages models: drop the suffix.")
        return super().configure(setting, hyper)

    def init_server(self, setting, variables, class_counts, key):
        """X's server, and no prototype yet."""
        server = super().init_server(setting, variables, class_counts, key)
        prototypes = jnp.zeros((setting.num_classes, setting.feature_dim))
        return extended(server, prototypes=prototypes, valid=jnp.zeros(setting.num_classes, bool))

    def penalty(self, variables, outputs, batch, context):
        """X's penalty + mu * L_gpc, a scalar."""
        server = context.server
        contrast = prototype_contrast(
            outputs.features, batch.labels, server.prototypes, server.valid, self.prototype_tau, mask=batch.mask
        )
        return super().penalty(variables, outputs, batch, context) + self.prototype_mu * contrast

    def summarise(self, variables, batch, context):
        """X's statistics, and class sums [C, D] and counts [C] of the features under the final weights."""
        return Both(super().summarise(variables, batch, context), class_statistics(variables, batch, context))

    def upload(self, variables, summary, context):
        """X's message, and the class sums."""
        client, message = super().upload(variables, summary.own, context)
        return client, message._replace(total=Both(message.total, summary.classes))

    def aggregate(self, server, message, weights, context):
        """X's aggregation, and the merged prototypes."""
        plain_total, classes = message.total
        merged = merge_prototypes(classes["sums"], classes["counts"], server.prototypes, server.valid)
        result: Any = super().aggregate(server, message._replace(total=plain_total), weights, context)
        return result._replace(prototypes=merged[0], valid=merged[1])
