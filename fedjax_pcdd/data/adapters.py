"""Data sets of other libraries, and folders of images, as a `Dataset`; none of these libraries is imported.

If there is no test set, a fifth of each class is drawn from the training samples. Letters: n samples, C classes.
"""

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedjax_pcdd.data.dataset import Dataset, as_images, as_labels, count_classes, stratified
from fedjax_pcdd.errors import UserError, as_path, in_one_line, is_there, nearest, shortened, unreadable

TEST_SHARE = 0.2
_TESTS = ("test", "validation", "val", "valid")
_OTHERS = ("training", "testing", "tests", "eval", "dev")  # names of splits that are not known as such
_IMAGES = ("image", "img", "x", "pixel_values")
_LABELS = ("label", "labels", "fine_label", "y", "target")
_LIBRARIES = ("torchvision", "medmnist")  # which take samples from their arrays as they are


def from_huggingface(
    dataset: Any, *, image: str | None = None, label: str | None = None, groups: str | None = None, name: str = "arrays"
) -> Dataset:
    """A data set of the library `datasets`: a `DatasetDict` with train and test (or validation), or one split.

    A warning names further splits, as they are not read.

    Args:
      dataset: what `datasets.load_dataset` returns, not streamed.
      image: column of the samples; None for the one of type Image, of several or none the one called image, img, x or
        pixel_values.
      label: column of the labels; None for the one of type ClassLabel, of several or none the one called label, labels,
        fine_label, y or target.
      groups: column of the writers, patients or domains, for the partition "natural".
      name: of the data set; it selects the customary normalisation.

    Raises:
      UserError: a column is missing, images differ in size, or labels are not integers.
    """
    splits = dataset if isinstance(dataset, Mapping) else {"train": dataset}
    if "train" not in splits:
        raise UserError(f"the data set has no split train, but {', '.join(map(str, splits))}: name its splits so.")
    tests = next((key for key in _TESTS if key in splits), None)
    _warn_of_others("from_huggingface", "the data set", ["train", tests], map(str, splits))
    train, test = splits["train"], None if tests is None else splits[tests]
    features = getattr(train, "features", None) or {}
    if not features:
        raise UserError(f"from_huggingface takes what datasets.load_dataset returns, not {shortened(dataset)}.")
    image = _column(features, image, "Image", _IMAGES, "images")
    label = _column(features, label, "ClassLabel", _LABELS, "labels")
    parts, names = [], []
    for part in (train, test):
        own = features if part is None else getattr(part, "features", None) or {}
        columns = [_column(own, wanted, "", (), "") for wanted in (image, label, groups) if wanted is not None]
        rows = [] if part is None else list(part)
        x, y, *part_groups = ([row[column] for row in rows] for column in columns)
        parts.append((x, y, part_groups[0] if part_groups else None))
        names.append(getattr(own[label], "names", None))
    return _dataset(parts, names, name)


def _warn_of_others(adapter: str, source: Any, taken: Sequence[str | None], names: Iterable[str]) -> None:
    """Warn of splits that are not read, if there are some."""
    if others := [name for name in names if name not in taken]:
        known = " and ".join(filter(None, taken))
        warnings.warn(f"{adapter} takes only {known} of {source}, not {', '.join(others[:3])}.", stacklevel=3)


def _column(features: Mapping[str, Any], wanted: str | None, kind: str, usual: Sequence[str], content: str) -> str:
    """The column `wanted`, else the one whose type is `kind`, or of several that with a usual name; or one so named."""
    if wanted is not None:
        if not isinstance(wanted, str):
            raise UserError(f"a column is given by its name, not as {shortened(wanted)}.")
        if wanted not in features:
            raise UserError(f"the data set has no column '{wanted}': {nearest(wanted, features)}")
        return wanted
    typed = [column for column, feature in features.items() if type(feature).__name__ == kind]
    named = [column for column in usual if column in features]
    candidates = [column for column in named if column in typed][:1] or (named + typed if typed else named[:1])
    if not candidates:
        raise UserError(f"none of the columns {', '.join(features)} is known to hold {content}: name it.")
    if len(candidates) > 1:
        raise UserError(f"any of the columns {', '.join(candidates)} may hold {content}: name the one that does.")
    return candidates[0]


