"""A second model, the client's own, of the same architecture, which is trained beside the global one.

Its parameters are the part "personal" of the parameters, so that `Traits.apart` clips them separately; its running
statistics are the collection "personal". The global model ignores both.
"""

from flax import struct

from fedjax_pcdd.methods.method import Message, Method, Tree
from fedjax_pcdd.methods.parts import joined, without, without_collection
from fedjax_pcdd.models.classifier import forward

PERSONAL = "personal"


def with_copy(variables: Tree, own: Tree) -> Tree:
    """The variables of the global model, with those of the client's own model beside them."""
    return {**joined(variables, PERSONAL, own["params"]), PERSONAL: without_collection(own, "params")}


def copy_of(variables: Tree) -> Tree:
    """The variables of the client's own model."""
    return {**variables[PERSONAL], "params": variables["params"][PERSONAL]}


def without_copy(variables: Tree) -> Tree:
    """The variables of the global model."""
    return without_collection(without(variables, PERSONAL), PERSONAL)


@struct.dataclass
class PersonalCopy(Method):
    """FedAvg whose clients also train and keep a model of their own beside the global one."""

    def init_client(self, setting, server, facts, key):
        """The client's own model, at first the common initial one."""
        return server.variables

    def download(self, server, client):
        """The global model and the own one."""
        return with_copy(server.variables, client)

    def upload(self, variables, summary, context):
        """Keep the own model, send the global one."""
        return copy_of(variables), Message(mean=without_copy(variables))

    def personal_variables(self, server, client):
        """The global model and the own one."""
        return self.download(server, client)

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        """Logits of the global model, or of the client's own one."""
        tree = variables if scope == "generic" else copy_of(variables)
        return forward(model, tree, images, train=False)[0].logits
