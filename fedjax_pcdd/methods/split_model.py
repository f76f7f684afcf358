"""What FedPer and LG-FedAvg share: one model, of which some parts are averaged and the others stay with the client.

Both are trained together. A part is a layer, such as "backbone/fc2"; its running statistics go with its parameters.
"""

from collections.abc import Callable

from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Message, Method, Traits, Tree, hyperparameter


def divided(variables: Tree, own: Callable[[str], bool]) -> tuple[Tree, Tree]:
    """The leaves that `own` selects by their path in a collection, and the others; nested as before."""
    sides: tuple[Tree, Tree] = {}, {}
    for path, leaf in flatten_dict(variables, keep_empty_nodes=True).items():
        sides[0 if own("/".join(map(str, path[1:]))) else 1][path] = leaf
    return unflatten_dict(sides[0]), unflatten_dict(sides[1])


def united(one: Tree, other: Tree) -> Tree:
    """Variables with the parts of both trees; a part that is in both is taken from `other`."""
    leaves = [flatten_dict(tree, keep_empty_nodes=True) for tree in (one, other)]
    return unflatten_dict(leaves[0] | leaves[1])


@struct.dataclass
class SplitModel(Method):
    """FedAvg of some parts of a model; `own` says which parts are not sent."""

    layers: str = hyperparameter(
        "head",
        help="the last layers: head (the classifier), top (neck, feature norm and classifier), or names with commas "
        "between, as head,backbone/fc2",
        static=True,
        several=True,
    )
    record_ensemble: bool = hyperparameter(
        False, help="also record GA of all these models together, the mean of their softmax outputs", static=True
    )

    def traits(self):
        """PA is that of this round's shared parts with the client's own ones; GA is the mean over these models."""
        fields = {"target": "personal", "global_model": False, "fine_tunes": False, "personal_model": "server"}
        return Traits(**fields, ensemble=self.record_ensemble)

    def own(self, part: str) -> bool:
        """Whether the part at this path in a collection stays with the client."""
        raise NotImplementedError

    def last(self, part: str) -> bool:
        """Whether the part belongs to the last layers."""
        names = self.layers.split(",")
        return ("top" in names and not _within(part, "backbone")) or any(_within(part, name) for name in names)

    def init_client(self, setting, server, facts, key):
        """The common initial parts; UserError for a layer that the model does not have."""
        paths = ["/".join(map(str, path)) for path in flatten_dict(server.variables["params"])]
        for name in self.layers.split(","):
            if name != "top" and not any(_within(path, name) for path in paths):
                available = ", ".join(sorted({"/".join(path.split("/")[:-1][:2]) for path in paths}))
                raise UserError(f"names no layer by '{name}': choose head, top, or of {available}.", field="layers")
        return divided(server.variables, self.own)[0]

    def download(self, server, client):
        """The shared parts with the client's own ones."""
        return united(server.variables, client)

    def upload(self, variables, summary, context):
        """Keep the client's own parts, send the others."""
        client, shared = divided(variables, self.own)
        return client, Message(mean=shared)

    def aggregate(self, server, message, weights, context):
        """The mean of the shared parts; the server's others stay the initial ones, which are not used again."""
        return server._replace(variables=united(server.variables, message.mean))

    def personal_variables(self, server, client):
        """The shared parts of this round with the client's own ones."""
        return self.download(server, client)


def _within(path: str, name: str) -> bool:
    return f"{path}/".startswith(f"{name}/")
