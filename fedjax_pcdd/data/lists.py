"""Partitions from outside: index lists in a file, or a function of one's own.

A file is the `partition.npz` of any run, or an npz archive of index lists `train_0`, `train_1`, ... and, unless the
test samples are to follow the training samples, `test_0`, `test_1`, ... A function is called with those of `y_train`,
`y_test`, `num_classes`, `clients`, `seed`, `groups` and the options of the built-in partitions that it has as
parameters, and returns the training lists, or training and test lists.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fedjax_pcdd.data import partition as own
from fedjax_pcdd.data.federation import Tables, lists_of
from fedjax_pcdd.data.npz import read_arrays
from fedjax_pcdd.data.partition import PARTITIONS, Partition
from fedjax_pcdd.errors import UserError, nearest
from fedjax_pcdd.registry import Registry, is_import_path, located

PARTITIONERS: Registry[Callable[..., Any]] = Registry("partition", "partitions")
"""Functions from outside that spread samples over clients, by name."""


def is_file(name: str) -> bool:
    """Whether the name of a partition is that of a file of index lists."""
    return name.endswith(".npz")


def has_clients(name: str) -> bool:
    """Whether a partition says by itself how many clients there are."""
    return name == "natural" or is_file(name)


def check_name(name: str) -> None:
    """UserError where there is no such partition; files and import paths are looked at when they are used."""
    if not (is_file(name) or is_import_path(name) or name in PARTITIONS or name in PARTITIONERS):
        raise UserError(f"unknown partition '{name}': {nearest(name, [*PARTITIONS, *PARTITIONERS])}")


def partition(name: str, y_train: ArrayLike, y_test: ArrayLike, **options: Any) -> Partition:
    """Split a data set by a partition of this package or from outside.

    Args:
      name: one of `PARTITIONS`, a registered name, an import path, or a file of index lists.
      y_train, y_test: labels, as for `data.partition.partition`.
      options: as for `data.partition.partition`, which has those of this package.

    Raises:
      UserError: there is none, or its lists do not fit the data set.
    """
    check_name(name)
    if is_file(name):
        return read_lists(located(name), y_train, y_test)
    if name in PARTITIONS:
        return own.partition(name, y_train, y_test, **options)
    function = PARTITIONERS.find(name)
    known = {"y_train": np.asarray(y_train), "y_test": np.asarray(y_test), **options}
    return _checked(function(**_taken(function, known)), y_train, y_test, name)


def read_lists(path: Path, y_train: ArrayLike, y_test: ArrayLike) -> Partition:
    """The partition of a file of index lists; UserError where it cannot be read or does not fit the labels."""
    arrays = read_arrays(path)
    if set(Tables._fields) <= set(arrays):
        tables = Tables(*(arrays[field] for field in Tables._fields))
        lists = lists_of(tables.train, tables.train_size), lists_of(tables.test, tables.test_size)
    else:
        train, test = (_numbered(arrays, part) for part in ("train", "test"))
        if not train or (test and len(test) != len(train)):
            raise UserError(
                f"{path} holds no partition: it needs train_0, train_1, ... and as many test lists or none."
            )
        lists = (train, test) if test else train
    return _checked(lists, y_train, y_test, str(path))


def following(train: Sequence[np.ndarray], y_train: ArrayLike, y_test: ArrayLike) -> tuple[np.ndarray, ...]:
    """Test lists in which every class is cut in proportion to its training samples, in the order of the clients."""
    y_train, y_test = np.asarray(y_train), np.asarray(y_test)
    parts: list[list[np.ndarray]] = [[] for _ in train]
    for label in np.unique(y_test):
        counts = np.array([(y_train[lists] == label).sum() for lists in train])
        members = np.flatnonzero(y_test == label)
        ends = np.rint(np.cumsum(counts) / max(counts.sum(), 1) * len(members)).astype(int)
        for part, stop, start in zip(parts, ends, [0, *ends[:-1]], strict=True):
            part.append(members[start:stop])
    return tuple(np.concatenate(part) if part else np.zeros(0, np.int64) for part in parts)


def _checked(lists: Any, y_train: ArrayLike, y_test: ArrayLike, source: str) -> Partition:
    """Lists of all clients, from training lists alone or both; UserError where one does not fit."""
    both = isinstance(lists, tuple) and len(lists) == 2 and all(map(_nested, lists))
    train = _integers(lists[0] if both else lists, len(np.asarray(y_train)), source, "training")
    test = _integers(lists[1], len(np.asarray(y_test)), source, "test") if both else following(train, y_train, y_test)
    if not train or len(train) != len(test):
        raise UserError(f"{source} gives {len(train)} training lists and {len(test)} test lists: give as many of each.")
    return Partition(train, test)


def _nested(lists: Any) -> bool:
    """Whether something is a sequence of lists, not one list."""
    return isinstance(lists, list | tuple) and (not lists or np.ndim(lists[0]) == 1)


def _integers(lists: Any, samples: int, source: str, part: str) -> tuple[np.ndarray, ...]:
    arrays = tuple(np.asarray(one) for one in lists)
    for k, one in enumerate(arrays):
        if one.size and (one.ndim != 1 or one.dtype.kind not in "iu"):
            given = f"{one.dtype} {list(one.shape)}"
            raise UserError(f"{source}: the {part} list of client {k} must be integers [n], not {given}.")
        if one.size and not 0 <= one.min() <= one.max() < samples:
            raise UserError(f"{source}: the {part} list of client {k} names samples outside of [0, {samples}).")
    return tuple(one.astype(np.int64).reshape(-1) for one in arrays)


def _numbered(arrays: dict[str, np.ndarray], part: str) -> tuple[np.ndarray, ...]:
    """The arrays part_0, part_1, ... in their order."""
    count = sum(name.startswith(f"{part}_") and name.removeprefix(f"{part}_").isdigit() for name in arrays)
    names = [f"{part}_{k}" for k in range(count)]
    return tuple(arrays[name] for name in names) if all(name in arrays for name in names) else ()


def _taken(function: Callable[..., Any], known: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a function has parameters for; those named otherwise have no value here."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return known
    needed = (name for name, p in parameters.items() if p.default is p.empty and p.kind is not p.VAR_POSITIONAL)
    missing = [name for name in needed if name not in known]
    if missing:
        name = getattr(function, "__name__", "the partition")
        raise UserError(f"{name} asks for {missing[0]}, which there is not: take some of {', '.join(known)}.")
    return {name: known[name] for name in parameters if name in known}
