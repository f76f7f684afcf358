"""The inputs of a run: recorded when it begins, in resolved.json and in every checkpoint, and the same when it resumes.

Options are recorded as they are, so that a message can name the one that differs; data sets, partitions and the user's
own files as digests.
"""

import functools
import hashlib
import inspect
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import CodeType
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax import nnx

from fedjax_pcdd import __version__
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.availability import Availability
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Lists
from fedjax_pcdd.errors import Say, UserError
from fedjax_pcdd.methods import Method
from fedjax_pcdd.registry import is_of_package
from fedjax_pcdd.training.config import NOT_COMPUTED, RunConfig, values
from fedjax_pcdd.training.folder import RunFolder, dumps
from fedjax_pcdd.training.outside import onlookers, origins_of

RESOLVED = "resolved.json"
WHOLE = 2**31  # bytes; of a larger array only `PIECES` evenly spread pieces are hashed
PIECES = 1024
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the text of an object, of no meaning
AGAIN = "put it back as it was, or start a new run"


def inputs_of(
    config: RunConfig, method: Method, federation: Federation, data: str, public: Any, pipeline: Pipeline | None = None,
    labels: np.ndarray | None = None, availability: Availability | None = None, model: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """The inputs of a run, in JSON's types.

    Args:
      config, method: as the user configured them.
      data: digest of the federation's data set.
      public: unlabelled images [N, H, W, channels], () if the run has none.
      pipeline: that of the images, if it is not the one of the options.
      labels: those of the public images [N], if the run trains on them.
      availability: that of the clients, if they are not always available.
      model: the object, or the list of them, that the user passed in place of a name.
    """
    options = {name: value for name, value in values(config, method).items() if name not in NOT_COMPUTED}
    files, watching = {name: origin.sha256 for name, origin in origins_of(config).items()}, onlookers(vars(config))
    return {
        "options": json.loads(json.dumps(options, default=str)),
        "data set": data,
        "pipeline": None if pipeline is None else repr(replace(pipeline, own=None)),
        "public images": digest([np.asarray(public)]) if np.size(public) else None,
        "public labels": None if labels is None else digest([labels]),
        "partition": digest(a for part in federation.partition for a in (Lists.of(part).flat, Lists.of(part).sizes)),
        "availability": _draws(availability, config.seed),
        "files": {name: sha256 for name, sha256 in files.items() if name not in watching},
        "onlookers": {name: sha256 for name, sha256 in files.items() if name in watching},
        "objects": {
            "model": described(model),
            "method": None if is_of_package(type(method)) else described(type(method)),
        },
        "versions": {"fedjax-pcdd": __version__} | {name: metadata.version(name) for name in ("jax", "jaxlib")},
    }


def check_inputs(recorded: Mapping[str, Any] | None, now: Mapping[str, Any], run: Path, say: Say) -> None:
    """Compare the inputs that a run began with (None if an earlier version wrote it) with those of its continuation.

    Args:
      run: its folder.
      say: called if versions differ.

    Raises:
      UserError: something else differs, which the error names.
    """
    recorded = recorded or {}
    for name, value in (recorded.get("options") or {}).items():
        if (other := now["options"].get(name, value)) != value:
            if name == "partition" and {Path(value).name, Path(other).name} == {"partition.npz"}:
                continue  # the file of a folder that was moved; its lists are compared below
            raise UserError(f"`{name}` was {value} when the run in {run} began, and config.yaml has {other}: {AGAIN}.")
    for name in ("data set", "pipeline", "public images", "public labels", "partition"):
        if name in recorded and recorded[name] != now[name]:
            if name.startswith("public"):
                wrong, again = "are not those", "put them back as they were, or start a new run"
            else:
                wrong, again = "is not the one", AGAIN
            raise UserError(f"the {name} of the run in {run} {wrong} that it began with: {again}.")
    if recorded and recorded.get("availability") != now["availability"]:
        raise UserError(f"clients were drawn otherwise when the run in {run} began: start a new run.")
    for name, sha256 in (recorded.get("files") or {}).items():
        if now["files"].get(name, sha256) != sha256:  # options that are others were found above
            raise UserError(f"{name} is not what the run in {run} began with: {AGAIN}.")
    for name, sha256 in (recorded.get("onlookers") or {}).items():
        if now["onlookers"].get(name, sha256) != sha256:
            say(f"{name} has changed since the run in {run} began: what it writes may be otherwise from here on.")
    for name, text in (recorded.get("objects") or {}).items():
        if text is not None and now["objects"].get(name) != text:
            raise UserError(f"the {name} is not the one that the run in {run} began with: {AGAIN}.")
    for name, version in (recorded.get("versions") or {}).items():
        if (new := now["versions"].get(name)) != version:
            say(f"{name} was {version} when the run in {run} began, and is {new} now: bits may differ.")


def described(part: Any) -> str | None:
    """A digest of a module, a class or a function of the user, or of a list of them, as far as its own text tells it.

    This is the text of the class or function, and of an object also its fields or, in NNX, its numbers. What these call
    is not looked at.
    """
    if part is None or isinstance(part, list | tuple):
        return None if part is None else hashlib.sha256("".join(str(described(x)) for x in part).encode()).hexdigest()
    is_object = isinstance(part, nn.Module | nnx.Module)
    text = _text(type(part) if is_object else part)
    if isinstance(part, nn.Module):
        text += repr(part)
    if isinstance(part, nnx.Module):
        text += digest(np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(part, nnx.Param)))
    return hashlib.sha256(_ADDRESS.sub("", text).encode()).hexdigest()[:32]


