"""What the methods share whose clients send class prototypes: whose features they are."""

import jax.numpy as jnp
import numpy as np
import pytest
import toy
from participants import NORMED, context, images, normed_variables

from fedjax_pcdd import methods
from fedjax_pcdd.methods.method import Batch, Setting
from fedjax_pcdd.models.classifier import forward


@pytest.mark.parametrize("name", ["fedmr", "fedproc", "fedproto", "fedtgp", "fedavg+prototypes"])
def test_prototypes_are_of_features_in_eval_mode_without_the_padding(name):
    own, labels, mask = normed_variables(0), jnp.arange(8) % 3, jnp.arange(8) < 6
    setting = Setting(toy.CLASSES, 200, 1, 1, 1, 8, True)
    batch = Batch(images(), labels, mask.astype(float))
    summary = methods.get(name)().summarise(own, batch, context(model=NORMED, setting=setting))
    classes = getattr(summary, "classes", summary)
    features = np.asarray(forward(NORMED, own, images(), train=False)[0].features)
    members = np.eye(toy.CLASSES)[labels[:6]]
    np.testing.assert_allclose(classes["sums"], members.T @ features[:6], 1e-4, 1e-5)
    np.testing.assert_array_equal(classes["counts"], members.sum(0))