def from_torch(train: Any, test: Any = None, *, name: str = "arrays") -> Dataset:
    """A data set like those of torchvision and medmnist: it has a length, and `train[i]` is an image and its label.

    Where one of these libraries takes the samples from arrays (`data` or `imgs`, and `targets` or `labels`), without
    transforms, these are taken as a whole if they agree with the first sample. Else, and of a class with a
    `__getitem__` of its own, each sample is read once, so that random transforms are drawn only once: leave
    augmentation to the engine.

    Args:
      train, test: images are Pillow's, arrays or tensors; class names are taken from `classes` (`info["label"]` for
        medmnist), if present; a class has the training set's number, even where `test` numbers its names otherwise.
      name: of the data set; it selects the customary normalisation.

    Raises:
      UserError: images differ in size, or labels are not integers.
    """
    for part in (train, test):
        numbered = hasattr(part, "__len__") and hasattr(part, "__getitem__") and not isinstance(part, Mapping)
        if part is not None and not (numbered and getattr(part, "shape", None) != ()):
            raise UserError(f"from_torch takes data sets with a length and samples by number, not {shortened(part)}.")
    parts = [(*_samples(part), None) if part is not None else ([], [], None) for part in (train, test)]
    return _dataset(parts, [_class_names(part) for part in (train, test)], name)


def _class_names(part: Any) -> Sequence[str] | None:
    names, info = getattr(part, "classes", None), getattr(part, "info", None)
    if isinstance(names, Collection) and not isinstance(names, str):
        return list(names)
    numbered = info.get("label") if isinstance(info, Mapping) else None
    named: list[Any] = [numbered.get(str(c)) for c in range(len(numbered))] if isinstance(numbered, Mapping) else []
    return named if named and None not in named else None


def _samples(part: Any) -> tuple[Any, Any]:
    changed = any(getattr(part, key, None) is not None for key in ("transform", "transforms", "target_transform"))
    changed |= str(getattr(type(part).__getitem__, "__module__", "")).split(".")[0] not in _LIBRARIES
    for keys in () if changed else (("data", "targets"), ("data", "labels"), ("imgs", "labels")):
        try:
            arrays = [np.asarray(getattr(part, key, ())) for key in keys]
        except ValueError:  # images of several sizes
            continue
        fits = arrays[0].ndim > 1 and arrays[1].ndim and len(arrays[0]) == len(arrays[1]) == len(part) > 0
        if fits and all(np.array_equal(np.squeeze(a), np.squeeze(b[0])) for a, b in zip(part[0], arrays, strict=False)):
            return arrays[0], arrays[1]
    pairs = [part[i] for i in range(len(part))]
    try:
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    except (TypeError, IndexError, KeyError):
        kind = shortened(pairs[0])
        raise UserError(f"from_torch takes samples that are an image and its label, not {kind}: pair them.") from None


