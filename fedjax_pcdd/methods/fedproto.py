"""FedProto: clients share class prototypes instead of models, and keep their features near them.

Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.
Sent: the prototypes [C, D] and which exist [C] down, the local ones and their counts [C] up. A client keeps its model.
Prototypes are averaged with equal weights, as in the published code (option: n_kc, the weights of the printed formula),
but taken under the final weights in eval mode (option: the last epoch's features, as the code has it). The published
evaluation by prototypes adds up two countings; ours counts once. Server and clients begin with the same model.
"""

from typing import Literal

from flax import struct

from fedjax_pcdd.losses.prototypes import nearest_prototype_scores, squared_distance_to_own
from fedjax_pcdd.methods.method import Message, hyperparameter
from fedjax_pcdd.methods.prototypical import Selective
from fedjax_pcdd.models.classifier import forward


@struct.dataclass
class FedProto(Selective):
    """L = CE + lambda / (B D) * sum_b ||z_b - g_{y_b}||^2 on a model that never leaves its client."""

    lam: float = hyperparameter(1.0, symbol="lambda", help="weight of the distance to the prototypes", low=0.0)
    prototype_weights: Literal["samples", "equal"] = hyperparameter(
        "equal", help="weights of the owners of a class in its prototype: n_kc, or equal", static=True
    )
    predict: Literal["classifier", "prototype"] = hyperparameter(
        "classifier",
        help="prediction by the client's classifier, or the nearest prototype (PA: of the client's own classes)",
        static=True,
    )

    def traits(self):
        """No model is shared; prediction by prototypes needs those that the round has just made."""
        personal = "local" if self.predict == "classifier" else "server"
        kinds = {"target": "personal", "global_model": False, "fine_tunes": False, "personal_model": personal}
        return super().traits()._replace(paper="Tan et al., AAAI 2022", **kinds)

    def init_client(self, setting, server, facts, key):
        """The client's model, at first the common initial one."""
        return server.variables

    def download(self, server, client):
        """The client's own last model."""
        return self.begin(client, server)

    def penalty(self, variables, outputs, batch, context):
        """lambda times the mean squared distance to the prototypes, a scalar."""
        server = context.server
        return self.lam * squared_distance_to_own(
            outputs.features, batch.labels, server.prototypes, server.valid, mask=batch.mask
        )

    def upload(self, variables, summary, context):
        """Keep the model, send the prototypes."""
        model, prototypes = self.split(variables, summary)
        return model, Message(total=prototypes)

    def personal_variables(self, server, client):
        """The client's own last model."""
        return client

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        """Logits, or minus the distances to the prototypes, in PA to those of the client's own classes."""
        outputs, _ = forward(model, variables, images, train=False)
        if self.predict == "classifier":
            return outputs.logits
        allowed = server.valid
        if scope == "personal" and facts is not None:
            allowed = allowed & (facts.class_counts > 0)
        return nearest_prototype_scores(outputs.features, server.prototypes, allowed)
