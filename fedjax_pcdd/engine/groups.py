"""A federation of several architectures: a stacked simulation for each, and the exchange between them.

    groups = Groups(models, federation, method, local, seed=0, pipeline=pipeline, public=Public(images, pipeline, 64))
    state = groups.start()
    state, report = groups.step(state, round=0)
    groups.domain_correct(state)

It has the interface of a `Simulation` with one experiment; clients in its jobs and reports are the federation's.
Letters: G groups, K participants, D domains (test lists), C classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Lists, Partition
from fedjax_pcdd.engine import schedule
from fedjax_pcdd.engine.blocks import client_pass
from fedjax_pcdd.engine.evaluation import domain_correct, public_logits
from fedjax_pcdd.engine.exchange import Table, run_exchange
from fedjax_pcdd.engine.executables import compiled, fresh_variables
from fedjax_pcdd.engine.first_state import First, first_client
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.program import Evaluation, Report, State, Tree, samples_of, stream_of
from fedjax_pcdd.engine.round import Work, aggregated
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.checks import built
from fedjax_pcdd.methods.method import Local, Message, Method
from fedjax_pcdd.methods.participant import model_of, with_model
from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.trees import select


class Public(NamedTuple):
    """Images that all participants may see, without labels."""

    images: np.ndarray  # [N, H, W, channels] uint8
    pipeline: Pipeline
    batch: int  # B; an incomplete last batch is dropped


def members_of(models: Sequence[Classifier]) -> tuple[tuple[int, ...], ...]:
    """Groups of participants with equal models, in the order of their first participants."""
    groups: dict[Classifier, list[int]] = {}
    for k, model in enumerate(models):
        groups.setdefault(model, []).append(k)
    return tuple(map(tuple, groups.values()))


def mean_of_models(clients: Tree) -> Tree:
    """Every participant's model replaced by the mean of all [K, ...]."""
    variables = jax.vmap(model_of)(clients)
    mean = jax.tree.map(lambda x: jnp.broadcast_to(x.mean(0), x.shape), variables)
    return jax.vmap(with_model)(clients, mean)


def of_group(state: State, g: int) -> State:
    """A group's part of a state."""
    return State(state.servers["groups"][g], state.clients[g], state.statistics[g])