def from_folder(path: str | os.PathLike, *, side: int | None = None, name: str | None = None) -> Dataset:
    """Images in one folder per class, which may lie below `train` and `test` (or `val`), also written `Train`.

    A warning names folders beside these two, as they are not read.

    Args:
      path: of the folder; the names of its subfolders, in alphabetical order, are the class names. Images may lie
        deeper.
      side: S, to which all images are stretched; None if they all have the same size.
      name: of the data set; it selects the customary normalisation; None for the folder's name.

    Raises:
      UserError: there are no classes, a file is not an image, or images differ in size.
    """
    if side is not None and (not isinstance(side, int) or isinstance(side, bool) or side < 1):
        raise UserError(f"takes a number of pixels of at least 1, not {shortened(side)}.", field="side")
    root = as_path(path, "path")
    if not is_there(root, Path.is_dir):
        raise UserError(f"there is no folder {root}: name one with a folder of images for each class.")
    folders = _visible(root, Path.is_dir)
    named = [folder for folder in folders if folder.name.lower() in ("train", *_TESTS)]
    # A class may be called Train; its folder has images.
    splits = {f.name.lower(): f for f in named if f.name.islower() or _visible(f, Path.is_dir)}
    train = splits.get("train", root)
    test = next((splits[key] for key in _TESTS if key in splits), None) if train != root else None
    for folder in (train, test):
        if folder and not _visible(folder, Path.is_dir):
            raise UserError(f"{folder} has no folders: put the images of each class into a folder of its own there.")
    if train == root:
        _check_classes(folders)
    else:
        taken = [train.name, test.name if test else None]
        _warn_of_others("from_folder", root, taken, [folder.name for folder in folders])
    names = [folder.name for folder in _visible(train, Path.is_dir)]
    unknown = [folder.name for folder in (_visible(test, Path.is_dir) if test else []) if folder.name not in names]
    if unknown:
        raise UserError(f"{test} has a class {unknown[0]} that {train} has not: {nearest(unknown[0], names)}")
    parts = []
    for folder in (train, test):
        pairs = [(file, c) for c, label in enumerate(names) for file in _files(folder / label)] if folder else []
        parts.append(([_opened(file, side) for file, _ in pairs], [c for _, c in pairs], None))
    return _dataset(parts, (names, names), name or root.resolve().name)


def _check_classes(folders: Sequence[Path]) -> None:
    """Raise a UserError if a folder of splits lies where one of each class is expected, as `Training`."""
    split = next((folder for folder in folders if folder.name.lower() in ("train", *_TESTS, *_OTHERS)), None)
    inner = [[below.name for below in _visible(folder, Path.is_dir)] for folder in folders]
    if split and inner[0] and all(names == inner[0] for names in inner):
        raise UserError(f"{split} has the folders of its neighbours, as a split has: name the splits train and test.")


def _files(folder: Path) -> list[Path]:
    """Files in a folder and in those below it that are not hidden, in alphabetical order."""
    inner = [file for below in _visible(folder, Path.is_dir) for file in _files(below)]
    return sorted([*_visible(folder, Path.is_file), *inner])


def _visible(folder: Path, kind: Callable[[Path], bool]) -> list[Path]:
    """Entries of a folder that are not hidden, files or folders by `kind`, in alphabetical order."""
    try:
        entries = list(folder.iterdir()) if folder.is_dir() else []
        return sorted(entry for entry in entries if kind(entry) and not entry.name.startswith("."))
    except OSError as error:
        raise unreadable(error, folder) from error


def _opened(file: Path, side: int | None) -> Image.Image:
    try:
        with Image.open(file) as image:
            image.load()
            if side is None:
                return image
            if image.mode in ("P", "1"):  # without levels Pillow would take the nearest pixels
                image = image.convert("L" if image.mode == "1" else "RGB")
            return image.resize((side, side), Image.Resampling.BILINEAR)
    except (UnidentifiedImageError, OSError, ValueError) as error:
        raise UserError(f"{file} is not an image ({in_one_line(error)}): move it out of the folder.") from error


