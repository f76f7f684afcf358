"""Local training at its edges: clients without steps, cohorts without weight, statistics of a client's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct

from fedjax_pcdd.engine.jobs import train_batch
from fedjax_pcdd.methods import Message, Method, Traits
from fedjax_pcdd.methods.method import Summary
from fedjax_pcdd.testing import leaves


def assert_same(actual, expected):
    for a, b in zip(leaves(actual), leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_first_sample_of_the_data_set_is_no_padding():
    simulated = toy.simulation()
    batch = train_batch(simulated.program, simulated.data, jnp.array([0, 3, -1]), jax.random.key(0))
    np.testing.assert_array_equal(batch.mask, [1, 1, 0])
    np.testing.assert_array_equal(batch.labels[:2], toy.federation().dataset.y_train[[0, 3]])


without_steps = pytest.mark.parametrize("name", ["fednova", "moon", "feddyn", "feddc", "scaffold"])


@pytest.mark.thorough
@without_steps
def test_a_client_without_steps_keeps_its_state_and_causes_no_nan(name):
    simulated = toy.simulation(name, last_batch="strict", cohort=5)
    before = leaves(jax.tree.map(lambda x: x[0], simulated.start().clients))  # client 0 has one sample, a batch 8
    state, report = simulated.step(simulated.start(), 0)
    assert_same(jax.tree.map(lambda x: x[0], state.clients), before)
    assert all(np.isfinite(x).all() for x in leaves((state, report)))  # `jax_debug_nans` would end a run


@pytest.mark.thorough
@without_steps
def test_a_cohort_without_steps_changes_nothing(name):
    simulated = toy.simulation(name, last_batch="strict", cohort=5)
    before = leaves(simulated.start())
    state, _ = simulated.step(simulated.start(), 0, simulated.plan(0, [np.array([0])]))
    assert_same(state, before)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["moon", "scaffold"])
def test_a_cohort_without_weight_does_not_train(name):
    simulated = toy.simulation(name, weights="batches", batch_size=30, cohort=1)
    round = next(r for r in range(9) if simulated.clients_of(r)[0] != 4)  # client 4 alone has a full batch
    before = leaves(simulated.start())
    state, _ = simulated.step(simulated.start(), round)
    assert_same(state, before)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["solo", "fedproto"])
def test_a_client_with_a_model_of_its_own_trains_whether_or_not_anyone_has_a_weight(name):
    simulated = toy.simulation(name, weights="batches", batch_size=30, cohort=2)

    def trained(*cohort):
        state, _ = simulated.step(simulated.start(), 0, simulated.plan(0, [np.array(cohort)]))
        return jax.tree.map(lambda x: np.asarray(x[2]), state.clients)

    before = jax.tree.map(lambda x: np.asarray(x[2]), simulated.start().clients)
    without_weight, beside_a_full_batch = trained(2, 3), trained(2, 4)  # client 4 alone has a full batch
    assert_same(without_weight, beside_a_full_batch)
    assert max(np.abs(a - b).max() for a, b in zip(leaves(without_weight), leaves(before), strict=True)) > 1e-4


@struct.dataclass
class Starting(Method):
    """A model with batch norm, and clients that keep the variables their training started from."""

    def build(self, model):
        return model.clone(feature_norm=True)

    def init_client(self, setting, server, facts, key):
        return server.variables

    def upload(self, variables, summary, context):
        return context.start, Message(mean=variables)


@pytest.mark.thorough
def test_training_starts_from_the_statistics_of_the_client_if_they_are_local():
    simulated = toy.simulation(method=Starting(), cohort=5, local_statistics=True)
    state, _ = simulated.step(simulated.start(), 0)
    statistics, params = leaves(state.statistics), leaves(state.servers.variables["params"])
    state, _ = simulated.step(state, 1)
    assert_same(state.clients["batch_stats"], statistics)
    assert_same(jax.tree.map(lambda x: x[:1], state.clients["params"]), params)


@struct.dataclass
class Drawing(Method):
    """Clients keep the sums, over the batches of the pass, of a draw, its square and 1."""

    def traits(self):
        return Traits(summary=Summary())

    def init_client(self, setting, server, facts, key):
        return jnp.zeros(3)

    def summarise(self, variables, batch, context):
        draw = jax.random.uniform(context.keys.method)
        return jnp.stack([draw, draw**2, jnp.ones(())])

    def upload(self, variables, summary, context):
        return summary, Message(mean=variables)


@pytest.mark.thorough
def test_every_batch_of_a_pass_over_the_data_draws_anew():
    state, _ = toy.train(toy.simulation(method=Drawing(), cohort=5, eval_batch=8), (0,))
    total, squares, batches = np.array(state.clients).T
    several = batches > 1
    assert several.sum() == 4
    assert ((squares / batches - (total / batches) ** 2)[several] > 1e-4).all()
