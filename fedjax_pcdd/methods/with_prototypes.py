"""Any averaging method "with prototypes" (FedMR, Table 8): its own objective plus FedProc's contrast.

The FedMR paper does not define these rows. It calls FedProc the prototype version of FedAvg, so that of X is here the
objective of X + mu * L_gpc, with prototypes sent and merged as in FedProc beside whatever X sends. On the command line
`--method=X+prototypes`, as `fedprox+prototypes`.
"""

import functools
from collections import namedtuple
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.contrastive import prototype_contrast
from fedjax_pcdd.losses.prototypes import merge_prototypes
from fedjax_pcdd.methods.method import Method, Tree, hyperparameter
from fedjax_pcdd.methods.prototypical import sums_of
from fedjax_pcdd.models.classifier import forward

SUFFIX = "+prototypes"


class Totals(NamedTuple):
    """What X sums, and class sums [C, D] and counts [C]."""

    own: Tree
    classes: Tree


@functools.cache
def _extended(server: type) -> type:
    """The server class of X with two further fields: prototypes [C, D], and which of them exist [C]."""
    fields: Any = server
    return namedtuple(f"{server.__name__}WithPrototypes", (*fields._fields, "prototypes", "valid"))


@functools.cache
def with_prototypes(cls: type[Method], name: str) -> type[Method]:
    """The method `cls` of that name with a contrast to class prototypes; UserError where it cannot have one."""
    if cls.summary_augmented is not None or cls.exchange != "never" or not cls.global_model or cls.own_models:
        raise UserError(f"`method={name}{SUFFIX}` does not exist: {name} is no method that only averages models.")

    @struct.dataclass
    class WithPrototypes(cls):
        prototype_mu: float = hyperparameter(1e-4, symbol="mu", help="weight of the contrast to prototypes", low=0.0)
        prototype_tau: float = hyperparameter(0.5, symbol="tau", help="temperature of that contrast", above=0.0)

        @property
        def summary_augmented(self):
            """A pass over the local data yields the prototypes."""
            return False

        def init_server(self, setting, variables, class_counts, key):
            """X's server, and no prototype yet."""
            server = super().init_server(setting, variables, class_counts, key)
            prototypes = jnp.zeros((setting.num_classes, setting.feature_dim))
            return _extended(type(server))(*server, prototypes, jnp.zeros(setting.num_classes, bool))

        def penalty(self, variables, outputs, batch, context):
            """X's penalty + mu * L_gpc, a scalar."""
            server = context.server
            contrast = prototype_contrast(
                outputs.features, batch.labels, server.prototypes, server.valid, self.prototype_tau, mask=batch.mask
            )
            return super().penalty(variables, outputs, batch, context) + self.prototype_mu * contrast

        def summarise(self, variables, batch, context):
            """Class sums [C, D] and counts [C] of the features under the final weights."""
            outputs, _ = forward(context.model, variables, batch.images, train=False)
            return sums_of(outputs.features, batch, context.setting.num_classes)

        def upload(self, variables, summary, context):
            """X's message, and the class sums."""
            client, message = super().upload(variables, (), context)
            return client, message._replace(total=Totals(message.total, summary))

        def aggregate(self, server, message, weights):
            """X's aggregation, and the merged prototypes."""
            own, classes = message.total
            merged = merge_prototypes(classes["sums"], classes["counts"], server.prototypes, server.valid)
            after: Any = super().aggregate(server, message._replace(total=own), weights)
            return after._replace(prototypes=merged[0], valid=merged[1])

    WithPrototypes.__name__ = f"{cls.__name__}WithPrototypes"
    WithPrototypes.__doc__ = f"{cls.__name__}'s objective + mu * L_gpc, FedProc's contrast to class prototypes."
    return WithPrototypes
