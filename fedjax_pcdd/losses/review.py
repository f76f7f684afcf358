"""FedRL's review term: how far a layer's output has moved from that of the received model."""

import jax
import jax.numpy as jnp

from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.losses.classification import masked_mean
from fedjax_pcdd.losses.prototypes import safe_norm

DISTANCES = ("per_sample", "batch_norm")


def review_distance(
    layer: jax.Array, received: jax.Array, *, distance: str = "per_sample", mask: jax.Array | None = None
) -> jax.Array:
    """R_m = ||kr_m(x; w) - kr_m(x; w^t)||, unsquared, of one layer on one batch (FedRL).

    Args:
      layer: [B, ...] output of the local model.
      received: [B, ...] output of the received model, a constant.
      distance: "per_sample" (mean over the samples of their Euclidean norms) or "batch_norm" (Frobenius norm of the
        whole batch).
      mask: [B], samples that count; None for all.

    Returns:
      Scalar in float32 or better; where it is 0 its gradient is 0 too.

    Raises:
      UserError: `distance` is unknown.
    """
    if distance not in DISTANCES:
        raise UserError(f"Unknown distance '{distance}' of the review term: {nearest(distance, DISTANCES)}")
    dtype = jnp.promote_types(layer.dtype, jnp.float32)
    moved = (layer.astype(dtype) - jax.lax.stop_gradient(received).astype(dtype)).reshape(layer.shape[0], -1)
    if distance == "per_sample":
        return masked_mean(safe_norm(moved), mask)
    kept = moved if mask is None else jnp.where(mask.astype(bool)[:, None], moved, 0)
    return safe_norm(kept.ravel())
