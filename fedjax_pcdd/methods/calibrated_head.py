"""A classifier that is retrained on features drawn from a Gaussian of each class (CCVR)."""

import jax
import jax.numpy as jnp
import optax

from fedjax_pcdd.losses.class_gaussians import Moments, draw_features, gaussians
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.methods.method import Tree
from fedjax_pcdd.methods.server_training import train_in_passes
from fedjax_pcdd.models.classifier import apply_head


def calibrated_head(
    head: Tree,
    moments: Moments,
    key: jax.Array,
    *,
    drawn: int,
    epochs: int,
    size: int,
    optimiser: optax.GradientTransformation,
    relu: bool = False,
    present: bool = False,
    shift: jax.Array | float = 0.0,
) -> Tree:
    """The head after cross-entropy on features that are drawn from the Gaussians of the sums.

    Args:
      head: {"kernel": [D, C], ...}, at first.
      moments: sums of the features of each class over all clients; a class without samples is not drawn.
      drawn: M_c, features of each class.
      epochs: passes over them.
      size: drawn features of a step.
      relu: ReLU on them, where the model's come after one.
      present: the softmax is over the classes that have samples alone.
      shift: [D], what was taken off all features before they were summed.
    """
    means, covariances = gaussians(moments, shift)
    valid, keys = moments.counts > 0, jax.random.split(key)
    shape = (len(means), drawn, means.shape[1])
    features = draw_features(means, covariances, jax.random.normal(keys[0], shape, means.dtype))
    features = (jax.nn.relu(features) if relu else features).reshape(-1, shape[2])
    owned, labels = jnp.repeat(valid, drawn), jnp.repeat(jnp.arange(len(valid)), drawn)
    classes = valid if present else None

    def loss(head, index, mask):
        return cross_entropy(apply_head(head, features[index]), labels[index], mask=mask, classes=classes)

    def order(epoch):
        lots = jax.random.uniform(jax.random.fold_in(keys[1], epoch), labels.shape)
        return jnp.argsort(jnp.where(owned, lots, 2))

    return train_in_passes(head, loss, order, owned.sum(), optimiser, epochs=epochs, size=size)
