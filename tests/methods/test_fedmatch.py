"""FedMatch between participants: sigma learns from labels, psi from public images, and neither from the other's."""

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
    public_batch,
    same,
    variables,
)

from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.engine.groups import of_group
from fedjax_pcdd.methods.fedmatch import FedMatch
from fedjax_pcdd.methods.method import Batch, Server
from fedjax_pcdd.methods.parts import without
from fedjax_pcdd.models.classifier import forward

OFF = {"lambda_i": 0.0, "lambda_a": 0.0, "lambda_l1": 0.0, "lambda_l2": 0.0}


def split(own=None, **hyper):
    return FedMatch(**hyper).init_client(None, Server(variables() if own is None else own), None, None)


def sigma_of(clients):
    return without(clients, "psi")


def psi_of(clients):
    return clients["params"]["psi"]


def test_the_parts_sum_to_the_initial_model():
    own, parts = variables(), split(psi_factor=0.3)
    assert_close(arrays(psi_of(parts)), arrays(jax.tree.map(lambda w: 0.3 * w, own["params"])))
    found = FedMatch().logits(MODEL, parts, images(), ())
    np.testing.assert_allclose(found, logits(own, images()), 1e-4, 1e-5)


@pytest.mark.thorough
def test_the_exchange_moves_psi_alone():
    table = toy.groups("fedmatch", necks=ONE, confidence=0.0, weight_decay=0.1, **SGD)
    before, after = arrays(table.start().clients[0]), exchanged(table)[0]
    assert_equal(sigma_of(before), sigma_of(after))
    assert not same(psi_of(before), psi_of(after))


@pytest.mark.thorough
def test_local_training_moves_sigma_alone():
    table = toy.groups("fedmatch", necks=ONE, weight_decay=0.1, **SGD)
    state, group = table.start(), table.groups[0]
    before = arrays(state.clients[0])
    after, _ = group.step(of_group(state, 0), 0)
    assert_equal(psi_of(before), arrays(psi_of(after.clients)))
    assert not same(sigma_of(before), sigma_of(after.clients))


@pytest.mark.thorough
def test_without_unsupervised_terms_psi_never_moves():
    table = toy.groups("fedmatch", necks=ONE, **OFF, **SGD)
    before = arrays(psi_of(table.start().clients[0]))
    state, _ = toy.train(table, (0, 1))
    assert_equal(before, arrays(psi_of(state.clients[0])))


def supervised(parts, **hyper):
    batch = Batch(images(), jnp.asarray([0, 1, 2, 0, 1, 2, 0, 1]), jnp.ones(8))
    return FedMatch(**hyper).loss(parts, batch, context())[0]


@pytest.mark.thorough
def test_the_supervised_loss_has_its_weight_and_no_gradient_for_psi():
    parts = split()
    np.testing.assert_allclose(supervised(parts, lambda_s=6.0), 3 * supervised(parts, lambda_s=2.0), 1e-5)
    gradient = arrays(jax.grad(supervised)(parts))
    assert all(not np.any(g) for g in jax.tree.leaves(psi_of(gradient)))
    assert any(np.any(g) for g in jax.tree.leaves(sigma_of(gradient)))


HELPERS = jnp.asarray(np.random.default_rng(0).normal(size=(8, 2, toy.CLASSES)) * 3)


def unsupervised(parts, helpers=HELPERS, **hyper):
    return FedMatch(**{"confidence": 0.0} | OFF | hyper).imitate(parts, public_batch(helpers), context())[0]


@pytest.mark.thorough
def test_sigma_takes_no_gradient_of_the_unsupervised_loss():
    gradient = arrays(
        jax.grad(lambda p: unsupervised(p, lambda_i=1.0, lambda_a=1.0, lambda_l1=1.0, lambda_l2=1.0))(split())
    )
    assert all(not np.any(g) for g in jax.tree.leaves(sigma_of(gradient)))


