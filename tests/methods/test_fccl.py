"""FCCL: its losses, its memories, and each of its options."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from participants import (
    MODEL,
    ONE,
    SGD,
    arrays,
    assert_close,
    assert_equal,
    context,
    exchanged,
    images,
    logits,
    row,
    same,
    stacked,
    variables,
)

from fedjax_pcdd.engine.pretraining import pretrained
from fedjax_pcdd.methods.fccl import FCCL, Learner, Spoken
from fedjax_pcdd.methods.method import Batch
from fedjax_pcdd.models.classifier import forward


def test_two_equal_and_opposite_columns_give_the_loss_of_the_worked_example():
    column = np.array([0.3, -1.2, 2.0, 0.7, -0.1])
    z = jnp.asarray(np.stack([column, -column], 1))
    expected = (2 + 2 * 0.0051) / 5**2
    np.testing.assert_allclose(FCCL().public_loss(z, z, context()), expected, 1e-5)


def test_the_public_loss_ignores_scale_shift_and_order():
    random = np.random.default_rng(0)
    z, mean = random.normal(size=(2, 9, 4))
    order, scale, shift = random.permutation(9), np.array([0.1, 1, 7, 30]), random.normal(size=4)
    loss = FCCL().public_loss(jnp.asarray(z), jnp.asarray(mean), context())
    np.testing.assert_allclose(
        FCCL().public_loss(jnp.asarray(z * scale + shift), jnp.asarray(mean), context()), loss, 1e-4
    )
    np.testing.assert_allclose(
        FCCL().public_loss(jnp.asarray(z[order]), jnp.asarray(mean[order]), context()), loss, 1e-4
    )


def test_the_weight_of_different_classes_is_that_asked_for():
    z, mean = np.random.default_rng(1).normal(size=(2, 9, 4))
    none, one, two = (
        FCCL(lambda_col=w).public_loss(jnp.asarray(z), jnp.asarray(mean), context()) for w in (0.0, 1.0, 2.0)
    )
    assert one > none
    np.testing.assert_allclose(two - one, one - none, 1e-5)


@pytest.mark.thorough
def test_a_column_with_almost_no_spread_has_a_bounded_gradient_only_with_eps():
    z, mean = np.random.default_rng(2).normal(size=(2, 9, 4))
    z[:, 0] *= 1e-9

    def largest(eps):
        gradient = jax.grad(lambda z: FCCL(eps=eps).public_loss(z, jnp.asarray(mean), context()))(jnp.asarray(z))
        return float(jnp.abs(gradient).max())

    assert largest(0.0) > 1e6
    assert largest(1e-4) < 100


def penalty(method, own, previous, pretrained):
    """The distillations of a private batch as a function of the model."""
    x = images()
    batch = Batch(x, jnp.zeros(8, int), jnp.ones(8))
    held = context(client=Learner(own, previous, pretrained))
    return method.penalty(own, forward(MODEL, own, x, train=True)[0], batch, held)


@pytest.mark.thorough
def test_equal_models_teach_nothing():
    own = variables(0)
    value, gradient = jax.value_and_grad(lambda w: penalty(FCCL(), w, own, own))(own)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    assert all(np.abs(g).max() < 1e-6 for g in jax.tree.leaves(arrays(gradient)))


def test_both_teachers_teach():
    own, other = variables(0), variables(1)
    previous, pretrained, both = (
        float(penalty(FCCL(), own, *pair)) for pair in ((other, own), (own, other), (other, other))
    )
    teacher, student = (np.asarray(jax.nn.log_softmax(logits(v, images()))) for v in (other, own))
    expected = (np.exp(teacher) * (teacher - student)).sum(1).mean()
    np.testing.assert_allclose([previous, pretrained, both], [expected, expected, 2 * expected], 1e-4)


def test_teachers_are_constant():
    own, other = variables(0), variables(1)
    gradient = jax.grad(lambda t: penalty(FCCL(), own, t, t))(other)
    assert all(not np.any(g) for g in jax.tree.leaves(arrays(gradient)))


def test_the_weight_of_the_distillations_is_that_asked_for():
    own, other = variables(0), variables(1)
    one, three = (penalty(FCCL(lambda_loc=w), own, other, other) for w in (1.0, 3.0))
    np.testing.assert_allclose(three, 3 * one, 1e-5)


def test_without_continual_learning_no_teacher_is_asked():
    assert penalty(FCCL(continual=False), variables(0), variables(1), variables(1)) == 0


def test_the_target_is_the_mean_of_all_or_has_ones_own_previous_word_in_it():
    current, previous = np.random.default_rng(3).normal(size=(2, 3, 5, 4))
    said = Spoken(jnp.asarray(current), jnp.asarray(previous))
    _, plain = FCCL().agree((), said, None)
    _, own = FCCL(own="previous").agree((), said, None)
    for k in range(3):
        np.testing.assert_allclose(plain[k], current.mean(0), 1e-5, 1e-6)
        others = sum(current[j] for j in range(3) if j != k)
        np.testing.assert_allclose(own[k], (others + previous[k]) / 3, 1e-5, 1e-6)


def test_the_previous_models_logits_are_asked_for_only_if_they_count():
    held = context(client=Learner(variables(0), variables(1), variables(2)))
    batch = type("B", (), {"images": images()})()
    assert FCCL().say(variables(0), batch, held).previous == ()
    said = FCCL(own="previous").say(variables(0), batch, held)
    np.testing.assert_allclose(said.previous, logits(variables(1), images()), 1e-5)
    np.testing.assert_allclose(said.current, logits(variables(0), images()), 1e-5)


@pytest.mark.thorough
def test_a_round_makes_the_model_the_previous_one_and_leaves_the_pretrained_one():
    table = toy.groups("fccl", necks=ONE, **SGD)
    start = pretrained(table, table.start(), 1, 8)
    known = arrays(start.clients[0].variables)
    assert_equal(known, arrays(start.clients[0].pretrained))
    assert_equal(known, arrays(start.clients[0].previous))
    clients = arrays(toy.train(table, (0,))[0].clients[0])
    assert_equal(clients.previous, clients.variables)
    after = arrays(table.step(start, 0)[0].clients[0])
    assert_equal(after.pretrained, known)
    assert not same(after.variables, known)


@pytest.mark.thorough
def test_without_both_parts_it_is_solo():
    one = toy.groups("fccl", necks=ONE, collaborate=False, continual=False, **SGD)
    state, _ = toy.train(one, (0, 1))
    expected, _ = toy.train(toy.groups("solo", necks=ONE, **SGD), (0, 1))
    assert_close(arrays(state.clients[0].variables), arrays(expected.clients[0]), 1e-6)


@pytest.mark.thorough
def test_the_exchange_moves_every_model():
    table = toy.groups("fccl", necks=ONE, **SGD)
    before, after = arrays(table.start().clients)[0].variables, exchanged(table)[0].variables
    assert all(not same(row(before, k), row(after, k)) for k in range(5))


def mean_of(clients):
    return jax.tree.map(lambda x: x.mean(0), clients)


@pytest.mark.thorough
def test_models_are_averaged_between_exchange_and_local_training():
    # With next to no learning rate the models stay what they were averaged to.
    table = toy.groups("fccl", necks=ONE, average="exchanged", optimizer="sgd", lr=1e-12)
    mean = mean_of(arrays(table.start().clients[0].variables))
    after = arrays(table.step(table.start(), 0)[0].clients[0].variables)
    for k in range(5):
        assert_close(row(after, k), mean, 1e-6)


@pytest.mark.thorough
def test_models_are_averaged_before_local_training_not_after_it():
    table = toy.groups("fccl", necks=ONE, average="exchanged", **SGD)
    after = arrays(table.step(table.start(), 0)[0].clients[0].variables)
    assert not same(row(after, 0), row(after, 4))


@pytest.mark.thorough
def test_models_are_averaged_after_local_training():
    trained = toy.groups("fccl", necks=ONE, common_start=False, **SGD)
    table = toy.groups("fccl", necks=ONE, average="trained", common_start=False, **SGD)
    mean = mean_of(arrays(trained.step(trained.start(), 0)[0].clients[0].variables))
    after = arrays(table.step(table.start(), 0)[0].clients[0].variables)
    for k in range(5):
        assert_close(row(after, k), mean, 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("option", [{"own": "previous"}, {"public_epochs": 2}, {"lambda_col": 1.0}])
def test_an_option_of_the_exchange_changes_it(option):
    base = toy.groups("fccl", necks=ONE, **SGD)
    state = base.start()
    learner = state.clients[0]
    others = stacked([variables(20 + k) for k in range(5)])

    def after(table):
        held = Learner(*(jax.tree.map(jnp.copy, v) for v in (learner.variables, others, learner.pretrained)))
        return exchanged(table, state._replace(clients=(held,)))[0].variables

    assert not same(after(base), after(toy.groups("fccl", necks=ONE, **SGD, **option)))
