"""ReLU and max-pool together, alone and behind a convolution."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd.models import pooled_convolution
from fedjax_pcdd.models.convolution import plain_window
from fedjax_pcdd.models.layers import Conv
from fedjax_pcdd.models.pooled_convolution import FEW_CHANNELS, PooledConv, relu_max_pool


def separately(x):
    return nn.max_pool(nn.relu(x), (2, 2), (2, 2))


channels = pytest.mark.parametrize("channels", [3, FEW_CHANNELS])


@pytest.mark.thorough
@channels
def test_value_and_gradient_are_those_of_the_two_layers(channels):
    x, dy = (jax.random.normal(jax.random.key(i), (2, *side, channels)) for i, side in enumerate([(5, 7), (2, 3)]))
    value, pull = jax.vjp(relu_max_pool, x)
    expected, expected_pull = jax.vjp(separately, x)
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(pull(dy)[0], expected_pull(dy)[0])


@channels
def test_gradients_of_equal_maxima_sum_to_one_and_negatives_have_none(channels):
    x = jnp.stack([jnp.ones((2, 2, channels)), -jnp.ones((2, 2, channels))])
    gradient = jax.grad(lambda x: relu_max_pool(x).sum())(x)
    np.testing.assert_array_equal(gradient[0].reshape(4, -1).sum(0), 1)
    np.testing.assert_array_equal(gradient[1], 0)


def test_with_many_channels_the_first_of_equal_maxima_has_the_gradient():
    x = jnp.array([[0.0, 2.0], [2.0, 1.0]])[None, :, :, None] * jnp.ones(FEW_CHANNELS)
    gradient = jax.grad(lambda x: relu_max_pool(x).sum())(x)
    np.testing.assert_array_equal(gradient[0, :, :, 0], [[0, 1], [0, 0]])


@pytest.mark.thorough
@channels
def test_lanes_together_give_the_gradients_of_each_alone(channels):
    x = jax.random.normal(jax.random.key(0), (3, 2, 4, 4, channels))
    gradient = jax.grad(lambda x: jnp.sum(relu_max_pool(x) ** 2))
    np.testing.assert_array_equal(jax.vmap(gradient)(x), jnp.stack([gradient(lane) for lane in x]))


def blocked(kernel, side):
    """Whether a layer that maps 3 to 6 channels is computed in blocks here."""
    operands = jnp.zeros((1, side, side, 3)), jnp.zeros((kernel, kernel, 3, 6))
    return pooled_convolution._fits(plain_window(*operands, (1, 1), "VALID"), *operands)


def layers(bias=True, padding: Any = "VALID", kernel=5, features=6):
    """A convolution with pooling in one layer, and the convolution alone, whose variables both take."""
    settings = {"features": features, "kernel_size": kernel, "padding": padding, "use_bias": bias}
    return PooledConv(**settings), Conv(**settings)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("side", "options"),
    [
        (32, {}), (32, {"bias": False}), (28, {"padding": 2}), (28, {"padding": "SAME"}), (31, {}), (30, {"kernel": 3}),
        (14, {"features": 16}), (9, {"kernel": 2}),
    ],
)  # fmt: skip
def test_a_pooled_convolution_equals_the_convolution_then_the_pooling(side, options):
    pooled, alone = layers(**options)
    x = jax.random.normal(jax.random.key(0), (4, side, side, 3))
    variables = alone.init(jax.random.key(1), x)
    assert jax.tree.structure(variables) == jax.tree.structure(pooled.init(jax.random.key(1), x))
    value, pull = jax.vjp(pooled.apply, variables, x)
    expected, expected_pull = jax.vjp(lambda v, x: relu_max_pool(alone.apply(v, x)), variables, x)
    np.testing.assert_allclose(value, expected, 1e-5, 1e-5)
    dy = jax.random.normal(jax.random.key(2), value.shape)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), pull(dy), expected_pull(dy))


on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="convolutions run in blocks on a CPU alone")


@on_cpu
def test_small_networks_are_computed_in_blocks():
    assert blocked(5, 32)
    assert not blocked(5, 31)


@pytest.mark.thorough
def test_lanes_of_a_pooled_convolution_equal_each_client_alone():
    pooled, _ = layers()
    x = jax.random.normal(jax.random.key(0), (2, 4, 32, 32, 3))
    variables = jax.vmap(pooled.init)(jax.random.split(jax.random.key(1), 2), x)
    gradient = jax.grad(lambda v, x: jnp.sum(pooled.apply(v, x) ** 2))
    each = [gradient(jax.tree.map(lambda v, i=i: v[i], variables), x[i]) for i in range(2)]
    together = jax.vmap(gradient)(variables, x)
    jax.tree.map(lambda a, *b: np.testing.assert_allclose(a, np.stack(b), 1e-4, 1e-4), together, *each)
    shared = jax.vmap(gradient, (None, 0))(jax.tree.map(lambda v: v[0], variables), x)
    np.testing.assert_allclose(shared["params"]["bias"][0], each[0]["params"]["bias"], 1e-4, 1e-4)


@pytest.mark.thorough
@on_cpu
def test_the_first_of_equal_outputs_of_a_pooled_convolution_has_the_gradient():
    pooled, _ = layers(bias=False)
    x = jnp.ones((1, 32, 32, 3)).at[0, 0, 0].set(0.5)  # all windows but the first see equal values
    variables = {"params": {"kernel": jnp.ones((5, 5, 3, 6))}}
    gradient = jax.grad(lambda x: pooled.apply(variables, x).sum())(x)
    _, alone = layers(bias=False)

    def first(x):  # the upper left position of each window, but in the first window the one beside it
        z = alone.apply(variables, x)
        return z[:, ::2, ::2].sum() - z[0, 0, 0].sum() + z[0, 0, 1].sum()

    assert blocked(5, 32)
    np.testing.assert_allclose(gradient, jax.grad(first)(x), 1e-5)