@pytest.mark.thorough
def test_consistency_is_the_mean_divergence_from_the_helpers():
    student = np.asarray(jax.nn.log_softmax(logits(variables(), images())))[:, None]
    teacher = np.asarray(jax.nn.log_softmax(HELPERS))
    expected = (np.exp(teacher) * (teacher - student)).sum(-1).mean()
    np.testing.assert_allclose(unsupervised(split(), lambda_i=1.0), expected, 1e-3)


@pytest.mark.thorough
def test_pseudo_labels_are_the_votes_of_the_model_and_its_helpers():
    agreed = jnp.zeros((8, 2, toy.CLASSES)).at[:, :, 3].set(5.0)
    own = jax.nn.log_softmax(forward(MODEL, variables(), images(), train=True)[0].logits)
    np.testing.assert_allclose(unsupervised(split(), agreed, lambda_a=1.0), -own[:, 3].mean(), 1e-4)


def test_only_confident_images_count():
    parts = split()
    least = float(jax.nn.softmax(logits(variables(), images())).max())
    assert float(unsupervised(parts, lambda_a=1.0, lambda_i=1.0, confidence=0.0)) > 0
    assert float(unsupervised(parts, lambda_a=1.0, lambda_i=1.0, confidence=min(1.0, least + 1e-3))) == 0


def test_the_regularisers_are_those_of_the_paper():
    parts = split(psi_factor=0.2)
    leaves = [np.asarray(w) for w in jax.tree.leaves(variables()["params"])]
    l2 = sum(((0.8 - 0.2) ** 2 * w**2).sum() for w in leaves)
    l1 = sum(np.abs(0.2 * w).sum() for w in leaves)
    np.testing.assert_allclose(unsupervised(parts, lambda_l2=1.0), l2, 1e-4)
    np.testing.assert_allclose(unsupervised(parts, lambda_l1=1.0), l1, 1e-4)


@pytest.mark.thorough
def test_helpers_are_the_participants_with_the_nearest_outputs():
    said = jnp.asarray([[[0.0, 0]], [[5, 0]], [[0.1, 0]], [[4, 0]]])
    _, one = FedMatch(helpers=1).agree((), said, None)
    np.testing.assert_array_equal(one[:, 0, 0], said[jnp.array([2, 3, 0, 1]), 0])
    _, all_others = FedMatch(helpers=9).agree((), said, None)
    assert all_others.shape == (4, 1, 3, 2)


def test_without_helpers_the_models_own_vote_decides():
    nobody = jnp.zeros((8, 0, toy.CLASSES))
    own = jax.nn.log_softmax(forward(MODEL, variables(), images(), train=True)[0].logits)
    np.testing.assert_allclose(unsupervised(split(), nobody, lambda_a=1.0, lambda_i=1.0), -own.max(1).mean(), 1e-4)


@pytest.mark.thorough
def test_a_federation_without_helpers_can_talk():
    table = toy.groups("fedmatch", necks=ONE, helpers=0, confidence=0.0, **SGD)
    before, after = arrays(table.start().clients), exchanged(table)
    assert not same(before, after)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))


@pytest.mark.parametrize(("threshold", "part"), [(0.0, 1.0), (1e9, 0.8)])
def test_small_entries_of_psi_are_left_out_of_predictions(threshold, part):
    own = variables()
    found = FedMatch(l1_threshold=threshold).logits(MODEL, split(), images(), ())
    expected = logits({"params": jax.tree.map(lambda w: part * w, own["params"])}, images())
    np.testing.assert_allclose(found, expected, 1e-4, 1e-5)


@pytest.mark.thorough
def test_augmentation_is_for_pseudo_labels_only():
    def after(**hyper):
        found = []
        for public in (toy.PLAIN, Pipeline(flip=True)):
            table = toy.groups("fedmatch", necks=ONE, confidence=0.0, public=public, **OFF | hyper, **SGD)
            found.append(exchanged(table))
        return found

    assert same(*after(lambda_i=1.0))
    assert not same(*after(lambda_a=1.0))
