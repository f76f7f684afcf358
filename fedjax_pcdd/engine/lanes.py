"""Lanes: L workers, of which each trains one client after another, as one step over a leading axis.

The loop over segments loads jobs into lanes, runs the steps of the segment, and finishes the jobs that end: their
message is reduced on the fly, so memory is O(lanes), not O(cohort). A lane that has run dry computes what nobody reads.
Several devices do so with their own jobs, and speak to each other only when all are done.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.engine.evaluation import client_batches, count_correct
from fedjax_pcdd.engine.jobs import Lane, World, context_of, load, method_and_server, train_step
from fedjax_pcdd.engine.mesh import EVERYWHERE, SPLIT, gathered, spread, summed
from fedjax_pcdd.engine.program import OPTIMISER, Program, State, Tree, lift, put
from fedjax_pcdd.engine.schedule import Jobs, Plan, Shares
from fedjax_pcdd.methods.checks import alike
from fedjax_pcdd.methods.method import Batch, Context, Keys, Message
from fedjax_pcdd.trees import select


class Outcome(NamedTuple):
    """What finished jobs leave behind."""

    message: Message  # mean and total [E, ...], or [...] of a single experiment; each [J, ...]
    clients: Tree  # [J, ...], or where `Program.in_place` as in the state
    statistics: Tree  # likewise, or ()
    loss: jax.Array  # [J] mean over the local steps
    correct: jax.Array  # [J, C] of the own test set, right after training


def summary_of(program: Program, world: World, lane: Lane, context: Context) -> Tree:
    """The method's pass over the client's training data under the trained variables; () without one."""
    method, _ = method_and_server(program, world, lane.job)
    summary = method.traits().summary
    if summary is None:
        return ()
    row, train = world.jobs.row[lane.job], world.data.train

    def summarise(index, mask):
        keys = Keys.of(jax.random.fold_in(context.keys.method, index[0]))
        images = prepare(
            program.pipeline, train.images[index], keys.augment, train=summary.augmented, dtype=program.dtype
        )
        batch = Batch(images, train.labels[index], mask.astype(jnp.result_type(float)))
        return method.summarise(lane.variables, batch, context._replace(keys=keys))

    batch = program.setting.batch_size if summary.train else program.train_batch
    return client_batches(summarise, train, row, batch)


def finish(program: Program, world: World, lane: Lane, outcome: Outcome) -> Outcome:
    """Reduce the message of a job that ends, store its client state, and test its model on the client's own data."""
    job, jobs = lane.job, world.jobs
    row, steps = jobs.row[job], jobs.steps[job]
    method, server = method_and_server(program, world, job)
    context = context_of(program, world, lane, steps)
    summary = summary_of(program, world, lane, context)
    client, message = method.upload(lane.variables, summary, context)
    alike(method, "upload", "client's next state", client, lane.client, "init_client made it")

    def predict(images):
        facts = context.facts
        return method.logits(program.model, lane.variables, images, server, client, facts, scope="personal")

    tests = world.data.test
    correct = client_batches(count_correct(predict, program, tests), tests, row, program.test_batch)
    statistics, place = outcome.statistics, jobs.slot[job] if program.in_place else job
    if statistics:
        new = {**lane.variables, OPTIMISER: lane.optimiser}
        statistics = put(statistics, place, {k: new[k] for k in statistics})
    return Outcome(
        reduce(program, jobs, job, outcome.message, message),
        put(outcome.clients, place, client),
        statistics,
        outcome.loss.at[job].set(lane.loss / jnp.maximum(steps, 1)),
        outcome.correct.at[job].set(correct),
    )


def reduce(program: Program, jobs: Jobs, job, total: Message, message: Message) -> Message:
    """Add one client's message to its experiment's sums."""
    experiment, weight, alone = jobs.experiment[job], jobs.weight[job], program.experiments == 1
    sums = (total.mean, total.total)
    old_mean, old_total = sums if alone else select(sums, experiment)
    mean = jax.tree.map(lambda t, m: t + weight.astype(m.dtype) * m, old_mean, message.mean)
    summed = jax.tree.map(jnp.add, old_total, message.total)
    mean, summed = (mean, summed) if alone else put(sums, experiment, (mean, summed))
    return Message(mean, summed, put(total.each, job, message.each))


def _zeros(tree: Tree, *leading: int) -> Tree:
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), tree)


