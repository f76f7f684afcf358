"""The device: which one is used, how exactly it computes, compilations and free memory, and failures below JAX.

Each failure (memory, the compiler, the driver, the compilation cache) is reported in one sentence. Products are full
float32 everywhere except in the models, which choose their own precision: "float32", "tf32" or "bfloat16";
docs/performance.md says what each means on each device.
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

from fedjax_pcdd.data.memory import free_memory as memory_of_the_machine
from fedjax_pcdd.errors import UserError, in_one_line

COMPILED = "/jax/core/compile/backend_compile_duration"
MEMORY = ("RESOURCE_EXHAUSTED", "out of memory")
PATIENCE = 7 * 24 * 3600  # seconds
STATIC = (
    "A number on which Python branches or counts must be static: declare a hyper-parameter by "
    "fp.hyperparameter(..., static=True); on the context's round, epoch, step and counts choose by jnp.where."
)
UNTRACED: dict[type[Exception], str] = {  # what helps against errors of JAX about code that cannot be traced
    jax.errors.TracerArrayConversionError: "NumPy takes no arrays that are traced: use those functions of jax.numpy.",
    jax.errors.NonConcreteBooleanIndexError: "How many samples a mask selects is not known: weight them by jnp.where.",
    jax.errors.TracerIntegerConversionError: STATIC,
    jax.errors.ConcretizationTypeError: STATIC,
}
TYPES = {"float32": jnp.float32, "tf32": jnp.float32, "bfloat16": jnp.bfloat16}  # of images and activations


class OutOfMemory(UserError):
    """A device does not have enough memory."""


@contextlib.contextmanager
def in_sentences(doing: str) -> Iterator[None]:
    """Raise device errors when `doing` something as a `UserError`, or as `OutOfMemory` where that is the reason.

    To errors of JAX about code that cannot be traced it adds what usually helps.
    With several processes other errors pass unchanged, as they may be about another process.
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
    except tuple(UNTRACED) as error:
        error.add_note(next(note for kind, note in UNTRACED.items() if isinstance(error, kind)))
        raise


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error says that a device is out of memory."""
    return any(sign in str(error) for sign in MEMORY)


def select_device(name: str, devices: Literal["auto"] | int = "auto") -> None:
    """Use "cpu", "gpu" or "tpu" for everything that follows; "auto" leaves the choice to JAX.

    Args:
      devices: as later passed to `count_devices`; a CPU is divided into this many before JAX starts.

    Raises:
      UserError: JAX has no such device, cannot start it, or is set to double precision or strict promotion of types.
    """
    if jax.config.read("jax_enable_x64"):
        advice = "call it within `with jax.enable_x64(False):`, or leave JAX_ENABLE_X64 out"
        raise UserError(f"a run is in single precision, and JAX is set to double precision (jax_enable_x64): {advice}.")
    if jax.config.jax_numpy_dtype_promotion == "strict":  # pyright: ignore[reportAttributeAccessIssue]
        advice = 'call it within `with jax.numpy_dtype_promotion("standard"):`, or leave that setting out'
        raise UserError(
            f"a run adds integers to floats, and JAX is set to refuse it (jax_numpy_dtype_promotion): {advice}."
        )
    if name != "auto":
        jax.config.update("jax_platforms", None if name == "gpu" else name)
    if devices != "auto" and devices > 1:
        _divide_cpu(devices)
    started_platforms(name)
    check_compilation_cache()


def _divide_cpu(devices: int) -> None:
    """Make JAX see the CPU as this many devices, unless it has started or was configured otherwise."""
    # A device that waits for another holds a thread, so with one thread each a factorisation would wait for ever.
    # A round without a factorisation takes some 5 % longer for it (two devices on two processors, simple_cnn).
    os.environ.setdefault("PJRT_NPROC", str(max(2 * devices, processors())))
    flags = os.environ.get("XLA_FLAGS", "")
    if "host_platform_device_count" not in flags:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", devices)
    if "collective_call" not in flags:
        # By default XLA ends the process when one device waits a minute for another.
        names = ("warn_stuck", "terminate")
        timeouts = [f"--xla_cpu_collective_call_{name}_timeout_seconds={PATIENCE}" for name in names]
        os.environ["XLA_FLAGS"] = " ".join([flags, *timeouts]).strip()


def processors() -> int:
    """Number of processors that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def started_platforms(name: str) -> set[str]:
    """Start JAX, ask for "auto", "cpu", "gpu" or "tpu", and return its platforms; complaints become one-line warnings.

    Raises:
      UserError: JAX cannot start the requested platform, for example because its driver is missing or too old.
    """
    complaints: list[str] = []
    try:
        with _hearing(complaints):
            platforms = {device.platform for device in jax.devices()}
    except (RuntimeError, AssertionError) as error:  # the latter if a plugin has failed before
        requested = os.environ.get("JAX_PLATFORMS") or name
        reason = complaints[0] if complaints else in_one_line(error)
        raise UserError(
            f"JAX cannot start {requested} ({reason}): install its extra and its driver, or update them, or run with "
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
    """Collect what JAX logs about its devices, in place of the traceback that it would print."""
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
    """Disable JAX's cache of compiled programs, with a warning, if its folder cannot be written."""
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
    """Number of devices of a run in all its processes: in each as many as asked; for "auto" all, but one on a CPU.

    If processes differ, the one with the fewest devices decides for all.

    Raises:
      UserError: there are fewer than asked for.
    """
    least, platform = min(Counter(d.process_index for d in jax.devices()).values()), jax.default_backend()
    if asked == "auto":
        return jax.process_count() * (1 if platform == "cpu" else least)
    if asked > least:
        remedy = "JAX has already divided the CPU: ask in a new process" if platform == "cpu" else "use at most as many"
        raise UserError(f"`devices={asked}` is more than the {least} {platform} devices that JAX has here; {remedy}.")
    return jax.process_count() * asked


class CompileClock:
    """Counts the programs that XLA compiles, and the seconds this takes, from the clock's creation on."""

    def __init__(self):
        """Start counting."""
        self._heard = _compilations()
        self._before = len(self._heard)

    @property
    def count(self) -> int:
        """Number of programs compiled so far."""
        return len(self._heard) - self._before

    @property
    def seconds(self) -> float:
        """Seconds that compiling these took."""
        return sum(self._heard[self._before :])


@functools.cache
def _compilations() -> list[float]:
    """Compile seconds of each program from the first call on; one list for all clocks, as listeners stay registered."""
    durations: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILED:
            durations.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return durations


def free_memory() -> float:
    """Bytes left on the fullest device of this process; infinite if it shares the machine's memory."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return min((s["bytes_limit"] - s["bytes_in_use"] if "bytes_limit" in s else math.inf) for s in stats)


def available_memory() -> float:
    """Bytes left for arrays on a device, or on the machine if the device shares its memory; infinite if unknown."""
    free = free_memory()
    return free if free < math.inf else memory_of_the_machine()


def products(precision: str) -> str:
    """Precision of products of a model's float32 operands, a value of `jax.default_matmul_precision`.

    A GPU's default is TF32. What JAX calls "tensorfloat32" means TF32 in cuDNN alone: in the matrix products that XLA
    writes itself it means full float32, judging by the code that XLA generates for an H100. On a TPU, whose default
    rounds operands to bfloat16, it means three bfloat16 products, which are as exact as TF32.
    """
    if precision == "tf32" and jax.default_backend() == "tpu":
        return "tensorfloat32"
    return "float32" if precision == "float32" else "default"


def full_precision(function: Callable) -> Callable:
    """The function with products of float32 operands as exact as float32 allows, unless specified otherwise inside.

    JAX leaves their precision to the device, and a GPU rounds operands to 10 bits, a TPU to 7: too few for sums over
    clients and for losses. Models set theirs by `Classifier.precision`. On a CPU the compiled program is the same.
    """

    @functools.wraps(function)
    def exact(*args: Any, **kwargs: Any) -> Any:
        with jax.default_matmul_precision("float32"):
            return function(*args, **kwargs)

    return exact
