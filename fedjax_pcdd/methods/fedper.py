"""FedPer: base layers are averaged, the last layers stay with the client; both are trained together.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019.
Sent: the base layers each way, with their running statistics. A client keeps its last layers, at first the common ones.
Differs from FedRep in that it has no phases. Follows the paper with weights n_k and one personal layer, the classifier
(`layers=head,backbone/fc2` has two); momentum and weight decay act on all layers. GA is the mean over clients of their
best models on the global test set.
"""

from flax import struct

from fedjax_pcdd.methods.split_model import SplitModel


@struct.dataclass
class FedPer(SplitModel):
    """Cross-entropy; `layers` are personal."""

    def traits(self):
        """As of any model with parts of the client's own."""
        return super().traits()._replace(paper="Arivazhagan et al., 2019")

    def own(self, part):
        """The last layers."""
        return self.last(part)
