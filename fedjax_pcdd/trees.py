"""Arithmetic on pytrees of arrays that `jax.tree` and optax lack or name differently.

A tree here is any pytree whose leaves are arrays: parameters, gradients, a client's state. A *stacked* tree
carries one leading axis S on every leaf, a row per client. All trees of a call have the same structure.
"""

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

Tree = Any


def squared_distance(a: Tree, b: Tree) -> jax.Array:
    """||a - b||^2 over all leaves, as a sum of squares: the gradient at a = b is 0 (a norm's would be NaN).

    Returns:
      Scalar; 0 for trees without leaves.
    """
    leaves = jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(jnp.square(x - y)), a, b))
    return sum(leaves, start=jnp.zeros(()))


def add_scaled(total: Tree, tree: Tree, scale: jax.Array | float) -> Tree:
    """Return total + scale * tree, with the dtypes of `total`, so that a loop can carry it."""
    return jax.tree.map(lambda t, x: (t + scale * x).astype(t.dtype), total, tree)


def summable(tree: Tree) -> Tree:
    """The tree in dtypes for sums: floats of fewer than 32 bits as float32, such integers and booleans as int32."""

    def wide(leaf):
        dtype = jnp.result_type(leaf)
        target = jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32
        return jnp.asarray(leaf, target) if dtype.itemsize < 4 else leaf

    return jax.tree.map(wide, tree)


def select(tree: Tree, row: Any) -> Tree:
    """Row of a stacked tree: leaf[row] for leaves [S, ...]; `row` may be traced."""
    leaves = jax.tree.leaves(tree)
    if not (leaves and isinstance(row, Tracer) and row.ndim == 0):
        return jax.tree.map(lambda leaf: leaf[row], tree)
    row = jnp.where(row < 0, row + len(leaves[0]), row)
    return jax.tree.map(lambda leaf: at(leaf, row), tree)


def at(array: Any, index: Any) -> jax.Array:
    """array[index] for a scalar index >= 0; for ordinary indexing JAX adds a test for negative indices."""
    if not isinstance(index, Tracer):
        return array[index]
    zero = np.zeros((), index.dtype)
    start, size = (index, *[zero] * (array.ndim - 1)), (1, *array.shape[1:])
    return jax.lax.squeeze(jax.lax.dynamic_slice(array, start, size, allow_negative_indices=False), (0,))


def zeros_like(tree: Tree, *leading: int) -> Tree:
    """Zeros with the shapes (after any leading axes) and dtypes of the leaves: arrays or `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: jnp.zeros((*leading, *leaf.shape), leaf.dtype), tree)


def size(tree: Tree) -> int:
    """Number of scalars in all leaves, which may be abstract."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def total(trees: Iterable[Tree]) -> Tree:
    """The sum of one tree or more, leaf by leaf."""
    return functools.reduce(functools.partial(jax.tree.map, jnp.add), trees)


def on_leaves(function: Callable[..., jax.Array], **options: Any) -> Callable[..., Tree]:
    """Compile a function of one array of each tree as one of trees, applied leaf by leaf; keywords are passed on.

    `jax.jit` only sees the leaves. This is needed for module-level functions of methods' and users' states: JAX 0.10.2
    considers the tree structures of two Flax dataclasses equal, whatever their classes (only their hashes differ), so
    that the program compiled for one can be used for the other and return an instance of the wrong class. The options
    are those of `jax.jit`.
    """

    @functools.partial(jax.jit, **options)
    @functools.wraps(function)
    def compiled(*columns, **keywords):
        return [function(*leaves, **keywords) for leaves in zip(*columns, strict=True)]

    def on_trees(*trees, **keywords):
        return jax.tree.unflatten(jax.tree.structure(trees[0]), compiled(*map(jax.tree.leaves, trees), **keywords))

    return on_trees


def where(flag: jax.Array | bool, a: Tree, b: Tree) -> Tree:
    """Tree `a` if the scalar `flag` holds, else tree `b`; `flag` may be traced."""
    return jax.tree.map(lambda x, y: jnp.where(flag, x, y), a, b)
