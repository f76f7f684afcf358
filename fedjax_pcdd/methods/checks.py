"""Shapes of what hooks return, checked when they are traced: a mistake in a method is one sentence with its name."""

from typing import Any

import chex
import jax
import jax.numpy as jnp

from fedjax_pcdd.errors import UserError


def scalar(method: Any, hook: str, value: Any) -> Any:
    """The value of a hook; UserError where it is no scalar."""
    try:
        chex.assert_rank(value, 0)
    except (AssertionError, ValueError, TypeError):
        shape = getattr(value, "shape", None)
        given = f"an array of shape {list(shape)}" if shape is not None else f"{type(value).__name__}"
        raise UserError(f"{_name(method)}.{hook} must return a scalar, not {given}: sum or average it.") from None
    return value


def alike(method: Any, hook: str, what: str, tree: Any, wanted: Any, source: str) -> Any:
    """A tree that a hook returns; UserError where its structure or a shape is not that of another tree.

    Args:
      what: the tree, as "client state".
      wanted: what it must look like.
      source: where that comes from, as "init_client made it".
    """
    try:
        chex.assert_trees_all_equal_shapes(tree, wanted)
    except (AssertionError, ValueError, TypeError):
        sentence = f"{_name(method)}.{hook} must return the {what} as {source}; {_difference(tree, wanted)}."
        raise UserError(sentence) from None
    return tree


def _name(method: Any) -> str:
    return type(method).__name__


def _difference(tree: Any, wanted: Any) -> str:
    """The first leaf that differs, in words."""
    given, expected = (dict(_shapes(x)) for x in (tree, wanted))
    for path, shape in expected.items():
        name = path or "it"
        if path not in given:
            return f"{name} is missing"
        if given[path] != shape:
            return f"{name} has the shape {given[path]}, not {shape}"
    more = [path for path in given if path not in expected]
    return f"{more[0] or 'it'} is too much" if more else "its containers are of other types"


def _shapes(tree: Any) -> list[tuple[str, list[int]]]:
    return [
        (jax.tree_util.keystr(path).lstrip("."), list(jnp.shape(leaf)))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]
