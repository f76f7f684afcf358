"""A data set and who holds which part of it: arrays, index tables for the device, class counts, a picture.

Letters: K clients, C classes, n samples.
"""

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pcdd.data.partition import Partition, class_counts
from fedjax_pcdd.errors import UserError

MOST_LABELLED_CELLS = 300


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels of a classification problem, with its official training and test sets.

    Args:
      name: as on the command line.
      x_train: [n_train, H, W, channels] uint8 images.
      y_train: [n_train] labels in [0, C), kept as int32.
      x_test: [n_test, H, W, channels] uint8 images; n_test may be 0.
      y_test: [n_test] labels in [0, C), kept as int32.
      num_classes: C.
      class_names: C names, if known.
      groups_train: [n_train] writer, speaker, centre or domain of each training sample, if known.
      groups_test: [n_test] the same for the test samples.
      text: whether the images are windows of T character codes, [n, T, 1, 1], and the classes the characters.

    Raises:
      UserError: the arrays do not fit together.
    """

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    num_classes: int
    class_names: tuple[str, ...] | None = None
    groups_train: np.ndarray | None = None
    groups_test: np.ndarray | None = None
    text: bool = False

    def __post_init__(self):
        for part in ("train", "test"):
            self._check_images(part)
            self._check_labels(part)
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            self._reject(f"x_train {self.x_train.shape} and x_test {self.x_test.shape} differ in image size")
        if (self.groups_train is None) != (self.groups_test is None):
            self._reject("groups must be given for both training and test samples or for neither")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            self._reject(f"class_names must name {self.num_classes} classes, not {len(self.class_names)}")

    def __repr__(self):
        size = "x".join(map(str, self.x_train.shape[1:]))
        samples = f"{len(self.y_train)} + {len(self.y_test)} samples of {size}"
        return f"Dataset('{self.name}', {samples}, {self.num_classes} classes)"

    def _check_images(self, part: str):
        x = getattr(self, f"x_{part}")
        if x.dtype != np.uint8 or x.ndim != 4:
            self._reject(f"x_{part} must be uint8 [n, H, W, channels], not {x.dtype} {list(x.shape)}")

    def _check_labels(self, part: str):
        n, y, groups = (getattr(self, f"{field}_{part}") for field in ("x", "y", "groups"))
        y = np.asarray(y)
        if y.shape != (len(n),) or (groups is not None and len(groups) != len(n)):
            self._reject(f"x_{part}, y_{part} and groups_{part} must have the same length")
        if y.size and not (y.dtype.kind in "iu" and y.min() >= 0 and y.max() < self.num_classes):
            self._reject(f"y_{part} must hold integers in [0, {self.num_classes})")
        object.__setattr__(self, f"y_{part}", y.astype(np.int32))

    def _reject(self, reason: str):
        raise UserError(f"data set '{self.name}': {reason}.")


def largest_groups(dataset: Dataset, count: int) -> Dataset:
    """The data set cut down to the groups (writers, speakers, domains) with the most training samples.

    Args:
      dataset: with groups.
      count: of groups to keep; of equally large ones those with the lower number.

    Raises:
      UserError: there are no groups, or fewer.
    """
    if dataset.groups_train is None or dataset.groups_test is None:
        raise UserError(f"data set '{dataset.name}' names no writers or domains: choose another `partition`.")
    values, sizes = np.unique(dataset.groups_train, return_counts=True)
    if count > len(values):
        raise UserError(f"'{dataset.name}' has {len(values)} groups, not `clients={count}`: lower it or leave it out.")
    kept = values[np.argsort(-sizes, kind="stable")[:count]]
    train, test = np.isin(dataset.groups_train, kept), np.isin(dataset.groups_test, kept)
    return replace(
        dataset,
        x_train=dataset.x_train[train],
        y_train=dataset.y_train[train],
        groups_train=dataset.groups_train[train],
        x_test=dataset.x_test[test],
        y_test=dataset.y_test[test],
        groups_test=dataset.groups_test[test],
    )


class Tables(NamedTuple):
    """All client lists in flat form: client k holds `train[train_start[k] : train_start[k] + train_size[k]]`.

    Every array is int32: `train` and `test` [sum n_k], starts and sizes [K].
    """

    train: np.ndarray
    train_start: np.ndarray
    train_size: np.ndarray
    test: np.ndarray
    test_start: np.ndarray
    test_size: np.ndarray


@dataclass(frozen=True, eq=False)
class Federation:
    """A data set shared out to K clients.

    Raises:
      UserError: the partition has no client or was made for another data set.
    """

    dataset: Dataset
    partition: Partition

    def __post_init__(self):
        if not 1 <= len(self.partition.train) == len(self.partition.test):
            raise UserError("a partition needs as many test lists as training lists, and at least one.")
        for lists, y in zip(self.partition, (self.dataset.y_train, self.dataset.y_test), strict=True):
            indices = np.concatenate(lists)
            if indices.size and not (indices.min() >= 0 and indices.max() < len(y)):
                raise UserError(
                    f"the partition was made for another data set than '{self.dataset.name}': make it anew."
                )

    def __repr__(self):
        return f"Federation({self.num_clients} clients of {self.dataset!r})"

    @property
    def num_clients(self) -> int:
        """K."""
        return len(self.partition.train)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(H, W, channels)."""
        return self.dataset.x_train.shape[1:]

    @property
    def sizes(self) -> np.ndarray:
        """Training samples n_k of each client, [K] int64."""
        return _lengths(self.partition.train)

    @property
    def test_sizes(self) -> np.ndarray:
        """Test samples of each client, [K] int64."""
        return _lengths(self.partition.test)

    @cached_property
    def class_counts(self) -> np.ndarray:
        """Training samples n[k, c] of each class on each client, [K, C] int64."""
        return class_counts(self.dataset.y_train, self.partition.train, self.dataset.num_classes)

    @cached_property
    def test_class_counts(self) -> np.ndarray:
        """Test samples of each class on each client, [K, C] int64."""
        return class_counts(self.dataset.y_test, self.partition.test, self.dataset.num_classes)

    def tables(self) -> Tables:
        """The index tables that go to the device beside the images."""
        return Tables(*_flat(self.partition.train), *_flat(self.partition.test))

    def plot(self, axes: Any = None) -> Any:
        """Draw who holds what, see `heat_map`.

        Args:
          axes: where to draw; None for those of a new figure of pyplot.

        Returns:
          The axes.
        """
        if axes is None:
            import matplotlib.pyplot as plt  # chooses a backend, which nothing else here needs

            axes = plt.figure(figsize=_map_size(self), layout="constrained").add_subplot()
        _draw_map(self, axes)
        return axes

    def save(self, path: str | Path):
        """Write the partition (not the images) to an `.npz` file that `load_partition` reads."""
        with open(path, "wb") as file:
            np.savez_compressed(file, **self.tables()._asdict())


