"""What a round is compiled for (`Program`), and the arrays it works on (`Data`, `State`).

Letters: E experiments, K clients, R = E * K rows (one per client of each experiment), C classes, S cohort.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.methods.method import Facts, Setting
from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.trees import select, zeros_like

Tree = Any


@dataclass(frozen=True)
class Program:
    """Everything static; two rounds with equal programs and array shapes share one executable."""

    model: Classifier
    setting: Setting
    pipeline: Pipeline
    lanes: int = 1
    experiments: int = 1
    optimizer: str = "sgd"
    clip: bool = False
    local_statistics: bool = False  # batch-norm statistics stay with the client (--bn=local)
    masked: bool = True  # False where every batch is full
    eval_batch: int = 500
    client_batch: int = 500  # batch of passes over one client's data
    dtype: Any = jnp.float32  # of the images that enter the model


class Samples(NamedTuple):
    """Images, labels and who owns them: row r has order[start[r] : start[r] + size[r]]."""

    images: jax.Array  # [n, H, W, channels] uint8
    labels: jax.Array  # [n] int32
    order: jax.Array  # [m] int32, the rows' index lists one after another
    start: jax.Array  # [R] int32
    size: jax.Array  # [R] int32


class Data(NamedTuple):
    """The federations of all experiments over one data set."""

    train: Samples
    test: Samples
    class_counts: jax.Array  # [R, C] training samples


class State(NamedTuple):
    """What crosses rounds."""

    servers: Tree  # [E, ...]
    clients: Tree  # [R, ...]
    statistics: Tree  # [R, ...] running statistics of each client, () unless they are local


def put(tree: Tree, row, value: Tree) -> Tree:
    """The tree with one row of every leaf's leading axis replaced."""
    return jax.tree.map(lambda x, v: jax.lax.dynamic_update_index_in_dim(x, v.astype(x.dtype), row, 0), tree, value)


def of_experiment(tree: Tree, program: Program, experiment) -> Tree:
    """Row of a tree with leading axis [E]; no gather where there is one experiment."""
    return select(tree, 0 if program.experiments == 1 else experiment)


def lift(function: Callable, size: int) -> Callable:
    """vmap over a leading axis; an axis of one is taken away instead, so that ordinary operations are compiled."""
    if size > 1:
        return jax.vmap(function)

    def one(*args):
        return jax.tree.map(lambda x: x[None], function(*select(args, 0)))

    return one


def facts_of(program: Program, data: Data, row) -> Facts:
    """What is known of the client in a row."""
    clients, counts = program.setting.num_clients, data.class_counts
    everyone = of_experiment(counts.reshape(program.experiments, clients, -1), program, row // clients)
    return Facts(row % clients, counts[row], data.train.size[row], everyone)


def sum_over_samples(function: Callable, samples: Samples, start, size, batch: int, template: Tree) -> Tree:
    """Sum of function(index [B], mask [B]) over `size` entries of samples.order from `start`, in batches.

    Args:
      template: shapes and dtypes of the function's result.
    """

    def body(i, total):
        position = i * batch + jnp.arange(batch)
        index = samples.order[start + jnp.minimum(position, size - 1)]
        return jax.tree.map(jnp.add, total, function(index, position < size))

    return jax.lax.fori_loop(0, (size + batch - 1) // batch, body, zeros_like(template))
