"""LG-FedAvg: every client keeps a representation of its own; only the last layers are averaged.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations", 2020.
Sent: the last layers each way; one by default, where the published CNN shares two (`layers=head,backbone/fc2`). A
client keeps the others and their running statistics, at first the common ones.
Weights are n_k, as in the paper; the published code averages uniformly (`weights=uniform`) and begins with a model
trained by FedAvg, where ours begins with the common initial one. Clients that are not selected get the new last layers,
too. GA is the mean over clients of their best models on the global test set; the published ensemble of all models, for
unknown users, is an option and recorded beside it (`ga_ensemble`).
"""

from flax import struct

from fedjax_pcdd.methods.split_model import SplitModel


@struct.dataclass
class LGFedAvg(SplitModel):
    """Cross-entropy; all but `layers` are personal."""

    def traits(self):
        """As for any model with parts of the client's own."""
        return super().traits()._replace(paper="Liang et al., 2020")

    def own(self, part):
        """All but the last layers."""
        return not self.last(part)
