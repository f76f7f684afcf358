"""The models of one experiment between two rounds: the server's, the clients', and their outputs on images.

Letters: K clients, C classes, D features, n images.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from numpy.typing import ArrayLike

from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.engine.groups import Groups, of_group
from fedjax_pcdd.engine.program import State, Tree, with_own
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Method
from fedjax_pcdd.models.classifier import Classifier, Outputs, forward
from fedjax_pcdd.trees import select


class Part(NamedTuple):
    """The clients of one architecture; `group` is its number, None if there is only one simulation."""

    simulation: Simulation
    members: Sequence[int]
    group: int | None

    def of(self, state: State) -> State:
        """The part of the state that belongs to these clients."""
        return state if self.group is None else of_group(state, self.group)


def parts_of(simulation: Any) -> list[Part]:
    """The architectures of a `Simulation` or of `Groups`."""
    if not isinstance(simulation, Groups):
        return [Part(simulation, range(simulation.federations[0].num_clients), None)]
    pairs = zip(simulation.groups, simulation.members, strict=True)
    return [Part(group, members, g) for g, (group, members) in enumerate(pairs)]


def _answered(ask: Callable[[], jax.Array], plain: Callable[[], Outputs]) -> Outputs:
    """The logits that a method returns, and the features of the model that it runs for them (of several, the first).

    `plain` runs the model as it is, for a method that runs none, or only within a transformation such as `jax.vmap`.
    """
    model_outputs: list[Outputs] = []

    def note(call, args, kwargs, context):
        result = call(*args, **kwargs)
        is_model = isinstance(context.module, Classifier) and context.method_name == "__call__"
        if is_model and not isinstance(result.features, Tracer):
            model_outputs.append(result)
        return result

    with nn.intercept_methods(note):
        logits = ask()
    return Outputs((model_outputs or [plain()])[0].features, logits)


class TrainedModels:
    """What runs and histories have in common; subclasses set or compute these attributes.

    Attributes:
      label: name of the experiment in messages.
      index: index of the experiment in its simulation.
      state: its servers [1, ...], clients and statistics [K, ...].
    """

    label: str
    method: Method
    federation: Federation
    simulation: Any
    state: Any
    index: int = 0

    @property
    def model(self) -> Classifier:
        """The module that was trained, as the method built it."""
        return self._trained(0)[0].program.model

    @property
    def variables(self) -> Tree:
        """Variables of the global model; UserError if the method has none."""
        if not self.method.traits().global_model:
            raise UserError(f"{self.label} has no global model: take client_variables(k), or give client=k.")
        return self.method.generic_variables(self._trained(0)[1])

    def client_variables(self, client: int) -> Tree:
        """Variables of a client's model between rounds: its own if the method keeps one, else the global model's.

        If it keeps one alongside the global model (Ditto, APFL), that is the part "personal" of these parameters.
        """
        _, server, state, _ = self._trained(client)
        return with_own(self.method.personal_variables(server, state.clients), state.statistics)

    def outputs(self, images: ArrayLike, client: int | None = None) -> Outputs:
        """Features [n, D] and logits [n, C] of images, both from the model that answers.

        If a method mixes the logits of several models, as APFL with `mix=logits`, the features are the first one's.

        Args:
          images: [n, H, W, channels] as in the data set; [n, H, W] or [n, D] if that was made from such.
          client: whose model; None for the global one.
        """
        simulation, server, state, row = self._trained(0 if client is None else client)
        program, method = simulation.program, self.method
        images = self._images(images)
        x = prepare(program.pipeline, jnp.asarray(images), None, train=False, dtype=program.dtype)
        variables, client_options = self.variables if client is None else self.client_variables(client), {}
        if client is not None:
            facts = program.facts_of(simulation.data, row)
            client_options: Any = {"client": state.clients, "facts": facts, "scope": "personal"}
        return _answered(
            lambda: method.logits(program.model, variables, x, server, **client_options),
            lambda: forward(program.model, variables, x, train=False)[0],
        )

    def _images(self, images: ArrayLike) -> np.ndarray:
        """Images [n, H, W, channels] in the form of the training images; UserError if they do not have it."""
        array, image_shape = np.asarray(images), self.federation.image_shape
        if array.ndim > 1 and array.shape[1:] == tuple(size for size in image_shape if size > 1):
            array = array.reshape(len(array), *image_shape)  # the axes that `from_arrays` added
        if not len(array.shape) or not array.size or array.dtype.kind not in "biuf" or array.shape[1:] != image_shape:
            shape = ", ".join(map(str, image_shape))
            kind = f"{array.dtype} {list(array.shape)}"
            raise UserError(f"takes at least one image as those of the data set, [n, {shape}], not {kind}.", "images")
        if self.federation.dataset.x_train.dtype == np.uint8 and array.dtype.kind in "biu":
            if array.min() < 0 or array.max() > 255:
                raise UserError("takes integers from 0 to 255, as in the data set, or scaled numbers.", "images")
            array = array.astype(np.uint8)  # which is later scaled to [0, 1]
        elif self.federation.dataset.x_train.dtype == np.uint8 and not ((array >= 0) & (array <= 1)).all():
            raise UserError("takes the data set's integers from 0 to 255, or these scaled to [0, 1].", "images")
        return array

    def _trained(self, client: int) -> tuple[Simulation, Tree, State, int]:
        """The simulation that trains a client, its server, the client's state, and its row."""
        clients = self.federation.num_clients
        if not isinstance(client, int | np.integer) or not 0 <= client < clients:
            raise UserError(f"there is no client {client}: choose one in [0, {clients}).")
        part = next(part for part in parts_of(self.simulation) if client in part.members)
        state, position = part.of(self.state), part.members.index(client)
        row = position if part.group is not None else self.index * clients + client
        own = State((), *select((state.clients, state.statistics), position))
        return part.simulation, select(state.servers, 0), own, row
