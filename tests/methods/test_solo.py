"""SOLO: a client's model depends on its own data alone."""

import dataclasses

import jax
import numpy as np
import pytest
import toy

from fedjax_pcdd.data.federation import Federation


def with_other_images(federation, k):
    """The federation with the images of all clients but k inverted."""
    images = 255 - federation.dataset.x_train
    indices = federation.partition.train[k]
    images[indices] = federation.dataset.x_train[indices]
    return Federation(dataclasses.replace(federation.dataset, x_train=images), federation.partition)


def models(simulated):
    """Every client's parameters after two rounds [K, n]."""
    state, _ = toy.train(simulated, (0, 1))
    return np.concatenate([np.array(x).reshape(len(x), -1) for x in jax.tree.leaves(state.clients)], axis=1)


@pytest.mark.thorough
def test_clients_do_not_depend_on_each_others_data():
    simulated, k = toy.simulation("solo", cohort=5, lanes=2), 3
    experiment = simulated.experiments[0]
    modified_experiment = experiment._replace(federation=with_other_images(experiment.federation, k))
    original, modified = models(simulated), models(simulated.alike([modified_experiment], 5))
    np.testing.assert_array_equal(original[k], modified[k])
    assert all((original[j] != modified[j]).any() for j in range(5) if j != k)
