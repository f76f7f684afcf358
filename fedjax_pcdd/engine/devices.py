"""The device: which one, how exactly it computes, what it has compiled and left, and what fails below JAX.

Failures are one sentence each: of memory, the compiler, the driver, the cache of compiled programs. Products are full
float32 everywhere but in the models, which say themselves what they take: a precision is "float32", "tf32" or
"bfloat16", and docs/performance.md has what each means on each device.
"""

import contextlib
import functools
import logging
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedjax_pcdd.data.npz import free_memory as memory_of_the_machine
from fedjax_pcdd.errors import UserError, in_one_line

COMPILED = "/jax/core/compile/backend_compile_duration"
MEMORY = ("RESOURCE_EXHAUSTED", "out of memory")
PATIENCE = 7 * 24 * 3600  # seconds
TYPES = {"float32": jnp.float32, "tf32": jnp.float32, "bfloat16": jnp.bfloat16}  # of images and activations


class OutOfMemory(UserError):
    """The memory of a device does not suffice."""


@contextlib.contextmanager
def in_sentences(doing: str) -> Iterator[None]:
    """Raise what the device reports as a `UserError`, `OutOfMemory` where that is the reason.

    What several processes report of each other passes as it is.

    Args:
      doing: what the device was about, as "compiling the round".
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason, device = in_one_line(error), jax.devices()[0].device_kind
        if is_out_of_memory(error):
            raise OutOfMemory(
                f"{device} is out of memory when {doing} ({reason}): choose fewer `lanes`, a smaller `batch_size` or "
                "`eval_batch`, `precision=bfloat16` or `client_state=host`."
            ) from error
        if jax.process_count() > 1:
            raise
        raise UserError(
            f"{device} failed when {doing} ({reason}): continue with `resume`, or try `tune=off`, another `precision` "
            "or `device=cpu` in a new run."
        ) from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device reports that its memory does not suffice."""
    return any(sign in str(error) for sign in MEMORY)


def select_device(name: str, devices: Literal["auto"] | int = "auto") -> None:
    """Use "cpu", "gpu" or "tpu" for everything that follows; "auto" leaves the choice to JAX.

    Args:
      devices: as `count_devices` will be asked for; a CPU is divided into so many before JAX starts.

    Raises:
      UserError: JAX has no such device, or cannot start it.
    """
    if name != "auto":
        jax.config.update("jax_platforms", None if name == "gpu" else name)
    if devices != "auto" and devices > 1:
        _divide_cpu(devices)
    started_platforms(name)
    check_compilation_cache()


def _divide_cpu(devices: int) -> None:
    """Let JAX see so many devices in the CPU, unless it has started or was told otherwise."""
    # A device that waits for another holds a thread, so with one each a factorisation would find none, for ever.
    # A round without one takes some 5 % longer for it (two devices on two processors, simple_cnn).
    os.environ.setdefault("PJRT_NPROC", str(max(2 * devices, processors())))
    flags = os.environ.get("XLA_FLAGS", "")
    if "host_platform_device_count" not in flags:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices)
    if "collective_call" not in flags:
        # By default XLA ends the process when one device waits a minute for another.
        names = ("warn_stuck", "terminate")
        patient = [f"--xla_cpu_collective_call_{name}_timeout_seconds={PATIENCE}" for name in names]
        os.environ["XLA_FLAGS"] = " ".join([flags, *patient]).strip()


