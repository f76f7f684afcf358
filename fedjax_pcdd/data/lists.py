"""What a partition is: the index lists of all clients, in memory and in files.

A file is the `partition.npz` of any run, or an npz archive of lists `train_0`, `train_1`, ... and, unless the test
samples are to follow the training samples, `test_0`, `test_1`, ... Letters: K clients, C classes, n samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_pcdd.data.npz import read_arrays
from fedjax_pcdd.errors import UserError


class Lists(Sequence[np.ndarray]):
    """The lists of K clients one after the other in a single array, so that a client costs no Python object.

    Attributes:
      flat: [n] int64 positions of samples.
      sizes: [K] int64, how many of them each client has.
      starts: [K] int64, where each client's begin.
    """

    def __init__(self, flat: ArrayLike, sizes: ArrayLike):
        self.flat, self.sizes = np.asarray(flat, np.int64), np.asarray(sizes, np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes

    @classmethod
    def of(cls, lists: Sequence[np.ndarray]) -> "Lists":
        """Any sequence of index arrays in this form."""
        if isinstance(lists, Lists):
            return lists
        return cls(
            np.concatenate([np.zeros(0, np.int64), *lists], dtype=np.int64, casting="unsafe"), list(map(len, lists))
        )

    @classmethod
    def join(cls, several: Sequence[Sequence[np.ndarray]]) -> "Lists":
        """The lists of several partitions, one partition after the other."""
        lists = [cls.of(one) for one in several]
        return cls(np.concatenate([one.flat for one in lists]), np.concatenate([one.sizes for one in lists]))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, k: Any) -> Any:
        """The list of client k, a view; of a slice of clients a tuple."""
        if isinstance(k, slice):
            return tuple(self[i] for i in range(*k.indices(len(self))))
        return self.flat[self.starts[k] : self.starts[k] + self.sizes[k]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[k] for k in range(len(self)))


class Partition(NamedTuple):
    """Index lists of all clients.

    Attributes:
      train: K int64 arrays, positions of each client's training samples among the data set's.
      test: K int64 arrays, of its test samples.
    """

    train: Sequence[np.ndarray]
    test: Sequence[np.ndarray]


def class_counts(y: ArrayLike, lists: Sequence[np.ndarray], num_classes: int) -> np.ndarray:
    """Number of samples n[k, c] of each class on each client.

    Args:
      y: [n] integer labels in [0, C).
      lists: K index arrays into `y`.

    Returns:
      [K, C] int64.
    """
    lists = Lists.of(lists)
    cells = np.repeat(np.arange(len(lists)) * num_classes, lists.sizes) + np.asarray(y)[lists.flat]
    return np.bincount(cells, minlength=len(lists) * num_classes).reshape(len(lists), num_classes)


def following(train: Sequence[np.ndarray], y_train: ArrayLike, y_test: ArrayLike) -> Lists:
    """Test lists in which every class is cut in proportion to its training samples, in the order of the clients."""
    y_train, y_test = np.asarray(y_train), np.asarray(y_test)
    if not y_test.size:
        return Lists([], np.zeros(len(train)))
    num_classes = 1 + max(int(y_test.max()), int(y_train.max(initial=0)))
    counts, tests = class_counts(y_train, train, num_classes), np.bincount(y_test, minlength=num_classes)
    ends = np.rint(np.cumsum(counts, 0) / np.maximum(counts.sum(0), 1) * tests).astype(int)
    dealt = np.diff(ends, axis=0, prepend=0)
    owners = np.repeat(np.tile(np.arange(len(train)), num_classes), dealt.T.ravel())
    members = np.argsort(y_test, kind="stable")
    ranks = np.arange(len(y_test)) - np.repeat(np.cumsum(tests) - tests, tests)
    members = members[ranks < np.repeat(ends[-1], tests)]  # a class that nobody trains on is nobody's test
    return Lists(members[np.argsort(owners, kind="stable")], dealt.sum(1))


def save_partition(partition: Partition, path: str | Path, more: Mapping[str, Lists]) -> None:
    """Write a partition, and more lists, to an npz file: of each the lists one after the other, starts and sizes."""
    arrays = {}
    for name, given in (*partition._asdict().items(), *more.items()):
        lists = Lists.of(given)
        arrays |= {name: lists.flat, f"{name}_start": lists.starts, f"{name}_size": lists.sizes}
    with open(path, "wb") as file:
        np.savez_compressed(file, **{name: array.astype(np.int32) for name, array in arrays.items()})


def load_validation(path: str | Path) -> Lists | None:
    """The validation samples of the clients in the partition file of a run, if it has any."""
    arrays = read_arrays(path, ("validation", "validation_size"))
    return _one_after_the_other(path, "validation", arrays) if len(arrays) == 2 else None


def _one_after_the_other(path: str | Path, part: str, arrays: dict[str, np.ndarray]) -> Lists:
    """The lists of a part from its samples and its sizes."""
    flat, sizes = arrays[part], arrays[f"{part}_size"]
    if any(one.ndim != 1 or (one.size and one.dtype.kind not in "iu") for one in (flat, sizes)):
        raise UserError(f"{path}: {part} and {part}_size must be integers [n], not {flat.dtype} and {sizes.dtype}.")
    if sizes.min(initial=0) < 0 or sizes.sum() != len(flat):
        raise UserError(f"{path}: {part}_size adds up to {sizes.sum()}, but {part} has {len(flat)} samples.")
    return Lists(flat, sizes)


def load_partition(path: str | Path) -> Partition:
    """The partition of a file; that of lists `train_0`, ... may have no test lists at all.

    Raises:
      UserError: there is no such file, it holds no partition, or a list that is not numbered as the others.
    """
    arrays = read_arrays(path)
    if {"train", "train_size", "test", "test_size"} <= set(arrays):
        return Partition(*(_one_after_the_other(path, part, arrays) for part in ("train", "test")))
    train, test = (_numbered(arrays, part) for part in ("train", "test"))
    if not train or (test and len(test) != len(train)):
        raise UserError(f"{path} holds no partition: it needs train_0, train_1, ... and as many test lists or none.")
    used = {f"{part}_{k}" for part, lists in (("train", train), ("test", test)) for k in range(len(lists))}
    for name in arrays:
        if name.startswith(("train", "test")) and name not in used:
            raise UserError(f"{path}: {name} belongs to no client: number the lists of each kind from 0 without gaps.")
    return Partition(train, test)


def _numbered(arrays: dict[str, np.ndarray], part: str) -> tuple[np.ndarray, ...]:
    """The arrays part_0, part_1, ... in their order."""
    count = sum(name.startswith(f"{part}_") and name.removeprefix(f"{part}_").isdigit() for name in arrays)
    names = [f"{part}_{k}" for k in range(count)]
    return tuple(arrays[name] for name in names) if all(name in arrays for name in names) else ()


def checked(lists: Any, y_train: ArrayLike, y_test: ArrayLike, source: str) -> Partition:
    """The partition of training lists alone, or of both; UserError where one does not fit the labels.

    Args:
      lists: K of training samples, a tuple of two such, or a `Partition`, whose test lists may be ().
      source: for sentences.
    """
    both = isinstance(lists, tuple) and len(lists) == 2 and all(map(_nested, lists))
    train, test = lists if isinstance(lists, Partition) or both else (lists, ())
    if not (several(train) and len(train) and several(test)):
        raise UserError(f"{source} must give a list of samples for each client, or (training lists, test lists).")
    train = _integers(train, len(np.asarray(y_train)), source, "training")
    test = _integers(test, len(np.asarray(y_test)), source, "test") if len(test) else following(train, y_train, y_test)
    if len(train) != len(test):
        raise UserError(f"{source} gives {len(train)} training lists and {len(test)} test lists: give as many of each.")
    return Partition(train, test)


def several(lists: Any) -> bool:
    """Whether something is a sequence that can hold the lists of clients."""
    return isinstance(lists, list | tuple | Lists) or (isinstance(lists, np.ndarray) and lists.ndim > 0)


def _nested(lists: Any) -> bool:
    """Whether something is a sequence of lists, not one list."""
    return isinstance(lists, list | tuple | Lists) and (not len(lists) or several(lists[0]))


def whole_numbers(given: Any, source: str, part: str) -> None:
    """UserError where the list of a client holds anything but whole numbers."""
    for k, one in enumerate(() if isinstance(given, Lists) else map(_array, given)):
        if one.ndim != 1 or (one.size and one.dtype.kind not in "iu"):
            kind = f"{one.dtype} {list(one.shape)}"
            raise UserError(f"{source}: the {part} list of client {k} must be integers [n], not {kind}.")


def _array(one: Any) -> np.ndarray:
    try:
        return np.asarray(one)
    except ValueError:  # lists of several lengths
        return np.asarray(one, object)


def _integers(given: Any, samples: int, source: str, part: str) -> Lists:
    whole_numbers(given, source, part)
    lists = Lists.of(given)
    outside = np.flatnonzero((lists.flat < 0) | (lists.flat >= samples))
    if len(outside):
        k = np.searchsorted(np.cumsum(lists.sizes), outside[0], side="right")
        raise UserError(f"{source}: the {part} list of client {k} names samples outside of [0, {samples}).")
    return lists
