"""Arithmetic on pytrees of arrays that `jax.tree` and optax lack, or name differently.

A tree here is any pytree whose leaves are arrays: parameters, gradients, a client's state. A *stacked* tree
carries one leading axis S on every leaf, a row per client. Trees that meet in a call have the same structure.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def squared_distance(a: Tree, b: Tree) -> jax.Array:
    """||a - b||^2 over all leaves, as a sum of squares: the gradient at a = b is 0 (a norm's would be NaN).

    Returns:
      Scalar; 0 for trees without leaves.
    """
    return 2 * tilted_distance(a, b, None)


def tilted_distance(a: Tree, b: Tree, tilt: Tree | None, weight: jax.Array | float = 1.0) -> jax.Array:
    """(weight / 2) * ||a - b||^2 + <tilt, a> over all leaves; without a tilt the first term alone.

    In a loop that changes neither b nor tilt, value and gradient leave no arrays of the trees' size in memory.

    Returns:
      Scalar; 0 for trees without leaves.
    """
    trees = (a, b) if tilt is None else (a, b, tilt)
    leaves = jax.tree.leaves(jax.tree.map(partial(_tilted, weight), *trees))
    return sum(leaves, start=jnp.zeros(()))


@jax.custom_vjp
def _tilted(weight, a, b, tilt=None):
    if tilt is None:
        return 0.5 * weight * jnp.sum(jnp.square(a - b))
    return _sum((0.5 * weight) * jnp.square(a - b) + tilt * a)


def _sum(values: jax.Array) -> jax.Array:
    """Sum over all entries, two halves first: on a CPU XLA sums stored arrays faster than what it computes then."""
    rows = values.reshape(-1, *values.shape[-1:])  # sums of vectors are slower still
    half = rows.shape[0] // 2
    return jnp.sum(rows[:half] + rows[half : 2 * half]) + jnp.sum(rows[2 * half :])


def _tilted_backward(arrays, cotangent):
    # XLA would keep what value and gradient have in common, and what a loop does not change, such as a multiple of the
    # tilt. With the barrier and this order of operations there is neither.
    weight, a, b, tilt = arrays
    moved = jax.lax.optimization_barrier(a) - b
    slope = weight * moved
    towards = cotangent * (slope if tilt is None else slope + tilt)
    of_weight = jnp.reshape(0.5 * cotangent * jnp.sum(jnp.square(moved)), jnp.shape(weight))
    return of_weight, towards, -cotangent * slope, None if tilt is None else cotangent * a


_tilted.defvjp(lambda weight, a, b, tilt=None: (_tilted(weight, a, b, tilt), (weight, a, b, tilt)), _tilted_backward)


def add_scaled(total: Tree, tree: Tree, scale: jax.Array | float) -> Tree:
    """Return total + scale * tree, with the dtypes of `total`, so that a loop can carry it."""
    return jax.tree.map(lambda t, x: (t + scale * x).astype(t.dtype), total, tree)


def select(tree: Tree, row: Any) -> Tree:
    """Row of a stacked tree: leaf[row] for leaves [S, ...]; `row` may be traced."""
    return jax.tree.map(lambda leaf: leaf[row], tree)


def zeros_like(tree: Tree) -> Tree:
    """Zeros with the shapes and dtypes of the leaves; takes arrays or `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def where(flag: jax.Array | bool, a: Tree, b: Tree) -> Tree:
    """Tree `a` if the scalar `flag` holds, else tree `b`; `flag` may be traced."""
    return jax.tree.map(lambda x, y: jnp.where(flag, x, y), a, b)
