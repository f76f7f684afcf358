"""The arrays of a tree by name: copied for a checkpoint, put back into a tree, and compared by their fingerprints."""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.engine.mesh import distribute, own_copy

Arrays = dict[str, Any]  # by name, for example `server['params']['kernel']`, in the order of the tree


def named(part: str, tree: Any) -> Arrays:
    """The leaves of a tree by name."""
    return {part + jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def snapshot(part: str, tree: Any) -> Arrays:
    """Copies of the leaves; they share no memory with the tree, which may be donated at once.

    Of arrays that several devices hold, each in full, one copy is taken, by this process alone.
    """
    leaves = named(part, own_copy(tree))
    for leaf in leaves.values():
        if isinstance(leaf, jax.Array) and not _on_cpu(leaf):
            leaf.copy_to_host_async()
    return {name: _copy(leaf) for name, leaf in leaves.items()}


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    # On a CPU a numpy view shares the buffer and stays cached in the array, which blocks its donation.
    return jnp.copy(leaf) if _on_cpu(leaf) else np.asarray(leaf)


def _on_cpu(leaf: jax.Array) -> bool:
    return next(iter(leaf.devices())).platform == "cpu"


def fill(part: str, template: Any, arrays: Arrays) -> Any:
    """The template's tree with these values; arrays without elements may be missing."""
    leaves = [
        _like(arrays[name] if name in arrays else np.zeros(leaf.shape, leaf.dtype), leaf)
        for name, leaf in named(part, template).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _like(value: np.ndarray, leaf: Any) -> Any:
    """The value, as an array of the same kind and on the same devices as a template's leaf."""
    if isinstance(leaf, np.ndarray):
        return value
    # An uncommitted template gives an uncommitted array: for a committed one jit would compile again.
    sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    if sharding is not None and not sharding.is_fully_addressable:
        return distribute(value, len(sharding.device_set))
    return jax.device_put(value, sharding)


def bytes_of(tree: Any) -> int:
    """Bytes of all leaves, which may be abstract."""
    return sum(np.dtype(leaf.dtype).itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def fingerprint(array: np.ndarray) -> list[Any]:
    """`[dtype, shape, CRC-32 of the bytes]`, ready for JSON."""
    return [*_type_of(array), zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)]


def difference(inventory: dict[str, Any], template: Arrays) -> str | None:
    """The first leaf that differs between those written (`fingerprint` by name) and the template's; in words."""
    written = {name: [dtype, shape] for name, (dtype, shape, _) in inventory.items()}
    wanted = {name: _type_of(leaf) for name, leaf in template.items()}
    for name in sorted(written.keys() | wanted.keys()):
        stored, expected = ("{}{}".format(*kinds[name]) if name in kinds else "missing" for kinds in (written, wanted))
        if stored != expected:
            return f"{name} is {stored} there and {expected} here"
    return None


def _type_of(leaf: Any) -> list[Any]:
    return [str(np.dtype(leaf.dtype)), list(leaf.shape)]
