"""The accelerator, what was compiled on it, and how many lanes suit it."""

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from fedjax_pcdd.engine.device_errors import check_compilation_cache, is_out_of_memory, started_platforms
from fedjax_pcdd.engine.jobs import World, load, train_step
from fedjax_pcdd.engine.mesh import devices_of
from fedjax_pcdd.engine.precision import full_precision
from fedjax_pcdd.engine.program import State, lift, put
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.engine.schedule import Plan, most_jobs
from fedjax_pcdd.errors import UserError

COMPILED = "/jax/core/compile/backend_compile_duration"
PROBE_STEPS = 4
PATIENCE = 7 * 24 * 3600  # seconds


def select_device(name: str, devices: Literal["auto"] | int = "auto") -> None:
    """Use "cpu", "gpu" or "tpu" for everything that follows; "auto" leaves the choice to JAX.

    Args:
      devices: as `count_devices` will be asked for; a CPU is divided into so many before JAX starts.

    Raises:
      UserError: JAX has no such device, or cannot start it.
    """
    platforms = {"gpu": "cuda,rocm"}.get(name, name)
    if name != "auto":
        jax.config.update("jax_platforms", None if name == "gpu" else platforms)
    if devices != "auto" and devices > 1:
        _divide_cpu(devices)
    started_platforms(name)
    check_compilation_cache()


def _divide_cpu(devices: int) -> None:
    """Let JAX see so many devices in the CPU, unless it has started or was told otherwise."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "host_platform_device_count" not in flags:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices)
    if "collective_call" not in flags:
        # By default XLA ends the process when one device waits a minute for another.
        names = ("warn_stuck", "terminate")
        patient = [f"--xla_cpu_collective_call_{name}_timeout_seconds={PATIENCE}" for name in names]
        os.environ["XLA_FLAGS"] = " ".join([flags, *patient]).strip()


def count_devices(asked: Literal["auto"] | int) -> int:
    """Devices of a run in all its processes: in each what was asked for, or all, but one if it is a CPU.

    Of processes that differ, the one with the fewest says what all are.

    Raises:
      UserError: there are fewer.
    """
    found, platform = min(Counter(d.process_index for d in jax.devices()).values()), jax.default_backend()
    if asked == "auto":
        return jax.process_count() * (1 if platform == "cpu" else found)
    if asked > found:
        late = "JAX has already divided the CPU: ask in a new process" if platform == "cpu" else "use at most as many"
        raise UserError(f"`devices={asked}` is more than the {found} {platform} devices that JAX has here; {late}.")
    return jax.process_count() * asked


class CompileClock:
    """Counts programs that XLA compiled and the seconds it took, from the moment it is made."""

    def __init__(self):
        """Start listening."""
        self.count, self.seconds = 0, 0.0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            self.count += 1
            self.seconds += duration_secs


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def candidates(jobs: int, devices: int = 1) -> list[int]:
    """Lane counts worth trying, few first: the number of cores on a CPU, up to all clients at once elsewhere.

    Args:
      jobs: J of a device; devices: of this process.
    """
    if jax.default_backend() == "cpu":
        values = {1, max(1, _cores() // devices)}
    else:
        values = {2**i for i in range(2, 10)} | {math.ceil(jobs / d) for d in (1, 2, 4)}
    return sorted(v for v in values if v <= jobs) or [1]


def free_memory() -> float:
    """Bytes that the fullest device of this process has left; infinite where it shares those of the machine."""
    known = [device.memory_stats() or {} for device in jax.local_devices()]
    return min((k["bytes_limit"] - k["bytes_in_use"] if "bytes_limit" in k else math.inf) for k in known)


def _fits(compiled: Any) -> bool:
    """Whether a program has the memory that it takes beside its arguments, which are on the device already."""
    memory = compiled.memory_analysis()
    if memory is None:
        return True
    taken = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return taken <= free_memory()


def _probe(simulation: Simulation, state: State) -> tuple[float, float]:
    """Seconds to compile, and seconds a sample, of the training step with this number of lanes.

    Infinitely many of the latter where memory does not suffice.
    """
    try:
        return _timed_step(simulation, state)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return 0.0, math.inf


def _timed_step(simulation: Simulation, state: State) -> tuple[float, float]:
    program = simulation.program
    plan, jobs = simulation.plan(0)
    state = simulation.fetch(state, (plan, jobs))
    keys = jnp.repeat(simulation.keys[:1], len(jobs.row))
    world = World(simulation.methods, simulation.hyper, state.servers, simulation.data, jobs, keys, jnp.int32(0))

    @full_precision
    def run(world, state, indices, steps):
        def load_one(lane, lanes):
            return put(lanes, lane, load(program, world, state.clients, state.statistics, lane % len(jobs.row), 0))

        shapes = jax.eval_shape(lambda: load(program, world, state.clients, state.statistics, 0, 0))
        lanes = jax.tree.map(lambda x: jnp.zeros((program.lanes, *x.shape), x.dtype), shapes)
        lanes = jax.lax.fori_loop(0, program.lanes, load_one, lanes)
        one = lift(lambda lane, index: train_step(program, world, lane, index, 0), program.lanes)
        return jax.lax.fori_loop(0, steps, lambda t, lanes: one(lanes, indices), lanes).loss

    start = time.perf_counter()
    indices = plan.indices[0] if isinstance(plan, Plan) else plan.plan.indices[0, 0]
    compiled = jax.jit(run).lower(world, state, indices, np.int32(1)).compile()
    compiling = time.perf_counter() - start
    if not _fits(compiled):
        return compiling, math.inf
    timed = partial(compiled, world, state, indices)
    jax.block_until_ready(timed(np.int32(1)))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(timed(np.int32(PROBE_STEPS)))
        times.append(time.perf_counter() - start)
    return compiling, min(times) / PROBE_STEPS / program.lanes


def choose_lanes(make: Callable[[int], Simulation], state: State, jobs: int, rounds: int) -> Simulation:
    """The simulation with the fastest of a few lane counts, by timing a few steps of each.

    Trying costs about a tenth of the run at most, and ends where the memory of the devices does. On several devices
    all do the same steps at once; of several processes the first one's times count.

    Args:
      make: builds the simulation for a number of lanes.
      state: before the first round; not donated.
      jobs: J, jobs a round.
      rounds: of the run, to weigh what trying costs.
    """
    best, fastest = 1, math.inf
    tried, devices = 0.0, devices_of(state)
    counts = candidates(most_jobs(jobs, devices), devices // jax.process_count())
    for lanes in counts:
        simulation = make(lanes)
        compiling, seconds = (float(x) for x in multihost_utils.broadcast_one_to_all(_probe(simulation, state)))
        if seconds < 0.95 * fastest:
            best, fastest = lanes, seconds
        tried += compiling
        expected = rounds * float((simulation.epochs * simulation.steps).mean()) * jobs / devices * fastest
        if seconds == math.inf or tried > 0.1 * expected:
            break
    return _within_memory(make, state, [lanes for lanes in reversed(counts) if lanes <= best])


def _within_memory(make: Callable[[int], Simulation], state: State, counts: list[int]) -> Simulation:
    """The simulation with the first of these lane counts whose round fits into the devices' memory, else one lane."""
    for lanes in counts:
        simulation = make(lanes)
        if free_memory() == math.inf or multihost_utils.broadcast_one_to_all(_fits(simulation.compile(state))):
            return simulation
    return make(1)
