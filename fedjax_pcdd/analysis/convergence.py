"""Rounds to an accuracy and speed-ups (FedMR, Table 4; FedRL, Table 2)."""

import numpy as np


def rounds_to(accuracies: np.ndarray, target: float, *, above: bool = False) -> int | None:
    """The first round, from 1, whose accuracy reaches a target.

    Args:
      accuracies: [T] of each round; NaN where it was not measured.
      target: FedMR's is the best accuracy of FedAvg, FedRL's that of FedAvg's last round.
      above: it must be exceeded, as FedRL counts.

    Returns:
      None if it is never reached.

    >>> rounds_to(np.array([0.2, 0.5, 0.4, 0.6]), 0.5)
    2
    >>> rounds_to(np.array([0.2, 0.5, 0.4, 0.6]), 0.5, above=True)
    4
    """
    values = np.asarray(accuracies, float)
    reached = np.flatnonzero(values > target if above else values >= target)
    return int(reached[0]) + 1 if len(reached) else None


def speed_up(rounds: int | None, reference: int) -> float | None:
    """How many times fewer rounds than the reference, 400 / 149 = 2.68 in FedMR's Table 4; None if never reached.

    >>> round(speed_up(149, 400), 2)
    2.68
    """
    return None if rounds is None else reference / rounds
