"""Accuracy counts per class: on the global test set (GA), also of the clients' ensemble, and on each client's own (PA).

The functions count correct predictions [.., C]; `training` divides them by the number of test samples.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.engine.blocks import Pass
from fedjax_pcdd.engine.devices import full_precision
from fedjax_pcdd.engine.mesh import AXIS, EVERYWHERE, SPLIT, gathered, spread, summed
from fedjax_pcdd.engine.program import Data, Program, Samples, State, Tree, lift, start_of, sum_over_samples, with_own
from fedjax_pcdd.engine.streaming import TESTS, own_shard
from fedjax_pcdd.losses.classification import correct_per_class
from fedjax_pcdd.methods.checks import of_kind, of_model, shaped
from fedjax_pcdd.methods.participant import over_all
from fedjax_pcdd.trees import at, select


def client_batches(function: Callable, samples: Samples, row, how: Pass, template: Tree = None) -> Tree:
    """Sum of function(index, mask) over the samples of one row, in batches as `how` says; see `sum_over_samples`."""
    return sum_over_samples(function, samples, start_of(samples, row), at(samples.size, row), how, template)


def by_client(program: Program, function: Callable, clients: Tree) -> Tree:
    """The function applied to each client, results stacked: one after another on a CPU, elsewhere in blocks."""
    size, number = program.blocks.size, len(jax.tree.leaves(clients)[0])
    if size == 1:
        return jax.lax.map(function, clients)
    if size >= number:
        return jax.vmap(function)(clients)

    def block(first):
        return jax.vmap(function)(jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size), clients))

    def once(x):
        x = x.reshape(-1, *x.shape[2:])
        return jnp.concatenate([x[:-size], x[-rest:]])

    # `jax.lax.map` would copy all clients where blocks do not divide them: instead the last block begins earlier.
    rest = (number - 1) % size + 1  # of its clients are in no other block
    return jax.tree.map(once, jax.lax.map(block, jnp.minimum(jnp.arange(0, number, size), number - size)))


def logits_of(program: Program, method: Any, variables: Tree, images: jax.Array, *client: Any, **scope: Any):
    """What the method's hook `logits` returns; UserError unless it is [B, C]."""
    logits = method.logits(program.model, variables, images, *client, **scope)
    return shaped(method, "logits", logits, len(images), program.setting.num_classes)


def personal_logits(program: Program, methods, state: State, data: Data, entry: Tree, scope: Any) -> Callable:
    """The model of a client (row, state, statistics) between rounds: a function of prepared images to logits [B, C]."""
    row, client, statistics = entry
    method, server = program.of_experiment((methods, state.servers), program.experiment_of(row))
    personal = of_model(method, "personal_variables", method.personal_variables(server, client))
    variables, facts = with_own(personal, statistics), program.facts_of(data, row)
    return lambda images: logits_of(program, method, variables, images, server, client, facts, scope=scope)


def counted(predict: Callable, program: Program, samples: Samples, count: Callable = correct_per_class) -> Callable:
    """A function of (index [B], mask [B]) that returns `count` of predict's logits, labels, mask and C, as integers.

    Correct predictions per class are [C], or [2C] with validation samples among the tests.
    """

    def function(index, mask):
        images = prepare(program.pipeline, samples.images[index], None, train=False, dtype=program.dtype)
        return tally(program, predict(images), samples.labels[index], mask, count)

    return function


def tally(
    program: Program, logits: jax.Array, labels: jax.Array, mask: jax.Array, count: Callable = correct_per_class
) -> jax.Array:
    """`count` of logits [B, C], labels [B], mask [B] and C, as integers; test samples before validation samples."""
    classes = program.setting.num_classes
    if not program.validated:
        return count(logits, labels, mask, classes).astype(jnp.int32)
    masks = (mask & (labels < classes), mask & (labels >= classes))
    return jnp.concatenate([count(logits, labels % classes, m, classes) for m in masks]).astype(jnp.int32)


