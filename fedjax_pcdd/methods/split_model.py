"""What FedPer and LG-FedAvg share: one model, of which some parts are averaged and the others stay with the client.

Both are trained together. A part is a top-level entry of each collection: the running statistics of a part go with it.
"""

from collections.abc import Callable
from typing import Literal

from flax import struct

from fedjax_pcdd.methods.method import Message, Method, Traits, Tree, hyperparameter

Top = Literal["head", "top"]
BODY = "backbone"


def divided(variables: Tree, own: Callable[[str], bool]) -> tuple[Tree, Tree]:
    """The parts that are a client's own, by name, and the others; each with the collections that it has."""
    sides: tuple[Tree, Tree] = {}, {}
    for collection, parts in variables.items():
        for name, tree in parts.items():
            sides[0 if own(name) else 1].setdefault(collection, {})[name] = tree
    return sides


def united(one: Tree, other: Tree) -> Tree:
    """Variables with the parts of both; where both have one, that of `other`."""
    return {name: {**one.get(name, {}), **other.get(name, {})} for name in sorted({*one, *other})}


@struct.dataclass
class SplitModel(Method):
    """FedAvg of some parts of a model; `own` says which ones are not sent."""

    layers: Top = hyperparameter(
        "head", help="the classifier, or all that follows the backbone (neck, feature norm, classifier)", static=True
    )
    record_ensemble: bool = hyperparameter(
        False, help="also record GA of all these models together, the mean of their softmax outputs", static=True
    )

    def traits(self):
        """PA of the shared parts of this round with the own ones; GA is the mean of these models'."""
        kinds = {"target": "personal", "global_model": False, "fine_tunes": False, "personal_model": "server"}
        return Traits(**kinds, ensemble=self.record_ensemble)

    def own(self, part: str) -> bool:
        """Whether a part of this name stays with the client."""
        raise NotImplementedError

    def last(self, part: str) -> bool:
        """Whether it is one of the last layers."""
        return part == "head" if self.layers == "head" else part != BODY

    def init_client(self, setting, server, facts, key):
        """The common initial parts."""
        return divided(server.variables, self.own)[0]

    def download(self, server, client):
        """The shared parts with the own ones."""
        return united(server.variables, client)

    def upload(self, variables, summary, context):
        """Keep the own parts, send the others."""
        own, shared = divided(variables, self.own)
        return own, Message(mean=shared)

    def aggregate(self, server, message, weights, context):
        """The mean of the shared parts; the server's others stay the initial ones, which are not used again."""
        return server._replace(variables=united(server.variables, message.mean))

    def personal_variables(self, server, client):
        """The shared parts of this round with the own ones."""
        return self.download(server, client)
