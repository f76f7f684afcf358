"""How partitioners deal: shares of a class by Dirichlet draws, or equal parts among its owners.

Letters: K clients, C classes. A split is C index arrays, the positions of each class; what is dealt are K of them.
Every draw comes from the generator that is passed in, in an order that published splits depend on.
"""

import random

import numpy as np


def draw(
    splits: list[list[np.ndarray]], clients: int, beta: float, rng: np.random.RandomState
) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """One Dirichlet draw, class by class, with the same proportions for all splits.

    Args:
      splits: C index arrays each (training samples, test samples); they stay as they are.
      clients: K.
      beta: concentration, > 0.
      rng: shuffles each class of each split, then draws the class's proportions.

    Returns:
      For each split (its C index arrays, shuffled; how many of each class every client gets [C, K] int64).
    """
    shuffled = [[indices.copy() for indices in split] for split in splits]
    shares = [np.zeros((len(split), clients), np.int64) for split in splits]
    fair = [sum(map(len, split)) / clients for split in splits]
    for c in range(len(splits[0])):
        for split in shuffled:
            rng.shuffle(split[c])
        q = rng.dirichlet(np.repeat(beta, clients))
        for split, share, full in zip(shuffled, shares, fair, strict=True):
            share[c] = _share(len(split[c]), q, share.sum(0), full)
    return list(zip(shuffled, shares, strict=True))


def _share(samples: int, q: np.ndarray, sizes: np.ndarray, full: float) -> np.ndarray:
    """How many of the samples of a class each client gets, [K]; `sizes` is what it holds already."""
    q = np.where(sizes < full, q, 0.0)
    if not 0 < q.sum() < np.inf:
        q = np.where(np.arange(len(q)) == np.argmin(sizes), 1.0, 0.0)
    cuts = (np.cumsum(q / q.sum()) * samples).astype(np.int64)[:-1]
    return np.diff(cuts, prepend=0, append=samples)


def cut(shuffled: list[np.ndarray], shares: np.ndarray) -> tuple[np.ndarray, ...]:
    """Index lists of the K clients, class by class, from what `draw` gives for one split."""
    pieces = [np.split(i, np.cumsum(share)[:-1]) for i, share in zip(shuffled, shares, strict=True)]
    return tuple(np.concatenate(own) for own in zip(*pieces, strict=True))


def shuffle(lists: tuple[np.ndarray, ...], rng: np.random.RandomState) -> tuple[np.ndarray, ...]:
    """Shuffle each list in place, one after another."""
    for indices in lists:
        rng.shuffle(indices)
    return lists


def assign_classes(clients: int, classes_per_client: int, num_classes: int, seed: int) -> list[list[int]]:
    """The classes that each of the K clients owns: in order until every class is dealt, then at random, none twice."""
    rng = random.Random(seed)
    fresh = iter(range(num_classes))
    owned: list[list[int]] = [[] for _ in range(clients)]
    for own in owned:
        for _ in range(classes_per_client):
            c = next(fresh, None)
            while c is None or c in own:
                c = rng.randint(0, num_classes - 1)
            own.append(c)
    return owned


def deal(positions: list[np.ndarray], owned: list[list[int]], rng: np.random.RandomState) -> tuple[np.ndarray, ...]:
    """Shuffle each class and share it equally among its owners, in the order of the clients.

    Args:
      positions: C index arrays.
      owned: the classes of each of the K clients.
      rng: draws one permutation a class.

    Returns:
      K index arrays, class by class.
    """
    pieces: list[list[np.ndarray]] = [[] for _ in owned]
    for c, indices in enumerate(positions):
        owners = [k for k, own in enumerate(owned) if c in own]
        parts = np.array_split(rng.permutation(indices), len(owners))
        for k, part in zip(owners, parts, strict=True):
            pieces[k].append(part)
    return tuple(np.concatenate(own) for own in pieces)
