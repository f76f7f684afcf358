"""Dimensional collapse, seen in the eigenvalues of the features' correlation matrix (FedMR, Table 7).

Computed on the host in float64. Letters: B samples, D feature dimensions.
"""

import numpy as np
from numpy.typing import ArrayLike


def correlation(features: ArrayLike, *, unbiased: bool = False) -> np.ndarray:
    """M = Z^T Z / (B - 1) of the features standardised over the batch.

    Args:
      features: [B, D], B >= 2.
      unbiased: standardise with the divisor B - 1, which makes the diagonal 1; else with B, as the paper.

    Returns:
      [D, D]; rows and columns of constant dimensions are 0.
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

    With fewer samples than dimensions they are those of the [B, B] matrix of inner products, and zeros.
    """
    standard = _standardised(features, unbiased)
    samples, dimensions = standard.shape
    small = standard @ standard.T if samples < dimensions else standard.T @ standard
    found = np.linalg.eigvalsh(small / (samples - 1))[::-1]
    return np.pad(found, (0, dimensions - len(found)))


def eigenvalue_variance(features: ArrayLike, top: int = 50, *, unbiased: bool = False) -> tuple[np.ndarray, float]:
    """Spread of the largest eigenvalues of the correlation matrix: large where features have collapsed.

    Args:
      features: [B, D], all classes pooled, B >= 2.
      top: how many of the largest eigenvalues enter; all of them if D is smaller.
      unbiased: as in `correlation`.

    Returns:
      (eigenvalues [D] in descending order, (1/B) sum_{i <= top} (lambda_i - mean_{i <= top} lambda)^2).
    """
    eigenvalues = _eigenvalues(features, unbiased)
    largest = eigenvalues[:top]
    return eigenvalues, float(np.sum(np.square(largest - largest.mean())) / len(np.asarray(features)))


def class_eigenvalue_variance(features: ArrayLike, labels: ArrayLike, top: int = 50) -> float:
    """Mean of `eigenvalue_variance` within each class of two or more samples; nan when there is none.

    Args:
      features: [B, D].
      labels: [B] integers.
      top: as in `eigenvalue_variance`.
    """
    features, labels = np.asarray(features), np.asarray(labels)
    classes, counts = np.unique(labels, return_counts=True)
    values = [eigenvalue_variance(features[labels == c], top)[1] for c in classes[counts >= 2]]
    return float(np.mean(values)) if values else float("nan")


def mean_spectrum(batches: ArrayLike, top: int = 50) -> tuple[np.ndarray, float]:
    """`eigenvalue_variance` of several mini-batches, averaged: FedMR's Table 7 from more than one batch of 128.

    Args:
      batches: [n, B, D].
      top: as in `eigenvalue_variance`.

    Returns:
      (the largest eigenvalues [min(top, D)], the variance), means over the batches.
    """
    found = [eigenvalue_variance(batch, top) for batch in np.asarray(batches)]
    return np.mean([values[:top] for values, _ in found], axis=0), float(np.mean([value for _, value in found]))


def class_spectra(features: ArrayLike, labels: ArrayLike, num_classes: int, top: int = 10) -> np.ndarray:
    """The largest eigenvalues of the correlation matrix within each class.

    Args:
      features: [B, D].
      labels: [B] integers in [0, C).
      num_classes: C.
      top: how many eigenvalues of each class; all if D is smaller.

    Returns:
      [C, min(top, D)] in descending order; nan for classes with fewer than two samples.
    """
    features, labels = np.asarray(features), np.asarray(labels)
    spectra = np.full((num_classes, min(top, features.shape[1])), np.nan)
    for c, own in ((c, features[labels == c]) for c in range(num_classes)):
        if len(own) >= 2:
            spectra[c] = _eigenvalues(own)[:top]
    return spectra
