"""Contrastive losses on cosines: between models (MOON) and between classes (FedProc).

MOON: Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021.
FedProc: Mu et al., "FedProc: Prototypical Contrastive Federated Learning on Non-IID Data", FGCS 2023.
"""

import jax
import jax.numpy as jnp

from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.prototypes import safe_norm

_EPSILON = 1e-8


def cosine(a: jax.Array, b: jax.Array) -> jax.Array:
    """a . b / max(|a| |b|, 1e-8) over the last axis: [..., D] and [..., D], which broadcast, to [...].

    In float32 or better; 0 with zero gradient where a vector is zero.
    """
    dtype = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    a, b = a.astype(dtype), b.astype(dtype)
    return _ratio(jnp.sum(a * b, axis=-1), safe_norm(a) * safe_norm(b))


def cosines(a: jax.Array, b: jax.Array) -> jax.Array:
    """`cosine` of every row of a [M, D] with every row of b [N, D]: [M, N], without an array [M, N, D]."""
    dtype = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    a, b = a.astype(dtype), b.astype(dtype)
    return _ratio(jnp.matmul(a, b.T, precision="highest"), safe_norm(a)[:, None] * safe_norm(b))


def _ratio(products, lengths):
    return jnp.where(lengths > 0, products, 0) / jnp.maximum(lengths, _EPSILON)


def model_contrast(
    features: jax.Array,
    positives: jax.Array,
    negatives: jax.Array,
    valid: jax.Array,
    tau: jax.Array | float,
    *,
    mask: jax.Array | None = None,
) -> jax.Array:
    """MOON's loss: a representation shall be nearer to the global model's than to those of the client's past ones.

    Mean of -log(e(q, q_g) / (e(q, q_g) + sum_p e(q, q_p))) with e(a, b) = exp(cos(a, b) / tau), eq. 3.

    Args:
      features: [B, D], q of the model in training.
      positives: [B, D], q_g of the global model; constant.
      negatives: [P, B, D], q_p of the previous models; constant.
      valid: [P] bool, previous models that exist.
      tau: temperature > 0.
      mask: [B], samples that count; None for all.

    Returns:
      Scalar >= 0; 0 with zero gradient without a previous model.
    """
    others = jax.lax.stop_gradient(jnp.concatenate([positives[None], negatives]))
    similarities = cosine(features, others).T / tau
    exist = jnp.concatenate([jnp.ones(1, bool), valid.astype(bool)])
    first = jnp.zeros(features.shape[0], jnp.int32)
    return cross_entropy(similarities, first, mask=mask, classes=exist)


def prototype_contrast(
    features: jax.Array,
    labels: jax.Array,
    prototypes: jax.Array,
    valid: jax.Array,
    tau: jax.Array | float,
    *,
    mask: jax.Array | None = None,
) -> jax.Array:
    """FedProc's loss: softmax cross-entropy over cos(z, g_c) / tau of the valid classes. The prototypes are constants.

    Args:
      features: [B, D].
      labels: [B] integers in [0, C).
      prototypes: [C, D].
      valid: [C] bool; samples of other classes add nothing, but stay in the divisor B.
      tau: temperature > 0.
      mask: [B], samples that count; None for all.

    Returns:
      Scalar in [0, log(valid classes) + 2 / tau]; 0 with zero gradient with less than two valid classes.
    """
    valid = valid.astype(bool)
    everyone = jnp.ones(labels.shape, bool) if mask is None else mask.astype(bool)
    counted = everyone & valid[labels]
    similarities = cosines(features, jax.lax.stop_gradient(prototypes)) / tau
    share = jnp.sum(counted) / jnp.maximum(jnp.sum(everyone), 1)
    return share * cross_entropy(similarities, labels, mask=counted, classes=valid)
