"""Copies of pytrees that outlive their buffers, by name, with fingerprints: the arrays of a checkpoint."""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.engine.mesh import here, place

ArrayType = tuple[str, tuple[int, ...]]


def named(part: str, tree: Any) -> dict[str, Any]:
    """Leaves by name, for example `server['params']['kernel']`, in the order of the tree."""
    return {part + jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def take(part: str, tree: Any) -> dict[str, Any]:
    """Copies of the leaves by name; they share no memory with the tree, which may be donated at once.

    Of what lies on several devices, each of which has all of it, one copy is taken, by this process alone.
    """
    leaves = named(part, here(tree))
    for leaf in leaves.values():
        if isinstance(leaf, jax.Array) and not _on_cpu(leaf):
            leaf.copy_to_host_async()
    return {name: _copy(leaf) for name, leaf in leaves.items()}


def verify(found: dict[str, np.ndarray], inventory: dict[str, Any]) -> None:
    """ValueError where an array is not what was written.

    Args:
      found: arrays by name; arrays without elements may be missing.
      inventory: `fingerprint` by name, as written.
    """
    for name, expected in inventory.items():
        if 0 not in expected[1] and fingerprint(found[name]) != expected:
            raise ValueError(f"{name} fails its checksum")


def fill(part: str, template: Any, found: dict[str, np.ndarray]) -> Any:
    """The template's tree with the found values; arrays without elements need not be found."""
    leaves = [
        _place(found[name] if name in found else np.zeros(leaf.shape, leaf.dtype), leaf)
        for name, leaf in named(part, template).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def size(tree: Any) -> int:
    """Bytes of all leaves, which may be abstract."""
    return sum(np.dtype(leaf.dtype).itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def type_of(leaf: Any) -> ArrayType:
    """Name of the dtype, and shape."""
    return str(np.dtype(leaf.dtype)), tuple(leaf.shape)


def difference(inventory: dict[str, Any], template: dict[str, Any]) -> str | None:
    """The first leaf that differs between what was written and what is wanted, in words.

    Args:
      inventory: `fingerprint` by name.
      template: arrays or `jax.ShapeDtypeStruct` by name.
    """
    there: dict[str, ArrayType] = {n: (dtype, tuple(shape)) for n, (dtype, shape, _) in inventory.items()}
    here = {name: type_of(leaf) for name, leaf in template.items()}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            return f"{name} is {_words(there.get(name))} there and {_words(here.get(name))} here"
    return None


def fingerprint(array: np.ndarray) -> list[Any]:
    """`[dtype, shape, CRC-32 of the bytes]`, ready for JSON."""
    dtype, shape = type_of(array)
    return [dtype, list(shape), zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)]


def _on_cpu(leaf: jax.Array) -> bool:
    return next(iter(leaf.devices())).platform == "cpu"


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    # On a CPU a numpy view shares the buffer and stays cached in the array, which blocks its donation.
    return jnp.copy(leaf) if _on_cpu(leaf) else np.asarray(leaf)


def _place(value: np.ndarray, leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return value
    # An uncommitted template gives an uncommitted array: for a committed one jit would compile anew.
    sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    if sharding is not None and not sharding.is_fully_addressable:
        return place(value, len(sharding.device_set))
    return jax.device_put(value, sharding, may_alias=False)


def _words(kind: ArrayType | None) -> str:
    return "missing" if kind is None else f"{kind[0]}{list(kind[1])}"
