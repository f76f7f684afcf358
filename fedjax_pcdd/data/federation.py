"""A data set distributed over clients: which client holds which samples, with counts and heat maps.

Letters: K clients, C classes.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.lists import Lists, Partition, class_counts, save_partition, several, whole_numbers
from fedjax_pcdd.data.text import last_windows
from fedjax_pcdd.errors import UserError, as_path, check_file, shortened, writing

MOST_LABELLED_CELLS = 300
MOST_DRAWN_CLIENTS = 2000  # if there are more, only every n-th is drawn


@dataclass(frozen=True, eq=False)
class Federation:
    """A data set distributed over K clients.

    Args:
      dataset: the samples.
      partition: which client holds which of them.
      validation: K lists of training samples that are kept out of training, see `hold_out`.

    Raises:
      UserError: the partition has no clients or was made for another data set.
    """

    dataset: Dataset
    partition: Partition
    validation: Lists | None = None

    def __post_init__(self):
        if not isinstance(self.dataset, Dataset):
            raise UserError(f"fp.Federation takes a data set first, not {shortened(self.dataset)}.")
        if not isinstance(self.partition, Partition):
            raise UserError(f"fp.Federation takes an fp.Partition second, not {shortened(self.partition)}.")
        if not all(map(several, self.partition)) or not 1 <= len(self.partition.train) == len(self.partition.test):
            raise UserError("a partition needs as many test lists as training lists, and at least one.")
        for part, lists in zip(("training", "test"), self.partition, strict=True):
            whole_numbers(lists, "the partition", part)
        train, test = map(Lists.of, self.partition)
        object.__setattr__(self, "partition", Partition(train, test))
        validation = train if self.validation is None else self._validation(self.validation)
        for part, lists in (("train", train), ("train", validation), ("test", test)):
            samples = len(getattr(self.dataset, f"y_{part}"))
            outside = lists.flat[(lists.flat < 0) | (lists.flat >= samples)]
            if outside.size:
                raise UserError(
                    f"the partition has {part} sample {outside[0]}, and '{self.dataset.name}' has {samples}, counted "
                    "from 0: make the partition for this data set."
                )
        trained = [] if self.validation is None else np.intersect1d(validation.flat, train.flat)
        if len(trained):
            raise UserError(f"sample {trained[0]} is in a validation and in a training list: take it out of one.")

    def __repr__(self):
        return f"Federation({self.num_clients} clients of {self.dataset!r})"

    def _validation(self, given: Any) -> Lists:
        """The validation lists, converted; UserError if there are not K lists of integers."""
        if not several(given) or len(given) != self.num_clients:
            number = len(given) if several(given) else shortened(given)
            raise UserError(f"{self.num_clients} clients need as many validation lists, not {number}.")
        whole_numbers(given, "the partition", "validation")
        object.__setattr__(self, "validation", lists := Lists.of(given))
        return lists

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
        return Lists.of(self.partition.train).sizes

    @property
    def test_sizes(self) -> np.ndarray:
        """Test samples of each client, [K] int64."""
        return Lists.of(self.partition.test).sizes

    @property
    def tested_sizes(self) -> np.ndarray:
        """Test and validation samples of each client, [K] int64."""
        return self.test_sizes + (0 if self.validation is None else self.validation.sizes)

    @cached_property
    def class_counts(self) -> np.ndarray:
        """Training samples n[k, c] of each class on each client, [K, C] int64."""
        return class_counts(self.dataset.y_train, self.partition.train, self.dataset.num_classes)

    @cached_property
    def test_class_counts(self) -> np.ndarray:
        """Test samples of each class on each client, [K, C] int64."""
        return class_counts(self.dataset.y_test, self.partition.test, self.dataset.num_classes)

    def plot(self, axes: Any = None) -> Any:
        """Draw training samples per client (across) and class (upwards) as colours; absent classes are blank.

        Counts are written into the cells if there are few cells.

        Args:
          axes: where to draw; None for a new pyplot figure.

        Returns:
          The axes.
        """
        if axes is None:
            import matplotlib.pyplot as plt  # here, as it chooses a backend, which nothing else needs

            axes = plt.figure(figsize=_map_size(self.class_counts), layout="constrained").add_subplot()
        _draw_map(map_of(self), axes)
        return axes

    def save(self, path: str | Path):
        """Write the partition (not the images) to an `.npz` file that `load_partition` reads.

        Raises:
          UserError: the file cannot be written.
        """
        file = as_path(path, "path")
        with writing(file, "another path"):
            self.write(file)

    def write(self, path: Path):
        """As `save`, with errors as the operating system raises them."""
        extra_lists = {} if self.validation is None else {"validation": self.validation}
        save_partition(self.partition, path, extra_lists, (self.dataset.y_train, self.dataset.y_test))


def hold_out(federation: Federation, share: float, seed: int) -> Federation:
    """The federation with a share of each client's training samples kept for validation.

    They are drawn class by class: each class of a client gives up its share to within one sample, and the client's
    total is rounded. The draw depends on the seed and the partition alone. Of a text, they are each client's last
    windows, and no window that shares a character with them is trained on.

    Args:
      share: in (0, 1).

    Raises:
      UserError: a client would be left without training samples, or samples are dealt twice.
    """
    lists, y = Lists.of(federation.partition.train), federation.dataset.y_train
    if len(np.unique(lists.flat)) < len(lists.flat):
        advice = "drop `doubled`, or give each sample to one client once"
        raise UserError(f"`validation` cannot be kept out of training where samples are dealt twice: {advice}.")
    owners, chance = np.repeat(np.arange(len(lists)), lists.sizes), np.random.default_rng([seed, *b"validation"])
    if federation.dataset.text:
        kept, held = last_windows(federation.dataset, lists.flat, lists.sizes, share)
    else:
        order = np.lexsort((chance.random(len(owners)), y[lists.flat], owners))  # class by class within each client
        rank = np.arange(len(owners)) - np.repeat(lists.starts, lists.sizes)
        held = np.zeros(len(owners), bool)
        held[order] = np.floor((rank + 1) * share + 0.5) > np.floor(rank * share + 0.5)
        kept = ~held
    train, validation = (Lists(lists.flat[m], np.bincount(owners[m], minlength=len(lists))) for m in (kept, held))
    emptied = np.flatnonzero((train.sizes == 0) & (lists.sizes > 0))
    if len(emptied):
        raise UserError(f"`validation={share:g}` leaves client {emptied[0]} without a training sample: lower it.")
    return replace(federation, partition=Partition(train, federation.partition.test), validation=validation)


class Map(NamedTuple):
    """Data of a heat map: its name, training samples [K, C], and class names, if there are any."""

    name: str
    counts: np.ndarray
    class_names: Sequence[str] | None = None


def map_of(federation: Federation) -> Map:
    """The heat map data of a federation."""
    return Map(federation.dataset.name, federation.class_counts, federation.dataset.class_names)


def read_counts(path: Path) -> Map:
    """Read the training samples from a CSV file with the columns centre, fold, class and count.

    Raises:
      UserError: there is no such file, or it has other columns.
    """
    check_file(path)
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["fold"] == "train"]
        centres, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("centre", "class"))
        counts = np.zeros((len(centres), len(names)), int)
        for row in rows:
            counts[centres.index(row["centre"]), names.index(row["class"])] += int(row["count"])
    except FileNotFoundError:
        raise UserError(f"there is no file of counts {path}: check the path.") from None
    except (KeyError, ValueError, TypeError):
        raise UserError(f"{path} must have the columns centre, fold, class and count.") from None
    if not rows:
        raise UserError(f"{path} has no rows of the fold 'train'.")
    return Map(path.stem, counts, names)


def heat_map(federation: Federation, path: str | Path):
    """Write the picture of `Federation.plot` to a file; its suffix sets the format (.png, .pdf, .svg)."""
    heat_maps([map_of(federation)], path)


def heat_maps(maps: Sequence[Map], path: str | Path):
    """Draw several maps side by side into one file, as `heat_map` does one."""
    from matplotlib.figure import Figure  # here, as its import takes longer than printing a run's help

    widths, heights = zip(*(_map_size(chart.counts) for chart in maps), strict=True)
    figure = Figure(figsize=(sum(widths), max(heights)), dpi=150 if len(maps) == 1 else 100, layout="constrained")
    for axes, chart in zip(figure.subplots(1, len(maps), squeeze=False, width_ratios=widths)[0], maps, strict=True):
        _draw_map(chart, axes)
    figure.savefig(path)


def _map_size(counts: np.ndarray) -> tuple[float, float]:
    """Width and height of a heat map's figure, in inches."""
    clients, classes = counts.shape
    return float(np.clip(0.5 * clients, 5.0, 13.0)) + 2.0, float(np.clip(0.35 * classes, 2.5, 9.0)) + 1.2


