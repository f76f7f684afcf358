"""After the last round: every client fine-tunes on its own data, for PA; the head is calibrated, for a further GA.

Letters: E experiments of a simulation, K clients.
"""

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.engine.groups import Groups
from fedjax_pcdd.engine.program import State, Tree
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.calibration import Calibration
from fedjax_pcdd.methods.gaussian_head import GaussianHead
from fedjax_pcdd.training.metrics import accuracy, mean, personal, plain, spread
from fedjax_pcdd.training.protocols import IN_WORDS, Protocol, by_epoch, rules
from fedjax_pcdd.trees import select


def global_models(simulation: Simulation, state: State) -> Tree:
    """Variables [E, ...] of the global models."""
    return jax.vmap(lambda method, server: method.generic_variables(server))(simulation.methods, state.servers)


Tuned = dict[Protocol, dict[str, np.ndarray]]
"""Accuracies [K] of the clients' tuned models, by protocol of PA and by their name in `metrics.personal`."""


def fine_tuned(
    tuner: Simulation, state: State, round: int
) -> tuple[list[Tuned], np.ndarray | None, list[dict[str, Any]]]:
    """PA of all clients of each experiment [E], and GA [E, K] of their models if they keep them, else None.

    Last come further entries of the summaries [E]: where the loss of a client is no longer finite, `diverged_client`,
    its number; PA is NaN there.

    Args:
      tuner: from `Simulation.tuner`.
      state: the state that fine-tuning starts from; donated.
      round: determines the order of the samples.
    """
    federations = [experiment.federation for experiment in tuner.experiments]
    received, correct, diverged = tuner.evaluator.personal(state), None, np.zeros(0, int)
    servers = state.servers
    for cohorts in _cohorts(tuner):
        plan, jobs = tuner.plan(round, cohorts)
        state = state._replace(servers=jax.tree.map(jnp.copy, servers))
        state, report = tuner.step(state, round, (plan, jobs))
        trained = jobs.steps > 0
        counts = by_epoch(jobs, np.array(report.before), np.array(report.correct))
        if correct is None:  # clients without samples stay with the received model
            correct = np.repeat(received[:, None], counts.shape[1], axis=1)
        correct[jobs.row[trained]] = counts[trained]
        diverged = np.append(diverged, jobs.row[trained & ~np.isfinite(np.array(report.loss).reshape(-1))])
    correct = received[:, None] if correct is None else correct
    per_experiment = [x.reshape(len(federations), -1, *x.shape[1:]) for x in (correct, received)]
    pa: list[Tuned] = []
    entries: list[dict[str, Any]] = []
    for e, (tuned, as_received, federation) in enumerate(zip(*per_experiment, federations, strict=True)):
        by_rule: dict[Protocol, np.ndarray] = {**rules(tuned, federation.test_class_counts), "received": as_received}
        lost = diverged[diverged // federation.num_clients == e] % federation.num_clients
        entries.append({"diverged_client": int(lost[0])} if len(lost) else {})
        if len(lost):
            by_rule |= {rule: np.full(x.shape, np.nan) for rule, x in by_rule.items() if rule != "received"}
        all_clients = np.arange(federation.num_clients)
        pa.append({rule: personal(federation, all_clients, answers) for rule, answers in by_rule.items()})
    if tuner.methods.traits().global_model:
        return pa, None, entries
    state = state._replace(servers=servers)  # not the servers of the last portion
    classes = federations[0].dataset.num_classes  # later columns are of validation samples
    local = tuner.evaluator.personal(state, own=False)[:, :classes].sum(1)
    ga = accuracy(local, len(federations[0].dataset.y_test))
    return pa, ga.reshape(len(federations), -1), entries


def _cohorts(tuner: Simulation) -> list[list[np.ndarray]]:
    """All clients with samples, in portions of a cohort's size; each portion of all experiments [E]."""
    size = tuner.cohort_size
    portions = [[clients[i : i + size] for i in range(0, len(clients), size)] for clients in tuner.able]
    return [list(cohorts) for cohorts in zip_longest(*portions, fillvalue=np.zeros(0, int))]


def from_global(
    tuner: Simulation, best: Tree, last: Tree, round: int, results: list[dict[str, Any]], protocol: Protocol = "last"
) -> list[dict[str, Any]]:
    """The changes to the results [E] from fine-tuning the best and the last global variables [E, ...].

    PA, also balanced and on validation samples, becomes that of the fine-tuned models under the protocol; PA under each
    measured protocol has the protocol's name. If clients keep the models, GA too is that of the fine-tuned ones (mean
    over clients).
    """
    pa_best, ga_best, entries = fine_tuned(tuner, tuner.start(best), round)
    pa_last, ga_last, more_entries = fine_tuned(tuner, tuner.start(last), round)
    changes, tuned = [], f"global model fine-tuned for {int(tuner.epochs.max())} epochs"
    for e, result in enumerate(results):
        best_of, last_of = pa_best[e][protocol], pa_last[e][protocol]
        changed = entries[e] | more_entries[e] | {
            "pa_protocol": "global model as received" if protocol == "received" else tuned + IN_WORDS[protocol],
            "pa_best_round": result["ga_best_round"], "pa_best_per_client": plain(best_of["pa"]),
            "pa_best_clients": mean(best_of["pa"]),
            "pa_local_best": result["pa_best"], "pa_local_last": result["pa_last"], **spread(last_of["pa"]),
        }  # fmt: skip
        for name in best_of:
            changed |= {f"{name}_best": mean(best_of[name]), f"{name}_last": mean(last_of[name])}
        for rule, accuracies in pa_best[e].items():
            changed |= {f"pa_{rule}_best": mean(accuracies["pa"]), f"pa_{rule}_last": mean(pa_last[e][rule]["pa"])}
            changed[f"pa_{rule}_mean_last10"] = None
        if ga_best is not None and ga_last is not None:
            changed |= {"ga_global_best": result["ga_best"], "ga_global_last": result["ga_last"]}
            changed |= {"ga_best": mean(ga_best[e]), "ga_last": mean(ga_last[e])}
        changes.append(changed)
    return changes


def from_last(tuner: Simulation, state: State, round: int, protocol: Protocol = "last") -> list[dict[str, Any]]:
    """The additions to the results [E] from fine-tuning the last state of a method without a global model.

    Fine-tuning starts from the averaged running statistics. PA is that of the models as they were tuned, with the
    statistics that tuning has moved (FedRep); GA is that of the parts that clients keep, joined with the server's.
    """
    pa, ga, entries = fine_tuned(tuner, tuner.storage.copied(state._replace(statistics=())), round)
    tuned = [accuracies[protocol]["pa"] for accuracies in pa]
    accuracies = [{"pa_tuned": mean(shares), "pa_tuned_per_client": plain(shares)} for shares in tuned]
    added = [new | entry for new, entry in zip(accuracies, entries, strict=True)]
    return added if ga is None else [a | {"ga_tuned": mean(shares)} for a, shares in zip(added, ga, strict=True)]


def check_calibration(simulation: Any, e: int) -> list[str]:
    """Advice about the calibration of a global model; UserError if it cannot be calibrated."""
    if isinstance(simulation, Groups):
        raise UserError("`calibrate=ccvr` is for a federation of one architecture, not for a task: drop it.")
    method = select(simulation.methods, e)
    if isinstance(method, GaussianHead):
        raise UserError("this method calibrates its last model by itself: drop `calibrate`.")
    if not method.traits().global_model or method.traits().own_models or not simulation.program.model.head:
        raise UserError(
            "`calibrate=ccvr` retrains the trained head of a global model, which this method does not have: drop it."
        )
    if simulation.streamed and simulation.program.devices > 1:
        try:
            calibrator_of(simulation)
        except UserError as error:
            raise UserError(
                "`calibrate=ccvr` looks at all clients in one round, whose samples `data_memory` does not hold on "
                "several devices: allow more, use `devices=1`, or drop it."
            ) from error
    return Calibration().configure(simulation.program.setting, select(simulation.hyper, e))[1]


def calibrator_of(simulation: Simulation) -> Simulation:
    """The simulation that calibrates the global models of another: one epoch of all clients over all their samples."""
    local = {"epochs": 1, "local_steps": None, "last_batch": "keep", "lr_steps": ()}
    experiments = [e._replace(method=Calibration(), local=replace(e.local, **local)) for e in simulation.experiments]
    return simulation.alike(experiments, simulation.sizes.shape[1])


def calibrated(simulation: Simulation, state: State) -> list[dict[str, Any]]:
    """GA of the last global models with heads that CCVR calibrates on the data of all clients: `ga_ccvr` [E].

    Clients send sums over all their samples, whatever the batch size: first for the shift, then about it.
    """
    calibrator = calibrator_of(simulation)
    state = calibrator.start(global_models(simulation, state))
    for round in (0, 1):
        state, _ = calibrator.step(state, round)
    classes = simulation.program.setting.num_classes  # later columns are of validation samples
    correct = np.array(calibrator.general(state)[1]["ccvr"])[:, :classes].sum(1)
    tests = len(simulation.federations[0].dataset.y_test)
    return [{"ga_ccvr": float(ga)} for ga in accuracy(correct, tests)]
