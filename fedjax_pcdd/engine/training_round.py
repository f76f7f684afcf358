"""One round as a pure function: local training of all jobs, then aggregation in every experiment; and what it tells.

Letters: E experiments, K clients, R = E * K rows, S cohort, J = E * S jobs, C classes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pcdd.engine.jobs import World
from fedjax_pcdd.engine.lanes import run_lanes
from fedjax_pcdd.engine.precision import full_precision
from fedjax_pcdd.engine.program import Program, State, Tree, lift, unlabelled
from fedjax_pcdd.methods.checks import alike
from fedjax_pcdd.methods.method import Message, ServerContext
from fedjax_pcdd.trees import where


class Report(NamedTuple):
    """What a round tells the host."""

    loss: jax.Array  # [J] mean training loss of each job, NaN for a job without steps
    correct: jax.Array  # [J, C] correct predictions of the model just trained on the client's own test set


class Launched(NamedTuple):
    """A round that is being computed."""

    before: Any  # State that it began with, donated but for what lives in host memory
    after: State
    report: Report
    plan: Any  # as `Simulation.plan` gave it


class Evaluation(NamedTuple):
    """Correct predictions; () where a method has no such model or it was not asked for."""

    generic: Any  # [E, C] global model, whole test set
    personal: Any  # [R, C] personal model between rounds, own test set
    local: Any  # [R, C] personal model between rounds, whole test set
    further: dict[str, Any]  # [E, C] of each further global model by its name, whole test set


@full_precision
def training_round(
    program: Program, methods, hyper, data, keys, state: State, plan, jobs, round
) -> tuple[State, Report]:
    """One round: local training of all jobs, then aggregation in every experiment."""

    def job_key(number, experiment):
        return jax.random.fold_in(jax.random.fold_in(keys[experiment], round), number)

    job_keys = jax.vmap(job_key)(jobs.number, jobs.experiment)
    world = World(methods, hyper, state.servers, data, jobs, job_keys, round)
    outcome = run_lanes(program, world, state, plan)
    message, weights = outcome.message, jobs.weight.reshape(program.experiments, -1)
    each = jax.tree.map(lambda x: x.reshape(*weights.shape, *x.shape[1:]), message.each)

    def aggregate(method, server, message, weights, hyper, clients, count, key):
        key = jax.random.fold_in(jax.random.fold_in(key, round), program.setting.num_clients)
        known = ServerContext(
            program.model, program.setting, hyper, round, clients, count, key, unlabelled(program, data)
        )
        after = method.aggregate(server, message, weights, known)
        alike(method, "aggregate", "server's next state", after, server, "init_server made it")
        return where(weights.sum() > 0, after, server)

    mean, total = message.mean, message.total
    clients, steps = (
        (x.reshape(program.experiments, -1)) for x in (jobs.row % program.setting.num_clients, jobs.steps)
    )
    if program.experiments == 1:
        mean, total = jax.tree.map(lambda x: x[None], (mean, total))
    servers = lift(aggregate, program.experiments)(
        methods, state.servers, Message(mean, total, each), weights, hyper, clients, (steps > 0).sum(1), keys
    )
    clients, statistics = outcome.clients, outcome.statistics
    if not (program.split_clients or program.in_place):
        clients, statistics = _stored(state, jobs, (clients, statistics))
    return State(servers, clients, statistics), Report(outcome.loss, outcome.correct)


def _stored(state: State, jobs, new: Tree) -> Tree:
    """Clients and statistics after a round: those of jobs with steps are replaced by their new ones [J, ...]."""

    def write(old, values):
        slots = jnp.where(jobs.steps > 0, jobs.slot, old.shape[0])
        return old.at[slots].set(values, mode="drop", unique_indices=False)

    return jax.tree.map(write, (state.clients, state.statistics), new)
