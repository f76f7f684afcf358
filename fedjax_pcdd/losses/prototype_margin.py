"""Prototypes that a server trains to stay apart: how far they are to be, and the loss of it.

FedTGP: Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data
and Model Heterogeneity in Federated Learning", AAAI 2024. Letters: P uploaded prototypes, C classes, D features.
"""

import jax
import jax.numpy as jnp

from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.prototypes import safe_norm


def centre_distances(centres: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Distances [C, C] between the centres [C, D] of classes, and which pairs [C, C] are two valid classes [C]."""
    pairs = valid[:, None] & valid & ~jnp.eye(len(valid), dtype=bool)
    return safe_norm(centres[:, None] - centres), pairs


def nearest_gaps(centres: jax.Array, valid: jax.Array) -> jax.Array:
    """Distances [C] to the nearest other centre; classes without one take the smallest, all are inf without a pair."""
    distances, pairs = centre_distances(centres, valid)
    gaps = jnp.min(jnp.where(pairs, distances, jnp.inf), axis=1)
    return jnp.where(valid, gaps, jnp.min(gaps))


def adaptive_margin(centres: jax.Array, valid: jax.Array, threshold: jax.Array | float, rule: str) -> jax.Array:
    """The margin between classes, at most a threshold; the threshold itself while fewer than two classes are valid.

    Args:
      centres: [C, D], unweighted means of the uploaded prototypes of each class.
      valid: [C] bool, classes with a prototype.
      threshold: tau.
      rule: "nearest", the largest distance of a centre to its nearest neighbour; "farthest", the largest of all.

    Returns:
      Scalar.
    """
    if rule == "nearest":
        return jnp.minimum(jnp.max(nearest_gaps(centres, valid)), threshold)
    distances, pairs = centre_distances(centres, valid)
    return jnp.minimum(jnp.where(jnp.any(pairs), jnp.max(jnp.where(pairs, distances, 0)), jnp.inf), threshold)


def margin_cross_entropy(
    prototypes: jax.Array,
    labels: jax.Array,
    targets: jax.Array,
    margin: jax.Array | float,
    *,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Cross-entropy of minus the distances to the targets, that of the own class lengthened by the margin.

    Args:
      prototypes: [P, D] as uploaded.
      labels: [P] their classes.
      targets: [C, D], the trained prototypes.
      margin: delta >= 0.
      mask: [P], prototypes that count; None for all.

    Returns:
      Scalar; the gradient of a distance of 0 is 0.
    """
    distances = safe_norm(prototypes[:, None] - targets)
    own = jax.nn.one_hot(labels, len(targets), dtype=distances.dtype)
    return cross_entropy(-(distances + margin * own), labels, mask=mask)
