"""Tasks by domain: the same classes in several styles, one participant per style, and unlabelled public images.

Huang, Ye and Du, "Learn from Others and Be Yourself in Heterogeneous Federated Learning", CVPR 2022 (FCCL). The two
published tasks are `digits` and `office_home`; the others need less or no data. Sizes, transformations and file
layouts are in docs/data.md. Letters: n images, S side in pixels, C classes.
"""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedjax_pcdd.data import domain_shifts as shifts
from fedjax_pcdd.data import sources
from fedjax_pcdd.data.augment import stem
from fedjax_pcdd.data.dataset import as_labels
from fedjax_pcdd.data.npz import Archive, read_arrays, read_images
from fedjax_pcdd.errors import UserError, is_there, nearest
from fedjax_pcdd.registry import located

SPLITS = ("held_out", "code")
HELD_OUT = 0.3
_IMAGES = ("x_train", "x")
_ARCHIVE = ("x", "y", "domain", "domains")


class Domain(NamedTuple):
    """One participant's data: name, private images [n, S, S, 3] uint8, labels [n] int32 in [0, C), and test data."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


class Recipe(NamedTuple):
    """The description of a task, known before its data is read.

    Args:
      description: a line for the help.
      layout: where the images lie: "shifts" (made from the built-in digits), "files" (a data set for each domain) or
        "archive" (one file without a split).
      domains: names, one for each participant.
      private: number of private images of each domain; None for all that are not test images.
      local_epochs: E of each domain.
      num_classes: C.
      top: an answer is right if the label is among the first `top`.
      public: data set of the public images, for `load_public`.
      public_samples: number of public images.
      public_epochs: passes over the public images in a round.
      side: default of S.
    """

    description: str
    layout: str
    domains: tuple[str, ...]
    private: tuple[int | None, ...]
    local_epochs: tuple[int, ...]
    num_classes: int = 10
    top: int = 1
    public: str = "cifar100"
    public_samples: int = 5000
    public_epochs: int = 1
    side: int = 32


TASKS = {
    "digits_domains": Recipe(
        "four looks of scikit-learn's digits, built in", "shifts",
        tuple(shifts.DOMAIN_SHIFTS), (150,) * 4, (5,) * 4, public="digits_public", public_samples=1000, side=16,
    ),
    "digits2": Recipe("the first two domains of digits", "files", ("mnist", "usps"), (150, 80), (40, 35)),
    "digits": Recipe(
        "MNIST, USPS, SVHN and SYN (FCCL, tables 1 and 2)", "files",
        ("mnist", "usps", "svhn", "syn"), (150, 80, 5000, 1800), (40, 35, 3, 4),
    ),
    "office_caltech10": Recipe(
        "ten classes of objects from Amazon, Caltech-256, a DSLR and a webcam", "archive",
        ("amazon", "caltech10", "dslr", "webcam"), (None,) * 4, (15, 15, 30, 30),
    ),
    "office_home": Recipe(
        "Office-Home: 65 classes of objects in four styles (FCCL, tables 1, 2 and 3)", "archive",
        ("Art", "Clipart", "Product", "Real World"), (1400, 2000, 2500, 2000), (10, 6, 6, 6),
        num_classes=65, top=5, public_epochs=2,
    ),
}  # fmt: skip
"""The tasks by name."""


class Task(NamedTuple):
    """A task whose data is read and whose private images are drawn."""

    name: str
    recipe: Recipe
    domains: tuple[Domain, ...]

    @property
    def side(self) -> int:
        """S, which the public images must share."""
        return self.domains[0].x_train.shape[1]


def load_task(
    name: str, data_dir: str | os.PathLike | None = None, *, seed: int, split: str = "held_out", side: int | None = None
) -> Task:
    """Read a task's domains and draw their private images; nothing is downloaded.

    A domain's draw depends on the seed and its name only: `digits` and `digits2` share their subset of MNIST.

    Args:
      name: a key of TASKS.
      data_dir: as for `sources.load`.
      seed: >= 0; decides which images are private and, without an original split, which are test images.
      split: "held_out" tests on 30 % of each class that are never private; "code" (`office_home` only) is FCCL's
        published code: all images of the domain are test images, and the private ones are the first of the other 70 %,
        in order of their class.
      side: S; by default 16 for `digits_domains`, else 32.

    Raises:
      UserError: an unknown name, an option out of range, missing or unsuitable files.
    """
    if name not in TASKS:
        raise UserError(f"There is no task '{name}'; {nearest(name, TASKS)}")
    if split not in SPLITS:
        raise UserError(f"There is no split '{split}'; {nearest(split, SPLITS)}")
    if split == "code" and name != "office_home":
        raise UserError(f"The split 'code' exists for office_home only; use 'held_out' for {name}.")
    recipe = TASKS[name]
    side = recipe.side if side is None else side
    _check_seed(seed)
    _check_side(side)
    if recipe.layout == "shifts":
        pools = [Domain(domain, *shifts.shifted_digits(domain, side)) for domain in recipe.domains]
    elif recipe.layout == "files":
        pools = _from_files(name, sources.root_of(data_dir))
    else:
        pools = _from_archive(name, sources.root_of(data_dir), seed, split)
    domains = tuple(
        _drawn(pool, size, side, None if split == "code" else _generator(seed, f"{pool.name} private"))
        for pool, size in zip(pools, recipe.private, strict=True)
    )
    return Task(name, recipe, domains)


def load_public(
    name: str, data_dir: str | os.PathLike | None = None, *, samples: int = 5000, seed: int, side: int = 32
) -> np.ndarray:
    """Draw public images; labels are neither read from npz files nor returned.

    Args:
      name: "digits_public" (built in; other digits than those of `digits_domains`) or any data set that
        `sources.load` finds; an npz file needs no more than `x_train`, `x_train_delta` or `x`.
      data_dir: as for `sources.load`.
      samples: N_0, drawn without replacement from the training images.
      seed: >= 0.
      side: S. Images are resized, except that for "tiny_imagenet" a window of S x S is cut from each, as published.

    Returns:
      [N_0, S, S, 3] uint8; `augment.public_pipeline(name, side)` feeds them to a model.

    Raises:
      UserError: a missing or unsuitable file, or fewer than N_0 images.
    """
    _check_seed(seed)
    built_in = name == "digits_public"
    if built_in:
        _check_side(side)
    images = shifts.public_digits(side) if built_in else _unlabelled(name, sources.root_of(data_dir))
    if not 1 <= samples <= len(images):
        raise UserError(f"'{name}' has {len(images)} images: ask for 1 to {len(images)} samples, not {samples}.")
    random = _generator(seed, f"{stem(name)} public")
    images = images[random.permutation(len(images))[:samples]]
    if stem(name) == "tiny_imagenet":
        images = shifts.windows(images, side, random)
    return shifts.resize(images, side)


def load_public_labels(name: str, data_dir: str | os.PathLike | None = None, *, samples: int, seed: int) -> np.ndarray:
    """Labels [N_0] int32 of the images that `load_public` draws with these arguments.

    Raises:
      UserError: as in `load_public`, or the images have no labels.
    """
    root = sources.root_of(data_dir)
    if name == "digits_public":
        labels = shifts.public_digit_labels()
    else:
        archive = _archive(name, root)
        labels = _labels(archive, name) if archive else sources.load(name, root).y_train
    return labels[_generator(seed, f"{stem(name)} public").permutation(len(labels))[:samples]].astype(np.int32)


def _labels(archive: Archive, name: str) -> np.ndarray:
    """Labels [n] of the images of a file; UserError if it has none, or not as many."""
    key = next((key for key in ("y_train", "y") if key in archive.names), "")
    labels = archive.read(key) if key else None
    if labels is None or labels.shape[:1] != archive.header(_stored(archive))[0][:1]:
        raise UserError(f"'{name}' has no labels of its images: add y_train to it, or train without `transfer_epochs`.")
    return as_labels(labels, f"{key} of {archive.file}")


def _check_seed(seed: int):
    if seed < 0:
        raise UserError(f"The seed must be 0 or more, not {seed}.")


def _check_side(side: int):
    if side < 8:
        raise UserError(f"The side of the images must be at least 8 pixels, not {side}.")


def _generator(seed: int, purpose: str) -> np.random.Generator:
    """A random stream for one purpose, independent of all other domains and purposes."""
    return np.random.default_rng([seed, *purpose.encode()])


def _drawn(pool: Domain, size: int | None, side: int, random: np.random.Generator | None) -> Domain:
    """A domain with the first `size` training images, in random order or (without `random`) as given; all resized."""
    available = len(pool.y_train)
    if size is not None and size > available:
        advice = "put the whole data set there."
        raise UserError(f"The domain '{pool.name}' needs {size} training images but has {available}; {advice}")
    rows = (np.arange(available) if random is None else random.permutation(available))[:size]
    x_train, x_test = shifts.resize(pool.x_train[rows], side), shifts.resize(pool.x_test, side)
    return Domain(pool.name, x_train, pool.y_train[rows].astype(np.int32), x_test, pool.y_test.astype(np.int32))


def _from_files(name: str, root: Path) -> list[Domain]:
    recipe = TASKS[name]
    if missing := [f"{domain}.npz" for domain in recipe.domains if not _present(domain, root)]:
        layout = "with x_train, y_train, x_test and y_test, see docs/data.md"
        raise UserError(f"The task '{name}' lacks {', '.join(missing)} in {root}; put them there ({layout}).")
    pools = []
    for domain in recipe.domains:
        dataset = sources.load(domain, root)
        if max(dataset.y_train.max(), dataset.y_test.max(initial=0)) >= recipe.num_classes:
            wanted = f"labels from 0 to {recipe.num_classes - 1}"
            raise UserError(f"'{domain}' in {root} has labels of other classes; the task '{name}' needs {wanted}.")
        pools.append(Domain(domain, dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test))
    return pools


def _present(name: str, root: Path) -> bool:
    folders = (root / sources.TFDS_NAMES.get(name, name), root / name)
    return is_there(root / f"{name}.npz") or any(is_there(folder, Path.is_dir) for folder in folders)


def _from_archive(name: str, root: Path, seed: int, split: str) -> list[Domain]:
    file = root / f"{name}.npz"
    if not is_there(file):
        layout = "with x, y, domain and domains, see docs/data.md"
        raise UserError(f"The task '{name}' lacks {name}.npz in {root}; put it there ({layout}).")
    arrays = read_arrays(file, _ARCHIVE)
    if fault := _fault(arrays, TASKS[name]):
        raise UserError(f"{file} cannot be used: {fault}; docs/data.md describes its layout.")
    x, y, domain = arrays["x"], arrays["y"], arrays["domain"]
    names, pools = arrays["domains"].astype(str).ravel().tolist(), []
    for domain_name in TASKS[name].domains:
        rows = np.flatnonzero(domain == names.index(domain_name))
        rows = rows[np.argsort(y[rows], kind="stable")]
        tests = _held_out(y[rows], _generator(seed, f"{domain_name} tests"))
        train, test = rows[~tests], rows if split == "code" else rows[tests]
        if not len(test):
            raise UserError(f"{file} has too few images of '{domain_name}' for tests: put four of a class there.")
        pools.append(Domain(domain_name, x[train], y[train], x[test], y[test]))
    return pools


def _held_out(labels: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Which images are held out, [n] bool: 30 % of each class at random, rounded down."""
    tests = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        tests[members[: int(HELD_OUT * len(members))]] = True
    return tests


