"""Pre-training of participants with models of their own, before the first round: each alone, by plain cross-entropy."""

from dataclasses import replace
from typing import Any

import numpy as np

from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine.groups import Groups
from fedjax_pcdd.engine.program import State, Tree
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.methods.participant import Participant
from fedjax_pcdd.methods.parts import joined

PRIVATE = np.iinfo(np.int32).max  # the round number for the draws of training on private images
PUBLIC = PRIVATE - 1  # and on public images


def pretrained(groups: Groups, state: State, epochs: int, batch_size: int, *, transfer: int = 0) -> State:
    """The state after every participant has trained its model on its own data.

    Args:
      state: before the first round.
      transfer: epochs on the labelled public images, before these.

    Raises:
      UserError: participants keep no models.
    """
    if not groups.traits.own_models:
        raise UserError("only methods whose participants keep their models are pre-trained: use `pretrain_epochs=0`.")
    clients, local = [], replace(groups.local, batch_size=batch_size)
    for g, group in enumerate(groups.groups):
        variables = _transferred(groups, g, replace(local, epochs=transfer)) if transfer else groups.initial(g)
        if epochs:
            federation = group.experiments[0].federation
            variables = _trained_alone(groups, g, variables, PRIVATE, federation, replace(local, epochs=epochs))
        clients.append(groups.states_of(g, variables))
    return state._replace(clients=tuple(clients))


def _transferred(groups: Groups, g: int, local: Local) -> Tree:
    """A group's models [K_g, ...] after training on the public images; their own heads stay as initialised.

    Public images have classes of their own, so the models train with another head, which is dropped.
    """
    public, labels, members = groups.public, groups.public_labels, len(groups.members[g])
    assert public is not None  # `Groups` has checked both
    assert labels is not None
    images = public.images
    data = Dataset("public", images, labels, images[:1], labels[:1], int(labels.max()) + 1)
    lists = ((np.arange(len(labels)),) * members, (np.arange(1),) * members)
    model = groups.groups[g].program.model.clone(num_classes=data.num_classes)
    first, federation = groups.initial(g, model), Federation(data, Partition(*lists))
    trained = _trained_alone(groups, g, first, PUBLIC, federation, local, model=model, pipeline=public.pipeline)
    return joined(trained, "head", groups.initial(g)["params"]["head"])


def _trained_alone(
    groups: Groups, g: int, variables: Tree, round: int, federation: Federation, local: Local, **options: Any
) -> Tree:
    """A group's models [K_g, ...] after training each alone on its part of the federation's data."""
    group = groups.groups[g]
    local = replace(local, local_steps=None, lr_steps=())
    own = {"federation": federation, "method": Participant(), "local": local, "whole": None}
    experiment = group.experiments[0]._replace(**own)
    alone = group.alike([experiment], len(groups.members[g]), **options)
    return alone.step(alone.start()._replace(clients=variables), round)[0].clients
