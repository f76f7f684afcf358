"""Compiled functions of programs, which simulations made one after another may share."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import lru_cache, partial
from typing import Any

import jax

MOST = 100  # functions kept: enough for twelve programs, or for a task of four architectures with its pre-training
_kept: ContextVar[Callable[..., Any] | None] = ContextVar("kept", default=None)


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """A context in which simulations with equal programs and shapes, such as the trials of a sweep, are compiled once.

        with fp.compiled_once():
            histories = [fp.simulate(federation, fp.FedProx(mu=mu)) for mu in (0.01, 0.1, 1.0)]

    Within it, JAX does not notice when something has changed that traced code reads and that is no argument, such as a
    notebook's global that a hook or a pipeline reads: the next simulation goes on with the former value. Give such
    values as hyper-parameters. Nothing is shared beyond the context, so outside of it every simulation reads anew.
    """
    token = _kept.set(_kept.get() or lru_cache(MOST)(_jitted))
    try:
        yield
    finally:
        _kept.reset(token)


def shared() -> bool:
    """Whether simulations share what is compiled."""
    return _kept.get() is not None


def compiled(function: Callable, *static: Any, compiler_options: dict[str, Any] | None = None, **options: Any) -> Any:
    """`jax.jit` of a function of a program's arrays; within `compiled_once`, one made before for an equal program.

    Args:
      function: takes the static arguments, then arrays.
      static: for example a `Program`; its model and methods may be users' own, so it cannot always be hashed.
      compiler_options, options: of `jax.jit`.
    """
    options |= {"compiler_options": tuple((compiler_options or {}).items())}
    try:
        return (_kept.get() or _jitted)(function, *static, **options)
    except TypeError:  # something static cannot be hashed
        return _jitted(function, *static, **options)


def _jitted(function: Callable, *static: Any, compiler_options: tuple[tuple[str, Any], ...], **options: Any) -> Any:
    return jax.jit(partial(function, *static), compiler_options=dict(compiler_options), **options)
