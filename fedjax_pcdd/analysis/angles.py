"""Angles between class vectors: rows of a classifier or mean features (FedGELA, Figures 2, 3 and 5).

Letters: C classes, D dimensions. A simplex ETF has arccos(-1 / (C - 1)) everywhere: 96.38 degrees for C = 10.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.losses.logit_adjustment import l2_normalise


def pairwise_angles(vectors: jax.Array) -> jax.Array:
    """Angles [C, C] in degrees between rows [C, D], exactly 0 on the diagonal; a zero row is at 90 degrees to all."""
    unit = l2_normalise(vectors)
    cosines = jnp.matmul(unit, unit.T, precision="highest")
    angles = jnp.degrees(jnp.arccos(jnp.clip(cosines, -1, 1)))
    return jnp.where(jnp.eye(unit.shape[0], dtype=bool), 0, angles)


class Angles(NamedTuple):
    """Mean angles of one client in degrees, scalars; -1 if there is no pair."""

    existing: jax.Array  # between two classes that the client has
    missing: jax.Array  # between two classes that it lacks
    between: jax.Array  # between one that it has and one that it lacks
    all: jax.Array  # between any two


def class_angles(vectors: jax.Array, present: jax.Array, known: jax.Array | None = None) -> Angles:
    """Angles between the classes that a client has and those that it lacks (FedGELA, Figures 2, 3 and 5).

    Args:
      vectors: [C, D] classifier rows, or mean features of the classes.
      present: [C] bool, classes of the client.
      known: [C] bool, rows that count at all, such as classes with a mean feature; None for all.
    """
    known = jnp.ones(present.shape, bool) if known is None else known
    has, lacks = present.astype(bool) & known, ~present.astype(bool) & known
    angles = pairwise_angles(vectors)
    crossing = has[:, None] & lacks
    pairs = (has[:, None] & has, lacks[:, None] & lacks, crossing | crossing.T, known[:, None] & known)
    return Angles(*(_mean(angles, pair) for pair in pairs))


def etf_angle(num_classes: int) -> float:
    """Angle between any two of C maximally separated vectors, arccos(-1 / (C - 1)) in degrees.

    >>> round(etf_angle(10), 2)
    96.38
    """
    return float(np.degrees(np.arccos(-1 / (num_classes - 1))))


def _mean(angles: jax.Array, pairs: jax.Array) -> jax.Array:
    """Mean of angles [C, C] over the pairs u < v of a symmetric mask [C, C]."""
    pairs = jnp.triu(pairs, k=1)
    number = jnp.sum(pairs)
    total = jnp.sum(jnp.where(pairs, angles, 0))
    return jnp.where(number > 0, total / jnp.maximum(number, 1), -1)
