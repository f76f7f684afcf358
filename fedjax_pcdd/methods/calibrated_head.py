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
    """The head after training by cross-entropy on features drawn from the Gaussians of these moments.

    Args:
      head: {"kernel": [D, C], ...}, to start from.
      moments: sums of the features of each class over all clients; a class without samples is not drawn.
      drawn: M_c, features drawn for each class.
      epochs: passes over the drawn features.
      size: drawn features per step.
      relu: whether ReLU is applied to them, for models whose features follow a ReLU.
      present: whether the softmax is over the classes with samples only.
      shift: [D], subtracted from all features before they were summed.
    """
    means, covariances = gaussians(moments, shift)
    valid, keys = moments.counts > 0, jax.random.split(key)
    shape = (len(means), drawn, means.shape[1])
    features = draw_features(means, covariances, jax.random.normal(keys[0], shape, means.dtype))
    features = (jax.nn.relu(features) if relu else features).reshape(-1, shape[2])
    used, labels = jnp.repeat(valid, drawn), jnp.repeat(jnp.arange(len(valid)), drawn)
    classes = valid if present else None

    def loss(head, index, mask):
        return cross_entropy(apply_head(head, features[index]), labels[index], mask=mask, classes=classes)

    def order(epoch):
        lots = jax.random.uniform(jax.random.fold_in(keys[1], epoch), labels.shape)
        return jnp.argsort(jnp.where(used, lots, 2))

    return train_in_passes(head, loss, order, used.sum(), optimiser, epochs=epochs, size=size)