class Groups:
    """Compiled rounds of participants with models of their own; states that are passed in are donated.

    Attributes:
      federations: the federation, as a list of one.
      sizes, steps, weights: [1, K] training samples, steps of a local epoch, and raw aggregation weights.
    """

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
        public_labels: np.ndarray | None = None,
        **options: Any,
    ):
        """Prepare the groups; nothing is compiled yet.

        Args:
          models: of each participant [K], before `Method.build`; participants with equal models form a group.
          federation: its test lists are those of the domains; the k-th is participant k's own.
          epochs: local epochs of each participant, instead of the common number.
          public: images, which an exchange needs.
          public_labels: [N], only for methods that begin by training on them.
          options: of every group's `Simulation`, such as pipeline, lanes, rounds.

        Raises:
          UserError: several architectures where the method averages models, no public images for an exchange, or
            local statistics for participants' own models, which keep theirs anyway.
        """
        self.federation, self.seed, self.public, self.local = federation, seed, public, local
        self.public_labels = public_labels
        self.members = members_of(models)
        self._check(method, options)
        self.shares_server = len(self.members) > 1 and method.traits().common_server
        data = federation.dataset
        # Images are on the device once, for all groups.
        data = replace(data, x_train=jnp.asarray(data.x_train), x_test=jnp.asarray(data.x_test))
        if public is not None and method.traits().public:
            options = options | {"public": (public.images, public.pipeline)}
        self.groups = tuple(
            self._group(members, built(method, models[members[0]]), method, data, epochs, options)
            for members in self.members
        )
        self.federations, self.sizes = [federation], federation.sizes[None]
        self.steps = self._in_order([group.steps[0] for group in self.groups])[None]
        self.weights = self._in_order([group.weights[0] for group in self.groups])[None]
        first = self.groups[0]
        self.methods, self.program, self.advice = first.methods, first.program, first.advice
        self.method = select(self.methods, 0)
        self.traits = self.method.traits()
        self._check_features()
        self.images = jnp.asarray(public.images) if public else None
        self.tests = samples_of(data.x_test, data.y_test, federation.partition.test)
        self._make_programs()

    def _group(
        self, members: tuple[int, ...], model: Classifier, method: Method, data: Dataset,
        epochs: Sequence[int] | None, options: dict[str, Any],
    ) -> Simulation:  # fmt: skip
        """The simulation of a group of participants with equal models."""
        lists = self.federation.partition.train, self.federation.partition.test
        validation = self.federation.validation
        kept_out = None if validation is None else Lists.of([validation[k] for k in members])
        federation = Federation(data, Partition(*(tuple(split[k] for k in members) for split in lists)), kept_out)
        group_epochs = tuple(epochs[k] for k in members) if epochs else self.local.epochs
        local, whole = replace(self.local, epochs=group_epochs), self.federation if len(self.members) > 1 else None
        experiment = Experiment(federation, method, local, self.seed, members, whole)
        return Simulation(model, [experiment], cohort=len(members), aggregates=not self.shares_server, **options)

    def _make_programs(self) -> None:
        """Make the compiled functions: aggregation, the exchange, and predictions on tests and on public images."""
        pipeline, sizes = self.public.pipeline if self.public else Pipeline(), self.federation.test_sizes
        programs = [group.program for group in self.groups]
        self.table = Table(tuple(programs), self.members, pipeline)
        self._aggregates = [compiled(aggregated, p) for p in programs]
        self._exchange = compiled(run_exchange, self.table, donate_argnums=(3, 4))
        passes = [client_pass(sizes, p.eval_batch, p.blocks.size) for p in programs]
        on_tests = [replace(p, validated=False) for p in programs]
        self._domains = [compiled(domain_correct, p, how) for p, how in zip(on_tests, passes, strict=True)]
        self._logits = [compiled(public_logits, p, pipeline) for p in programs]
        self._mean = jax.jit(mean_of_models, donate_argnums=0)

    def _check(self, method: Method, options: dict[str, Any]) -> None:
        traits = method.traits()
        if len(self.members) > 1 and not traits.own_models:
            raise UserError("this method averages models, so all participants need the same one: name one in `models`.")
        if len(self.members) > 1 and traits.averages != "never":
            raise UserError("models of different architectures cannot be averaged: name one in `models`.")
        if len(self.members) > 1 and self.federation.validation is not None:
            raise UserError("`validation` is for clients with one architecture: leave it out, or name one in `models`.")
        if len(self.members) > 1 and self.local.class_weights == "pooled":
            raise UserError("clients of several architectures do not pool their counts: use `class_weights=local`.")
        if traits.needs_public and self.public is None:
            raise UserError("this method needs public images: name a data set with `public`.")
        if traits.transfer_epochs and self.public_labels is None:
            raise UserError("public images without labels are nothing to begin with: set `transfer_epochs=0`.")
        if traits.own_models and (options.get("local_statistics") or options.get("local_layers")):
            kept, option = ("layers", "local-layers") if options.get("local_layers") else ("statistics", "local")
            raise UserError(f"models of the participants' own keep their {kept} anyway: drop `bn={option}`.")

    def _check_features(self) -> None:
        widths = sorted({group.program.setting.feature_dim for group in self.groups})
        if len(widths) > 1 and self.traits.common_features:
            counts = " and ".join(map(str, widths))
            raise UserError(f"prototypes need as many features in every model, not {counts}: set `features`.")

    @property
    def compilations(self) -> int:
        """The most compilations of any group's round; 1 after any number of rounds."""
        return max(group.compilations for group in self.groups)

    def _in_order(self, parts: Sequence[Any]) -> np.ndarray:
        """Rows of the groups, in the federation's order."""
        return np.concatenate([np.asarray(x) for x in parts])[np.argsort(np.concatenate(self.members))]

    def start(self) -> State:
        """State before the first round and before pre-training."""
        states = [group.start() for group in self.groups]
        clients = tuple(s.clients for s in states)
        if self.traits.own_models:
            clients = tuple(self.states_of(g, self.initial(g)) for g in range(len(self.groups)))
        public = ()
        if self.public is not None and self.traits.exchange != "never":
            public = self.method.init_public(self.program.setting, len(self.public.images))  # pyright: ignore[reportAttributeAccessIssue]
        servers = {"groups": tuple(s.servers for s in states), "public": public}
        return State(servers, clients, tuple(s.statistics for s in states))

    def initial(self, g: int, model: Classifier | None = None) -> Tree:
        """Fresh variables of a group's participants [K_g, ...], of their model or of another model."""
        shape, key = self.federation.image_shape, stream_of(self.seed, "model")
        group, numbers = self.groups[g], jnp.array(self.members[g])
        numbers = jnp.zeros_like(numbers) if self.traits.common_start else numbers
        keys = jax.vmap(partial(jax.random.fold_in, key))(numbers)
        first = fresh_variables(model or group.program.model, keys, shape)
        return jax.tree.map(lambda x: x.astype(group.execution.param_dtype), first)

    def states_of(self, g: int, variables: Tree) -> Tree:
        """States of a group's participants from their models [K_g, ...]."""
        program, data, rows = self.groups[g].program, self.groups[g].data, jnp.arange(len(self.members[g]))
        counts = data.whole.counts if data.whole else data.class_counts
        first = First(self.method, (), stream_of(self.seed, "client"), counts)
        return jax.jit(jax.vmap(partial(first_client, program, first), (0, None, 0)))(variables, data, rows)

    def clients_of(self, round: int) -> list[np.ndarray]:
        """All participants."""
        return [np.arange(self.federation.num_clients)]

    def jobs(self, round: int) -> tuple[schedule.Jobs, list[np.ndarray]]:
        """Jobs of all groups in their order, and the batches of each; `row` says whose each job is."""
        jobs, batches = zip(*(group.jobs(round) for group in self.groups), strict=True)
        drawn = [b for group in batches for b in group]
        return self._joined(jobs), [drawn[i] for i in np.argsort(np.concatenate(self.members))]

    def _joined(self, parts: Sequence[schedule.Jobs]) -> schedule.Jobs:
        pairs = zip(parts, self._shares(), strict=True)
        scaled = [jobs._replace(weight=jobs.weight * share) for jobs, share in pairs]
        joined = schedule.Jobs(*(self._in_order(field) for field in zip(*scaled, strict=True)))
        return joined._replace(row=joined.number)

    def _shares(self) -> tuple[float, ...]:
        """Each group's share of the aggregation weights."""
        raw = np.array([(g.weights[0] * (g.steps[0] > 0)).sum() for g in self.groups])
        return tuple((raw / raw.sum()).tolist())

    def plan(self, round: int):
        """The schedules of the groups, and the jobs of the federation."""
        plans = [group.plan(round) for group in self.groups]
        return plans, self._joined([jobs for _, jobs in plans])

    def public_plan(self, round: int) -> np.ndarray:
        """Public images of each step of an exchange [steps, B]; every epoch a fresh permutation in full batches."""
        assert self.public is not None  # `_check` has seen to it
        total, epochs = len(self.public.images), range(self.method.public_epochs)  # pyright: ignore[reportAttributeAccessIssue]
        batch, draws = min(self.public.batch, total), schedule.streams(self.seed, round)
        permutations = [draws(schedule.NO_CLIENT, epoch).permutation(total) for epoch in epochs]
        return np.concatenate([x[: total // batch * batch] for x in permutations]).reshape(-1, batch).astype(np.int32)

    def step(
        self, state: State, round: int, plan=None, meanwhile: Callable[[], Any] = lambda: None
    ) -> tuple[State, Report]:
        """One round of all participants, as `Simulation.step`; nothing is fetched, as they live on the device."""
        plans, jobs = plan or self.plan(round)
        when = self.traits.exchange
        state = self.exchange(state, round) if when == "before" else state
        state = self._averaged(state, "exchanged")
        parts = [group.step(of_group(state, g), round, plans[g]) for g, group in enumerate(self.groups)]
        states, reports = zip(*parts, strict=True)
        servers, clients, statistics = zip(*states, strict=True)
        servers = self._told(servers, jobs, round) if self.shares_server else servers
        state = self._averaged(State(state.servers | {"groups": tuple(servers)}, clients, statistics), "trained")
        state = self.exchange(state, round) if when == "after" else state
        meanwhile()
        most_epochs = max(report.before.shape[1] for report in reports)  # tested epochs, in which groups may differ
        padding = [((0, 0), (0, most_epochs - report.before.shape[1]), (0, 0)) for report in reports]
        reports = [r._replace(before=jnp.pad(r.before, m)) for r, m in zip(reports, padding, strict=True)]
        return state, Report(*(self.table.in_order(x) for x in zip(*reports, strict=True)))

    def _told(self, outcomes: Sequence[tuple[Tree, Message]], jobs: schedule.Jobs, round: int) -> list[Tree]:
        """Every group's next server, aggregated from its previous one and the messages of all groups."""
        message, number = self._message([message for _, message in outcomes]), np.int32(round)
        return [
            aggregate(g.data, message, Work(g.methods, g.hyper_at(round), g.keys, server, jobs, number))
            for g, aggregate, (server, _) in zip(self.groups, self._aggregates, outcomes, strict=True)
        ]

    def _message(self, messages: Sequence[Message]) -> Message:
        """The message of all participants; `mean` weights groups by their shares."""
        means, totals, each = zip(*messages, strict=True)
        shares = self._shares()
        mean = jax.tree.map(lambda *x: sum(s * v for s, v in zip(shares, x, strict=True)), *means)
        total = jax.tree.map(lambda *x: sum(x), *totals)
        return Message(mean, total, self.table.in_order(each))

    def exchange(self, state: State, round: int) -> State:
        """The exchange of a round."""
        key = jax.random.fold_in(stream_of(self.seed, "exchange"), round)
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
        counts = [group.evaluate(of_group(state, g), personal=personal) for g, group in enumerate(self.groups)]
        generic, personal_counts, local, further = (list(field) for field in zip(*counts, strict=True))
        local = () if isinstance(local[0], tuple) else self._in_order(local)
        return Evaluation(generic[0], self._in_order(personal_counts) if personal else (), local, further[0])

    def general(self, state: State):
        """Correct predictions of the server's models alone, as `Simulation.general`; all groups have the same ones."""
        return self.groups[0].general(of_group(state, 0))

    def domain_correct(self, state: State) -> np.ndarray:
        """Correct predictions of every participant's model on every domain's tests, top-1 and top-5 [K, D, 2, C]."""
        return self._of_all(self._domains, state, self.tests)

    def public_logits(self, state: State) -> np.ndarray:
        """Logits of every participant's model on the public images, not augmented [K, N, C]."""
        assert self.public is not None, "there are no public images"
        return self._of_all(self._logits, state, self.images)

    def _of_all(self, functions: Sequence[Any], state: State, inputs: Any) -> np.ndarray:
        """Results of each group's function for its participants, in the federation's order [K, ...]."""
        pairs = enumerate(zip(self.groups, functions, strict=True))
        return self._in_order([function(g.methods, of_group(state, i), g.data, inputs) for i, (g, function) in pairs])
