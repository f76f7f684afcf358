"""What fails below JAX, in one sentence each: memory, the compiler, the driver, the cache of compiled programs."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from fedjax_pcdd.errors import UserError, in_one_line

MEMORY = ("RESOURCE_EXHAUSTED", "out of memory")


class OutOfMemory(UserError):
    """The memory of a device does not suffice."""


@contextmanager
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


@contextmanager
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
