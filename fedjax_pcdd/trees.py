"""Arithmetic on pytrees of arrays that `jax.tree` and optax lack, or name differently.

A tree here is any pytree whose leaves are arrays: parameters, gradients, a client's state. A *stacked* tree
carries one leading axis S on every leaf, a row per client. Trees that meet in a call have the same structure.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def squared_distance(a: Tree, b: Tree) -> jax.Array:
    """||a - b||^2 over all leaves, as a sum of squares: the gradient at a = b is 0 (a norm's would be NaN).

    Returns:
      Scalar; 0 for trees without leaves.
    """
    leaves = jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(jnp.square(x - y)), a, b))
    return sum(leaves, start=jnp.zeros(()))


def weighted_mean(stacked: Tree, weights: jax.Array) -> Tree:
    """sum_s weights[s] * leaf[s] on every leaf; the weights are NOT normalised here.

    Args:
      stacked: leaves [S, ...].
      weights: [S], expected to sum to 1 (p_k = n_k / sum n).

    Returns:
      Tree with leaves [...].
    """
    return jax.tree.map(lambda leaf: jnp.tensordot(weights, leaf, axes=1, precision="highest"), stacked)


def add_scaled(total: Tree, tree: Tree, scale: jax.Array | float) -> Tree:
    """Return total + scale * tree, with the dtypes of `total`, so that a loop can carry it."""
    return jax.tree.map(lambda t, x: (t + scale * x).astype(t.dtype), total, tree)


def select(tree: Tree, row: jax.Array | int) -> Tree:
    """Row of a stacked tree: leaf[row] for leaves [S, ...]; `row` may be traced."""
    return jax.tree.map(lambda leaf: leaf[row], tree)


def zeros_like(tree: Tree) -> Tree:
    """Zeros with the shapes and dtypes of the leaves; takes arrays or `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def where(flag: jax.Array | bool, a: Tree, b: Tree) -> Tree:
    """Tree `a` if the scalar `flag` holds, else tree `b`; `flag` may be traced."""
    return jax.tree.map(lambda x, y: jnp.where(flag, x, y), a, b)


def path_mask(tree: Tree, predicate: Callable[[tuple[str, ...]], bool]) -> Tree:
    """Which leaves fulfil a predicate on their path, as a tree of Python bools (the form optax masks take).

    >>> path_mask({"backbone": {"w": 1.0}, "head": {"w": 2.0}}, lambda path: path[0] == "head")
    {'backbone': {'w': False}, 'head': {'w': True}}
    """
    return jax.tree_util.tree_map_with_path(lambda path, _: bool(predicate(_names(path))), tree)


def num_scalars(tree: Tree) -> int:
    """Number of array entries in all leaves, for accounting; takes arrays or `jax.ShapeDtypeStruct`.

    >>> num_scalars({"w": jnp.zeros((3, 4)), "b": jnp.zeros(4)})
    16
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _names(path) -> tuple[str, ...]:
    """Keys of dicts, names of fields and positions in sequences, all as str."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
