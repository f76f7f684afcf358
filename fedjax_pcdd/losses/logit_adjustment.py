"""Logits adjusted by the client's class distribution.

FedGELA: Fan et al., "Federated Learning with Bilateral Curation for Partially Class-Disjoint Data",
NeurIPS 2023.
"""

import jax
import jax.numpy as jnp

from fedjax_pcdd.errors import UserError, nearest

FUNCTIONS = {"identity": lambda shares: shares, "sqrt": jnp.sqrt, "exp": jnp.exp}
GAMMAS = ("class", "localgamma", "serverscaled")


def class_scales(
    class_counts: jax.Array,
    federation_counts: jax.Array,
    *,
    function: str = "identity",
    gamma: str = "class",
    weights: jax.Array | None = None,
) -> jax.Array:
    """FedGELA's Phi_k of one client: Q(n_kc / n_k) / gamma.

    Args:
      class_counts: [C] training samples of the client, n_kc.
      federation_counts: [K, C] training samples of all clients; read by "serverscaled" alone.
      function: Q(x) is "identity" x, "sqrt" of x, or "exp" of x. With "exp" a missing class keeps Q = 1 > 0.
      gamma: "class": 1/C, hence Phi = C n_kc / n_k as published, for "identity" alone. "localgamma": the mean
        over classes of the client's own Q. "serverscaled": sum_j p_j Q_jc for each class, which makes
        sum_k p_k Phi_k = 1 for every class that has samples.
      weights: [K] aggregation weights p_j that sum to 1; None for n_j / sum n.

    Returns:
      [C] scales; zeros for a client without samples.

    Raises:
      UserError: `function` or `gamma` is unknown, or the two do not go together.
    """
    _check(function, gamma)
    values = _curve(class_counts, function)
    if gamma == "class":
        return values * values.shape[0]
    if gamma == "localgamma":
        return _ratio(values, jnp.mean(values))
    totals = jnp.sum(federation_counts, axis=1)
    weights = _ratio(totals, jnp.sum(totals)) if weights is None else weights
    return _ratio(values, jnp.matmul(weights, _curve(federation_counts, function), precision="highest"))


def scaled_logits(features: jax.Array, directions: jax.Array, scales: jax.Array, kappa: jax.Array | float) -> jax.Array:
    """FedGELA's local logits kappa * Phi_c * (m_c . h / ||h||).

    Args:
      features: [B, D], not normalised; a zero row gives zero logits and zero gradient.
      directions: [D, C], column c is m_c, of length 1.
      scales: [C], Phi_k; ones for the generic model.
      kappa: inverse temperature, sqrt(E_W) in the paper.

    Returns:
      [B, C] in float32 or better.
    """
    features = features.astype(jnp.promote_types(features.dtype, jnp.float32))
    cosines = jnp.matmul(l2_normalise(features), directions, precision="highest")
    return kappa * scales * cosines


def l2_normalise(vectors: jax.Array, epsilon: float = 1e-12) -> jax.Array:
    """v / max(||v||, epsilon) for [..., D] over the last axis; no gradient up to that norm."""
    squares = jnp.sum(jnp.square(vectors), axis=-1, keepdims=True)
    long = squares > epsilon**2
    unit = vectors / jnp.sqrt(jnp.where(long, squares, 1))
    return jnp.where(long, unit, jax.lax.stop_gradient(vectors / epsilon))


def _check(function, gamma):
    if function not in FUNCTIONS:
        raise UserError(f"Unknown function '{function}' of the class shares: {nearest(function, FUNCTIONS)}")
    if gamma not in GAMMAS:
        raise UserError(f"Unknown gamma '{gamma}' of the class scales: {nearest(gamma, GAMMAS)}")
    if gamma == "class" and function != "identity":
        raise UserError(f"With function '{function}' choose gamma 'serverscaled' or 'localgamma'.")


def _curve(counts, function):
    """Q(n_c / n) for counts [..., C]; zeros where a client has no samples."""
    totals = jnp.sum(counts, axis=-1, keepdims=True)
    return jnp.where(totals > 0, FUNCTIONS[function](_ratio(counts, totals)), 0)


def _ratio(numerator, denominator):
    """Quotient that is 0 where the denominator is 0."""
    defined = denominator > 0
    return jnp.where(defined, numerator / jnp.where(defined, denominator, 1), 0)
