"""FCCL: its losses, the models that it keeps, and each of its options."""

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
    largest_difference,
    logits,
    row,
    same,
    stacked,
    variables,
)

from fedjax_pcdd.engine.pretraining import pretrained
from fedjax_pcdd.losses.distillation import kl_to_teacher
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


def test_lambda_col_weights_the_loss_of_pairs_of_different_classes():
    z, mean = np.random.default_rng(1).normal(size=(2, 9, 4))
    loss_0, loss_1, loss_2 = (
        FCCL(lambda_col=weight).public_loss(jnp.asarray(z), jnp.asarray(mean), context()) for weight in (0.0, 1.0, 2.0)
    )
    assert loss_1 > loss_0
    np.testing.assert_allclose(loss_2 - loss_1, loss_1 - loss_0, 1e-5)


@pytest.mark.thorough
def test_a_nearly_constant_column_has_a_bounded_gradient_only_with_eps():
    z, mean = np.random.default_rng(2).normal(size=(2, 9, 4))
    z[:, 0] *= 1e-9

    def largest_gradient(eps):
        gradient = jax.grad(lambda z: FCCL(eps=eps).public_loss(z, jnp.asarray(mean), context()))(jnp.asarray(z))
        return float(jnp.abs(gradient).max())

    assert largest_gradient(0.0) > 1e6
    assert largest_gradient(1e-4) < 100


def penalty(method, student, previous, pretrained):
    """The distillation terms of a private batch, for a student and its two teachers."""
    private_images = images()
    batch = Batch(private_images, jnp.zeros(8, int), jnp.ones(8))
    client_context = context(client=Learner(student, previous, pretrained))
    return method.penalty(student, forward(MODEL, student, private_images, train=True)[0], batch, client_context)


@pytest.mark.thorough
def test_teachers_equal_to_the_student_give_no_loss_and_no_gradient():
    model = variables(0)
    value, gradient = jax.value_and_grad(lambda student: penalty(FCCL(), student, model, model))(model)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    assert all(np.abs(g).max() < 1e-6 for g in jax.tree.leaves(arrays(gradient)))


def test_each_of_the_two_teachers_adds_its_divergence():
    student, teacher = variables(0), variables(1)
    by_previous, by_pretrained, by_both = (
        float(penalty(FCCL(), student, *teachers))
        for teachers in ((teacher, student), (student, teacher), (teacher, teacher))
    )
    teacher_log_probs, student_log_probs = (
        np.asarray(jax.nn.log_softmax(logits(v, images()))) for v in (teacher, student)
    )
    expected = (np.exp(teacher_log_probs) * (teacher_log_probs - student_log_probs)).sum(1).mean()
    np.testing.assert_allclose([by_previous, by_pretrained, by_both], [expected, expected, 2 * expected], 1e-4)


def test_teachers_have_no_gradient():
    student, teacher = variables(0), variables(1)
    gradient = jax.grad(lambda t: penalty(FCCL(), student, t, t))(teacher)
    assert all(not np.any(g) for g in jax.tree.leaves(arrays(gradient)))


def test_teachers_run_in_eval_mode_with_their_own_statistics():
    model, batch = MODEL.clone(feature_norm=True), Batch(images(), jnp.zeros(8, int), jnp.ones(8))
    student, teacher = variables(0, model), variables(1, model)
    outputs, client = forward(model, student, images(), train=True)[0], Learner(student, teacher, teacher)
    value = FCCL().penalty(student, outputs, batch, context(model=model, client=client))
    expected = 2 * kl_to_teacher(logits(teacher, images(), model), outputs.logits)
    np.testing.assert_allclose(value, expected, 1e-5)


def test_lambda_loc_weights_the_distillation():
    student, teacher = variables(0), variables(1)
    loss_1, loss_3 = (penalty(FCCL(lambda_loc=weight), student, teacher, teacher) for weight in (1.0, 3.0))
    np.testing.assert_allclose(loss_3, 3 * loss_1, 1e-5)


def test_without_continual_learning_nothing_is_distilled():
    assert penalty(FCCL(continual=False), variables(0), variables(1), variables(1)) == 0


def test_the_target_is_the_mean_of_all_logits_with_own_current_or_previous_ones():
    current, previous = np.random.default_rng(3).normal(size=(2, 3, 5, 4))
    spoken = Spoken(jnp.asarray(current), jnp.asarray(previous))
    _, current_targets = FCCL().agree((), spoken, None)
    _, previous_targets = FCCL(own="previous").agree((), spoken, None)
    for k in range(3):
        np.testing.assert_allclose(current_targets[k], current.mean(0), 1e-5, 1e-6)
        others = sum(current[j] for j in range(3) if j != k)
        np.testing.assert_allclose(previous_targets[k], (others + previous[k]) / 3, 1e-5, 1e-6)


