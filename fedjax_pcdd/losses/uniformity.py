"""FedUV's regularisers: predictions that vary over the batch, and features that spread over their space.

Son et al., "FedUV: Uniformity and Variance for Heterogeneous Federated Learning", CVPR 2024.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_pcdd.losses import Mask, check, precise


def prediction_variance(logits: Array, *, mask: Mask = None) -> Array:
    """(1/C) sum_c max(1/sqrt(C) - std_b softmax(o_b)_c, 0), with the unbiased standard deviation over the batch.

    1/sqrt(C) is the deviation of a column of the C x C identity matrix: one certain prediction per class.

    Returns:
      Scalar in [0, 1/sqrt(C)], in float32 or better; 0 with zero gradient for fewer than two samples.
    """
    logits = precise(logits)
    kept = jnp.ones(logits.shape[0], bool) if mask is None else mask.astype(bool)
    count = jnp.sum(kept)
    probabilities = jnp.where(kept[:, None], jax.nn.softmax(logits), 0)
    centred = jnp.where(kept[:, None], probabilities - jnp.sum(probabilities, axis=0) / jnp.maximum(count, 1), 0)
    variances = jnp.sum(jnp.square(centred), axis=0) / jnp.maximum(count - 1, 1)
    # The root of 0 has an infinite gradient, hence two selections instead of one.
    varies = variances > 0
    deviations = jnp.where(varies, jnp.sqrt(jnp.where(varies, variances, 1)), 0)
    shortfall = jax.nn.relu(1 / math.sqrt(logits.shape[-1]) - deviations)
    return jnp.where(count >= 2, jnp.mean(shortfall), 0)


def uniformity(features: Array, *, width: str = "median", mask: Mask = None) -> Array:
    """Mean over the B (B - 1) / 2 pairs of exp(-||z_i - z_j||^2 / m), m the median of the positive squared distances.

    Of an even number of distances m is the lower of the two in the middle. Pairs at distance 0 count in the mean.
    Parallel features that were scaled to length 1 differ by rounding, which is no positive distance.

    Args:
      width: "median" (published code): the gradient also flows through m, to the pair whose distance it is, so that the
        loss only depends on the shape of the cloud of features; "constant": m is a constant.

    Returns:
      Scalar in [0, 1], in float32 or better; 0 for fewer than two samples and 1 for equal features, with zero gradient.
    """
    check(width, ("median", "constant"), "width of the uniformity")
    features = precise(features)
    size = features.shape[0]
    kept = jnp.ones(size, bool) if mask is None else mask.astype(bool)
    pairs = (kept[:, None] & kept & (jnp.arange(size)[:, None] < jnp.arange(size))).ravel()
    # From one of them, as the gradient would cancel where features have much in common.
    moved = features - jax.lax.stop_gradient(jnp.where(kept[0], features[0], 0))
    distances = _squared_distances(jnp.where(kept[:, None], moved, 0)).ravel()
    lengths = jnp.sum(jnp.square(jax.lax.stop_gradient(features)), axis=1)
    rounding = 16 * jnp.finfo(features.dtype).eps ** 2 * jnp.maximum(lengths[:, None], lengths).ravel()
    scale = _median(distances, pairs & (distances > rounding))
    scale = jax.lax.stop_gradient(scale) if width == "constant" else scale
    # The gradient of a quotient has the square of its denominator: 0 in float32 if all features are within 1e-10.
    unit = jax.lax.stop_gradient(scale)
    closeness = jnp.where(pairs, jnp.exp(-(distances / unit) / (scale / unit)), 0)
    return jnp.sum(closeness) / jnp.maximum(jnp.sum(pairs), 1)


def _median(values, counted):
    """The lower median of the counted values [N]; 1 if there is none."""
    order = jnp.argsort(jax.lax.stop_gradient(jnp.where(counted, values, jnp.inf)))
    number = jnp.sum(counted)
    return jnp.where(number > 0, values[order[jnp.maximum(number - 1, 0) // 2]], 1)


@jax.custom_vjp
def _squared_distances(values):
    """||z_i - z_j||^2 of rows of [B, D], as [B, B]; sums of squares, so that equal rows are at exactly 0."""
    return jnp.sum(jnp.square(values[:, None] - values), axis=-1)


def _squared_distances_backward(values, cotangent):
    """2 sum_j (g_ij + g_ji) (z_i - z_j), as one product instead of an array [B, B, D]."""
    paired = cotangent + cotangent.T
    return (2 * (jnp.sum(paired, axis=1, keepdims=True) * values - jnp.matmul(paired, values, precision="highest")),)


_squared_distances.defvjp(lambda values: (_squared_distances(values), values), _squared_distances_backward)