def _empty(program: Program, world: World, state: State) -> tuple[Lane, Outcome]:
    """Lanes and outcome before the first segment."""
    jobs = world.jobs.row.shape[0]
    lane = jax.eval_shape(lambda: load(program, world, state.clients, state.statistics, 0, 0))

    def message(lane):
        method, _ = method_and_server(program, world, lane.job)
        context = context_of(program, world, lane, 0)
        return method.upload(lane.variables, summary_of(program, world, lane, context), context)[1]

    sent = jax.eval_shape(message, lane)
    stacked = () if program.experiments == 1 else (program.experiments,)
    reduced = Message(_zeros(sent.mean, *stacked), _zeros(sent.total, *stacked), _zeros(sent.each, jobs))
    loss = jnp.full(jobs, jnp.nan, jnp.result_type(float))
    correct = jnp.zeros((jobs, program.setting.num_classes), jnp.int32)
    kept = (state.clients, state.statistics) if program.in_place else _zeros((lane.client, lane.statistics), jobs)
    clients, statistics = kept
    return _zeros(lane, program.lanes), Outcome(reduced, clients, statistics, loss, correct)


def run_lanes(program: Program, world: World, state: State, plan: Plan | Shares) -> Outcome:
    """Train all jobs of a round.

    Args:
      plan: of one device, or the shares of several. Where these divide the clients' state (`Program.split_clients`),
        that of the outcome is divided in the same way, [D * M, ...] in the order of the shares' members.
    """
    if isinstance(plan, Plan):
        return _run_lanes(program, world, state, plan)
    clients = SPLIT if program.split_clients else EVERYWHERE
    inputs = (EVERYWHERE, State(EVERYWHERE, clients, clients), Shares(SPLIT, SPLIT, EVERYWHERE))
    outputs = Outcome(EVERYWHERE, clients, clients, EVERYWHERE, EVERYWHERE)
    return spread(partial(_run_share, program), program.devices, inputs, outputs)(world, state, plan)


def _run_share(program: Program, world: World, state: State, shares: Shares) -> Outcome:
    """What one of several devices does."""
    members = shares.members[0]
    jobs = select(world.jobs, jnp.maximum(members, 0))
    jobs = jobs._replace(steps=jnp.where(members >= 0, jobs.steps, 0))
    own = world._replace(jobs=jobs, keys=world.keys[jnp.maximum(members, 0)])
    found = _run_lanes(program, own, state, select(shares.plan, 0))

    def of_all(tree):
        return jax.tree.map(lambda x: x[shares.place], gathered(tree))

    mean, total, each = found.message
    clients, statistics = found.clients, found.statistics
    if not program.split_clients:
        clients, statistics = of_all((clients, statistics))
    mean, total = summed((mean, total))
    loss, correct = of_all((found.loss, found.correct))
    return Outcome(Message(mean, total, of_all(each)), clients, statistics, loss, correct)


def _read(program: Program, state: State, outcome: Outcome) -> tuple[Tree, Tree]:
    """Clients and statistics that jobs start from."""
    held = outcome if program.in_place else state
    return held.clients, held.statistics


def _run_lanes(program: Program, world: World, state: State, plan: Plan) -> Outcome:
    if program.lanes == 1:
        return _run_one_lane(program, world, state, plan)

    def segment(g, carry):
        lanes, outcome = carry

        def load_one(i, lanes):
            job, step = plan.load_job[i], plan.step_stop[g]
            return put(lanes, plan.load_lane[i], load(program, world, *_read(program, state, outcome), job, step))

        def train(step, lanes):
            one = lift(lambda lane, index: train_step(program, world, lane, index, step), program.lanes)
            return one(lanes, plan.indices[step])

        def finish_one(i, outcome):
            return finish(program, world, select(lanes, plan.finish_lane[i]), outcome)

        loop = jax.lax.fori_loop
        lanes = loop(plan.load_stop[g], plan.load_stop[g + 1], load_one, lanes)
        lanes = _steps(program, plan, g, train, lanes)
        outcome = loop(plan.finish_stop[g], plan.finish_stop[g + 1], finish_one, outcome)
        return lanes, outcome

    return jax.lax.fori_loop(0, plan.num_segments, segment, _empty(program, world, state))[1]


def _steps(program: Program, plan: Plan, segment, train: Callable, lanes: Lane) -> Lane:
    """The steps of a segment; where there is but one, XLA need not store what a loop would carry."""
    start, stop = plan.step_stop[segment], plan.step_stop[segment + 1]
    return train(start, lanes) if program.one_step else jax.lax.fori_loop(start, stop, train, lanes)


def _run_one_lane(program: Program, world: World, state: State, plan: Plan) -> Outcome:
    """One job after another, each a segment; a lane without an axis is one that XLA updates in place on a CPU."""

    def run(g, outcome):
        lane = load(program, world, *_read(program, state, outcome), plan.load_job[g], plan.step_stop[g])

        def train(step, lane):
            return train_step(program, world, lane, plan.indices[step, 0], step)

        return finish(program, world, _steps(program, plan, g, train, lane), outcome)

    return jax.lax.fori_loop(0, plan.num_segments, run, _empty(program, world, state)[1])
