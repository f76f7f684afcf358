"""The least that a round could cost on this machine: its training steps alone, its arithmetic as matrix products."""

import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.racing import clock
from benchmarks.workloads import CLASSES, LR, MOMENTUM, WEIGHT_DECAY, Workload
from fedjax_pcdd.models.classifier import Classifier, forward, initialise


def seconds_of(run: Callable[[], Any], repeats: int) -> float:
    """Median seconds of a call, after one that compiles."""
    jax.block_until_ready(run())
    times = []
    for _ in range(repeats):
        begun = clock()
        jax.block_until_ready(run())
        times.append(clock() - begun)
    return statistics.median(times)


def matrix_rate() -> float:
    """Floating-point operations a second of a large product of square matrices."""
    side = 1536 if jax.default_backend() == "cpu" else 8192
    a, b = (jax.random.normal(jax.random.key(i), (side, side)) for i in range(2))
    product = jax.jit(jnp.matmul)
    return 2 * side**3 / seconds_of(lambda: product(a, b), 5)


def bare_step(model: Classifier, workload: Workload, repeats: int = 20) -> tuple[float, float]:
    """Seconds and floating-point operations of one training step compiled as its own program, without any engine."""
    images = jax.random.normal(jax.random.key(1), (workload.batch, *workload.shape))
    labels = jnp.arange(workload.batch) % CLASSES
    optimiser = optax.chain(optax.add_decayed_weights(WEIGHT_DECAY), optax.sgd(LR, MOMENTUM))
    variables = initialise(model, jax.random.key(0), workload.shape)
    params = variables["params"]

    def loss(params):
        outputs, updated = forward(model, {**variables, "params": params}, images, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(outputs.logits, labels).mean(), updated

    def step(params, state):
        gradients, updated = jax.grad(loss, has_aux=True)(params)
        updates, state = optimiser.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, updated

    carried = [params, optimiser.init(params)]
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*carried).compile()

    def run():
        *carried[:], updated = compiled(*carried)
        return carried, updated

    cost = compiled.cost_analysis() or {}
    return seconds_of(run, repeats), float(cost.get("flops", float("nan")))


def limits(model: Classifier, workload: Workload) -> dict[str, float]:
    """For a round: seconds of its steps alone, seconds of its operations at a matrix product's rate, and that rate."""
    steps = workload.samples // workload.batch
    seconds, operations = bare_step(model, workload)
    rate = matrix_rate()
    return {
        "bare_s": round(seconds * steps, 7),
        "matrix_s": round(operations * steps / rate, 7),
        "matrix_gflops": round(rate / 1e9, 1),
    }
