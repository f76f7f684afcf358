"""Several devices: a mesh whose one axis is the lanes, and how arrays are placed on it.

Every device trains its share of a round's jobs; what all of them read is replicated. Several processes, with equally
many devices each, form one mesh. With one device nothing here has an effect.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from fedjax_pcdd.errors import UserError

Tree = Any

AXIS = "lanes"
EVERYWHERE: Any = P()
SPLIT: Any = P(AXIS)


@cache
def mesh_of(devices: int) -> Mesh:
    """A mesh of this many devices, the first ones of each process; UserError if there are fewer."""
    processes = jax.process_count()
    by_process = [[d for d in jax.devices() if d.process_index == p][: devices // processes] for p in range(processes)]
    mesh_devices = [device for process_devices in by_process for device in process_devices]
    if len(mesh_devices) != devices:
        raise UserError(f"there are no {devices} devices: use at most {len(jax.devices())}.")
    return Mesh(np.array(mesh_devices), (AXIS,))


def sharding(devices: int, spec: P = EVERYWHERE) -> NamedSharding | None:
    """How arrays are placed on several devices; None for one."""
    return NamedSharding(mesh_of(devices), spec) if devices > 1 else None


def spread(function: Callable, devices: int, in_specs: Any, out_specs: Any) -> Callable:
    """The function run on every device at once, each with its own part of what the specs split."""
    return jax.shard_map(function, mesh=mesh_of(devices), in_specs=in_specs, out_specs=out_specs, check_vma=False)


def distribute(tree: Tree, devices: int, spec: P = EVERYWHERE) -> Tree:
    """The tree placed on all devices; every process must have the whole tree."""
    target = sharding(devices, spec)
    return tree if target is None else jax.tree.map(lambda x: _distributed(x, target), tree)


def _distributed(x: Any, target: Sharding) -> Any:
    if target.is_fully_addressable:
        return jax.device_put(x, target)
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _distributed(jax.random.key_data(x), target)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(target, x.ndim):
        return x
    host = np.asarray(x)  # device_put would first compare it between all processes
    return jax.make_array_from_callback(host.shape, target, lambda index: host[index])


def own_copy(tree: Tree) -> Tree:
    """Replicated arrays, as arrays on one device of this process."""

    def local(x):
        return x.addressable_data(0) if isinstance(x, jax.Array) and len(x.sharding.device_set) > 1 else x

    return jax.tree.map(local, tree)


def devices_of(tree: Tree) -> int:
    """How many devices the arrays of a tree are placed on."""
    return max((len(x.sharding.device_set) for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)), default=1)


def owners_of(rows: np.ndarray, count: int) -> np.ndarray:
    """The process that owns each client in rows [n], of `count` clients: each process owns equally many neighbours."""
    return rows * jax.process_count() // count


def gathered(tree: Tree) -> Tree:
    """The devices' parts, concatenated; within `spread`."""
    return jax.tree.map(lambda x: jax.lax.all_gather(x, AXIS, tiled=True), tree)


def summed(tree: Tree) -> Tree:
    """The sum over the devices; within `spread`."""
    return jax.tree.map(lambda x: jax.lax.psum(x, AXIS), tree)
