"""Suffixes: a method plus something that fits any method of its kind, written `X+suffix`, as "fedprox+prototypes".

A suffix names an `Addition`, which is put in front of X, that is, before it in the order of base classes. Its hooks
call `super()`; so additions compose, and `X+b+a` is `X+a+b`. It refuses an X that it does not fit. An addition extends
the server's state by fields that `extended` appends, so that the hooks of X still find theirs. A client's state may be
any tree, so X's state becomes the field `own` of a new one, beside what is added (`Addition.keeps`).
"""

import dataclasses
import functools
import inspect
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from flax import struct

from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.methods.method import Context, Method, Tree
from fedjax_pcdd.registry import short_name

SEPARATOR = "+"


def wrapped(
    cls: type[Method], name: str, suffixes: list[str], additions: Mapping[str, type["Addition"]]
) -> type[Method]:
    """The class with these additions in front of it; UserError for a suffix that is unknown or repeated."""
    for suffix in suffixes:
        if "," in suffix:
            raise UserError(f"there is no method '{SEPARATOR.join([name, *suffixes])}': several are for a sweep.")
        if suffix not in additions:
            raise UserError(f"`method={name}+{suffix}`: there is no '+{suffix}': {nearest(suffix, additions)}")
    if len(set(suffixes)) < len(suffixes):
        raise UserError(f"`method={SEPARATOR.join([name, *suffixes])}` names a suffix twice: leave one out.")
    for suffix in sorted(suffixes, key=lambda s: (additions[s].at_server, s)):
        cls, name = in_front(additions[suffix], short_name(suffix), cls, name), f"{name}{SEPARATOR}{suffix}"
    return cls


def averages_models(method: Method) -> bool:
    """Whether the method's server keeps one global model that it makes from the clients' models."""
    traits = method.traits()
    return traits.global_model and not traits.own_models and traits.exchange == "never"


def with_defaults(cls: type[Method]) -> Method:
    """The method whose fields have their defaults, for its traits; None where a field has none."""
    missing = dataclasses.MISSING
    fields = [field for field in dataclasses.fields(cls) if field.init]
    return cls(**{field.name: None for field in fields if field.default is field.default_factory is missing})


@struct.dataclass
class Addition(Method):
    """FedAvg with an addition; in front of another method's class X it becomes X with the addition.

    If it keeps something on the clients, `keeps` is the type of their state, a NamedTuple. Its field `own` is X's
    state, and X's hooks see nothing else of it.
    """

    keeps: ClassVar[Any] = None
    at_server = False  # whether it changes the server's step; such an addition is put in front after the others
    paper = ""

    @classmethod
    def unsuitable(cls, other: type[Method]) -> str:
        """Why it cannot be put in front of a method, in words that follow the method's name; "" if it can."""
        return "" if averages_models(with_defaults(other)) else "is not a method that averages models."

    def traits(self):
        """X's traits; if the addition is used alone, with its own paper."""
        traits = super().traits()
        return traits if traits.paper else traits._replace(paper=self.paper)


class Recipe(NamedTuple):
    """How a class that is made at run time is made again, as in another process: function(*args)."""

    function: Callable[..., type[Method]]
    args: tuple[Any, ...]


def recipe_of(cls: type[Method]) -> Any:
    """The recipe of such a class, with recipes in place of such classes among its arguments; any other class itself."""
    recipe = vars(cls).get("_recipe")
    if recipe is None:
        return cls
    return recipe._replace(args=tuple(recipe_of(x) if isinstance(x, type) else x for x in recipe.args))


def remade(recipe: Any, fields: Mapping[str, Any] | None = None) -> Any:
    """The class of a recipe, or with fields an object of it; `__reduce__` names it, so that methods can be pickled."""
    if isinstance(recipe, Recipe):
        recipe = recipe.function(*(remade(x) if isinstance(x, Recipe) else x for x in recipe.args))
    return recipe if fields is None else recipe(**fields)


