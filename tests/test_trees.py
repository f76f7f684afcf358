"""Arithmetic on pytrees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd import trees


def random_tree(seed=0, leading=()):
    rng = np.random.default_rng(seed)
    shapes = {"backbone": {"kernel": (3, 2), "bias": (2,)}, "head": {"kernel": (2, 4)}}
    draw = lambda shape: jnp.asarray(rng.normal(size=(*leading, *shape)), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def assert_trees_close(a, b, rtol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol), a, b)


def test_squared_distance_sums_over_all_leaves():
    a, b = random_tree(0), random_tree(1)
    expected = sum(np.sum((x - y) ** 2) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    np.testing.assert_allclose(trees.squared_distance(a, b), expected, rtol=1e-6)


def test_squared_distance_has_zero_gradient_at_zero():
    gradient = jax.grad(trees.squared_distance)(random_tree(), random_tree())
    assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(gradient))


def test_squared_distance_of_empty_trees_is_zero():
    assert trees.squared_distance({}, {}) == 0


def test_proximal_term_has_its_value_and_gradient():
    start = {"w": jnp.zeros(2)}
    penalty = lambda tree: 0.5 * 0.1 * trees.squared_distance(tree, start)  # noqa: E731
    value, gradient = jax.value_and_grad(penalty)({"w": jnp.asarray([1.0, 2.0])})
    np.testing.assert_allclose([value, *gradient["w"]], [0.25, 0.1, 0.2], rtol=1e-6)


def descend(mu, a=2.0, b=1.5, start=-1.0):
    """Where gradient descent on a (w - b)^2 / 2 + mu (w - start)^2 / 2 ends."""
    loss = lambda w: 0.5 * a * (w - b) ** 2 + 0.5 * mu * trees.squared_distance(w, start)  # noqa: E731
    return jax.lax.fori_loop(0, 200, lambda _, w: w - 0.1 * jax.grad(loss)(w), jnp.asarray(start))


@pytest.mark.parametrize("mu", [0.0, 0.3, 4.0])
def test_proximal_descent_ends_between_optimum_and_start(mu):
    np.testing.assert_allclose(descend(mu), (2.0 * 1.5 + mu * -1.0) / (2.0 + mu), rtol=1e-5)


def test_adding_scaled_rows_one_by_one_is_the_weighted_mean():
    stacked, weights = random_tree(leading=(3,)), jnp.asarray([0.5, 0.2, 0.3])
    total = trees.zeros_like(trees.select(stacked, 0))
    for row in range(3):
        total = trees.add_scaled(total, trees.select(stacked, row), weights[row])
    expected = jax.tree.map(lambda leaf: np.tensordot(weights, leaf, 1), stacked)
    assert_trees_close(total, expected)


def test_add_scaled_keeps_the_dtype_of_the_total():
    total = {"w": jnp.ones(2, jnp.bfloat16)}
    assert trees.add_scaled(total, {"w": jnp.ones(2)}, jnp.float32(0.5))["w"].dtype == jnp.bfloat16


@pytest.mark.parametrize("row", [0, 2, -1, -3])
def test_select_takes_a_traced_row_which_may_count_from_the_end(row):
    stacked = random_tree(leading=(3,))
    assert_trees_close(jax.jit(trees.select)(stacked, row), jax.tree.map(lambda leaf: leaf[row], stacked))


def test_select_takes_several_rows_at_once():
    stacked, rows = random_tree(leading=(3,)), jnp.array([2, 0, -1])
    expected = jax.tree.map(lambda leaf: leaf[rows], stacked)
    assert_trees_close(trees.select(stacked, rows), expected)
    assert_trees_close(jax.vmap(trees.select, (None, 0))(stacked, rows), expected)


@pytest.mark.parametrize("index", [0, 2])
def test_at_takes_a_traced_or_a_known_index_into_arrays_and_keys(index):
    for array in (jnp.arange(12.0).reshape(3, 4), jnp.arange(3)):
        for element in (trees.at(array, index), jax.jit(trees.at)(array, index)):
            np.testing.assert_array_equal(element, array[index])
    keys = jax.random.split(jax.random.key(0), 3)
    assert jax.jit(trees.at)(keys, index) == keys[index]


@pytest.mark.parametrize("flag", [True, False])
def test_where_selects_one_whole_tree(flag):
    assert_trees_close(jax.jit(trees.where)(flag, random_tree(0), random_tree(1)), random_tree(0 if flag else 1))


def test_zeros_like_accepts_shapes_without_arrays():
    zeros = trees.zeros_like(jax.eval_shape(random_tree))
    assert_trees_close(zeros, jax.tree.map(lambda leaf: 0 * leaf, random_tree()))
