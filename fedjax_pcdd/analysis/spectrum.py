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
    features = np.asarray(features, np.float64)
    deviations = features.std(axis=0, ddof=int(unbiased))
    constant = np.ptp(features, axis=0) == 0
    standard = (features - features.mean(axis=0)) / np.where(constant, 1, deviations)
    standard[:, constant] = 0
    return standard.T @ standard / (len(features) - 1)


def eigenvalue_variance(features: ArrayLike, top: int = 50, *, unbiased: bool = False) -> tuple[np.ndarray, float]:
    """Spread of the largest eigenvalues of the correlation matrix: large where features have collapsed.

    Args:
      features: [B, D], all classes pooled, B >= 2.
      top: how many of the largest eigenvalues enter; all of them if D is smaller.
      unbiased: as in `correlation`.

    Returns:
      (eigenvalues [D] in descending order, (1/B) sum_{i <= top} (lambda_i - mean_{i <= top} lambda)^2).
    """
    eigenvalues = np.linalg.eigvalsh(correlation(features, unbiased=unbiased))[::-1]
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
