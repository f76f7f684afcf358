"""Natural federations of any size: samples client by client in memory-mapped files, never all in memory.

A folder holds `federation.json` (name, classes, their names) and, for the training and the test samples, `x_*.npy`
[n, H, W, channels], `y_*.npy` [n] int32 and `offsets_*.npy` [K + 1] int64: client k has the rows from offsets[k] up
to offsets[k + 1]. Letters: K clients, n samples, C classes.
"""

import json
import os
import secrets
import shutil
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_pcdd.data.dataset import MOST_CLASSES, Dataset, as_images, as_labels, count_classes
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Lists
from fedjax_pcdd.data.partition import natural
from fedjax_pcdd.errors import UserError, as_path, failed_write, in_one_line, is_there, shortened

META = "federation.json"
FORMAT = 1
_PARTS = ("train", "test")


class _Growing:
    """An npy file to which rows are appended; the header is rewritten at the end, when their number is known."""

    def __init__(self, path: Path, dtype: np.dtype, shape: tuple[int, ...]):
        self.file, self.dtype, self.shape, self.rows = open(path, "wb"), dtype, shape, 0  # noqa: SIM115
        self._head()

    def _head(self) -> None:
        header = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.rows, *self.shape)}
        np.lib.format.write_array_header_1_0(self.file, header)  # numpy leaves space for the number of rows to grow

    def append(self, rows: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(rows, self.dtype).tobytes())
        self.rows += len(rows)

    def close(self) -> None:
        self.file.seek(0)
        self._head()
        self.file.close()


def write_federation(
    path: str | os.PathLike,
    clients: Federation | Iterable[Sequence[Any]],
    *,
    num_classes: int | None = None,
    class_names: Sequence[str] | None = None,
    name: str | None = None,
) -> Path:
    """Write the samples of clients, one client after another, into a folder that `load_dataset` and `dataset` accept.

    Args:
      path: a folder that does not exist yet.
      clients: a federation, or for each client (x_train, y_train) or (x_train, y_train, x_test, y_test); this can be a
        generator, as only one client at a time is in memory. One without samples is left out.
      num_classes: C; None for the number of names, or without names for one more than the largest label.
      class_names: C names.
      name: of the data set; None for a federation's own, else for the folder's.

    Returns:
      The folder; `partition="natural"` gives each client its own samples.

    Raises:
      UserError: the folder exists or cannot be written, there are no clients, one of a federation has no samples, a
        text is not partitioned by speaker, or samples do not fit together.
    """
    folder, text = as_path(path, "path"), False
    if is_there(folder, Path.exists):
        raise UserError(f"{folder} exists already: choose another folder for the federation.")
    if num_classes is not None and (not isinstance(num_classes, int | np.integer) or num_classes < 1):
        raise UserError(f"must be a number of classes, not {shortened(num_classes)}.", field="num_classes")
    if not isinstance(name, str | None):
        raise UserError(f"must be a text, not {shortened(name)}.", field="name")
    listed = isinstance(class_names, Sequence | np.ndarray) and not isinstance(class_names, str)
    if class_names is not None and not (listed and all(isinstance(one, str) for one in class_names)):
        raise UserError(f"must be a list of names, not {shortened(class_names)}.", field="class_names")
    if isinstance(clients, Federation):
        if num_classes is not None or class_names is not None:
            raise UserError("a federation has its own classes: drop `num_classes` and `class_names`.")
        data, clients = clients.dataset, _clients_of(clients)
        num_classes, class_names, name, text = data.num_classes, data.class_names, name or data.name, data.text
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.parent / f".{secrets.randbelow(10**8)}.{folder.name}"
        temporary.mkdir()
    except OSError as error:
        raise failed_write(error, folder, "another folder") from error
    try:
        with ExitStack() as files:
            labels = _write_clients(temporary, clients, files)
        _write_meta(temporary, name or folder.name, labels, num_classes, class_names, text)
        temporary.rename(folder)
    except OSError as error:
        raise failed_write(error, folder, "another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_meta(
    folder: Path, name: str, labels: np.ndarray, classes: int | None, names: Sequence[str] | None, text: bool
) -> None:
    """Write what is known beside the samples; UserError if labels need more classes."""
    largest = int(labels.max())
    if classes is None and largest >= MOST_CLASSES:
        raise UserError(f"labels run to {largest}, which is no class: number them from 0, or give `num_classes`.")
    named = 0 if names is None else len(names)
    counted = count_classes(labels) if classes is None and names is None else max(named, largest + 1)
    count = counted if classes is None else int(classes)
    if largest >= count:
        raise UserError(f"labels run to {largest}, but there are {count} classes: give `num_classes` as it is.")
    if names is not None and named != count:
        raise UserError(f"names {named} classes of {count}: name all of them.", field="class_names")
    meta = {"format": FORMAT, "name": name, "num_classes": count, "class_names": None if names is None else list(names)}
    meta |= {"text": True} if text else {}
    (folder / META).write_text(json.dumps(meta), encoding="utf-8")


def _clients_of(federation: Federation) -> Iterator[tuple[np.ndarray, ...]]:
    if federation.validation is not None:
        raise UserError("validation samples would be nobody's: write the federation before they are held out.")
    data, (train, test) = federation.dataset, federation.partition
    if data.text and not _is_natural(federation):  # other windows would no longer follow each other as in the text
        raise UserError("a text is written by speaker: partition it by `natural`.")
    for k, (train_rows, test_rows) in enumerate(zip(train, test, strict=True)):
        if not len(train_rows) + len(test_rows):
            raise UserError(f"client {k} has no samples, so the clients after it would move up: leave it out.")
        yield data.x_train[train_rows], data.y_train[train_rows], data.x_test[test_rows], data.y_test[test_rows]