def _text(part: Any) -> str:
    """The source of a class or function, or its code if it has no source; of another object also what it holds."""
    if isinstance(part, functools.partial):
        return f"{_text(part.func)}{part.args}{part.keywords}"
    code = getattr(inspect.unwrap(part), "__code__", None)
    with suppress(OSError, TypeError):  # typed in, or written in C
        text = inspect.getsource(part)
        # Of a part made by `exec`, Python 3.13 finds that of `python -c`, or lines of its module's file.
        of_another = inspect.isclass(part) and f"class {part.__name__}" not in text
        if not (of_another or (code and code.co_filename == "<string>")):
            return text
    if code:
        return _of_code(code)
    if not inspect.isclass(part):
        return f"{_text(type(part))}{part!r}"
    inner = [inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value))) for value in vars(part).values()]
    return part.__name__ + "".join(_of_code(value.__code__) for value in inner if inspect.isfunction(value))


def _of_code(code: CodeType) -> str:
    """What a function does, wherever its lines stand."""

    def plain(constant: Any) -> str:
        if isinstance(constant, frozenset):  # whose order is another in each process
            return str(sorted(map(plain, constant)))
        return _of_code(constant) if isinstance(constant, CodeType) else repr(constant)

    return f"{code.co_code!r}{code.co_names}{list(map(plain, code.co_consts))}"


def _draws(availability: Availability | None, seed: int) -> str | None:
    """A digest of the clients available and staying in the first rounds; None if all always are available and stay."""
    if availability is None:
        return None
    return digest(draw(seed, round) for round in range(3) for draw in (availability.available, availability.stay))


def digest_of(dataset: Dataset) -> str:
    """Digest of all samples and labels of a data set."""
    arrays = (dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test)
    return digest([*arrays, *(groups for groups in (dataset.groups_train, dataset.groups_test) if groups is not None)])


def digest(arrays: Iterable[np.ndarray]) -> str:
    """The first 32 hexadecimal digits of a SHA-256 of arrays: their types, shapes and bytes."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(f"{array.dtype} {array.shape}".encode())
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        step = len(flat) // PIECES if len(flat) > WHOLE else max(1, len(flat))
        for start in range(0, len(flat), step):
            total.update(flat[start : start + min(step, 2**20 if len(flat) > WHOLE else step)].data)
    return total.hexdigest()[:32]


def write_resolved(folder: RunFolder, resolved: Mapping[str, Any]) -> None:
    """Write resolved.json, with a checksum of its content."""
    plain = json.loads(dumps(resolved))
    folder.write_json(RESOLVED, plain | {"crc": _crc(plain)})


def read_resolved(folder: RunFolder, kept: Callable[[], Mapping[str, Any] | None]) -> dict[str, Any] | None:
    """The content that `write_resolved` wrote; if the file is missing or damaged, the copy in the newest checkpoint.

    Args:
      kept: returns the record of the newest checkpoint, None if there is none.

    Returns:
      None if nothing was resolved yet: the run was killed before it began.

    Raises:
      UserError: it is lost, and with it the number of lanes, without which the run cannot continue as it began.
    """
    damage = None
    try:
        resolved = folder.read_json(RESOLVED)
        if resolved is not None and resolved.get("crc", _crc(resolved)) == _crc(resolved):
            return resolved
    except UserError as error:
        damage = error
    record = kept()
    if record is None and damage is None:
        return None
    if record is None or "resolved" not in record:
        path = folder.path / RESOLVED
        raise UserError(f"{path} is missing or damaged, and no checkpoint has what it noted: {AGAIN}.") from damage
    return dict(record["resolved"])


def _crc(resolved: Mapping[str, Any]) -> int:
    plain = {key: value for key, value in resolved.items() if key != "crc"}
    return zlib.crc32(json.dumps(plain, sort_keys=True).encode())