def _fault(arrays: dict[str, np.ndarray], recipe: Recipe) -> str | None:
    """Why the arrays of an archive cannot be used; None if they can."""
    if absent := [key for key in _ARCHIVE if key not in arrays]:
        return f"it lacks {', '.join(absent)}"
    x, y, domain, names = (arrays[key] for key in _ARCHIVE)
    if x.dtype != np.uint8 or x.ndim != 4:
        return f"x must be uint8 [n, H, W, channels], not {x.dtype} {list(x.shape)}"
    for key, values in (("y", y), ("domain", domain)):
        if values.dtype.kind not in "iu" or values.shape != (len(x),):
            return f"{key} must be integers [{len(x)}], not {values.dtype} {list(values.shape)}"
    if y.size and not 0 <= y.min() <= y.max() < recipe.num_classes:
        return f"y must lie in [0, {recipe.num_classes}), not from {y.min()} to {y.max()}"
    try:
        present = names.astype(str).ravel().tolist()
    except UnicodeDecodeError:
        return "its domains must be texts, not bytes"
    absent = [name for name in recipe.domains if name not in present or not np.any(domain == present.index(name))]
    return f"it has no images of {', '.join(absent)}" if absent else None


def _unlabelled(name: str, root: Path) -> np.ndarray:
    """Training images [n, H, W, channels] of a data set, uint8."""
    archive = _archive(name, root)
    if archive is None:
        return sources.load(name, root).x_train
    key = _stored(archive).removesuffix("_delta")
    try:
        images = read_images(archive, key)
    except UserError as error:
        raise UserError(f"{archive.file} cannot be used: {error}") from None
    if images.dtype != np.uint8:
        raise UserError(f"{archive.file} cannot be used: {key} must be uint8, not {images.dtype}.")
    return images


def _archive(name: str, root: Path) -> Archive | None:
    """The npz file of a data set, by its path or below `root`; None if it is found elsewhere."""
    file = located(name) if name.endswith(".npz") else root / f"{name}.npz"
    if name == "cifar100" and not _present(name, root) and _present("cifar100_subset", root):
        raise UserError(f"{file} is not there, but a part of it is: name cifar100_subset as the public data set.")
    return Archive(file) if name != "digits" and is_there(file) else None


def _stored(archive: Archive) -> str:
    """The array of a file that holds the public images."""
    names = [name for key in _IMAGES for name in (f"{key}_delta", key) if name in archive.names]
    if not names:
        raise UserError(f"{archive.file} holds no images; it needs {', '.join(_IMAGES)}.")
    return names[0]
