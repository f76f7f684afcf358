"""Angles between class vectors: rows of a classifier or mean features (FedGELA, Figures 2, 3 and 5).

Letters: C classes, D dimensions. A simplex ETF has arccos(-1 / (C - 1)) everywhere: 96.38 degrees for C = 10.
"""

import jax
import jax.numpy as jnp

from fedjax_pcdd.losses.logit_adjustment import l2_normalise


def pairwise_angles(vectors: jax.Array) -> jax.Array:
    """Angle of each pair of rows.

    Args:
      vectors: [C, D] of any length; a zero row is at 90 degrees to all others.

    Returns:
      [C, C] degrees in [0, 180], exactly 0 on the diagonal.
    """
    unit = l2_normalise(vectors)
    cosines = jnp.matmul(unit, unit.T, precision="highest")
    angles = jnp.degrees(jnp.arccos(jnp.clip(cosines, -1, 1)))
    return jnp.where(jnp.eye(unit.shape[0], dtype=bool), 0, angles)


def mean_angle(vectors: jax.Array, members: jax.Array) -> jax.Array:
    """Mean angle over the unordered pairs of some rows.

    Args:
      vectors: [C, D].
      members: [C] bool, rows that count: the classes a client owns, those it misses, or all.

    Returns:
      Scalar in degrees; -1 when fewer than two rows count.
    """
    members = members.astype(bool)
    pairs = jnp.triu(members[:, None] & members, k=1)
    number = jnp.sum(pairs)
    total = jnp.sum(jnp.where(pairs, pairwise_angles(vectors), 0))
    return jnp.where(number > 0, total / jnp.maximum(number, 1), -1)
