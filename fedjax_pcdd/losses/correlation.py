"""FCCL's collaborative loss: the logits of a participant correlate with the mean logits class by class, and only so.

Huang, Ye and Du, "Learn from Others and Be Yourself in Heterogeneous Federated Learning", CVPR 2022.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_pcdd.losses import Mask, Number


def cross_correlation(logits: Array, mean_logits: Array, *, eps: float = 0.0, mask: Mask = None) -> Array:
    """M_uv, the correlation over a batch between class u of one's own logits and class v of the mean logits.

    Columns are standardised with the unbiased standard deviation and the products divided by B (the published code),
    so that M_uu = (B - 1) / B where the two agree.

    Args:
      logits: [B, C] of one participant.
      mean_logits: [B, C] over the participants, a constant.
      eps: added to the variance under the root. With 0 a column without any spread (B = 1 among them) has correlation
        0 and no gradient, but the gradient of a column with almost none is as large as the inverse of its deviation;
        eps (1e-12, say) limits it to 1 / sqrt(eps).

    Returns:
      [C, C] in float32 or better, entries in [-1, 1]; zeros if no sample counts.
    """
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    kept = jnp.ones(logits.shape[0], bool) if mask is None else mask.astype(bool)
    own = _standardise(logits.astype(dtype), kept, eps)
    mean = _standardise(jax.lax.stop_gradient(mean_logits).astype(dtype), kept, eps)
    return jnp.matmul(own.T, mean, precision="highest") / jnp.maximum(jnp.sum(kept), 1)


def cross_correlation_loss(matrix: Array, weight: Number) -> Array:
    """sum_u (1 - M_uu)^2 + weight * sum_{u != v} (1 + M_uv)^2.

    Args:
      matrix: [C, C], M.
      weight: lambda_col >= 0, of the pairs of different classes; 0.0051 in the paper.

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
    # From a row of the batch, so that a column of one value is exactly 0 whatever the rounding of its mean.
    values = values - jax.lax.stop_gradient(values[jnp.argmax(kept)])
    kept, count = kept[:, None], jnp.sum(kept)
    values = jnp.where(kept, values, 0)
    centred = jnp.where(kept, values - jnp.sum(values, axis=0) / jnp.maximum(count, 1), 0)
    variances = jnp.sum(jnp.square(centred), axis=0) / jnp.maximum(count - 1, 1) + eps
    # The root of 0 has an infinite gradient, hence two selections instead of one.
    spread = variances > 0
    return jnp.where(spread, centred / jnp.sqrt(jnp.where(spread, variances, 1)), 0)
