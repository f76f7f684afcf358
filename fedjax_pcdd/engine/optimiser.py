"""The local optimiser, with the reference semantics of the papers' code; every number is traced."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pcdd.methods.method import Hyper
from fedjax_pcdd.trees import zeros_like


def clip_by_norm(limit) -> optax.GradientTransformation:
    """g * min(1, limit / (|g| + 1e-6)), |g| the norm over all leaves; the 1e-6 is the reference's."""

    def update(updates, state, params=None):
        return _shortened(updates, limit), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_adam() -> optax.GradientTransformationExtraArgs:
    """Adam, betas 0.9 and 0.999, whose moments and count of steps advance leaf by leaf.

    The update takes `moving`, a tree of booleans (traced or not): to a leaf that stands still a step never happened, so
    its bias correction begins when it begins to move. Without `moving` all leaves move.
    """
    adam = optax.scale_by_adam()

    def init(params):
        count: Any = jax.tree.map(lambda _: jnp.zeros((), jnp.int32), params)
        return optax.ScaleByAdamState(count, zeros_like(params), zeros_like(params))

    def update(updates, state, params=None, *, moving=None, **others):
        pairs = jax.tree.map(lambda g, *own: adam.update(g, optax.ScaleByAdamState(*own)), updates, *state)
        directions, after = jax.tree.transpose(jax.tree.structure(updates), None, pairs)
        if moving is not None:
            kept = (jax.tree.map(jnp.where, moving, new, old) for new, old in zip(after, state, strict=True))
            after = optax.ScaleByAdamState(*kept)
        return directions, after

    return optax.GradientTransformationExtraArgs(init, update)


def clip_apart(limit, parts: tuple[str, ...]) -> optax.GradientTransformation:
    """`clip_by_norm` of each of these parts of the parameters by itself, and of all others together."""

    def update(updates: Any, state, params=None):
        clipped = _shortened({name: tree for name, tree in updates.items() if name not in parts}, limit)
        return clipped | {part: _shortened(updates[part], limit) for part in parts}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _shortened(tree: Any, limit) -> Any:
    factor = jnp.minimum(1.0, limit / (optax.tree.norm(tree) + 1e-6))
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), tree)


def make_optimiser(
    name: str, hyper: Hyper, *, clip: bool, apart: tuple[str, ...] = ()
) -> optax.GradientTransformationExtraArgs:
    """SGD with heavy-ball momentum, or Adam; decay is added to the gradient (coupled), after clipping.

    Args:
      name: "sgd" (m = rho m + g, no dampening, no Nesterov) or "adam" (betas 0.9 and 0.999, eps 1e-8),
        whose update takes `moving`, as `scale_by_adam` has it.
      hyper: scalars.
      clip: static; False leaves the norm uncomputed.
      apart: parts of the parameters that are clipped each by itself.
    """
    inner = optax.trace(decay=hyper.momentum) if name == "sgd" else scale_by_adam()
    clipping = clip_apart(hyper.clip, apart) if apart else clip_by_norm(hyper.clip)
    steps = [clipping] if clip else []
    steps += [optax.add_decayed_weights(hyper.weight_decay), inner, optax.scale_by_learning_rate(hyper.lr)]
    return optax.with_extra_args_support(optax.chain(*steps))
