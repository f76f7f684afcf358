"""The simplex equiangular tight frame: C unit vectors whose angles are all equal and as wide as possible.

A fixed classifier: FedGELA and FedETF use it as it is, FedLoGe a sparse and short form (SSE-C: Xiao et al., "FedLoGe:
Joint Local and Generic Federated Learning under Long-tailed Data", ICLR 2024). Letters: D feature width, C classes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.errors import UserError


def simplex_etf(dim: int, num_classes: int, seed: int) -> np.ndarray:
    """A simplex ETF, rotated at random: [D, C] float64, columns of norm 1 with inner products -1 / (C - 1).

    Raises:
      UserError: D < C or C < 2.

    >>> m = simplex_etf(4, 3, seed=0)
    >>> (m.T @ m).round(6).tolist()
    [[1.0, -0.5, -0.5], [-0.5, 1.0, -0.5], [-0.5, -0.5, 1.0]]
    """
    return etf_from(np.random.default_rng(seed).uniform(size=(dim, num_classes)))


def draw_etf(key: jax.Array, dim: int, num_classes: int) -> jax.Array:
    """`simplex_etf` [D, C] in the default float type, with a seed drawn from a key; cannot be traced."""
    etf = simplex_etf(dim, num_classes, seed=int(jax.random.bits(key)))
    return jnp.asarray(etf, dtype=jnp.result_type(float))


def etf_from(matrix: np.ndarray) -> np.ndarray:
    """M = sqrt(C / (C - 1)) Q (I - 1 1^T / C), with Q the orthonormal factor of a matrix.

    The matrix [D, C] must have full rank; NumPy computes its factor in float64, with a fixed choice of signs.

    Returns:
      [D, C] float64; UserError if D < C or C < 2.
    """
    dim, classes = matrix.shape
    if classes < 2:
        raise UserError("A simplex ETF needs at least 2 classes.")
    if dim < classes:
        raise UserError(
            f"A simplex ETF of {classes} classes needs {classes} or more features, not {dim}: widen the model."
        )
    orthonormal, _ = np.linalg.qr(np.asarray(matrix, np.float64))
    centre = np.eye(classes) - 1 / classes
    return np.sqrt(classes / (classes - 1)) * orthonormal @ centre


def draw_sparse_etf(key: jax.Array, dim: int, num_classes: int, *, sparsity: float, length: float) -> jax.Array:
    """A random `sparse_etf` [D, C] in the default float type; cannot be traced.

    Args:
      key: of the frame and of its zeros.
      sparsity: share of the entries that are 0, in [0, 1).
      length: target of the columns' norms.

    Raises:
      UserError: D < C or C < 2, or so few entries are left that columns vanish.
    """
    etf = _draw_sparse_etf(int(jax.random.bits(key)), dim, num_classes, float(sparsity), float(length))
    return jnp.asarray(etf, dtype=jnp.result_type(float))


@functools.lru_cache(maxsize=16)
def _draw_sparse_etf(seed, dim, num_classes, sparsity, length):
    generator = np.random.default_rng(seed)
    frame = etf_from(generator.uniform(size=(dim, num_classes)))
    for _ in range(100):
        zeros = generator.permutation(frame.size)[: int(sparsity * frame.size)]
        start = frame.copy()
        start.flat[zeros] = 0
        if start.any(axis=0).all():
            return sparse_etf(start, length=length)
    raise UserError(f"A share of {sparsity} zeros leaves classes of {dim} features without any: choose a smaller one.")


def sparse_etf(start: np.ndarray, *, length: float, steps: int = 10_000, learning_rate: float = 1e-4) -> np.ndarray:
    """Make columns equally long and spread their directions, while entries that are 0 stay 0 (FedLoGe's SSE-C).

    Adam (0.9, 0.999, 1e-8) on `separation`, in float64 on the host, so that all devices and hosts get the same bits.

    Args:
      start: [D, C], a simplex ETF with entries set to 0; no column is 0.
      length: target of the columns' norms.
      steps: of Adam; 0 returns `start`.

    Returns:
      [D, C] float64.
    """
    values, nonzero = np.array(start, np.float64), start != 0
    mean, square = np.zeros_like(values), np.zeros_like(values)
    for step in range(1, steps + 1):
        gradient = np.where(nonzero, separation(values, length)[1], 0)
        mean += 0.1 * (gradient - mean)
        square += 0.001 * (gradient**2 - square)
        scale = np.sqrt(square / (1 - 0.999**step)) + 1e-8
        values -= learning_rate / (1 - 0.9**step) * mean / scale
    return values


def separation(vectors: np.ndarray, length: float, limit: float = 0.99999) -> tuple[float, np.ndarray]:
    """The objective of SSE-C: J = sum_c (|s_c| - length)^2 - mean_c (angle in radians to the nearest other column).

    Args:
      vectors: [D, C] float64, no column is 0.
      length: target of the norms.
      limit: cosines are clamped to [-limit, limit], beyond which they have no gradient.

    Returns:
      (J, its gradient [D, C]); of equally near columns the first is the nearest.
    """
    classes = vectors.shape[1]
    norms = np.sqrt((vectors**2).sum(axis=0))
    units = vectors / norms
    cosines = units.T @ units
    rivals = cosines - 4 * np.eye(classes)
    nearest, columns = rivals.argmax(axis=1), np.arange(classes)
    closest = rivals[columns, nearest]
    clamped = np.clip(closest, -limit, limit)
    pull = np.zeros((classes, classes))
    pull[columns, nearest] = (clamped == closest) / np.sqrt(1 - clamped**2) / classes
    pull += pull.T
    turning = (units @ pull - units * (pull * cosines).sum(axis=0)) / norms
    value = ((norms - length) ** 2).sum() - np.arccos(clamped).mean()
    return float(value), 2 * (norms - length) * units + turning