def _is_natural(federation: Federation) -> bool:
    """Whether each client has the samples of one group, in the order of the data set."""
    if (groups := federation.dataset.groups) is None:
        return False
    pairs = zip(map(Lists.of, natural(groups)), map(Lists.of, federation.partition), strict=True)
    return all(np.array_equal(a.flat, b.flat) and np.array_equal(a.sizes, b.sizes) for a, b in pairs)


def _write_clients(folder: Path, clients: Iterable[Sequence[Any]], opened: ExitStack) -> np.ndarray:
    """Write the samples of all clients and return the labels that occur."""
    files: dict[str, _Growing] = {}
    sizes: dict[str, list[int]] = {part: [] for part in _PARTS}
    known, brightest = set[int](), 0
    if not isinstance(clients, Iterable):
        raise UserError(f"takes the samples of one client after another, not {shortened(clients)}.", field="clients")
    for k, samples in enumerate(clients):
        if not isinstance(samples, list | tuple) or len(samples) not in (2, 4):
            raise UserError(f"client {k} must be (x_train, y_train, x_test, y_test), not {shortened(samples)}.")
        for part, (x, y) in zip(_PARTS, (samples[:2], samples[2:] or ((), ())), strict=True):
            y = as_labels(y, f"the array of {part} labels of client {k}")
            sizes[part].append(len(y))
            if not len(y) and np.size(x):
                raise UserError(f"the {part} samples of client {k} have no labels: give one for each.")
            if not len(y):
                continue
            images = as_images(x, f"the array of {part} samples of client {k}")
            given, is_image, x = np.asarray(x).dtype, np.ndim(x) > 2, images
            if y.shape != (len(x),) or y.max() >= 2**31:
                raise UserError(f"the {part} labels of client {k} must be {len(x)} integers below 2**31.")
            if given == np.uint8 and is_image:  # one client's images may be black; those of all are looked at below
                x, brightest = x.astype(np.uint8), max(brightest, int(x.max()))
            files = files or _opened(folder, x, opened)
            file = files[f"x_{part}"]
            if given.kind in "iu" and file.dtype == np.uint8 and x.dtype != np.uint8 and 0 <= x.min() <= x.max() <= 1:
                x = x.astype(np.uint8)  # levels, of a client whose images are all practically black
            if (file.shape, file.dtype) != (x.shape[1:], x.dtype):
                expected, actual = f"{file.dtype} {list(file.shape)}", f"{x.dtype} {list(x.shape[1:])}"
                # Wider integers are judged client by client, so that one whose images are 0 or 1 differs from others.
                advice = "integers as uint8, or all as float32" if file.shape == x.shape[1:] else "all the same size"
                kept = f"given as {given}, are kept as {actual}, those before as {expected}"
                raise UserError(f"the {part} samples of client {k}, {kept}: give {advice}.")
            file.append(x)
            files[f"y_{part}"].append(y)
            known.update(y.tolist())
    if not files:
        raise UserError("there are no clients with samples: give (x_train, y_train, x_test, y_test) of each.")
    if files["x_train"].dtype == np.uint8 and brightest == 1:
        raise UserError("all images are 0 or 1 in uint8, which would be divided by 255: give them as float32.")
    for part, counts in sizes.items():
        np.save(folder / f"offsets_{part}.npy", np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]))
    return np.array(sorted(known))


def _opened(folder: Path, x: np.ndarray, opened: ExitStack) -> dict[str, _Growing]:
    """Open the files for images like `x` and for labels; `opened` closes them."""
    kinds = {"x": (x.dtype, x.shape[1:]), "y": (np.dtype(np.int32), ())}
    paths = {folder / f"{key}_{part}.npy": kind for part in _PARTS for key, kind in kinds.items()}
    return {path.stem: opened.enter_context(closing(_Growing(path, *kind))) for path, kind in paths.items()}


def name_in(folder: Path) -> str:
    """The name of the data set in such a folder; the folder's if the file that has it cannot be read."""
    try:
        return str(json.loads((folder / META).read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, LookupError, TypeError):
        return folder.name


def read_federation(folder: Path) -> Dataset:
    """Read the data set of such a folder: images are memory-mapped, groups are the clients' numbers.

    Raises:
      UserError: a file is missing, truncated or changed.
    """
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            raise ValueError(f"format {meta['format']}, not {FORMAT}")
        names = meta["class_names"] and tuple(meta["class_names"])
        fields: dict[str, np.ndarray] = {}
        for part in _PARTS:
            x = np.load(folder / f"x_{part}.npy", mmap_mode="r")
            offsets, y = (np.load(folder / f"{key}_{part}.npy") for key in ("offsets", "y"))
            if not len(x) == len(y) == offsets[-1] or (np.diff(offsets) < 0).any():
                raise ValueError(f"x, y and offsets of {part} do not fit together")
            groups = np.repeat(np.arange(len(offsets) - 1, dtype=np.int32), np.diff(offsets))
            fields |= {f"x_{part}": x, f"y_{part}": y, f"groups_{part}": groups}
        known: Any = {"num_classes": meta["num_classes"], "class_names": names, "text": meta.get("text", False)}
        return Dataset(meta["name"], **fields, **known)
    except UserError:
        raise
    except (OSError, ValueError, LookupError, TypeError, EOFError, tokenize.TokenError) as error:
        reason = f"is not a complete federation ({in_one_line(error)})"
        raise UserError(f"{folder} {reason}: write it anew (fp.write_federation).") from error
