"""How experiments are computed, as against what: on which devices, with samples and clients where, how precisely."""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Results do not depend on it but for the rounding of floating-point numbers."""

    lanes: int = 1  # L of each device, at most E * S are used
    devices: int = 1  # D; each trains its share of a round's jobs, and has data and state in its memory
    client_state: Literal["device", "host", "disk"] = "device"  # where the clients' state lives between rounds
    stream: int | None = None  # bytes of a device's memory for samples, which stay on the host; None: all are on it
    eval_batch: int | None = None  # samples at a time in passes that train nothing; None: what runs well on the device
    block: int | None = None  # b, jobs that begin or end as one, at most L; None: what runs well on the device
    dtype: Any = jnp.float32  # of the computation
    param_dtype: Any = jnp.float32  # of the parameters (float64 needs JAX's x64 mode)
