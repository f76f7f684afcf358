"""FedMD and RCFL: the errors of logits, when targets are made, and how scores are gathered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from participants import (
    ALONE,
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
    variables,
)

from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.losses.distillation import absolute_error
from fedjax_pcdd.methods.fedmd import FedMD
from fedjax_pcdd.methods.rcfl import RCFL
from fedjax_pcdd.models.classifier import forward

COUNTS = jnp.asarray([[10.0, 0, 10], [20, 20, 0]])


def test_two_participants_are_as_far_from_their_mean_as_in_the_worked_example():
    said = jnp.asarray([[[1.0, 3]], [[3, 5]]])
    _, targets = FedMD().agree((), said, None)
    np.testing.assert_array_equal(targets, [[[2, 4]]] * 2)
    assert [float(FedMD().public_loss(z, t, None)) for z, t in zip(said, targets, strict=True)] == [1, 1]


def test_deviations_from_the_mean_sum_to_zero():
    said = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 3)))
    _, targets = FedMD().agree((), said, None)
    np.testing.assert_allclose((said - targets).sum(0), 0, atol=1e-6)


def test_the_error_is_absolute_or_squared():
    z, target = jnp.asarray([[1.0, 3]]), jnp.asarray([[3.0, 3]])
    assert float(FedMD().public_loss(z, target, None)) == 1
    assert float(FedMD(distance="squared").public_loss(z, target, None)) == 2


def test_a_participant_alone_learns_nothing_from_public_images():
    table = toy.groups("fedmd", necks=(0,), parts=ALONE, **SGD)
    before = arrays(table.start().clients)
    assert_equal(before, exchanged(table))


def test_equal_participants_learn_nothing_from_public_images():
    # Not with absolute differences: the mean of five equal numbers may differ from them in the last bit.
    squared = toy.groups("fedmd", necks=ONE, distance="squared", **SGD)
    state = squared.start()
    equal = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape) + 0, state.clients)
    before = arrays(equal)
    assert_close(before, exchanged(squared, state._replace(clients=equal)), 1e-6)


def test_targets_of_a_round_come_from_the_models_as_they_were():
    table = toy.groups("fedmd", necks=ONE, consensus="per_round", **SGD)
    state = table.start()
    held, model = [row(state.clients[0], k) for k in range(5)], table.groups[0].program.model
    x = prepare(toy.PLAIN, jnp.asarray(toy.public_images()), None, train=False)
    target = sum(logits(v, x, model) for v in held) / 5
    expected = []
    for v in held:
        for index in table.public_plan(0):

            def loss(params, v=v, index=index):
                return absolute_error(
                    target[index], forward(model, {**v, "params": params}, x[index], train=True)[0].logits
                )

            v = {"params": jax.tree.map(lambda w, g: w - 0.02 * g, v["params"], jax.grad(loss)(v["params"]))}
        expected.append(arrays(v))
    found = exchanged(table)[0]
    assert_close([row(found, k) for k in range(5)], expected)


def test_scores_of_one_with_many_samples_are_its_own_logits():
    said = jnp.asarray(np.random.default_rng(1).normal(size=(1, 6, 3)))
    scores, _ = RCFL().agree(jnp.ones((6, 3)), said, jnp.asarray([[1e9, 0, 0]]))
    np.testing.assert_allclose(scores, said[0], 1e-5)


def test_bounded_scores_are_the_mean_of_what_each_blends():
    said = jnp.asarray(np.random.default_rng(2).normal(size=(2, 4, 3)))
    public = jnp.asarray(np.random.default_rng(3).normal(size=(4, 3)))
    alpha = [20 / 4, 40 / 4]
    expected = sum((public + a * f) / (1 + a) for a, f in zip(alpha, said, strict=True)) / 2
    scores, targets = RCFL().agree(public, said, COUNTS)
    np.testing.assert_allclose(scores, expected, 1e-5)
    for target in targets:
        np.testing.assert_array_equal(target, scores)


def test_literal_scores_are_means_over_the_owners_of_a_class():
    said = jnp.asarray(np.random.default_rng(2).normal(size=(2, 4, 3)))
    public = jnp.ones((4, 3))
    scores, _ = RCFL(scores="literal").agree(public, said, COUNTS)
    first, second = 1 + 5 * said[0], 1 + 10 * said[1]
    expected = jnp.stack([(first[:, 0] + second[:, 0]) / 2, second[:, 1], first[:, 2]], 1)
    np.testing.assert_allclose(scores, expected, 1e-5)


def test_literal_scores_of_a_class_that_nobody_owns_stay():
    public = jnp.asarray(np.random.default_rng(4).normal(size=(4, 3)))
    scores, _ = RCFL(scores="literal").agree(public, jnp.ones((2, 4, 3)), COUNTS.at[:, 1].set(0))
    np.testing.assert_allclose(scores[:, 1], public[:, 1])


@pytest.mark.parametrize("form", ["bounded", "literal"])
def test_scores_do_not_depend_on_the_order_of_participants(form):
    said = jnp.asarray(np.random.default_rng(2).normal(size=(2, 4, 3)))
    one, _ = RCFL(scores=form).agree(jnp.ones((4, 3)), said, COUNTS)
    other, _ = RCFL(scores=form).agree(jnp.ones((4, 3)), said[::-1], COUNTS[::-1])
    np.testing.assert_allclose(one, other, 1e-6)


def test_the_distance_to_scores_is_absolute_or_a_divergence():
    z, target = jnp.asarray([[1.0, 3]]), jnp.asarray([[3.0, 5]])
    assert float(RCFL().public_loss(z, target, None)) == 2
    np.testing.assert_allclose(RCFL(distance="kl").public_loss(z, target, None), 0, atol=1e-6)


def test_scores_are_those_of_the_trained_models():
    table = toy.groups("rcfl", necks=ONE, **SGD)
    state, _ = table.step(table.start(), 0)
    solo = toy.groups("solo", necks=ONE, **SGD)
    trained, _ = solo.step(solo.start(), 0)
    x = prepare(toy.PLAIN, jnp.asarray(toy.public_images()), None, train=False)
    model = solo.groups[0].program.model
    said = jnp.stack([logits(row(trained.clients[0], k), x, model) for k in range(5)])
    alpha = (np.array(toy.SIZES) / 21)[:, None, None]
    np.testing.assert_allclose(state.servers["public"], (alpha * said / (1 + alpha)).mean(0), 1e-4, 1e-5)


def test_participants_imitate_the_scores_after_local_training():
    table, solo = toy.groups("rcfl", necks=ONE, **SGD), toy.groups("solo", necks=ONE, **SGD)
    state, _ = table.step(table.start(), 0)
    alone, _ = solo.step(solo.start(), 0)
    x, model = images(21), solo.groups[0].program.model

    def distance(clients):
        found = [absolute_error(state.servers["public"], logits(row(clients[0], k), x, model)) for k in range(5)]
        return float(sum(found))

    assert distance(state.clients) < distance(alone.clients)


def test_what_rcfl_says_of_public_images_are_its_logits():
    batch = type("B", (), {"images": images()})()
    np.testing.assert_allclose(RCFL().say(variables(), batch, context()), logits(variables(), images()), 1e-6)


def test_the_distance_of_rcfl_changes_the_round():
    absolute, divergence = (toy.groups("rcfl", necks=ONE, distance=d, **SGD) for d in ("absolute", "kl"))
    assert not same(exchanged(absolute), exchanged(divergence))