def test_logits_of_the_previous_model_are_sent_only_if_the_target_has_them():
    client_context = context(client=Learner(variables(0), variables(1), variables(2)))
    batch = type("B", (), {"images": images()})()
    assert FCCL().say(variables(0), batch, client_context).previous == ()
    spoken = FCCL(own="previous").say(variables(0), batch, client_context)
    np.testing.assert_allclose(spoken.previous, logits(variables(1), images()), 1e-5)
    np.testing.assert_allclose(spoken.current, logits(variables(0), images()), 1e-5)


@pytest.mark.thorough
def test_a_round_replaces_the_previous_model_but_not_the_pretrained_one():
    groups = toy.groups("fccl", necks=ONE, **SGD)
    start_state = pretrained(groups, groups.start(), 1, 8)
    initial_model = arrays(start_state.clients[0].variables)
    assert_equal(initial_model, arrays(start_state.clients[0].pretrained))
    assert_equal(initial_model, arrays(start_state.clients[0].previous))
    clients = arrays(toy.train(groups, (0,))[0].clients[0])
    assert_equal(clients.previous, clients.variables)
    after = arrays(groups.step(start_state, 0)[0].clients[0])
    assert_equal(after.pretrained, initial_model)
    assert not same(after.variables, initial_model)


@pytest.mark.thorough
def test_without_collaboration_and_continual_learning_fccl_is_solo():
    fccl = toy.groups("fccl", necks=ONE, collaborate=False, continual=False, **SGD)
    state, _ = toy.train(fccl, (0, 1))
    expected, _ = toy.train(toy.groups("solo", necks=ONE, **SGD), (0, 1))
    assert_close(arrays(state.clients[0].variables), arrays(expected.clients[0]), 1e-6)


@pytest.mark.thorough
def test_the_exchange_moves_every_model():
    groups = toy.groups("fccl", necks=ONE, **SGD)
    before, after = arrays(groups.start().clients)[0].variables, exchanged(groups)[0].variables
    assert all(not same(row(before, k), row(after, k)) for k in range(5))


def mean_model(clients):
    return jax.tree.map(lambda x: x.mean(0), clients)


@pytest.mark.thorough
def test_models_are_averaged_between_exchange_and_local_training():
    # With a learning rate near 0 the models stay at their average.
    groups = toy.groups("fccl", necks=ONE, average="exchanged", common_start=False, optimizer="sgd", lr=1e-12)
    before = arrays(groups.start().clients[0].variables)
    assert not same(row(before, 0), row(before, 4))
    mean = mean_model(before)
    after = arrays(groups.step(groups.start(), 0)[0].clients[0].variables)
    for k in range(5):
        assert_close(row(after, k), mean, 1e-6)


@pytest.mark.thorough
def test_models_are_averaged_before_local_training_not_after_it():
    groups = toy.groups("fccl", necks=ONE, average="exchanged", **SGD)
    after = arrays(groups.step(groups.start(), 0)[0].clients[0].variables)
    assert not same(row(after, 0), row(after, 4))


@pytest.mark.thorough
def test_models_are_averaged_after_local_training():
    unaveraged = toy.groups("fccl", necks=ONE, common_start=False, **SGD)
    averaged = toy.groups("fccl", necks=ONE, average="trained", common_start=False, **SGD)
    mean = mean_model(arrays(unaveraged.step(unaveraged.start(), 0)[0].clients[0].variables))
    after = arrays(averaged.step(averaged.start(), 0)[0].clients[0].variables)
    for k in range(5):
        assert_close(row(after, k), mean, 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("option", [{"own": "previous"}, {"public_epochs": 2}, {"lambda_col": 1.0}])
def test_each_option_of_the_exchange_changes_its_result(option):
    base = toy.groups("fccl", necks=ONE, **SGD)
    state = base.start()
    learner = state.clients[0]
    previous_models = stacked([variables(20 + k) for k in range(5)])

    def models_after(groups):
        client = Learner(*(jax.tree.map(jnp.copy, v) for v in (learner.variables, previous_models, learner.pretrained)))
        return exchanged(groups, state._replace(clients=(client,)))[0].variables

    changed = toy.groups("fccl", necks=ONE, **SGD, **option)
    assert largest_difference(models_after(base), models_after(changed)) > 1e-5
