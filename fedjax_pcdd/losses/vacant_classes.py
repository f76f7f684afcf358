"""FedVLS's cross-entropy calibrated by class shares, and its suppression of the logits of classes other than the label.

Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning", AAAI 2025. A class is vacant on a client that
has no samples of it. Its distillation inside the vacant classes is `masked_distillation.masked_kl`.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_pcdd.losses import Mask, check, precise
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.logit_adjustment import balanced_cross_entropy

FORMS = ("code", "paper")


def calibrated_cross_entropy(
    logits: Array, labels: Array, class_counts: Array, *, form: str = "code", epsilon: float = 1e-9, mask: Mask = None
) -> Array:
    """Mean cross-entropy of o_c + log p_c, with p_c = n_c / n (L_cal).

    Args:
      form: "code": log(p_c + epsilon), so that vacant classes stay in the softmax; "paper": log p_c, without them.
      epsilon: of the form "code"; by default that of the published code.

    Returns:
      Scalar in float32 or better. The forms agree unless a vacant logit exceeds the others by 15 or so.
    """
    check(form, FORMS, "form of FedVLS's losses")
    if form == "paper":
        return balanced_cross_entropy(logits, labels, class_counts, mask=mask)
    logits = precise(logits)
    prior = jnp.log(_shares(class_counts) + epsilon)
    return cross_entropy(logits + prior, labels, mask=mask)


def logit_suppression(
    logits: Array, labels: Array, class_counts: Array, *, form: str = "code", epsilon: float = 1e-9, mask: Mask = None
) -> Array:
    """sum_c p_c log((1/B) sum_b exp(s_bc)): lowers logits of the client's classes on samples of other classes (L_sup).

    Args:
      class_counts: [C] training samples n_c of the client; p_c = n_c / n.
      form: "code": s_bc = o_bc - log(p_c + epsilon) + log(1/C + epsilon), and 0 at the label; "paper": s_bc = o_bc, and
        samples with label c are left out of the sum, but counted in B: there is no lower bound.
      epsilon: of the form "code"; by default that of the published code.

    Returns:
      Scalar in float32 or better. Logits of labels and of vacant classes have no gradient; in the form "paper" a class
      adds 0 if the batch has no sample of another class.
    """
    check(form, FORMS, "form of FedVLS's losses")
    logits = precise(logits)
    num_classes, shares = logits.shape[-1], _shares(class_counts)
    is_label = jnp.arange(num_classes) == labels[:, None]
    samples = jnp.ones(labels.shape, bool) if mask is None else mask.astype(bool)
    counted = samples[:, None] if form == "code" else samples[:, None] & ~is_label
    if form == "code":
        logits = jnp.where(is_label, 0, logits - jnp.log(shares + epsilon) + math.log(1 / num_classes + epsilon))
    sums = jax.nn.logsumexp(jnp.where(counted, logits, jnp.finfo(logits.dtype).min), axis=0)
    kept = (shares > 0) & jnp.any(counted, axis=0)
    return jnp.sum(jnp.where(kept, shares * (sums - jnp.log(jnp.maximum(jnp.sum(samples), 1))), 0))


def _shares(class_counts):
    """p_c = n_c / n of class counts [C], in float32 or better; zeros for a client without samples."""
    counts = precise(class_counts)
    return counts / jnp.maximum(jnp.sum(counts), 1)
