"""SOLO: every client trains alone, round after round; nothing is sent.

The lower bound of the FedRL and FCCL papers (FedRL Table 1, FCCL Table 1).
Sent: nothing. A client keeps its whole model; all start from the same initial weights, or each from its own in a task
by domain, with several architectures, and if participants are pre-trained. GA is the mean over clients of the
accuracy on the global test set, PA that on the client's own test set.
"""

from flax import struct

from fedjax_pcdd.methods.participant import Participant


@struct.dataclass
class Solo(Participant):
    """Local training without communication."""

    def traits(self):
        """As for all participants."""
        return super().traits()._replace(paper="baseline of FedRL (Table 1) and FCCL (Table 1)")
