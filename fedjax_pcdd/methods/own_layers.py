"""FedBN: every client keeps the parameters and running statistics of its normalisation layers; all else is averaged.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
An option for any method that averages one model. The engine keeps the layers (`Setting.own_layers`); what changes for
the method is its traits. Sent: as in the method, without these layers. There is no global model: GA is the mean over
the clients' models, PA that of the averaged part with the client's own layers; `ga_server_average` is that of the
averaged part with the mean of all clients' layers, weighted as their models. Extra terms of a method see the shared
parameters alone (ours): `Context.start` has own layers as they are now, and what a server or a client keeps of former
rounds leaves them out by `shared_part`. So with FedCM own layers follow the client's own gradient, and with FedSMOO
that of FedSAM. Weights are the method's (the published code's are equal: `weights=uniform`).
"""

import functools
from typing import Any, ClassVar

import jax
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Method, Setting, Tree
from fedjax_pcdd.methods.wrappers import Recipe, averages_models, recipe_of, remade
from fedjax_pcdd.trees import zeros_like

ABOUT_GA = (
    "GA is the mean over the clients' models, each of which answers as for its own classes; that of the shared parts "
    "is ga_server_average."
)


def shared_part(setting: Setting, tree: Tree, own: Tree = None) -> Tree:
    """The tree, with the leaves of `own` in place of the layers that stay with their clients.

    Args:
      tree: structured as the parameters.
      own: structured as the tree; None for zeros.
    """
    if not setting.own_layers:
        return tree

    def choose(path, shared, own):
        return own if tuple(key.key for key in path) in setting.own_layers else shared

    return jax.tree.map_with_path(choose, tree, zeros_like(tree) if own is None else own)


def with_own_layers(method: Method) -> Method:
    """The method of a run in which clients keep their normalisation layers; UserError if it has other models."""
    traits = method.traits()
    one_model = averages_models(method) and traits.personal_model != "server" and not traits.apart and not traits.pauses
    if not one_model:
        advice = "drop it, as its clients keep whole models" if traits.own_models else "use `bn=local`"
        raise UserError(
            f"`bn=local-layers` is for methods whose only model is the average of all, which {type(method).__name__}'s "
            f"is not: {advice}."
        )
    return _own(method)


def without_own_layers(method: Method) -> Method:
    """The method from which `with_own_layers` made this one; the method itself if it is not such a one."""
    recipe = vars(type(method)).get("_recipe")
    if not isinstance(recipe, Recipe) or recipe.function is not _derived:
        return method
    return recipe.args[0](**vars(method))


def _own(method: Method) -> Method:
    return _derived(type(method))(**vars(method))


@functools.cache
def _derived(cls: type[Method]) -> type[Method]:
    @struct.dataclass
    class OwnLayers(cls):
        _recipe: ClassVar[Any] = Recipe(_derived, (cls,))

        def configure(self, setting, hyper):
            """As for the plain method, whose own checks may need a global model."""
            plain, advice = cls(**vars(self)).configure(setting, hyper)
            traits = plain.traits()
            if traits.target == "both" and not traits.fine_tunes:
                advice = [*advice, ABOUT_GA]
            return _own(plain), advice

        def traits(self):
            """Without a global model, and with personal models that are tested between rounds."""
            fields = {"target": "personal", "global_model": False, "fine_tunes": False, "personal_model": "server"}
            return super().traits()._replace(**fields)

        def __reduce__(self):
            return remade, (recipe_of(type(self)), vars(self))

    OwnLayers.__name__ = OwnLayers.__qualname__ = f"{cls.__name__}WithOwnLayers"
    return OwnLayers
