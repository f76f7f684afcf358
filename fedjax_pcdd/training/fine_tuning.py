"""Personal accuracy after the last round: every client fine-tunes on its own data, as the method's `fine_tuner` says.

Letters: E experiments of a simulation, K clients.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.engine.program import State, Tree
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.training.metrics import accuracy, mean, plain


def after_training(
    simulation: Simulation,
    epochs: int,
    rounds: int,
    state: State,
    best: Tree | None,
    results: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    """What fine-tuning changes in the results [E].

    Args:
      epochs: of every client.
      rounds: of the training.
      state: after it.
      best: global variables [E, ...] of the best GA, None for methods that fine-tune from the last state alone.
    """
    tuner = simulation.tuner(epochs)
    if best is None:
        return from_last(tuner, state, rounds)
    generic = jax.vmap(lambda method, server: method.generic_variables(server))
    return from_global(tuner, best, generic(simulation.methods, state.servers), rounds, results)


def fine_tuned(tuner: Simulation, state: State, round: int) -> tuple[np.ndarray, np.ndarray | None]:
    """PA [E, K] of all clients after fine-tuning, and GA [E, K] of their models where they keep them.

    Args:
      tuner: as `Simulation.tuner` made it.
      state: what fine-tuning starts from; donated.
      round: decides the order of the samples.
    """
    federations = [experiment.federation for experiment in tuner.experiments]
    correct = np.array(tuner.evaluate(state, personal=True).personal)
    servers = state.servers
    for cohorts in _cohorts(tuner):
        plan, jobs = tuner.plan(round, cohorts)
        state = state._replace(servers=jax.tree.map(jnp.copy, servers))
        state, report = tuner.step(state, round, (plan, jobs))
        trained = jobs.steps > 0
        correct[jobs.row[trained]] = np.array(report.correct)[trained]
    shape = len(federations), -1
    pa = accuracy(correct.sum(1), np.concatenate([f.test_sizes for f in federations])).reshape(shape)
    if tuner.methods.traits().global_model:
        return pa, None
    state = state._replace(servers=servers)  # not that of the last portion
    correct = np.array(tuner.evaluate(state).local).sum(1)
    return pa, accuracy(correct, np.full(correct.shape, len(federations[0].dataset.y_test))).reshape(shape)


def _cohorts(tuner: Simulation) -> list[list[np.ndarray]]:
    """All clients with samples in portions of a cohort, of each experiment [E]."""
    size = tuner.cohort_size
    able = [np.flatnonzero(sizes > 0) for sizes in tuner.sizes]
    parts = [[clients[i : i + size] for i in range(0, len(clients), size)] for clients in able]
    return [list(cohorts) for cohorts in zip_longest(*parts, fillvalue=np.zeros(0, int))]


def from_global(
    tuner: Simulation, best: Tree, last: Tree, round: int, results: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """What fine-tuning the best and the last global variables [E, ...] changes in the results [E].

    PA becomes that of the fine-tuned models, and so does GA where the clients keep them (mean over clients).
    """
    pa_best, ga_best = fine_tuned(tuner, tuner.start(best), round)
    pa_last, ga_last = fine_tuned(tuner, tuner.start(last), round)
    changes = []
    for e, result in enumerate(results):
        changed = {
            "pa_protocol": f"global model fine-tuned for {int(tuner.epochs.max())} epochs",
            "pa_best": mean(pa_best[e]), "pa_last": mean(pa_last[e]), "pa_best_round": result["ga_best_round"],
            "pa_best_per_client": plain(pa_best[e]), "pa_local_best": result["pa_best"],
            "pa_local_last": result["pa_last"],
        }  # fmt: skip
        if ga_best is not None and ga_last is not None:
            changed |= {"ga_global_best": result["ga_best"], "ga_global_last": result["ga_last"]}
            changed |= {"ga_best": mean(ga_best[e]), "ga_last": mean(ga_last[e])}
        changes.append(changed)
    return changes


def from_last(tuner: Simulation, state: State, round: int) -> list[dict[str, Any]]:
    """What fine-tuning the last state of a method without a global model adds to the results [E].

    The running statistics that it starts from are the averaged ones.
    """
    pa, ga = fine_tuned(tuner, jax.tree.map(lambda x: x.copy(), state._replace(statistics=())), round)
    added = [{"pa_tuned": mean(own), "pa_tuned_per_client": plain(own)} for own in pa]
    return added if ga is None else [a | {"ga_tuned": mean(own)} for a, own in zip(added, ga, strict=True)]
