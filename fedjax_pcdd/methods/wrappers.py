"""Wrappers: a method plus something that goes with any of its kind, written `X+suffix`, as "fedprox+prototypes".

A wrapper is a function from a method's class to a class derived from it, whose hooks call `super()`; so wrappers
compose, and `X+b+a` is `X+a+b` where a's order is lower. It refuses an X that it cannot go with, for which there is
`averages_models`. What it adds to the server's state are fields that `extended` appends, so that the hooks of X see
theirs as before.
"""

import functools
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods.method import Method, Tree

SEPARATOR = "+"


class Wrapper(NamedTuple):
    """What a suffix stands for.

    Attributes:
      wrap: of a class and its name, the class that is derived from it.
      order: wrappers are applied from the lowest to the highest, the objective's (0) before the server's (1).
      paper: of what it adds, for listings.
    """

    wrap: Callable[[type[Method], str], type[Method]]
    order: int
    paper: str


def wrapped(cls: type[Method], name: str, suffixes: list[str], wrappers: Mapping[str, Wrapper]) -> type[Method]:
    """The class with these wrappers about it; UserError for a suffix that is unknown or given twice."""
    for suffix in suffixes:
        if suffix not in wrappers:
            raise UserError(f"`method={name}+{suffix}`: there is no '+{suffix}': {nearest(suffix, wrappers)}")
    if len(set(suffixes)) < len(suffixes):
        raise UserError(f"`method={SEPARATOR.join([name, *suffixes])}` names a suffix twice: leave one out.")
    for suffix in sorted(suffixes, key=lambda s: wrappers[s].order):
        cls, name = wrappers[suffix].wrap(cls, name), f"{name}{SEPARATOR}{suffix}"
    return cls


def averages_models(method: Method) -> bool:
    """Whether the method's server holds one global model that it makes from the clients' models."""
    traits = method.traits()
    return traits.global_model and not traits.own_models and traits.exchange == "never"


def extended(server: Any, **fields: Tree) -> Any:
    """A server's state with further fields."""
    return _extended_type(type(server), tuple(fields))(*server, *fields.values())


@functools.cache
def _extended_type(server: Any, names: tuple[str, ...]) -> Any:
    return namedtuple(f"{server.__name__}With{'And'.join(n.title() for n in names)}", (*server._fields, *names))
