"""A job in its lane: how one client's local training begins, and one step of it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.engine.program import OPTIMISER, Data, Program, Tree, overlaid, start_of, sum_over_samples, with_own
from fedjax_pcdd.engine.schedule import Jobs
from fedjax_pcdd.methods.checks import flags, of_kind, of_model, same_shapes, scalar
from fedjax_pcdd.methods.method import Batch, Context, Evaluated, Keys, Local, Step
from fedjax_pcdd.trees import at, select


class Inputs(NamedTuple):
    """What every lane may read during a round."""

    methods: Any  # [E]
    hyper: Local  # [E]
    servers: Tree  # [E, ...]
    data: Data
    jobs: Jobs
    keys: jax.Array  # [J] one key per job
    round: jax.Array


class Lane(NamedTuple):
    """One worker; stacked to [L, ...]."""

    job: jax.Array
    start: jax.Array  # step at which the job began
    variables: Tree
    optimiser: Tree
    client: Tree
    loss: jax.Array  # sum over the job's steps
    statistics: Tree  # what the engine keeps for the client, as at the start of the job
    before: jax.Array  # [epochs, C] correct predictions on the client's own tests before each epoch, if requested


def method_and_server(program: Program, inputs: Inputs, job):
    """The job's method and server."""
    return program.of_experiment((inputs.methods, inputs.servers), at(inputs.jobs.experiment, job))


def context_of(program: Program, inputs: Inputs, lane: Lane, step) -> Context:
    """The context of one local step of a lane's job.

    To a method, the client's own layers never move: `start` has their current values, so that terms and messages that
    compare with it see only the shared parameters. `received` has their initial values, for that model's predictions.
    """
    job, client, jobs = lane.job, lane.client, inputs.jobs
    method, server = method_and_server(program, inputs, job)
    local = program.of_experiment(inputs.hyper, at(jobs.experiment, job))
    facts = program.facts_of(inputs.data, at(jobs.row, job))
    start = with_own(method.download(server, client), lane.statistics)
    epoch_steps, steps = jnp.maximum(at(jobs.epoch_steps, job), 1), at(jobs.steps, job)
    epoch, epochs = (jax.lax.div(jnp.int32(n), jnp.int32(epoch_steps)) for n in (step, steps))
    keys, public = Keys.of(jax.random.fold_in(at(inputs.keys, job), step)), program.unlabelled(inputs.data)
    validation = held_out(program, inputs.data, at(jobs.row, job)) if method.traits().validation else None
    context = Context(
        program.model, program.setting, local, server, client, start, facts, epoch, epochs, step, inputs.round, keys,
        public, validation, start if program.setting.own_layers else None,
    )  # fmt: skip
    return seen_at(program, context, lane.variables["params"])


def seen_at(program: Program, context: Context, params: Tree) -> Context:
    """The context for hooks that evaluate these parameters: `start` takes the client's own layers from them."""
    if not program.setting.own_layers:
        return context
    own_layers = jax.lax.stop_gradient(program.layers_of(params))
    return context._replace(start={**context.start, "params": overlaid(context.start["params"], own_layers)})


def held_out(program: Program, data: Data, row) -> Callable[[Callable[[Batch], Tree]], Tree]:
    """For hooks: a function that sums a given function over batches of the validation samples of a row's client."""
    tests, number, how = data.test, at(data.held, row), program.held_pass
    start = start_of(tests, row) + at(tests.size, row) - number  # behind the client's tests

    def total(function):
        def batch_value(index, mask):
            images = prepare(program.pipeline, tests.images[index], None, train=False, dtype=program.dtype)
            labels = tests.labels[index] % program.setting.num_classes
            return function(Batch(images, labels, mask.astype(jnp.result_type(float))))

        return sum_over_samples(batch_value, tests, start, number, how)

    return total


