"""Fixtures shared by all tests, and a cache of compiled programs shared by all test processes."""

import gc
import os
from pathlib import Path

CACHE = Path(__file__).parent.parent / ".pytest_cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")

import jax  # noqa: E402
import pytest  # noqa: E402
import toy  # noqa: E402


@pytest.fixture
def x64():
    """Run a test in float64, as the golden vectors ask."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Let a file's programs go when it ends: each maps memory, of which a process may have only so many pieces."""
    yield
    toy.simulation.cache_clear()
    toy.groups.cache_clear()
    jax.clear_caches()
    gc.collect()
