"""Decorrelation of features, inside each class (FedMR) or over the whole batch (FedDecorr).

FedMR: Fan et al., "Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping", TMLR 2023.
FedDecorr: Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning",
ICLR 2023.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_pcdd.losses import Mask, check, precise
from fedjax_pcdd.losses.membership import membership

FORMS = ("offdiag", "frobenius")


def intra_class(
    features: Array, labels: Array, num_classes: int, *, form: str = "offdiag", mask: Mask = None, epsilon: float = 1e-8
) -> Array:
    """FedMR's decorrelation of features within each class (section 3.3.1, eq. 3).

    With x_b standardised inside its own class and G_c = X_c^T X_c, sum_uv G_c[u,v]^2 equals the sum of
    (x_b . x_b')^2 over the pairs of samples of c: one [B, B] matrix serves all classes, instead of a [C, D, D].

    Args:
      form: "offdiag" (published code, fits the tabulated mu1): unbiased variance,
        [sum_c mean_{u!=v} G_c[u,v]^2] / [sum_c n_c]. "frobenius" (as printed): biased variance,
        mean over classes of ||G_c / (n_c - 1)||_F^2.
      epsilon: added to the variance under the root.

    Returns:
      Scalar; 0 with zero gradient when no class has two samples in the batch, and for "offdiag" when D = 1.
    """
    check(form, FORMS, "form of the intra-class loss")
    loss, unbiased = (_off_diagonal, True) if form == "offdiag" else (_frobenius, False)
    return loss(*_standardised(features, labels, num_classes, mask, unbiased=unbiased, epsilon=epsilon))


def batch_decorrelation(features: Array, *, form: str = "offdiag", mask: Mask = None, epsilon: float = 1e-8) -> Array:
    """FedDecorr's decorrelation of features over the batch, whatever the labels.

    x is standardised over the batch with the unbiased variance, G = X^T X.

    Args:
      form: "offdiag" (published code): (1/B) mean_{u!=v} G[u,v]^2, which is FedMR's intra-class loss of a batch of one
        class. "frobenius" (as printed): ||G / (B - 1)||_F^2 / D^2, smaller by a factor of about B.
      epsilon: added to the variance under the root.

    Returns:
      Scalar; 0 with zero gradient for fewer than two samples, and for "offdiag" when D = 1.
    """
    one_class = jnp.zeros(features.shape[0], jnp.int32)
    if form != "frobenius":
        return intra_class(features, one_class, 1, form=form, mask=mask, epsilon=epsilon)
    standard, members = _standardised(features, one_class, 1, mask, unbiased=True, epsilon=epsilon)
    return _frobenius(standard, members) / features.shape[1] ** 2


def _standardised(features, labels, num_classes, mask, *, unbiased, epsilon):
    """Features [B, D] standardised inside each sample's own class, and the classes of two samples or more; else 0."""
    features = precise(features)
    members = membership(labels, num_classes, mask, features.dtype)
    # Relative to a sample of the class, so that a dimension constant in it is exactly 0 however its mean is rounded.
    first = jnp.argmax(members.of_classes, axis=1)
    features = features - jax.lax.stop_gradient(features[first[labels]])
    # Classes with fewer than two samples are removed here, so nothing divides by n_c - 1 = 0 from here on.
    members = members.only(members.counts >= 2)
    features = jnp.where(members.any[:, None], features, 0)
    counts = jnp.maximum(members.counts, 1)[:, None]
    centred = features - members.per_sample(members.per_class(features) / counts)
    divisors = jnp.maximum(counts - 1, 1) if unbiased else counts
    variances = members.per_class(jnp.square(centred)) / divisors
    return centred * members.per_sample(1 / jnp.sqrt(epsilon + variances)), members


def _off_diagonal(standard, members):
    """[sum_c mean_{u!=v} G_c[u,v]^2] / [sum_c n_c], the off-diagonal sum computed as the total minus the diagonal."""
    dimensions = standard.shape[1]
    if dimensions == 1:
        return jnp.zeros((), standard.dtype)
    energy = _energy(standard, members)
    diagonal = jnp.sum(jnp.square(members.per_class(jnp.square(standard))), axis=1)
    off_diagonal = jnp.sum(jnp.maximum(energy - diagonal, 0))
    return off_diagonal / (dimensions * (dimensions - 1)) / jnp.maximum(jnp.sum(members.counts), 1)


def _frobenius(standard, members):
    """Mean over the classes of ||G_c||_F^2 / (n_c - 1)^2."""
    energy, counts = _energy(standard, members), members.counts
    return jnp.sum(energy / jnp.square(jnp.maximum(counts - 1, 1))) / jnp.maximum(jnp.sum(counts > 0), 1)


def _energy(standard, members):
    """||G_c||_F^2 [C]: the sum of (x_b . x_b')^2 over the pairs of samples of each class."""
    gram = _gram(standard)
    same_class = jnp.matmul(members.of_samples, members.of_classes, precision="highest")
    return members.per_class(jnp.sum(same_class * jnp.square(gram), axis=1, keepdims=True))[:, 0]


@jax.custom_vjp
def _gram(values):
    """values @ values.T, with one product in its gradient instead of two."""
    return jnp.matmul(values, values.T, precision="highest")


def _gram_backward(values, cotangent):
    return (jnp.matmul(cotangent + cotangent.T, values, precision="highest"),)


_gram.defvjp(lambda values: (_gram(values), values), _gram_backward)
