"""Which experiments can be trained together, as one compiled program, and how many fit into memory."""

import math
from collections.abc import Hashable, Sequence
from pathlib import Path

import jax

from fedjax_pcdd.api.launch import kind_of_run
from fedjax_pcdd.engine.devices import free_memory, select_device
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import Method
from fedjax_pcdd.training import snapshot
from fedjax_pcdd.training.build import assemble, federate
from fedjax_pcdd.training.config import PLACE, RUN, RunConfig
from fedjax_pcdd.training.runner import Run

Pair = tuple[RunConfig, Method]

# Run options that may differ within a program, beside a method's traced hyper-parameters: numbers of the local
# training, and who owns which sample.
FREE = {
    *("seed", "lr", "momentum", "weight_decay", "grad_clip"),
    *("partition", "beta", "classes_per_client", "min_samples", "retry", "doubled", *PLACE),
}

MOST = 16  # more gain little
COPIES = 6  # of a state: before and after a round, what its jobs wrote, the best one, and two for a checkpoint


def program_key(config: RunConfig, method: Method) -> Hashable:
    """Equal for experiments that share a program; None for one that runs alone.

    A run alone are participants with models of their own, tasks, client states in host memory, what is tracked or
    profiled, what writes to something that a process has but once, and servers that train on public images: hundreds of
    steps of Adam make another order of summation more than rounding.
    """
    single = config.client_state == "host" or config.wandb or config.track or config.profile or method.distils
    if single or kind_of_run(config, method) is not Run:
        return None
    fixed = tuple(getattr(config, name) for name in RUN if name not in FREE)
    drawn = config.seed if config.train_samples or config.test_samples else None  # the data set depends on it
    return jax.tree.structure(method), fixed, config.partition == "natural", drawn, config.resume is not None


def groups(pairs: Sequence[Pair]) -> list[list[int]]:
    """Numbers of the experiments that share a program, in the order of their first."""
    found: dict[Hashable, list[int]] = {}
    for number, pair in enumerate(pairs):
        key = program_key(*pair)
        found.setdefault(("alone", number) if key is None else key, []).append(number)
    return list(found.values())


def portions(group: Sequence[int], most: int) -> list[list[int]]:
    """A group in parts of about equal size, none larger than `most`.

    >>> portions(range(5), 3)
    [[0, 1, 2], [3, 4]]
    """
    size = math.ceil(len(group) / math.ceil(len(group) / most))
    return [list(group[i : i + size]) for i in range(0, len(group), size)]


def affordable(config: RunConfig, method: Method) -> int:
    """How many experiments like this one are worth training together and fit into half of the free memory."""
    try:
        select_device(config.device, config.devices)
        state = assemble(config, method, federate(config), 1).start()
    except UserError:
        return 1  # it is said when it runs
    return int(max(1, min(MOST, free_bytes() / 2 / max(1, COPIES * snapshot.size(state)))))


def free_bytes() -> float:
    """Free memory of the device, of the machine where computing shares its memory; infinite where unknown."""
    if (own := free_memory()) < math.inf:
        return own
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), math.inf)
