"""Softmax cross-entropy and per-class counts of correct predictions."""

import jax
import jax.numpy as jnp

from fedjax_pcdd.losses.membership import membership


def cross_entropy(
    logits: jax.Array,
    labels: jax.Array,
    *,
    mask: jax.Array | None = None,
    classes: jax.Array | None = None,
) -> jax.Array:
    """Mean softmax cross-entropy over the unmasked samples.

    Args:
      logits: [B, C].
      labels: [B] integers in [0, C).
      mask: [B], samples that count; None for all.
      classes: [C] bool, classes in the softmax denominator; None for all. The labels of unmasked samples must
        be among them.

    Returns:
      Scalar in float32 or better; 0 with zero gradient if no sample counts or one class is left.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # The target is gathered from the full logits and the fill is finite, so that no -inf meets a zero.
    target = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    if classes is not None:
        logits = jnp.where(classes, logits, jnp.finfo(logits.dtype).min)
    return masked_mean(jax.nn.logsumexp(logits, axis=-1) - target, mask)


def masked_mean(values: jax.Array, mask: jax.Array | None = None) -> jax.Array:
    """Mean of values [B] over the samples with mask [B]; 0 if there is none."""
    if mask is None:
        return jnp.mean(values)
    mask = mask.astype(bool)
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(mask), 1)


def correct_per_class(logits: jax.Array, labels: jax.Array, mask: jax.Array | None, num_classes: int) -> jax.Array:
    """Number of correct top-1 predictions of each class; of equal logits the lowest index is predicted.

    A class whose logit is -inf, or NaN, is never predicted, even if there is no other.

    Args:
      logits: [B, C].
      labels: [B] integers in [0, C).
      mask: [B], samples that count; None for all.
      num_classes: C, static.

    Returns:
      [C] int32 counts.
    """
    own = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    correct = (jnp.argmax(logits, axis=-1) == labels) & (own > -jnp.inf)
    members = membership(labels, num_classes, mask, dtype=jnp.int32).of_samples
    return jnp.sum(members * correct[:, None], axis=0)
