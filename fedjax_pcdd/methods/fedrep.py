"""FedRep: a shared body, and a head of each client's own; in a round first the head is trained, then the body.

Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, algorithm 1.
Sent: the body each way. A client keeps its head, at first the common initial one.
Follows the paper. What is frozen in a phase does not move (no decay, no momentum), whereas the published code's head
may keep drifting; E counts both phases, as in that code (E - 1 for the head, 1 for the body), and its fine-tuning of
all heads after the last round is an option. GA is the mean over clients of their best models on the global test set.
"""

import dataclasses

from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Message, Method, Traits, hyperparameter
from fedjax_pcdd.methods.parts import joined, moving, without


@struct.dataclass
class FedRep(Method):
    """Cross-entropy: E_h epochs on the own head, then E_theta epochs on the shared body."""

    head_epochs: int | None = hyperparameter(
        None,
        symbol="E_h",
        help="epochs on the head in a round; by default what `local_epochs` leaves, at least 1",
        low=0,
        static=True,
    )
    body_epochs: int = hyperparameter(
        1, symbol="E_theta", help="epochs on the body in a round, after those on the head", low=0, static=True
    )
    fine_tune_heads: bool = hyperparameter(
        False,
        help="after the last round every client trains its head for E_h epochs, at least `fine_tune_epochs` (0: none)",
        static=True,
    )

    def traits(self):
        """E_h + E_theta epochs; PA is that of the round's shared body with the own head."""
        fields = {"target": "personal", "global_model": False, "personal_model": "server"}
        head, body = self.head_epochs, self.body_epochs
        epochs = {"epochs": None if head is None else head + body, "least_epochs": body + (head is None)}
        return Traits("Collins et al., ICML 2021", fine_tunes=self.fine_tune_heads, **fields, **epochs)

    def configure(self, setting, hyper):
        """UserError if there are no epochs to train."""
        if self.head_epochs == self.body_epochs == 0:
            raise UserError("FedRep has no epochs to train: make `head_epochs` or `body_epochs` at least 1.")
        return self, []

    def init_client(self, setting, server, facts, key):
        """The common initial head."""
        return server.variables["params"]["head"]

    def download(self, server, client):
        """The shared body with the own head."""
        return joined(server.variables, "head", client)

    def trainable(self, params, context):
        """The head in the first E_h epochs, then the body in the last E_theta."""
        on_head = context.epoch < context.epochs - self.body_epochs
        return moving(params, "head", on_head, others=~on_head)

    def upload(self, variables, summary, context):
        """Keep the head, send the body."""
        return variables["params"]["head"], Message(mean=without(variables, "head"))

    def aggregate(self, server, message, weights, context):
        """The mean body; the server's head stays the initial one, which is not used again."""
        return server._replace(variables=joined(message.mean, "head", server.variables["params"]["head"]))

    def personal_variables(self, server, client):
        """The shared body of this round with the own head."""
        return joined(server.variables, "head", client)

    def fine_tuner(self, setting, epochs):
        """Heads alone, for max(epochs, E_h) epochs."""
        head_epochs = max(1, setting.epochs - self.body_epochs) if self.head_epochs is None else self.head_epochs
        return dataclasses.replace(self, head_epochs=max(epochs, head_epochs), body_epochs=0)
