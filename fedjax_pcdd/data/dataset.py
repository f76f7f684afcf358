"""A data set: images and labels with their official split, and subsets of it.

Letters: C classes, n samples.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from fedjax_pcdd.errors import UserError, shortened

# A function of "train" or "test" and its labels [n]: positions of the samples to keep, None for all of them.
Keep = Callable[[str, np.ndarray], np.ndarray | None]

MOST_CLASSES = 100_000  # limit if C is counted from the labels: larger labels probably number something else
LOOKED_AT = 1000  # images that are inspected first: they mostly show whether there are levels above 1


def keep_all(part: str, labels: np.ndarray) -> None:
    """Keep every sample."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels of a classification problem, with its official training and test sets.

    Args:
      name: as on the command line.
      x_train: [n_train, H, W, channels] images, uint8, or float32 that are not scaled further.
      y_train: [n_train] labels in [0, C), copied as int32, which cannot be changed.
      x_test: [n_test, H, W, channels] of the same type; n_test may be 0.
      y_test: [n_test] labels in [0, C), kept as int32.
      num_classes: C.
      class_names: C names, if known.
      groups_train: [n_train] writer, speaker, centre or domain of each training sample, if known.
      groups_test: [n_test] the same for the test samples.
      text: whether the images are windows of T character codes, [n, T, 1, 1], and the classes are characters.

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
        if not isinstance(self.name, str):
            raise UserError(f"of a data set must be a text, not {shortened(self.name)}.", field="name")
        if not isinstance(self.num_classes, int | np.integer) or self.num_classes < 1:
            self._reject(f"num_classes must be an integer from 1, not {shortened(self.num_classes)}")
        for part in ("train", "test"):
            self._check(part)
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            self._reject(f"x_train {self.x_train.shape} and x_test {self.x_test.shape} differ in image size")
        if not len(self.x_test):
            object.__setattr__(self, "x_test", np.asarray(self.x_test, self.x_train.dtype))
        if self.x_train.dtype != self.x_test.dtype:
            self._reject(
                f"x_train is kept as {self.x_train.dtype} and x_test as {self.x_test.dtype} (integers up to 255, but "
                "not 0 and 1 alone, as uint8, other numbers as float32): give both as floats, or as uint8"
            )
        if self.x_train.dtype == np.uint8 and not self.text and _is_binary(self.x_train, self.x_test):
            self._reject("all images are 0 or 1 in uint8, which would be divided by 255: give them as float32")
        if (self.groups_train is None) != (self.groups_test is None):
            self._reject("groups must be given for both training and test samples or for neither")
        if self.class_names is not None and len(self.class_names) != self.num_classes:
            self._reject(f"class_names must name {self.num_classes} classes, not {len(self.class_names)}")

    def __repr__(self):
        size = "x".join(map(str, self.x_train.shape[1:]))
        samples = f"{len(self.y_train)} + {len(self.y_test)} samples of {size}"
        return f"Dataset('{self.name}', {samples}, {self.num_classes} classes)"

    def _check(self, part: str):
        x, y, groups = (getattr(self, f"{field}_{part}") for field in ("x", "y", "groups"))
        own = f"data set '{self.name}'"
        _check_unmasked(x, f"{own}: x_{part}")
        _check_unmasked(y, f"{own}: y_{part}")
        if not (hasattr(x, "dtype") and hasattr(x, "ndim")):
            self._reject(f"x_{part} must be a NumPy array, not a {type(x).__name__}: see `fp.from_arrays`")
        if x.dtype not in (np.uint8, np.float32) or x.ndim != 4:
            self._reject(f"x_{part} must be uint8 or float32 [n, H, W, channels], not {x.dtype} {list(x.shape)}")
        if not isinstance(x, np.memmap):
            _check_finite(x, f"{own}: x_{part}")
        y = np.asarray(y)
        if y.shape != (len(x),):
            self._reject(
                f"y_{part} must have a label for each of the {len(x)} entries of x_{part}, not {list(y.shape)}"
            )
        if groups is not None and (np.shape(groups) != (len(x),) or np.asarray(groups).dtype.kind not in "iuUS"):
            actual = f"{np.asarray(groups).dtype} {list(np.shape(groups))}"
            self._reject(f"groups_{part} must be a number or name for each of the {len(x)} of x_{part}, not {actual}")
        if y.size and not (y.dtype.kind in "iu" and y.min() >= 0 and y.max() < self.num_classes):
            self._reject(f"y_{part} must hold integers in [0, {self.num_classes})")
        y = y.astype(np.int32)
        y.setflags(write=False)  # what is derived from them, as class counts, would not follow a change
        object.__setattr__(self, f"y_{part}", y)

    def _reject(self, reason: str):
        raise UserError(f"data set '{self.name}': {reason}.")

    @property
    def groups(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Writers, centres or domains of the training and of the test samples, if known."""
        return None if self.groups_train is None or self.groups_test is None else (self.groups_train, self.groups_test)

    def take(self, **rows: np.ndarray) -> "Dataset":
        """The data set with some of its samples, given as positions [n] or booleans for `train`, `test` or both."""
        fields = [(f"{field}_{part}", index) for part, index in rows.items() for field in ("x", "y", "groups")]
        arrays = {name: getattr(self, name)[index] for name, index in fields if getattr(self, name) is not None}
        return replace(self, **arrays)


def as_images(x: ArrayLike, name: str) -> np.ndarray:
    """Samples as a `Dataset` keeps them: [n, H, W, channels] uint8 or float32.

    Images of integers in [0, 255] are kept as uint8, which is scaled to [0, 1] for the model. All other numbers, and
    images that contain only 0 and 1, are kept as float32 and reach the model as they are, except for the normalisation
    that is customary for the data set's name. Images of integers outside [0, 255] cause a warning.

    Args:
      x: images [n, H, W] or [n, H, W, channels], or feature vectors [n, D], which become images [n, 1, D, 1]; images
        with 1, 3 or 4 channels first are recognised, and a warning names them.
      name: of the array, for messages.

    Raises:
      UserError: `x` holds something else, masked numbers, or such as are not finite as float32.
    """
    _check_unmasked(x, name)
    try:
        x = np.asarray(x)
    except ValueError as error:
        raise UserError(f"{name} holds samples of several sizes: give all the same.") from error
    if x.dtype.kind not in "biuf" or x.ndim not in (2, 3, 4) or not all(x.shape[1:]):
        layouts = "[n, D], [n, H, W] or [n, H, W, channels]"
        raise UserError(f"{name} must be numbers {layouts}, not {x.dtype} {list(x.shape)}.")
    x = x.astype(np.uint8, copy=False) if _has_levels(x, name) else _as_single(x, name)
    _check_finite(x, name)
    if x.ndim == 4 and x.shape[1] in (1, 3, 4) and x.shape[3] not in (1, 2, 3, 4):
        warnings.warn(f"{name} {list(x.shape)} has its channels first: they are put last.", stacklevel=3)
        return np.ascontiguousarray(np.moveaxis(x, 1, 3))
    if x.ndim == 2:
        return x[:, None, :, None]
    return x if x.ndim == 4 else x[..., None]


def _as_single(x: np.ndarray, name: str) -> np.ndarray:
    """Numbers as float32; UserError if some are too large for it."""
    try:
        with np.errstate(over="raise"):
            return x.astype(np.float32, copy=False)
    except FloatingPointError:
        raise UserError(f"{name} holds numbers beyond the range of float32, 3.4e38: scale them down.") from None


def _check_unmasked(array: ArrayLike, name: str) -> None:
    if np.ma.is_masked(array):
        raise UserError(f"{name} has masked entries, which would count like all others: fill or remove them.")


def _check_finite(x: np.ndarray, name: str) -> None:
    """Raise a UserError if samples [n, ...] of uint8 or float32 hold numbers that are not finite."""
    with np.errstate(invalid="ignore"):  # infinite numbers of both signs
        if x.dtype == np.uint8 or np.isfinite(x.sum(dtype=np.float64)):  # without an array beside the images
            return
    affected = np.flatnonzero([not np.isfinite(sample).all() for sample in x])
    where = f"in {len(affected)} of {len(x)} samples, first in sample {affected[0]}"
    raise UserError(f"{name} holds numbers that are not finite as float32 {where}: replace or remove these samples.")


def _is_binary(*parts: np.ndarray) -> bool:
    """Whether images of uint8 are 0 or 1, and some 1; mapped ones, of any size, are not looked at."""
    if any(isinstance(x, np.memmap) or x[:LOOKED_AT].max(initial=0) > 1 for x in parts):
        return False
    return max(x.max(initial=0) for x in parts) == 1


def _has_levels(x: np.ndarray, name: str) -> bool:
    """Whether these numbers are levels in [0, 255]; warns of image integers that are not and of floats that look so."""
    if x.dtype.kind == "f" and x.ndim > 2 and x.size and 200 < x.max() <= 255 and x.min() >= 0:
        warnings.warn(
            f"{name} holds numbers from 0 to {x.max():g} as {x.dtype}, which reach the model as they are: give "
            "integers to have them scaled to [0, 1], or divide them by 255.",
            stacklevel=4,
        )
    if x.dtype.kind not in "iu" or x.ndim == 2:
        return False
    if x.dtype == np.uint8:  # there may be more of them than fit into memory
        return x[:LOOKED_AT].max(initial=0) > 1 or x.max(initial=0) != 1
    low, high = (x.min(), x.max()) if x.size else (0, 0)
    if low < 0 or high > 255:
        warnings.warn(
            f"{name} holds integers from {low} to {high}, no levels from 0 to 255: they reach the model as they are.",
            stacklevel=4,
        )
        return False
    return bool(high > 1)


def as_labels(y: ArrayLike, name: str) -> np.ndarray:
    """Labels [n] as integers, also from floats that are whole numbers.

    Raises:
      UserError: they are something else, negative or masked; tells how to make integers of them.
    """
    _check_unmasked(y, name)
    try:
        labels = np.asarray(y)
    except ValueError as error:  # rows of different lengths
        raise UserError(f"{name} must be one integer from 0 for each sample.") from error
    if labels.dtype.kind == "f" and labels.ndim == 1:
        with np.errstate(invalid="ignore"):
            whole = labels.astype(np.int64)
        labels = whole if np.array_equal(whole, labels) else labels
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or labels.min(initial=0) < 0:
        actual = f"{labels.dtype} {list(labels.shape)}{_remedy(labels)}"
        raise UserError(f"{name} must be one integer from 0 for each sample, [n], not {actual}.")
    return labels


def _remedy(y: np.ndarray) -> str:
    """The end of a sentence about labels that are not [n] integers from 0: how they become so."""
    if y.ndim == 2:
        return ": take .ravel() of it" if y.shape[1] == 1 else ": if it is one-hot, take .argmax(1) of it"
    if y.dtype.kind in "iu" and y.ndim == 1:
        return f" from {y.min()}"
    number = "number all labels, of training and test samples, by np.unique(y, return_inverse=True)[1]"
    remedies = {"b": "take .astype(int) of it", "f": "leave out samples whose label is no whole number"}
    remedy = (remedies | dict.fromkeys("USO", number)).get(y.dtype.kind)
    return f": {remedy}" if remedy and y.ndim == 1 else ""


def count_classes(y: np.ndarray) -> int:
    """C, one more than the largest of all labels [n]; warns if classes have no sample."""
    count, present = 1 + int(y.max(initial=0)), np.unique(y)
    if 0 < len(present) < count:
        absent = np.setdiff1d(np.arange(min(count, len(present) + 3)), present)[:3].tolist()
        more = ", ..." if count - len(present) > len(absent) else ""
        warnings.warn(
            f"the labels lack {count - len(present)} of {count} classes ({str(absent)[1:-1]}{more}): number "
            "all labels from 0 without gaps, as np.unique(y, return_inverse=True)[1] does, or name all classes if some "
            "may be absent.",
            stacklevel=3,
        )
    return count


def as_groups(numbers: np.ndarray) -> np.ndarray:
    """Group numbers [n], as int32 if all of them fit, else as int64."""
    return numbers.astype(np.int32 if np.array_equal(numbers.astype(np.int32), numbers) else np.int64)


def largest_groups(dataset: Dataset, count: int) -> Dataset:
    """The data set cut down to the groups (writers, speakers, domains) with the most training samples.

    Args:
      count: groups to keep; of equally large ones those with the lower numbers.

    Raises:
      UserError: there are no groups, or fewer than `count`.
    """
    if dataset.groups_train is None or dataset.groups_test is None:
        raise UserError(
            f"data set '{dataset.name}' names no writers or domains: add domain_train and domain_test to its npz "
            "(docs/data.md), or choose another `partition`."
        )
    values, sizes = np.unique(dataset.groups_train, return_counts=True)
    if count > len(values):
        raise UserError(
            f"'{dataset.name}' has {len(values)} groups with training samples, not `clients={count}`: lower that."
        )
    if count == len(values) and np.isin(dataset.groups_test, values).all():
        return dataset
    largest = values[np.argsort(-sizes, kind="stable")[:count]]
    return dataset.take(train=np.isin(dataset.groups_train, largest), test=np.isin(dataset.groups_test, largest))


def subset(dataset: Dataset, keep: Keep) -> Dataset:
    """The data set with the samples that `keep` selects."""
    rows = {"train": keep("train", dataset.y_train), "test": keep("test", dataset.y_test)}
    return dataset.take(**{part: positions for part, positions in rows.items() if positions is not None})


def sampler(name: str, train: int | None, test: int | None, seed: int) -> Keep:
    """A `Keep` that draws this many training and test samples of a data set class by class; None keeps all of them.

    It raises a `UserError` if there are fewer samples than requested. Applied again, it keeps all.
    """

    def keep(part: str, labels: np.ndarray) -> np.ndarray | None:
        samples = train if part == "train" else test
        if samples is None:
            return None
        if samples > len(labels):
            raise UserError(
                f"'{name}' has {len(labels)} {part} samples, not `{part}_samples={samples}`: lower it or leave it out."
            )
        return stratified(labels, samples, np.random.default_rng([seed, *f"{part} samples".encode()]))

    return keep


def stratified(labels: ArrayLike, samples: int, random: np.random.Generator) -> np.ndarray:
    """Positions of `samples` of the labels [n], ascending; every class keeps its share to within one sample."""
    labels = np.asarray(labels)
    _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    share = counts * (samples / len(labels))
    sizes = share.astype(int)
    left_over = samples - sizes.sum()
    sizes[np.argsort(sizes - share, kind="stable")[:left_over]] += 1
    members = np.split(np.argsort(inverse, kind="stable"), np.cumsum(counts)[:-1])
    return np.sort(np.concatenate([random.permutation(rows)[:n] for rows, n in zip(members, sizes, strict=True)]))
