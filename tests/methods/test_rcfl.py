"""RCFL: how scores are gathered over participants and rounds, and how all participants imitate them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from participants import (
    ONE,
    SGD,
    arrays,
    assert_close,
    context,
    exchanged,
    images,
    largest_difference,
    logits,
    public_batch,
    row,
    variables,
)

from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.losses.distillation import absolute_error
from fedjax_pcdd.methods.method import Setting
from fedjax_pcdd.methods.rcfl import RCFL
from fedjax_pcdd.models.classifier import forward

COUNTS = jnp.asarray([[10.0, 0, 10], [20, 20, 0]])
ALPHA = (np.array(toy.SIZES) / 21)[:, None, None]  # n_i / N


def drawn(*shape, seed=2):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_scores_of_a_lone_participant_with_many_samples_are_its_logits():
    sent_logits = drawn(1, 6, 3)
    scores, _ = RCFL().agree(jnp.ones((6, 3)), sent_logits, jnp.asarray([[1e9, 0, 0]]))
    np.testing.assert_allclose(scores, sent_logits[0], 1e-5)


def test_bounded_scores_are_the_mean_of_the_participants_blends():
    sent_logits = drawn(2, 4, 3)
    public = drawn(4, 3, seed=3)
    alpha = [20 / 4, 40 / 4]
    expected = sum((public + a * f) / (1 + a) for a, f in zip(alpha, sent_logits, strict=True)) / 2
    scores, targets = RCFL().agree(public, sent_logits, COUNTS)
    np.testing.assert_allclose(scores, expected, 1e-5)
    for target in targets:
        np.testing.assert_array_equal(target, scores)


def test_literal_scores_are_means_over_the_owners_of_a_class():
    sent_logits = drawn(2, 4, 3)
    public = jnp.ones((4, 3))
    scores, _ = RCFL(scores="literal").agree(public, sent_logits, COUNTS)
    first, second = 1 + 5 * sent_logits[0], 1 + 10 * sent_logits[1]
    expected = jnp.stack([(first[:, 0] + second[:, 0]) / 2, second[:, 1], first[:, 2]], 1)
    np.testing.assert_allclose(scores, expected, 1e-5)


def test_literal_scores_of_a_class_that_no_participant_owns_do_not_change():
    public = drawn(4, 3, seed=4)
    scores, _ = RCFL(scores="literal").agree(public, jnp.ones((2, 4, 3)), COUNTS.at[:, 1].set(0))
    np.testing.assert_allclose(scores[:, 1], public[:, 1])


@pytest.mark.parametrize("form", ["bounded", "literal"])
def test_scores_do_not_depend_on_the_order_of_participants(form):
    sent_logits = drawn(2, 4, 3)
    scores, _ = RCFL(scores=form).agree(jnp.ones((4, 3)), sent_logits, COUNTS)
    reordered, _ = RCFL(scores=form).agree(jnp.ones((4, 3)), sent_logits[::-1], COUNTS[::-1])
    np.testing.assert_allclose(scores, reordered, 1e-6)


def test_the_distance_to_scores_is_absolute_or_a_divergence():
    z, target = jnp.asarray([[1.0, 3]]), jnp.asarray([[3.0, 5]])
    assert float(RCFL().public_loss(z, target, None)) == 2
    np.testing.assert_allclose(RCFL(distance="kl").public_loss(z, target, None), 0, atol=1e-6)


@pytest.mark.thorough
def test_scores_come_from_the_trained_models():
    groups = toy.groups("rcfl", necks=ONE, **SGD)
    state, _ = groups.step(groups.start(), 0)
    solo = toy.groups("solo", necks=ONE, **SGD)
    trained, _ = solo.step(solo.start(), 0)
    x = prepare(toy.PLAIN, jnp.asarray(toy.public_images()), None, train=False)
    model = solo.groups[0].program.model
    sent_logits = jnp.stack([logits(row(trained.clients[0], k), x, model) for k in range(5)])
    np.testing.assert_allclose(state.servers["public"], (ALPHA * sent_logits / (1 + ALPHA)).mean(0), 1e-4, 1e-5)


@pytest.mark.thorough
def test_participants_imitate_the_scores_after_local_training():
    groups, solo = toy.groups("rcfl", necks=ONE, **SGD), toy.groups("solo", necks=ONE, **SGD)
    state, _ = groups.step(groups.start(), 0)
    solo_state, _ = solo.step(solo.start(), 0)
    x, model = images(21), solo.groups[0].program.model

    def distance(clients):
        distances = [absolute_error(state.servers["public"], logits(row(clients[0], k), x, model)) for k in range(5)]
        return float(sum(distances))

    assert distance(state.clients) < distance(solo_state.clients)


def test_participants_send_their_logits_of_public_images():
    sent_logits = RCFL().say(variables(), public_batch(), context())
    np.testing.assert_allclose(sent_logits, logits(variables(), images()), 1e-6)


@pytest.mark.thorough
def test_the_choice_of_distance_changes_the_exchange():
    absolute, divergence = (toy.groups("rcfl", necks=ONE, distance=d, **SGD) for d in ("absolute", "kl"))
    assert largest_difference(exchanged(absolute), exchanged(divergence)) > 1e-5


def test_scores_begin_at_zero():
    scores = RCFL().init_public(Setting(3, 5, 2, 1, 1, 1, False), 4)
    np.testing.assert_array_equal(scores, np.zeros((4, 3)))


def test_the_blend_of_a_participant_without_samples_is_the_old_scores():
    public, sent_logits = drawn(4, 3, seed=3), drawn(2, 4, 3)
    scores, _ = RCFL().agree(public, sent_logits, COUNTS.at[0].set(0))
    np.testing.assert_allclose(scores, (public + (public + 10 * sent_logits[1]) / 11) / 2, 1e-5, 1e-6)


def test_a_participant_without_samples_owns_no_class():
    public, sent_logits = drawn(4, 3, seed=3), drawn(2, 4, 3)
    scores, _ = RCFL(scores="literal").agree(public, sent_logits, COUNTS.at[0].set(0))
    np.testing.assert_allclose(scores[:, :2], (public + 10 * sent_logits[1])[:, :2], 1e-5)
    np.testing.assert_array_equal(scores[:, 2], public[:, 2])


@pytest.mark.parametrize(("form", "grows"), [("bounded", False), ("literal", True)])
def test_only_literal_scores_outgrow_constant_logits(form, grows):
    public, sent_logits = jnp.zeros((4, 3)), drawn(2, 4, 3)
    for _ in range(20):
        public, _ = RCFL(scores=form).agree(public, sent_logits, COUNTS)
    assert bool(jnp.abs(public).max() > jnp.abs(sent_logits).max()) == grows


def test_bounded_scores_of_equal_participants_converge_to_their_logits():
    public, sent_logits = jnp.zeros((4, 3)), jnp.broadcast_to(drawn(4, 3), (2, 4, 3))
    for _ in range(20):
        public, _ = RCFL().agree(public, sent_logits, COUNTS)
    np.testing.assert_allclose(public, sent_logits[0], 1e-5)


@pytest.mark.parametrize("form", ["bounded", "literal"])
def test_scores_stay_float32_where_participants_compute_in_bfloat16(form):
    scores, _ = RCFL(scores=form).agree(jnp.zeros((4, 3)), drawn(2, 4, 3).astype(jnp.bfloat16), COUNTS)
    assert scores.dtype == jnp.float32


def test_the_divergence_runs_from_the_scores_to_the_logits():
    z, target = drawn(6, 3), drawn(6, 3, seed=3)
    p, log_p, log_q = jax.nn.softmax(target), jax.nn.log_softmax(target), jax.nn.log_softmax(z)
    divergence = RCFL(distance="kl").public_loss(z, target, None)
    np.testing.assert_allclose(divergence, (p * (log_p - log_q)).sum(1).mean(), 1e-5)


@pytest.mark.parametrize("distance", ["absolute", "kl"])
def test_the_loss_gives_scores_no_gradient(distance):
    gradient = jax.grad(lambda target: RCFL(distance=distance).public_loss(drawn(6, 3), target, None))
    assert not gradient(drawn(6, 3, seed=3)).any()


def start_with_scores(groups):
    """The state at the start with scores that are not zero, and these scores."""
    state = groups.start()
    scores = drawn(*state.servers["public"].shape, seed=7)
    return state._replace(servers={**state.servers, "public": scores}), scores


@pytest.mark.thorough
def test_an_exchange_gathers_once_and_all_take_the_steps_of_the_equation():
    groups = toy.groups("rcfl", necks=ONE, **SGD)
    state, scores = start_with_scores(groups)
    participants, model = [row(arrays(state.clients[0]), k) for k in range(5)], groups.groups[0].program.model
    x = images(21)
    sent_logits = jnp.stack([logits(v, x, model) for v in participants])
    target = ((scores + ALPHA * sent_logits) / (1 + ALPHA)).mean(0)
    expected = []
    for v in participants:
        for index in groups.public_plan(0):

            def loss(params, v=v, index=index):
                outputs = forward(model, {**v, "params": params}, x[index], train=True)[0]
                return absolute_error(target[index], outputs.logits)

            v = {"params": jax.tree.map(lambda w, g: w - 0.02 * g, v["params"], jax.grad(loss)(v["params"]))}
        expected.append(arrays(v))
    after = groups.exchange(state, 0)
    np.testing.assert_allclose(after.servers["public"], target, 1e-4, 1e-5)
    assert_close([row(arrays(after.clients)[0], k) for k in range(5)], expected)


@pytest.mark.thorough
def test_the_form_of_the_scores_changes_the_exchange():
    bounded, literal = (toy.groups("rcfl", necks=ONE, scores=form, **SGD) for form in ("bounded", "literal"))
    assert largest_difference(exchanged(bounded), exchanged(literal)) > 1e-5
