"""One round as a pure function: local training of all jobs in lanes, then aggregation in every experiment.

A round whose samples do not fit on the device goes through them in chunks: its beginning, parts and end are functions
of their own.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pcdd.engine.devices import full_precision
from fedjax_pcdd.engine.jobs import Inputs
from fedjax_pcdd.engine.lanes import Outcome, empty, run_lanes, run_segments
from fedjax_pcdd.engine.parcels import Parcel, opened
from fedjax_pcdd.engine.program import Data, Program, Report, State, Tree, lift
from fedjax_pcdd.engine.schedule import Jobs, Plan
from fedjax_pcdd.methods.checks import same_shapes
from fedjax_pcdd.methods.method import Local, Message, ServerContext
from fedjax_pcdd.trees import where


@full_precision
def training_round(program: Program, methods, hyper, data, keys, state: State, sent: Parcel) -> tuple[State, Report]:
    """One round: local training of all jobs, then aggregation in every experiment.

    The new state's servers are the next ones or, if `Program.aggregates` is False, the former ones and their messages.
    `sent` is plan, jobs and round number.
    """
    plan, jobs, round = opened(sent)
    work = Work(methods, hyper, keys, state.servers, jobs, round)
    outcome = run_lanes(program, work.on(data), state, plan)
    return _ended(program, data, (state.clients, state.statistics), outcome, work)


class Work(NamedTuple):
    """A round's inputs other than samples; the chunks of a round in chunks share them."""

    methods: Any  # [E]
    hyper: Local  # [E]
    keys: jax.Array  # [E]
    servers: Tree  # [E, ...]
    jobs: Jobs
    round: Any

    def on(self, data: Data) -> Inputs:
        """The inputs of the jobs whose samples are in `data`, with a key for each job."""

        def job_key(number, experiment):
            return jax.random.fold_in(jax.random.fold_in(self.keys[experiment], self.round), number)

        job_keys = jax.vmap(job_key)(self.jobs.number, self.jobs.experiment)
        return Inputs(self.methods, self.hyper, self.servers, data, self.jobs, job_keys, self.round)


@full_precision
def begin_round(program: Program, data: Data, kept, work: Work) -> Any:
    """The initial carry of such a round, from the data of any chunk; `kept` is clients and statistics."""
    return empty(program, work.on(data), State(work.servers, *kept))


@full_precision
def part_of_round(program: Program, data: Data, carry, work: Work, plan: Plan, first, stop) -> Any:
    """Run the segments from first to stop of such a round; its state is in the carry."""
    return run_segments(program, work.on(data), State(work.servers, (), ()), plan, first, stop, carry)


@full_precision
def end_round(program: Program, data: Data, kept, outcome: Outcome, work: Work) -> tuple[State, Report]:
    """The result of such a round, of whose outcome clients and statistics come by themselves, as `kept`."""
    return _ended(program, data, (), outcome._replace(clients=kept[0], statistics=kept[1]), work)


def _ended(program: Program, data: Data, held: Any, outcome: Outcome, work: Work) -> tuple[State, Report]:
    """The state and report of a round: aggregate in every experiment, and write the clients' state into `held`."""
    message, jobs = outcome.message, work.jobs
    if program.experiments == 1:
        mean, total = jax.tree.map(lambda x: x[None], (message.mean, message.total))
        message = message._replace(mean=mean, total=total)
    servers = aggregated(program, data, message, work) if program.aggregates else (work.servers, message)
    kept = outcome.clients, outcome.statistics
    if not (program.split_clients or program.in_place):

        def write(old, new):  # only of jobs with steps
            slots = jnp.where(jobs.steps > 0, jobs.slot, old.shape[0])
            return old.at[slots].set(new, mode="drop", unique_indices=False)

        kept = jax.tree.map(write, held, kept)
    return State(servers, *kept), outcome.report


@full_precision
def aggregated(program: Program, data: Data, message: Message, work: Work) -> Tree:
    """The next servers [E, ...] from reduced messages: `mean` and `total` [E, ...], `each` [J, ...] of all jobs."""
    setting, experiments, jobs, round = program.setting, program.experiments, work.jobs, work.round

    def aggregate(method, server, message, weights, hyper, clients, steps, key):
        key = jax.random.fold_in(jax.random.fold_in(key, round), setting.num_clients)
        public, count = program.unlabelled(data), (steps > 0).sum()
        context = ServerContext(program.model, setting, hyper, round, clients, count, key, public)
        after = method.aggregate(server, message, weights, context)
        same_shapes(method, "aggregate", "server's next state", after, server, "init_server made it")
        # A round's state must have the dtypes of the one before: that is what the next one and a checkpoint expect.
        after = jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), after, server)
        return where(weights.sum() > 0, after, server)

    def by_experiment(tree):
        return jax.tree.map(lambda x: x.reshape(experiments, -1, *x.shape[1:]), tree)

    # A place without a job is of no client: a write to its row, outside of [0, K), is dropped.
    clients = jnp.where(jobs.steps > 0, jobs.number, setting.num_clients)
    each, weights, clients, steps = by_experiment((message.each, jobs.weight, clients, jobs.steps))
    return lift(aggregate, experiments)(
        work.methods, work.servers, message._replace(each=each), weights, work.hyper, clients, steps, work.keys
    )
