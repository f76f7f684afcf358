"""FedBABU: only the body is trained and averaged; the head stays as it was initialised until fine-tuning.

Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022.
Sent: the body each way; the random head once, before the first round. A client keeps nothing.
Follows the paper, also in the weights p_k = n_k / n; the published code averages uniformly (`weights=uniform`). PA:
every client fine-tunes the best global model for `fine_tune_epochs` (published code 5, FedGELA protocol 10). GA: that
of the global body under the initial head, or the mean over the fine-tuned models (`ga`).
"""

from typing import Literal

from flax import struct

from fedjax_pcdd.methods.method import Message, Method, Traits, hyperparameter
from fedjax_pcdd.methods.parts import FineTune, Part, joined, moving, without


@struct.dataclass
class FedBABU(Method):
    """FedAvg of the body under a fixed random head."""

    fine_tune_part: Part = hyperparameter("all", help="what fine-tuning for PA moves", static=True)
    ga: Literal["global", "mean_best_local"] = hyperparameter(
        "global",
        help="GA of the global model, or the mean over clients of their fine-tuned ones, each of which is kept",
        static=True,
    )

    def traits(self):
        """The paper optimises PA, by fine-tuning."""
        return Traits("Oh et al., ICLR 2022", target="personal")

    def trainable(self, params, context):
        """The body; the head takes no weight decay either."""
        return moving(params, "head", False, others=True)

    def upload(self, variables, summary, context):
        """The body."""
        return (), Message(mean=without(variables, "head"))

    def aggregate(self, server, message, weights, context):
        """The mean body under the initial head, which stays the same bit for bit."""
        return server._replace(variables=joined(message.mean, "head", server.variables["params"]["head"]))

    def fine_tuner(self, setting, epochs):
        """Fine-tuning of head and body, or of one of them."""
        return FineTune(part=self.fine_tune_part, keep=self.ga == "mean_best_local")
