"""Parts of a model's variables: head, body (all but the head), and parts that a method adds.

A part is a top-level entry of variables["params"], such as "head"; the model ignores entries that it does not know.
"""

from typing import Any, Literal

import jax
from flax import struct

from fedjax_pcdd.methods.method import Message, Method, Traits, Tree, hyperparameter

Part = Literal["all", "head", "body"]
PersonalModel = Literal["local", "server"]
SEEN = "seen"  # a collection of the variables in which a client sums what it sees while it trains


def protocol_of(pa_model: PersonalModel | None) -> Literal["last", "received"] | None:
    """The protocol that measures PA on the model just trained (local), or on the aggregated one (server)."""
    return {None: None, "local": "last", "server": "received"}[pa_model]


def without(variables: Tree, part: str) -> Tree:
    """The variables without one part of their parameters."""
    return {**variables, "params": {name: tree for name, tree in variables["params"].items() if name != part}}


def without_collection(variables: Tree, collection: str) -> Tree:
    """The variables without one of their collections."""
    return {name: tree for name, tree in variables.items() if name != collection}


def joined(variables: Tree, part: str, value: Tree) -> Tree:
    """The variables with `value` as one part of their parameters; it replaces a part of the same name."""
    return {**variables, "params": {**variables["params"], part: value}}


def moving(params: Tree, part: str, moves: Any, *, others: Any) -> Tree:
    """What `Method.trainable` returns if one part and the others each move or stay fixed; the flags may be traced."""
    flags = {name: moves if name == part else others for name in params}
    return {name: jax.tree.map(lambda _, name=name: flags[name], tree) for name, tree in params.items()}


@struct.dataclass
class PersonalHead(Method):
    """FedAvg whose clients also train and keep a head of their own, the part "personal", beside the global model."""

    def init_client(self, setting, server, facts, key):
        """The personal head: kernel [D, C] and bias [C], those of the global one."""
        return server.variables["params"]["head"]

    def download(self, server, client):
        """The global model and the personal head beside it."""
        return joined(server.variables, "personal", client)

    def upload(self, variables, summary, context):
        """Keep the personal head, send the rest."""
        return variables["params"]["personal"], Message(mean=without(variables, "personal"))

    def personal_variables(self, server, client):
        """The global model and the personal head."""
        return self.download(server, client)


@struct.dataclass
class FineTune(Method):
    """Plain cross-entropy on a part of the received model: how clients fine-tune after the last round."""

    part: Part = hyperparameter("all", help="parameters that move", static=True)
    keep: bool = hyperparameter(False, help="each client keeps its model, to be tested on all classes", static=True)

    def traits(self):
        """If the clients keep their models, these are tested in place of a global one."""
        return Traits(global_model=not self.keep)

    def init_client(self, setting, server, facts, key):
        """The received model, if it is to be kept."""
        return server.variables if self.keep else ()

    def trainable(self, params, context):
        """The chosen part."""
        return None if self.part == "all" else moving(params, "head", self.part == "head", others=self.part == "body")

    def upload(self, variables, summary, context):
        """As in FedAvg; the model stays with the client, if it is to be kept."""
        return variables if self.keep else (), Message(mean=variables)

    def personal_variables(self, server, client):
        """The fine-tuned model, or the received one."""
        return client if self.keep else server.variables