def load_partition(path: str | Path) -> Partition:
    """Read a partition written by `Federation.save`.

    Raises:
      UserError: there is no such file or it holds no partition.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            tables = Tables(*(archive[field] for field in Tables._fields))
    except FileNotFoundError:
        raise UserError(f"there is no partition file {path}: check the path.") from None
    except (KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile):
        raise UserError(f"{path} holds no partition: write it with Federation.save.") from None
    return Partition(
        lists_of(tables.train, tables.train_size),
        lists_of(tables.test, tables.test_size),
    )


def heat_map(federation: Federation, path: str | Path):
    """Draw who holds what: clients across, classes upwards, training samples as colour, absent classes blank.

    Args:
      federation: K clients, C classes; counts are written into the cells where there are few.
      path: picture to write; its suffix sets the format (.png, .pdf, .svg).
    """
    from matplotlib.figure import Figure  # whose start takes longer than that of a run's help

    figure = Figure(figsize=_map_size(federation), dpi=150, layout="constrained")
    _draw_map(federation, figure.add_subplot())
    figure.savefig(path)


def _map_size(federation: Federation) -> tuple[float, float]:
    """Width and height of a heat map's figure, in inches."""
    clients, classes = federation.class_counts.shape
    return float(np.clip(0.5 * clients, 5.0, 13.0)) + 2.0, float(np.clip(0.35 * classes, 2.5, 9.0)) + 1.2


def _draw_map(federation: Federation, axes):
    counts = federation.class_counts
    clients, classes = counts.shape
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(0.5, vmin=0, vmax=max(1, counts.max()))
    shown = np.ma.masked_equal(counts.T, 0)
    image = axes.imshow(shown, aspect="auto", origin="lower", interpolation="nearest", cmap="viridis_r", norm=norm)
    axes.set(xlabel="client", ylabel="class")
    axes.set_title(f"{federation.dataset.name}: {clients} clients, {classes} classes, {counts.sum()} samples")
    _set_ticks(axes, federation)
    axes.figure.colorbar(image, ax=axes, pad=0.02, label="training samples")
    if counts.size <= MOST_LABELLED_CELLS and clients <= 30:
        _write_counts(axes, counts)


def _set_ticks(axes, federation: Federation):
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True, min_n_ticks=1))
    names = federation.dataset.class_names
    if names is not None and len(names) <= 30:
        axes.set_yticks(range(len(names)), labels=names)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=20, integer=True, min_n_ticks=1))


def _write_counts(axes, counts: np.ndarray):
    """Counts in the cells; light letters where the colour is dark."""
    for (k, c), count in np.ndenumerate(counts):
        if count:
            colour = "white" if count > 0.3 * counts.max() else "black"
            axes.text(k, c, str(count), ha="center", va="center", color=colour, fontsize=7)


def _lengths(lists: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([len(indices) for indices in lists], np.int64)


def _flat(lists: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Concatenated lists, first position and length of each, int32."""
    sizes = _lengths(lists)
    starts = np.cumsum(sizes) - sizes
    return np.concatenate(lists).astype(np.int32), starts.astype(np.int32), sizes.astype(np.int32)


def lists_of(flat: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    """The clients' lists of which `Tables` has one after the other and the sizes [K]."""
    return tuple(np.split(flat.astype(np.int64), np.cumsum(sizes)[:-1]))
