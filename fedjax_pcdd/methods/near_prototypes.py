"""What FedProto and FedTGP share: models that never leave their clients, with features near the server's prototypes.

The server's state has `variables` (the initial model), `prototypes` [C, D], and `valid` [C]: which of them exist.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.losses.prototypes import nearest_prototype_scores, squared_distance_to_own
from fedjax_pcdd.methods.method import Facts, Method, Traits, hyperparameter


@struct.dataclass
class NearPrototypes(Method):
    """L = CE + lambda / (B D) * sum_b ||z_b - g_{y_b}||^2 on the client's own model."""

    lam: float = hyperparameter(1.0, symbol="lambda", help="weight of the distance to the prototypes", low=0.0)
    features: int | None = hyperparameter(
        None, symbol="D", help="features of every model, by a linear layer more; by default those that it has", low=1,
        static=True,
    )  # fmt: skip

    def kept(self, traits: Traits, *, classifies: bool) -> Traits:
        """The traits, without a shared model; prediction by prototypes needs those that the round has just made."""
        personal = "local" if classifies else "server"
        shared = {"own_models": True, "common_start": True, "common_server": True, "common_features": True}
        fields = {"target": "personal", "global_model": False, "fine_tunes": False, "personal_model": personal}
        return traits._replace(**fields, **shared)

    def build(self, model):
        """The model, with as many features as asked for."""
        return model if self.features is None else model.clone(neck=model.neck or 1, neck_width=self.features)

    def init_client(self, setting, server, facts, key):
        """The client's model, at first the common initial one."""
        return server.variables

    def download(self, server, client):
        """The client's own last model."""
        return client

    def penalty(self, variables, outputs, batch, context):
        """lambda times the mean squared distance to the prototypes, a scalar; invalid ones do not count."""
        prototypes, valid = context.server.prototypes, context.server.valid
        distance = squared_distance_to_own(outputs.features, batch.labels, prototypes, valid, mask=batch.mask)
        return self.lam * distance

    def personal_variables(self, server, client):
        """The client's own last model."""
        return client

    def nearest(self, features: jax.Array, server: Any, facts: Facts | None) -> jax.Array:
        """Minus the distances [B, C] to the valid prototypes; with `facts`, to those of the client's own classes."""
        allowed = server.valid if facts is None else server.valid & (facts.class_counts > 0)
        return nearest_prototype_scores(features, server.prototypes, jnp.asarray(allowed))
