"""Logits adjusted by the client's class distribution.

FedGELA: Fan et al., "Federated Learning with Bilateral Curation for Partially Class-Disjoint Data",
NeurIPS 2023. FedRS: Li and Zhan, KDD 2021. FedLC: Zhang et al., ICML 2022. Balanced softmax: Ren et al., NeurIPS 2020.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses import Mask, Number, check, precise
from fedjax_pcdd.losses.classification import cross_entropy, masked_mean

FUNCTIONS = {"identity": lambda shares: shares, "sqrt": jnp.sqrt, "exp": jnp.exp}


def class_scales(
    class_counts: Array, federation_counts: Array, *, function: str = "identity", gamma: str = "class"
) -> Array:
    """FedGELA's Phi_k of one client: Q(n_kc / n_k) / gamma.

    Args:
      federation_counts: [K, C] training samples of all clients; read by "serverscaled" alone.
      function: Q(x) is "identity" x, "sqrt" of x, or "exp" of x. With "exp" a missing class keeps Q = 1 > 0. "none"
        is FedGE: 1 for every class, even for a client without samples, whatever `gamma`.
      gamma: "class": 1/C, hence Phi = C n_kc / n_k as published, for "identity" alone. "localgamma": the mean
        over classes of the client's own Q. "serverscaled": sum_j p_j Q_jc for each class with p_j = n_j / n of
        all clients, which makes sum_k p_k Phi_k = 1 for every class that has samples.

    Returns:
      [C] scales; zeros for a client without samples.

    Raises:
      UserError: `function` or `gamma` is unknown, or the two cannot be combined.
    """
    if function == "none":
        return jnp.ones(class_counts.shape)
    check(function, FUNCTIONS, "function of the class shares")
    check(gamma, ("class", "localgamma", "serverscaled"), "gamma of the class scales")
    if gamma == "class" and function != "identity":
        raise UserError(f"With function '{function}' choose gamma 'serverscaled' or 'localgamma'.")
    values = _curve(class_counts, function)
    if gamma == "class":
        return values * values.shape[0]
    if gamma == "localgamma":
        return _ratio(values, jnp.mean(values))
    totals = jnp.sum(federation_counts, axis=1)
    weights = _ratio(totals, jnp.sum(totals))
    return _ratio(values, jnp.matmul(weights, _curve(federation_counts, function), precision="highest"))


def scaled_logits(features: Array, directions: Array, scales: Array, kappa: Number, *, unit: bool = True) -> Array:
    """FedGELA's local logits kappa * Phi_c * (m_c . h / ||h||).

    Args:
      features: [B, D], not normalised; a zero row gives zero logits and zero gradient.
      directions: [D, C], column c is m_c, of length 1.
      scales: [C], Phi_k; ones for the generic model.
      kappa: inverse temperature, sqrt(E_W) in the paper.
      unit: False leaves out the division by ||h||, for features that are normalised in another way.

    Returns:
      [B, C] in float32 or better.
    """
    features = precise(features)
    features = l2_normalise(features) if unit else features
    return kappa * scales * jnp.matmul(features, directions, precision="highest")


def restricted_scales(class_counts: Array, alpha: Number, *, form: str = "hard") -> Array:
    """FedRS's scales s_c of the classifier's rows (KDD 2021, restricted softmax).

    Args:
      alpha: scale of a missing class, in [0, 1].
      form: "hard", 1 for a class that the client has (the paper), or "soft",
        (1 - alpha) n_kc / max_j n_kj + alpha (the published code).

    Returns:
      [C] scales.
    """
    check(form, ("hard", "soft"), "form of the restricted softmax")
    if form == "hard":
        return jnp.where(class_counts > 0, 1.0, alpha)
    return (1 - alpha) * _ratio(class_counts, jnp.max(class_counts)) + alpha


def calibration_margins(class_counts: Array, tau: Number, *, missing: float | None = None) -> Array:
    """FedLC's margins m_c = tau * n_c^(-1/4), to be subtracted from the logits (ICML 2022).

    Args:
      tau: strength, >= 0.
      missing: count that replaces 0; None gives a margin of 0, for callers that exclude missing classes.

    Returns:
      [C] margins.
    """
    present = class_counts > 0
    margins = tau * jnp.where(present, class_counts, 1.0 if missing is None else missing) ** -0.25
    return jnp.where(present, margins, 0) if missing is None else margins


def pairwise_cross_entropy(logits: Array, labels: Array, *, mask: Mask = None, classes: Array | None = None) -> Array:
    """Mean of log sum_{c != y} exp(o_c) - o_y: the softmax loss whose denominator lacks the label; it may be negative.

    Args:
      classes: [C] bool, classes in the denominator; None for all.

    Returns:
      Scalar; samples without a rival class add 0 with zero gradient.
    """
    logits = precise(logits)
    rivals = jnp.arange(logits.shape[-1]) != labels[:, None]
    rivals = rivals if classes is None else rivals & classes
    target = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    losses = jax.nn.logsumexp(jnp.where(rivals, logits, jnp.finfo(logits.dtype).min), axis=-1) - target
    return masked_mean(jnp.where(rivals.any(axis=-1), losses, 0), mask)


def balanced_cross_entropy(
    logits: Array,
    labels: Array,
    class_counts: Array,
    *,
    power: Number = 1.0,
    missing: float | None = None,
    mask: Mask = None,
) -> Array:
    """Balanced softmax: mean cross-entropy of o_c + power * log n_c (NeurIPS 2020, eq. 4 with power 1).

    Args:
      power: exponent on the counts, >= 0; 0 is the plain softmax over all classes.
      missing: count that replaces 0, > 0; None excludes a class without samples from the softmax.
    """
    present = class_counts > 0
    prior = power * jnp.log(jnp.where(present, class_counts, 1 if missing is None else missing))
    classes = present | (power == 0) if missing is None else None
    return cross_entropy(logits + prior, labels, mask=mask, classes=classes)


def l2_normalise(vectors: Array, epsilon: float = 1e-12) -> Array:
    """v / max(||v||, epsilon) for [..., D] over the last axis; no gradient for norms up to epsilon."""
    squares = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    long = squares > epsilon**2
    unit = vectors / jnp.sqrt(jnp.where(long, squares, 1))
    return jnp.where(long, unit, jax.lax.stop_gradient(vectors / epsilon))


def _curve(counts, function):
    """Q(n_c / n) for counts [..., C]; zeros where a client has no samples."""
    totals = jnp.sum(counts, axis=-1, keepdims=True)
    return jnp.where(totals > 0, FUNCTIONS[function](_ratio(counts, totals)), 0)


def _ratio(numerator, denominator):
    """Quotient that is 0 where the denominator is 0."""
    defined = denominator > 0
    return jnp.where(defined, numerator / jnp.where(defined, denominator, 1), 0)
