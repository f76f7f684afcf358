"""FedMatch between participants: sigma is trained on labels, psi on public images, and neither on the other's data."""

import jax
import jax.numpy as jnp
import numpy as np
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
    largest_difference,
    logits,
    normed_variables,
    public_batch,
    same,
    variables,
)

from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.engine.groups import of_group
from fedjax_pcdd.methods.fedmatch import FedMatch
from fedjax_pcdd.methods.method import Batch, Server
from fedjax_pcdd.methods.participant import PublicBatch
from fedjax_pcdd.methods.parts import without
from fedjax_pcdd.models.classifier import forward

TERMS_OFF = {"lambda_i": 0.0, "lambda_a": 0.0, "lambda_l1": 0.0, "lambda_l2": 0.0}


def split(initial=None, **hyper):
    return FedMatch(**hyper).init_client(None, Server(variables() if initial is None else initial), None, None)


def sigma_of(clients):
    return without(clients, "psi")


def psi_of(clients):
    return clients["params"]["psi"]


def test_sigma_and_psi_sum_to_the_initial_model():
    initial, client = variables(), split(psi_factor=0.3)
    assert_close(arrays(psi_of(client)), arrays(jax.tree.map(lambda w: 0.3 * w, initial["params"])))
    outputs = FedMatch().logits(MODEL, client, images(), ())
    np.testing.assert_allclose(outputs, logits(initial, images()), 1e-4, 1e-5)


@pytest.mark.thorough
def test_the_exchange_changes_only_psi():
    groups = toy.groups("fedmatch", necks=ONE, confidence=0.0, weight_decay=0.1, **SGD)
    before, after = arrays(groups.start().clients[0]), exchanged(groups)[0]
    assert_equal(sigma_of(before), sigma_of(after))
    assert not same(psi_of(before), psi_of(after))


@pytest.mark.thorough
def test_local_training_changes_only_sigma():
    groups = toy.groups("fedmatch", necks=ONE, weight_decay=0.1, **SGD)
    state, group = groups.start(), groups.groups[0]
    before = arrays(state.clients[0])
    after, _ = group.step(of_group(state, 0), 0)
    assert_equal(psi_of(before), arrays(psi_of(after.clients)))
    assert not same(sigma_of(before), sigma_of(after.clients))


@pytest.mark.thorough
def test_without_unsupervised_terms_psi_never_changes():
    groups = toy.groups("fedmatch", necks=ONE, **TERMS_OFF, **SGD)
    before = arrays(psi_of(groups.start().clients[0]))
    state, _ = toy.train(groups, (0, 1))
    assert_equal(before, arrays(psi_of(state.clients[0])))


def supervised_loss(client, **hyper):
    batch = Batch(images(), jnp.asarray([0, 1, 2, 0, 1, 2, 0, 1]), jnp.ones(8))
    return FedMatch(**hyper).loss(client, batch, context())[0]


@pytest.mark.thorough
def test_the_supervised_loss_scales_with_lambda_s_and_gives_psi_no_gradient():
    client = split()
    np.testing.assert_allclose(supervised_loss(client, lambda_s=6.0), 3 * supervised_loss(client, lambda_s=2.0), 1e-5)
    gradient = arrays(jax.grad(supervised_loss)(client))
    assert all(not np.any(g) for g in jax.tree.leaves(psi_of(gradient)))
    assert any(np.any(g) for g in jax.tree.leaves(sigma_of(gradient)))


HELPER_LOGITS = jnp.asarray(np.random.default_rng(0).normal(size=(8, 2, toy.CLASSES)) * 3)


def unsupervised_loss(client, helpers=HELPER_LOGITS, **hyper):
    return FedMatch(**{"confidence": 0.0} | TERMS_OFF | hyper).imitate(client, public_batch(helpers), context())[0]


@pytest.mark.thorough
def test_the_unsupervised_loss_gives_sigma_no_gradient():
    gradient = arrays(
        jax.grad(lambda p: unsupervised_loss(p, lambda_i=1.0, lambda_a=1.0, lambda_l1=1.0, lambda_l2=1.0))(split())
    )
    assert all(not np.any(g) for g in jax.tree.leaves(sigma_of(gradient)))


@pytest.mark.thorough
def test_consistency_is_the_mean_divergence_from_the_helpers():
    student = np.asarray(jax.nn.log_softmax(logits(variables(), images())))[:, None]
    teacher = np.asarray(jax.nn.log_softmax(HELPER_LOGITS))
    expected = (np.exp(teacher) * (teacher - student)).sum(-1).mean()
    np.testing.assert_allclose(unsupervised_loss(split(), lambda_i=1.0), expected, 1e-3)


@pytest.mark.thorough
def test_pseudo_labels_are_the_votes_of_the_model_and_its_helpers():
    agreeing_logits = jnp.zeros((8, 2, toy.CLASSES)).at[:, :, 3].set(5.0)
    log_probs = jax.nn.log_softmax(forward(MODEL, variables(), images(), train=True)[0].logits)
    np.testing.assert_allclose(unsupervised_loss(split(), agreeing_logits, lambda_a=1.0), -log_probs[:, 3].mean(), 1e-4)


