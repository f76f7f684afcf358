"""Compiled functions of a program, which simulations made one after another may share."""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax

MOST = 100  # functions that are kept: of twelve programs, or of a task of four architectures and its pre-training
_kept: ContextVar[OrderedDict[Any, Any] | None] = ContextVar("kept", default=None)


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """Within, simulations whose programs and shapes are equal are compiled once, as the trials of a sweep are.

    Not beyond: JAX does not see when something that a hook or an own pipeline reads, a global of a notebook say, is
    another since.
    """
    token = _kept.set(OrderedDict() if (outer := _kept.get()) is None else outer)
    try:
        yield
    finally:
        _kept.reset(token)


def compiled(function: Callable, *static: Any, compiler_options: dict[str, Any] | None = None, **options: Any) -> Any:
    """`jax.jit` of the function of a program's arrays, or one made before in `compiled_once` of an equal program.

    Args:
      function: takes what is static, and arrays.
      static: a `Program`, say, whose model and methods may be of others' making, so that it cannot always be compared.
      compiler_options, options: of `jax.jit`.
    """
    kept = _kept.get()
    key = function, static, tuple(sorted((compiler_options or {}).items())), tuple(sorted(options.items()))
    try:
        hash(key)
    except TypeError:
        kept = None
    if kept is None or key not in kept:
        made = jax.jit(partial(function, *static), compiler_options=compiler_options, **options)
        if kept is None:
            return made
        kept[key] = made
    kept.move_to_end(key)
    while len(kept) > MOST:
        kept.popitem(last=False)
    return kept[key]
