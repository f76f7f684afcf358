"""The local optimiser, with the reference semantics of the papers' code; every number is traced."""

import jax
import jax.numpy as jnp
import optax

from fedjax_pcdd.methods.method import Hyper


def clip_by_norm(limit) -> optax.GradientTransformation:
    """g * min(1, limit / (|g| + 1e-6)), |g| the norm over all leaves; the 1e-6 is the reference's."""

    def update(updates, state, params=None):
        factor = jnp.minimum(1.0, limit / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_optimiser(name: str, hyper: Hyper, *, clip: bool) -> optax.GradientTransformation:
    """SGD with heavy-ball momentum, or Adam; decay is added to the gradient (coupled), after clipping.

    Args:
      name: "sgd" (m = rho m + g, no dampening, no Nesterov) or "adam" (betas 0.9 and 0.999, eps 1e-8).
      hyper: scalars.
      clip: static; False leaves the norm uncomputed.
    """
    inner = optax.trace(decay=hyper.momentum) if name == "sgd" else optax.scale_by_adam()
    steps = [clip_by_norm(hyper.clip)] if clip else []
    steps += [optax.add_decayed_weights(hyper.weight_decay), inner, optax.scale_by_learning_rate(hyper.lr)]
    return optax.chain(*steps)
