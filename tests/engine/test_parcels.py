"""What the host sends for a round is one array, and nothing is lost on the way."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pcdd.engine.parcels import opened, packed
from fedjax_pcdd.trees import select


@pytest.mark.parametrize("x64", [False, True])
def test_a_parcel_has_the_values_shapes_and_types_of_its_tree(x64):
    tree = {
        "integers": np.arange(-3, 9, dtype=np.int32).reshape(2, 3, 2),
        "floats": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
        "wide": (np.arange(6, dtype=np.int64).reshape(3, 2), np.linspace(0, 1, 5)),
        "empty": np.zeros((0, 4), np.int32),
        "scalar": np.float32(-2.5),
        "there": jnp.arange(3),
    }
    with jax.enable_x64(x64):
        expected, parcel = jax.tree.map(jnp.asarray, tree), packed(tree)
        result = jax.jit(opened)(parcel)
    assert [x.shape for x in jax.tree.leaves(parcel)] == [(parcel.words.size,), (3,)]
    jax.tree.map(np.testing.assert_array_equal, result, expected)
    assert jax.tree.map(lambda x: x.dtype, result) == jax.tree.map(lambda x: x.dtype, expected)


def test_each_device_opens_its_own_row_of_a_parcel():
    tree = {"steps": np.arange(12, dtype=np.int32).reshape(2, 3, 2), "count": np.array([7, -1], np.int32)}
    parcel = packed(tree, each=True)
    assert parcel.words.shape == (2, 7)
    for device in range(2):
        result = jax.jit(lambda parcel, device=device: opened(select(parcel, device)))(parcel)
        jax.tree.map(np.testing.assert_array_equal, result, select(tree, device))


def test_a_round_is_sent_as_one_array_of_the_same_shape_for_every_cohort():
    simulation = toy.simulation(cohort=2)
    state, shapes = simulation.start(), set()
    for round in range(4):
        arguments = simulation.arguments(state, round, simulation.plan(round))
        (sent,) = (x for x in jax.tree.leaves(arguments) if not isinstance(x, jax.Array))
        shapes.add((sent.shape, sent.dtype.name))
    assert len(shapes) == 1
