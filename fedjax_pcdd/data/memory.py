"""Whether arrays fit into main memory, asked before they are made."""

import math
import re
from pathlib import Path

import numpy as np

from fedjax_pcdd.errors import UserError


def free_memory() -> float:
    """Bytes of main memory that are available, infinity if the system does not tell."""
    info = Path("/proc/meminfo")
    match = re.search(r"MemAvailable:\s*(\d+) kB", info.read_text()) if info.is_file() else None
    return int(match[1]) * 1024 if match else math.inf


def check_memory(name: str, shape: tuple[int, ...], dtype: np.dtype, advice: str) -> None:
    """UserError if an array of this shape does not fit."""
    size, free = dtype.itemsize * math.prod(shape), free_memory()
    if size > free:
        raise UserError(
            f"{name} {list(shape)} of {dtype} needs {size / 1e9:.1f} GB of memory, of which {free / 1e9:.1f} GB are "
            f"free: {advice}."
        )
