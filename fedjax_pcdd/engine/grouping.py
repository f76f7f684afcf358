"""Participants by architecture: who forms a group, the group's simulation, and the mean of equal models."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.federation import Dataset, Federation
from fedjax_pcdd.data.partition import Partition
from fedjax_pcdd.engine import schedule
from fedjax_pcdd.engine.program import Tree
from fedjax_pcdd.engine.round import Experiment, Local, Simulation
from fedjax_pcdd.methods.participant import model_of, with_model
from fedjax_pcdd.models.classifier import Classifier


class Public(NamedTuple):
    """Images that all may see; no one has their labels."""

    images: np.ndarray  # [N, H, W, channels] uint8
    pipeline: Pipeline
    batch: int  # B; of an incomplete last batch nothing is used


def members_of(models: Sequence[Classifier]) -> tuple[tuple[int, ...], ...]:
    """Participants with equal models, in the order of their first."""
    groups: dict[Classifier, list[int]] = {}
    for k, model in enumerate(models):
        groups.setdefault(model, []).append(k)
    return tuple(tuple(group) for group in groups.values())


def placed(dataset: Dataset) -> Dataset:
    """The data set with its images on the device, where all groups share them."""
    return replace(dataset, x_train=jnp.asarray(dataset.x_train), x_test=jnp.asarray(dataset.x_test))


def group_simulation(model, dataset, federation, method, local, seed, members, epochs, options) -> Simulation:
    """The simulation of the participants with one architecture; its batches are no larger than its clients."""
    train, test = federation.partition.train, federation.partition.test
    part = Federation(dataset, Partition(tuple(train[k] for k in members), tuple(test[k] for k in members)))
    own = tuple(epochs[k] for k in members) if epochs else local.epochs
    local = replace(local, epochs=own, batch_size=batch_size_of(local, part.sizes, options))
    experiment = Experiment(part, method, local, seed, members)
    return Simulation(model, [experiment], cohort=len(members), **options)


def batch_size_of(local: Local, sizes: np.ndarray, options: dict[str, Any]) -> int:
    """B, or less where no client fills a batch and nothing but padding is lost."""
    counts = local.last_batch in ("strict", "top_up") or options.get("weights") == "batches"
    return local.batch_size if counts else int(min(local.batch_size, max(1, sizes.max())))


def mean_of_models(clients: Tree) -> Tree:
    """Every participant's model replaced by the mean of all [K, ...]."""
    variables = jax.vmap(model_of)(clients)
    mean = jax.tree.map(lambda x: jnp.broadcast_to(x.mean(0), x.shape), variables)
    return jax.vmap(with_model)(clients, mean)


def public_batches(seed: int, round: int, total: int, batch: int, epochs: int) -> np.ndarray:
    """Public images of each step of a round's exchange [steps, B]; a fresh permutation each epoch, the rest dropped."""
    batch = min(batch, total)
    used = total // batch * batch
    drawn = [schedule.stream(seed, round, 2**63 + 1, e).permutation(total)[:used] for e in range(epochs)]
    return np.concatenate(drawn).reshape(-1, batch).astype(np.int32)