@functools.cache
def in_front(addition: type[Addition], suffix: str, cls: type[Method], name: str) -> type[Method]:
    """The class of this name with an addition in front of it; UserError if it does not fit."""
    refusal = f"`method={name}+{suffix}` does not exist: {name}"
    if reason := addition.unsuitable(cls):
        raise UserError(f"{refusal} {reason}")
    if clashes := _own_names(cls) & (_own_names(addition) - _own_names(Addition)):
        raise UserError(f"{refusal} has `{min(clashes)}` of its own, so drop the suffix.")

    behind: Any = cls if cls.aggregate is Method.aggregate else _keeping_fields(cls)
    behind = behind if addition.keeps is None else _seeing_own(behind, addition.keeps)

    @struct.dataclass
    class Added(addition, behind):
        __doc__ = f"{cls.__name__} with what {addition.__name__} adds."
        __module__ = cls.__module__
        _recipe: ClassVar[Any] = Recipe(in_front, (addition, suffix, cls, name))
        paper = cls.paper if issubclass(cls, Addition) else addition.paper

        def __reduce__(self):
            return remade, (recipe_of(type(self)), vars(self))

    Added.__name__ = Added.__qualname__ = f"{cls.__name__}With{addition.__name__}"
    return Added


def _seeing_own(cls: type[Method], kind: Any) -> Any:
    """The method X; of a client's state of this kind, alone or in a context, its hooks see the field `own` only.

    A hook may pass its arguments on to another hook, so a state of another kind is left as it is.
    """

    def own_state(value):
        if isinstance(value, Context):
            return value._replace(client=own_state(value.client))
        return value.own if isinstance(value, kind) else value

    def seeing_own_state(hook):
        @functools.wraps(hook)
        def called(self, *args, **kwargs):
            return hook(self, *map(own_state, args), **{name: own_state(value) for name, value in kwargs.items()})

        return called

    class Behind(cls):
        __doc__, __module__ = cls.__doc__, cls.__module__

    Behind.__name__ = Behind.__qualname__ = cls.__name__
    defaults = {name: hook for name, hook in vars(Method).items() if inspect.isfunction(hook)}
    names = [n for n, hook in defaults.items() if {"client", "context"} & inspect.signature(hook).parameters.keys()]
    for name in names:
        if (hook := getattr(cls, name)) is not defaults[name]:
            setattr(Behind, name, seeing_own_state(hook))
    return struct.dataclass(Behind)


def _keeping_fields(cls: type[Method]) -> Any:
    """The method X; if its `aggregate` makes the server's state anew, what additions keep there is put back."""

    class Behind(cls):
        __doc__, __module__ = cls.__doc__, cls.__module__

        def aggregate(self, server, *args, **kwargs):
            return _with_fields_of(server, super().aggregate(server, *args, **kwargs), cls.__name__)

    Behind.__name__ = Behind.__qualname__ = cls.__name__
    return struct.dataclass(Behind)


def _own_names(cls: type[Method]) -> set[str]:
    """Options and functions that a method has beyond FedAvg's: of two with one name, one would replace the other."""
    return {name for name in set(dir(cls)) - set(dir(Method)) if not name.startswith("__")}


def extended(server: Any, **fields: Tree) -> Any:
    """A server's state with further fields at its end; UserError if it is no NamedTuple, or has one of them."""
    state = type(server)
    if not hasattr(server, "_fields"):
        raise UserError(f"the server's state must be a NamedTuple if a suffix is to add to it, not a {state.__name__}.")
    if clashes := fields.keys() & set(server._fields):
        raise UserError(f"{state.__name__} has a field `{min(clashes)}`, as what the suffix keeps: rename it.")
    return _extended_type(type(server), tuple(fields))(*server, *fields.values())


@functools.cache
def _extended_type(server: Any, names: tuple[str, ...]) -> Any:
    base: Any = namedtuple(f"{server.__name__}With{'And'.join(n.title() for n in names)}", (*server._fields, *names))
    first = len(server._fields)

    class Extended(base):
        __slots__ = ()
        within = server  # the type without the further fields

        def __reduce__(self):
            return _extended_again, (server(*self[:first]), dict(zip(names, self[first:], strict=True)))

    Extended.__name__ = Extended.__qualname__ = base.__name__
    return Extended


def _with_fields_of(server: Any, result: Any, name: str) -> Any:
    """A result of `aggregate` with the further fields of the server that it was given."""
    if type(result) is type(server):
        return result
    within = getattr(type(server), "within", None)
    if within is None:
        raise UserError(f"{name}.aggregate must return `server._replace(...)`, not a {type(result).__name__}.")
    first = len(within._fields)
    inner = _with_fields_of(within(*server[:first]), result, name)
    return extended(inner, **dict(zip(server._fields[first:], server[first:], strict=True)))


def _extended_again(server: Any, fields: Mapping[str, Tree]) -> Any:
    return extended(server, **fields)
