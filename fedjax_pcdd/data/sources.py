"""Where data sets come from: built in, a folder of npz files, or a prepared TensorFlow Datasets folder.

Nothing is ever downloaded here; `experiments/prepare.py` does that, once. docs/data.md describes the layouts.
Constants of normalisation and augmentation are those of the papers' published code (table in docs/data.md).
"""

import os
import re
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedjax_pcdd.data import text
from fedjax_pcdd.data.federation import Dataset
from fedjax_pcdd.errors import UserError, nearest

DATASETS = {
    "digits": "scikit-learn's digits, built in: 1442 + 355 grey 8x8 images, 10 classes",
    "mnist": "MNIST: 60000 + 10000 grey 28x28 images, 10 classes (11 MB)",
    "fashion_mnist": "Fashion-MNIST: 60000 + 10000 grey 28x28 images, 10 classes (31 MB)",
    "kmnist": "Kuzushiji-MNIST: 60000 + 10000 grey 28x28 images, 10 classes (21 MB)",
    "emnist": "EMNIST balanced: 112800 + 18800 grey 28x28 images, 47 classes (540 MB download)",
    "usps": "USPS zip codes: 7291 + 2007 grey 16x16 images, 10 classes (1 MB)",
    "femnist": "LEAF's FEMNIST with its writers: grey 28x28 images, 62 classes",
    "shakespeare": "Shakespeare by speaker: windows of 80 characters, 65 classes (the next character)",
    "svhn": "SVHN without the extra set: 73257 + 26032 colour 32x32 images, 10 classes (1.5 GB download)",
    "cifar10": "CIFAR-10: 50000 + 10000 colour 32x32 images, 10 classes (160 MB)",
    "cifar100": "CIFAR-100: 50000 + 10000 colour 32x32 images, 100 classes (160 MB)",
    "cifar100_subset": "CIFAR-100, 100 + 20 images a class: 10000 + 2000 colour 32x32 images (25 MB)",
}

TFDS_NAMES = {
    "mnist": "mnist",
    "fashion_mnist": "fashion_mnist",
    "kmnist": "kmnist",
    "emnist": "emnist/balanced",
    "svhn": "svhn_cropped",
    "cifar10": "cifar10",
    "cifar100": "cifar100",
}

_NAME = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")
_VERSION = re.compile(r"\d+\.\d+\.\d+")
_GROUPS = ("writer", "domain")
_UNREADABLE = (OSError, ValueError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error)


@dataclass(frozen=True)
class DatasetSpec:
    """How a data set's images are fed to a model.

    Args:
      mean: of each channel, in units of [0, 1]; one value serves all channels.
      std: of each channel, as `mean`.
      augmentation: recipe names in order of application, of "crop_reflect", "crop_zero", "flip", "rotate".
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    augmentation: tuple[str, ...] = ()


_CIFAR100 = DatasetSpec(
    mean=(0.50708, 0.48655, 0.44092),
    std=(0.26733, 0.25644, 0.27615),
    augmentation=("crop_zero", "flip", "rotate"),
)

_SPECS = {
    "cifar10": DatasetSpec(
        mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2615), augmentation=("crop_reflect", "flip")
    ),
    "cifar100": _CIFAR100,
    "cifar100_subset": _CIFAR100,
    "svhn": DatasetSpec(mean=(0.4376821, 0.4437697, 0.47280442), std=(0.19803012, 0.20101562, 0.19703614)),
}


def spec(name: str) -> DatasetSpec:
    """Normalisation and augmentation of a data set; unknown ones are scaled to [0, 1] and not augmented.

    >>> spec("cifar10").augmentation
    ('crop_reflect', 'flip')
    """
    return _SPECS.get(name, DatasetSpec())


def default_root() -> Path:
    """The TFDS root that is searched when no folder is named: TFDS_DATA_DIR or ~/tensorflow_datasets."""
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def load(name: str, data_dir: str | os.PathLike | None = None) -> Dataset:
    """Find a data set and read it whole into memory; nothing is downloaded.

    Tried in order: built in ("digits"); `<data_dir>/<name>.npz`; a prepared TFDS folder below data_dir.

    Args:
      name: one of `DATASETS`, the stem of an npz file, or any TFDS name, as "stl10" or "emnist/letters".
      data_dir: folder of npz files or TFDS root; without it the TFDS default root is searched.

    Returns:
      The data set with its official training and test sets.

    Raises:
      UserError: it is in none of these places, or what lies there cannot be used.
    """
    if name == "digits":
        return _digits()
    root = default_root() if data_dir is None else Path(data_dir).expanduser()
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot be the name of a data set; {nearest(name, DATASETS)}")
    file = root / f"{name}.npz"
    if file.is_file():
        return read_npz(file, name)
    tfds_name = TFDS_NAMES.get(name, name)
    for folder in dict.fromkeys((root / tfds_name, root / name)):
        if prepared := _prepared_version(folder):
            return read_tfds(prepared, name)
    raise UserError(_advice(name, root, file, root / tfds_name))


def _advice(name: str, root: Path, file: Path, folder: Path) -> str:
    where = f"looked for {file} and for a prepared TFDS data set in {folder}"
    if name in TFDS_NAMES:
        command = f"python experiments/prepare.py {name} --data-dir={root}"
        return f"The data set '{name}' was not found ({where}); prepare it by: {command}"
    if name in DATASETS:
        return f"The data set '{name}' was not found ({where}); put the npz file there, see docs/data.md."
    return f"There is no data set '{name}' ({where}); {nearest(name, DATASETS)}"


def _digits() -> Dataset:
    """Scikit-learn's digits; of the images of each class, in their order, every fifth is a test image.

    So the split is about 80/20, stratified, and without randomness. Values 0..16 become 0..255 (rounded).
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x = np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    y = labels.astype(np.int32)
    rank = np.empty(len(y), np.int32)
    for label in range(10):
        members = np.flatnonzero(y == label)
        rank[members] = np.arange(len(members))
    test = rank % 5 == 4
    names = tuple("0123456789")
    return Dataset("digits", x[~test], y[~test], x[test], y[test], num_classes=10, class_names=names)


