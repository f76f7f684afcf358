"""The first variables of a model, as they are drawn by a program that compiles fast."""

from functools import partial

import jax
import numpy as np
import pytest

from fedjax_pcdd.engine import executables
from fedjax_pcdd.models.classifier import Classifier, initialise
from fedjax_pcdd.models.mlp import MLP


@pytest.mark.thorough
def test_initial_variables_equal_those_of_a_fully_optimised_program(monkeypatch):
    model, shape, key = Classifier(MLP(), num_classes=3), (8, 8, 3), jax.random.key(3)
    monkeypatch.setenv("XLA_FLAGS", "")  # the flags of the tests switch optimisation off
    draw = executables._fresh_variables.__wrapped__("cpu")
    fully_optimised = jax.jit(
        partial(initialise, model, image_shape=shape), compiler_options={"xla_backend_optimization_level": 3}
    )
    jax.tree.map(np.testing.assert_array_equal, draw(model, key, shape), fully_optimised(key))
