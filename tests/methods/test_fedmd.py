"""FedMD: the loss on logits, and which models the targets come from."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from participants import ALONE, ONE, SGD, arrays, assert_close, assert_equal, exchanged, logits, row

from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.losses.distillation import absolute_error
from fedjax_pcdd.methods.fedmd import FedMD
from fedjax_pcdd.models.classifier import forward


def test_targets_and_losses_of_two_participants_match_the_worked_example():
    sent_logits = jnp.asarray([[[1.0, 3]], [[3, 5]]])
    _, targets = FedMD().agree((), sent_logits, None)
    np.testing.assert_array_equal(targets, [[[2, 4]]] * 2)
    assert [float(FedMD().public_loss(z, t, None)) for z, t in zip(sent_logits, targets, strict=True)] == [1, 1]


def test_deviations_from_the_mean_sum_to_zero():
    sent_logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 3)))
    _, targets = FedMD().agree((), sent_logits, None)
    np.testing.assert_allclose((sent_logits - targets).sum(0), 0, atol=1e-6)


def test_the_error_is_absolute_or_squared():
    z, target = jnp.asarray([[1.0, 3]]), jnp.asarray([[3.0, 3]])
    assert float(FedMD().public_loss(z, target, None)) == 1
    assert float(FedMD(distance="squared").public_loss(z, target, None)) == 2


@pytest.mark.thorough
def test_a_lone_participant_learns_nothing_from_public_images():
    groups = toy.groups("fedmd", necks=(0,), parts=ALONE, **SGD)
    before = arrays(groups.start().clients)
    assert_equal(before, exchanged(groups))


@pytest.mark.thorough
@pytest.mark.parametrize("distance", ["absolute", "squared"])
def test_equal_participants_learn_nothing_from_public_images(distance):
    groups = toy.groups("fedmd", necks=ONE, distance=distance, optimizer="adam", lr=0.02)
    state = groups.start()
    equal_clients = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape) + 0, state.clients)
    before = arrays(equal_clients)
    assert_equal(before, exchanged(groups, state._replace(clients=equal_clients)))


@pytest.mark.thorough
def test_per_round_targets_come_from_the_models_before_the_exchange():
    groups = toy.groups("fedmd", necks=ONE, consensus="per_round", **SGD)
    state = groups.start()
    participants, model = [row(state.clients[0], k) for k in range(5)], groups.groups[0].program.model
    x = prepare(toy.PLAIN, jnp.asarray(toy.public_images()), None, train=False)
    target = sum(logits(v, x, model) for v in participants) / 5
    expected = []
    for v in participants:
        for index in groups.public_plan(0):

            def loss(params, v=v, index=index):
                return absolute_error(
                    target[index], forward(model, {**v, "params": params}, x[index], train=True)[0].logits
                )

            v = {"params": jax.tree.map(lambda w, g: w - 0.02 * g, v["params"], jax.grad(loss)(v["params"]))}
        expected.append(arrays(v))
    clients = exchanged(groups)[0]
    assert_close([row(clients, k) for k in range(5)], expected)
