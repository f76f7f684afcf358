"""Dimensional collapse, measured by the eigenvalues of the features' correlation matrix (FedMR, Table 7).

Computed on the host in float64. Letters: B samples, D feature dimensions.
"""

import numpy as np
from numpy.typing import ArrayLike


def correlation(features: ArrayLike, *, unbiased: bool = False) -> np.ndarray:
    """M = Z^T Z / (B - 1) [D, D] of the features [B, D] standardised over the batch; 0 for constant dimensions.

    `unbiased` standardises with the divisor B - 1, which makes the diagonal 1; else with B, as in the paper.
    """
    standard = _standardised(features, unbiased)
    return standard.T @ standard / (len(standard) - 1)


def _standardised(features: ArrayLike, unbiased: bool) -> np.ndarray:
    """Features [B, D] of mean 0 and deviation 1 in each dimension; constant dimensions are 0."""
    features = np.asarray(features, np.float64)
    deviations = features.std(axis=0, ddof=int(unbiased))
    constant = np.ptp(features, axis=0) == 0
    standard = (features - features.mean(axis=0)) / np.where(constant, 1, deviations)
    standard[:, constant] = 0
    return standard


def _eigenvalues(features: ArrayLike, unbiased: bool = False) -> np.ndarray:
    """Eigenvalues [D] of the correlation matrix in descending order.

    With fewer samples than dimensions, these are the eigenvalues of the [B, B] matrix of inner products, and zeros.
    """
    standard = _standardised(features, unbiased)
    samples, dimensions = standard.shape
    small = standard @ standard.T if samples < dimensions else standard.T @ standard
    values = np.linalg.eigvalsh(small / (samples - 1))[::-1]
    return np.pad(values, (0, dimensions - len(values)))


def eigenvalue_variance(features: ArrayLike, top: int = 50, *, unbiased: bool = False) -> tuple[np.ndarray, float]:
    """Variance of the largest eigenvalues of the correlation matrix: large if features have collapsed.

    Args:
      features: [B, D], all classes pooled, B >= 2.
      top: number of largest eigenvalues to include; all of them if D is smaller.
      unbiased: as in `correlation`.

    Returns:
      (eigenvalues [D] in descending order, (1/B) sum_{i <= top} (lambda_i - mean_{i <= top} lambda)^2).
    """
    eigenvalues = _eigenvalues(features, unbiased)
    largest = eigenvalues[:top]
    return eigenvalues, float(np.sum(np.square(largest - largest.mean())) / len(np.asarray(features)))


def class_eigenvalue_variance(features: ArrayLike, labels: ArrayLike, top: int = 50) -> float:
    """Mean of `eigenvalue_variance` within each class [B] of two or more samples; nan when there is none."""
    features, labels = np.asarray(features), np.asarray(labels)
    classes, counts = np.unique(labels, return_counts=True)
    values = [eigenvalue_variance(features[labels == c], top)[1] for c in classes[counts >= 2]]
    return float(np.mean(values)) if values else float("nan")


def mean_spectrum(batches: ArrayLike, top: int = 50) -> tuple[np.ndarray, float]:
    """The largest eigenvalues [min(top, D)] and the variance, means over mini-batches [n, B, D] (FedMR, Table 7)."""
    spectra = [eigenvalue_variance(batch, top) for batch in np.asarray(batches)]
    return np.mean([values[:top] for values, _ in spectra], axis=0), float(np.mean([value for _, value in spectra]))


def class_spectra(features: ArrayLike, labels: ArrayLike, num_classes: int, top: int = 10) -> np.ndarray:
    """The largest eigenvalues [C, min(top, D)] within each class, descending; nan with fewer than two samples."""
    features, labels = np.asarray(features), np.asarray(labels)
    spectra = np.full((num_classes, min(top, features.shape[1])), np.nan)
    for c, class_features in ((c, features[labels == c]) for c in range(num_classes)):
        if len(class_features) >= 2:
            spectra[c] = _eigenvalues(class_features)[:top]
    return spectra
