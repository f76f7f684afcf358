"""A model whose features are its inputs, for tests of one method's loss on given features and a given head."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.methods.method import Batch, Context, Facts, Keys, Local, Setting
from fedjax_pcdd.models.classifier import Classifier


class Inputs(nn.Module):
    """Features [B, D] are the inputs [B, D]."""

    @nn.compact
    def __call__(self, x, *, train, mask=None):
        return x


def dense(weights, bias=None):
    """A layer from weights [C, D] and a bias [C]."""
    layer = {"kernel": jnp.asarray(np.transpose(weights))}
    return layer if bias is None else layer | {"bias": jnp.asarray(bias)}


def context(method, counts, *, features, epochs=2, epoch=0, everyone=None):
    """The context of a client with class counts [C]; `everyone` are the counts of all clients, [K, C]."""
    counts = jnp.asarray(counts, jnp.result_type(float))
    everyone = counts[None] if everyone is None else jnp.asarray(everyone, counts.dtype)
    model = method.build(Classifier(Inputs(), len(counts), param_dtype=counts.dtype))
    setting = Setting(len(counts), features, 1, 3, epochs, 4, False)
    facts = Facts(jnp.zeros((), int), counts, counts.sum(), everyone)
    local = Local(
        lr=jnp.asarray(0.1), momentum=jnp.asarray(0.9), weight_decay=jnp.asarray(0.0), clip=jnp.asarray(jnp.inf)
    )
    step, keys = jnp.zeros((), int), Keys.of(jax.random.key(0))
    epoch, epochs = jnp.asarray(epoch), jnp.asarray(epochs)
    return Context(model, setting, local, (), (), (), facts, epoch, epochs, step, step, keys)


def loss(method, layers, features, labels, counts, **facts):
    """The method's local objective of a batch.

    Args:
      layers: the parameters, as {"head": dense(...)}.
    """
    labels = jnp.asarray(labels, jnp.int32)
    batch = Batch(features, labels, jnp.ones(labels.shape))
    return method.loss({"params": layers}, batch, context(method, counts, features=features.shape[-1], **facts))[0]


def loss_and_gradients(method, layers, features, labels, counts, **facts):
    """The objective with its gradients for (layers, features)."""

    def objective(layers, features):
        return loss(method, layers, features, labels, counts, **facts)

    return jax.value_and_grad(objective, argnums=(0, 1))(layers, jnp.asarray(features))
