"""SOLO: a client's model is its own data's."""

import dataclasses

import jax
import numpy as np
import pytest
import toy

from fedjax_pcdd.data.federation import Federation


def with_other_images(federation, k):
    """The federation with the images of all clients but k inverted."""
    images = 255 - federation.dataset.x_train
    own = federation.partition.train[k]
    images[own] = federation.dataset.x_train[own]
    return Federation(dataclasses.replace(federation.dataset, x_train=images), federation.partition)


def models(simulated):
    """Every client's parameters after two rounds [K, n]."""
    state, _ = toy.train(simulated, (0, 1))
    return np.concatenate([np.array(x).reshape(len(x), -1) for x in jax.tree.leaves(state.clients)], axis=1)


@pytest.mark.thorough
def test_clients_do_not_depend_on_each_others_data():
    simulated, k = toy.simulation("solo", cohort=5, lanes=2), 3
    experiment = simulated.experiments[0]
    changed = experiment._replace(federation=with_other_images(experiment.federation, k))
    one, other = models(simulated), models(simulated.alike([changed], 5))
    np.testing.assert_array_equal(one[k], other[k])
    assert all((one[j] != other[j]).any() for j in range(5) if j != k)
