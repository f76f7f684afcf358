"""Compiled functions of programs, which simulations made one after another may share, and how they are compiled."""

import contextlib
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from typing import Any

import jax

from fedjax_pcdd import models
from fedjax_pcdd.models.classifier import Classifier, Variables, initialise

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


def compiler_options(devices: int = 1, *, one_step: bool = False) -> dict[str, Any] | None:
    """XLA's options for a round on so many devices; None (its defaults) unless on a CPU."""
    if jax.default_backend() != "cpu":
        return None
    # Clients that take one step are bound by memory; with more work the default, which favours concurrency, is faster.
    ordered = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"} if one_step else {}
    # With the default analysis, state that is read and written in one loop is copied for every job.
    return ordered | ({"xla_cpu_copy_insertion_use_region_analysis": True} if devices == 1 else {})


def fresh_variables(model: Classifier, keys: jax.Array, image_shape: tuple[int, ...]) -> Variables:
    """Variables of a model from a key, or [N, ...] from N keys: those of `initialise`, but compiled faster."""
    return _fresh_variables(jax.default_backend())(model, keys, image_shape)


def forget() -> None:
    """Forget what was traced of models, see `models.forget`; not where simulations are to share it."""
    if _kept.get() is None:
        models.forget()
        _fresh_variables(jax.default_backend()).clear_cache()  # pyright: ignore[reportFunctionMemberAccess]


@cache
def _fresh_variables(backend: str) -> Callable[..., Variables]:
    # The program that draws variables is long and runs once: XLA on a CPU can take longer to compile it than a round.
    # At its first level of optimisation that takes a quarter to a half of the time, for the same bits.
    low_level = backend == "cpu" and "xla_backend_optimization_level" not in os.environ.get("XLA_FLAGS", "")
    options = {"xla_backend_optimization_level": 1} if low_level else None

    @partial(jax.jit, static_argnums=(0, 2), compiler_options=options)
    def initial_variables(model, keys, image_shape):
        draw = partial(initialise, model, image_shape=image_shape)
        return jax.vmap(draw)(keys) if keys.ndim else draw(keys)

    return initial_variables
