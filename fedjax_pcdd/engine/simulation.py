"""A federated simulation: its initial state, one round, and its evaluation, each one compiled function.

    simulation = Simulation(model, experiments, pipeline=Pipeline(), cohort=10, execution=Execution(lanes=2))
    state = simulation.start()
    state, report = simulation.step(state, 0)
    simulation.evaluate(state)

Several experiments (a sweep) run as one program: they share model, data set and the method's static fields, and differ
in seed, partition and traced hyper-parameters. Letters: E experiments, K clients, R = E * K rows, S cohort, J = E * S.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.engine import schedule
from fedjax_pcdd.engine.blocks import Blocks, choose_blocks, client_pass
from fedjax_pcdd.engine.devices import in_sentences
from fedjax_pcdd.engine.evaluator import Evaluator
from fedjax_pcdd.engine.executables import compiled, compiler_options, fresh_variables
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.first_state import First, first_client, first_clients, first_of, kept_of_client, repeated
from fedjax_pcdd.engine.mesh import EVERYWHERE, SPLIT, distribute, own_copy, owners_of, sharding
from fedjax_pcdd.engine.planning import Experiment, Planned, Planner
from fedjax_pcdd.engine.program import Data, Evaluation, Program, Report, State, Tree, Whole, load_data, stream_of
from fedjax_pcdd.engine.round import Work, begin_round, end_round, part_of_round, training_round
from fedjax_pcdd.engine.storage import OnDevice, OnDisk, OnHost
from fedjax_pcdd.engine.streaming import Chunk, Streamed
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.checks import of_kind
from fedjax_pcdd.methods.declared import check_fields
from fedjax_pcdd.methods.method import Local, Method, Setting
from fedjax_pcdd.methods.own_layers import with_own_layers
from fedjax_pcdd.models import normalisation_params, normalises, uses_batch_norm
from fedjax_pcdd.models.classifier import Classifier, feature_dim
from fedjax_pcdd.trees import on_leaves, select


@on_leaves
def _stack(*rows: Any) -> jax.Array:
    return jnp.stack([jnp.asarray(x) for x in rows])


def _traced(local: Local) -> Local:
    """Local training with its floats as hooks see them."""
    clip = np.inf if local.clip is None else local.clip
    momentum = local.momentum if local.optimizer == "sgd" else 0.0
    floats = {"lr": local.lr, "momentum": momentum, "weight_decay": local.weight_decay, "clip": clip}
    return replace(local, **{name: jnp.asarray(x, jnp.result_type(float)) for name, x in floats.items()})


def _check_samples(experiment: Experiment, public: Any, stream: int | None) -> None:
    """UserError if public images or validation samples that the method needs are missing."""
    traits = experiment.method.traits()
    if traits.public and public is None:
        raise UserError("this method needs unlabelled public images: name a data set with `public`.")
    if traits.validation and (experiment.federation.validation is None or stream is not None):
        raise UserError(
            "this method looks at validation samples in training: keep some with `validation`, and `data=device`."
        )


class Simulation(Planner):
    """Compiled rounds over fixed federations; all state is passed in and out, the arguments of `step` are donated."""

    def __init__(
        self,
        model: Classifier,
        experiments: Sequence[Experiment],
        *,
        pipeline: Pipeline,
        cohort: int,
        rounds: int = 1,
        weights: Literal["method", "uniform", "batches"] = "method",
        local_statistics: bool = False,
        local_layers: bool = False,
        keeps_optimiser: bool = False,
        aggregates: bool = True,
        tests_epochs: bool = False,
        public: tuple[Any, Pipeline] | None = None,
        data: Data | None = None,
        execution: Execution = Execution(),  # noqa: B008 - frozen
    ):
        """Prepare the data and the programs; nothing is compiled yet.

        Args:
          model: as `Method.build` returned it.
          experiments: equal in model, data set, static fields of method and local training.
          pipeline: what is done to images before a model sees them.
          cohort: S, clients a round; clients without samples are never chosen.
          rounds: T, for methods that act in the last rounds or change gradually.
          weights: aggregation weights: the method's own, equal, or the number of full batches (the papers' code).
          local_statistics: keep batch-norm statistics with the client.
          local_layers: keep these and the parameters of normalisation layers with the client, as in FedBN.
          keeps_optimiser: also keep the local optimiser's state with the client.
          aggregates: if False, a round's state has the former servers with their messages, for `Groups`.
          tests_epochs: also test clients on their own data before every local epoch.
          public: unlabelled images [N, H, W, channels] uint8 and their pipeline, for methods that need them.
          data: of another simulation with these federations, public images and devices, which then share their memory.
          execution: lanes, devices, memory and precision.
        """
        shape = self.image_shape = pipeline.shape(experiments[0].federation.image_shape)
        layers = normalisation_params(model, shape) if local_layers else ()
        if layers:
            experiments = [e._replace(method=with_own_layers(e.method)) for e in experiments]
        _check_samples(experiments[0], public, execution.stream)
        super().__init__(experiments, cohort, weights)
        self.owners = jax.process_count() if execution.client_state != "device" or execution.stream is not None else 1
        each = execution.devices // self.owners  # devices that share one process's jobs
        self.execution, blocks = self._fitted(execution, schedule.most_jobs(len(experiments) * cohort, each))
        self.capacity = schedule.most_steps(list(self.round_steps), cohort, self.execution.lanes, each, blocks.quantum)
        self.storage, devices = self._storage(), execution.devices
        self.program = Program(
            model=model,
            method=type(experiments[0].method),
            setting=self._setting(model, rounds, weights)._replace(own_layers=layers, keeps_optimiser=keeps_optimiser),
            pipeline=pipeline,
            lanes=self.execution.lanes,
            experiments=len(experiments),
            clip=any(e.local.clip is not None for e in experiments),
            local_statistics=(local_statistics or local_layers) and uses_batch_norm(model, shape),
            masked=self.has_padding,
            blocks=blocks,
            **self._passes(blocks.size),
            dtype=execution.dtype,
            public_pipeline=public and public[1],
            devices=devices,
            split_data=execution.stream is not None and devices > 1,
            split_clients=self.storage.split,
            tests_epochs=int(self.epochs.max()) if tests_epochs else 0,
            validated=experiments[0].federation.validation is not None,
            in_place=devices == 1,
            aggregates=aggregates,
        )
        self._make_arrays(public and public[0], data)
        self.weights = self.raw_weights(weights, self.methods, self.data)
        self._make_programs()

    def _fitted(self, execution: Execution, most: int) -> tuple[Execution, Blocks]:
        """The execution with a test batch size and no more lanes than the `most` jobs of a device, and their blocks."""
        lanes = max(1, min(execution.lanes, most))
        everyone = execution.devices == 1 and self.everyone_trains
        blocks = choose_blocks(self.round_steps.ravel(), most, lanes, everyone=everyone, size=execution.block)
        # On a CPU few enough for its caches to hold their activations; elsewhere a training step needs more memory.
        suitable = 100 if jax.default_backend() == "cpu" else max(500, lanes * self.local.batch_size)
        return replace(execution, lanes=lanes, eval_batch=execution.eval_batch or suitable), blocks

    def _setting(self, model: Classifier, rounds: int, weights: str) -> Setting:
        whole, local = self.experiments[0].whole, self.experiments[0].local
        federations = self.federations if whole is None else [whole]
        client_classes = [(f.class_counts > 0).sum(1) for f in federations]
        return Setting(
            num_classes=model.num_classes,
            feature_dim=feature_dim(model, self.image_shape),
            num_clients=federations[0].num_clients,
            rounds=rounds,
            epochs=1 if local.local_steps else int(np.max(local.epochs)),
            batch_size=local.batch_size,
            normalised=normalises(model, self.image_shape),
            one_class_clients=max(int((n == 1).sum()) for n in client_classes),
            fewest_classes=min(int(n[n > 0].min(initial=federations[0].dataset.num_classes)) for n in client_classes),
            most_classes=max(int(n.max()) for n in client_classes),
            rarest_class=min(int(f.class_counts.sum(0).min()) for f in federations),
            own_weights=weights == "method",
            steps=int(self.round_steps.max()),
            cohort=self.cohort_size if whole is None else whole.num_clients,
            image_shape=self.image_shape,
        )

    def _passes(self, size: int) -> dict[str, Any]:
        """The passes over clients' samples without training, in blocks of this size."""
        budget = self.execution.eval_batch
        assert budget  # `_fitted` has set it
        make_pass, validation = partial(client_pass, budget=budget, size=size), self.federations[0].validation
        return {
            "eval_batch": budget,
            "train_pass": make_pass(self.sizes.ravel()),
            "batch_pass": make_pass(self.sizes.ravel(), batch=self.local.batch_size),
            "test_pass": make_pass(np.concatenate([federation.tested_sizes for federation in self.federations])),
            "held_pass": make_pass(np.zeros(1, int) if validation is None else validation.sizes),
        }

    def _storage(self) -> OnDevice:
        """The storage of the clients' states between rounds."""
        rows, clients = self.sizes.size, self.sizes.shape[1]
        owners = owners_of(np.arange(rows) % clients, clients) if self.owners > 1 else None
        location, devices = self.execution.client_state, self.execution.devices
        if location == "device":
            return OnDevice(rows, devices, owners)
        kind = {"host": OnHost, "disk": OnDisk}[location]
        return kind(rows, self.cohort_size, devices, owners)

    def _make_programs(self) -> None:
        """Make the compiled functions: a round, its parts where samples come in chunks, and those of tests."""
        devices, one_step = self.program.devices, self.program.blocks.steps == 1
        self.round = compiled(
            training_round, self.program, compiler_options=compiler_options(devices, one_step=one_step),
            donate_argnums=4, out_shardings=self._shardings(),
        )  # fmt: skip
        options = {"compiler_options": compiler_options(one_step=one_step), "donate_argnums": 1}
        parts = begin_round, part_of_round, end_round
        self._first_clients = compiled(first_clients, self.program)
        self._begin, self._part, self._end = (compiled(part, self.program, **options) for part in parts)
        self._compiled_before = self._compiled
        self.evaluator = Evaluator(
            program=self.program, methods=self.methods, data=self.data, storage=self.storage, streamed=self.streamed,
            weights=self.weights * (self.steps > 0), cohort=self.cohort_size,
        )  # fmt: skip

    def _make_arrays(self, public: Any, data: Data | None) -> None:
        """Place what rounds read on the devices: methods and local training [E], data, and keys [E]."""
        local = [_traced(e.local) for e in self.experiments]
        configured = [
            of_kind(e.method, "configure", e.method.configure(self.program.setting, traced), Method, list)
            for e, traced in zip(self.experiments, local, strict=True)
        ]
        for method, _ in configured:
            check_fields(method)
        self.advice = [advice for _, advice in configured]  # of each experiment
        if self.execution.stream is not None:
            jobs, program, memory = len(self.experiments) * self.cohort_size, self.program, self.execution.stream
            rows = schedule.most_jobs(jobs, program.devices // self.owners)
            self.streamed = Streamed(self.federations, rows, program.lanes, memory, public, program.devices)
        data = self.streamed.known if self.streamed else data or load_data(self.federations, public, self._whole())
        keys = jnp.stack([stream_of(e.seed, "rounds") for e in self.experiments])
        arrays = _stack(*(method for method, _ in configured)), _stack(*local), data, keys
        self.methods, self.hyper, self.data, self.keys = distribute(arrays, self.program.devices)

    def _whole(self) -> Whole | tuple[()]:
        """The federation of which the clients are a part, () if they are all."""
        whole = self.experiments[0].whole
        if whole is None:
            return ()
        return Whole(jnp.asarray(self.numbers[0]), jnp.asarray(whole.class_counts, jnp.result_type(float)))

    def _shardings(self) -> Any:
        """How the results of a round are placed on several devices."""
        if self.program.devices == 1:
            return None
        client_spec = SPLIT if self.program.split_clients else EVERYWHERE
        everywhere, clients = (sharding(self.program.devices, spec) for spec in (EVERYWHERE, client_spec))
        return State(everywhere, clients, clients), everywhere

    def start(self, variables: Tree = None) -> State:
        """State before the first round; a function of the seeds, and of the variables [E, ...] if they are given."""
        methods, data, variables = own_copy((self.methods, self.data, variables))
        numbers = range(len(self.experiments))
        models = [self.initial(e) if variables is None else select(variables, e) for e in numbers]
        firsts = [
            first_of(self.program, select(methods, e), data, models[e], experiment=e, seed=self.experiments[e].seed)
            for e in numbers
        ]

        def make(e: int, rows: jax.Array) -> Tree:
            return self._first_clients(firsts[e], models[e], data, rows)

        clients, statistics = self.storage.initial(make, len(firsts)), ()
        if self.program.local_statistics or self.program.setting.own_layers or self.program.setting.keeps_optimiser:
            kept = [self._kept(e, firsts[e], models[e], data) for e in numbers]
            statistics = self.storage.initial(lambda e, rows: repeated(kept[e], rows), len(firsts))
        return self.storage.placed(State(_stack(*(first.server for first in firsts)), clients, statistics))

    def _kept(self, e: int, first: First, variables: Tree, data: Data) -> Tree:
        """What the engine keeps for each client of an experiment, made from the first one, which stands for all."""
        row, hyper = jnp.int32(e * self.program.setting.num_clients), select(own_copy(self.hyper), e)
        client = first_client(self.program, first, variables, data, row)
        return kept_of_client(self.program, first.method, hyper, self.image_shape, first.server, client)

    def initial(self, e: int) -> Tree:
        """Variables of the model that an experiment starts from."""
        key = stream_of(self.experiments[e].seed, "model")
        variables = fresh_variables(self.program.model, key, self.image_shape)
        return jax.tree.map(lambda x: x.astype(self.execution.param_dtype), variables)

    def hyper_at(self, round: int) -> Local:
        """Settings of local training [E] in a round: the learning rate falls at `lr_steps`."""
        drops = sum(round >= step for step in self.local.lr_steps)
        return replace(self.hyper, lr=self.hyper.lr * self.local.lr_decay**drops) if drops else self.hyper

    def step(
        self,
        state: State,
        round: int,
        plan: Planned | None = None,
        meanwhile: Callable[[], Planned | None] = lambda: None,
    ) -> tuple[State, Report]:
        """One round. The state passed in is donated: use the one returned.

        Args:
          meanwhile: called while the device computes; returns the plan of the round for which samples and clients are
            fetched from the host already, None if no round follows.

        Returns:
          (State, Report); both are still being computed when this returns, except where clients live in host memory.
        """
        plan = plan or self.plan(round)
        if self.chunked:
            after, report = self._in_chunks(state, round, plan)
        else:
            after, report = self.round(*self.arguments(state, round, plan))
        if following := meanwhile():
            if self.streamed:
                self.streamed.prefetch(*following)
            self.storage.prefetch(state, self._seen(*following)[0])
        return self.storage.store(state, after, *self._seen(*plan)), report

    def _in_chunks(self, state: State, round: int, plan: Planned) -> tuple[State, Report]:
        """One round, whose samples are sent in chunks, each while the device computes the one before.

        The one before must be computed when the next is sent, or memory would hold more than two.
        """
        chunks, kept, work = self._chunked_work(state, round, plan)
        carry: Any = None
        for chunk in chunks:
            jax.block_until_ready(carry)
            carry = carry or self._begin(chunk.data, kept, work)
            carry = self._part(chunk.data, carry, work, chunk.plan, chunk.first, chunk.stop)
        outcome = carry[1]
        rest = outcome._replace(clients=(), statistics=())
        return self._end(self.data, (outcome.clients, outcome.statistics), rest, work)

    def _chunked_work(self, state: State, round: int, plan: Planned) -> tuple[Iterator[Chunk], Any, Work]:
        """The chunks of a round, its clients' states and statistics, and what the chunks share."""
        assert self.streamed
        fetched, (arrays, jobs) = self.fetch(state, plan), plan
        work = Work(self.methods, self.hyper_at(round), self.keys, fetched.servers, jobs, np.int32(round))
        chunks = self.streamed.chunks(arrays, jobs)  # pyright: ignore[reportArgumentType] - of one device
        return chunks, (fetched.clients, fetched.statistics), work

    def compile(self, state: State) -> jax.stages.Compiled:
        """The compiled round that `step` will use; the compiled part of a round if it goes through several chunks.

        Raises:
          UserError: the compiler fails.
        """
        plan = self.plan(0)
        with in_sentences("compiling a round"):
            if self.chunked:
                chunks, kept, work = self._chunked_work(state, 0, plan)
                chunk = next(chunks)
                carry = jax.eval_shape(self._begin, chunk.data, kept, work)
                return self._part.lower(chunk.data, carry, work, chunk.plan, chunk.first, chunk.stop).compile()
            return self.round.lower(*self.arguments(state, 0, plan)).compile()

    def arguments(self, state: State, round: int, plan: Planned) -> tuple[Any, ...]:
        """Arguments of the compiled `round`."""
        arrays, jobs = plan
        hyper, data, fetched = self.hyper_at(round), self.data_of(arrays, jobs), self.fetch(state, plan)
        return self.methods, hyper, data, self.keys, fetched, self.sent(arrays, jobs, round)

    def fetch(self, state: State, plan: Planned) -> State:
        """The state as the round of a plan sees it, on its devices."""
        return self.storage.fetch(state, self._seen(*plan)[0])

    @property
    def chunked(self) -> bool:
        """Whether a round goes through its samples in several chunks."""
        return self.streamed is not None and self.streamed.chunked

    @property
    def compilations(self) -> int:
        """How often the round was compiled; 1 after any number of rounds, 0 if an earlier program is reused."""
        return self._compiled - self._compiled_before

    @property
    def _compiled(self) -> int:
        function: Any = self._part if self.chunked else self.round
        return function._cache_size()  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]

    def evaluate(self, state: State, *, personal: bool = False) -> Evaluation:
        """Correct predictions, as `Evaluator.evaluate`."""
        return self.evaluator.evaluate(state, personal=personal)

    def general(self, state: State) -> tuple[Any, dict[str, Any]]:
        """Correct predictions of the server's models alone, as `Evaluator.general`."""
        return self.evaluator.general(state)

    def tuner(self, epochs: int, *, tests_epochs: bool = False) -> "Simulation":
        """A simulation in which every client fine-tunes for PA, by the method's `fine_tuner`.

        Its cohort is all clients, or this simulation's cohort if clients or samples live off the device. The epochs are
        those that the user requested; with `tests_epochs` clients are also tested before each.
        """
        experiments = [
            experiment._replace(
                method=self.tuning_method(e, epochs),
                local=replace(experiment.local, epochs=epochs, local_steps=None, lr_steps=()),
            )
            for e, experiment in enumerate(self.experiments)
        ]
        off_device = self.execution.client_state != "device" or self.streamed
        cohort = self.cohort_size if off_device else self.sizes.shape[1]
        return self.alike(experiments, cohort, tests_epochs=tests_epochs)

    def tuning_method(self, e: int, epochs: int) -> Method:
        """The method by which the clients of experiment `e` fine-tune for `epochs` epochs."""
        method = self.experiments[e].method
        return of_kind(method, "fine_tuner", method.fine_tuner(self.program.setting, epochs), Method)

    def alike(
        self, experiments: Sequence[Experiment], cohort: int, *, tests_epochs: bool = False,
        model: Classifier | None = None, pipeline: Pipeline | None = None,
    ) -> "Simulation":  # fmt: skip
        """A simulation of other experiments, set up as this one, with averaged statistics and all clients available.

        Its model and pipeline are this one's unless given.
        """
        program, experiments = self.program, [e._replace(availability=None) for e in experiments]
        pairs = zip(experiments, self.federations, strict=False)
        shared = len(experiments) == len(self.federations) and all(e.federation is other for e, other in pairs)
        return Simulation(
            model or program.model, experiments, pipeline=pipeline or program.pipeline, cohort=cohort,
            tests_epochs=tests_epochs, data=self.data._replace(public=()) if shared else None, execution=self.execution,
        )  # fmt: skip
