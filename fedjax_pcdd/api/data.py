"""Data for `simulate`: data sets by name or from arrays, partitions of them, and models that fit.

Letters: n samples, K clients, C classes.
"""

from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import ArrayLike

from fedjax_pcdd import models
from fedjax_pcdd.api.runs import warn
from fedjax_pcdd.data import sources
from fedjax_pcdd.data.dataset import MOST_CLASSES, Dataset, as_images, as_labels, count_classes, largest_groups
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.errors import UserError, as_path, shortened
from fedjax_pcdd.methods import Traits
from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.training.advice import unused
from fedjax_pcdd.training.build import federate
from fedjax_pcdd.training.config import RUN, RunConfig
from fedjax_pcdd.training.fields import convert

LOADED: WeakKeyDictionary[Dataset, dict[str, Any]] = WeakKeyDictionary()  # data set -> options that load it again
DRAWN: WeakKeyDictionary[Federation, dict[str, Any]] = WeakKeyDictionary()  # federation -> options of its partition


def load_dataset(name: str | PathLike = "digits", data_dir: str | PathLike | None = None) -> Dataset:
    """Load a data set by its name, whole into memory; nothing is downloaded.

    Args:
      name: "digits" is built in; else one that docs/data.md names, or the path of an npz file of your own.
      data_dir: folder of npz files or of prepared TensorFlow Datasets; None for the default folder of the latter.

    Raises:
      UserError: the data set is missing or cannot be read.

    >>> digits = load_dataset("digits")
    >>> digits.x_train.shape, digits.num_classes
    ((1442, 8, 8, 1), 10)
    """
    name = fspath(name) if isinstance(name, PathLike) else name
    if not isinstance(name, str):
        raise UserError(f"takes the name of a data set, as 'digits', not {shortened(name)}.", field="name")
    folder = None if data_dir is None else as_path(data_dir, "data_dir")
    dataset = sources.load(name, folder)
    anywhere = name == "digits" and sources.federation_file(name, sources.root_of(folder)) is None
    LOADED[dataset] = {"dataset": name} | ({} if anywhere else {"data_dir": folder and folder.absolute()})
    return dataset


def from_arrays(
    x_train: ArrayLike,
    y_train: ArrayLike,
    x_test: ArrayLike,
    y_test: ArrayLike,
    *,
    name: str = "arrays",
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    groups: tuple[ArrayLike, ArrayLike] | None = None,
) -> Dataset:
    """Build a data set from arrays.

    Args:
      x_train: images [n, H, W, channels] or [n, H, W], or feature vectors [n, D], which become images [n, 1, D, 1].
        Integer images in [0, 255] reach the model scaled to [0, 1], all other numbers as they are, as float32.
      y_train: [n] integers in [0, C), or floats that are such.
      x_test, y_test: the same for the test samples.
      name: selects the customary normalisation ("cifar10", "svhn", ...); for other names images are scaled to [0, 1].
      num_classes: C; None for the number of names, or without names for one more than the largest label.
      class_names: C names, for pictures.
      groups: writer or domain of each training and of each test sample, for the partition "natural".

    Raises:
      UserError: the arrays do not fit together.

    >>> points = from_arrays([[0.0, 1.0], [0.5, 0.25]], [0, 1], [[1.0, 1.0]], [1])
    >>> points.x_train.shape, points.x_train.ravel().tolist()
    ((2, 1, 2, 1), [0.0, 1.0, 0.5, 0.25])
    """
    y_train, y_test = as_labels(y_train, "y_train"), as_labels(y_test, "y_test")
    if not isinstance(class_names, Sequence | np.ndarray | None) or isinstance(class_names, str):
        raise UserError(f"must be a list of names, not {shortened(class_names)}.", field="class_names")
    names = None if class_names is None else tuple(map(str, class_names))
    if num_classes is None:
        if (largest := max(int(y.max(initial=0)) for y in (y_train, y_test))) >= MOST_CLASSES:
            raise UserError(f"a label is {largest}: number the classes from 0, or give `num_classes`.")
        labels = np.concatenate([y_train.astype(int), y_test.astype(int)])
        num_classes = count_classes(labels) if names is None else max(len(names), largest + 1)
    images = as_images(x_train, "x_train"), as_images(x_test, "x_test")
    if not len(images[0]):
        raise UserError("x_train holds no samples: give at least one.")
    if groups is not None and not (isinstance(groups, tuple | list) and len(groups) == 2):
        raise UserError("groups must be a pair: those of the training and those of the test samples.")
    train_groups, test_groups = (None, None) if groups is None else map(_as_groups, groups)
    return Dataset(name, images[0], y_train, images[1], y_test, num_classes, names, train_groups, test_groups)


