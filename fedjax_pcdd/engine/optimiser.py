"""The local optimiser, with the reference semantics of the papers' code; every number is traced."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from fedjax_pcdd.methods.method import Local


def by_leaf(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """An optimiser (momentum, Adam) whose state, a NamedTuple of trees, advances leaf by leaf, counts of steps too.

    The update takes `moving`, a tree of booleans (traced or not): for a leaf that stands still the step never happened,
    so Adam's bias correction begins when it begins to move. Without `moving` all leaves move.
    """

    def init(params):
        return jax.tree.transpose(jax.tree.structure(params), None, jax.tree.map(inner.init, params))

    def update(updates, state: Any, params=None, *, moving=None, **others):
        pairs = jax.tree.map(lambda g, *leaf: inner.update(g, type(state)(*leaf)), updates, *state)
        directions, after = jax.tree.transpose(jax.tree.structure(updates), None, pairs)
        if moving is not None:
            fields = (jax.tree.map(jnp.where, moving, new, old) for new, old in zip(after, state, strict=True))
            after = type(state)(*fields)
        return directions, after

    return optax.GradientTransformationExtraArgs(init, update)


def clip_by_norm(limit, apart: tuple[str, ...] = ()) -> optax.GradientTransformation:
    """g * min(1, limit / (|g| + 1e-6)), |g| the norm over all leaves; the 1e-6 is that of the reference code.

    Each part of the parameters that `apart` names is clipped by itself.
    """

    def shortened(tree: Any) -> Any:
        factor = jnp.minimum(1.0, limit / (optax.tree.norm(tree) + 1e-6))
        return jax.tree.map(lambda g: (g * factor).astype(g.dtype), tree)

    def update(updates: Any, state, params=None):
        if not apart:
            return shortened(updates), state
        clipped = shortened({name: tree for name, tree in updates.items() if name not in apart})
        return clipped | {part: shortened(updates[part]) for part in apart}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def add_after_clipping(weight_decay) -> optax.GradientTransformationExtraArgs:
    """Adds the decayed weights and, if an update is given it, `unclipped`, a tree like the parameters."""
    decay = optax.add_decayed_weights(weight_decay)

    def update(updates, state, params=None, *, unclipped=None, **others):
        updates, state = decay.update(updates, state, params)
        return (updates if unclipped is None else optax.tree.add(updates, unclipped)), state

    return optax.GradientTransformationExtraArgs(decay.init, update)


def make_optimiser(local: Local, *, clip: bool, apart: tuple[str, ...] = ()) -> optax.GradientTransformationExtraArgs:
    """SGD with heavy-ball momentum (m = rho m + g, no dampening, no Nesterov), or Adam (0.9, 0.999, eps 1e-8).

    Decay is added to the gradient (coupled), after clipping. The update takes `moving` as in `by_leaf`, and `unclipped`
    as in `add_after_clipping`.

    Args:
      local: its floats are scalars.
      clip: static; if False, the norm is not computed.
      apart: parts of the parameters that are each clipped by themselves.
    """
    inner = by_leaf(optax.trace(local.momentum) if local.optimizer == "sgd" else optax.scale_by_adam())
    steps = [clip_by_norm(local.clip, apart)] if clip else []
    steps += [add_after_clipping(local.weight_decay), inner, optax.scale_by_learning_rate(local.lr)]
    return optax.chain(*steps)
