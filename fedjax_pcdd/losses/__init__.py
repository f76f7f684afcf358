"""Losses as pure functions of arrays; they know nothing of models, methods or clients.

Letters: B samples of a batch, C classes, D feature dimensions, K clients. Unless a docstring says otherwise, `logits`
are [B, C], `features` [B, D] as the head reads them, not normalised, `labels` [B] integers in [0, C), `class_counts`
[C] training samples of the client, and `num_classes` is C, static. A loss is a scalar, and takes `mask` [B], bool or
0/1 (None: all samples count); a sample with mask 0 and finite numbers has no effect on the value or the gradient.
Sums are computed in float32 or better and matrix products at full precision, whatever the dtype of the features. An
unknown form, rule or treatment raises a `UserError`.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from fedjax_pcdd.errors import UserError, nearest

Mask = jax.Array | None
Number = jax.Array | float


def check(name: str, known: Iterable[str], what: str) -> None:
    """Raise a UserError, with the nearest known name, for an unknown name; `what` is like "form of the ensemble"."""
    if name not in known:
        kind, _, whole = what.partition(" of ")
        raise UserError(f"Unknown {kind} '{name}' of {whole}: {nearest(name, known)}")


def without_masked(x: jax.Array, mask: Mask) -> jax.Array:
    """Set the rows of x [..., B, D] with mask [B] 0 to zero, as what overflows there has NaN as its gradient."""
    return x if mask is None else jnp.where(mask.astype(bool)[:, None], x, 0)


def precise(x: jax.Array) -> jax.Array:
    """Cast to float32 or better."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
