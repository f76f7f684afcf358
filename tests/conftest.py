"""Fixtures shared by all tests."""

import jax
import pytest


@pytest.fixture
def x64():
    """Run a test in float64, as the golden vectors ask."""
    with jax.enable_x64(True):
        yield
