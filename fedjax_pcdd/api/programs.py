"""Which experiments share a compiled program, and how many of them are trained as one."""

import math
from collections.abc import Hashable, Sequence

import jax

from fedjax_pcdd.data.augment import draws_once
from fedjax_pcdd.data.partition import has_clients
from fedjax_pcdd.data.sources import name_of
from fedjax_pcdd.engine.devices import available_memory
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import Method
from fedjax_pcdd.training.build import local_training
from fedjax_pcdd.training.config import FOLDERS, RUN, RunConfig
from fedjax_pcdd.training.named_arrays import bytes_of
from fedjax_pcdd.training.setup import Pair, Setup
from fedjax_pcdd.training.tasks import has_participants

# Run options that may differ within a program, as a method's traced hyper-parameters may: numbers of the local
# training, and which client owns which sample.
FREE = {
    *("seed", "lr", "momentum", "weight_decay", "grad_clip"),
    *("partition", "beta", "classes_per_client", "min_samples", "retry", "doubled", *FOLDERS),
}

MOST = 16  # experiments in one program; more gain little
COPIES = 6  # of a state: before and after a round, what its jobs wrote, the best one, and two for a checkpoint


def program_key(config: RunConfig, method: Method) -> Hashable:
    """A key that is equal for experiments that share a program; None for one that runs alone.

    These run alone: participants with models of their own, tasks, client states in host memory, runs that are tracked
    or profiled, runs that write to something of which a process has only one, and servers that train on public images,
    since hundreds of Adam steps amplify a different order of summation beyond rounding.
    """
    alone = config.wandb or config.mlflow or config.loggers or config.track or config.profile
    if alone or config.client_state != "device" or method.traits().public or has_participants(config, method):
        return None
    fixed = tuple(getattr(config, name) for name in RUN if name not in FREE)
    drawn_once = draws_once(name_of(config.dataset, config.data_dir), config.augment)
    depends_on_seed = config.train_samples or config.test_samples or drawn_once
    data_seed = config.seed if depends_on_seed else None  # the data set or its augmentation depends on the seed
    own_clients = config.partition if has_clients(config.partition) else None  # as many as the partition defines
    # Of an optimiser that is kept, the state has other parts if gradients are clipped.
    clips = config.optimizer_state == "kept" and local_training(config, method).clip is not None
    return jax.tree.structure(method), fixed, own_clients, data_seed, clips, config.resume is not None


def groups(pairs: Sequence[Pair]) -> list[list[int]]:
    """Indices of the experiments that share a program, in groups ordered by their first member."""
    members: dict[Hashable, list[int]] = {}
    for number, pair in enumerate(pairs):
        key = program_key(*pair)
        members.setdefault(("alone", number) if key is None else key, []).append(number)
    return list(members.values())


def portions(group: Sequence[int], most: int) -> list[list[int]]:
    """Split a group into parts of about equal size, none larger than `most`.

    >>> portions(range(5), 3)
    [[0, 1, 2], [3, 4]]
    """
    size = math.ceil(len(group) / math.ceil(len(group) / most))
    return [list(group[i : i + size]) for i in range(0, len(group), size)]


def affordable(config: RunConfig, method: Method) -> int:
    """How many experiments like this one are worth training together and fit into half of the free memory."""
    try:
        state = Setup([(config, method)]).simulation.start()
    except UserError:
        return 1  # reported when it runs
    return int(max(1, min(MOST, available_memory() / 2 / max(1, COPIES * bytes_of(state)))))