@full_precision
def domain_correct(program: Program, how: Pass, methods, state: State, data: Data, tests: Samples) -> jax.Array:
    """Correct predictions [n, D, 2, C] of the personal models of all rows in passes over D test lists: top-1, top-5."""
    shape = jax.ShapeDtypeStruct((2, program.setting.num_classes), jnp.int32)

    def client_correct(entry):
        count = counted(personal_logits(program, methods, state, data, entry, "local"), program, tests, both_tops)
        lists = tests.start, tests.size
        return jax.lax.map(lambda test: sum_over_samples(count, tests, test[0], test[1], how, shape), lists)

    rows = jnp.arange(data.class_counts.shape[0])
    return by_client(program, client_correct, (rows, state.clients, state.statistics))


@full_precision
def public_logits(
    program: Program, pipeline: Pipeline, methods, state: State, data: Data, images: jax.Array
) -> jax.Array:
    """Logits [n, N, C] of the personal models of all rows on public images [N, H, W, channels]."""

    def client_logits(entry):
        predict = personal_logits(program, methods, state, data, entry, "local")

        def predicted(index):
            return predict(prepare(pipeline, images[index], None, train=False, dtype=program.dtype))

        return over_all(predicted, images.shape[0], program.eval_batch_of(program.blocks.size))

    rows = jnp.arange(data.class_counts.shape[0])
    return by_client(program, client_logits, (rows, state.clients, state.statistics))


def both_tops(logits, labels, mask, num_classes: int) -> jax.Array:
    """Correct predictions per class, top-1 and top-5 [2, C]; of classes with equal logits the lower one ranks first."""
    label_logits = jnp.take_along_axis(logits, labels[:, None], axis=1)
    ranked_before = (logits > label_logits) | ((logits == label_logits) & (jnp.arange(num_classes) < labels[:, None]))
    in_top5 = (ranked_before.sum(1) < min(5, num_classes)) & jnp.isfinite(label_logits[:, 0]) & mask
    top5 = jnp.zeros(num_classes, jnp.int32).at[labels].add(in_top5.astype(jnp.int32))
    return jnp.stack([correct_per_class(logits, labels, mask, num_classes).astype(jnp.int32), top5])


def on_own_tests(predict: Callable, program: Program, samples: Samples, row) -> jax.Array:
    """Correct predictions per class [C] on the test samples of a row's client."""
    template = jax.ShapeDtypeStruct((program.counts,), jnp.int32)
    return client_batches(counted(predict, program, samples), samples, row, program.test_pass, template)