def read_npz(file: str | os.PathLike, name: str | None = None) -> Dataset:
    """Read an npz file in one of the layouts of docs/data.md; pickles are never loaded.

    Args:
      file: with a text (see `text.read_text`), or with `x_train`, `y_train`, `x_test`, `y_test` (or
        `x_train_delta`, `x_test_delta`) and, where known, `classes` and `writer_train`, `writer_test` (or
        `writer`: training, then test rows); groups may also be called `domain`.
      name: the data set's name; by default the file's stem.

    Raises:
      UserError: the file is unreadable or does not hold a data set; names the file and what is wrong.
    """
    file = Path(file)
    arrays = _read_arrays(file)
    try:
        if not arrays:
            raise UserError("it holds neither images (x_train, ...) nor a text (text, speech_start, ...).")
        if text.is_text(arrays):
            return text.read_text(arrays, name or file.stem)
        x = {part: _npz_images(arrays, part) for part in ("train", "test")}
        y = {part: _npz_labels(arrays, part, len(x[part])) for part in ("train", "test")}
        groups = _npz_groups(arrays, len(x["train"]), len(x["test"]))
        names, num_classes = _npz_classes(arrays, np.concatenate([y["train"], y["test"]]))
        return Dataset(name or file.stem, x["train"], y["train"], x["test"], y["test"], num_classes, names, *groups)
    except UserError as error:
        raise UserError(f"{file} cannot be used: {error}") from None


