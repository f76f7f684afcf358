"""Shapes of what hooks return, checked when they are traced: a mistake in a method is one sentence with its name."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pcdd.errors import UserError


def scalar(method: Any, hook: str, value: Any) -> Any:
    """The value of a hook; UserError where it is no real scalar."""
    real = isinstance(value, int | float) or jnp.issubdtype(getattr(value, "dtype", object), jnp.number)
    if real and jnp.ndim(value) == 0 and not jnp.iscomplexobj(value):
        return value
    shape = getattr(value, "shape", None)
    given = f"an array of shape {list(shape)}" if shape else str(getattr(value, "dtype", type(value).__name__))
    raise UserError(f"{_name(method)}.{hook} must return a scalar, not {given}: sum or average it.")


def shaped(method: Any, hook: str, value: Any, *shape: int) -> Any:
    """The array of a hook; UserError where it has another shape."""
    if getattr(value, "shape", None) != shape:
        given = list(value.shape) if hasattr(value, "shape") else type(value).__name__
        raise UserError(f"{_name(method)}.{hook} must return an array of shape {list(shape)}, not {given}.")
    return value


def numbers(method: Any, hook: str, tree: Any) -> Any:
    """What a hook returns; UserError where a leaf of it is neither an array nor a number."""
    for leaf in jax.tree.leaves(tree):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, int | float)):
            raise UserError(f"{_name(method)}.{hook} must return arrays, not {type(leaf).__name__}.")
    return tree


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


def like(method: Any, hook: str, tree: Any, params: Any) -> Any:
    """What a hook says of each array of the parameters, or None; UserError where its structure is another one."""
    if tree is not None and jax.tree.structure(tree) != jax.tree.structure(params):
        raise UserError(f"{_name(method)}.{hook} must say something of each array of the parameters, or return None.")
    return tree


def of_kind(method: Any, hook: str, value: Any, *kinds: type) -> Any:
    """What a hook returns; UserError unless it is of that type, or for several types a tuple of these."""
    values = (value,) if len(kinds) == 1 else value if isinstance(value, tuple) else ()
    if len(values) != len(kinds) or not all(isinstance(one, kind) for one, kind in zip(values, kinds, strict=True)):
        wanted = ", ".join("anything" if kind is object else f"a {kind.__name__}" for kind in kinds)
        wanted = wanted if len(kinds) == 1 else f"a tuple ({wanted})"
        raise UserError(f"{_name(method)}.{hook} must return {wanted}, not {_kind(value)}.")
    return value


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"({', '.join(type(one).__name__ for one in value)})" if name == "tuple" else name


def built(method: Any, model: Any) -> Any:
    """The model that a method makes of the plain one; UserError where it is none."""
    return of_kind(method, "build", method.build(model), nn.Module)


def of_model(method: Any, hook: str, variables: Any) -> Any:
    """The variables that a hook returns; UserError where they are those of no model."""
    if isinstance(variables, Mapping) and "params" in variables:
        return variables
    given = "a dictionary without them" if isinstance(variables, Mapping) else type(variables).__name__
    raise UserError(f"{_name(method)}.{hook} must return variables of a model, with params, not {given}.")


def misspelt(method: Any, contract: type) -> list[str]:
    """A sentence for each function of a method's own whose name is nearly that of a hook of the contract."""
    hooks = [name for name, one in vars(contract).items() if callable(one) and not name.startswith("_")]
    functions = [name for cls in type(method).__mro__ for name, one in vars(cls).items() if callable(one)]
    own = [name for name in dict.fromkeys(functions) if not (name.startswith("_") or hasattr(contract, name))]
    near = {name: get_close_matches(name, hooks, 1, 0.85) for name in own}
    return [f"{_name(method)}.{name} is no hook: did you mean `{close[0]}`?" for name, close in near.items() if close]


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
