"""Choices by a short measurement on this device: the number of lanes, and the form of each convolution.

Letters: B batch, L lanes, J jobs of a round.
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
import numpy as np
from jax import lax
from jax.experimental import multihost_utils

from fedjax_pcdd.engine.devices import free_memory, full_precision, is_out_of_memory, processors
from fedjax_pcdd.engine.jobs import Inputs, load, train_step
from fedjax_pcdd.engine.mesh import devices_of
from fedjax_pcdd.engine.program import State, lift, put
from fedjax_pcdd.engine.schedule import Plan, most_jobs
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.models.classifier import Classifier, arithmetic
from fedjax_pcdd.models.convolution_forms import FORMS, fits, forward, input_gradient, weight_gradient
from fedjax_pcdd.models.convolution_table import Choices, Listing, Operation, Rule, choosing
from fedjax_pcdd.trees import zeros_like

COMPUTE = {"forward": forward, "input_gradient": input_gradient, "weight_gradient": weight_gradient}
ACCELERATED = ("direct", "gemm")  # the other forms are made for the caches of a CPU
MARGIN = 1.1  # how many times as fast as the default a form must be to take its place
SAMPLE = 0.005  # minimum seconds of a timing
REPEATS = 3

PROBE_STEPS = 4
SHARE = 0.1  # of a run that trying lane counts may cost
PROBES = 5.0  # seconds, about, that compiling and timing few and many lanes takes on a CPU
SLOW_STEP, SLOWLY = 1e-3, 1e10  # seconds of a step besides its arithmetic, and operations per second, of a slow CPU

Candidates = dict[str, Callable[[jax.Array, jax.Array], jax.Array]]


def candidates(jobs: int, devices: int = 1) -> list[int]:
    """Lane counts worth trying, few first: the number of cores on a CPU, up to all clients at once elsewhere.

    The jobs are those of a device, the devices those of this process.
    """
    if jax.default_backend() == "cpu":
        values = {1, max(1, processors() // devices)}
    else:
        values = {2**i for i in range(2, 10)} | {math.ceil(jobs / d) for d in (1, 2, 4)}
    return sorted(v for v in values if v <= jobs) or [1]


def _fits(compiled: Any) -> bool:
    """Whether a program fits into free memory; its arguments are on the device already."""
    memory = compiled.memory_analysis()
    if memory is None:
        return True
    needed = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return needed <= free_memory()


def _probe(simulation: Simulation, state: State) -> tuple[float, float]:
    """Seconds to compile, and seconds per sample, of the training step with this number of lanes.

    The latter are infinite if memory does not suffice.
    """
    try:
        return _timed_step(simulation, state)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return 0.0, math.inf


def _timed_step(simulation: Simulation, state: State) -> tuple[float, float]:
    run, arguments = _probed_steps(simulation, state)
    start = time.perf_counter()
    compiled = jax.jit(run).lower(*arguments, np.int32(1)).compile()
    compiling = time.perf_counter() - start
    if not _fits(compiled):
        return compiling, math.inf
    train = functools.partial(compiled, *arguments)
    jax.block_until_ready(train(np.int32(1)))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(train(np.int32(PROBE_STEPS)))
        times.append(time.perf_counter() - start)
    return compiling, min(times) / PROBE_STEPS / simulation.program.lanes


def _probed_steps(simulation: Simulation, state: State) -> tuple[Callable, tuple[Any, ...]]:
    """A function that runs training steps of all lanes on the first step's batches, and its arguments but the last."""
    program = simulation.program
    plan, jobs = simulation.plan(0)
    state = simulation.fetch(state, (plan, jobs))
    keys = jnp.repeat(simulation.keys[:1], len(jobs.row))
    data, streamed = simulation.data, simulation.streamed
    data = streamed.of_rows(np.unique(jobs.row[: program.lanes])) if streamed else data
    inputs = Inputs(simulation.methods, simulation.hyper, state.servers, data, jobs, keys, jnp.int32(0))

    @full_precision
    def run(inputs, state, indices, steps):
        def load_one(lane, lanes):
            return put(lanes, lane, load(program, inputs, state, lane % len(jobs.row), 0))

        shapes = jax.eval_shape(lambda: load(program, inputs, state, 0, 0))
        lanes = zeros_like(shapes, program.lanes)
        lanes = jax.lax.fori_loop(0, program.lanes, load_one, lanes)
        step = lift(lambda lane, index: train_step(program, inputs, lane, index, 0), program.lanes)
        return jax.lax.fori_loop(0, steps, lambda t, lanes: step(lanes, indices), lanes).loss

    return run, (inputs, state, plan.indices[0] if isinstance(plan, Plan) else plan.plan.indices[0, 0])


