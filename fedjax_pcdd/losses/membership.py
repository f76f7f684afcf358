"""Class membership of samples: sums over the samples of a class, and class values assigned to samples."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_pcdd.losses import Mask


class Membership(NamedTuple):
    """One-hot classes in both orientations, as a CPU is slow at multiplying by a matrix transposed on the fly."""

    of_samples: Array  # [B, C]
    of_classes: Array  # [C, B]

    @property
    def counts(self) -> Array:
        """Samples of each class [C]."""
        return jnp.sum(self.of_samples, axis=0)

    @property
    def any(self) -> Array:
        """Which samples count [B], bool."""
        return jnp.any(self.of_samples > 0, axis=1)

    def only(self, classes: Array) -> "Membership":
        """Remove the samples of classes that are False in `classes` [C]."""
        return Membership(self.of_samples * classes, self.of_classes * classes[:, None])

    def per_class(self, values: Array) -> Array:
        """Sums of values [B, D] over the samples of each class, [C, D]."""
        return _product(self.of_classes, self.of_samples, values)

    def per_sample(self, values: Array) -> Array:
        """The row of values [C, D] of each sample's class, [B, D]; 0 for samples that do not count."""
        return _product(self.of_samples, self.of_classes, values)


def membership(labels: Array, num_classes: int, mask: Mask = None, dtype=jnp.float32) -> Membership:
    """Classes of labels [B] in [0, C); masked samples (mask [B]) belong to none.

    >>> of = membership(jnp.array([2, 0, 2]), 3, mask=jnp.array([1, 1, 0]))
    >>> of.counts.tolist(), of.per_class(jnp.array([[1.0], [2.0], [4.0]])).ravel().tolist()
    ([1.0, 0.0, 1.0], [2.0, 0.0, 1.0])
    """
    samples, classes = (jax.nn.one_hot(labels, num_classes, dtype=dtype, axis=axis) for axis in (-1, 0))
    if mask is None:
        return Membership(samples, classes)
    kept = mask.astype(dtype)
    return Membership(samples * kept[:, None], classes * kept)


@jax.custom_vjp
def _product(matrix, transposed, values):
    return jnp.matmul(matrix, values, precision="highest")


def _product_forward(matrix, transposed, values):
    return _product(matrix, transposed, values), (matrix, transposed)


def _product_backward(matrices, cotangent):
    return None, None, _product(*reversed(matrices), cotangent)  # memberships are constants


_product.defvjp(_product_forward, _product_backward)
