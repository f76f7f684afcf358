"""Accuracy counts: the global test set (GA) and each client's own (PA), top-1, per class.

The functions count correct predictions [.., C]; dividing by the number of test samples is the harness's work.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.losses.classification import correct_per_class
from fedjax_pcdd.simulation.program import Data, Program, Samples, State, Tree, facts_of, lift, sum_over_samples
from fedjax_pcdd.trees import select


def client_batches(function: Callable, program: Program, samples: Samples, row) -> Tree:
    """Sum of function(index, mask) over the samples of one row; no work for a row without samples."""
    batch = program.client_batch
    index = jax.ShapeDtypeStruct((batch,), jnp.int32)
    template = jax.eval_shape(function, index, jax.ShapeDtypeStruct((batch,), bool))
    return sum_over_samples(function, samples, samples.start[row], samples.size[row], batch, template)


def count_correct(predict: Callable, program: Program, samples: Samples) -> Callable:
    """A function of (index [B], mask [B]) that counts predict's correct answers per class [C]."""

    def count(index, mask):
        images = prepare(program.pipeline, samples.images[index], None, train=False, dtype=program.dtype)
        logits = predict(images)
        return correct_per_class(logits, samples.labels[index], mask, program.setting.num_classes).astype(jnp.int32)

    return count


def on_whole_test(predict: Callable, program: Program, samples: Samples) -> jax.Array:
    """Correct predictions per class [C] on all test images."""
    images = samples._replace(order=jnp.arange(samples.labels.shape[0], dtype=jnp.int32))
    template = jax.ShapeDtypeStruct((program.setting.num_classes,), jnp.int32)
    function = count_correct(predict, program, samples)
    return sum_over_samples(function, images, 0, samples.labels.shape[0], program.eval_batch, template)


def generic_correct(program: Program, methods, servers: Tree, data: Data) -> jax.Array:
    """Correct predictions [E, C] of the global models on the whole test set."""

    def one(method, server):
        def predict(images):
            return method.predict_generic(program.model, server, method.generic_variables(server), images)

        return on_whole_test(predict, program, data.test)

    return lift(one, program.experiments)(methods, servers)


def personal_correct(program: Program, methods, state: State, data: Data, *, own: bool) -> jax.Array:
    """Correct predictions [R, C] of every client's personal model between rounds.

    Args:
      own: on the client's own test set (PA), or on the whole one (GA of methods without a global model).
    """

    def one(row):
        experiment = row // program.setting.num_clients
        method, server = select((methods, state.servers), experiment)
        client, facts = select(state.clients, row), facts_of(program, data, row)
        variables = dict(method.personal_variables(server, client))
        if program.local_statistics:
            variables |= select(state.statistics, row)

        def predict(images):
            logits = method.predict_personal if own else method.predict_local
            return logits(program.model, server, client, facts, variables, images)

        if own:
            return client_batches(count_correct(predict, program, data.test), program, data.test, row)
        return on_whole_test(predict, program, data.test)

    return jax.lax.map(one, jnp.arange(data.class_counts.shape[0]))
