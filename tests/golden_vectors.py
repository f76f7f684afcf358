"""The golden vectors: `<family>_<case>.npz` in the folder PCDD_GOLDEN, by default tests/golden; comparisons."""

import os
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

FOLDER = Path(os.environ.get("PCDD_GOLDEN", Path(__file__).parent / "golden"))


class Vectors(dict[str, np.ndarray]):
    """The arrays of a file by name; compared by identity, so that what is computed from them can be cached."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def _load(file: Path) -> Vectors:
    with np.load(file, allow_pickle=False) as archive:
        return Vectors((name, archive[name]) for name in archive.files)


def cases(family: str):
    """A parametrisation over all files of a family: each test receives the arrays as a dict.

    Use as `@pytest.mark.parametrize("g", cases("fedmr_intra"))`. A family without any file fails.
    """
    files = sorted(FOLDER.glob(f"{family}_[a-z0-9]*.npz"))
    files = [f for f in files if "_" not in f.stem.removeprefix(f"{family}_")]
    if not files:
        raise FileNotFoundError(f"no golden vectors {family}_*.npz in {FOLDER}")
    return [pytest.param(_load(f), id=f.stem) for f in files]


class Precision(NamedTuple):
    """A floating-point type and the tolerances of what is computed in it."""

    dtype: str
    rtol: float
    rtol_correlations: float  # of gradients of standardised features' correlations, in which large terms cancel
    atol: float  # for values that are nearly 0 by cancellation

    def array(self, values):
        return jnp.asarray(values, self.dtype)


PRECISIONS = {"float64": Precision("float64", 1e-9, 1e-9, 1e-9), "float32": Precision("float32", 2e-5, 5e-4, 1e-6)}


def assert_close(actual, expected, rtol, atol=0.0):
    """Relative to each entry, or to the largest one where an entry is a small difference."""
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=max(atol, rtol * np.max(np.abs(expected))))
