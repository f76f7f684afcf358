"""Which type products have: full float32 everywhere but in the models, which say themselves what they take."""

import functools
from collections.abc import Callable
from typing import Any

import jax


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
