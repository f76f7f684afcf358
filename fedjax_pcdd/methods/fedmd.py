"""FedMD: participants with models of their own agree on the logits of public images.

Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS workshop 2019.
Sent: the logits of public images up, their mean down; no parameters. The FCCL paper speaks of the squared error, but
both published codes take the absolute one, as we do by default. `consensus=per_batch` computes the mean for every
public batch, as in FCCL's comparison; `per_round` once a round, from the models as they are then, as in the original.
The original begins with transfer learning: each participant learns to classify the public images, which are labelled,
and then its own, up to 25 epochs each in batches of 32. That is `transfer_epochs` with `pretrain_epochs` (all of them,
without early stopping) and `pretrain_batch_size`. There, the models' last layer has the public classes beside the
private ones; here, the public classes have a last layer of their own, which is dropped, and the private one is freshly
initialised.
"""

from typing import Literal

from flax import struct

from fedjax_pcdd.losses.distillation import absolute_error, squared_error
from fedjax_pcdd.methods.method import hyperparameter
from fedjax_pcdd.methods.participant import Exchanging
from fedjax_pcdd.models.classifier import forward


@struct.dataclass
class FedMD(Exchanging):
    """Public: mean |Z_i - Zbar| over batch and classes; private: cross-entropy."""

    distance: Literal["absolute", "squared"] = hyperparameter("absolute", help="error of the logits", static=True)
    consensus: Literal["per_batch", "per_round"] = hyperparameter(
        "per_batch", help="mean logits made for each public batch, or once a round in eval mode", static=True
    )

    transfer_epochs: int = hyperparameter(
        0, help="epochs on labelled public images before any other training", low=0, static=True
    )

    def traits(self):
        """The mean is computed for each batch, or once a round."""
        targets = "batch" if self.consensus == "per_batch" else "round"
        traits = super().traits()._replace(paper="Li and Wang, NeurIPS workshop 2019", targets=targets)
        return traits._replace(transfer_epochs=self.transfer_epochs)

    def say(self, variables, batch, context):
        """Logits [B, C], in training mode if the mean is computed batch by batch."""
        train = self.consensus == "per_batch"
        return forward(context.model, variables, batch.images, train=train, key=context.keys.dropout)[0].logits

    def public_loss(self, logits, target, context):
        """Distance of the logits [B, C] to the mean ones, a scalar."""
        return (absolute_error if self.distance == "absolute" else squared_error)(target, logits)
