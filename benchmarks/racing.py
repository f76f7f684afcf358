"""Small computations timed in turn, each many times within a compiled loop."""

import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

HOPELESS = 5.0  # times slower than the fastest: from here on one measurement is enough
SAMPLE = 0.04  # least seconds of a measurement


class Runner(NamedTuple):
    """A computation to time: a function, its operands, and XLA's options."""

    compute: Callable[..., jax.Array]
    operands: tuple[jax.Array, ...]
    options: dict[str, Any] = {}  # noqa: RUF012


def looped(runner: Runner) -> Callable[[int], float]:
    """A compiled function of n that computes n times in a loop and returns the seconds.

    Each turn takes one of two copies of the operands, as a training step takes its batch: XLA would move what does not
    change out of the loop (it drops barriers first).
    """

    def run(n, *pairs):
        def body(i, _):
            return runner.compute(*(lax.dynamic_index_in_dim(pair, i % 2, keepdims=False) for pair in pairs))

        out = jax.eval_shape(runner.compute, *runner.operands)
        return lax.fori_loop(0, n, body, jnp.zeros(out.shape, out.dtype))

    pairs = [jnp.stack([operand, -operand]) for operand in runner.operands]
    compiled = jax.jit(run).lower(1, *pairs).compile(compiler_options=runner.options)

    def timed(n: int) -> float:
        start = clock()
        jax.block_until_ready(compiled(n, *pairs))
        return clock() - start

    return timed


def clock() -> float:
    """The time in seconds: on one core of a CPU processor time, which other work on the machine disturbs less."""
    alone = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) == 1
    return time.process_time() if alone and jax.default_backend() == "cpu" else time.perf_counter()


def race(runners: dict[str, Runner], repeats: int) -> dict[str, list[float]]:
    """Seconds of one computation by each, timed in turn; those far behind the best have one time only."""
    timers = {name: looped(runner) for name, runner in runners.items()}
    times = {name: [pilot(timed)] for name, timed in timers.items()}
    least = min(first for (first,) in times.values())
    counts = {name: -int(-SAMPLE // t[0]) for name, t in times.items() if t[0] <= HOPELESS * least}
    seconds: dict[str, list[float]] = times | {name: [] for name in counts}
    for _ in range(repeats):
        for name, n in counts.items():
            seconds[name].append(timers[name](n) / n)
    return seconds


def pilot(timed: Callable[[int], float]) -> float:
    """A first estimate in seconds, warmed up unless one computation takes a tenth of a second."""
    n, seconds = 1, timed(1)
    while seconds < SAMPLE / 4 or (n == 1 and seconds < 0.1):
        n *= 4
        seconds = timed(n)
    return seconds / n
