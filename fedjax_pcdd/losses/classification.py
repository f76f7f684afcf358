"""Softmax cross-entropy, its focal form, and per-class counts of correct predictions."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_pcdd.losses import Mask, precise
from fedjax_pcdd.losses.membership import membership


def cross_entropy(logits: Array, labels: Array, *, mask: Mask = None, classes: Array | None = None) -> Array:
    """Mean softmax cross-entropy over the unmasked samples.

    Args:
      classes: [C] bool, classes in the softmax denominator; None for all. They must include the labels of
        unmasked samples.

    Returns:
      Scalar; 0 with zero gradient if no sample counts or only one class is left.
    """
    logits = precise(logits)
    # The target is gathered from the full logits and the fill is finite, so that no -inf meets a zero.
    target = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    if classes is not None:
        logits = jnp.where(classes, logits, jnp.finfo(logits.dtype).min)
    return masked_mean(jax.nn.logsumexp(logits, axis=-1) - target, mask)


def focal_loss(logits: Array, labels: Array, *, gamma: Any, weights: Array | None = None, mask: Mask = None) -> Array:
    """Mean over the unmasked samples of alpha_y (1 - p_y)^gamma (-log p_y), p the softmax.

    Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017, eq. 5, with class weights, as in the benchmark
    FLamby for Fed-ISIC2019: a plain mean, not divided by the weights.

    Args:
      gamma: scalar >= 0; with 0 this is the weighted cross-entropy.
      weights: [C] alpha; None for 1.

    Returns:
      Scalar; 0 with zero gradient if no sample counts.
    """
    logits = precise(logits)
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=-1)[:, 0]
    rest = jnp.maximum(-jnp.expm1(log_p), jnp.finfo(log_p.dtype).tiny)  # else a power below 1 has no gradient at p = 1
    alpha = 1.0 if weights is None else weights[labels]
    return masked_mean(-alpha * rest**gamma * log_p, mask)


def masked_mean(values: Array, mask: Mask = None) -> Array:
    """Mean of values [B] over the samples with mask [B]; 0 if there is none."""
    if mask is None:
        return jnp.mean(values)
    mask = mask.astype(bool)
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(mask), 1)


def correct_per_class(logits: Array, labels: Array, mask: Mask, num_classes: int) -> Array:
    """Number of correct top-1 predictions per class; of equal logits the lowest index is predicted.

    A class whose logit is -inf or NaN is never predicted, even if there is no other class.

    Returns:
      [C] int32 counts.
    """
    label_logits = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    correct = (jnp.argmax(logits, axis=-1) == labels) & (label_logits > -jnp.inf)
    members = membership(labels, num_classes, mask, dtype=jnp.int32).of_samples
    return jnp.sum(members * correct[:, None], axis=0)
