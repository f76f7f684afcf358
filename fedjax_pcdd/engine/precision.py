"""Which type products have: full float32 everywhere but in the models, which say themselves what they take.

A precision is "float32", "tf32" or "bfloat16"; docs/performance.md has what each means on each device.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

TYPES = {"float32": jnp.float32, "tf32": jnp.float32, "bfloat16": jnp.bfloat16}  # of images and activations


def products(precision: str) -> str:
    """What products of a model's float32 operands take, as `jax.default_matmul_precision` has it.

    A GPU's default is TF32. What JAX calls "tensorfloat32" is so in cuDNN alone: in the matrix products that XLA writes
    itself it is full float32, by the code that XLA generates for an H100. On a TPU, whose default rounds operands to
    bfloat16, it is three products of these, which are as exact as TF32.
    """
    if precision == "tf32" and jax.default_backend() == "tpu":
        return "tensorfloat32"
    return "float32" if precision == "float32" else "default"


def full_precision(function: Callable) -> Callable:
    """The function, in which products of float32 operands are as exact as float32 allows wherever nothing else is said.

    JAX leaves them to the device, and a GPU rounds operands to 10 bits, a TPU to 7: too few for sums over clients and
    for losses. A model's layers say otherwise by `Classifier.precision`. On a CPU the compiled program is the same.
    """

    @functools.wraps(function)
    def exact(*args: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision("float32"):
            return function(*args, **kwargs)

    return exact
