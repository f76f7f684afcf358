"""Local training of all jobs of a round in lanes.

Lanes are L workers that each train one client after another; a step of all lanes is one step over a leading axis.
The loop over segments loads jobs into lanes, runs the steps of the segment, and finishes the jobs that end: their
messages are reduced on the fly, so memory is O(lanes), not O(cohort). A lane without jobs left keeps computing, and its
results are discarded.
Jobs are loaded and finished in blocks of b (`blocks.py`); where all lanes change their jobs at once, as one lane always
does, a segment is a block of whole jobs, and no lane is carried from one segment to the next.
Several devices do this with their own jobs, and communicate only when all are done.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.engine.evaluation import client_batches, logits_of, on_own_tests
from fedjax_pcdd.engine.jobs import Inputs, Lane, context_of, load, method_and_server, train_step
from fedjax_pcdd.engine.mesh import EVERYWHERE, SPLIT, gathered, spread, summed
from fedjax_pcdd.engine.parcels import Parcel, opened
from fedjax_pcdd.engine.program import LAYERS, OPTIMISER, Program, Report, State, Tree, block_of, over, put
from fedjax_pcdd.engine.schedule import Jobs, Plan, jobs_of
from fedjax_pcdd.engine.streaming import SHARDS, own_shard
from fedjax_pcdd.methods.checks import numbers, of_kind, same_shapes, sendable
from fedjax_pcdd.methods.method import Batch, Context, Keys, Message
from fedjax_pcdd.trees import at, select, where, zeros_like

LANES = "lanes"  # the axis over which lanes are mapped

# For several devices: each one's plan and members, packed [D, N], and the jobs' positions (`schedule.Shares`).
Shared = tuple[Parcel, jax.Array]


class Outcome(NamedTuple):
    """Results of finished jobs."""

    message: Message  # mean and total [E, ...], or [...] of a single experiment; each [J, ...]
    clients: Tree  # [J, ...], or as in the state with `Program.in_place`
    statistics: Tree  # likewise, or ()
    report: Report


def summary_of(program: Program, inputs: Inputs, lane: Lane, context: Context) -> Tree:
    """The method's pass over the client's training data with the trained variables; () if it has none."""
    method, _ = method_and_server(program, inputs, lane.job)
    summary = method.traits().summary
    if summary is None or not program.summarises:
        return ()
    row, train = at(inputs.jobs.row, lane.job), inputs.data.train

    def number(index):
        return index if isinstance(train.numbers, tuple) else train.numbers[index]

    def image(index):  # its random draws depend on the sample alone, not on the batch size
        key, augmented = jax.random.fold_in(context.keys.augment, number(index)), summary.augmented
        return prepare(program.pipeline, train.images[index][None], key, train=augmented, dtype=program.dtype)[0]

    def summarise(index, mask):
        batch = Batch(jax.vmap(image)(index), train.labels[index], mask.astype(jnp.result_type(float)))
        keys = Keys.of(jax.random.fold_in(context.keys.method, number(index[0])))
        return method.summarise(lane.variables, batch, context._replace(keys=keys))

    how = program.batch_pass if summary.train else program.train_pass
    return client_batches(summarise, train, row, how)


def upload(program: Program, inputs: Inputs, lane: Lane) -> tuple[Tree, Message]:
    """The next state of the lane's client, and its message."""
    method, _ = method_and_server(program, inputs, lane.job)
    context = context_of(program, inputs, lane, at(inputs.jobs.steps, lane.job))
    result = method.upload(lane.variables, summary_of(program, inputs, lane, context), context)
    client, message = of_kind(method, "upload", result, object, Message)
    same_shapes(method, "upload", "client's next state", client, lane.client, "init_client made it")
    return numbers(method, "upload", (client, sendable(method, "upload", message)))


