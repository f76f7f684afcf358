"""The random numbers that hooks draw: no two in a run are equal."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct

from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.program import stream_of
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods import Message, Method
from fedjax_pcdd.methods.method import Keys
from fedjax_pcdd.methods.participant import Exchanging
from fedjax_pcdd.methods.parts import without_collection
from fedjax_pcdd.models.classifier import forward

DRAWN = "drawn"  # a collection with the numbers that a client drew in each step
STEPS = 2


def draws(keys):
    """One number from each stream, [3]."""
    return jnp.stack([jax.random.uniform(key) for key in keys])


class Server(NamedTuple):
    variables: Any
    drawn: jax.Array


@struct.dataclass
class Drawing(Method):
    """FedAvg in which server and clients keep the numbers they drew in their first steps, [STEPS, 3]."""

    def init_server(self, setting, variables, class_counts, key):
        return Server(variables, jnp.zeros((STEPS, 3)))

    def init_client(self, setting, server, facts, key):
        return jnp.zeros((STEPS, 3))

    def download(self, server, client):
        return {**server.variables, DRAWN: {"steps": jnp.zeros((STEPS, 3))}}

    def local_update(self, evaluate, step, variables, batch, context):
        loss, state, taken = super().local_update(evaluate, step, variables, batch, context)
        drawn = variables[DRAWN]["steps"].at[context.step].set(draws(context.keys))
        return loss, {**state, DRAWN: {"steps": drawn}}, taken

    def upload(self, variables, summary, context):
        return variables[DRAWN]["steps"], Message(mean=without_collection(variables, DRAWN))

    def aggregate(self, server, message, weights, context):
        each = [draws(Keys.of(jax.random.fold_in(context.key, i))) for i in range(STEPS)]
        return Server(message.mean, jnp.stack(each))


def all_different(*arrays):
    """Whether all numbers in these arrays differ."""
    numbers = np.concatenate([np.ravel(x) for x in arrays])
    return len(np.unique(numbers)) == numbers.size


@pytest.mark.thorough
def test_draws_differ_between_steps_clients_rounds_experiments_and_servers():
    base = toy.simulation(method=Drawing(), cohort=5, epochs=2)
    experiments = [base.experiments[0]._replace(seed=seed) for seed in (0, 1)]
    simulated = Simulation(
        base.program.model, experiments, pipeline=toy.PLAIN, cohort=5, execution=Execution(lanes=2), rounds=2
    )
    state, drawn = simulated.start(), []
    for round in range(2):
        state, _ = simulated.step(state, round)
        drawn += [np.array(state.clients), np.array(state.servers.drawn)]
    assert drawn[0].shape == (10, STEPS, 3)
    assert all_different(*drawn)


class Sent(NamedTuple):
    drawn: jax.Array
    flipped: jax.Array


@struct.dataclass
class Recording(Exchanging):
    """Participants whose server keeps the draws, [STEPS, K, 3], and which images were flipped, [STEPS, B]."""

    def init_public(self, setting, images):
        return jnp.zeros((), int), jnp.zeros((STEPS, 5, 3)), jnp.zeros((STEPS, images), bool)

    def say(self, variables, batch, context):
        flipped = jnp.any(batch.images != batch.plain, axis=(1, 2, 3))
        drawn = jnp.broadcast_to(draws(context.keys), (len(flipped), 3))
        return Sent(drawn, flipped)

    def agree(self, public, spoken, counts):
        step, drawn, flipped = public
        public = step + 1, drawn.at[step].set(spoken.drawn[:, 0]), flipped.at[step].set(spoken.flipped[0])
        return public, spoken.drawn

    def imitate(self, variables, batch, context):
        outputs, state = forward(context.model, variables, batch.images, train=True)
        return outputs.logits.sum(), state


@pytest.mark.thorough
def test_draws_and_augmentation_differ_between_all_steps_of_an_exchange():
    images = 16
    groups = toy.groups(method=Recording(public_epochs=STEPS), images=images, batch=images, public=Pipeline(flip=True))
    state, drawn, flipped = groups.start(), [], []
    fresh = jax.tree.map(np.array, state.servers["public"])
    for round in range(2):
        state = groups.exchange(state._replace(servers=state.servers | {"public": fresh}), round)
        drawn.append(np.array(state.servers["public"][1]))
        flipped += [tuple(row) for row in np.array(state.servers["public"][2])]
    assert all_different(*drawn)
    assert len(set(flipped)) == 2 * STEPS


def test_every_pass_over_the_public_images_has_its_own_order():
    plan = toy.groups("fedmd", necks=(0,) * 5, images=16, batch=16, public_epochs=3).public_plan(0)
    assert len({tuple(row) for row in plan}) == 3


def test_draws_do_not_follow_the_generator_that_jax_is_set_to():
    expected = jax.random.key_data(stream_of(3, "rounds"))
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(jax.random.key_data(stream_of(3, "rounds")), expected)
