"""FedMD: the errors of logits, and when targets are made."""

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


@pytest.mark.thorough
def test_a_participant_alone_learns_nothing_from_public_images():
    table = toy.groups("fedmd", necks=(0,), parts=ALONE, **SGD)
    before = arrays(table.start().clients)
    assert_equal(before, exchanged(table))


@pytest.mark.thorough
def test_equal_participants_learn_nothing_from_public_images():
    # Not with absolute differences: the mean of five equal numbers may differ from them in the last bit.
    squared = toy.groups("fedmd", necks=ONE, distance="squared", **SGD)
    state = squared.start()
    equal = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], x.shape) + 0, state.clients)
    before = arrays(equal)
    assert_close(before, exchanged(squared, state._replace(clients=equal)), 1e-6)


@pytest.mark.thorough
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
