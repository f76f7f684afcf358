"""Wrappers: a method plus something that goes with any of its kind, written `X+suffix`, as "fedprox+prototypes".

A wrapper is a function from a method's class to a class derived from it, whose hooks call `super()`; so wrappers
compose, and `X+b+a` is `X+a+b`. It refuses an X that it cannot go with. Those here put an `Addition` in front of X.
What it adds to the server's state are fields that `extended` appends, so that the hooks of X see theirs as before. A
client's state may be any tree, so there X's lies as the field `own` beside what is added (`Addition.keeps`).
"""

import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from flax import struct

from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods.method import Context, Method, Tree

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
        if "," in suffix:
            raise UserError(f"there is no method '{SEPARATOR.join([name, *suffixes])}': several are for a sweep.")
        if suffix not in wrappers:
            raise UserError(f"`method={name}+{suffix}`: there is no '+{suffix}': {nearest(suffix, wrappers)}")
    if len(set(suffixes)) < len(suffixes):
        raise UserError(f"`method={SEPARATOR.join([name, *suffixes])}` names a suffix twice: leave one out.")
    for suffix in sorted(suffixes, key=lambda s: (wrappers[s].order, s)):
        cls, name = wrappers[suffix].wrap(cls, name), f"{name}{SEPARATOR}{suffix}"
    return cls


def averages_models(method: Method) -> bool:
    """Whether the method's server holds one global model that it makes from the clients' models."""
    traits = method.traits()
    return traits.global_model and not traits.own_models and traits.exchange == "never"


@struct.dataclass
class Addition(Method):
    """FedAvg with something more, whose class also goes in front of another method's: then it is that one with it.

    Where it keeps something with the clients, `keeps` is the type of their state, a NamedTuple. Its field `own` is X's
    state, and X's hooks see that alone.
    """

    keeps: ClassVar[Any] = None

    @classmethod
    def source(cls) -> str:
        """The paper of what is added."""
        return ""

    @classmethod
    def unsuitable(cls, other: type[Method]) -> str:
        """Why it cannot go in front of a method, in words that follow the method's name; "" where it can."""
        return "" if averages_models(other()) else "is no method that averages models."

    def traits(self):
        """X's; of what is added where it stands alone."""
        own = super().traits()
        return own if own.paper else own._replace(paper=self.source())


@functools.cache
def in_front(addition: type[Addition], suffix: str) -> Callable[[type[Method], str], type[Method]]:
    """The wrapper that puts an addition in front of a method; UserError where it cannot."""

    @functools.cache
    def wrap(cls: type[Method], name: str) -> type[Method]:
        missing = f"`method={name}+{suffix}` does not exist: {name}"
        if reason := addition.unsuitable(cls):
            raise UserError(f"{missing} {reason}")
        if both := _own_names(cls) & (_own_names(addition) - _own_names(Addition)):
            raise UserError(f"{missing} has `{min(both)}` of its own, so drop the suffix.")

        source = getattr(cls, "source", addition.source)
        behind: Any = cls if addition.keeps is None else _seeing_own(cls, addition.keeps)

        @struct.dataclass
        class Added(addition, behind):
            __doc__ = f"{cls.__name__} with what {addition.__name__} adds."
            __module__ = cls.__module__

            @classmethod
            def source(cls):
                """Of what is behind."""
                return source()

        Added.__name__ = Added.__qualname__ = f"{cls.__name__}With{addition.__name__}"
        return Added

    return wrap


def _seeing_own(cls: type[Method], kind: Any) -> Any:
    """The method, whose hooks see the field `own` alone of a client's state of this kind, in a context or by itself.

    A hook may call another one with what it was given itself, so a state of another kind is left as it is.
    """

    def own(value):
        if isinstance(value, Context):
            return value._replace(client=own(value.client))
        return value.own if isinstance(value, kind) else value

    def seeing(hook):
        @functools.wraps(hook)
        def called(self, *args, **known):
            return hook(self, *map(own, args), **{name: own(value) for name, value in known.items()})

        return called

    class Behind(cls):
        __doc__, __module__ = cls.__doc__, cls.__module__

    Behind.__name__ = Behind.__qualname__ = cls.__name__
    plain = {name: hook for name, hook in vars(Method).items() if inspect.isfunction(hook)}
    told = [n for n, hook in plain.items() if {"client", "context"} & inspect.signature(hook).parameters.keys()]
    for name in told:
        if (hook := getattr(cls, name)) is not plain[name]:
            setattr(Behind, name, seeing(hook))
    return struct.dataclass(Behind)


def _own_names(cls: type[Method]) -> set[str]:
    """Options and functions that a method has and FedAvg has not: two with one name would take each other's part."""
    return {name for name in set(dir(cls)) - set(dir(Method)) if not name.startswith("__")}


def extended(server: Any, **fields: Tree) -> Any:
    """A server's state with further fields."""
    return _extended_type(type(server), tuple(fields))(*server, *fields.values())


@functools.cache
def _extended_type(server: Any, names: tuple[str, ...]) -> Any:
    return namedtuple(f"{server.__name__}With{'And'.join(n.title() for n in names)}", (*server._fields, *names))
