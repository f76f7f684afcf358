"""Partitioners: which client holds which sample, as a pure function of labels, options and seed.

Letters: K clients, C classes, n samples. Randomness comes from the legacy NumPy generator and from Python's
`random`, each an instance of its own seeded with `seed`, so that splits published with these streams come out
index by index and nothing global is touched.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_pcdd.data.dealing import assign_classes, cut, deal, draw, shuffle
from fedjax_pcdd.errors import UserError, nearest

PARTITIONS = {
    "dirichlet": "every class is spread over the clients by proportions drawn from Dirichlet(beta)",
    "pcdd": "P{clients}C{classes_per_client}: every client owns a fixed number of classes and no other",
    "iid": "a random permutation cut into equal parts",
    "natural": "one client per writer, speaker, centre or domain of the data set",
}


class Partition(NamedTuple):
    """Index lists of all clients: K int64 arrays into the training samples, K into the test samples."""

    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]


def partition(
    name: str,
    y_train: ArrayLike,
    y_test: ArrayLike,
    *,
    num_classes: int,
    clients: int,
    seed: int,
    beta: float = 0.5,
    classes_per_client: int = 2,
    retry: bool = True,
    min_size: int = 10,
    doubled: bool = False,
    groups: tuple[ArrayLike, ArrayLike] | None = None,
) -> Partition:
    """Split a data set by the partitioner `name`, one of `PARTITIONS`.

    Args:
      name: partitioner; the arguments that it does not know are ignored.
      y_train: [n_train] integer labels in [0, C).
      y_test: [n_test] integer labels in [0, C), possibly none.
      num_classes: C; may exceed the number of labels that occur.
      clients: K; `natural` makes one of every group.
      seed: in [0, 2**32).
      beta: Dirichlet concentration, > 0 (`dirichlet`).
      classes_per_client: classes each client owns (`pcdd`).
      retry: draw again until every client has `min_size` training samples (`dirichlet`).
      min_size: least number of training samples of a client (`dirichlet` with `retry`).
      doubled: reproduce the published FedMR allocation, see `pcdd`.
      groups: writer or domain of each training and of each test sample (`natural`).

    Raises:
      UserError: an unknown name or an option out of its range.
    """
    if name not in PARTITIONS:
        raise UserError(f"unknown partition '{name}': {nearest(name, PARTITIONS)}")
    match name:
        case "dirichlet":
            rule = {"beta": beta, "retry": retry, "min_size": min_size, "num_classes": num_classes}
            return dirichlet(y_train, y_test, clients=clients, seed=seed, **rule)
        case "pcdd":
            rule = {"classes_per_client": classes_per_client, "num_classes": num_classes, "doubled": doubled}
            return pcdd(y_train, y_test, clients=clients, seed=seed, **rule)
        case "iid":
            return iid(y_train, y_test, clients=clients, seed=seed)
    if groups is None:
        raise UserError("this data set names no writers or domains: choose another `partition` than natural.")
    return natural(*groups)


def dirichlet(
    y_train: ArrayLike,
    y_test: ArrayLike | None,
    *,
    clients: int,
    num_classes: int,
    beta: float,
    seed: int,
    retry: bool = True,
    min_size: int = 10,
    max_tries: int = 2000,
) -> Partition:
    """Dirichlet split of FedMR, FedGELA and MOON, with test sets that follow the training proportions.

    Class by class: shuffle, draw q ~ Dirichlet(beta), set q_k = 0 for clients that hold n/K samples or more,
    renormalise, cut. The cap is applied to training and test lists separately, so their proportions can
    differ slightly. Lists are shuffled at the end. Where no finite weight remains (every client is full, or
    a tiny beta has underflowed), the class goes to the client with the fewest samples.

    Args:
      y_train: [n_train] integer labels.
      y_test: [n_test] integer labels; None or empty splits the training samples only.
      clients: K.
      num_classes: C.
      beta: concentration, > 0; the smaller, the fewer classes a client sees.
      seed: in [0, 2**32).
      retry: draw both lists again until every client has `min_size` training samples. False is the
        published personal split, in which a client can stay empty.
      min_size: least number of training samples of a client.
      max_tries: draws before giving up.

    Raises:
      UserError: an option out of range, or `min_size` out of reach.
    """
    rng = _generator(clients, seed)
    if not 0 < beta < np.inf:
        raise UserError(f"`beta` must be a positive number, not {beta}.")
    splits = [_positions(y, num_classes) for y in (y_train, () if y_test is None else y_test)]
    wanted = min_size if retry else 0
    samples = sum(map(len, splits[0]))
    if samples < clients * wanted:
        raise UserError(
            f"{samples} training samples cannot give {clients} clients {wanted} each: "
            "use fewer `clients` or a smaller `min_samples`."
        )
    for _ in range(max_tries):
        shuffled, shares = zip(*draw(splits, clients, beta, rng), strict=True)
        if shares[0].sum(0).min() >= wanted:
            train, test = map(cut, shuffled, shares)
            return Partition(shuffle(train, rng), shuffle(test, rng))
    raise UserError(
        f"no Dirichlet draw in {max_tries} gave every client {wanted} samples: "
        "use a larger `beta`, fewer `clients` or a smaller `min_samples`."
    )


def pcdd(
    y_train: ArrayLike,
    y_test: ArrayLike,
    *,
    clients: int,
    classes_per_client: int,
    num_classes: int,
    seed: int,
    doubled: bool = False,
) -> Partition:
    """P{clients}C{classes_per_client}: partially class-disjoint clients (FedMR, appendix C.1.2).

    Classes are dealt in order until each has an owner, then at random; the samples of a class are shuffled
    and shared equally among its owners, test samples by the same assignment. Lists run class by class and
    are not shuffled. `classes_per_client == num_classes` means IID: the result is that of `iid`.

    Args:
      y_train: [n_train] integer labels.
      y_test: [n_test] integer labels, possibly none.
      clients: K, with K * classes_per_client >= C.
      classes_per_client: number of classes each client owns, at most C. Where a class has fewer samples than
        owners, the last of them get none of it.
      num_classes: C.
      seed: in [0, 2**32).
      doubled: deal the training samples twice to the same owners, as the published FedMR code does: every
        sample appears twice, on one client or on two. IID is not affected.

    Raises:
      UserError: the classes cannot be dealt.
    """
    rng = _generator(clients, seed)
    train, test = _positions(y_train, num_classes), _positions(y_test, num_classes)
    if not 1 <= classes_per_client <= num_classes:
        raise UserError(f"`classes_per_client` must lie in [1, {num_classes}], not {classes_per_client}.")
    if clients * classes_per_client < num_classes:
        raise UserError(
            f"{clients} clients with {classes_per_client} classes each leave some of {num_classes} classes "
            "without an owner: raise `clients` or `classes_per_client`."
        )
    if classes_per_client == num_classes:
        return iid(y_train, y_test, clients=clients, seed=seed)
    owned = assign_classes(clients, classes_per_client, num_classes, seed)
    dealt = deal(train, owned, rng)
    if doubled:
        again = deal(train, owned, rng)
        dealt = tuple(np.concatenate(pair) for pair in zip(dealt, again, strict=True))
    return Partition(dealt, deal(test, owned, rng))


def iid(y_train: ArrayLike, y_test: ArrayLike, *, clients: int, seed: int) -> Partition:
    """Permute the training samples, then the test samples, and cut each into K parts (so lists are shuffled).

    Args:
      y_train: [n_train] labels; only their number matters.
      y_test: [n_test] labels, possibly none.
      clients: K; the first n mod K clients get one sample more.
      seed: in [0, 2**32).

    Raises:
      UserError: `clients` or `seed` out of range.
    """
    rng = _generator(clients, seed)
    train, test = (rng.permutation(np.arange(np.size(y), dtype=np.int64)) for y in (y_train, y_test))
    return Partition(tuple(np.array_split(train, clients)), tuple(np.array_split(test, clients)))


def natural(groups_train: ArrayLike, groups_test: ArrayLike) -> Partition:
    """One client per distinct group (writer, centre, domain), in increasing order of the group's value.

    A group that occurs in one of the two sets only is a client whose other list is empty. Lists keep the
    order of the data set; they are not shuffled.

    Args:
      groups_train: [n_train] group of each training sample.
      groups_test: [n_test] group of each test sample.
    """
    groups = [np.asarray(g) for g in (groups_train, groups_test)]
    values = np.unique(np.concatenate([g for g in groups if g.size] or [()]))
    return Partition(*(tuple(np.flatnonzero(g == v).astype(np.int64) for v in values) for g in groups))


def class_counts(y: ArrayLike, lists: Sequence[np.ndarray], num_classes: int) -> np.ndarray:
    """Number of samples n[k, c] of each class on each client.

    Args:
      y: [n] integer labels.
      lists: K index arrays into `y`.
      num_classes: C.

    Returns:
      [K, C] int64.
    """
    owner = np.repeat(np.arange(len(lists)), [len(indices) for indices in lists])
    labels = np.asarray(y)[np.concatenate(lists)]
    counts = np.bincount(owner * num_classes + labels, minlength=len(lists) * num_classes)
    return counts.astype(np.int64).reshape(len(lists), num_classes)


def _generator(clients: int, seed: int) -> np.random.RandomState:
    if clients < 1:
        raise UserError(f"`clients` must be at least 1, not {clients}.")
    if not 0 <= seed < 2**32:
        raise UserError(f"`seed` must lie in [0, 2**32), not {seed}.")
    return np.random.RandomState(seed)


def _positions(y: ArrayLike, num_classes: int) -> list[np.ndarray]:
    """Positions of each label in increasing order: C int64 arrays."""
    labels = np.asarray(y)
    if labels.size and not (labels.min() >= 0 and labels.max() < num_classes):
        raise UserError(f"labels must lie in [0, {num_classes}), not in [{labels.min()}, {labels.max()}].")
    return [np.flatnonzero(labels == c).astype(np.int64) for c in range(num_classes)]
