"""The models of one experiment between two rounds: the server's, the clients', and what they say of images.

Letters: K clients, C classes, D features, n images.
"""

from typing import Any

import jax.numpy as jnp
from numpy.typing import ArrayLike

from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.engine.groups import Groups
from fedjax_pcdd.engine.program import State, Tree, facts_of, running
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Method
from fedjax_pcdd.models.classifier import Classifier, Outputs, forward
from fedjax_pcdd.trees import select


class TrainedModels:
    """What runs and histories have in common; they set or compute these attributes.

    Attributes:
      label: what sentences call the experiment.
      index: of the experiment in its simulation.
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
        """Variables of the global model; UserError where the method has none."""
        if not self.method.traits().global_model:
            raise UserError(f"{self.label} has no global model: take client_variables(k).")
        return self.method.generic_variables(self._trained(0)[1])

    def client_variables(self, client: int) -> Tree:
        """Variables of a client's model between rounds: its own where the method keeps one, else the global model's."""
        _, server, state, _ = self._trained(client)
        variables = dict(self.method.personal_variables(server, state.clients))
        return variables | running(state.statistics)

    def outputs(self, images: ArrayLike, client: int | None = None) -> Outputs:
        """Features [n, D] and logits [n, C] of images.

        Args:
          images: [n, H, W, channels] uint8, as in the data set.
          client: whose model; None for the global one.
        """
        simulation, server, state, row = self._trained(client or 0)
        program, method = simulation.program, self.method
        x = prepare(program.pipeline, jnp.asarray(images), None, train=False, dtype=program.dtype)
        variables = self.variables if client is None else self.client_variables(client)
        features = forward(program.model, variables, x, train=False)[0].features
        if client is None:
            return Outputs(features, method.logits(program.model, variables, x, server))
        facts = facts_of(program, simulation.data, row)
        logits = method.logits(program.model, variables, x, server, state.clients, facts, scope="personal")
        return Outputs(features, logits)

    def _trained(self, client: int) -> tuple[Simulation, Tree, State, int]:
        """Of a client: the simulation that trains it, its server, its state, and its row."""
        clients = self.federation.num_clients
        if not 0 <= client < clients:
            raise UserError(f"there is no client {client}: choose one in [0, {clients}).")
        simulation, state, own, row = self.simulation, self.state, client, self.index * clients + client
        if isinstance(simulation, Groups):
            g = next(g for g, members in enumerate(simulation.members) if client in members)
            state = State(state.servers["groups"][g], state.clients[g], state.statistics[g])
            own = row = simulation.members[g].index(client)
            simulation = simulation.groups[g]
        return simulation, select(state.servers, 0), State((), *select((state.clients, state.statistics), own)), row
