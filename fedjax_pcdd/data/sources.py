"""Where data sets come from: built in, a folder of npz files, or a prepared TensorFlow Datasets folder.

Nothing is ever downloaded here; `experiments/prepare.py` does that, once. docs/data.md describes the layouts.
"""

import os
import re
from collections.abc import Callable
from importlib.metadata import distribution
from pathlib import Path

import numpy as np

from fedjax_pcdd.data.dataset import Dataset, Keep, keep_all
from fedjax_pcdd.data.natural import META, name_in, read_federation
from fedjax_pcdd.data.npz import read_npz
from fedjax_pcdd.data.prepared import prepared_version, read_tfds
from fedjax_pcdd.errors import UserError, expanded, is_there, nearest
from fedjax_pcdd.registry import Registry, called, is_import_path, located, nearest_part

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
    "isic2019": "Fed-ISIC2019 with its centres: 18597 + 4650 colour 224x224 images, 8 classes; a file of your own",
    "hyperkvasir": "HyperKvasir, the 20 largest classes: colour 128x128 images; a file of your own",
    "odir": "ODIR, images of one label: colour 128x128 images, 8 classes; a file of your own",
}

# Required contents of files that the user has to provide.
_ARRAYS = "x_train, y_train, x_test and y_test"
_CONTENTS = {
    "isic2019": f"{_ARRAYS}, and the centres as domain_train and domain_test",
    "femnist": f"{_ARRAYS}, and the writers as writer_train and writer_test",
}

LOADERS: Registry[Callable[[], Dataset]] = Registry("data set", "datasets")
"""Functions from outside that load a data set, by name."""

TFDS_NAMES = {name: name for name in ("mnist", "fashion_mnist", "kmnist", "cifar10", "cifar100")}
TFDS_NAMES |= {"emnist": "emnist/balanced", "svhn": "svhn_cropped"}

_NAME = re.compile(r"\w[\w.+-]*(/\w[\w.+-]*)*")


def root_of(data_dir: str | os.PathLike | None) -> Path:
    """The folder to search: `data_dir`, or TFDS_DATA_DIR, or ~/tensorflow_datasets."""
    default = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return expanded(default if data_dir is None else data_dir)


def load(name: str, data_dir: str | os.PathLike | None = None, keep: Keep = keep_all, mapped: bool = False) -> Dataset:
    """Find a data set and read it into memory; nothing is downloaded.

    What is from outside is taken first: the folder of a federation, the path of an npz file, an import path or a
    registered name. Then are tried: built in ("digits"); `<data_dir>/<name>.npz`; a prepared TFDS folder.

    Args:
      name: one of `DATASETS`, the stem of an npz file, any TFDS name, such as "stl10" or "emnist/letters"; or from
        outside: a path, a registered name or an import path of a function that returns a `Dataset`.
      data_dir: folder of npz files or TFDS root; without it the TFDS default root is searched.
      keep: which samples to keep; the others of an npz file are left out.
      mapped: memory-map images of npz files and of prepared folders, which are unpacked once for this.

    Raises:
      UserError: the data set is in none of these places, or what is there cannot be used.
    """
    root = root_of(data_dir)
    if file := federation_file(name, root):
        return read_federation(file.parent)
    if name.endswith(".npz"):
        return read_npz(located(name), keep=keep, mapped=mapped)
    if is_import_path(name) or name in LOADERS:
        return _made(name)
    if name == "digits":
        return digits()
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot be the name of a data set; {nearest(name, DATASETS)}")
    file = root / f"{name}.npz"
    if is_there(file):
        return read_npz(file, name, keep, mapped)
    tfds_name = TFDS_NAMES.get(name, name)
    for folder in dict.fromkeys((root / tfds_name, root / name)):
        if prepared := prepared_version(folder):
            return read_tfds(prepared, name, mapped)
    if LOADERS.knows(name):  # registered where a run that is read began
        return _made(name)
    raise UserError(_advice(name, root, file, root / tfds_name))


def _made(name: str) -> Dataset:
    """The data set that a function from outside returns."""
    dataset = called(f"data set {name}", LOADERS.find(name))
    if not isinstance(dataset, Dataset):
        raise UserError(f"data set {name} must be a function that returns a Dataset, not a {type(dataset).__name__}.")
    return dataset


def federation_file(name: str, root: Path | None = None) -> Path | None:
    """The `federation.json` of the federation on disk that an option means, by its path or below `root`, if any."""
    files = located(name, f"{name}/{META}"), *([] if root is None else [root / name / META])
    return next((file for file in files if name and file.name == META and is_there(file)), None)


def name_of(name: str, data_dir: str | os.PathLike | None = None) -> str:
    """The name of the data set that an option means, without reading it; of one from a function, the option itself."""
    file = federation_file(name, root_of(data_dir))
    return name_in(file.parent) if file else name


def _advice(name: str, root: Path, file: Path, folder: Path) -> str:
    places = f"looked for {file.absolute()} and for a prepared TFDS data set in {folder.absolute()}"
    if name in TFDS_NAMES:
        command = f"fedjax-pcdd prepare {name}, with `data_dir={root}`"
        return f"The data set '{name}' was not found ({places}); prepare it by the command {command}"
    if name in DATASETS:
        contents = _CONTENTS.get(name, _ARRAYS)
        return f"The data set '{name}' was not found ({places}); put {name}.npz there, with {contents} (docs/data.md)."
    missing = "" if is_there(root, Path.is_dir) else f", but {root.absolute()} is no folder"
    return f"There is no data set '{name}' ({places}{missing}); {nearest_part(name, DATASETS)}"


def digits() -> Dataset:
    """Scikit-learn's digits; in each class every fifth image, in the given order, is a test image.

    So the split is about 80/20, stratified, and deterministic. Values 0..16 become 0..255 (rounded).
    """
    # The table that `sklearn.datasets.load_digits` reads; importing that takes longer than setting up a run.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",")
    x = np.rint(rows[:, :64] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8, 1)
    y = rows[:, 64].astype(np.int32)
    test = ranks(y) % 5 == 4
    return Dataset("digits", x[~test], y[~test], x[test], y[test], num_classes=10, class_names=tuple("0123456789"))


def ranks(labels: np.ndarray) -> np.ndarray:
    """For each of the labels [n], how many labels before it are equal."""
    order, counts = np.argsort(labels, kind="stable"), np.unique(labels, return_counts=True)[1]
    ranks = np.empty(len(labels), np.int64)
    ranks[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks
