"""FedRL: while a client trains, it reviews one layer after another against the received model.

"Review learning" (no code is published). Each batch adds the distance between the outputs of one layer of the local
and of the received model; the next batch takes the next layer, and each local training starts at the first one again.
Sent: as in FedAvg. A client keeps nothing between rounds (it holds the received model while it trains).
Follows the paper's algorithm where its text differs (the layer advances with each batch, `cycle`); cross-entropy and
review are batch means. The paper trains without shuffling and with momentum 1e-4: `shuffle=false`, `momentum=1e-4`.
"""

import warnings
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.losses.contrastive import ROUNDING, review_distance
from fedjax_pcdd.methods.method import Method, Traits, hyperparameter, objective
from fedjax_pcdd.models.classifier import layers

UNSEEN = (
    "the backbone offers no layers, so FedRL reviews the logits alone: call self.sow('intermediates', 'layers', x) on "
    "what each layer gives."
)


@struct.dataclass
class FedRL(Method):
    """L = CE + (mu / 2) * R_m, with layer m = step mod M."""

    mu: float = hyperparameter(0.001, symbol="mu", help="weight of the review term", low=0.0)
    distance: Literal["per_sample", "batch_norm", "squared"] = hyperparameter(
        "per_sample",
        symbol="R_m",
        help="mean over the samples of their norms, their Frobenius norm over the batch, or the mean of squared norms",
        static=True,
    )
    cycle: Literal["batch", "round"] = hyperparameter(
        "batch", help="the layer advances with each batch (algorithm) or with each round (text)", static=True
    )
    received_mode: Literal["eval", "train"] = hyperparameter(
        "eval", help="batch norm of the received model: running or batch statistics", static=True
    )

    def traits(self):
        """FedAvg's traits, with the paper."""
        return Traits("FedRL (review learning)")

    def loss(self, variables, batch, context):
        """CE + (mu / 2) * R_m, a scalar, and the new running statistics."""
        run = partial(layers, context.model, x=batch.images, mask=batch.mask, key=context.keys.dropout)
        local, outputs, state = run(variables, train=True)
        received, _, _ = run(context.received, train=self.received_mode == "train")
        pairs = zip(local, received, strict=True)
        rounding = jnp.where(context.step == 0, ROUNDING, 0.0)  # both models are equal at the first step
        review_of = partial(review_distance, distance=self.distance, rounding=rounding, mask=batch.mask)
        reviews = [partial(review_of, *pair) for pair in pairs]
        if len(reviews) == 1:
            warnings.warn(UNSEEN, stacklevel=2)
        index = context.step if self.cycle == "batch" else context.round
        review = jax.lax.switch(index % len(reviews), reviews)
        return objective(self, variables, outputs, batch, context) + 0.5 * self.mu * review, state
