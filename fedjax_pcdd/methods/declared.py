"""What a class from outside declares, checked before anything is traced: its functions, its fields, its traits."""

import dataclasses
import inspect
import re
import typing
from collections.abc import Callable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.checks import check_static, of_kind
from fedjax_pcdd.methods.method import Traits
from fedjax_pcdd.registry import is_of_package, takes


def check_declared(method: Any) -> None:
    """Raise UserError for a method that cannot work.

    A function does not take what that of this package takes in whose place it is called; a field that is traced holds
    something else than numbers; a trait or `__post_init__` depends on such a field, or a trait is of another type.
    """
    check_hooks(method)
    check_fields(method)
    value = of_kind(method, "traits", method.traits(), Traits)
    check_static(method, "traits", lambda traced: tuple(traced.traits()))
    for trait, kind in typing.get_type_hints(Traits).items():
        if not _fits(given := getattr(value, trait), kind):
            expected = kind.__name__ if isinstance(kind, type) else re.sub(r"\b[a-z_]+\.", "", str(kind))  # no modules
            raise UserError(f"{type(method).__name__}.traits gives {trait}={given!r}, which must be {expected}.")


def check_hooks(part: Any) -> None:
    """Raise UserError if a method or callback cannot be called where a function of this package stood before."""
    hooks: dict[str, Callable] = {}
    for cls in reversed(type(part).__mro__):
        for name, own in vars(cls).items():
            if name in hooks:
                _check_hook(part, name, hooks[name], own.__get__(part, type(part)) if hasattr(own, "__get__") else own)
            elif _is_hook(cls, name, own):
                hooks[name] = own
    for name in hooks.keys() & vars(part).keys():
        _check_hook(part, name, hooks[name], getattr(part, name))


def _is_hook(cls: type, name: str, value: Any) -> bool:
    is_own = inspect.isfunction(value) and value.__module__ == cls.__module__  # Flax adds functions of its own
    return is_of_package(cls) and is_own and not name.startswith("_")


def _check_hook(part: Any, name: str, hook: Callable, bound: Any) -> None:
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(hook).parameters.values()]
    by_name = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    required = [p for p in parameters if p.default is p.empty and p.kind is not p.KEYWORD_ONLY]
    fits = callable(bound) and takes(bound, len(parameters) - 1 - len(by_name), *by_name)
    if not (fits and takes(bound, len(required) - 1)):
        form = f"def {name}{inspect.Signature(parameters)}"
        raise UserError(f"{type(part).__name__}.{name} must be callable as {form}: define it so, or rename it.")


def check_fields(method: Any) -> None:
    """Raise UserError if a field that is traced holds anything but numbers, or one needs a field that is not there."""
    for field in dataclasses.fields(method):
        for other in field.metadata.get("needs") or ():
            if not hasattr(method, other):
                raise UserError(f"{type(method).__name__}.{field.name} needs '{other}', which is none of its fields.")
        leaves = jax.tree.leaves(getattr(method, field.name)) if field.metadata.get("pytree_node", True) else []
        for leaf in leaves:
            if not (isinstance(leaf, int | float) or _is_numeric(getattr(leaf, "dtype", None))):
                kind = "a text" if isinstance(leaf, str) else f"a {type(leaf).__name__}"
                sentence = f"is {kind}, which cannot be traced: declare it by fp.hyperparameter(..., static=True)."
                raise UserError(f"{type(method).__name__}.{field.name} {sentence}")


def _is_numeric(dtype: Any) -> bool:
    kinds = (jnp.number, jnp.bool_, jax.dtypes.extended)  # the last are random keys
    return dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in kinds)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value has the type of an annotation; lists and NumPy's numbers do as well."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return isinstance(value, str) and value in inner
    if origin is tuple:
        return isinstance(value, tuple | list) and all(isinstance(item, inner[0]) for item in value)
    if inner:  # a union
        return any(_fits(value, member) for member in inner)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, bool | np.bool_ if kind is bool else kind)


def not_called(method: Any) -> list[str]:
    """A sentence if a class from outside defines `summarise`, and no pass over the data is asked for."""
    owner = next(cls for cls in type(method).__mro__ if "summarise" in vars(cls))
    if is_of_package(owner) or method.traits().summary is not None:
        return []
    return [f"{owner.__name__}.summarise is not called: let traits give a Summary."]


def misspelt(method: Any, contract: type) -> list[str]:
    """A sentence for each of the method's own functions whose name is close to that of a hook of the contract."""
    hooks = [name for name, value in vars(contract).items() if callable(value) and not name.startswith("_")]
    functions = [name for cls in type(method).__mro__ for name, value in vars(cls).items() if callable(value)]
    added = [name for name in dict.fromkeys(functions) if not (name.startswith("_") or hasattr(contract, name))]
    close = {name: get_close_matches(name, hooks, 1, 0.85) for name in added}
    return [
        f"{type(method).__name__}.{name} is not a hook: did you mean {match[0]}?"
        for name, match in close.items()
        if match
    ]
