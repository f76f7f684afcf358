"""A Gaussian for the features of each class, from sums over samples that may be spread over many clients.

CCVR: Luo et al., "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with Non-IID Data", NeurIPS
2021. Letters: B batch, C classes, D features, M drawn features of a class.
Sums may be of z - a, with the same a for all samples. In float32 the variance is inexact where features vary little
compared with |z - a|: with a standard deviation of 1 % of |z - a| its error is 0.1 to 0.5 %, with 0.2 % up to 10 %, and
eigenvalues that are 0 may come out positive. So a mean feature is the best choice of a.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from fedjax_pcdd.losses import Mask, precise
from fedjax_pcdd.losses.membership import membership


class Moments(NamedTuple):
    """Sums over samples of 1 [C], x [C, D] and x x^T [C, D, D] or only its diagonal [C, D]; x = z - a."""

    counts: Array
    sums: Array
    squares: Array


def no_moments(classes: int, features: int, *, diagonal: bool) -> Moments:
    """The sums over no samples."""
    zeros = jnp.zeros((classes, features))
    return Moments(jnp.zeros(classes), zeros, zeros if diagonal else jnp.zeros((classes, features, features)))


def class_moments(
    features: Array, labels: Array, num_classes: int, *, diagonal: bool, mask: Mask = None, shift: Array | float = 0.0
) -> Moments:
    """The sums over the unmasked samples of a batch of features [B, D] with labels [B]; the shift is a [D]."""
    features = precise(features) - shift
    members = membership(labels, num_classes, mask, features.dtype).of_samples
    sums = jnp.einsum("bc,bd->cd", members, features, precision="highest")
    if diagonal:
        return Moments(members.sum(0), sums, jnp.einsum("bc,bd->cd", members, features**2, precision="highest"))
    squares = jnp.einsum("bc,bd,be->cde", members, features, features, precision="highest")
    return Moments(members.sum(0), sums, squares)


def gaussians(moments: Moments, shift: Array | float = 0.0) -> tuple[Array, Array]:
    """Means [C, D] and unbiased covariances [C, D, D], or variances [C, D], of the pooled samples.

    They equal the paper's merged means and covariances of the clients. A class with one sample has covariance 0; a
    class without samples also has mean a. The shift is a [D].
    """
    counts, sums, squares = moments
    means = sums / jnp.maximum(counts, 1)[:, None]
    products = sums * means if squares.ndim == 2 else sums[:, :, None] * means[:, None]
    shape = (-1,) + (1,) * (squares.ndim - 1)
    spread = (squares - products) / jnp.maximum(counts - 1, 1).reshape(shape)
    return means + shift, jnp.where((counts > 1).reshape(shape), spread, 0)


def draw_features(means: Array, covariances: Array, normal: Array) -> Array:
    """Features [C, M, D] from standard normal numbers [C, M, D]: mu_c + R_c xi, R_c the symmetric root of Sigma_c.

    A covariance has eigenvalues of 0 if a class has no more samples than features; eigenvalues below the largest one
    times D times the machine precision, which rounding makes of them, are treated as 0.
    """
    if covariances.ndim == 2:
        return means[:, None] + normal * jnp.sqrt(jnp.maximum(covariances, 0))[:, None]
    values, vectors = jnp.linalg.eigh(covariances)
    least = values.shape[1] * jnp.finfo(values.dtype).eps * jnp.max(values, axis=1, keepdims=True)
    roots = jnp.sqrt(jnp.where(values > least, values, 0))
    scaled = jnp.einsum("cmd,cde->cme", normal, vectors, precision="highest") * roots[:, None]
    return means[:, None] + jnp.einsum("cme,cde->cmd", scaled, vectors, precision="highest")
