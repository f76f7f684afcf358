"""The three-class example of FedMR's section 3.2: averaging classifiers that each miss a class turns class vectors.

Three clients hold two of three classes each; every client's classifier is optimal for its own two. Their mean deviates
in direction from the classifier that is optimal for all three: by exactly 45 degrees for the second and third class.
The printed optimum is not a regular simplex; with one, rows at 0 and +-120 degrees, the shift would be 15 degrees. It
is a shift of direction, not of accuracy: on discs of radius 1/2 around the printed centres the printed optimum
misclassifies about 2 % of the second and third class, and the mean nothing (`error_rates`).
"""

from typing import NamedTuple

import numpy as np

CENTRES = np.array([[1.0, 0.0], [0.0, np.sqrt(3)], [0.0, -np.sqrt(3)]])
"""[3, 2], centres of the printed discs."""


class Aggregation(NamedTuple):
    """Classifiers without bias, whose rows are class vectors."""

    optimal: np.ndarray  # [3, 2] w*, of all classes together
    clients: np.ndarray  # [3, 3, 2] w_k; the row of the class that a client lacks is 0
    aggregated: np.ndarray  # [3, 2] the clients' mean
    angle_shift_degrees: np.ndarray  # [3] angle between the rows of `optimal` and `aggregated`


def three_class_aggregation() -> Aggregation:
    """The printed matrices, their mean and the angles in degrees.

    >>> three_class_aggregation().angle_shift_degrees.round(6).tolist()
    [0.0, 45.0, 45.0]
    """
    half, root = 0.5, np.sqrt(3) / 2
    optimal = np.array([[1, 0], [-root, half], [-root, -half]])
    clients = np.array([
        [[half, -root], [-half, root], [0, 0]],
        [[half, root], [0, 0], [-half, -root]],
        [[0, 0], [0, 1], [0, -1]],
    ])  # fmt: skip
    aggregated = clients.mean(0)
    return Aggregation(optimal, clients, aggregated, angles_between(optimal, aggregated))


def angles_between(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Angle in degrees of each pair of rows, a and b [n, d] without zero rows.

    Half-angle form: unlike an arc cosine it is exact to rounding for parallel rows.
    """
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    return np.degrees(2 * np.arctan2(np.linalg.norm(a - b, axis=1), np.linalg.norm(a + b, axis=1)))


def optimal_pair(present: tuple[int, int]) -> np.ndarray:
    """The classifier [3, 2] that separates two classes best: rows u and -u, with u the direction between their centres.

    Computed from the centres, whereas `three_class_aggregation` has it as printed: u maximises the margin of two discs
    of equal radius.
    """
    first, second = present
    direction = CENTRES[first] - CENTRES[second]
    direction /= np.linalg.norm(direction)
    rows = np.zeros((3, 2))
    rows[first], rows[second] = direction, -direction
    return rows


def error_rates(classifier: np.ndarray, *, radius: float = 0.5, samples: int = 20_000, seed: int = 0) -> np.ndarray:
    """Share [3] of the points of each class's disc, uniformly filled, that argmax_c <w_c, x> assigns elsewhere."""
    random = np.random.default_rng(seed)
    angle, distance = random.uniform(0, 2 * np.pi, samples), radius * np.sqrt(random.uniform(0, 1, samples))
    offsets = distance[:, None] * np.stack([np.cos(angle), np.sin(angle)], -1)
    answers = np.argmax((CENTRES[:, None] + offsets) @ classifier.T, axis=-1)
    return np.mean(answers != np.arange(3)[:, None], axis=1)
