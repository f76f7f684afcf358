"""The exchange: participants of several architectures agree through logits on public images, as one compiled function.

Participants come in groups, one for each architecture, each stacked; participant k of the federation is among the
`members` of one group. Letters: G groups, K participants, N public images, B public batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.engine.devices import full_precision
from fedjax_pcdd.engine.jobs import only
from fedjax_pcdd.engine.program import Data, Program, Tree, lift
from fedjax_pcdd.methods.checks import flags, leading, of_kind, same_shapes, scalar
from fedjax_pcdd.methods.method import Context, Keys, Local
from fedjax_pcdd.methods.participant import Exchanging, PublicBatch, model_of, over_all, with_model
from fedjax_pcdd.trees import select


@dataclass(frozen=True)
class Table:
    """The static part of an exchange."""

    programs: tuple[Program, ...]  # of the groups
    members: tuple[tuple[int, ...], ...]  # participants of each group
    pipeline: Pipeline  # of the public images

    def in_order(self, parts: Sequence[Tree]) -> Tree:
        """Rows of the groups, leaves [K_g, ...], as rows of the federation [K, ...]."""
        order = np.argsort(np.concatenate(self.members))
        return jax.tree.map(lambda *x: jnp.concatenate(x)[order], *parts)

    def lifted(self, g: int, function: Callable, *arguments: Tree) -> Tree:
        """The function of one participant applied to all of a group; arguments are [K_g, ...]."""
        return lift(function, len(self.members[g]))(*arguments)


class Active(NamedTuple):
    """One participant during an exchange; stacked to [K_g, ...]."""

    row: jax.Array  # in its group
    client: Tree
    variables: Tree
    optimiser: Tree


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
    exchange = Exchange(table, select(methods, 0), select(hyper, 0), data, images, round, key)
    groups = tuple(exchange.begin(g, group) for g, group in enumerate(clients))
    targets = None
    if exchange.method.traits().targets == "round":
        answers = table.in_order([exchange.say_all(g, group, public) for g, group in enumerate(groups)])
        public, targets = exchange.agreed(public, answers, len(images))

    def step(t, carry):
        return exchange.step(targets, plan[t], t, *carry)

    groups, public = jax.lax.fori_loop(0, plan.shape[0], step, (groups, public))
    return tuple(jax.vmap(with_model)(group.client, group.variables) for group in groups), public


@dataclass(frozen=True)
class Exchange:
    """What is constant during an exchange, and the functions that it consists of."""

    table: Table
    method: Exchanging
    local: Local
    data: tuple[Data, ...]  # of the groups
    images: jax.Array  # [N, H, W, channels] uint8
    round: jax.Array
    key: jax.Array

    def begin(self, g: int, clients: Tree) -> Active:
        """The participants of a group, before the first step."""
        variables = jax.vmap(model_of)(clients)
        optimiser = self.table.programs[g].optimiser(self.method, self.local)
        start = jax.vmap(optimiser.init)(variables["params"])
        return Active(jnp.arange(len(self.table.members[g])), clients, variables, start)

    def context(self, g: int, one: Active, public: Tree, step) -> Context:
        """What a participant's hooks see."""
        program, epoch = self.table.programs[g], jnp.zeros((), jnp.int32)
        participant = jnp.asarray(self.table.members[g])[one.row]
        keys = Keys.of(jax.random.fold_in(jax.random.fold_in(self.key, step), 1 + participant))
        return Context(
            program.model, program.setting, self.local, public, one.client, model_of(one.client),
            program.facts_of(self.data[g], one.row), epoch, epoch + 1, step, self.round, keys, exchanging=True,
        )  # fmt: skip

    def say_all(self, g: int, group: Active, public: Tree) -> Tree:
        """What a group says of all public images, not augmented, leaves [K_g, N, ...]."""
        program, members = self.table.programs[g], len(self.table.members[g])

        def participant_answers(active):
            def say(rows):
                images = prepare(self.table.pipeline, self.images[rows], None, train=False, dtype=program.dtype)
                context = self.context(g, active, public, jnp.zeros((), jnp.int32))
                return self.method.say(active.variables, PublicBatch(images, images, ()), context)

            return over_all(say, self.images.shape[0], program.eval_batch_of(members))

        return self.table.lifted(g, participant_answers, group)

    def agreed(self, public: Tree, spoken: Tree, images: int) -> tuple[Tree, Tree]:
        """The server's next state, and the targets of so many images, leaves [K, images, ...]."""
        counts = self.table.in_order([data.class_counts for data in self.data])  # private samples [K, C]
        result = self.method.agree(public, spoken, counts)
        public, targets = of_kind(self.method, "agree", result, object, object)
        participants = sum(map(len, self.table.members))
        return public, leading(self.method, "agree", targets, participants, images)

    def step(self, targets: Tree, index, t, groups: tuple[Active, ...], public: Tree):
        """One public batch: all participants answer, the server makes the targets, all take one step."""
        batch = self.batch(index, jax.random.fold_in(jax.random.fold_in(self.key, t), 0))

        def say(g, active):
            return self.method.say(active.variables, batch, self.context(g, active, public, t))

        if targets is None:
            answers = [self.table.lifted(g, partial(say, g), group) for g, group in enumerate(groups)]
            public, batch_targets = self.agreed(public, self.table.in_order(answers), len(index))
        else:
            batch_targets = jax.tree.map(lambda x: x[:, index], targets)
        group_targets = [select(batch_targets, np.array(members)) for members in self.table.members]
        pairs = enumerate(zip(groups, group_targets, strict=True))
        return tuple(self.table.lifted(g, partial(self.move, g, batch, public, t), *pair) for g, pair in pairs), public

    def batch(self, index, key) -> PublicBatch:
        """A batch of public images, augmented if the pipeline is random, and plain."""
        images, dtype, pipeline = self.images[index], self.table.programs[0].dtype, self.table.pipeline
        plain = prepare(pipeline, images, None, train=False, dtype=dtype)
        augmented = prepare(pipeline, images, key, train=True, dtype=dtype) if pipeline.random else plain
        return PublicBatch(augmented, plain, ())

    def move(self, g: int, batch: PublicBatch, public: Tree, t, one: Active, target: Tree) -> Active:
        """One optimiser step of one participant."""
        method, context, batch = self.method, self.context(g, one, public, t), batch._replace(target=target)
        params, optimiser = one.variables["params"], self.table.programs[g].optimiser(method, self.local)
        moving = flags(method, "trainable", method.trainable(params, context), params)

        def loss(params):
            result = method.imitate({**one.variables, "params": params}, batch, context)
            value, state = of_kind(method, "imitate", result, object, Mapping)
            return scalar(method, "imitate", value), state

        gradients, state = jax.grad(loss, has_aux=True)(params)
        opt_state = optimiser.init(params) if method.public_optimizer == "per_batch" else one.optimiser
        gradients, moved = only(moving, gradients), only(moving, params)
        updates, opt_state = optimiser.update(gradients, opt_state, moved, moving=moving)
        after = {**one.variables, **state, "params": optax.apply_updates(params, only(moving, updates))}
        same_shapes(method, "imitate", "variables", after, one.variables, "the participant has them")
        return one._replace(variables=after, optimiser=opt_state)
