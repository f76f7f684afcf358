"""Backbones that start from the weights in a file: an npz with one array for each parameter and running statistic.

Names are paths in the variables without "backbone", such as `params/stem/conv/kernel`. A head or neck keeps its random
initialisation unless the file has all of it, prefixed with its name, such as `head:params/kernel`.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.npz import read_arrays
from fedjax_pcdd.engine.program import State, Tree
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError


def started_from(simulation: Any, file: Path) -> State:
    """The state before the first round of a simulation whose backbones have the weights of a file.

    Raises:
      UserError: the file cannot be read or does not fit the model, or clients have models of their own.
    """
    if not isinstance(simulation, Simulation) or simulation.experiments[0].method.traits().own_models:
        raise UserError(
            "`initial_weights` are of one architecture for all: drop it where clients have models of their own."
        )
    weights = read_arrays(file)
    models = [with_weights(simulation.initial(e), weights, file) for e in range(len(simulation.experiments))]
    return simulation.start(jax.tree.map(lambda *x: jnp.stack(x), *models))


def with_weights(variables: Tree, weights: dict[str, np.ndarray], file: Path) -> Tree:
    """The variables with the weights of the file; UserError if one is missing, unknown, not finite or misshapen."""
    unused = dict(weights)

    def choose(path: tuple, leaf: jax.Array) -> jax.Array:
        names = [str(key.key) for key in path]
        name = "/".join([names[0], *names[2:]])
        if names[1] != "backbone":
            name = f"{names[1]}:{name}"
            if not any(entry.startswith(f"{names[1]}:") for entry in weights):
                return leaf
        if name not in weights:
            raise UserError(f"{file} lacks {name}, of shape {list(leaf.shape)}: add it (docs/data.md).")
        array = unused.pop(name)
        if array.shape != leaf.shape:
            raise UserError(f"{name} in {file} has the shape {list(array.shape)}, not {list(leaf.shape)}: correct it.")
        if not jnp.issubdtype(array.dtype, jnp.number) or not np.isfinite(array.astype(np.float64)).all():
            raise UserError(f"{name} in {file} holds numbers that are not finite: correct it.")
        return jnp.asarray(array, leaf.dtype)

    result = jax.tree_util.tree_map_with_path(choose, variables)
    if unused:
        advice = "leave it out, or if it is of the last dense layer, call it head:params/kernel or head:params/bias"
        raise UserError(f"{file} has {min(unused)}, which is not part of the backbone: {advice}.")
    return result
