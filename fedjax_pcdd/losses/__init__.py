"""Losses as pure functions of arrays; they know nothing of models, methods or clients.

Letters: B samples of a batch, C classes, D feature dimensions, K clients. What a docstring does not say otherwise:
`logits` are [B, C], `features` [B, D] as the head reads them, not normalised, `labels` [B] integers in [0, C),
`class_counts` [C] training samples of the client, and `num_classes` is C, static. A loss is a scalar, and takes `mask`
[B], bool or 0/1 (None: all samples count); a sample with mask 0 is as good as removed, for the value and the gradient,
if its numbers are finite.
Sums are done in float32 or better and matrix products at full precision, whatever the dtype of the features. A form,
rule or treatment that a function does not know raises `UserError`.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from fedjax_pcdd.errors import UserError, nearest

Mask = jax.Array | None
Number = jax.Array | float


def check(name: str, known: Iterable[str], what: str) -> None:
    """UserError, with the nearest known name, for a name that is not known; `what` as "form of the ensemble"."""
    if name not in known:
        kind, _, whole = what.partition(" of ")
        raise UserError(f"Unknown {kind} '{name}' of {whole}: {nearest(name, known)}")


def precise(x: jax.Array) -> jax.Array:
    """The same numbers in float32 or better."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
