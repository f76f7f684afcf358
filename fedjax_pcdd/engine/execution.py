"""How experiments are computed, as opposed to what: on which devices, where samples and clients live, how precisely."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Execution:
    """How to compute; results do not depend on it, except for the rounding of floating-point numbers."""

    lanes: int = 1  # L of each device, at most E * S are used
    devices: int = 1  # D; each trains its share of a round's jobs, and has data and state in its memory
    client_state: Literal["device", "host", "disk"] = "device"  # where the clients' state lives between rounds
    stream: int | None = None  # bytes of a device's memory for samples, kept on the host; None: all are on the device
    eval_batch: int | None = None  # samples at a time in passes without training; None: what runs well on the device
    block: int | None = None  # b, jobs that begin or end together, at most L; None: what runs well on the device
    dtype: Any = jnp.float32  # of the computation
    param_dtype: Any = jnp.float32  # of the parameters (float64 needs JAX's x64 mode)