def processors() -> int:
    """Those of the machine that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def started_platforms(name: str) -> set[str]:
    """The platforms of the devices that JAX has, which this starts; what it complains of becomes warnings of a line.

    Args:
      name: what was asked for, "auto", "cpu", "gpu" or "tpu".

    Raises:
      UserError: it cannot start what was asked for, as its driver is missing or too old.
    """
    complaints: list[str] = []
    try:
        with _hearing(complaints):
            platforms = {device.platform for device in jax.devices()}
    except (RuntimeError, AssertionError) as error:  # the latter where a plugin has given up before
        wanted = os.environ.get("JAX_PLATFORMS") or name
        reason = complaints[0] if complaints else in_one_line(error)
        raise UserError(
            f"JAX cannot start {wanted} ({reason}): install its extra and its driver, or update them, or run with "
            "`device=cpu`."
        ) from None
    if name in ("auto", *platforms):
        for complaint in complaints:
            print(f"warning: {complaint}; computing on {', '.join(sorted(platforms))}.", file=sys.stderr)
        return platforms
    reason = f" ({complaints[0]})" if complaints else ""
    raise UserError(
        f"JAX finds no {name} here, only {', '.join(sorted(platforms))}{reason}: install its extra and its driver, or "
        "drop `device`."
    )


@contextlib.contextmanager
def _hearing(complaints: list[str]) -> Iterator[None]:
    """Collect what JAX logs of its devices, in place of the traceback that it would print."""
    logger = logging.getLogger("jax._src.xla_bridge")

    def hear(record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info and record.exc_info[1]
        complaints.append(in_one_line(error if isinstance(error, Exception) else ValueError(record.getMessage())))
        return False

    logger.addFilter(hear)
    try:
        yield
    finally:
        logger.removeFilter(hear)


def check_compilation_cache() -> None:
    """Do without JAX's cache of compiled programs, and say so, where its folder cannot be written."""
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    enabled = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    if not folder or "://" in folder or not enabled:
        return
    existing = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        print(
            f"warning: compiled programs are not kept, as {folder} cannot be written: set JAX_COMPILATION_CACHE_DIR to "
            "another folder.",
            file=sys.stderr,
        )
        jax.config.update("jax_enable_compilation_cache", False)


def count_devices(asked: Literal["auto"] | int) -> int:
    """Devices of a run in all its processes: in each what was asked for, or all, but one if it is a CPU.

    Of processes that differ, the one with the fewest says what all are.

    Raises:
      UserError: there are fewer.
    """
    least, platform = min(Counter(d.process_index for d in jax.devices()).values()), jax.default_backend()
    if asked == "auto":
        return jax.process_count() * (1 if platform == "cpu" else least)
    if asked > least:
        late = "JAX has already divided the CPU: ask in a new process" if platform == "cpu" else "use at most as many"
        raise UserError(f"`devices={asked}` is more than the {least} {platform} devices that JAX has here; {late}.")
    return jax.process_count() * asked


class CompileClock:
    """Counts programs that XLA compiled and the seconds it took, from the moment it is made."""

    def __init__(self):
        """Start counting."""
        self._heard = _compilations()
        self._before = len(self._heard)

    @property
    def count(self) -> int:
        """Of programs."""
        return len(self._heard) - self._before

    @property
    def seconds(self) -> float:
        """Of all these."""
        return sum(self._heard[self._before :])


@functools.cache
def _compilations() -> list[float]:
    """Seconds of each program that XLA compiles from now on, as listeners are not taken back."""
    heard: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            heard.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return heard


def free_memory() -> float:
    """Bytes that the fullest device of this process has left; infinite where it shares those of the machine."""
    known = [device.memory_stats() or {} for device in jax.local_devices()]
    return min((k["bytes_limit"] - k["bytes_in_use"] if "bytes_limit" in k else math.inf) for k in known)


def available_memory() -> float:
    """Bytes for arrays that a device, or where it shares the machine's memory this, has left; infinite if unknown."""
    free = free_memory()
    return free if free < math.inf else memory_of_the_machine()


def products(precision: str) -> str:
    """What products of a model's float32 operands take, as `jax.default_matmul_precision` has it.

    A GPU's default is TF32. What JAX calls "tensorfloat32" is so in cuDNN alone: in the matrix products that XLA writes
    itself it is full float32, by the code that XLA generates for an H100. On a TPU, whose default rounds operands to
    bfloat16, it is three products of these, which are as exact as TF32.
    """
    if precision == "tf32" and jax.default_backend() == "tpu":
        return "tensorfloat32"
    return "float32" if precision == "float32" else "default"


def full_precision(function: Callable) -> Callable:
    """The function, in which products of float32 operands are as exact as float32 allows wherever nothing else is said.

    JAX leaves them to the device, and a GPU rounds operands to 10 bits, a TPU to 7: too few for sums over clients and
    for losses. A model's layers say otherwise by `Classifier.precision`. On a CPU the compiled program is the same.
    """

    @functools.wraps(function)
    def exact(*args: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision("float32"):
            return function(*args, **kwargs)

    return exact
