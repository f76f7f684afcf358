"""Apply a function to every client's model right after local training, a model that no simulation keeps.

The local training of a round is repeated from the same state, with the same batches and keys, and each job returns
what `look` computes from its trained model instead of its message. So the program of the round itself is unchanged, and
memory is that of the lanes, but the local training takes its time once more. Letters: J jobs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.engine.devices import full_precision
from fedjax_pcdd.engine.evaluation import by_client, personal_logits
from fedjax_pcdd.engine.jobs import only
from fedjax_pcdd.engine.lanes import run_lanes
from fedjax_pcdd.engine.parcels import Parcel, opened
from fedjax_pcdd.engine.program import Data, Program, State, Tree, with_own
from fedjax_pcdd.engine.round import Work
from fedjax_pcdd.methods.method import Context, Local, Message, Method
from fedjax_pcdd.methods.parts import without_collection
from fedjax_pcdd.trees import select

# A function of (data, server, variables, row, logits) of one client that returns something small; `logits` is itself
# a function of prepared images.
Look = Callable[[Data, Tree, Tree, jax.Array, Callable[[jax.Array], jax.Array]], Tree]

STEPS = "steps"  # collection of an observed client's variables


class Steps(NamedTuple):
    """Statistics of the steps of a client's local training so far."""

    count: jax.Array  # number of steps
    norm: jax.Array  # sum of the gradients' norms before clipping
    clipped: jax.Array  # number of clipped steps

    def after(self, gradients: Tree, limit: jax.Array, apart: tuple[str, ...]) -> "Steps":
        """Statistics with one more step.

        Args:
          gradients: as passed to the optimiser.
          limit: their largest norm, inf for no limit.
          apart: parts of the parameters that are clipped separately; a step counts as clipped if any of them is.
        """
        together = {name: tree for name, tree in gradients.items() if name not in apart}
        norms = jnp.stack([optax.tree.norm(tree) for tree in (together, *(gradients[name] for name in apart))])
        return Steps(self.count + 1, self.norm + jnp.sqrt((norms**2).sum()), self.clipped + (norms > limit).any())


@struct.dataclass
class Observed(Method):
    """The local training of another method; it uploads the result of `look`, which may read the data.

    With `of_steps` the variables passed to `look` have a collection `STEPS`, which the other method never sees.
    """

    inner: Any
    data: Any
    look: Look = struct.field(pytree_node=False)
    of_steps: bool = struct.field(pytree_node=False, default=False)

    def traits(self):
        """The other method's, without its pass over the data."""
        return self.inner.traits()._replace(summary=None)

    def download(self, server, client):
        """The other method's."""
        variables = self.inner.download(server, client)
        return {**variables, STEPS: Steps(*jnp.zeros(3))} if self.of_steps else variables

    def loss(self, variables, batch, context):
        """The other method's."""
        return self.inner.loss(without_collection(variables, STEPS), batch, _known(context))

    def regulariser(self, params, context):
        """The other method's."""
        return self.inner.regulariser(params, _known(context))

    def trainable(self, params, context):
        """The other method's."""
        return self.inner.trainable(params, _known(context))

    def local_update(self, evaluate, step, variables, batch, context):
        """The other method's; if it takes several steps, the last one is counted."""
        gradients = []

        def recording_step(step_gradients, **apart):
            gradients.append(step_gradients)
            return step(step_gradients, **apart)

        inner_variables = without_collection(variables, STEPS)
        loss, state, taken = self.inner.local_update(evaluate, recording_step, inner_variables, batch, _known(context))
        if self.of_steps and gradients:
            trained_gradients = only(self.trainable(variables["params"], context), gradients[-1])
            state = {**state, STEPS: variables[STEPS].after(trained_gradients, context.hyper.clip, self.traits().apart)}
        return loss, state, taken

    def upload(self, variables, summary, context):
        """The client's unchanged state, and the result of `look`."""
        server, client, facts = context.server, context.client, context.facts
        inner_variables = without_collection(variables, STEPS)

        def logits(images):
            return self.inner.logits(context.model, inner_variables, images, server, client, facts, scope="local")

        whole = self.data.whole  # of participants with several architectures, a row is a number in the group
        row = (whole.numbers == facts.client).argmax() if whole else facts.client
        return client, Message(each=self.look(self.data, server, variables, row, logits))

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        """Zeros, as nothing is evaluated."""
        return jnp.zeros((images.shape[0], model.num_classes))


def _known(context: Context) -> Context:
    """The context of the other method."""
    start, untouched = (tree and without_collection(tree, STEPS) for tree in (context.start, context.untouched))
    return context._replace(start=start, untouched=untouched)


@full_precision
def look_after_training(
    program: Program,
    look: Look,
    methods: Method,
    hyper: Local,
    data: Data,
    keys: jax.Array,
    state: State,
    sent: Parcel,
    *,
    of_steps: bool = False,
) -> Tree:
    """The results of `look` for each job's model after the local training of a round, leaves [J, ...]; to be compiled.

    Args:
      program: of one experiment.
      methods, hyper, data, keys, sent: as a `Simulation` passes them to its round.
      state: before the round, as fetched for these jobs.
      of_steps: whether `look` also gets the statistics of the steps, see `Observed`.
    """
    program, (plan, jobs, round) = replace(program, in_place=False), opened(sent)  # the state stays as it is
    observed = Observed(methods, jax.tree.map(lambda x: x[None], data), look, of_steps)
    inputs = Work(observed, hyper, keys, state.servers, jobs, round).on(data)
    return run_lanes(program, inputs, state, plan).message.each


@full_precision
def look_between_rounds(
    program: Program, look: Look, methods: Method, data: Data, state: State, rows: jax.Array
) -> Tree:
    """The results of `look` for the personal models that clients keep between rounds, leaves [n, ...]; to be compiled.

    Args:
      program: of one experiment.
      methods, data: of the `Simulation`.
      state: with the clients [n, ...] of the rows.
      rows: [n].
    """
    method, server = select((methods, state.servers), 0)

    def look_at(entry):
        row, client, statistics = entry
        logits = personal_logits(program, methods, state, data, entry, "local")
        return look(data, server, with_own(method.personal_variables(server, client), statistics), row, logits)

    return by_client(program, look_at, (rows, state.clients, state.statistics))
