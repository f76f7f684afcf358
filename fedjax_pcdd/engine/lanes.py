"""Lanes: L workers, of which each trains one client after another, as one step over a leading axis.

The loop over segments loads jobs into lanes, runs the steps of the segment, and finishes the jobs that end: their
message is reduced on the fly, so memory is O(lanes), not O(cohort). A lane that has run dry computes what nobody reads.
Jobs are loaded and finished in blocks of b (`blocks.py`); where all lanes change their jobs at once, as one lane always
does, a segment is a block of whole jobs, and no lane outlives it.
Several devices do so with their own jobs, and speak to each other only when all are done.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.engine.evaluation import client_batches, count_correct
from fedjax_pcdd.engine.jobs import Lane, World, context_of, load, method_and_server, train_step
from fedjax_pcdd.engine.mesh import EVERYWHERE, SPLIT, gathered, spread, summed
from fedjax_pcdd.engine.program import OPTIMISER, Program, State, Tree, block_of, facts_of, over, put
from fedjax_pcdd.engine.schedule import Jobs, Plan, Shares
from fedjax_pcdd.methods.checks import alike
from fedjax_pcdd.methods.method import Batch, Context, Keys, Message
from fedjax_pcdd.trees import select, where


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

    def image(index):  # what it draws is the sample's own, however many form a batch
        key, augmented = jax.random.fold_in(context.keys.augment, index), summary.augmented
        return prepare(program.pipeline, train.images[index][None], key, train=augmented, dtype=program.dtype)[0]

    def summarise(index, mask):
        batch = Batch(jax.vmap(image)(index), train.labels[index], mask.astype(jnp.result_type(float)))
        keys = Keys.of(jax.random.fold_in(context.keys.method, index[0]))
        return method.summarise(lane.variables, batch, context._replace(keys=keys))

    how = program.batch_pass if summary.train else program.train_pass
    return client_batches(summarise, train, row, how)


def upload(program: Program, world: World, lane: Lane) -> tuple[Tree, Message]:
    """The next state of the lane's client, and its message."""
    method, _ = method_and_server(program, world, lane.job)
    context = context_of(program, world, lane, world.jobs.steps[lane.job])
    return method.upload(lane.variables, summary_of(program, world, lane, context), context)


def finish(program: Program, world: World, lane: Lane) -> Outcome:
    """What one job leaves behind, an `Outcome` without leading axes; its model is tested on the client's own data."""
    job, jobs = lane.job, world.jobs
    row, steps = jobs.row[job], jobs.steps[job]
    method, server = method_and_server(program, world, job)
    client, message = upload(program, world, lane)
    alike(method, "upload", "client's next state", client, lane.client, "init_client made it")

    def predict(images):
        facts = facts_of(program, world.data, row)
        return method.logits(program.model, lane.variables, images, server, client, facts, scope="personal")

    tests = world.data.test
    correct = client_batches(count_correct(predict, program, tests), tests, row, program.test_pass)
    new = {**lane.variables, OPTIMISER: lane.optimiser}
    statistics = {k: new[k] for k in lane.statistics} if lane.statistics else ()
    return Outcome(message, client, statistics, lane.loss / jnp.maximum(steps, 1), correct)


def store(program: Program, jobs: Jobs, job, live, new: Outcome, outcome: Outcome) -> Outcome:
    """The outcome with what a block of jobs left behind.

    Args:
      job: [b], or a scalar; so the leaves of `new`.
      live: [b] which of them are jobs, not padding.
    """
    rows = jobs.slot[job] if program.in_place else job
    clients, statistics = put((outcome.clients, outcome.statistics), rows, (new.clients, new.statistics), live)
    each, loss, correct = put(
        (outcome.message.each, outcome.loss, outcome.correct), job, (new.message.each, new.loss, new.correct), live
    )
    mean, total = reduce(program, jobs, job, live, outcome.message, new.message)
    return Outcome(Message(mean, total, each), clients, statistics, loss, correct)


def reduce(program: Program, jobs: Jobs, job, live, total: Message, message: Message) -> tuple[Tree, Tree]:
    """Add the messages of a block, leaves [b, ...] or [...], to their experiments' sums: `mean` and `total`."""
    experiment, weight, alone = jobs.experiment[job], jobs.weight[job], program.experiments == 1
    sums, new = (total.mean, total.total), (message.mean, message.total)
    if jnp.ndim(job) == 0:
        old = sums if alone else select(sums, experiment)
        mean = jax.tree.map(lambda t, m: t + weight.astype(m.dtype) * m, old[0], new[0])
        added = mean, jax.tree.map(jnp.add, old[1], new[1])
        return added if alone else put(sums, experiment, added)
    members = live & (experiment == jnp.arange(program.experiments)[:, None])  # [E, b]

    def add(total, values, weight):
        """Padding may hold anything, so it is not enough to weigh it with 0."""
        chosen, weight = (x.reshape(*x.shape, *[1] * (values.ndim - 1)) for x in (members, weight))
        new = jnp.where(chosen, weight.astype(values.dtype) * values, 0).sum(1, dtype=values.dtype)
        return total + (new[0] if alone else new)

    mean = jax.tree.map(partial(add, weight=weight), sums[0], new[0])
    return mean, jax.tree.map(partial(add, weight=jnp.ones_like(weight)), sums[1], new[1])


