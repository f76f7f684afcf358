"""The simplex equiangular tight frame: C unit vectors whose angles are all equal and as wide as possible.

Used by FedGELA as a fixed classifier. Letters: D feature width, C classes.
"""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.errors import UserError


def simplex_etf(dim: int, num_classes: int, seed: int) -> np.ndarray:
    """A randomly rotated simplex ETF.

    Args:
      dim: D, at least C.
      num_classes: C, at least 2.
      seed: of the rotation.

    Returns:
      [D, C] float64, columns of norm 1 with inner products -1 / (C - 1).

    Raises:
      UserError: where D < C or C < 2.

    >>> m = simplex_etf(4, 3, seed=0)
    >>> (m.T @ m).round(6).tolist()
    [[1.0, -0.5, -0.5], [-0.5, 1.0, -0.5], [-0.5, -0.5, 1.0]]
    """
    return etf_from(np.random.default_rng(seed).uniform(size=(dim, num_classes)))


def draw_etf(key: jax.Array, dim: int, num_classes: int) -> jax.Array:
    """`simplex_etf` [D, C] in the default float type, its seed from a key; not to be traced."""
    etf = simplex_etf(dim, num_classes, seed=int(jax.random.bits(key)))
    return jnp.asarray(etf, dtype=jnp.result_type(float))


def etf_from(matrix: np.ndarray) -> np.ndarray:
    """M = sqrt(C / (C - 1)) Q (I - 1 1^T / C), with Q the orthonormal factor of a matrix.

    Args:
      matrix: [D, C] of full rank. Its factor is taken in float64 by NumPy, whose choice of signs is fixed.

    Returns:
      [D, C] float64.

    Raises:
      UserError: where D < C or C < 2.
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
