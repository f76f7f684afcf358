"""Partitions: which client holds which sample, as a pure function of labels, options and seed.

Letters: K clients, C classes, n samples. Random numbers come from separate instances of NumPy's legacy generator and
of Python's `random`, both seeded with `seed`, so that splits published with these streams are reproduced index by
index and no global state is touched.
"""

import inspect
import random
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedjax_pcdd.data.lists import Lists, Partition, check_labels, checked, cut, load_partition
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.registry import Registry, from_outside, located, nearest_part

OPTIONS = (  # arguments that a partition function can take
    *("y_train", "y_test", "num_classes", "clients", "seed", "beta", "classes_per_client", "retry", "min_size"),
    *("doubled", "groups"),
)
CLIENTS = 10  # default for partitions that take `clients`


def is_file(name: str) -> bool:
    """Whether a partition's name is that of a file of index lists."""
    return name.endswith(".npz")


def has_clients(name: str) -> bool:
    """Whether a partition can determine the number of clients itself, as a file or a function from outside can."""
    return name == "natural" or name not in OWN


def asked_for(name: str) -> frozenset[str] | None:
    """Options that a function from outside has parameters for; None for files and for this package's partitions.

    Raises:
      UserError: there is no such function, or it requires an argument that does not exist.
    """
    if is_file(name) or name in OWN:
        return None
    return frozenset(_taken(name, PARTITIONS.find(name), dict.fromkeys(OPTIONS)))


def check_name(name: str) -> None:
    """Raise a UserError if there is no such partition; files and import paths are checked only when they are used."""
    if not (is_file(name) or PARTITIONS.knows(name)):
        raise UserError(f"unknown partition '{name}': {nearest_part(name, PARTITIONS)}")


def partition(name: str, y_train: ArrayLike, y_test: ArrayLike, **options: Any) -> Partition:
    """Split a data set with a partition of this package or from outside.

    Args:
      name: one of `PARTITIONS`, an import path, or a file of index lists.
      y_train: [n_train] integer labels in [0, C).
      y_test: [n_test] the same, may be empty.
      options: any of `OPTIONS`; each partition receives those that it has parameters for, and 10 for `clients` if that
        is None. A function from outside returns the training lists, or training and test lists.

    Raises:
      UserError: the partition is unknown, an option is out of range, or a function from outside fails or returns lists
        that do not fit, or others in a second call.
    """
    check_name(name)
    if is_file(name):
        file = located(name)
        lists = load_partition(file)
        check_labels(file, np.asarray(y_train), np.asarray(y_test))
        return checked(lists, y_train, y_test, name)
    function = PARTITIONS.find(name)
    requested = options.get("clients")
    available = {"y_train": np.asarray(y_train), "y_test": np.asarray(y_test), **options}
    available["clients"] = CLIENTS if requested is None else requested
    arguments = _taken(name, function, available)
    if function in OWN.values():
        return function(**arguments)
    result = checked(_called(name, function, arguments), y_train, y_test, name)
    with warnings.catch_warnings(action="ignore"):  # said already
        again = checked(_called(name, function, arguments), y_train, y_test, name)
    for one, other in zip(map(Lists.of, result), map(Lists.of, again), strict=True):
        if not (np.array_equal(one.flat, other.flat) and np.array_equal(one.sizes, other.sizes)):
            raise UserError(f"{name} gives other lists each time, so that no run could be resumed: draw by `seed`.")
    num_lists, expected = len(result.train), arguments.get("clients", requested)
    if expected not in (None, num_lists):
        advice = "give as many" if "clients" in arguments else "drop it, as the function does not ask for it"
        raise UserError(f"{name} gives {num_lists} lists where `clients` is {expected}: {advice}.")
    return result


