"""A federation of several architectures: a simulation for each, stacked, and the exchange between them.

    groups = Groups(models, federation, method, local, seed=0, pipeline=pipeline, public=Public(images, pipeline, 64))
    state = groups.start()
    state, report = groups.step(state, round=0)
    groups.domain_correct(state)

It has the face of a `Simulation` with one experiment; clients in its jobs and reports are those of the federation.
Letters: G groups, K participants, D domains (test lists), C classes.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.engine import grouping, schedule
from fedjax_pcdd.engine.blocks import Pass, client_pass
from fedjax_pcdd.engine.evaluation import domain_correct, public_logits
from fedjax_pcdd.engine.exchange import Table, run_exchange
from fedjax_pcdd.engine.grouping import Public as Public
from fedjax_pcdd.engine.grouping import batch_size_of, group_simulation, mean_of_models, members_of, placed
from fedjax_pcdd.engine.program import State, Tree, facts_of, samples_of
from fedjax_pcdd.engine.round import Evaluation, Launched, Local, Report, Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Method, Server
from fedjax_pcdd.methods.participant import Participant
from fedjax_pcdd.models.classifier import Classifier, initialise
from fedjax_pcdd.trees import select

PRETRAINING = np.iinfo(np.int32).max  # the round whose draws pre-training takes


class Groups:
    """Compiled rounds of participants with models of their own; states that are passed in are donated."""

    def __init__(
        self,
        models: Sequence[Classifier],
        federation: Federation,
        method: Method,
        local: Local,
        *,
        seed: int,
        epochs: Sequence[int] | None = None,
        public: Public | None = None,
        **options: Any,
    ):
        """Prepare the groups; nothing is compiled yet.

        Args:
          models: of each participant [K], before `Method.build`; participants with equal ones form a group.
          federation: test lists are those of the domains, participant k's own being the k-th.
          epochs: local epochs of each participant, in place of the common number.
          public: what an exchange needs.
          options: of every group's `Simulation`, as pipeline, lanes, rounds.

        Raises:
          UserError: several architectures where the method averages models, no public images for an exchange, or
            local statistics beside own models, which have them by themselves.
        """
        self.federation, self.seed, self.public, self.local = federation, seed, public, local
        self.members = members_of(models)
        self._check(method, options)
        on_device = placed(federation.dataset)
        if public is not None and method.traits().public:
            options = options | {"public": (public.images, public.pipeline)}
        self.groups = tuple(
            group_simulation(
                method.build(models[members[0]]), on_device, federation, method, local, seed, members, epochs, options
            )
            for members in self.members
        )
        self.methods, self.program = self.groups[0].methods, self.groups[0].program
        self.method = select(self.methods, 0)
        self.traits, self.advice = self.method.traits(), self.groups[0].advice
        self.table = Table(
            tuple(g.program for g in self.groups), self.members, public.pipeline if public else Pipeline()
        )
        self.images = jnp.asarray(public.images) if public else None
        self.tests = samples_of(on_device.x_test, on_device.y_test, federation.partition.test)
        self._exchange = jax.jit(partial(run_exchange, self.table), donate_argnums=(3, 4))
        self._domains = [jax.jit(partial(domain_correct, g.program, self._domain_pass(g))) for g in self.groups]
        self._logits = [jax.jit(partial(public_logits, g.program, self.table.pipeline)) for g in self.groups]
        self._mean = jax.jit(mean_of_models, donate_argnums=0)

    def _check(self, method: Method, options: dict[str, Any]) -> None:
        traits = method.traits()
        if len(self.members) > 1 and not traits.own_models:
            raise UserError("this method averages models, so all participants need the same one: name one in `models`.")
        if len(self.members) > 1 and traits.averages != "never":
            raise UserError("models of different architectures cannot be averaged: name one in `models`.")
        if traits.needs_public and self.public is None:
            raise UserError("this method needs public images: name a data set with `public`.")
        if traits.own_models and options.get("local_statistics"):
            raise UserError("models of the participants' own keep their statistics anyway: drop `bn=local`.")

    @property
    def federations(self) -> list[Federation]:
        """The one."""
        return [self.federation]

    def _domain_pass(self, group: Simulation) -> Pass:
        """How a participant's model goes through one domain's tests."""
        return client_pass(self.federation.test_sizes, group.program.eval_batch, group.program.blocks.size)

    @property
    def sizes(self) -> np.ndarray:
        """Training samples [1, K]."""
        return self.federation.sizes[None]

    @property
    def steps(self) -> np.ndarray:
        """Steps of a local epoch [1, K]."""
        return self._in_order([g.steps[0] for g in self.groups])[None]

    @property
    def weights(self) -> np.ndarray:
        """Raw aggregation weights [1, K]."""
        return self._in_order([g.weights[0] for g in self.groups])[None]

    @property
    def hyper(self):
        """Settings of local training, leaves [1]."""
        return self.groups[0].hyper

    @property
    def compilations(self) -> int:
        """How often the round of a group was compiled at most; 1 after any number of rounds."""
        return max(group.compilations for group in self.groups)

    def _in_order(self, parts: Sequence[Any]) -> np.ndarray:
        """Rows of the groups as rows of the federation."""
        return np.concatenate([np.asarray(x) for x in parts])[np.argsort(np.concatenate(self.members))]

    def start(self) -> State:
        """State before the first round and before pre-training."""
        started = [self._start(g) for g in range(len(self.groups))]
        return State(
            {"groups": tuple(s.servers for s in started), "public": self._init_public()},
            tuple(s.clients for s in started),
            tuple(s.statistics for s in started),
        )

    def _start(self, g: int) -> State:
        state = self.groups[g].start()
        if not self.traits.own_models:
            return state
        return state._replace(clients=self._clients(g, self._initial(g)))

    def _initial(self, g: int) -> Tree:
        """Fresh variables of a group's participants [K_g, ...]."""
        shape, key = self.federation.image_shape, jax.random.fold_in(jax.random.key(self.seed), 0)
        group, numbers = self.groups[g], jnp.array(self.members[g])
        first = jax.vmap(lambda k: initialise(group.program.model, jax.random.fold_in(key, k), shape))(numbers)
        return jax.tree.map(lambda x: x.astype(group.param_dtype), first)

    def _init_public(self) -> Tree:
        if self.public is None or self.traits.exchange == "never":
            return ()
        return self.method.init_public(self.program.setting, len(self.public.images))

    def _clients(self, g: int, variables: Tree) -> Tree:
        """States of a group's participants from their models [K_g, ...]."""
        group, key = self.groups[g], jax.random.fold_in(jax.random.key(self.seed), 3)
        rows, numbers = jnp.arange(len(self.members[g])), jnp.array(self.members[g])

        def one(row, number, variables):
            facts = facts_of(group.program, group.data, row)
            return self.method.init_client(
                group.program.setting, Server(variables), facts, jax.random.fold_in(key, number)
            )

        return jax.jit(jax.vmap(one))(rows, numbers, variables)

    def pretrain(self, state: State, epochs: int, batch_size: int) -> State:
        """Every participant trains its model on its own data, with plain cross-entropy."""
        if not self.traits.own_models:
            raise UserError(
                "only methods whose participants keep their models are pre-trained: use `pretrain_epochs=0`."
            )
        clients = []
        for g, group in enumerate(self.groups):
            first = group.experiments[0]
            local = replace(first.local, epochs=epochs, batch_size=batch_size, lr_steps=())
            local = replace(local, batch_size=batch_size_of(local, first.federation.sizes, {}))
            alone = group.alike([first._replace(method=Participant(), local=local)], len(self.members[g]))
            after, _ = alone.step(alone.start()._replace(clients=self._initial(g)), PRETRAINING)
            clients.append(self._clients(g, after.clients))
        return state._replace(clients=tuple(clients))

    def clients_of(self, round: int) -> list[np.ndarray]:
        """All participants."""
        return [np.arange(self.federation.num_clients)]

    def jobs(self, round: int) -> tuple[schedule.Jobs, list[np.ndarray]]:
        """Jobs of all groups in the federation's order, and the batches of each."""
        found = [group.jobs(round) for group in self.groups]
        batches = [b for _, group in found for b in group]
        order = np.argsort(np.concatenate(self.members))
        return self._joined([jobs for jobs, _ in found]), [batches[i] for i in order]

    def _joined(self, found: Sequence[schedule.Jobs]) -> schedule.Jobs:
        shares = self._shares()
        scaled = [jobs._replace(weight=jobs.weight * share) for jobs, share in zip(found, shares, strict=True)]
        joined = schedule.Jobs(*(self._in_order(field) for field in zip(*scaled, strict=True)))
        return joined._replace(row=joined.number)

    def _shares(self) -> tuple[float, ...]:
        """What part of the aggregation weights each group has."""
        raw = np.array([(g.weights[0] * (g.steps[0] > 0)).sum() for g in self.groups])
        return tuple((raw / raw.sum()).tolist())

    def plan(self, round: int):
        """The schedules of the groups, and the jobs of the federation."""
        plans = [group.plan(round) for group in self.groups]
        return plans, self._joined([jobs for _, jobs in plans])

    def public_plan(self, round: int) -> np.ndarray:
        """Public images of each step of an exchange [steps, B]; every epoch a fresh permutation, the rest dropped."""
        assert self.public is not None  # `_check` has seen to it
        images, batch = self.public.images, self.public.batch
        return grouping.public_batches(self.seed, round, len(images), batch, self.method.public_epochs)

    def step(self, state: State, round: int, plan=None) -> tuple[State, Report]:
        """One round of all participants."""
        plans, _ = plan or self.plan(round)
        when = self.traits.exchange
        state = self.exchange(state, round) if when == "before" else state
        state = self._averaged(state, "exchanged")
        servers, clients, statistics, reports = [], [], [], []
        for g, group in enumerate(self.groups):
            held = State(state.servers["groups"][g], state.clients[g], state.statistics[g])
            after, report = group.step(held, round, plans[g])
            servers.append(after.servers)
            clients.append(after.clients)
            statistics.append(after.statistics)
            reports.append(report)
        merged = self._common(servers) if self.traits.common_server else tuple(servers)
        # Groups may have been given one and the same server, but each donates its own.
        merged = tuple(jax.tree.map(jnp.copy, server) for server in merged)
        state = State(state.servers | {"groups": merged}, tuple(clients), tuple(statistics))
        state = self._averaged(state, "trained")
        state = self.exchange(state, round) if when == "after" else state
        order = np.argsort(np.concatenate(self.members))
        return state, Report(*(jnp.concatenate(x)[order] for x in zip(*reports, strict=True)))

    def _common(self, servers: Sequence[Tree]) -> tuple[Tree, ...]:
        """The mean of the groups' servers, for each of them."""
        shares = self._shares()
        mean = jax.tree.map(lambda *x: sum(s * v for s, v in zip(shares, x, strict=True)), *servers)
        return (mean if len(servers) > 1 else servers[0],) * len(servers)

    def launch(self, state: State, round: int, plan=None) -> Launched:
        """One round, as `Simulation.launch`."""
        return Launched((), *self.step(state, round, plan), ())

    def prefetch(self, launched: Launched, plan) -> None:
        """Nothing: participants live on the device."""

    def settle(self, launched: Launched) -> tuple[State, Report]:
        """The result of a launched round."""
        return launched.after, launched.report

    def exchange(self, state: State, round: int) -> State:
        """The exchange of a round."""
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), 4), round)
        data, hyper = tuple(g.data for g in self.groups), self.groups[0].hyper_at(round)
        plan = self.public_plan(round)
        clients, public = self._exchange(
            self.methods, hyper, data, state.clients, state.servers["public"], self.images, plan, np.int32(round), key
        )
        return state._replace(servers=state.servers | {"public": public}, clients=clients)

    def _averaged(self, state: State, when: str) -> State:
        if self.traits.averages != when:
            return state
        return state._replace(clients=(self._mean(state.clients[0]),))

    def evaluate(self, state: State, *, personal: bool = False) -> Evaluation:
        """Correct predictions of the groups, as `Simulation.evaluate`; participants in the federation's order."""
        found = [group.evaluate(self._of_group(state, g), personal=personal) for g, group in enumerate(self.groups)]
        generic, own, local, further = (list(field) for field in zip(*found, strict=True))
        return Evaluation(
            generic[0], self._in_order(own) if personal else (),
            () if isinstance(local[0], tuple) else self._in_order(local), further[0],
        )  # fmt: skip

    def general(self, state: State):
        """Correct predictions of the server's models alone, as `Simulation.general`; all groups have the same ones."""
        return self.groups[0].general(self._of_group(state, 0))

    def domain_correct(self, state: State) -> np.ndarray:
        """Correct predictions of every participant's model on every domain's tests, top-1 and top-5 [K, D, 2, C]."""
        found = [
            correct(group.methods, self._of_group(state, g), group.data, self.tests)
            for g, (group, correct) in enumerate(zip(self.groups, self._domains, strict=True))
        ]
        return self._in_order(found)

    def public_logits(self, state: State) -> np.ndarray:
        """What every participant's model says of the public images as they are [K, N, C]."""
        assert self.public is not None, "there are no public images"
        found = [
            said(group.methods, self._of_group(state, g), group.data, self.images)
            for g, (group, said) in enumerate(zip(self.groups, self._logits, strict=True))
        ]
        return self._in_order(found)

    def _of_group(self, state: State, g: int) -> State:
        return State(state.servers["groups"][g], state.clients[g], state.statistics[g])
