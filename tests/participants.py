"""For tests of single hooks of participants that exchange: small models, hand-made contexts, stacked variables."""

import jax
import jax.numpy as jnp
import numpy as np
import toy

from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.methods.method import Keys
from fedjax_pcdd.methods.participant import PublicBatch
from fedjax_pcdd.models.classifier import forward, initialise

MODEL = toy.architectures(0)[0]
NORMED = MODEL.clone(feature_norm=True)
SGD = {"optimizer": "sgd", "lr": 0.02}
ONE = (0, 0, 0, 0, 0)


def variables(seed=0, model=MODEL):
    return initialise(model, jax.random.key(seed), (5, 5, 1))


def normed_variables(seed):
    """Variables of the model with batch norm, with running statistics that no other seed has."""
    initial = variables(seed, NORMED)
    return {**initial, "batch_stats": jax.tree.map(lambda x: x + 0.3 * (seed + 1), initial["batch_stats"])}


def images(count=8):
    """Public images as a model receives them."""
    return prepare(toy.PLAIN, jnp.asarray(toy.public_images(count)), None, train=False)


def public_batch(target=(), count=8):
    return PublicBatch(images(count), images(count), target)


def logits(own, x, model=MODEL):
    return forward(model, own, x, train=False)[0].logits


def context(**known):
    return toy.context(**{"model": MODEL, "keys": Keys.of(jax.random.key(3))} | known)


def alone(k=4):
    """A federation with only client k."""
    complete = toy.federation()
    return Federation(complete.dataset, Partition((complete.partition.train[k],), (complete.partition.test[k],)))


ALONE = alone()


def exchanged(table, state=None):
    """The clients of all groups after the exchange of round 0, as NumPy arrays."""
    return arrays(table.exchange(table.start() if state is None else state, 0).clients)


def arrays(tree):
    return jax.tree.map(np.array, tree)


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_close(one, other, tolerance=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, tolerance, tolerance), one, other)


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def largest_difference(one, other):
    """The largest absolute difference between two trees of arrays."""
    return max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def row(tree, k):
    return jax.tree.map(lambda x: x[k], tree)


def stacked(trees):
    return jax.tree.map(lambda *x: jnp.stack(x), *trees)
