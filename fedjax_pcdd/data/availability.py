"""Which clients are available in a round, and which of them drop out before it ends: by a model, or from a file.

FedScale (Lai et al., ICML 2022) replays traces of devices that charge at night; FLGo (Wang et al., 2023) draws each
client with its own probability, which oscillates over time. Here a client is available in round t with probability
p_k(t); the model has p_k(t) = a_k (1 + sin(2 pi (t / 24 + z_k))) / 2 + a_k / 10, at most 1: a day of 24 rounds, a time
zone z_k uniform in [0, 1) and a_k uniform in [0.3, 1). All draws are functions of (seed, round, client), each from its
own stream: availability, dropout and the selection of clients are independent. Letters: K clients, T rounds after
which probabilities repeat.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedjax_pcdd.data.npz import read_arrays
from fedjax_pcdd.errors import UserError, expanded

DAY = 24  # rounds in a day of the model
AVAILABLE, LOST, MODEL = 1, 2, 3  # streams of random numbers


@dataclass(frozen=True, eq=False)
class Availability:
    """Probabilities of K clients.

    Args:
      probability: [T, K] of being available, in rounds t modulo T.
      lost: [K] of dropping out in the middle of a round.
    """

    probability: np.ndarray
    lost: np.ndarray

    def available(self, seed: int, round: int) -> np.ndarray:
        """Which clients are available, [K] bool."""
        chances = self.probability[round % len(self.probability)]
        return _random(seed, round, AVAILABLE).random(len(chances)) < chances

    def stay(self, seed: int, round: int) -> np.ndarray:
        """Which clients, if available, stay until the round ends, [K] bool."""
        return _random(seed, round, LOST).random(len(self.lost)) >= self.lost


def _random(seed: int, round: int, stream: int) -> np.random.Generator:
    counter = np.array([0, 0, 2**63 + stream, 0], np.uint64)  # a list of such numbers would be rounded to floats
    return np.random.Generator(np.random.Philox(key=[seed, round], counter=counter))


def availability(source: str | None, lost: float, clients: int, seed: int) -> Availability | None:
    """Make the availability of an experiment from its options; None if all clients are always available.

    Args:
      source: "model", the path of an npz file with `probability` [K] or [T, K] and optionally `lost` [K], or None.
      lost: share of the clients that drop out in the middle of each round.

    Raises:
      UserError: the file has other content or another number of clients, both it and `lost` set dropouts, or no client
        is ever available until a round ends.
    """
    if source is None and not lost:
        return None
    shares: Any = np.full(clients, lost)
    if source is None:
        return Availability(np.ones((1, clients), np.float32), shares)
    if source == "model":
        random = _random(seed, 0, MODEL)
        zone, amplitude = random.random(clients), random.uniform(0.3, 1, clients)
        swing = (1 + np.sin(2 * np.pi * (np.arange(DAY)[:, None] / DAY + zone))) / 2
        return Availability(np.minimum(1, amplitude * swing + amplitude / 10).astype(np.float32), shares)
    arrays = read_arrays(expanded(source), ("probability", "lost"))
    if "probability" not in arrays:
        raise UserError(f"{source} holds no probability of clients: store [K] or [rounds, K] of it, and lost [K].")
    if lost and "lost" in arrays:
        raise UserError(f"{source} says who is lost: drop `lost_share`, or leave lost out of the file.")
    probability, shares = np.atleast_2d(arrays["probability"]), arrays.get("lost", shares)
    for name, values in (("probability", probability), ("lost", shares)):
        if values.shape[-1:] != (clients,) or values.ndim != (2 if name == "probability" else 1) or not len(values):
            raise UserError(
                f"{source}: {name} is {list(values.shape)}, but there are {clients} clients: give one each."
            )
        if values.dtype.kind not in "fiub" or not ((values >= 0) & (values <= 1)).all():
            raise UserError(f"{source}: {name} must be numbers from 0 to 1.")
    if not (probability * (1 - shares)).any():
        raise UserError(f"{source}: no client is ever there until a round ends, so that nothing would be trained.")
    return Availability(probability, shares)
