"""What an experiment starts from: the server's state, a client's, and what the engine keeps for a client besides it."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.engine.program import LAYERS, OPTIMISER, Data, Program, Tree, stream_of
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.checks import numbers
from fedjax_pcdd.methods.method import Local, Method, Server
from fedjax_pcdd.models.classifier import initialise
from fedjax_pcdd.trees import zeros_like


def _checked(method: Method, server: Tree) -> Tree:
    """The server's state; UserError if a leaf is no array, or what a default hook or the metrics read is missing."""
    server = numbers(method, "init_server", server)
    recorded, name = method.traits().recorded, type(method).__name__
    for field in recorded:
        if [np.shape(leaf) for leaf in jax.tree.leaves(getattr(server, field, ()))] != [()]:
            raise UserError(
                f"{name}.traits says that '{field}' is recorded: give a tuple of scalar fields of init_server's state."
            )
    hooks = ("download", "generic_variables", "personal_variables")
    reads = [hook for hook in hooks if getattr(type(method), hook) is getattr(Method, hook)]
    if reads and not hasattr(server, "variables"):
        raise UserError(f"{name}.init_server must return something with a field variables, which {reads[0]} returns.")
    return server


class First(NamedTuple):
    """What the clients of an experiment start from."""

    method: Method  # as configured
    server: Tree
    key: jax.Array
    counts: jax.Array  # [K, C] training samples, once: selected for each client by its row they would be [K, K, C]


def first_of(program: Program, method: Method, data: Data, variables: Tree, *, experiment: int, seed: int) -> First:
    """The initial server state of an experiment, and what its clients' follow from; the method is as configured.

    Raises:
      UserError: the method returns something that is no valid state.
    """
    setting, first = program.setting, experiment * program.setting.num_clients
    counts = data.whole.counts if data.whole else data.class_counts[first : first + setting.num_clients]
    server = method.init_server(setting, variables, counts, stream_of(seed, "server"))
    return First(method, _checked(method, server), stream_of(seed, "client"), counts)


def first_client(program: Program, first: First, variables: Tree, data: Data, row) -> Tree:
    """The initial state of the client in a row; participants begin with their own models, the variables.

    Raises:
      UserError: the method returns something that is no valid state.
    """
    method, facts = first.method, program.facts_of(data, row)._replace(federation_counts=first.counts)
    server = Server(variables) if method.traits().own_models else first.server
    client = method.init_client(program.setting, server, facts, jax.random.fold_in(first.key, facts.client))
    return numbers(method, "init_client", client)


def first_clients(program: Program, first: First, variables: Tree, data: Data, rows: jax.Array) -> Tree:
    """The initial states [n, ...] of the clients in some rows [n]; arguments are traced, so this compiles once."""
    return jax.vmap(lambda row: first_client(program, first, variables, data, row))(rows)


@jax.jit
def repeated(tree: Tree, rows: jax.Array) -> Tree:
    """The same state for each of some rows [n], [n, ...]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (*rows.shape, *jnp.shape(x))), tree)


def kept_of_client(
    program: Program, method: Method, hyper: Local, image_shape: tuple[int, ...], server: Tree, client: Tree
) -> dict[str, Tree]:
    """What the engine keeps for a client besides the method's state before the first round; `hyper` as hooks see it."""
    kept, received = {}, method.download(server, client)
    if program.local_statistics:
        collections = jax.eval_shape(partial(initialise, program.model, jax.random.key(0), image_shape))
        kept |= {name: received[name] for name in collections if name != "params"}
    if program.setting.own_layers:
        kept[LAYERS] = program.layers_of(received["params"])
    if program.setting.keeps_optimiser:
        kept[OPTIMISER] = program.optimiser(method, hyper).init(zeros_like(received["params"]))
    return kept
