"""FedAvg: the weighted mean of the clients' models.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, algorithm 1.
Sent: the model (parameters and running statistics) each way. Clients keep nothing.
Follows the paper: weights n_k (`weights=batches` gives those of the FedMR and FedGELA codes).
"""

from flax import struct

from fedjax_pcdd.methods.method import Method, Traits


@struct.dataclass
class FedAvg(Method):
    """All hooks are the contract's defaults."""

    def traits(self):
        """The defaults, with the paper."""
        return Traits("McMahan et al., AISTATS 2017")
