"""FedProto: clients share class prototypes instead of models, and keep their features near them.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.
Sent: the prototypes [C, D] and which exist [C] down, the local ones and their counts [C] up. A client keeps its model.
Prototypes are averaged with equal weights, as in the published code (option: n_kc, the weights of the printed formula),
but computed under the final weights in eval mode (option: from the last epoch's features, as in the code). The
published evaluation by prototypes adds up two counts; ours counts once. Clients may have models of several
architectures (`models`) with the same number of features (`features`); models of one architecture start alike.
"""

from typing import Literal

from flax import struct

from fedjax_pcdd.methods.method import Message, hyperparameter
from fedjax_pcdd.methods.near_prototypes import NearPrototypes
from fedjax_pcdd.methods.prototypical import Selective
from fedjax_pcdd.models.classifier import forward


@struct.dataclass
class FedProto(NearPrototypes, Selective):
    """L = CE + lambda / (B D) * sum_b ||z_b - g_{y_b}||^2 on a model that never leaves its client."""

    prototype_weights: Literal["samples", "equal"] = hyperparameter(
        "equal", help="weights of the owners of a class in its prototype: n_kc, or equal", static=True
    )
    predict: Literal["classifier", "prototype"] = hyperparameter(
        "classifier",
        help="prediction by the client's classifier, or the nearest prototype (PA: of the client's own classes)",
        static=True,
    )

    def traits(self):
        """As for all methods that keep models near prototypes."""
        traits = self.kept(super().traits(), classifies=self.predict == "classifier")
        return traits._replace(paper="Tan et al., AAAI 2022")

    def download(self, server, client):
        """The client's own last model."""
        return self.begin(client, server)

    def upload(self, variables, summary, context):
        """Keep the model, send the prototypes."""
        model, prototypes = self.split(variables, summary)
        return model, Message(total=prototypes)

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        """Logits, or minus the distances to the prototypes, in PA to those of the client's own classes."""
        outputs, _ = forward(model, variables, images, train=False)
        if self.predict == "classifier":
            return outputs.logits
        return self.nearest(outputs.features, server, facts if scope == "personal" else None)
