"""The exchange: participants of several architectures talk through logits on public images, as one compiled function.

Participants come in groups, one for each architecture, each stacked; participant k of the federation is `members` of
some group. Letters: G groups, K participants, N public images, B public batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.engine.optimiser import make_optimiser
from fedjax_pcdd.engine.precision import full_precision
from fedjax_pcdd.engine.program import Data, Program, Tree, facts_of, lift
from fedjax_pcdd.methods.method import Context, Hyper, Keys
from fedjax_pcdd.methods.participant import Exchanging, PublicBatch, model_of, over_all, with_model
from fedjax_pcdd.trees import select, where


@dataclass(frozen=True)
class Table:
    """Everything static of an exchange."""

    programs: tuple[Program, ...]  # of the groups
    members: tuple[tuple[int, ...], ...]  # participants of each group
    pipeline: Pipeline  # of the public images

    def in_order(self, parts: Sequence[Tree]) -> Tree:
        """Rows of the groups, leaves [K_g, ...], as rows of the federation [K, ...]."""
        order = np.argsort(np.concatenate(self.members))
        return jax.tree.map(lambda *x: jnp.concatenate(x)[order], *parts)


class Seat(NamedTuple):
    """One participant at the table; stacked to [K_g, ...]."""

    row: jax.Array  # in its group
    client: Tree
    variables: Tree
    optimiser: Tree


class Talk(NamedTuple):
    """What does not change during an exchange."""

    method: Exchanging
    hyper: Hyper
    data: tuple[Data, ...]  # of the groups
    images: jax.Array  # [N, H, W, channels] uint8
    plan: jax.Array  # [steps, B] int32
    round: jax.Array
    key: jax.Array


@full_precision
def run_exchange(table: Table, methods, hyper, data, clients: tuple, public: Tree, images, plan, round, key):
    """All public batches of a round.

    Args:
      methods, hyper: of one experiment, leaves [1].
      clients: of each group, leaves [K_g, ...].
      public: what the server keeps between exchanges.

    Returns:
      (clients, public).
    """
    talk = Talk(select(methods, 0), select(hyper, 0), data, images, plan, round, key)
    seats = tuple(_seats(table, talk, g, group) for g, group in enumerate(clients))
    targets = None
    if talk.method.traits().targets == "round":
        said = table.in_order([_say_all(table, talk, g, group, public) for g, group in enumerate(seats)])
        public, targets = talk.method.agree(public, said, _counts(table, talk))

    def step(t, carry):
        return _step(table, talk, targets, t, *carry)

    seats, public = jax.lax.fori_loop(0, plan.shape[0], step, (seats, public))
    return tuple(_keep(talk, group) for group in seats), public


def _seats(table: Table, talk: Talk, g: int, clients: Tree) -> Seat:
    rows = jnp.arange(len(table.members[g]))
    variables = jax.vmap(model_of)(clients)
    start = jax.vmap(_optimiser(table, talk, g).init)(variables["params"])
    return Seat(rows, clients, variables, start)


def _optimiser(table: Table, talk: Talk, g: int) -> optax.GradientTransformation:
    program = table.programs[g]
    return make_optimiser(program.optimizer, talk.hyper, clip=program.clip, apart=talk.method.traits().apart)


def _counts(table: Table, talk: Talk) -> jax.Array:
    return table.in_order([data.class_counts for data in talk.data])


def _context(table: Table, talk: Talk, g: int, seat: Seat, public: Tree, step) -> Context:
    program = table.programs[g]
    participant = jnp.asarray(table.members[g])[seat.row]
    keys = Keys.of(jax.random.fold_in(jax.random.fold_in(talk.key, step), 1 + participant))
    start = model_of(seat.client)
    facts = facts_of(program, talk.data[g], seat.row)
    epoch = jnp.zeros((), jnp.int32)
    return Context(
        program.model, program.setting, talk.hyper, public, seat.client, start, facts, epoch, epoch + 1, step,
        talk.round, keys, exchanging=True,
    )  # fmt: skip


def _say_all(table: Table, talk: Talk, g: int, seats: Seat, public: Tree) -> Tree:
    """What a group tells of all public images as they are, leaves [K_g, N, ...]."""
    program, members = table.programs[g], len(table.members[g])

    def one(seat):
        def say(rows):
            images = prepare(table.pipeline, talk.images[rows], None, train=False, dtype=program.dtype)
            context = _context(table, talk, g, seat, public, jnp.zeros((), jnp.int32))
            return talk.method.say(seat.variables, PublicBatch(images, images, ()), context)

        return over_all(say, talk.images.shape[0], program.eval_batch_of(members))

    return lift(one, members)(seats)


def _step(table: Table, talk: Talk, targets: Tree, t, seats: tuple[Seat, ...], public: Tree):
    """One public batch: everybody speaks, the server makes the targets, everybody takes one step."""
    index = talk.plan[t]
    batch = _batch(table, talk, index, jax.random.fold_in(jax.random.fold_in(talk.key, t), 0))

    def lifted(g, function):
        return lift(function, len(table.members[g]))

    if targets is None:
        said = []
        for g, group in enumerate(seats):

            def say(seat, g=g):
                return talk.method.say(seat.variables, batch, _context(table, talk, g, seat, public, t))

            said.append(lifted(g, say)(group))
        public, aims = talk.method.agree(public, table.in_order(said), _counts(table, talk))
        aims = jax.lax.stop_gradient(aims)
    else:
        aims = jax.tree.map(lambda x: x[:, index], targets)
    after = []
    for g, group in enumerate(seats):

        def move(seat, aim, g=g):
            return _move(table, talk, g, seat, batch._replace(target=aim), public, t)

        after.append(lifted(g, move)(group, select(aims, np.array(table.members[g]))))
    return tuple(after), public


def _batch(table: Table, talk: Talk, index, key) -> PublicBatch:
    images, dtype = talk.images[index], table.programs[0].dtype
    plain = prepare(table.pipeline, images, None, train=False, dtype=dtype)
    if not table.pipeline.random:
        return PublicBatch(plain, plain, ())
    return PublicBatch(prepare(table.pipeline, images, key, train=True, dtype=dtype), plain, ())


def _move(table: Table, talk: Talk, g: int, seat: Seat, batch: PublicBatch, public: Tree, t) -> Seat:
    """One optimiser step of one participant."""
    method, context = talk.method, _context(table, talk, g, seat, public, t)
    params, optimiser = seat.variables["params"], _optimiser(table, talk, g)

    def loss(params):
        return method.imitate({**seat.variables, "params": params}, batch, context)

    (_, state), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    held = optimiser.init(params) if method.public_optimizer == "per_batch" else seat.optimiser
    updates, held = optimiser.update(gradients, held, params)
    moved = optax.apply_updates(params, updates)
    moving = method.trainable(params, context)
    if moving is not None:
        moved = jax.tree.map(where, moving, moved, params)
    return seat._replace(variables={**seat.variables, **state, "params": moved}, optimiser=held)


def _keep(talk: Talk, seats: Seat) -> Any:
    return jax.vmap(with_model)(seats.client, seats.variables)
