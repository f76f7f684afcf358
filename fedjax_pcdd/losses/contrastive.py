"""Features compared with other models and with prototypes: contrasts of cosines (MOON, FedProc), distances (FedRL).

MOON: Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021.
FedProc: Mu et al., "FedProc: Prototypical Contrastive Federated Learning on Non-IID Data", FGCS 2023.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_pcdd.losses import Mask, Number, check, precise, without_masked
from fedjax_pcdd.losses.classification import cross_entropy, masked_mean
from fedjax_pcdd.losses.prototypes import safe_norm

_EPSILON = 1e-8
# Outputs of two equal models differ by up to 1e-6 of their norm (measured on three networks). So may those of a trained
# model before and after a step at a small learning rate: this is for models that are known to be equal.
ROUNDING = 1e-5
DISTANCES = ("per_sample", "batch_norm", "squared")


def cosine(a: Array, b: Array) -> Array:
    """a . b / max(|a| |b|, 1e-8) over the last axis: [..., D] and [..., D], which broadcast, to [...].

    In float32 or better; 0 with zero gradient if a vector is zero.
    """
    dtype = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    a, b = a.astype(dtype), b.astype(dtype)
    return _ratio(jnp.sum(a * b, axis=-1), safe_norm(a) * safe_norm(b))


def cosines(a: Array, b: Array) -> Array:
    """`cosine` of every row of a [M, D] with every row of b [N, D]: [M, N], without an intermediate [M, N, D]."""
    dtype = jnp.promote_types(jnp.result_type(a, b), jnp.float32)
    a, b = a.astype(dtype), b.astype(dtype)
    return _ratio(jnp.matmul(a, b.T, precision="highest"), safe_norm(a)[:, None] * safe_norm(b))


def _ratio(products, lengths):
    return jnp.where(lengths > 0, products, 0) / jnp.maximum(lengths, _EPSILON)


def model_contrast(
    features: Array, positives: Array, negatives: Array, valid: Array, tau: Number, *, mask: Mask = None
) -> Array:
    """MOON's loss: features should be nearer to the global model's than to those of the client's previous models.

    Mean of -log(e(q, q_g) / (e(q, q_g) + sum_p e(q, q_p))) with e(a, b) = exp(cos(a, b) / tau), eq. 3.

    Args:
      features: [B, D], q of the model in training.
      positives: [B, D], q_g of the global model; constant.
      negatives: [P, B, D], q_p of the previous models; constant.
      valid: [P] bool, previous models that exist.
      tau: temperature > 0.

    Returns:
      Scalar >= 0; 0 with zero gradient if there is no previous model.
    """
    references = jax.lax.stop_gradient(jnp.concatenate([positives[None], negatives]))
    similarities = cosine(without_masked(features, mask), without_masked(references, mask)).T / tau
    exist = jnp.concatenate([jnp.ones(1, bool), valid.astype(bool)])
    targets = jnp.zeros(features.shape[0], jnp.int32)
    return cross_entropy(similarities, targets, mask=mask, classes=exist)


def prototype_contrast(
    features: Array, labels: Array, prototypes: Array, valid: Array, tau: Number, *, mask: Mask = None
) -> Array:
    """FedProc's loss: softmax cross-entropy over cos(z, g_c) / tau of the valid classes. The prototypes are constants.

    Args:
      prototypes: [C, D].
      valid: [C] bool; samples of other classes add nothing, but are counted in the divisor B.
      tau: temperature > 0.

    Returns:
      Scalar in [0, log(valid classes) + 2 / tau]; 0 with zero gradient with fewer than two valid classes.
    """
    valid = valid.astype(bool)
    unmasked = jnp.ones(labels.shape, bool) if mask is None else mask.astype(bool)
    counted = unmasked & valid[labels]
    similarities = cosines(features, jax.lax.stop_gradient(prototypes)) / tau
    share = jnp.sum(counted) / jnp.maximum(jnp.sum(unmasked), 1)
    return share * cross_entropy(similarities, labels, mask=counted, classes=valid)


def review_distance(
    layer: Array, received: Array, *, distance: str = "per_sample", rounding: Number = 0.0, mask: Mask = None
) -> Array:
    """R_m = ||kr_m(x; w) - kr_m(x; w^t)||, unsquared, of one layer on one batch (FedRL).

    Args:
      layer: [B, ...] output of the local model.
      received: [B, ...] output of the received model, a constant.
      distance: "per_sample" (mean over the samples of their Euclidean norms), "batch_norm" (Frobenius norm of the
        whole batch, the literal reading) or "squared" (mean of the squared norms).
      rounding: samples whose layer differs by no more than this share of its norm count as equal, since the gradient
        of a norm has the same length however small the norm.

    Returns:
      Scalar; its gradient is 0 where it is 0.
    """
    check(distance, DISTANCES, "distance of the review term")
    layer = precise(layer).reshape(layer.shape[0], -1)
    received = jax.lax.stop_gradient(received).astype(layer.dtype).reshape(layer.shape)
    differences = layer - received
    differs = jnp.sum(differences**2, axis=1) > rounding**2 * jnp.sum(received**2, axis=1)
    differences = jnp.where(differs[:, None], differences, 0)
    if distance == "per_sample":
        return masked_mean(safe_norm(differences), mask)
    if distance == "squared":
        return masked_mean(jnp.sum(differences**2, axis=1), mask)
    return safe_norm(without_masked(differences, mask).ravel())
