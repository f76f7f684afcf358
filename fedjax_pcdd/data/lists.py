"""The index lists of all clients that make up a partition, in memory and in files.

A file is the `partition.npz` of any run, or an npz archive of lists `train_0`, `train_1`, ... and, unless test
samples are to be divided like the training samples, `test_0`, `test_1`, ... Letters: K clients, C classes, n samples.
"""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from fedjax_pcdd.data.npz import read_arrays
from fedjax_pcdd.errors import UserError

LABELS = "labels"  # in the file of a run: number and checksum of the data set's labels


class Lists(Sequence[np.ndarray]):
    """The lists of K clients, concatenated in a single array so that a client costs no Python object.

    Attributes:
      flat: [n] int64 positions of samples.
      sizes: [K] int64, number of samples of each client.
      starts: [K] int64, where each client's list begins.
    """

    def __init__(self, flat: ArrayLike, sizes: ArrayLike):
        self.flat, self.sizes = np.asarray(flat, np.int64), np.asarray(sizes, np.int64)
        self.starts = np.cumsum(self.sizes) - self.sizes

    @classmethod
    def of(cls, lists: Sequence[np.ndarray]) -> "Lists":
        """Convert any sequence of index arrays."""
        if isinstance(lists, Lists):
            return lists
        flat = np.concatenate([np.zeros(0, np.int64), *lists], dtype=np.int64, casting="unsafe")
        return cls(flat, list(map(len, lists)))

    @classmethod
    def join(cls, several: Sequence[Sequence[np.ndarray]]) -> "Lists":
        """Concatenate the lists of several partitions."""
        lists = [cls.of(part) for part in several]
        return cls(np.concatenate([part.flat for part in lists]), np.concatenate([part.sizes for part in lists]))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, k: Any) -> Any:
        """The list of client k, a view; a tuple of lists for a slice of clients."""
        if isinstance(k, slice):
            return tuple(self[i] for i in range(*k.indices(len(self))))
        return self.flat[self.starts[k] : self.starts[k] + self.sizes[k]]


class Partition(NamedTuple):
    """Index lists of all clients.

    Attributes:
      train: K int64 arrays, positions of each client's training samples in the data set.
      test: K int64 arrays, the same for its test samples.
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
    """Test lists that divide every class in proportion to the clients' training samples, in client order."""
    y_train, y_test = np.asarray(y_train), np.asarray(y_test)
    if not y_test.size:
        return Lists([], np.zeros(len(train)))
    num_classes = 1 + max(int(y_test.max()), int(y_train.max(initial=0)))
    counts, tests = class_counts(y_train, train, num_classes), np.bincount(y_test, minlength=num_classes)
    ends = np.rint(np.cumsum(counts, 0) / np.maximum(counts.sum(0), 1) * tests).astype(int)
    members = np.argsort(y_test, kind="stable")
    members = members[(counts.sum(0) > 0)[y_test[members]]]  # a class without training samples is not tested
    return cut(members, np.diff(ends, axis=0, prepend=0).T)


def cut(members: np.ndarray, shares: np.ndarray) -> Lists:
    """The lists of the K clients, class by class, from samples ordered by class and shares [C, K]."""
    classes, clients = shares.shape
    owners = np.repeat(np.tile(np.arange(clients), classes), shares.ravel())
    return Lists(members[np.argsort(owners, kind="stable")], shares.sum(0))


def save_partition(
    partition: Partition, path: str | Path, more: Mapping[str, Lists], labels: Sequence[np.ndarray] | None = None
) -> None:
    """Write a partition and further lists to an npz file: for each the concatenated lists, starts and sizes.

    Args:
      labels: training and test labels of the data set, so that `check_labels` can tell it from another.
    """
    arrays = {}
    for name, index_lists in (*partition._asdict().items(), *more.items()):
        lists = Lists.of(index_lists)
        arrays |= {name: lists.flat, f"{name}_start": lists.starts, f"{name}_size": lists.sizes}
    with open(path, "wb") as file:
        stored: Any = {name: array.astype(np.int32) for name, array in arrays.items()}
        np.savez_compressed(file, **stored | ({} if labels is None else {LABELS: _checksums(labels)}))


def _checksums(labels: Sequence[np.ndarray]) -> np.ndarray:
    """Number and CRC-32 of the labels of each part, [2, 2] int64."""
    parts = [np.ascontiguousarray(y, np.int32) for y in labels]
    return np.array([(len(part), zlib.crc32(part.tobytes())) for part in parts], np.int64)


