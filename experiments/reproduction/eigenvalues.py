"""The eigenvalues of FedMR's Table 7, from the last checkpoint of a run."""

from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pcdd.analysis.spectrum import eigenvalue_variance
from fedjax_pcdd.api.runs import load_run
from fedjax_pcdd.report.expected import read_expected

METRIC = "eigenvalue_variance"
BATCH, BATCHES = 128, 10  # the paper has one batch of training images; a mean over several varies less


def add_eigenvalues(result: dict[str, Any], folder: Path, expected: Path) -> dict[str, Any]:
    """The result of a run with its eigenvalue variance, if its table prints one; else the result unchanged."""
    if needed(result["table"], expected) is None:
        return result
    value = mean_variance(test_features(folder))
    return {**result, "metrics": {**result["metrics"], METRIC: round(value, 3)}}


def needed(table: str, expected: Path) -> str | None:
    """The metric that results of this table must have and those of others lack; None for most tables."""
    return METRIC if METRIC in {expectation.metric for expectation in read_expected(expected, table)} else None


def mean_variance(features: np.ndarray) -> float:
    """Mean of `eigenvalue_variance` over batches of `BATCH` features [n, D]; at most `BATCHES`, at least one."""
    count = max(1, min(BATCHES, len(features) // BATCH))
    return float(np.mean([eigenvalue_variance(batch)[1] for batch in np.split(features[: BATCH * count], count)]))


def test_features(folder: Path) -> np.ndarray:
    """Features [n, D] of the global model after the last round, on the first test images in a random order."""
    history = load_run(folder)
    images = history.federation.dataset.x_test
    indices = np.random.default_rng(history.config.seed).permutation(len(images))[: BATCH * BATCHES]
    return np.asarray(history.outputs(images[indices]).features)