def choose_lanes(make: Callable[[int], Simulation], state: State, jobs: int, rounds: int) -> Simulation:
    """The simulation with the fastest of a few lane counts, by timing a few steps of each.

    Trying costs about a tenth of the run at most: on a CPU, a run of a minute by its arithmetic has one lane. It ends
    when the devices' memory is exhausted. Several devices all take the same steps at once; of several processes, the
    times of the first count.

    Args:
      make: builds the simulation for a number of lanes.
      state: before the first round; not donated.
      jobs: J, jobs a round.
      rounds: of the run, to weigh the cost of trying.
    """
    best, fastest = 1, math.inf
    compile_seconds, devices = 0.0, devices_of(state)
    counts = candidates(most_jobs(jobs, devices), devices // jax.process_count())
    if len(counts) == 1 or _soon_over(make, jobs, rounds):
        return _within_memory(make, state, counts[:1])
    for lanes in counts:
        simulation = _made(make, lanes)
        if simulation is None:
            break
        compiling, seconds = (float(x) for x in multihost_utils.broadcast_one_to_all(_probe(simulation, state)))
        if seconds < 0.95 * fastest:
            best, fastest = lanes, seconds
        compile_seconds += compiling
        expected = _steps(simulation, jobs, rounds) / devices * fastest
        if seconds == math.inf or compile_seconds > SHARE * expected:
            break
    return _within_memory(make, state, [lanes for lanes in reversed(counts) if lanes <= best])


def _steps(simulation: Simulation, jobs: int, rounds: int) -> float:
    """Expected steps of all jobs of a run."""
    return rounds * jobs * float((simulation.epochs * simulation.steps).mean())


def _soon_over(make: Callable[[int], Simulation], jobs: int, rounds: int) -> bool:
    """Whether a run on a slow CPU is too short for trying to pay off; elsewhere False, as only trying can tell."""
    if jax.default_backend() != "cpu":
        return False
    simulation = make(1)
    step_operations = simulation.local.batch_size * arithmetic(simulation.program.model, simulation.image_shape)
    seconds = _steps(simulation, jobs, rounds) * (SLOW_STEP + 3 * step_operations / SLOWLY)
    return SHARE * seconds < PROBES


def _made(make: Callable[[int], Simulation], lanes: int) -> Simulation | None:
    """The simulation with these lanes; None if `data_memory` does not hold the samples of so many clients."""
    try:
        return make(lanes)
    except UserError:
        if lanes == 1:
            raise
        return None


def _within_memory(make: Callable[[int], Simulation], state: State, counts: list[int]) -> Simulation:
    """The simulation with the first of these lane counts whose round fits into the devices' memory, else one lane."""
    for lanes in counts:
        simulation = _made(make, lanes)
        if simulation is None:
            continue
        if free_memory() == math.inf or multihost_utils.broadcast_one_to_all(_fits(simulation.compile(state))):
            return simulation
    return make(1)


def operations(model: Classifier, image_shape: tuple[int, ...], batch: int, lanes: int, dtype: Any) -> list[Operation]:
    """The convolution operations of a training step, each once, those with most arithmetic first.

    Args:
      model: is traced, not run.
      image_shape: (H, W, channels).
      batch, lanes, dtype: B, L, and the images' type.
    """
    listing, images = Listing(), jax.ShapeDtypeStruct((batch, *image_shape), dtype)
    with choosing(listing):
        jax.eval_shape(functools.partial(model.init, train=False), jax.random.key(0), images)

    def needed(operation: Operation) -> bool:  # all but the gradient of the images
        return operation.name != "input_gradient" or (*operation.window.image, operation.inputs) != image_shape

    def work(operation: Operation) -> int:  # multiplications of one lane
        return operation.batch * math.prod(
            (*operation.window.out, *operation.window.kernel, operation.inputs, operation.outputs)
        )

    layers = {operation._replace(batch=batch, lanes=lanes): None for operation in listing.asked}
    layer_operations = [layer._replace(name=name) for layer in layers for name in FORMS]
    return sorted(filter(needed, layer_operations), key=work, reverse=True)


def time_forms(asked: Iterable[Operation], deadline: float) -> Choices:
    """The fastest rule of each operation, the most important first, until `time.perf_counter()` reaches the deadline.

    A form that the compiler refuses, or for which memory does not suffice, is not a candidate.
    """
    timed: list[tuple[Operation, Rule]] = []
    for operation in asked:
        if time.perf_counter() >= deadline:
            break
        timed.append((operation, _fastest_rule(operation, deadline)))
    return Choices(tuple(timed))


def _fastest_rule(operation: Operation, deadline: float) -> Rule:
    default, on_cpu, lanes = operation.default, jax.default_backend() == "cpu", operation.lanes
    shape = operation.name, operation.window, operation.inputs, operation.outputs
    single = default.single
    if on_cpu or lanes == 1:
        forms = FORMS[operation.name] if on_cpu else ACCELERATED
        single_forms: Candidates = {
            form: functools.partial(_compute, operation, form) for form in forms if fits(form, *shape)
        }
        single = _fastest(single_forms, _operands(operation), single, deadline)
    if lanes == 1:
        return Rule(single, default.lanes)
    lane_forms: Candidates = {
        "gemm": jax.vmap(functools.partial(_compute, operation, "gemm")),
        "grouped": jax.vmap(functools.partial(_compute, operation, "direct")),
    }
    if on_cpu:  # elsewhere a loop over lanes would launch kernels for each of them
        lane_forms["loop"] = lambda a, b: lax.map(lambda pair: _compute(operation, single, *pair), (a, b))
    return Rule(single, _fastest(lane_forms, _operands(operation, lanes), default.lanes, deadline))


def _compute(operation: Operation, form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return COMPUTE[operation.name](form, a, b, operation.window)


def _operands(operation: Operation, *lanes: int) -> Sequence[jax.Array]:
    window = operation.window
    x = (*lanes, operation.batch, *window.image, operation.inputs)
    w = (*lanes, *window.kernel, operation.inputs, operation.outputs)
    dy = (*lanes, operation.batch, *window.out, operation.outputs)
    shapes = {"forward": (x, w), "input_gradient": (dy, w), "weight_gradient": (x, dy)}[operation.name]
    return [jnp.ones(shape, operation.dtype) for shape in shapes]


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
            # XLA would compute what does not change before the loop: one entry of an operand is set from the result.
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
