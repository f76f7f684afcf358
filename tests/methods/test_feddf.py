"""FedDF in both forms: on the server, where the mean model learns from the ensemble, and between participants."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from participants import (
    MODEL,
    NORMED,
    ONE,
    SGD,
    arrays,
    assert_close,
    assert_equal,
    context,
    exchanged,
    images,
    logits,
    normed_variables,
    public_batch,
    same,
    variables,
)

from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.losses.distillation import ensemble_target, kl_to_target
from fedjax_pcdd.methods.feddf import FedDF
from fedjax_pcdd.methods.method import Message, Method, Server, ServerContext, Unlabelled
from fedjax_pcdd.methods.server_training import train_on_public
from fedjax_pcdd.models.classifier import initialise

PUBLIC_IMAGES = toy.public_images(20)


def prepared(index, key):
    return prepare(toy.PLAIN, jnp.asarray(PUBLIC_IMAGES)[index], key, train=key is not None)


PUBLIC = Unlabelled(jnp.asarray(PUBLIC_IMAGES), prepared)
TEACHERS = [variables(k) for k in (1, 2, 3)]


def distilled(**hyper):
    """The student after a few server steps towards three teachers."""
    method = FedDF(**{"server_steps": 3, "server_batch": 8, "server_lr": 0.01} | hyper)
    messages = [method.upload(v, (), context(public=PUBLIC))[1] for v in TEACHERS]
    total = jax.tree.map(lambda *x: sum(x), *(message.total for message in messages))
    server = Server(variables(9))
    server_context = ServerContext(
        MODEL, None, None, jnp.zeros((), int), None, len(messages), jax.random.key(5), PUBLIC
    )
    return arrays(method.aggregate(server, Message(variables(9), total), None, server_context).variables)


def distance(student, **hyper):
    target = ensemble_target(jnp.stack([logits(v, prepared(jnp.arange(20), None)) for v in TEACHERS]), **hyper)
    return float(kl_to_target(target, logits(student, prepared(jnp.arange(20), None)), **hyper))


@pytest.mark.thorough
def test_distillation_brings_the_student_nearer_to_its_teachers():
    assert distance(distilled(server_steps=30)) < 0.5 * distance(variables(9))


@pytest.mark.thorough
def test_every_server_step_draws_its_own_images():
    server_context = ServerContext(MODEL, None, None, jnp.zeros((), int), None, 1, jax.random.key(5), PUBLIC)

    def student_after(steps, start):
        return train_on_public(
            start, lambda logits, _: logits[:, 0].mean(), server_context, optax.sgd(0.1), steps=steps, size=4
        )

    two_steps, one_step_twice = student_after(2, TEACHERS[0]), student_after(1, student_after(1, TEACHERS[0]))
    assert not np.allclose(two_steps["params"]["head"]["kernel"], one_step_twice["params"]["head"]["kernel"], atol=1e-4)


def after_a_step(model, public, size=8, seed=5):
    """A student of this architecture, before and after a step on the server whose loss is its mean first logit."""
    server_context = ServerContext(model, None, None, jnp.zeros((), int), None, 1, jax.random.key(seed), public)
    student = variables(1, model)
    loss, optimiser = lambda logits, _: logits[:, 0].mean(), optax.sgd(0.1)
    return student, train_on_public(student, loss, server_context, optimiser, steps=1, size=size)


def test_running_statistics_of_the_student_move_in_training_on_the_server():
    before, after = after_a_step(MODEL.clone(feature_norm=True), PUBLIC)
    assert not same(before["batch_stats"], after["batch_stats"])


def test_a_step_on_the_server_has_no_image_twice():
    students = [after_a_step(MODEL, PUBLIC, size=20, seed=seed)[1] for seed in (5, 6)]
    assert_close(*map(arrays, students))


def flipped(index, key):
    return prepare(Pipeline(flip=True), jnp.asarray(PUBLIC_IMAGES)[index], key, train=key is not None)


def test_public_images_are_augmented_in_training_on_the_server():
    students = [after_a_step(MODEL, PUBLIC._replace(prepare=function))[1] for function in (prepared, flipped)]
    assert not same(*students)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "option",
    [
        {"server_steps": 4}, {"server_lr": 0.02}, {"server_batch": 5}, {"server_decay_steps": 3}, {"server_clip": 1e-9},
        {"temperature": 3.0}, {"ensemble": "avg_probs"},
    ],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
def test_each_option_of_the_server_changes_the_student(option):
    assert not same(distilled(), distilled(**option))


@pytest.mark.thorough
def test_the_learning_rate_on_the_server_decays_to_zero():
    assert_equal(distilled(server_steps=2, server_decay_steps=2), distilled(server_steps=5, server_decay_steps=2))


@pytest.mark.thorough
def test_teachers_count_equally_in_the_target():
    method = FedDF()
    targets = [method.upload(v, (), context(public=PUBLIC))[1].total.value for v in TEACHERS]
    expected = jnp.stack([logits(v, prepared(jnp.arange(20), None)) for v in TEACHERS]).mean(0)
    np.testing.assert_allclose(sum(targets) / len(targets), expected, 1e-5, 1e-6)


def test_teachers_on_the_server_see_plain_images_in_eval_mode():
    teacher = normed_variables(0)
    client_context = context(model=NORMED, public=PUBLIC._replace(prepare=flipped))
    target = FedDF().upload(teacher, (), client_context)[1].total.value
    np.testing.assert_allclose(target, logits(teacher, prepared(jnp.arange(20), None), NORMED), 1e-5, 1e-5)


@pytest.mark.parametrize("form", ["server", "participants"])
def test_mean_probabilities_are_those_at_the_temperature(form):
    method = FedDF(form=form, ensemble="avg_probs", temperature=3.0)
    sent_logits = jnp.stack([logits(v, prepared(jnp.arange(20), None)) for v in TEACHERS])
    if form == "server":
        target = sum(method.upload(v, (), context(public=PUBLIC))[1].total.value for v in TEACHERS) / len(TEACHERS)
    else:
        target = method.agree((), sent_logits, None)[1][0]
    np.testing.assert_allclose(target, jax.nn.softmax(sent_logits / 3).mean(0), 1e-5)


def simulation(method, cohort=3):
    base = toy.simulation(cohort=5)
    experiment = base.experiments[0]._replace(method=method)
    public = (toy.public_images(), toy.PLAIN) if method.traits().public else None
    return Simulation(base.program.model, [experiment], pipeline=toy.PLAIN, cohort=cohort, rounds=3, public=public)


@pytest.mark.thorough
def test_without_server_steps_feddf_is_bitwise_fedavg():
    state, _ = toy.train(simulation(FedDF(server_steps=0)), (0, 1))
    expected, _ = toy.train(simulation(Method()), (0, 1))
    assert_equal(arrays(state.servers), arrays(expected.servers))


@pytest.mark.thorough
def test_the_student_starts_as_the_weighted_mean_of_the_models():
    state, _ = toy.train(simulation(FedDF(server_steps=2, server_lr=1e-12, server_batch=8)), (0,))
    expected, _ = toy.train(simulation(Method()), (0,))
    for leaf, expected_leaf in zip(
        jax.tree.leaves(arrays(state.servers)), jax.tree.leaves(arrays(expected.servers)), strict=True
    ):
        np.testing.assert_allclose(leaf, expected_leaf, atol=1e-6)


def test_a_student_that_is_its_only_teacher_has_nothing_to_learn():
    z = logits(variables(1), images())
    _, target = FedDF(form="participants").agree((), z[None], None)
    value, gradient = jax.value_and_grad(lambda z: FedDF().public_loss(z, target[0], None))(z)
    np.testing.assert_allclose(value, 0, atol=1e-6)
    np.testing.assert_allclose(gradient, 0, atol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("option", [{"temperature": 3.0}, {"ensemble": "avg_probs"}], ids=["temperature", "ensemble"])
def test_each_option_of_the_ensemble_changes_the_exchange(option):
    base = toy.groups("feddf", necks=ONE, form="participants", **SGD)
    assert not same(exchanged(base), exchanged(toy.groups("feddf", necks=ONE, form="participants", **SGD, **option)))


def test_teachers_run_in_the_chosen_mode():
    model = MODEL.clone(feature_norm=True)
    teacher = initialise(model, jax.random.key(0), (5, 5, 1))
    client_context = context(model=model)
    teacher_logits = {
        mode: FedDF(form="participants", teacher_mode=mode).say(teacher, public_batch(), client_context)
        for mode in ("eval", "train")
    }
    np.testing.assert_allclose(teacher_logits["eval"], logits(teacher, images(), model), 1e-6)
    assert not np.allclose(teacher_logits["eval"], teacher_logits["train"])


def test_the_form_decides_whether_clients_keep_models_and_exchange_logits():
    server, participants = FedDF().traits(), FedDF(form="participants").traits()
    assert (server.own_models, server.public, server.exchange, server.target) == (False, True, "never", "generic")
    participant_traits = participants.own_models, participants.public, participants.exchange, participants.target
    assert participant_traits == (True, False, "before", "personal")


def test_only_the_participants_form_averages_models_between_clients():
    assert FedDF(average="trained").traits().averages == "never"
    assert FedDF(form="participants", average="trained").traits().averages == "trained"


def test_in_the_exchange_all_participants_have_the_same_target():
    sent_logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 4)))
    _, targets = FedDF(form="participants").agree((), sent_logits, None)
    for target in targets:
        np.testing.assert_allclose(target, sent_logits.mean(0), 1e-5, 1e-6)


@pytest.mark.thorough
def test_participants_send_no_models():
    _, message = FedDF(form="participants").upload(variables(), (), context(client=variables()))
    assert jax.tree.leaves(message) == []