def load(program: Program, inputs: Inputs, held: Any, job, step) -> Lane:
    """A lane at the start of a job: the downloaded variables and a fresh optimiser state, or the client's kept one.

    Clients and statistics are those of `held`, a `State` or an `Outcome`.
    """
    method, server = method_and_server(program, inputs, job)
    client, statistics = select((held.clients, held.statistics), at(inputs.jobs.slot, job))
    variables = with_own(of_model(method, "download", method.download(server, client)), statistics)
    local = program.of_experiment(inputs.hyper, at(inputs.jobs.experiment, job))
    optimiser = program.optimiser(method, local).init(variables["params"])
    if program.setting.keeps_optimiser:
        optimiser = resumed(optimiser, statistics[OPTIMISER], method.traits().resumed)
    loss, before = jnp.zeros((), jnp.result_type(float)), jnp.zeros((program.tests_epochs, program.counts), jnp.int32)
    return Lane(jnp.int32(job), jnp.int32(step), variables, optimiser, client, loss, statistics, before)


def resumed(fresh: Tree, kept: Tree, parts: tuple[str, ...] | None) -> Tree:
    """The kept optimiser state: only for these parts of the parameters (fresh elsewhere), or for all."""
    if parts is None:
        return kept

    def choose(path, new, old):
        return old if any(getattr(key, "key", None) in parts for key in path) else new

    return jax.tree_util.tree_map_with_path(choose, fresh, kept)


def train_batch(program: Program, data: Data, index, key) -> Batch:
    """Gather and prepare the samples with index [B]; -1 is padding."""
    safe = jnp.maximum(index, 0)
    images = prepare(program.pipeline, data.train.images[safe], key, train=True, dtype=program.dtype)
    mask = index >= 0 if program.masked else jnp.ones(index.shape, bool)
    return Batch(images, data.train.labels[safe], mask.astype(jnp.result_type(float)))


def train_step(program: Program, inputs: Inputs, lane: Lane, index, step) -> Lane:
    """One optimiser step of one lane on the batch of samples with index [B]."""
    method, _ = method_and_server(program, inputs, lane.job)
    context = context_of(program, inputs, lane, step - lane.start)
    batch = train_batch(program, inputs.data, index, context.keys.augment)
    variables, params = lane.variables, lane.variables["params"]
    moving = flags(method, "trainable", method.trainable(params, context), params)

    def evaluate(variables):
        current_context = seen_at(program, context, variables["params"])

        def objective(params):
            result = method.loss({**variables, "params": params}, batch, current_context)
            value, state = of_kind(method, "loss", result, object, Mapping)
            scalar(method, "loss", value)
            return value + scalar(method, "regulariser", method.regulariser(params, current_context)), (value, state)

        gradients, (value, state) = jax.grad(objective, has_aux=True)(variables["params"])
        return Evaluated(value, state, gradients)

    def step_on(gradients, unclipped=None):
        same_shapes(method, "local_update", "gradients of a step", gradients, params, "the parameters are")
        update, extra = program.optimiser(method, context.hyper).update, {"moving": moving}
        if unclipped is not None:
            same_shapes(method, "local_update", "unclipped part of a step", unclipped, params, "the parameters are")
            extra["unclipped"] = only(moving, unclipped)
        return Step(*update(only(moving, gradients), lane.optimiser, only(moving, params), **extra))

    result = method.local_update(evaluate, step_on, variables, batch, context)
    value, state, (updates, optimiser) = of_kind(method, "local_update", result, object, Mapping, Step)
    same_shapes(method, "local_update", "updates", updates, params, "the parameters are")
    after = {**variables, **state, "params": optax.apply_updates(params, only(moving, updates))}
    same_shapes(method, "local_update", "variables", after, variables, "download gave them")
    return lane._replace(variables=after, optimiser=optimiser, loss=lane.loss + scalar(method, "local_update", value))


def only(moving: Tree | None, tree: Tree) -> Tree:
    """The tree with zeros where nothing moves."""
    return tree if moving is None else jax.tree.map(lambda m, x: jnp.where(m, x, jnp.zeros_like(x)), moving, tree)