def finish(program: Program, inputs: Inputs, lane: Lane) -> Outcome:
    """The `Outcome` of one job, without leading axes; its model is tested on the client's own data."""
    client, message = upload(program, inputs, lane)
    correct = tested(program, inputs, lane, client)
    end_state = {**lane.variables, OPTIMISER: lane.optimiser, LAYERS: program.layers_of(lane.variables["params"])}
    statistics = {k: end_state[k] for k in lane.statistics} if lane.statistics else ()
    loss = lane.loss / jnp.maximum(at(inputs.jobs.steps, lane.job), 1)
    return Outcome(message, client, statistics, Report(loss, correct, lane.before))


def tested(program: Program, inputs: Inputs, lane: Lane, client: Tree) -> jax.Array:
    """Correct predictions [C] of a lane's model on the client's own test set."""
    method, server = method_and_server(program, inputs, lane.job)
    row, tests = at(inputs.jobs.row, lane.job), inputs.data.test

    def predict(images):
        facts = program.facts_of(inputs.data, row)
        return logits_of(program, method, lane.variables, images, server, client, facts, scope="personal")

    return on_own_tests(predict, program, tests, row)


def tested_before(program: Program, inputs: Inputs, lane: Lane, step) -> Lane:
    """The lane with the correct predictions [C] of its model added, if it is about to begin an epoch.

    All lanes are tested if any of them begins one, so that this is one branch for all and costs other steps nothing.
    """
    jobs, done = inputs.jobs, step - lane.start
    length = jnp.maximum(at(jobs.epoch_steps, lane.job), 1)
    begins = (done % length == 0) & (done < at(jobs.steps, lane.job))
    any_begins = begins if program.lanes == 1 else jax.lax.pmax(begins.astype(jnp.int32), LANES) > 0

    def test(before):
        correct = tested(program, inputs, lane, lane.client)
        return jnp.where(begins, before.at[done // length].set(correct), before)

    return lane._replace(before=jax.lax.cond(any_begins, test, lambda before: before, lane.before))


def store(program: Program, jobs: Jobs, job, live, new: Outcome, outcome: Outcome) -> Outcome:
    """The outcome with the results of a block of jobs written into it.

    Args:
      job: [b], or a scalar; the leaves of `new` likewise.
      live: [b] which of them are jobs, not padding.
    """
    rows = jobs.slot[job] if program.in_place else job
    clients, statistics = put((outcome.clients, outcome.statistics), rows, (new.clients, new.statistics), live)
    per_job, entries = ((x.message.each, x.report) for x in (outcome, new))
    each, report = put(per_job, job, entries, live)
    mean, total = reduce(program, jobs, job, live, outcome.message, new.message)
    return Outcome(Message(mean, total, each), clients, statistics, report)


def reduce(program: Program, jobs: Jobs, job, live, total: Message, message: Message) -> tuple[Tree, Tree]:
    """Add the messages of a block, leaves [b, ...] or [...], to their experiments' sums: `mean` and `total`."""
    experiment, weight, single = jobs.experiment[job], jobs.weight[job], program.experiments == 1
    sums, new = (total.mean, total.total), (message.mean, message.total)
    if jnp.ndim(job) == 0:
        old = sums if single else select(sums, experiment)
        mean = jax.tree.map(lambda t, m: t + weight.astype(m.dtype) * jnp.where(weight != 0, m, 0), old[0], new[0])
        updated = mean, jax.tree.map(jnp.add, old[1], new[1])
        return updated if single else put(sums, experiment, updated)
    members = live & (experiment == jnp.arange(program.experiments)[:, None])  # [E, b]

    def add(total, values, weight):
        """Padding and clients without weight may hold anything, NaN too, so weighting them by 0 is not enough."""
        mask, weight = (x.reshape(*x.shape, *[1] * (values.ndim - 1)) for x in (members & (weight != 0), weight))
        new = jnp.where(mask, weight.astype(values.dtype) * values, 0).sum(1, dtype=values.dtype)
        return total + (new[0] if single else new)

    mean = jax.tree.map(partial(add, weight=weight), sums[0], new[0])
    return mean, jax.tree.map(partial(add, weight=jnp.ones_like(weight)), sums[1], new[1])


def empty(program: Program, inputs: Inputs, state: State) -> tuple[Any, Outcome]:
    """The lanes (() if none outlives a segment) and the outcome before the first segment."""
    jobs = inputs.jobs.row.shape[0]
    lane = jax.eval_shape(lambda: load(program, inputs, state, 0, 0))
    message = jax.eval_shape(partial(upload, program, inputs), lane)[1]
    leading = () if program.experiments == 1 else (program.experiments,)
    mean, total = zeros_like((message.mean, message.total), *leading)
    reduced = Message(mean, total, zeros_like(message.each, jobs))
    loss = jnp.zeros(jobs, jnp.result_type(float))
    before = jnp.zeros((jobs, program.tests_epochs, program.counts), jnp.int32)
    correct = jnp.zeros((jobs, program.counts), jnp.int32)
    clients, statistics = state.clients, state.statistics
    if not program.in_place:
        clients, statistics = zeros_like((lane.client, lane.statistics), jobs)
    lanes = () if program.blocks.together else zeros_like(lane, program.lanes)
    return lanes, Outcome(reduced, clients, statistics, Report(loss, correct, before))


def run_lanes(program: Program, inputs: Inputs, state: State, plan: Plan | Shared) -> Outcome:
    """Train all jobs of a round.

    Args:
      plan: of one device, or the shares of several. If these divide the clients' state (`Program.split_clients`), the
        outcome's is divided in the same way, [D * M, ...] in the order of the shares' members.
    """
    if isinstance(plan, Plan):
        return _run_lanes(program, inputs, state, plan)
    clients = SPLIT if program.split_clients else EVERYWHERE
    read = Inputs(*[EVERYWHERE] * len(Inputs._fields))._replace(data=SHARDS) if program.split_data else EVERYWHERE
    in_specs = (read, State(EVERYWHERE, clients, clients), (SPLIT, EVERYWHERE))
    out_specs = Outcome(EVERYWHERE, clients, clients, EVERYWHERE)
    return spread(partial(_run_share, program), program.devices, in_specs, out_specs)(inputs, state, plan)


def _run_share(program: Program, inputs: Inputs, state: State, shared: Shared) -> Outcome:
    """Run one device's share of the jobs; the outcome combines those of all devices."""
    (plan, members), position = opened(select(shared[0], 0)), shared[1]
    inputs = inputs._replace(jobs=jobs_of(inputs.jobs, members), keys=inputs.keys[jnp.maximum(members, 0)])
    if program.split_data:
        inputs = inputs._replace(data=own_shard(inputs.data))
    outcome = _run_lanes(program, inputs, state, plan)

    def in_job_order(tree):
        return jax.tree.map(lambda x: x[position], gathered(tree))

    clients, statistics = outcome.clients, outcome.statistics
    if not program.split_clients:
        clients, statistics = in_job_order((clients, statistics))
    mean, total = summed((outcome.message.mean, outcome.message.total))
    report, each = in_job_order((outcome.report, outcome.message.each))
    return Outcome(Message(mean, total, each), clients, statistics, report)


def _run_lanes(program: Program, inputs: Inputs, state: State, plan: Plan) -> Outcome:
    return run_segments(program, inputs, state, plan, 0, plan.num_segments, empty(program, inputs, state))[1]


def run_segments(program: Program, inputs: Inputs, state: State, plan: Plan, first, stop, carry):
    """Run the segments from first to stop; the carry is the lanes, if any outlives a segment, and the outcome.

    In rounds that leave out the method's pass over the clients' data, `total` stays as it is.
    """
    summary, run = inputs.methods.traits().summary, partial(_segments, inputs, state, plan, first, stop)
    if summary is None or not summary.last:
        return run(program, carry)

    def without_summary():  # without the pass, messages may have a `total` of other shapes
        (lanes, outcome), bare = carry, replace(program, summarises=False)
        held, message = outcome if program.in_place else state, outcome.message
        unused = zeros_like(jax.eval_shape(partial(empty, bare, inputs, held))[1].message.total)
        lanes, outcome = run(bare, (lanes, outcome._replace(message=message._replace(total=unused))))
        return lanes, outcome._replace(message=outcome.message._replace(total=message.total))

    due = inputs.round >= program.setting.rounds - summary.last
    return jax.lax.cond(due, partial(run, program, carry), without_summary)


def _segments(inputs: Inputs, state: State, plan: Plan, first, stop, program: Program, carry):
    if not program.blocks.together:
        return jax.lax.fori_loop(first, stop, partial(_segment, program, inputs, state, plan), carry)
    segment = partial(_whole_jobs, program, inputs, state, plan)
    if 1 < program.lanes >= len(inputs.jobs.row):  # there is but one
        return carry[0], segment(first, carry[1])
    return carry[0], jax.lax.fori_loop(first, stop, segment, carry[1])


def _whole_jobs(program: Program, inputs: Inputs, state: State, plan: Plan, g, outcome: Outcome) -> Outcome:
    """Run a segment in which all lanes begin and end their jobs; entry i of its lists is lane i."""
    first, stop = at(plan.load_stop, g), at(plan.load_stop, g + 1)
    held = outcome if program.in_place else state

    def run(job, indices):
        lane = load(program, inputs, held, job, at(plan.step_stop, g))
        return finish(program, inputs, train(program, inputs, plan, g, lane, indices))

    job = block_of(plan.load_job, first, program.lanes)
    indices = plan.indices if program.lanes > 1 else plan.indices[:, 0]
    new = over(program.lanes, run, (0, 1), LANES)(job, indices)
    return store(program, inputs.jobs, job, first + jnp.arange(program.lanes) < stop, new, outcome)


def _segment(program: Program, inputs: Inputs, state: State, plan: Plan, g, carry):
    """Run a segment after which some lanes keep their jobs."""
    lanes, outcome = carry
    size, held = program.blocks.size, outcome if program.in_place else state

    def load_block(first, live, lanes):
        load_job = partial(load, program, inputs, held, step=at(plan.step_stop, g))
        new = over(size, load_job)(block_of(plan.load_job, first, size))
        return put(lanes, block_of(plan.load_lane, first, size), new, live)

    def finish_block(first, live, outcome):
        done = select(lanes, block_of(plan.finish_lane, first, size))
        return store(program, inputs.jobs, done.job, live, over(size, partial(finish, program, inputs))(done), outcome)

    lanes = _in_blocks(size, at(plan.load_stop, g), at(plan.load_stop, g + 1), load_block, lanes)
    lanes = over(program.lanes, partial(train, program, inputs, plan, g), (0, 1), LANES)(lanes, plan.indices)
    return lanes, _in_blocks(size, at(plan.finish_stop, g), at(plan.finish_stop, g + 1), finish_block, outcome)


def _in_blocks(size: int, start, stop, body: Callable, carry: Tree) -> Tree:
    """Run the body for each block of entries from start to stop; it gets the first, which are live, and the carry."""

    def run_block(i, carry):
        first = start + i * size
        return body(first, first + jnp.arange(size) < stop, carry)

    return jax.lax.fori_loop(0, (stop - start + size - 1) // size, run_block, carry)


def train(program: Program, inputs: Inputs, plan: Plan, segment, lane: Lane, indices) -> Lane:
    """Run the steps of a segment in one lane, whose batches of the round are [T, B].

    If all segments have one step, XLA need not store what a loop would carry; if all have equally many, the host of a
    GPU need not check before each step whether there is another.
    """
    start, stop, blocks = at(plan.step_stop, segment), at(plan.step_stop, segment + 1), program.blocks

    def step(t, lane):
        lane = tested_before(program, inputs, lane, t) if program.tests_epochs else lane
        after = train_step(program, inputs, lane, at(indices, t), t)
        return where(t - lane.start < at(inputs.jobs.steps, lane.job), after, lane) if blocks.waits else after

    if blocks.steps == 1:
        return step(start, lane)
    if blocks.steps:
        return jax.lax.fori_loop(0, blocks.steps, lambda i, lane: step(start + i, lane), lane)
    return jax.lax.fori_loop(start, stop, step, lane)