def on_whole_test(predict: Callable, program: Program, samples: Samples, models: int, devices: int = 1) -> jax.Array:
    """Correct predictions per class [C] on all test images or this device's part; `models` are tested together."""
    start, size, batch = 0, samples.labels.shape[0], program.eval_batch_of(models)
    images = samples._replace(order=jnp.arange(size, dtype=jnp.int32))
    template = jax.ShapeDtypeStruct((program.counts,), jnp.int32)
    if devices > 1:
        most = -(-size // devices)
        start = most * jax.lax.axis_index(AXIS)
        size, batch = jnp.clip(size - start, 0, most), min(batch, most)
    return sum_over_samples(counted(predict, program, samples), images, start, size, Pass(batch), template)


@full_precision
def generic_correct(
    program: Program, methods, servers: Tree, layers: Tree, data: Data
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Correct predictions [E, C] on the whole test set: of the global models (or ()), and of further models by name.

    Args:
      layers: [E, ...] the mean of the layers and statistics that clients keep, for one more model; () without any.
    """

    def count(methods, servers, layers, data):
        def experiment_correct(method, server, layers):
            def correct(variables):
                def predict(images):
                    return logits_of(program, method, variables, images, server)

                return on_whole_test(predict, program, data.test, program.experiments, program.devices)

            def average():
                return of_model(method, "generic_variables", method.generic_variables(server))

            further = of_kind(method, "further_models", method.further_models(server), dict)
            further = {name: of_model(method, "further_models", model) for name, model in further.items()}
            if layers:  # the server's own layers were never trained where clients send differences
                further = {**further, "server_average": average()}
                further = {name: with_own(model, layers) for name, model in further.items()}
            generic = correct(average()) if method.traits().global_model else ()
            return generic, {name: correct(model) for name, model in further.items()}

        return lift(experiment_correct, program.experiments)(methods, servers, layers)

    if program.devices > 1:
        count = spread(lambda *args, count=count: summed(count(*args)), program.devices, EVERYWHERE, EVERYWHERE)
    return count(methods, servers, layers, data)


@full_precision
def personal_correct(program: Program, own: bool, methods, state: State, data: Data, rows, slots) -> jax.Array:
    """Correct predictions [n, C] of the personal models of n rows between rounds.

    Args:
      state: its clients and statistics are those of the rows, [n, ...]; on several devices the slots locate them.
      own: on the client's own test set (PA), or on the whole one (GA of methods without a global model).
      slots: [n] of the rows in the state; n is a multiple of the devices.
    """

    def count(methods, state, data, rows):
        def client_correct(entry):
            predict = personal_logits(program, methods, state, data, entry, "personal" if own else "local")
            if own:
                return on_own_tests(predict, program, data.test, entry[0])
            return on_whole_test(predict, program, data.test, program.blocks.size)

        return by_client(program, client_correct, (rows, state.clients, state.statistics))

    return over_rows(count, gathered, program, methods, state, data, rows, slots, own_tests=own)


@full_precision
def softmax_sums(program: Program, methods, state: State, data: Data, rows, slots, live) -> jax.Array:
    """Sums of the personal models' softmax outputs on the whole test set, [E, N, C].

    Args:
      state, rows, slots: as in `personal_correct`.
      live: [n] booleans, which of the rows count.
    """

    def sums(methods, state, data, entries):
        def batch(index):
            images = prepare(program.pipeline, data.test.images[index], None, train=False, dtype=program.dtype)

            def client_softmax(entry):
                client, counts = entry
                logits = personal_logits(program, methods, state, data, client, "local")(images)
                return jnp.where(counts, jax.nn.softmax(logits), 0)

            rows, live = entries
            outputs = by_client(program, client_softmax, ((rows, state.clients, state.statistics), live))  # [n, B, C]
            experiments = jnp.arange(program.experiments)[:, None]
            members = experiments == rows // program.setting.num_clients  # [E, n]
            return jnp.where(members[..., None, None], outputs, 0).sum(1).swapaxes(0, 1)

        images = data.test.labels.shape[0]
        return over_all(batch, images, program.eval_batch_of(program.blocks.size)).swapaxes(0, 1)

    return over_rows(sums, summed, program, methods, state, data, (rows, live), slots)


def ensemble_correct(program: Program, sums: jax.Array, data: Data) -> jax.Array:
    """Correct predictions [E, C] of the ensembles from their sums [E, N, C]; the largest entry is the prediction."""
    labels = data.test.labels
    return jax.vmap(lambda scores: tally(program, scores, labels, jnp.ones(labels.shape, bool)))(sums)


def over_rows(
    function: Callable, collect: Callable, program: Program, methods, state: State, data: Data, rows: Tree, slots, *,
    own_tests: bool = False,
) -> Tree:  # fmt: skip
    """function(methods, state, data, rows); several devices take a share of the rows each, which `collect` joins.

    Args:
      rows: leaves [n, ...], n a multiple of the devices.
      slots: [n] where each row's client is in the state.
      own_tests: each device has only the test samples of its own clients, where devices divide samples.
    """
    if program.devices == 1:
        return function(methods, state, data, rows)

    split = own_tests and program.split_data

    def share(methods, state, data, rows, slots):
        clients = (state.clients, state.statistics)
        row_states = clients if program.split_clients else select(clients, slots)
        data = own_shard(data, tests=True) if split else data
        return collect(function(methods, State(state.servers, *row_states), data, rows))

    client_spec = SPLIT if program.split_clients else EVERYWHERE
    data_spec = TESTS if split else EVERYWHERE
    specs = (EVERYWHERE, State(EVERYWHERE, client_spec, client_spec), data_spec, SPLIT, SPLIT)
    return spread(share, program.devices, specs, EVERYWHERE)(methods, state, data, rows, slots)