def _as_groups(groups: ArrayLike) -> np.ndarray:
    """Groups [n]; names that pandas keeps as objects become texts."""
    array = np.asarray(groups)
    return array.astype(str) if array.dtype == object and all(isinstance(g, str) for g in array.flat) else array


def partition(
    dataset: Dataset,
    kind: str = "dirichlet",
    *,
    clients: int | None = None,
    beta: float = 0.1,
    classes_per_client: int = 2,
    seed: int = 0,
    retry: bool = True,
    min_samples: int = 10,
    doubled: bool = False,
) -> Federation:
    """Partition a data set among clients, as sweeps do with options of these names.

    Args:
      dataset: what is partitioned.
      kind: "dirichlet"; "pcdd", by which every client owns `classes_per_client` classes; "extended_dirichlet", the same
        with shares by Dirichlet(beta); "quantity", unequal sizes by Dirichlet(beta); "iid"; or "natural", one client
        for each writer or domain.
      clients: K; None for 10, or for all groups if the partition is "natural".
      beta: Dirichlet concentration, > 0; the smaller, the fewer classes a client sees.
      classes_per_client: for "pcdd".
      seed: in [0, 2**32).
      retry: draw a Dirichlet partition again until every client has `min_samples` training samples.
      min_samples: see `retry`.
      doubled: the double allocation of the published FedMR code, for "pcdd" with fewer than all classes a client.

    Returns:
      The federation; `federation.class_counts` [K, C] has each client's samples per class, and `federation.plot()`
      draws them. A warning names arguments that have no effect with this kind.

    Raises:
      UserError: an unknown kind, or an impossible partition.

    >>> federation = partition(load_dataset("digits"), "pcdd", clients=5, classes_per_client=2)
    >>> (federation.class_counts > 0).sum(1).tolist()
    [2, 2, 2, 2, 2]
    """
    if not isinstance(dataset, Dataset):
        raise UserError(f"takes an fp.Dataset, as fp.from_arrays makes one, not {shortened(dataset)}.", field="dataset")
    if not isinstance(kind, str):
        hint = ": register it by `@fp.register_partition`" if callable(kind) else ""
        raise UserError(f"takes a name, as 'dirichlet', not {shortened(kind)}{hint}.", field="kind")
    options = {"beta": beta, "classes_per_client": classes_per_client, "seed": seed, "retry": retry}
    options |= {"clients": clients, "min_samples": min_samples, "doubled": doubled}
    parsed = {name: convert(RUN[name], None if value is None else str(value)) for name, value in options.items()}
    if kind == "natural" and clients is not None:
        dataset = largest_groups(dataset, parsed["clients"])
    config = RunConfig(**(drawn := {"partition": kind, **parsed}))
    federation = federate(config, dataset)  # which refuses an unknown kind, with the nearest known one
    DRAWN[federation] = drawn
    for sentence in unused(config, Traits()):
        warn(sentence.replace("`partition=", "`kind="))
    return federation


def build_model(name: str, data: Dataset | Federation, *, norm: str = "batch") -> Classifier:
    """Build a model for a data set, to look at or to change before `simulate` trains it.

    Args:
      name: as in `fp.models.MODELS`.
      data: gives the shape of the images and the number of classes.
      norm: "batch" or "group", where the model normalises.

    Returns:
      A Flax module: backbone, optional linear layers after it (`neck`), linear head. Change it with `clone`.

    Raises:
      UserError: an unknown name, or images that do not suit the model.

    >>> model = build_model("mlp", load_dataset("digits"))
    >>> narrow = model.clone(neck=1, neck_width=3)  # features of three numbers
    """
    data = data.dataset if isinstance(data, Federation) else data
    if not isinstance(data, Dataset):
        raise UserError(f"takes a data set or a federation, not {shortened(data)}.", field="data")
    if not isinstance(norm, str):
        raise UserError(f"takes 'batch' or 'group', not {shortened(norm)}.", field="norm")
    return models.build(
        name, num_classes=data.num_classes, image_shape=data.x_train.shape[1:], text=data.text, norm=norm
    )
