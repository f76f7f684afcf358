"""Which form of each convolution of a model is fastest on this device, by a short measurement.

Letters: B batch, L lanes.
"""

import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.models.convolution_choices import Choices, Listing, Operation, choosing
from fedjax_pcdd.models.convolution_forms import FORMS, fits, forward, input_gradient, weight_gradient
from fedjax_pcdd.models.convolution_table import Rule

COMPUTE = {"forward": forward, "input_gradient": input_gradient, "weight_gradient": weight_gradient}
ACCELERATED = ("direct", "gemm")  # the other forms are made for the caches of a CPU
MARGIN = 1.1  # how many times as fast as the default a form must be to take its place
SAMPLE = 0.005  # seconds, at least, of a timing
REPEATS = 3

Candidates = dict[str, Callable[[jax.Array, jax.Array], jax.Array]]


def operations(model: Classifier, image_shape: tuple[int, ...], batch: int, lanes: int, dtype: Any) -> list[Operation]:
    """What a training step computes of convolutions, each once, the one with most arithmetic first.

    Args:
      model: is traced, not run.
      image_shape: (H, W, channels).
      batch: B.
      lanes: L.
      dtype: of the images.
    """
    listing, images = Listing(), jax.ShapeDtypeStruct((batch, *image_shape), dtype)
    with choosing(listing):
        jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), images)
    layers = {operation._replace(batch=batch, lanes=lanes): None for operation in listing.asked}
    each = [layer._replace(name=name) for layer in layers for name in FORMS]
    return sorted((one for one in each if not _of_images(one, image_shape)), key=_work, reverse=True)


def _of_images(operation: Operation, image_shape: tuple[int, ...]) -> bool:
    """Whether it is the gradient of the images, which nothing needs."""
    return operation.name == "input_gradient" and (*operation.window.image, operation.inputs) == image_shape


def _work(operation: Operation) -> int:
    """Multiplications of one lane."""
    window = operation.window
    return operation.batch * math.prod((*window.out, *window.kernel, operation.inputs, operation.outputs))


def time_forms(asked: Iterable[Operation], deadline: float) -> Choices:
    """The fastest rule of each operation, until `time.perf_counter()` reaches the deadline.

    A form that the compiler refuses, or for which memory does not suffice, is no candidate.

    Args:
      asked: most important first.
      deadline: after which no operation is begun.
    """
    timed: list[tuple[Operation, Rule]] = []
    for operation in asked:
        if time.perf_counter() >= deadline:
            break
        timed.append((operation, _fastest_rule(operation, deadline)))
    return Choices(tuple(timed))


def _fastest_rule(operation: Operation, deadline: float) -> Rule:
    default = operation.default
    single = _fastest(_singles(operation), _operands(operation), default.single, deadline)
    if operation.lanes == 1:
        return Rule(single, default.lanes)
    operands = _operands(operation, operation.lanes)
    return Rule(single, _fastest(_ways(operation, single), operands, default.lanes, deadline))


def _singles(operation: Operation) -> Candidates:
    """The forms of one lane."""
    shape = operation.name, operation.window, operation.inputs, operation.outputs
    forms = FORMS[operation.name] if jax.default_backend() == "cpu" else ACCELERATED
    return {form: functools.partial(_compute, operation, form) for form in forms if fits(form, *shape)}


def _ways(operation: Operation, single: str) -> Candidates:
    """The ways of all lanes."""
    one = functools.partial(_compute, operation, single)
    return {
        "loop": lambda a, b: lax.map(lambda pair: one(*pair), (a, b)),
        "gemm": jax.vmap(functools.partial(_compute, operation, "gemm")),
        "grouped": jax.vmap(functools.partial(_compute, operation, "direct")),
    }


def _compute(operation: Operation, form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return COMPUTE[operation.name](form, a, b, operation.window)


def _operands(operation: Operation, *lanes: int) -> tuple[jax.Array, jax.Array]:
    """Operands of an operation."""
    window = operation.window
    x = (*lanes, operation.batch, *window.image, operation.inputs)
    w = (*lanes, *window.kernel, operation.inputs, operation.outputs)
    dy = (*lanes, operation.batch, *window.out, operation.outputs)
    shapes = {"forward": (x, w), "input_gradient": (dy, w), "weight_gradient": (x, dy)}[operation.name]
    one, two = (jnp.ones(shape, operation.dtype) for shape in shapes)
    return one, two


def _fastest(candidates: Candidates, operands: Sequence[jax.Array], default: str, deadline: float) -> str:
    """The fastest candidate, where it beats the default by the margin."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = list(pool.map(functools.partial(_compiled, operands=operands), candidates.values()))
    compiled = zip(candidates, programs, strict=True)
    seconds = {name: _seconds(run, operands, deadline) for name, run in compiled if run is not None}
    best = min(seconds, key=lambda name: seconds[name], default=default)
    return best if seconds.get(best, math.inf) * MARGIN <= seconds.get(default, math.inf) else default


def _compiled(compute: Callable, operands: Sequence[jax.Array]) -> Any:
    """A program of n and the operands that computes n times in a loop; None where it cannot be compiled."""

    def run(n, a, b):
        def body(_, carry):
            a, out = carry
            # What does not change would be computed before the loop: one number of an operand takes one of the result.
            return a.at[(0,) * a.ndim].set(out[(0,) * out.ndim].astype(a.dtype)), compute(a, b)

        out = jax.eval_shape(compute, a, b)
        return lax.fori_loop(0, n, body, (a, jnp.zeros(out.shape, out.dtype)))[1]

    try:
        return jax.jit(run).lower(1, *operands).compile()
    except jax.errors.JaxRuntimeError:
        return None


def _seconds(run: Any, operands: Sequence[jax.Array], deadline: float) -> float:
    """Seconds of one computation, the least of a few timings; infinite where memory does not suffice."""

    def timed(n: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(n, *operands))
        return time.perf_counter() - start

    try:
        timed(1)  # loads the program
        n, least = 1, timed(1)
        while least * n < SAMPLE and time.perf_counter() < deadline:
            n *= 4
            least = timed(n) / n
        return min(least, *(timed(n) / n for _ in range(REPEATS - 1)))
    except jax.errors.JaxRuntimeError:
        return math.inf