def _dataset(parts: Sequence[tuple[Any, Any, Any]], class_names: Sequence[Sequence[str] | None], name: str) -> Dataset:
    """Make a data set of images, labels and groups of training and test samples; the latter may be empty.

    Args:
      class_names: as the training and the test samples number their classes, None if unknown.
    """
    (x_train, y_train, groups_train), (x_test, y_test, groups_test) = parts
    x, y, (names, test_names) = _stack([*x_train, *x_test]), _labels([*y_train, *y_test]), class_names
    if names is not None and test_names is not None:
        y[len(y_train) :] = _renumbered(y[len(y_train) :], list(map(str, names)), list(map(str, test_names)))
    groups = None if groups_train is None else _numbers([*groups_train, *(groups_test or ())])
    train, test = slice(len(y_train)), slice(len(y_train), None)  # no copies
    if len(y) == len(y_train):
        test = stratified(y, int(TEST_SHARE * len(y)), np.random.default_rng(0))
        train = np.setdiff1d(np.arange(len(y)), test)
    classes = None if names is None else tuple(map(str, names))
    group_arrays = (None, None) if groups is None else (groups[train], groups[test])
    count = count_classes(y) if classes is None else len(classes)
    return Dataset(name, x[train], y[train], x[test], y[test], count, classes, *group_arrays)


def _renumbered(y: np.ndarray, names: Sequence[str], own: Sequence[str]) -> np.ndarray:
    """Labels [n] of classes that are called `own`, by their numbers in `names`; UserError if one is not there."""
    unknown = [label for label in own if label not in names]
    if unknown and names != own:
        raise UserError(f"the test set has a class {unknown[0]} that the training set has not: name classes alike.")
    if names == own or not y.size:
        return y
    if y.max() >= len(own):
        raise UserError(f"a test label is {y.max()}, and {len(own)} classes are named: name all of them.")
    return np.asarray([names.index(label) for label in own])[y]


def _numbers(groups: Sequence[Any]) -> np.ndarray:
    """Numbers from 0 of writers or domains [n], in the order of their names."""
    try:
        known, numbers = np.unique(groups, return_inverse=True)
    except (TypeError, ValueError):  # names beside None
        known = np.asarray([np.nan])
    if known.dtype.kind not in "iufUS" or (known.dtype.kind == "f" and not np.isfinite(known).all()):
        raise UserError("groups must be a number or name for each sample: fill in those that are missing.")
    return numbers


def _stack(images: Sequence[Any]) -> np.ndarray:
    """Stack Pillow images, arrays or tensors as [n, H, W, channels]; all in colour if one of them is.

    Grey values of more than 8 bits are kept as they are, so they cannot be mixed with colour images.
    """
    modes = {image.mode for image in images if isinstance(image, Image.Image)}
    deep = {mode for mode in modes if mode.startswith(("I", "F"))}
    if deep and deep != modes:
        raise UserError(f"images have more than 8 bits ({deep.pop()}) beside others of 8: make them alike.")
    colour = None if deep else "L" if modes <= {"1", "L"} else "RGB"
    if not len(images):
        raise UserError("there are no images: name a data set that has some.")
    stacked = np.empty((len(images), 0), bool)
    for i, image in enumerate(images):  # one after another: a list of their arrays would be all of them once more
        converts = colour and isinstance(image, Image.Image) and image.mode != colour
        array = np.asarray(image.convert(colour) if converts else image)
        if not i:
            stacked = np.empty((len(images), *array.shape), array.dtype)
        if array.shape != stacked.shape[1:]:
            raise UserError(f"images must have one size, not {stacked.shape[1:]}, {array.shape}: resize them.")
        stacked = stacked.astype(np.result_type(stacked.dtype, array.dtype), copy=False)
        stacked[i] = array
    return as_images(stacked, "the array of images")


def _labels(labels: Sequence[Any]) -> np.ndarray:
    rows = [np.asarray(label).reshape(-1) for label in labels]
    if len({row.size for row in rows}) > 1:
        raise UserError("labels must be one integer from 0 for each sample, not of several lengths.")
    y = np.asarray(rows) if rows else np.zeros((0, 1), int)
    if y.dtype.kind in "iu" and y.size and y.min() < 0:
        raise UserError(f"labels must be integers from 0, not from {y.min()}: leave out samples without a label.")
    return as_labels(y[:, 0] if y.shape[1] == 1 else y, "the array of labels")