def check_labels(path: str | Path, *labels: np.ndarray) -> None:
    """Raise a UserError if the partition of a file was made for training and test labels other than these."""
    recorded, current = read_arrays(path, (LABELS,)).get(LABELS), _checksums(labels)
    if recorded is None or recorded.shape != current.shape or np.array_equal(recorded, current):
        return  # an array of another shape is not of a run
    made, present = (f"{train} training and {test} test samples" for train, test in (recorded[:, 0], current[:, 0]))
    raise UserError(
        f"{path} was made for other labels ({made}; here are {present}): use the data set, `train_samples`, "
        "`test_samples`, `seed` and, if it was `natural`, `clients` with which it was made."
    )


def load_validation(path: str | Path) -> Lists | None:
    """Read the clients' validation samples from the partition file of a run; None if it has none."""
    arrays = read_arrays(path, ("validation", "validation_size"))
    return _one_after_the_other(path, "validation", arrays) if len(arrays) == 2 else None


def _one_after_the_other(path: str | Path, part: str, arrays: dict[str, np.ndarray]) -> Lists:
    """Lists of a part from its concatenated samples and its sizes; UserError if they do not fit together."""
    flat, sizes = arrays[part], arrays[f"{part}_size"]
    if any(array.ndim != 1 or (array.size and array.dtype.kind not in "iu") for array in (flat, sizes)):
        raise UserError(f"{path}: {part} and {part}_size must be integers [n], not {flat.dtype} and {sizes.dtype}.")
    total = sum(sizes.tolist())  # in integers of Python, which do not wrap around
    if sizes.min(initial=0) < 0 or total != len(flat):
        raise UserError(f"{path}: {part}_size adds up to {total}, but {part} has {len(flat)} samples.")
    return Lists(flat, sizes)


def load_partition(path: str | Path) -> Partition:
    """Read the partition of a file; one of lists `train_0`, ... need not have any test lists.

    Raises:
      UserError: there is no such file, it holds no partition, or a list's number does not fit the others.
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
    """The arrays part_0, part_1, ... in order; none if a number is missing."""
    count = sum(name.startswith(f"{part}_") and name.removeprefix(f"{part}_").isdigit() for name in arrays)
    names = [f"{part}_{k}" for k in range(count)]
    return tuple(arrays[name] for name in names) if all(name in arrays for name in names) else ()


def checked(lists: Any, y_train: ArrayLike, y_test: ArrayLike, source: str) -> Partition:
    """Make a partition of training lists, or of training and test lists; UserError if a list does not fit the labels.

    Args:
      lists: K training lists, a pair of training and test lists, or a `Partition`, whose test lists may be ().
      source: where the lists come from, for messages.
    """
    is_pair = isinstance(lists, tuple | list) and len(lists) == 2 and all(map(_nested, lists))
    train, test = lists if isinstance(lists, Partition) or is_pair else (lists, ())
    if not (several(train) and len(train) and several(test)):
        raise UserError(f"{source} must give a list of samples for each client, or (training lists, test lists).")
    train = _integers(train, len(np.asarray(y_train)), source, "training")
    test = _integers(test, len(np.asarray(y_test)), source, "test") if len(test) else following(train, y_train, y_test)
    if len(train) != len(test):
        raise UserError(f"{source} gives {len(train)} training lists and {len(test)} test lists: give as many of each.")
    return Partition(train, test)


def several(lists: Any) -> bool:
    """Whether a value is a sequence that can hold the lists of clients."""
    return isinstance(lists, list | tuple | Lists) or (isinstance(lists, np.ndarray) and lists.ndim > 0)


def _nested(lists: Any) -> bool:
    """Whether a value is a sequence of lists rather than one list."""
    return several(lists) and (several(lists[0]) if len(lists) else not isinstance(lists, np.ndarray))


def whole_numbers(given: Any, source: str, part: str) -> None:
    """Raise a UserError if the list of a client holds anything but whole numbers."""
    for k, array in enumerate(() if isinstance(given, Lists) else map(_array, given)):
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            kind = f"{array.dtype} {list(array.shape)}"
            raise UserError(f"{source}: the {part} list of client {k} must be integers [n], not {kind}.")


def _array(values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:  # lists of several lengths
        return np.asarray(values, object)


def _integers(index_lists: Any, samples: int, source: str, part: str) -> Lists:
    whole_numbers(index_lists, source, part)
    lists = Lists.of(index_lists)
    outside = np.flatnonzero((lists.flat < 0) | (lists.flat >= samples))
    if len(outside):
        k = np.searchsorted(np.cumsum(lists.sizes), outside[0], side="right")
        raise UserError(f"{source}: the {part} list of client {k} names samples outside of [0, {samples}).")
    return lists