def _draw_map(chart: Map, axes):
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    counts, names = chart.counts, chart.class_names
    clients, classes = counts.shape
    norm = PowerNorm(0.5, vmin=0, vmax=max(1, counts.max()))
    step = -(-clients // MOST_DRAWN_CLIENTS)
    shown = np.ma.masked_equal(counts[::step].T, 0)
    extent = (-0.5, clients - 0.5, -0.5, classes - 0.5)
    image = axes.imshow(
        shown, aspect="auto", origin="lower", interpolation="nearest", cmap="viridis_r", norm=norm, extent=extent
    )
    axes.set(xlabel="client" if step == 1 else f"client (one of {step} is drawn)", ylabel="class")
    title = f"{chart.name}: {clients} clients, {classes} classes, {counts.sum()} samples"
    axes.set_title(title, parse_math=False)  # a name may have dollars
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=20, integer=True, min_n_ticks=1))
    if names is not None and len(names) <= 30:
        axes.set_yticks(range(len(names)), labels=names, parse_math=False)
    axes.figure.colorbar(image, ax=axes, pad=0.02, label="training samples")
    if counts.size <= MOST_LABELLED_CELLS and clients <= 30:
        for (k, c), count in np.ndenumerate(counts):
            colour = "white" if count > 0.3 * counts.max() else "black"  # light where the cell is dark
            if count:
                axes.text(k, c, str(count), ha="center", va="center", color=colour, fontsize=7, in_layout=False)
