"""FCCL's collaborative loss: a participant's logits should correlate with the mean logits of the same class only.

Huang, Ye and Du, "Learn from Others and Be Yourself in Heterogeneous Federated Learning", CVPR 2022.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_pcdd.losses import Mask, Number, precise


def cross_correlation(logits: Array, mean_logits: Array, *, eps: float = 0.0, mask: Mask = None) -> Array:
    """M_uv, the correlation over a batch of class u of a participant's logits and class v of the mean logits.

    Columns are standardised with the unbiased standard deviation and the products divided by B (the published code),
    so that M_uu = (B - 1) / B if the two agree.

    Args:
      logits: [B, C] of one participant.
      mean_logits: [B, C] over the participants, a constant.
      eps: added to the variance under the root. With 0 a column without any spread (always if B = 1) has correlation 0
        and no gradient, but the gradient of a column with almost no spread is as large as the inverse of its
        deviation; a positive eps, such as 1e-12, limits it to 1 / sqrt(eps).

    Returns:
      [C, C] in float32 or better, entries in [-1, 1]; zeros if no sample counts.
    """
    logits = precise(logits)
    kept = jnp.ones(logits.shape[0], bool) if mask is None else mask.astype(bool)
    standard_logits = _standardise(logits, kept, eps)
    standard_mean = _standardise(jax.lax.stop_gradient(mean_logits).astype(logits.dtype), kept, eps)
    return jnp.matmul(standard_logits.T, standard_mean, precision="highest") / jnp.maximum(jnp.sum(kept), 1)


def cross_correlation_loss(matrix: Array, weight: Number) -> Array:
    """sum_u (1 - M_uu)^2 + weight * sum_{u != v} (1 + M_uv)^2.

    Args:
      matrix: [C, C], M.
      weight: lambda_col >= 0, for pairs of different classes; 0.0051 in the paper.

    Returns:
      Scalar >= 0.

    >>> import jax.numpy as jnp
    >>> float(cross_correlation_loss(jnp.asarray([[1.0, -1.0], [0.0, 1.0]]), 0.5))
    0.5
    """
    same_class = jnp.eye(matrix.shape[0], dtype=bool)
    return jnp.sum(jnp.where(same_class, jnp.square(1 - matrix), weight * jnp.square(1 + matrix)))


def _standardise(values, kept, eps):
    """Columns of values [B, C] with mean 0 and unbiased variance 1 over the kept [B] rows; 0 in other rows."""
    # Relative to a row of the batch, so that a constant column is exactly 0 however its mean is rounded.
    values = values - jax.lax.stop_gradient(values[jnp.argmax(kept)])
    kept, count = kept[:, None], jnp.sum(kept)
    values = jnp.where(kept, values, 0)
    centred = jnp.where(kept, values - jnp.sum(values, axis=0) / jnp.maximum(count, 1), 0)
    variances = jnp.sum(jnp.square(centred), axis=0) / jnp.maximum(count - 1, 1) + eps
    # The root of 0 has an infinite gradient, hence two selections instead of one.
    spread = variances > 0
    return jnp.where(spread, centred / jnp.sqrt(jnp.where(spread, variances, 1)), 0)
