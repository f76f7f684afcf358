"""RCFL: participants train, score public images, and distil from scores that the server gathers over the rounds.

Resource-constrained federated learning with heterogeneous labels and models, a baseline of FCCL (CVPR 2022).
A RECONSTRUCTION: no code was published; this follows the algorithm's statement as it is known, for equal label sets and
unlabelled public images. Sent: N C scores each way; no parameters.
By default the scores keep their scale, S = mean_i (S + alpha_i F_i) / (1 + alpha_i), alpha_i = n_i / N, over all
participants; the literal S_c = mean over the owners of c of S_c + alpha_i F_ic, which have equal weights, grows from
round to round: `scores=literal`.
"""

from typing import Literal

import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.losses.distillation import absolute_error, kl_to_teacher
from fedjax_pcdd.methods.method import hyperparameter
from fedjax_pcdd.methods.participant import Exchanging
from fedjax_pcdd.models.classifier import forward


@struct.dataclass
class RCFL(Exchanging):
    """Private: cross-entropy; then, public: the distance of the logits to the gathered scores."""

    scores: Literal["bounded", "literal"] = hyperparameter("bounded", help="how scores are gathered", static=True)
    distance: Literal["absolute", "kl"] = hyperparameter(
        "absolute", help="distance to the scores: mean absolute error, or KL of the softmaxes", static=True
    )

    def traits(self):
        """The scores of all public images are computed once a round, after local training."""
        paper = "baseline of FCCL, reconstructed"
        return super().traits()._replace(paper=paper, exchange="after", personal_model="server", targets="round")

    def init_public(self, setting, images):
        """S [N, C], zeros."""
        return jnp.zeros((images, setting.num_classes))

    def say(self, variables, batch, context):
        """F_i, the logits in eval mode."""
        return forward(context.model, variables, batch.images, train=False)[0].logits

    def agree(self, public, spoken, counts):
        """The new scores, the same for all."""
        alpha = (counts.sum(1) / public.shape[0])[:, None, None]
        if self.scores == "bounded":
            gathered = ((public + alpha * spoken) / (1 + alpha)).mean(0)
        else:
            owners = (counts > 0)[:, None, :]
            total = jnp.where(owners, public + alpha * spoken, 0).sum(0)
            gathered = jnp.where(owners.any(0), total / jnp.maximum(owners.sum(0), 1), public)
        gathered = gathered.astype(public.dtype)
        return gathered, jnp.broadcast_to(gathered, spoken.shape)

    def public_loss(self, logits, target, context):
        """Distance of the logits [B, C] to the scores, a scalar."""
        return absolute_error(target, logits) if self.distance == "absolute" else kl_to_teacher(target, logits)