def _read_arrays(file: Path) -> dict[str, np.ndarray]:
    parts = [f"{key}_{part}" for part in ("train", "test") for key in ("x", "y", *_GROUPS)]
    known = {*parts, "x_train_delta", "x_test_delta", "classes", *_GROUPS, "x", *text.KEYS, *text.OPTIONS}
    try:
        with open(file, "rb") as stream:
            single_array = stream.read(6) == b"\x93NUMPY"
            if not (single_array or zipfile.is_zipfile(stream)):
                raise ValueError("it is another kind of file, or cut short")
            stream.seek(0)
            archive = np.load(stream, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds a single array")
            return {key: np.asarray(archive[key]) for key in archive.files if key in known}
    except _UNREADABLE as error:
        advice = "write it anew with numpy.savez, without object arrays."
        raise UserError(f"{file} is no readable npz archive ({_reason(error)}); {advice}") from error


def _reason(error: Exception) -> str:
    """A foreign exception in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def _npz_images(arrays: dict[str, np.ndarray], part: str) -> np.ndarray:
    """One split's images, uint8 [n, H, W, channels]."""
    delta = arrays.get(f"x_{part}_delta")
    if delta is not None:
        if delta.dtype != np.uint8 or delta.ndim != 4 or delta.shape[1] != 3:
            raise UserError(f"x_{part}_delta must be uint8 [n, 3, H, W], not {delta.dtype} {list(delta.shape)}.")
        return decode_delta(delta)
    x = arrays.get(f"x_{part}")
    if x is None:
        split = "it has no train/test split, since " if "x" in arrays else ""
        raise UserError(f"{split}x_{part} is missing; it needs x_train, y_train, x_test and y_test.")
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or (part == "train" and x.size == 0):
        wanted = "uint8 [n, H, W] or [n, H, W, channels]"
        raise UserError(f"x_{part} must be non-empty {wanted}, not {x.dtype} {list(x.shape)}.")
    return x if x.ndim == 4 else x[..., None]


def _npz_labels(arrays: dict[str, np.ndarray], part: str, n: int) -> np.ndarray:
    y = arrays.get(f"y_{part}")
    if y is None:
        raise UserError(f"y_{part} is missing; it needs x_train, y_train, x_test and y_test.")
    if y.dtype.kind not in "iu" or y.shape != (n,):
        raise UserError(f"y_{part} must be integers [{n}], not {y.dtype} {list(y.shape)}.")
    return y


def _npz_groups(arrays: dict[str, np.ndarray], n_train: int, n_test: int) -> tuple:
    """Groups of training and test rows, ([n_train], [n_test]) int32, or (None, None)."""
    for key in _GROUPS:
        both = [arrays[f"{key}_{part}"] for part in ("train", "test") if f"{key}_{part}" in arrays]
        if not both and key not in arrays:
            continue
        if not both and arrays[key].shape == (n_train + n_test,):
            both = [arrays[key][:n_train], arrays[key][n_train:]]
        fits = [group.shape for group in both] == [(n_train,), (n_test,)]
        if not fits or any(group.dtype.kind not in "iu" for group in both):
            raise UserError(f"{key}_train, {key}_test (or {key}) must give one integer an image.")
        return tuple(group.astype(np.int32) for group in both)
    return None, None


def _npz_classes(arrays: dict[str, np.ndarray], y: np.ndarray) -> tuple[tuple[str, ...] | None, int]:
    """Class names, if given, and the number of classes C; y [n] holds the labels of both splits."""
    low, high = int(y.min()), int(y.max())
    classes = arrays.get("classes")
    if classes is None:
        if low != 0 or high >= len(y):
            raise UserError(f"its labels must run from 0 to C - 1, not from {low} to {high}.")
        return None, high + 1
    if classes.ndim != 1 or low < 0 or high >= len(classes):
        raise UserError(f"its labels run from {low} to {high}, but classes has shape {list(classes.shape)}.")
    return tuple(classes.astype(str).tolist()), len(classes)


def decode_delta(delta: np.ndarray) -> np.ndarray:
    """Undo the delta coding of colour images: red and blue less green, then each pixel less its left one.

    Args:
      delta: [n, 3, H, W] uint8 differences modulo 256.

    Returns:
      [n, H, W, 3] uint8 images.
    """
    images = np.empty((len(delta), *delta.shape[2:], 3), np.uint8)
    np.cumsum(delta.transpose(0, 2, 3, 1), axis=2, dtype=np.uint8, out=images)
    images[..., 0] += images[..., 1]
    images[..., 2] += images[..., 1]
    return images


def _prepared_version(folder: Path) -> Path | None:
    """The newest prepared version in a TFDS data set's folder, with or without configurations, or None."""
    found = [file.parent for depth in ("*", "*/*") for file in folder.glob(f"{depth}/dataset_info.json")]
    versions = [path for path in found if _VERSION.fullmatch(path.name)]
    above = sorted({path.parent for path in versions})
    if len(above) > 1 and folder not in above:
        names = [f"{folder.name}/{path.name}" for path in above]
        raise UserError(f"{folder} holds several configurations; name one of {', '.join(names)}.")
    versions = [path for path in versions if path.parent == folder or folder not in above]
    return max(versions, key=lambda path: tuple(map(int, path.name.split("."))), default=None)


def read_tfds(folder: str | os.PathLike, name: str) -> Dataset:
    """Read a prepared TFDS data set with features "image" and "label"; TensorFlow is not needed.

    Args:
      folder: `.../<name>/<version>` as TFDS wrote it, in the array_record format.
      name: the data set's name.

    Raises:
      UserError: damaged, in another format, without such features or splits, or images of several sizes.
    """
    import tensorflow_datasets as tfds

    try:
        return _from_builder(tfds.builder_from_directory(folder), name)
    except NotImplementedError as error:
        again = f"remove it and prepare it anew by: python experiments/prepare.py {name} --data-dir=..."
        raise UserError(f"{folder} is not in the array_record format; {again}") from error
    except Exception as error:  # TFDS, protobuf and array_record raise all kinds for damaged files
        raise UserError(f"{folder} cannot be used: {_reason(error)}.") from error


def _from_builder(builder, name: str) -> Dataset:
    features, splits = builder.info.features or {}, set(builder.info.splits)
    test = "test" if "test" in splits else "validation"
    if not {"image", "label"} <= set(features) or not {"train", test} <= splits:
        raise UserError("it needs the features image and label and the splits train and test (or validation).")
    x_train, y_train = _stack(builder.as_data_source("train"))
    x_test, y_test = _stack(builder.as_data_source(test))
    label = features["label"]
    num_classes = getattr(label, "num_classes", None) or int(max(y_train.max(), y_test.max())) + 1
    names = tuple(getattr(label, "names", None) or ())
    names = names if len(names) == num_classes else None
    return Dataset(name, x_train, y_train, x_test, y_test, num_classes, names)


def _stack(examples: Iterable) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, H, W, channels] and labels [n] of a TFDS data source."""
    pairs = [(example["image"], example["label"]) for example in examples]
    if len({image.shape for image, _ in pairs}) != 1:
        raise UserError("its images differ in size; resize them and store them as an npz file.")
    return np.stack([image for image, _ in pairs]), np.array([label for _, label in pairs])
