"""Whether all models are finite after a round: checked on the devices, from which only a few booleans are fetched.

Letters: E experiments, K clients, S cohort.
"""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.engine.mesh import devices_of, own_copy, sharding
from fedjax_pcdd.engine.program import State, Tree
from fedjax_pcdd.training.trained_models import parts_of


def not_finite(simulation: Any, state: State, rows: np.ndarray) -> list[str | None]:
    """What is not finite in each experiment [E], such as "the server's params.bias" or "client 3's params.bias".

    Args:
      simulation, state: a `Simulation` or `Groups`, and its state after a round.
      rows: [E * S] those of its clients; the other rows have not changed. Of `Groups` all rows are checked.
    """
    clients = simulation.federations[0].num_clients
    wrong: list[str | None] = [None] * len(simulation.federations)
    for part in parts_of(simulation):
        part_state = part.of(state)
        for name, e in _wrong(part_state.servers, None):
            wrong[e] = wrong[e] or f"the server's {name}"
        for name, row in _wrong((part_state.clients, part_state.statistics), rows if part.group is None else None):
            client = row % clients if part.group is None else part.members[row]
            wrong[row // clients if part.group is None else 0] = f"client {client}'s {name}"
    return wrong


def _wrong(tree: Tree, rows: np.ndarray | None) -> list[tuple[str, int]]:
    """(name, row) of every row that is not finite in the leaves [n, ...]; checks only these rows, or all for None."""
    leaves = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact) and leaf.size]
    if not leaves:
        return []
    if isinstance(leaves[0], np.ndarray):  # in host memory: one row after another, as a copy of all may not fit
        rows = np.arange(len(leaves[0])) if rows is None else np.unique(rows)
        bad = np.array([[not np.isfinite(leaf[row]).all() for row in rows] for leaf in leaves])
    else:
        bad = np.asarray(own_copy(_look(devices_of(leaves))(leaves, rows)))
    if not bad.any():
        return []
    paths = [path for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if any(leaf is other for other in leaves)]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    names = [name.removeprefix("0.").removeprefix("1.") for name in names]  # index in (clients, statistics)
    return [(names[i], int(j if rows is None else rows[j])) for i, j in np.argwhere(bad)]


@cache
def _look(devices: int) -> Any:
    """A compiled function of leaves [n, ...] and rows [S], None for all: which of them are not finite [leaves, S]."""

    def look(leaves: list[jax.Array], rows: jax.Array | None) -> jax.Array:
        selected = leaves if rows is None else [leaf[rows] for leaf in leaves]
        return jnp.stack([~jnp.isfinite(leaf).reshape(len(leaf), -1).all(1) for leaf in selected])

    return jax.jit(look, out_shardings=sharding(devices))
