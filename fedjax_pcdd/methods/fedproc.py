"""FedProc: features are pulled towards the global prototype of their class and pushed away from the other ones.

Mu et al., "FedProc: Prototypical Contrastive Federated Learning on Non-IID Data", FGCS 143, 2023.
Sent: as in FedAvg, and the prototypes [C, D] and which exist [C] down, per-class feature sums [C, D] and counts [C] up.
Clients keep nothing.
No official code is public. By default there is one weight mu for all rounds and the model common to all methods, as in
the comparison of the FedMR paper (Tables 9 and 10); options: the paper's schedule (`convex`) and its projection head.
The temperature of the paper is not confirmed; a public re-implementation has tau = 1, equal weights and the features of
the last epoch.
"""

from typing import Literal

import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.losses.contrastive import prototype_contrast
from fedjax_pcdd.methods.method import Message, hyperparameter
from fedjax_pcdd.methods.prototypical import Selective


@struct.dataclass
class FedProc(Selective):
    """L = CE + mu * L_gpc, or alpha_t * L_gpc + (1 - alpha_t) * CE with alpha_t = 1 - t / (T - 1)."""

    mu: float = hyperparameter(
        1e-4, symbol="mu", help="weight of the contrast in mode additive", low=0.0, needs={"mode": ("additive",)}
    )
    tau: float = hyperparameter(0.5, symbol="tau", help="temperature of the contrast", above=0.0)
    mode: Literal["additive", "convex"] = hyperparameter(
        "additive",
        help="cross-entropy plus mu times the contrast, or the paper's shift from contrast to it",
        static=True,
    )
    projection: int | None = hyperparameter(
        None, help="width of a two-layer projection head before the classifier; by default none", low=1, static=True
    )

    def traits(self):
        """As for all methods that send prototypes."""
        return super().traits()._replace(paper="Mu et al., FGCS 2023")

    def build(self, model):
        """The model, with a projection head if `projection` is set."""
        return model if self.projection is None else model.clone(neck=2, neck_width=self.projection)

    def _alpha(self, context):
        """alpha_t, from 1 in the first round to 0 in the last; 0 while there are no prototypes."""
        alpha = 1 - context.round / max(context.setting.rounds - 1, 1)
        return jnp.where(jnp.any(context.server.valid), alpha, 0.0)

    def classification(self, outputs, batch, context):
        """Mean cross-entropy, in mode convex times 1 - alpha_t."""
        value = super().classification(outputs, batch, context)
        return value if self.mode == "additive" else (1 - self._alpha(context)) * value

    def penalty(self, variables, outputs, batch, context):
        """mu * L_gpc, in mode convex alpha_t * L_gpc, a scalar."""
        server = context.server
        weight = self.mu if self.mode == "additive" else self._alpha(context)
        return weight * prototype_contrast(
            outputs.features, batch.labels, server.prototypes, server.valid, self.tau, mask=batch.mask
        )

    def upload(self, variables, summary, context):
        """The model, and the class sums of the features."""
        model, prototypes = self.split(variables, summary)
        return context.client, Message(mean=model, total=prototypes)

    def aggregate(self, server, message, weights, context):
        """The weighted mean of the models, and the merged prototypes."""
        return super().aggregate(server, message, weights, context)._replace(variables=message.mean)