def test_only_the_loss_of_the_pseudo_labels_is_that_of_training_mode():
    initial, helpers = normed_variables(0), jnp.zeros((8, 2, toy.CLASSES)).at[:, :, 3].set(5.0)
    train, plain = (
        np.asarray(jax.nn.log_softmax(forward(NORMED, initial, images(), train=t)[0].logits)) for t in (True, False)
    )
    teacher = np.asarray(jax.nn.log_softmax(helpers))
    divergence = (np.exp(teacher) * (teacher - plain[:, None])).sum(-1)
    certain = np.exp(plain.max(1)) >= np.median(np.exp(plain.max(1)))
    options = TERMS_OFF | {"confidence": float(np.median(np.exp(plain.max(1)))) - 1e-6}
    for weight, expected in (("lambda_a", -train[certain, 3].mean()), ("lambda_i", divergence[certain].mean())):
        method = FedMatch(**options | {weight: 1.0})
        value, _ = method.imitate(split(initial), public_batch(helpers), context(model=NORMED))
        np.testing.assert_allclose(value, expected, 1e-4)


def test_only_confident_images_count():
    client = split()
    highest = float(jax.nn.softmax(logits(variables(), images())).max())
    assert float(unsupervised_loss(client, lambda_a=1.0, lambda_i=1.0, confidence=0.0)) > 0
    assert float(unsupervised_loss(client, lambda_a=1.0, lambda_i=1.0, confidence=min(1.0, highest + 1e-3))) == 0


def test_confidence_is_that_of_the_images_without_augmentation():
    plain, augmented = images(), images()[::-1]
    highest = jax.nn.softmax(logits(variables(), plain)).max(1)
    batch = PublicBatch(augmented, plain, jnp.zeros((8, 2, toy.CLASSES)).at[:, :, 3].set(5.0))
    method = FedMatch(**TERMS_OFF | {"lambda_a": 1.0}, confidence=float(jnp.median(highest)))
    log_probs = jax.nn.log_softmax(logits(variables(), augmented))
    expected = -log_probs[highest > jnp.median(highest), 3].mean()
    np.testing.assert_allclose(method.imitate(split(), batch, context())[0], expected, 1e-4)


def test_the_regularisers_are_those_of_the_paper():
    client = split(psi_factor=0.2)
    leaves = [np.asarray(w) for w in jax.tree.leaves(variables()["params"])]
    l2 = sum(((0.8 - 0.2) ** 2 * w**2).sum() for w in leaves)
    l1 = sum(np.abs(0.2 * w).sum() for w in leaves)
    np.testing.assert_allclose(unsupervised_loss(client, lambda_l2=1.0), l2, 1e-4)
    np.testing.assert_allclose(unsupervised_loss(client, lambda_l1=1.0), l1, 1e-4)


@pytest.mark.thorough
def test_helpers_are_the_participants_with_the_nearest_outputs():
    sent_logits = jnp.asarray([[[0.0, 0]], [[5, 0]], [[0.1, 0]], [[4, 0]]])
    _, nearest = FedMatch(helpers=1).agree((), sent_logits, None)
    np.testing.assert_array_equal(nearest[:, 0, 0], sent_logits[jnp.array([2, 3, 0, 1]), 0])
    _, all_others = FedMatch(helpers=9).agree((), sent_logits, None)
    assert all_others.shape == (4, 1, 3, 2)


def test_without_helpers_the_models_own_vote_decides():
    no_helpers = jnp.zeros((8, 0, toy.CLASSES))
    log_probs = jax.nn.log_softmax(forward(MODEL, variables(), images(), train=True)[0].logits)
    np.testing.assert_allclose(
        unsupervised_loss(split(), no_helpers, lambda_a=1.0, lambda_i=1.0), -log_probs.max(1).mean(), 1e-4
    )


@pytest.mark.thorough
def test_participants_without_helpers_still_learn_in_the_exchange():
    groups = toy.groups("fedmatch", necks=ONE, helpers=0, confidence=0.0, **SGD)
    before, after = arrays(groups.start().clients), exchanged(groups)
    assert not same(before, after)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


@pytest.mark.parametrize(("threshold", "remaining"), [(0.0, 1.0), (1e9, 0.8)])
def test_small_entries_of_psi_are_left_out_of_predictions(threshold, remaining):
    initial = variables()
    outputs = FedMatch(l1_threshold=threshold).logits(MODEL, split(), images(), ())
    expected = logits({"params": jax.tree.map(lambda w: remaining * w, initial["params"])}, images())
    np.testing.assert_allclose(outputs, expected, 1e-4, 1e-5)


@pytest.mark.thorough
def test_augmentation_affects_only_pseudo_labels():
    def clients_with_and_without_augmentation(**hyper):
        clients = []
        for public in (toy.PLAIN, Pipeline(flip=True)):
            groups = toy.groups("fedmatch", necks=ONE, confidence=0.0, public=public, **TERMS_OFF | hyper, **SGD)
            clients.append(exchanged(groups))
        return clients

    assert same(*clients_with_and_without_augmentation(lambda_i=1.0))
    assert largest_difference(*clients_with_and_without_augmentation(lambda_a=1.0)) > 1e-5
