"""Data sets prepared by TensorFlow Datasets, read without TensorFlow into memory or into mapped files.

Letters: n images, C classes.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.unpacked import unpacked
from fedjax_pcdd.errors import UserError, in_one_line
from fedjax_pcdd.registry import file_sha256

_VERSION = re.compile(r"\d+\.\d+\.\d+")


def prepared_version(folder: Path) -> Path | None:
    """The newest prepared version in a TFDS data set's folder, with or without configurations, or None.

    Raises:
      UserError: there are several configurations.
    """
    files = [file for depth in ("*", "*/*") for file in folder.glob(f"{depth}/dataset_info.json")]
    versions = [file.parent for file in files if _VERSION.fullmatch(file.parent.name)]
    parents = sorted({path.parent for path in versions})
    if len(parents) > 1 and folder not in parents:
        names = [f"{folder.name}/{path.name}" for path in parents]
        raise UserError(f"{folder} holds several configurations; name one of {', '.join(names)}.")
    versions = [path for path in versions if path.parent == folder or folder not in parents]
    return max(versions, key=lambda path: tuple(map(int, path.name.split("."))), default=None)


def read_tfds(folder: str | os.PathLike, name: str, mapped: bool = False) -> Dataset:
    """Read a prepared TFDS data set with features "image" and "label"; TensorFlow is not needed.

    Args:
      folder: `.../<name>/<version>` as TFDS wrote it, in the array_record format.
      name: the data set's name.
      mapped: decode images into files, once, and memory-map these; see `unpacked.unpacked`.

    Raises:
      UserError: the data set is damaged, in another format, lacks these features or splits, or has images of several
        sizes; or there is no room for the files.
    """
    import tensorflow_datasets as tfds

    try:
        return _from_builder(tfds.builder_from_directory(folder), name, mapped)
    except NotImplementedError as error:
        advice = f"remove it and prepare it anew by fedjax-pcdd prepare {name} with the same `data_dir`."
        raise UserError(f"{folder} is not in the array_record format; {advice}") from error
    except ImportError as error:
        raise UserError(f"{folder} is read by array-record, which is missing: pip install array-record.") from error
    except Exception as error:  # TFDS, protobuf and array_record raise all kinds for damaged files
        if isinstance(error, UserError) and str(folder) in str(error):
            raise
        raise UserError(f"{folder} cannot be used: {in_one_line(error)}.") from error


def _from_builder(builder: Any, name: str, mapped: bool) -> Dataset:
    features, splits = builder.info.features or {}, set(builder.info.splits)
    test = "test" if "test" in splits else "validation"
    if not {"image", "label"} <= set(features) or not {"train", test} <= splits:
        raise UserError("it needs the features image and label and the splits train and test (or validation).")
    read = _mapped if mapped else _stacked
    (x_train, y_train), (x_test, y_test) = read(builder, "train"), read(builder, test)
    label = features["label"]
    num_classes = getattr(label, "num_classes", None) or int(max(y_train.max(), y_test.max())) + 1
    names = tuple(getattr(label, "names", None) or ())
    return Dataset(name, x_train, y_train, x_test, y_test, num_classes, names if len(names) == num_classes else None)


def _stacked(builder: Any, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images [n, H, W, channels] and labels [n] of a split."""
    examples = builder.as_data_source(split)
    first, labels = examples[0]["image"], np.zeros(len(examples), np.int64)
    images = np.empty((len(examples), *first.shape), first.dtype)
    for i, example in enumerate(examples):
        images[i], labels[i] = _like(example["image"], first), example["label"]
    return images, labels


def _mapped(builder: Any, split: str) -> tuple[np.ndarray, np.ndarray]:
    """The same, memory-mapped from files into which images and labels are decoded one by one."""
    import tensorflow_datasets as tfds

    examples = builder.as_data_source(split)
    count, first, folder = len(examples), examples[0]["image"], Path(builder.data_dir)
    files = (folder / "features.json", *map(Path, builder.info.splits[split].filepaths))
    digest = hashlib.sha256(b"".join(bytes.fromhex(file_sha256(file)) for file in files)).hexdigest()

    def images() -> Iterator[np.ndarray]:
        return (_like(example["image"], first)[None] for example in examples)

    def labels() -> Iterator[np.ndarray]:
        encoded = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
        return (np.array([example["label"]], np.int32) for example in encoded)

    x = unpacked(folder, f"x_{split}", digest, first, count, images)
    return x, np.array(unpacked(folder, f"y_{split}", digest, np.zeros((), np.int32), count, labels))


def _like(image: np.ndarray, first: np.ndarray) -> np.ndarray:
    if (image.shape, image.dtype) != (first.shape, first.dtype):
        raise UserError("its images differ in size; resize them and store them as an npz file.")
    return image