def _called(name: str, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What a function from outside returns for a copy of the arguments, as it may shuffle or sort in place."""
    with from_outside(f"partition {name} fails"):
        return function(**deepcopy(arguments))


def _taken(name: str, function: Any, available: dict[str, Any]) -> dict[str, Any]:
    """Those of the available arguments that a function has parameters for; UserError if it requires another one."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # not a function, or one in C without a signature
        raise UserError(f"partition {name} must be a function of some of {', '.join(available)}.") from None
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return available
    required = (name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL)
    missing = [name for name in required if name not in available]
    if missing:
        raise UserError(f"{name} asks for {missing[0]}, which there is not: take some of {', '.join(available)}.")
    return {name: available[name] for name in parameters if name in available}


def dirichlet(
    y_train: ArrayLike,
    y_test: ArrayLike | None,
    *,
    clients: int,
    num_classes: int,
    seed: int,
    beta: float = 0.5,
    retry: bool = True,
    min_size: int = 10,
    max_tries: int = 2000,
) -> Partition:
    """Spread every class over the clients by proportions drawn from Dirichlet(beta), as FedMR, FedGELA and MOON do.

    Class by class: shuffle, draw q ~ Dirichlet(beta), set q_k = 0 for clients that hold n/K samples or more,
    renormalise, cut. The cap is applied to training and test lists separately, as published: where a client is full in
    one of them alone, a class can go elsewhere in the other, so that a client can be tested on classes that it does not
    train on. Lists are shuffled at the end. Where no finite weight remains (every client is full, or a tiny beta has
    underflowed), the class goes to the client with the fewest samples.

    Args:
      y_train: [n_train] integer labels.
      y_test: [n_test] integer labels; None or empty splits the training samples only.
      clients: K.
      num_classes: C; may exceed the number of labels that occur.
      seed: in [0, 2**32).
      beta: concentration, > 0; the smaller, the fewer classes a client sees.
      retry: draw both lists again until every client has `min_size` training samples. False is the
        published personal split, in which a client can stay empty.
      min_size: least number of training samples of a client.
      max_tries: draws before giving up.

    Raises:
      UserError: an option out of range, or `min_size` out of reach.
    """
    rng = _generator(clients, seed, beta)
    splits = [_positions(y, num_classes) for y in (y_train, () if y_test is None else y_test)]
    least = min_size if retry else 0
    _check_enough(sum(map(len, splits[0])), clients, least)
    best = 0
    for _ in range(max_tries):
        drawn = _draw(splits, clients, beta, rng)
        smallest = int(drawn[0][1].sum(0).min())
        best = max(best, smallest)
        if smallest >= least:
            train, test = (cut(np.concatenate(shuffled), shares) for shuffled, shares in drawn)
            for indices in (*train, *test):  # views, shuffled in place
                rng.shuffle(indices)
            return Partition(train, test)
    raise UserError(
        f"no Dirichlet draw in {max_tries} gave every client {least} samples (the best left one with {best}): "
        "use a larger `beta`, fewer `clients` or a smaller `min_samples`."
    )


def _draw(
    splits: list[list[np.ndarray]], clients: int, beta: float, rng: np.random.RandomState
) -> list[tuple[list[np.ndarray], np.ndarray]]:
    """Draw once, with the same proportions for all splits: for each its shuffled classes, and their shares [C, K]."""
    shuffled = [[indices.copy() for indices in split] for split in splits]
    shares = [np.zeros((len(split), clients), np.int64) for split in splits]
    sizes = [np.zeros(clients, np.int64) for _ in splits]
    caps = [sum(map(len, split)) / clients for split in splits]
    for c in range(len(splits[0])):
        for split in shuffled:
            rng.shuffle(split[c])
        q = rng.dirichlet(np.repeat(beta, clients))
        for split, share, size, cap in zip(shuffled, shares, sizes, caps, strict=True):
            if not len(split[c]):
                continue
            weights = np.where(size < cap, q, 0.0)
            if not 0 < weights.sum() < np.inf:
                weights = np.where(np.arange(clients) == np.argmin(size), 1.0, 0.0)
            share[c] = _in_proportion(len(split[c]), weights)
            size += share[c]
    return list(zip(shuffled, shares, strict=True))


def _in_proportion(samples: int, weights: np.ndarray) -> np.ndarray:
    """Number of samples for each of the weights [K]; the running sum of the weights is rounded down."""
    cuts = (np.cumsum(weights / weights.sum()) * samples).astype(np.int64)[:-1]
    return np.diff(cuts, prepend=0, append=samples)


def pcdd(
    y_train: ArrayLike,
    y_test: ArrayLike,
    *,
    clients: int,
    num_classes: int,
    seed: int,
    classes_per_client: int = 2,
    doubled: bool = False,
) -> Partition:
    """P{clients}C{classes_per_client}: every client owns a fixed number of classes (FedMR, appendix C.1.2).

    Classes are dealt in order until each has an owner, then at random; the samples of a class are shuffled
    and shared equally among its owners, test samples by the same assignment. Lists run class by class and
    are not shuffled. `classes_per_client == num_classes` means IID: the result is that of `iid`.

    Args:
      y_train, y_test: [n] integer labels; y_test may be empty.
      clients: K, with K * classes_per_client >= C.
      num_classes: C.
      seed: in [0, 2**32).
      classes_per_client: number of classes each client owns, at most C. Where a class has fewer samples than
        owners, its last owners get none.
      doubled: deal the training samples twice to the same owners, as the published FedMR code does: every
        sample appears twice, on one client or on two. IID is not affected.

    Raises:
      UserError: the classes cannot be dealt.
    """
    rng = _generator(clients, seed)
    train, test = _positions(y_train, num_classes), _positions(y_test, num_classes)
    if classes_per_client == num_classes:
        return iid(y_train, y_test, clients=clients, seed=seed)
    owned = _assign_classes(clients, classes_per_client, train, seed)
    dealt = _deal(train, owned, rng)
    if doubled:
        dealt = Lists.of([np.concatenate(pair) for pair in zip(dealt, _deal(train, owned, rng), strict=True)])
    return Partition(dealt, _deal(test, owned, rng))


def _assign_classes(clients: int, classes_per_client: int, train: list[np.ndarray], seed: int) -> np.ndarray:
    """Which client owns which class, [C, K] bool: dealt in order until every class has an owner, then at random.

    A warning names clients that own only classes without a sample in `train`, the samples of each of the C classes.
    """
    num_classes = len(train)
    if not 1 <= classes_per_client <= num_classes:
        raise UserError(f"`classes_per_client` must lie in [1, {num_classes}], not {classes_per_client}.")
    if clients * classes_per_client < num_classes:
        raise UserError(
            f"{clients} clients with {classes_per_client} class{'es' * (classes_per_client > 1)} each leave some of "
            f"{num_classes} classes without an owner: raise `clients` or `classes_per_client`."
        )
    rng = random.Random(seed)
    fresh = iter(range(num_classes))
    owned = np.zeros((clients, num_classes), bool)
    for client_classes in owned:
        for _ in range(classes_per_client):
            c = next(fresh, None)
            while c is None or client_classes[c]:
                c = rng.randint(0, num_classes - 1)
            client_classes[c] = True
    idle = np.flatnonzero(~owned[:, [len(indices) > 0 for indices in train]].any(1))
    if len(idle):
        warnings.warn(
            f"{len(idle)} of {clients} clients, the first of them client {idle[0]}, get only classes without training "
            "samples: number classes from 0 without gaps, or choose another partition.",
            stacklevel=4,
        )
    return owned.T


def _deal(positions: list[np.ndarray], owned: np.ndarray, rng: np.random.RandomState) -> Lists:
    """Permute each class and divide it equally among its owners, in client order; K lists, each class by class."""
    shares = np.zeros(owned.shape, np.int64)
    for share, owners, indices in zip(shares, map(np.flatnonzero, owned), positions, strict=True):
        share[owners] = len(indices) // len(owners)
        share[owners[: len(indices) % len(owners)]] += 1
    return cut(np.concatenate([rng.permutation(indices) for indices in positions]), shares)


def extended_dirichlet(
    y_train: ArrayLike,
    y_test: ArrayLike,
    *,
    clients: int,
    num_classes: int,
    seed: int,
    beta: float = 0.5,
    classes_per_client: int = 2,
) -> Partition:
    """Every client owns a fixed number of classes and gets a share of each, drawn from Dirichlet(beta).

    Classes are assigned as in `pcdd`; each is spread over its owners by proportions drawn from Dirichlet(beta), test
    samples by the same proportions. Li and Lyu, "Convergence Analysis of Sequential Federated Learning on
    Heterogeneous Data", NeurIPS 2023. A client may stay empty if beta is tiny.

    Args:
      y_train, y_test: [n] integer labels; y_test may be empty.
      beta: concentration, > 0; large values give `pcdd`.

    Raises:
      UserError: the classes cannot be dealt, or an option is out of range.
    """
    rng = _generator(clients, seed, beta)
    splits = [_positions(y, num_classes) for y in (y_train, y_test)]
    owned = _assign_classes(clients, classes_per_client, splits[0], seed)
    shares = [np.zeros((num_classes, clients), np.int64) for _ in splits]
    for c, owners in enumerate(owned):
        q = _proportions(int(owners.sum()), beta, rng)
        for split, share in zip(splits, shares, strict=True):
            share[c, owners] = _in_proportion(len(split[c]), q)
    permuted = (np.concatenate([rng.permutation(indices) for indices in split]) for split in splits)
    return Partition(*map(cut, permuted, shares))


def _proportions(count: int, beta: float, rng: np.random.RandomState) -> np.ndarray:
    """Draw from Dirichlet(beta), [count]; where a tiny beta underflows its limit, all for one entry at random."""
    q = rng.dirichlet(np.full(count, beta))
    return q if np.isfinite(q).all() else np.eye(count)[rng.randint(count)]


def quantity(
    y_train: ArrayLike, y_test: ArrayLike, *, clients: int, seed: int, beta: float = 0.5, min_size: int = 10
) -> Partition:
    """Clients of unequal sizes drawn from Dirichlet(beta), each with all classes (quantity skew of NIID-Bench).

    Li et al., "Federated Learning on Non-IID Data Silos", ICDE 2022. Test samples by the same proportions.

    Args:
      y_train, y_test: [n] labels; only their number matters.
      min_size: training samples that each client gets before the rest is divided by the draw.

    Raises:
      UserError: an option is out of range, or there are too few samples.
    """
    rng = _generator(clients, seed, beta)
    _check_enough(np.size(y_train), clients, min_size)
    sizes = min_size + _in_proportion(np.size(y_train) - clients * min_size, _proportions(clients, beta, rng))
    tests = _in_proportion(np.size(y_test), sizes.astype(float))
    return Partition(*(Lists(rng.permutation(n.sum()), n) for n in (sizes, tests)))


def iid(y_train: ArrayLike, y_test: ArrayLike, *, clients: int, seed: int) -> Partition:
    """Permute the training samples, then the test samples, and cut each into K parts (so lists are shuffled).

    The first n mod K clients get one more sample; only the number of labels matters.
    """
    rng = _generator(clients, seed)
    train, test = (rng.permutation(np.arange(np.size(y), dtype=np.int64)) for y in (y_train, y_test))
    return Partition(tuple(np.array_split(train, clients)), tuple(np.array_split(test, clients)))


def natural(groups: tuple[ArrayLike, ArrayLike] | None) -> Partition:
    """One client per distinct group (writer, speaker, centre, domain), in increasing order of the group's value.

    A group that occurs in only one of the two sets is a client whose other list is empty. Lists keep the
    order of the data set; they are not shuffled.

    Args:
      groups: group of each training sample [n_train] and of each test sample [n_test].

    Raises:
      UserError: `groups` is None.
    """
    if groups is None:
        raise UserError("this data set names no writers or domains: choose another `partition` than natural.")
    arrays = [np.asarray(g) for g in groups]
    values = np.unique(np.concatenate([np.unique(g) for g in arrays if g.size] or [()]))
    owners = [np.searchsorted(values, g) for g in arrays]
    return Partition(
        *(Lists(np.argsort(owner, kind="stable"), np.bincount(owner, minlength=len(values))) for owner in owners)
    )


OWN = {f.__name__: f for f in (dirichlet, pcdd, extended_dirichlet, quantity, iid, natural)}
PARTITIONS: Registry[Callable[..., Any]] = Registry("partition", "partitions", OWN)
"""Functions that spread samples over clients, by name."""


def _generator(clients: int, seed: int, beta: float = 1.0) -> np.random.RandomState:
    if clients < 1:
        raise UserError(f"`clients` must be at least 1, not {clients}.")
    if not 0 <= seed < 2**32:
        raise UserError(f"`seed` must lie in [0, 2**32), not {seed}.")
    if not 0 < beta < np.inf:
        raise UserError(f"`beta` must be a positive number, not {beta}.")
    return np.random.RandomState(seed)


def _check_enough(samples: int, clients: int, least: int) -> None:
    if samples < clients * least:
        raise UserError(
            f"{samples} training samples cannot give {clients} clients {least} each: "
            "use fewer `clients` or a smaller `min_samples`."
        )


def _positions(y: ArrayLike, num_classes: int) -> list[np.ndarray]:
    """Positions of each label in increasing order: C int64 arrays."""
    labels = np.asarray(y)
    if labels.size and not (labels.min() >= 0 and labels.max() < num_classes):
        raise UserError(f"labels must lie in [0, {num_classes}), not in [{labels.min()}, {labels.max()}].")
    counts = np.bincount(labels, minlength=num_classes) if labels.size else np.zeros(num_classes, int)
    return np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
