"""Checks of what hooks return, made when they are traced: one sentence names the method and hook of a mistake."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from fedjax_pcdd.errors import UserError, shortened
from fedjax_pcdd.trees import summable


def scalar(method: Any, hook: str, value: Any) -> Any:
    """The value that a hook returned; UserError if it is no real scalar."""
    dtype = getattr(value, "dtype", object)
    real = isinstance(value, int | float) or any(jnp.issubdtype(dtype, kind) for kind in (jnp.number, jnp.bool_))
    if real and jnp.ndim(value) == 0 and not jnp.iscomplexobj(value):
        return value
    shape = getattr(value, "shape", None)
    actual = f"an array of shape {list(shape)}" if shape else str(getattr(value, "dtype", type(value).__name__))
    raise UserError(f"{_name(method)}.{hook} must return a scalar, not {actual}: sum or average it.")


def shaped(method: Any, hook: str, value: Any, *shape: int) -> Any:
    """The array that a hook returned; UserError if it has another shape."""
    if getattr(value, "shape", None) != shape:
        actual = list(value.shape) if hasattr(value, "shape") else type(value).__name__
        raise UserError(f"{_name(method)}.{hook} must return an array of shape {list(shape)}, not {actual}.")
    return value


def leading(method: Any, hook: str, tree: Any, *axes: int) -> Any:
    """The tree that a hook returned; UserError if a leaf does not begin with these axes."""
    for path, leaf in jax.tree.leaves_with_path(tree):
        if (shape := jnp.shape(leaf))[: len(axes)] != axes:
            actual = f"{_written(path)} has the shape {list(shape)}"
            raise UserError(f"{_name(method)}.{hook} must return targets of shape {list(axes)} and on; {actual}.")
    return tree


def numbers(method: Any, hook: str, tree: Any) -> Any:
    """The tree that a hook returned; UserError if one of its leaves is neither an array of numbers nor a number.

    Python's numbers become arrays, and weak types strong ones: a round returns these, so that the second would be
    compiled anew.
    """
    for leaf in jax.tree.leaves(tree):
        if not (hasattr(leaf, "dtype") or isinstance(leaf, int | float)):
            raise UserError(f"{_name(method)}.{hook} must return arrays, not {type(leaf).__name__}.")
        if jnp.issubdtype(getattr(leaf, "dtype", float), jax.dtypes.prng_key):
            raise UserError(f"{_name(method)}.{hook} cannot keep a random key: keep jax.random.key_data(key).")
    return jax.tree.map(_strong, tree)


def _strong(leaf: Any) -> Any:
    weak = isinstance(leaf, int | float) or getattr(leaf, "weak_type", False)
    return jnp.asarray(leaf, jnp.result_type(leaf)) if weak else leaf


def same_shapes(method: Any, hook: str, name: str, tree: Any, expected: Any, source: str) -> Any:
    """The tree that a hook returned; UserError if it does not fit into another tree.

    Its structure or a shape differs, or it has a number with a fraction where the other one has an integer.

    Args:
      name: of the tree, such as "client state".
      expected: the tree whose structure and shapes it must have.
      source: where that one comes from, such as "init_client made it".
    """
    if tree is None and expected is not None:
        raise UserError(f"{_name(method)}.{hook} must return the {name} as {source}, not None.")
    try:
        chex.assert_trees_all_equal_shapes(*jax.tree.map(_array, (tree, expected)))
    except (AssertionError, ValueError, TypeError):
        sentence = f"{_name(method)}.{hook} must return the {name} as {source}; {_difference(tree, expected)}."
        raise UserError(sentence) from None
    pairs = zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(expected), strict=True)
    for path, old, new in ((_written(path), old, new) for (path, new), old in pairs if _real(new) and not _real(old)):
        actual, needed = (jnp.result_type(leaf).name for leaf in (new, old))
        raise UserError(f"{_name(method)}.{hook} must return the {name} as {source}; {path} is {actual}, not {needed}.")
    return tree


def _array(leaf: Any) -> Any:
    return jnp.asarray(leaf) if isinstance(leaf, int | float) else leaf


def sendable(method: Any, hook: str, message: Any) -> Any:
    """The message in dtypes that sums over clients fit in.

    UserError if a leaf is no number, or in `mean` no real one, which its weight would cut off.
    """
    for path, leaf in jax.tree.leaves_with_path(message):
        if not (isinstance(leaf, int | float) or hasattr(leaf, "dtype")):
            raise UserError(f"{_name(method)}.{hook} must send numbers; {_written(path)} is {shortened(leaf)}.")
    for path, leaf in jax.tree.leaves_with_path(message.mean):
        if not _real(leaf):
            actual = f"{_written(path)} is {jnp.result_type(leaf).name}"
            raise UserError(
                f"{_name(method)}.{hook} must send real numbers in the message's mean, which is weighted; {actual}: "
                "convert it, or send it in total or each."
            )
    return message._replace(mean=summable(message.mean), total=summable(message.total))


def _real(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def flags(method: Any, hook: str, tree: Any, params: Any) -> Any:
    """A hook's tree with a boolean for each array of the parameters, or None; UserError for anything else."""
    if tree is None:
        return None
    if jax.tree.structure(tree) != jax.tree.structure(params):
        raise UserError(f"{_name(method)}.{hook} must say something of each array of the parameters, or return None.")
    for path, leaf in jax.tree.leaves_with_path(tree):
        if np.shape(leaf) or not jnp.issubdtype(jnp.result_type(leaf), jnp.bool_):
            sentence = f"must say True or False of each array of the parameters; {_written(path)} is {shortened(leaf)}."
            raise UserError(f"{_name(method)}.{hook} {sentence}")
    return tree


