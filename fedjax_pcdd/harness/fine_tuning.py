"""Personal accuracy after the last round: every client fine-tunes on its own data, as the method's `tuner` says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.harness.metrics import accuracy, mean, plain
from fedjax_pcdd.simulation.program import State, Tree
from fedjax_pcdd.simulation.round import Simulation


def fine_tuned(tuner: Simulation, state: State, round: int) -> tuple[np.ndarray, np.ndarray | None]:
    """PA [K] of all clients after fine-tuning, and GA [K] of their models where they keep them.

    Args:
      tuner: as `Simulation.tuner` made it.
      state: what fine-tuning starts from; donated.
      round: decides the order of the samples.
    """
    federation = tuner.experiments[0].federation
    correct = np.array(tuner.evaluate(state, personal=True).personal)
    servers = state.servers
    for part in tuner.parts():
        plan, jobs = tuner.plan(round, [part])
        state = state._replace(servers=jax.tree.map(jnp.copy, servers))
        state, report = tuner.step(state, round, (plan, jobs))
        trained = jobs.steps > 0
        correct[jobs.row[trained]] = np.array(report.correct)[trained]
    pa = accuracy(correct.sum(1), federation.test_sizes)
    if tuner.methods.global_model:
        return pa, None
    correct = np.array(tuner.evaluate(state).local).sum(1)
    return pa, accuracy(correct, np.full(correct.shape, len(federation.dataset.y_test)))


def from_global(tuner: Simulation, best: Tree, last: Tree, round: int, result: dict[str, Any]) -> dict[str, Any]:
    """What fine-tuning the best and the last global variables [1, ...] changes in a run's result.

    PA becomes that of the fine-tuned models, and so does GA where the clients keep them (mean over clients).
    """
    pa_best, ga_best = fine_tuned(tuner, tuner.start(best), round)
    pa_last, ga_last = fine_tuned(tuner, tuner.start(last), round)
    changed = {
        "pa_protocol": f"global model fine-tuned for {tuner.local.epochs} epochs",
        "pa_best": mean(pa_best), "pa_last": mean(pa_last), "pa_best_round": result["ga_best_round"],
        "pa_best_per_client": plain(pa_best), "pa_local_best": result["pa_best"], "pa_local_last": result["pa_last"],
    }  # fmt: skip
    if ga_best is None or ga_last is None:
        return changed
    before = {"ga_global_best": result["ga_best"], "ga_global_last": result["ga_last"]}
    return changed | before | {"ga_best": mean(ga_best), "ga_last": mean(ga_last)}


def from_last(tuner: Simulation, state: State, round: int) -> dict[str, Any]:
    """What fine-tuning the last state of a method without a global model adds to a run's result.

    The running statistics that it starts from are the averaged ones.
    """
    pa, ga = fine_tuned(tuner, jax.tree.map(lambda x: x.copy(), state._replace(statistics=())), round)
    added = {"pa_tuned": mean(pa), "pa_tuned_per_client": plain(pa)}
    return added if ga is None else added | {"ga_tuned": mean(ga)}