def _zeros(tree: Tree, *leading: int) -> Tree:
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), tree)


def _empty(program: Program, world: World, state: State) -> tuple[Any, Outcome]:
    """Lanes, if any outlives a segment, and outcome before the first one."""
    jobs = world.jobs.row.shape[0]
    lane = jax.eval_shape(lambda: load(program, world, state.clients, state.statistics, 0, 0))
    sent = jax.eval_shape(partial(upload, program, world), lane)[1]
    stacked = () if program.experiments == 1 else (program.experiments,)
    reduced = Message(_zeros(sent.mean, *stacked), _zeros(sent.total, *stacked), _zeros(sent.each, jobs))
    loss = jnp.full(jobs, jnp.nan, jnp.result_type(float))
    correct = jnp.zeros((jobs, program.setting.num_classes), jnp.int32)
    kept = (state.clients, state.statistics) if program.in_place else _zeros((lane.client, lane.statistics), jobs)
    clients, statistics = kept
    lanes = () if program.blocks.together else _zeros(lane, program.lanes)
    return lanes, Outcome(reduced, clients, statistics, loss, correct)


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


def _run_lanes(program: Program, world: World, state: State, plan: Plan) -> Outcome:
    lanes, outcome = _empty(program, world, state)
    if not program.blocks.together:
        segment = partial(_segment, program, world, state, plan)
        return jax.lax.fori_loop(0, plan.num_segments, segment, (lanes, outcome))[1]
    segment = partial(_whole_jobs, program, world, state, plan)
    if program.lanes > 1 and len(world.jobs.row) <= program.lanes:
        return segment(0, outcome)
    return jax.lax.fori_loop(0, plan.num_segments, segment, outcome)


def _whole_jobs(program: Program, world: World, state: State, plan: Plan, g, outcome: Outcome) -> Outcome:
    """A segment in which all lanes begin and end their jobs; entry i of its lists is lane i."""
    first, stop = plan.load_stop[g], plan.load_stop[g + 1]

    def run(job, indices):
        lane = load(program, world, *_held(program, state, outcome), job, plan.step_stop[g])
        return finish(program, world, train(program, world, plan, g, lane, indices))

    job = block_of(plan.load_job, first, program.lanes)
    indices = plan.indices if program.lanes > 1 else plan.indices[:, 0]
    new = over(program.lanes, run, (0, 1))(job, indices)
    return store(program, world.jobs, job, first + jnp.arange(program.lanes) < stop, new, outcome)


def _segment(program: Program, world: World, state: State, plan: Plan, g, carry):
    """A segment after which some lanes keep their jobs."""
    lanes, outcome = carry
    size = program.blocks.size

    def load_some(first, live, lanes):
        begin = partial(load, program, world, *_held(program, state, outcome), step=plan.step_stop[g])
        new = over(size, lambda job: begin(job=job))(block_of(plan.load_job, first, size))
        return put(lanes, block_of(plan.load_lane, first, size), new, live)

    def finish_some(first, live, outcome):
        some = select(lanes, block_of(plan.finish_lane, first, size))
        return store(program, world.jobs, some.job, live, over(size, partial(finish, program, world))(some), outcome)

    lanes = _in_blocks(size, plan.load_stop[g], plan.load_stop[g + 1], load_some, lanes)
    lanes = over(program.lanes, partial(train, program, world, plan, g), (0, 1))(lanes, plan.indices)
    return lanes, _in_blocks(size, plan.finish_stop[g], plan.finish_stop[g + 1], finish_some, outcome)


def _in_blocks(size: int, start, stop, body: Callable, carry: Tree) -> Tree:
    """The body for each block of the entries from start to stop: it takes the first, which are live, and the carry."""

    def one(i, carry):
        first = start + i * size
        return body(first, first + jnp.arange(size) < stop, carry)

    return jax.lax.fori_loop(0, (stop - start + size - 1) // size, one, carry)


def _held(program: Program, state: State, outcome: Outcome) -> tuple[Tree, Tree]:
    """Clients and statistics that jobs start from."""
    held = outcome if program.in_place else state
    return held.clients, held.statistics


def train(program: Program, world: World, plan: Plan, segment, lane: Lane, indices) -> Lane:
    """The steps of a segment in one lane, whose batches of the round are [T, B].

    Where all segments have one step, XLA need not store what a loop would carry; where they have equally many, a GPU's
    host need not ask whether there is another.
    """
    start, stop, blocks = plan.step_stop[segment], plan.step_stop[segment + 1], program.blocks

    def step(t, lane):
        after = train_step(program, world, lane, indices[t], t)
        return where(t - lane.start < world.jobs.steps[lane.job], after, lane) if blocks.waits else after

    if blocks.steps == 1:
        return step(start, lane)
    if blocks.steps:
        return jax.lax.fori_loop(0, blocks.steps, lambda i, lane: step(start + i, lane), lane)
    return jax.lax.fori_loop(start, stop, step, lane)
