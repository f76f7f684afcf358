"""Which clients are there in a round, and which of them are lost before it ends: by a model, or from a file.

FedScale (Lai et al., ICML 2022) replays traces of devices that charge at night; FLGo (Wang et al., 2023) draws each
client with a probability of its own that swings in time. Here a client is there in round t with probability p_k(t);
the model has p_k(t) = a_k (1 + sin(2 pi (t / 24 + z_k))) / 2 + a_k / 10, at most 1: a day of 24 rounds, a time zone z_k
uniform in [0, 1) and a_k uniform in [0.3, 1). All draws are functions of (seed, round, client), each of a stream of its
own: who is there, who is lost and who is drawn are independent. Letters: K clients, T rounds after which
probabilities repeat.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pcdd.data.npz import read_arrays
from fedjax_pcdd.errors import UserError

DAY = 24  # rounds of the model
THERE, LOST, MODEL = 1, 2, 3  # streams of random numbers


@dataclass(frozen=True, eq=False)
class Availability:
    """Probabilities of K clients.

    Args:
      probability: [T, K] of being there, in rounds t modulo T.
      lost: [K] of being lost in the middle of a round.
    """

    probability: np.ndarray
    lost: np.ndarray

    def there(self, seed: int, round: int) -> np.ndarray:
        """Which clients are there, [K] bool."""
        chances = self.probability[round % len(self.probability)]
        return _random(seed, round, THERE).random(len(chances)) < chances

    def stay(self, seed: int, round: int) -> np.ndarray:
        """Which clients, if they are there, are so until the round ends, [K] bool."""
        return _random(seed, round, LOST).random(len(self.lost)) >= self.lost


def _random(seed: int, round: int, what: int) -> np.random.Generator:
    counter = np.array([0, 0, 2**63 + what, 0], np.uint64)  # a list of such numbers would be rounded to floats
    return np.random.Generator(np.random.Philox(key=[seed, round], counter=counter))


def availability(source: str | None, lost: float, clients: int, seed: int) -> Availability | None:
    """What an experiment's options say; None where all clients are always there.

    Args:
      source: "model", the path of an npz file with `probability` [K] or [T, K] and perhaps `lost` [K], or None.
      lost: share of the clients that are lost in the middle of each round.

    Raises:
      UserError: the file holds something else, or of another number of clients, says itself who is lost, or nobody is
        ever there.
    """
    if source is None and not lost:
        return None
    shares: Any = np.full(clients, lost)
    if source is None:
        return Availability(np.ones((1, clients), np.float32), shares)
    if source == "model":
        random = _random(seed, 0, MODEL)
        zone, most = random.random(clients), random.uniform(0.3, 1, clients)
        swing = (1 + np.sin(2 * np.pi * (np.arange(DAY)[:, None] / DAY + zone))) / 2
        return Availability(np.minimum(1, most * swing + most / 10).astype(np.float32), shares)
    arrays = read_arrays(Path(source).expanduser(), ("probability", "lost"))
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