def of_kind(method: Any, hook: str, value: Any, *kinds: type) -> Any:
    """The value that a hook returned; UserError unless it is of this type, or for several types a tuple of these."""
    values = (value,) if len(kinds) == 1 else value if isinstance(value, tuple) else ()
    if len(values) != len(kinds) or not all(isinstance(item, kind) for item, kind in zip(values, kinds, strict=True)):
        expected = ", ".join("anything" if kind is object else f"a {kind.__name__}" for kind in kinds)
        expected = expected if len(kinds) == 1 else f"a tuple ({expected})"
        raise UserError(f"{_name(method)}.{hook} must return {expected}, not {_kind(value)}.")
    return value


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"({', '.join(type(item).__name__ for item in value)})" if name == "tuple" else name


def built(method: Any, model: Any) -> Any:
    """The model that a method builds from the plain one.

    UserError if it is no Flax module, or depends on a traced field: experiments that differ in one share the model.
    """
    result = of_kind(method, "build", method.build(model), nn.Module)
    try:
        hash(result)
    except TypeError:
        what = "gives a model with a field that cannot be hashed: give numbers, texts or tuples"
        raise UserError(f"{_name(method)}.build {what}.") from None
    check_static(method, "build", lambda traced: hash(traced.build(model)))  # traced numbers have no hash
    return result


def check_static(method: Any, hook: str, function: Callable[[Any], Any]) -> None:
    """UserError if a function of the method, which does not fail by itself, needs the values of traced fields.

    Or if `__post_init__` does, without which JAX cannot make the method.
    """
    made, found = list[Any](), list[Any]()

    def call(traced):
        made.append(True)
        with jax.ensure_compile_time_eval():  # arrays that follow from static fields alone have values
            found.append(function(traced))

    with suppress(Exception):  # of JAX, or of what a tracer was asked for
        jax.eval_shape(call, method)
    if not found or any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(found)):
        hook, bounds = (hook, "") if made else ("__post_init__", ", or give it bounds there")
        sentence = "depends on a field that is traced: declare it by fp.hyperparameter(..., static=True)"
        raise UserError(f"{_name(method)}.{hook} {sentence}{bounds}.")


def of_model(method: Any, hook: str, variables: Any) -> Any:
    """The variables that a hook returned; UserError if they are not those of a model."""
    if isinstance(variables, Mapping) and "params" in variables:
        return variables
    actual = "a dictionary without them" if isinstance(variables, Mapping) else type(variables).__name__
    raise UserError(f"{_name(method)}.{hook} must return variables of a model, with params, not {actual}.")


def _name(method: Any) -> str:
    return type(method).__name__


def _difference(tree: Any, wanted: Any) -> str:
    """The first leaf that differs, in words."""
    actual, expected = (dict(_shapes(x)) for x in (tree, wanted))
    for path, shape in expected.items():
        if path not in actual:
            return f"{path} is missing"
        if actual[path] != shape:
            return f"{path} has the shape {actual[path]}, not {shape}"
    surplus = [path for path in actual if path not in expected]
    return f"{surplus[0]} is too much" if surplus else "its containers are of other types"


def _shapes(tree: Any) -> list[tuple[str, list[int]]]:
    return [(_written(path), list(jnp.shape(leaf))) for path, leaf in jax.tree.leaves_with_path(tree)]


def _written(path: Any) -> str:
    """A leaf's path in a tree as Python writes it; "it" for a tree that is a leaf."""
    return jax.tree_util.keystr(path).lstrip(".") or "it"
