"""SOLO: every client trains alone, round after round; nothing is sent.

The lower bound of the FedRL and FCCL papers (FedRL Table 1, FCCL Table 1).
Sent: nothing. A client keeps its whole model; all start from the same initial weights.
GA is the mean over clients of the accuracy on the global test set, PA that on the own test set.
"""

from typing import ClassVar

from flax import struct

from fedjax_pcdd.methods.method import Message, Method


@struct.dataclass
class Solo(Method):
    """Local training without communication."""

    paper: ClassVar[str] = "baseline of FedRL (Table 1) and FCCL (Table 1)"
    target: ClassVar[str] = "personal"
    global_model: ClassVar[bool] = False
    fine_tune: ClassVar[bool] = False

    def init_client(self, setting, server, facts, key):
        """The client's model, at first the common initial one."""
        return server.variables

    def download(self, server, client):
        """The client's own last model."""
        return client

    def upload(self, variables, summary, context):
        """Keep the model, send nothing."""
        return variables, Message()

    def aggregate(self, server, message, weights):
        """Nothing arrives, nothing changes."""
        return server

    def personal_variables(self, server, client):
        """The client's own last model."""
        return client
