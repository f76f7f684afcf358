"""ReLU and max-pool together."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd.models.pooling import FEW_CHANNELS, relu_max_pool


def separately(x):
    return nn.max_pool(nn.relu(x), (2, 2), (2, 2))


channels = pytest.mark.parametrize("channels", [3, FEW_CHANNELS])


@channels
def test_value_and_gradient_are_those_of_both_layers(channels):
    x, dy = (jax.random.normal(jax.random.key(i), (2, *side, channels)) for i, side in enumerate([(5, 7), (2, 3)]))
    value, pull = jax.vjp(relu_max_pool, x)
    expected, expected_pull = jax.vjp(separately, x)
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(pull(dy)[0], expected_pull(dy)[0])


@channels
def test_of_equal_ones_all_gradients_make_one_and_none_below_zero_has_any(channels):
    x = jnp.stack([jnp.ones((2, 2, channels)), -jnp.ones((2, 2, channels))])
    gradient = jax.grad(lambda x: relu_max_pool(x).sum())(x)
    np.testing.assert_array_equal(gradient[0].reshape(4, -1).sum(0), 1)
    np.testing.assert_array_equal(gradient[1], 0)


def test_with_many_channels_the_first_of_equal_ones_has_the_gradient():
    x = jnp.array([[0.0, 2.0], [2.0, 1.0]])[None, :, :, None] * jnp.ones(FEW_CHANNELS)
    gradient = jax.grad(lambda x: relu_max_pool(x).sum())(x)
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[0, 1], [0, 0]])


@channels
def test_lanes_are_images_one_after_another(channels):
    x = jax.random.normal(jax.random.key(0), (3, 2, 4, 4, channels))
    weighted = jax.grad(lambda x: jnp.sum(relu_max_pool(x) ** 2))
    np.testing.assert_array_equal(jax.vmap(weighted)(x), jnp.stack([weighted(one) for one in x]))
