"""Where data sets come from: built in, a folder of npz files, or a prepared TensorFlow Datasets folder.

Nothing is ever downloaded here; `experiments/prepare.py` does that, once. docs/data.md describes the layouts.
Constants of normalisation and augmentation are those of the papers' published code (table in docs/data.md).
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedjax_pcdd.data.federation import Dataset
from fedjax_pcdd.data.npz import read_npz
from fedjax_pcdd.errors import UserError, in_one_line, nearest
from fedjax_pcdd.registry import Registry, is_import_path, located

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

LOADERS: Registry[Callable[[], Dataset]] = Registry("data set", "datasets")
"""Functions from outside that load a data set, by name."""

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
    return _SPECS.get(Path(name).stem if name.endswith(".npz") else name, DatasetSpec())


def default_root() -> Path:
    """The TFDS root that is searched when no folder is named: TFDS_DATA_DIR or ~/tensorflow_datasets."""
    return Path(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()


def load(name: str, data_dir: str | os.PathLike | None = None) -> Dataset:
    """Find a data set and read it whole into memory; nothing is downloaded.

    Tried in order: built in ("digits"); `<data_dir>/<name>.npz`; a prepared TFDS folder below data_dir.

    Args:
      name: one of `DATASETS`, the stem of an npz file, any TFDS name, as "stl10" or "emnist/letters"; or from outside:
        the path of an npz file, a registered name or an import path of a function that returns a `Dataset`.
      data_dir: folder of npz files or TFDS root; without it the TFDS default root is searched.

    Returns:
      The data set with its official training and test sets.

    Raises:
      UserError: it is in none of these places, or what lies there cannot be used.
    """
    if name == "digits":
        return _digits()
    if name.endswith(".npz"):
        return read_npz(located(name))
    if is_import_path(name) or name in LOADERS:
        return _made(name)
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


def _made(name: str) -> Dataset:
    """What a function from outside returns."""
    dataset = LOADERS.find(name)()
    if not isinstance(dataset, Dataset):
        raise UserError(f"data set {name} must be a function that returns a Dataset, not a {type(dataset).__name__}.")
    return dataset


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
        raise UserError(f"{folder} cannot be used: {in_one_line(error)}.") from error


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
