"""A federated simulation: its initial state, one round, and its evaluation, each one compiled function.

    simulation = Simulation(model, experiments, pipeline=Pipeline(), cohort=10, lanes=2)
    state = simulation.start()
    state, report = simulation.step(state, 0)
    simulation.evaluate(state)

Several experiments (a sweep) run as one program: they share model, data set and the method's static fields, and differ
in seed, partition and traced hyper-parameters. Letters: E experiments, K clients, R = E * K rows, S cohort, J = E * S.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.engine import schedule
from fedjax_pcdd.engine.blocks import choose_blocks, client_pass
from fedjax_pcdd.engine.devices import in_sentences
from fedjax_pcdd.engine.ensemble import ensemble_correct, mean_kept, softmax_sums
from fedjax_pcdd.engine.evaluation import evaluation_batch, generic_correct, personal_correct
from fedjax_pcdd.engine.executables import compiled
from fedjax_pcdd.engine.lanes import begin_round, end_round, part_of_round, training_round
from fedjax_pcdd.engine.mesh import EVERYWHERE, distribute, own_copy, owners_of, sharding
from fedjax_pcdd.engine.optimiser import make_optimiser
from fedjax_pcdd.engine.planning import Experiment, Planned, Planner
from fedjax_pcdd.engine.program import (
    CLIENT,
    LAYERS,
    MODEL,
    OPTIMISER,
    ROUNDS,
    SERVER,
    Data,
    Evaluation,
    Launched,
    Program,
    Report,
    State,
    Tree,
    compiler_options,
    facts_of,
    fresh_variables,
    layers_of,
    load_data,
    stream_of,
)  # fmt: skip
from fedjax_pcdd.engine.storage import OnDevice, OnDisk, OnHost
from fedjax_pcdd.engine.streaming import Chunk, Streamed
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.checks import numbers, of_kind, scalar
from fedjax_pcdd.methods.method import Local, Method, Server, Setting
from fedjax_pcdd.methods.own_layers import with_own_layers
from fedjax_pcdd.models import normalisation_params, normalises, uses_batch_norm
from fedjax_pcdd.models.classifier import Classifier, feature_dim, initialise
from fedjax_pcdd.trees import on_leaves, select, total, zeros_like


@on_leaves
def _stack(*rows: Any) -> jax.Array:
    return jnp.stack([jnp.asarray(x) for x in rows])


def _traced(local: Local) -> Local:
    """Local training with its floats as hooks see them."""
    clip = np.inf if local.clip is None else local.clip
    momentum = local.momentum if local.optimizer == "sgd" else 0.0
    floats = {"lr": local.lr, "momentum": momentum, "weight_decay": local.weight_decay, "clip": clip}
    return replace(local, **{name: jnp.asarray(x, jnp.result_type(float)) for name, x in floats.items()})


def _setting(
    model: Classifier, image_shape: tuple[int, ...], experiments: Sequence[Experiment], rounds: int, weights: str,
    steps: int, cohort: int, layers: tuple[tuple[str, ...], ...],
) -> Setting:  # fmt: skip
    federation, local = experiments[0].federation, experiments[0].local
    owned = [(e.federation.class_counts > 0).sum(1) for e in experiments]
    return Setting(
        num_classes=model.num_classes,
        feature_dim=feature_dim(model, image_shape),
        num_clients=federation.num_clients,
        rounds=rounds,
        epochs=1 if local.local_steps else int(np.max(local.epochs)),
        batch_size=local.batch_size,
        normalised=normalises(model, image_shape),
        one_class_clients=max(int((n == 1).sum()) for n in owned),
        fewest_classes=min(int(n[n > 0].min(initial=federation.dataset.num_classes)) for n in owned),
        rarest_class=min(int(e.federation.class_counts.sum(0).min()) for e in experiments),
        own_weights=weights == "method",
        steps=steps,
        cohort=cohort,
        own_layers=layers,
    )


def _check_server(method: Method, server: Tree) -> None:
    """UserError for a server state that is none, or lacks what hooks read that the method does not have itself."""
    numbers(method, "init_server", server)
    reads = [hook for hook in ("download", "generic_variables") if getattr(type(method), hook) is getattr(Method, hook)]
    if reads and not hasattr(server, "variables"):
        name = type(method).__name__
        raise UserError(f"{name}.init_server must return something with a field variables, which {reads[0]} returns.")


def _check_samples(experiment: Experiment, public: Any, stream: int | None) -> None:
    """Refuse a method whose public images or validation samples are not there, with a UserError."""
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
        lanes: int = 1,
        devices: int = 1,
        rounds: int = 1,
        weights: Literal["method", "uniform", "batches"] = "method",
        local_statistics: bool = False,
        local_layers: bool = False,
        keeps_optimiser: bool = False,
        aggregates: bool = True,
        tests_epochs: bool = False,
        client_state: Literal["device", "host", "disk"] = "device",
        stream: int | None = None,
        public: tuple[Any, Pipeline] | None = None,
        eval_batch: int | None = None,
        block: int | None = None,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
    ):
        """Prepare the data and the programs; nothing is compiled yet.

        Args:
          model: as `Method.build` returned it.
          experiments: equal in model, data set, static fields of method and local training.
          pipeline: what is done to images before a model sees them.
          cohort: S, clients a round; clients without samples are never chosen.
          lanes: L of each device, at most E * S are used.
          devices: D; each trains its share of a round's jobs, and has data and state in its memory.
          rounds: T, for what methods do in the last ones, or by degrees.
          weights: aggregation weights: the method's own, equal, or the number of full batches (the papers' code).
          local_statistics: keep batch-norm statistics with the client.
          local_layers: keep these and the parameters of normalisation layers with the client, as FedBN.
          keeps_optimiser: keep the local optimiser's state with the client, too.
          aggregates: False: a round's state has the former servers with their messages, for `Groups`.
          tests_epochs: test clients on their own data before every local epoch, too.
          client_state: where the clients' state lives between rounds.
          stream: bytes of the device's memory for samples, which stay on the host; None for all samples on the device.
          eval_batch: samples at a time in passes that train nothing; by default what runs well on the device.
          block: b, jobs that begin or end as one, at most L; by default what runs well on the device.
          public: unlabelled images [N, H, W, channels] uint8 and what prepares them, for methods that need them.
          dtype: of the computation.
          param_dtype: of the parameters (float64 needs JAX's x64 mode).
        """
        shape = self.image_shape = pipeline.shape(experiments[0].federation.image_shape)
        layers = normalisation_params(model, shape) if local_layers else ()
        if layers:
            experiments = [e._replace(method=with_own_layers(e.method)) for e in experiments]
        _check_samples(experiments[0], public, stream)
        super().__init__(experiments, cohort)
        self.param_dtype, self.block = param_dtype, block
        self.client_state: Literal["device", "host", "disk"] = client_state
        self.owners = jax.process_count() if client_state in ("host", "disk") or stream is not None else 1
        self.storage = self._storage(devices)
        each, steps = devices // self.owners, self.steps * self.epochs  # devices of which one process's jobs are
        most = schedule.most_jobs(len(experiments) * cohort, each)
        lanes = max(1, min(lanes, most))
        all_train = devices == 1 and self._all_train(steps)
        blocks = choose_blocks(steps.ravel(), most, lanes, everyone=all_train, size=block)
        eval_batch = eval_batch or evaluation_batch(lanes * self.local.batch_size)
        self.program = Program(
            model=model,
            method=type(experiments[0].method),
            setting=_setting(model, shape, experiments, rounds, weights, int(steps.max()), cohort, layers),
            pipeline=pipeline,
            lanes=lanes,
            experiments=len(experiments),
            clip=any(e.local.clip is not None for e in experiments),
            local_statistics=(local_statistics or local_layers) and uses_batch_norm(model, shape),
            masked=self.has_padding,
            blocks=blocks,
            eval_batch=eval_batch,
            **self._passes(eval_batch, blocks.size),
            dtype=dtype,
            public_pipeline=public and public[1],
            devices=devices,
            split_data=stream is not None and devices > 1,
            split_clients=self.storage.split,
            keeps_optimiser=keeps_optimiser,
            tests_epochs=int(self.epochs.max()) if tests_epochs else 0,
            validated=experiments[0].federation.validation is not None,
            in_place=devices == 1,
            aggregates=aggregates,
        )
        self.capacity = schedule.most_steps(list(steps), cohort, lanes, each, blocks.quantum)
        self._make_arrays(public and public[0], stream)
        self.weights = self._raw_weights(weights)
        self._make_programs()

    def _passes(self, budget: int, size: int) -> dict[str, Any]:
        """How clients' samples are gone through where nothing is trained, so many at a time in blocks of a size."""
        over, held = partial(client_pass, budget=budget, size=size), self.federations[0].validation
        return {
            "train_pass": over(self.sizes.ravel()),
            "batch_pass": over(self.sizes.ravel(), batch=self.local.batch_size),
            "test_pass": over(np.concatenate([federation.tested_sizes for federation in self.federations])),
            "held_pass": over(np.zeros(1, int) if held is None else held.sizes),
        }

    def _storage(self, devices: int) -> OnDevice:
        """What holds the clients' states between rounds."""
        rows, clients = self.sizes.size, self.sizes.shape[1]
        owners = owners_of(np.arange(rows) % clients, clients) if self.owners > 1 else None
        kinds = {"host": OnHost, "disk": OnDisk}
        if self.client_state in kinds:
            return kinds[self.client_state](rows, self.cohort_size, devices, owners)
        return OnDevice(rows, devices, owners)

    def _all_train(self, steps: np.ndarray) -> bool:
        """Whether all clients with steps [E, K] are in every cohort."""
        always = all(e.availability is None for e in self.experiments)
        return always and bool(self.cohort_size >= (steps > 0).sum(1).max())

    def _make_programs(self) -> None:
        """The compiled functions: a round, its parts where samples come in chunks, and the two evaluations."""
        devices, one_step = self.program.devices, self.program.blocks.steps == 1
        self.round = compiled(
            training_round, self.program, compiler_options=compiler_options(devices, one_step=one_step),
            donate_argnums=4, out_shardings=self._shardings(),
        )  # fmt: skip
        options = {"compiler_options": compiler_options(one_step=one_step), "donate_argnums": 4}
        parts = begin_round, part_of_round, end_round
        self._begin, self._part, self._end = (compiled(part, self.program, **options) for part in parts)
        self._generic_correct = compiled(generic_correct, self.program)
        self._compiled_before = self._compiled
        self._softmax_sums = compiled(softmax_sums, self.program)
        self._ensemble_correct = compiled(ensemble_correct, self.program)
        self._personal_correct = compiled(personal_correct, self.program, static_argnums=0)

    def _make_arrays(self, public: Any, stream: int | None) -> None:
        """What rounds read, on the devices: methods and local training [E], data, and keys [E]."""
        local = [_traced(e.local) for e in self.experiments]
        configured = [
            of_kind(e.method, "configure", e.method.configure(self.program.setting, one), Method, object)
            for e, one in zip(self.experiments, local, strict=True)
        ]
        self.advice = [advice for _, advice in configured]  # of each experiment
        if stream is not None:
            jobs, program = len(self.experiments) * self.cohort_size, self.program
            rows = schedule.most_jobs(jobs, program.devices // self.owners)
            self.streamed = Streamed(self.federations, rows, program.lanes, stream, public, program.devices)
        data = self.streamed.known if self.streamed else load_data(self.federations, public)
        keys = jnp.stack([stream_of(e.seed, ROUNDS) for e in self.experiments])
        arrays = _stack(*(method for method, _ in configured)), _stack(*local), data, keys
        self.methods, self.hyper, self.data, self.keys = distribute(arrays, self.program.devices)

    def _shardings(self) -> Any:
        """Where the results of a round lie on several devices."""
        if self.program.devices == 1:
            return None
        everywhere, clients = (sharding(self.program.devices, spec) for spec in (EVERYWHERE, self.storage.spec))
        return State(everywhere, clients, clients), everywhere

    def _raw_weights(self, rule: str) -> np.ndarray:
        """Aggregation weights [E, K] before normalisation; UserError where an experiment has none."""
        if rule == "uniform":
            return np.ones(self.sizes.shape)
        if rule == "batches":
            full = self.sizes // self.local.batch_size
            if not full.any(axis=1).all():
                raise UserError("no client has a full batch for `weights=batches` to count: lower `batch_size`.")
            return full.astype(float)

        methods, data = own_copy((self.methods, self.data))

        def weight(row):
            method = jax.tree.map(lambda x: x[row // self.program.setting.num_clients], methods)
            return scalar(method, "weight", method.weight(facts_of(self.program, data, row)))

        rows = np.arange(self.sizes.size, dtype=np.int32)
        given = np.asarray(jax.jit(jax.vmap(weight))(rows), float).reshape(self.sizes.shape)
        for e, row in enumerate(given):
            wrong = np.flatnonzero(~(np.isfinite(row) & (row >= 0)))
            if len(wrong):
                name, value = type(self.experiments[e].method).__name__, row[wrong[0]]
                raise UserError(f"{name}.weight must be finite and at least 0, not {value} as for client {wrong[0]}.")
        return given

    def start(self, variables: Tree = None) -> State:
        """State before the first round; a function of the seeds, and of the variables [E, ...] if they are given."""
        methods, data, variables = own_copy((self.methods, self.data, variables))
        servers, makes = [], []
        for e in range(len(self.experiments)):
            first = self.initial(e) if variables is None else select(variables, e)
            server, init_client = self._first(e, select(methods, e), data, first)
            servers.append(server)
            makes.append(init_client)
        clients = self.storage.initial(makes)
        statistics: Tree = ()
        if self.program.local_statistics or self.program.setting.own_layers or self.program.keeps_optimiser:
            kept = [
                self._kept(e, select(methods, e), server, make(jnp.int32(e * self.program.setting.num_clients)))
                for e, (server, make) in enumerate(zip(servers, makes, strict=True))
            ]
            statistics = self.storage.initial([lambda row, own=own: own for own in kept])
        return self.storage.placed(State(_stack(*servers), clients, statistics))

    def _first(self, e: int, method: Any, data: Data, variables: Tree) -> tuple[Tree, Callable[[Any], Tree]]:
        """An experiment's first server, and the function of a row that makes a client's first state."""
        setting = self.program.setting
        server_key, client_key = (stream_of(self.experiments[e].seed, which) for which in (SERVER, CLIENT))
        first = e * setting.num_clients
        counts = data.class_counts[first : first + setting.num_clients]
        server = method.init_server(setting, variables, counts, server_key)
        _check_server(method, server)
        known = Server(variables) if method.traits().own_models else server  # participants begin with their own models

        def init_client(row):
            facts = facts_of(self.program, data, row)
            own = method.init_client(setting, known, facts, jax.random.fold_in(client_key, facts.client))
            return numbers(method, "init_client", own)

        return server, init_client

    def initial(self, e: int) -> Tree:
        """Variables of the model that an experiment starts from."""
        key = stream_of(self.experiments[e].seed, MODEL)
        variables = fresh_variables(self.program.model, key, self.image_shape)
        return jax.tree.map(lambda x: x.astype(self.param_dtype), variables)

    def _kept(self, e: int, method: Any, server: Tree, client: Tree) -> Tree:
        """What the engine keeps of each client of an experiment beside its method, before the first round."""
        program, kept, received = self.program, {}, method.download(server, client)
        if program.local_statistics:
            collections = jax.eval_shape(partial(initialise, program.model, jax.random.key(0), self.image_shape))
            kept |= {name: received[name] for name in collections if name != "params"}
        if program.setting.own_layers:
            kept[LAYERS] = layers_of(program, received["params"])
        if program.keeps_optimiser:
            params, local = received["params"], select(own_copy(self.hyper), e)
            optimiser = make_optimiser(local, clip=program.clip, apart=method.traits().apart)
            kept[OPTIMISER] = optimiser.init(zeros_like(params))
        return kept

    def hyper_at(self, round: int) -> Local:
        """Settings of local training [E] in a round: the learning rate falls at `lr_steps`."""
        fallen = sum(round >= step for step in self.local.lr_steps)
        return replace(self.hyper, lr=self.hyper.lr * self.local.lr_decay**fallen) if fallen else self.hyper

    def step(self, state: State, round: int, plan: Planned | None = None) -> tuple[State, Report]:
        """One round. The state passed in is donated: use the one returned.

        Returns:
          (State, Report); both are still being computed when this returns.
        """
        return self.settle(self.launch(state, round, plan))

    def launch(self, state: State, round: int, plan: Planned | None = None) -> Launched:
        """Begin a round, for the host to do something else meanwhile; `settle` ends it."""
        plan = plan or self.plan(round)
        trained = self._in_chunks if self.chunked else self._at_once
        return Launched(state, *trained(state, round, plan), plan)

    def _at_once(self, state: State, round: int, plan: Planned) -> tuple[State, Report]:
        return self.round(*self.arguments(state, round, plan))

    def _in_chunks(self, state: State, round: int, plan: Planned) -> tuple[State, Report]:
        """One round, whose samples are sent in chunks while the device computes the one before."""
        assert self.streamed
        held, (arrays, jobs) = self.fetch(state, plan), plan
        chunks, number = self.streamed.chunks(arrays, jobs), np.int32(round)  # pyright: ignore[reportArgumentType] - of one device
        chunk = next(chunks)
        inputs = self._chunk_inputs(chunk, round)
        carry = self._begin(*inputs, (held.clients, held.statistics), held.servers, jobs, number)
        while True:
            carry = self._part(*inputs, carry, *self._chunk_work(chunk, held, jobs, number))
            if (chunk := next(chunks, None)) is None:
                return self._end(*inputs, carry, held.servers, jobs, number)
            inputs = self._chunk_inputs(chunk, round)

    def _chunk_inputs(self, chunk: Chunk, round: int) -> tuple[Any, ...]:
        return self.methods, self.hyper_at(round), chunk.data, self.keys

    def _chunk_work(self, chunk: Chunk, held: State, jobs: schedule.Jobs, number: np.int32) -> tuple[Any, ...]:
        return held.servers, chunk.plan, jobs, number, chunk.first, chunk.stop

    def compile(self, state: State) -> jax.stages.Compiled:
        """The compiled round, which `step` will use; that of a chunk where a round goes through several.

        Raises:
          UserError: the compiler fails.
        """
        plan = self.plan(0)
        with in_sentences("compiling a round"):
            if self.chunked:
                return self._part.lower(*self._part_arguments(state, 0, plan)).compile()
            return self.round.lower(*self.arguments(state, 0, plan)).compile()

    def _part_arguments(self, state: State, round: int, plan: Planned) -> tuple[Any, ...]:
        """What the compiled part of a round takes, for the first chunk; of what it carries, the shapes alone."""
        assert self.streamed
        held, (arrays, jobs), number = self.fetch(state, plan), plan, np.int32(round)
        chunk = next(self.streamed.chunks(arrays, jobs))  # pyright: ignore[reportArgumentType] - of one device
        inputs, kept = self._chunk_inputs(chunk, round), (held.clients, held.statistics)
        carry = jax.eval_shape(self._begin, *inputs, kept, held.servers, jobs, number)
        return *inputs, carry, *self._chunk_work(chunk, held, jobs, number)

    def arguments(self, state: State, round: int, plan: Planned) -> tuple[Any, ...]:
        """What the compiled `round` takes."""
        arrays, jobs = plan
        hyper, data, held = self.hyper_at(round), self.data_of(arrays, jobs), self.fetch(state, plan)
        return self.methods, hyper, data, self.keys, held, self.sent(arrays, jobs, round)

    def prefetch(self, launched: Launched, plan: Planned) -> None:
        """Fetch what the next round's plan needs of the host while the launched one is computed."""
        if self.streamed:
            self.streamed.prefetch(*plan)
        self.storage.prefetch(launched.before, self._seen(*plan)[0])

    def settle(self, launched: Launched) -> tuple[State, Report]:
        """The result of a launched round; waits for it where clients live in host memory."""
        return self.storage.store(launched.before, launched.after, *self._seen(*launched.plan)), launched.report

    def fetch(self, state: State, plan: Planned) -> State:
        """The state as the round of a plan sees it, on its devices."""
        return self.storage.fetch(state, self._seen(*plan)[0])

    @property
    def chunked(self) -> bool:
        """Whether a round goes through its samples in several chunks."""
        return self.streamed is not None and self.streamed.chunked

    @property
    def compilations(self) -> int:
        """How often the round was compiled; 1 after any number of rounds, 0 if one made before is used."""
        return self._compiled - self._compiled_before

    @property
    def _compiled(self) -> int:
        trained: Any = self._part if self.chunked else self.round
        return trained._cache_size()  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]

    def evaluate(self, state: State, *, personal: bool = False) -> Evaluation:
        """Count correct predictions.

        Args:
          personal: also test every client's personal model between rounds on its own data.
        """
        generic, further = self.general(state)
        local = () if self.experiments[0].method.traits().global_model else self.personal(state, own=False)
        return Evaluation(generic, self.personal(state) if personal else (), local, further)

    def general(self, state: State) -> tuple[Any, dict[str, Any]]:
        """Correct predictions of what an experiment has one of: `generic` and `further` of an `Evaluation`."""
        batch, layers = self.program.eval_batch_of(self.program.experiments), self._mean_layers(state)
        counts = (self._generic_correct(self.methods, state.servers, layers, data) for data in self._whole_test(batch))
        generic, further = total(counts)
        if self.experiments[0].method.traits().ensemble:
            further = {**further, "ensemble": self._ensemble(state)}
        return generic, further

    def _mean_layers(self, state: State) -> Tree:
        """The mean over all clients of what they keep of their models, [E, ...]; () where that is nothing."""
        if not self.program.setting.own_layers:
            return ()
        portions = self.storage.portions(state, self._tested_rows(state))
        return distribute(mean_kept(portions, self.weights * (self.steps > 0)), self.program.devices)

    def _ensemble(self, state: State) -> jax.Array:
        """Correct predictions [E, C] of the mean of all clients' softmax outputs."""
        batch = self.program.eval_batch_of(self.program.blocks.size)
        sums = (
            [self._softmax_sums(self.methods, held, data, rows, slots, first) for data in self._whole_test(batch)]
            for held, rows, slots, first in self.storage.portions(state, self._tested_rows(state))
        )
        chunks = zip(total(sums), self._whole_test(batch), strict=True)
        return total(self._ensemble_correct(*chunk) for chunk in chunks)

    def _whole_test(self, batch: int) -> Iterable[Data]:
        return self.streamed.whole_test(batch) if self.streamed else [self.data]

    def _tested_rows(self, state: State) -> int | None:
        """How many clients are looked at together, None for what the storage does."""
        if self.streamed is None or self.client_state != "device":
            return None
        kept = jax.tree.leaves((state.clients, state.statistics))
        return self.cohort_size if kept else self.streamed.tested_rows(self.cohort_size)

    def personal(self, state: State, *, own: bool = True) -> np.ndarray:
        """Correct predictions [R, C] of all personal models, each on its client's own tests or on all test samples."""
        counted = np.zeros((self.sizes.size, self.program.counts), np.int32)
        for held, rows, slots, _ in self.storage.portions(state, self._tested_rows(state)):
            batch = self.program.eval_batch_of(self.program.blocks.size)
            tests = [self.streamed.of_tests(rows)] if self.streamed and own else self._whole_test(batch)
            counts = (self._personal_correct(own, self.methods, held, data, rows, slots) for data in tests)
            counted[rows] = np.asarray(total(counts))
        return counted

    def tuner(self, epochs: int, *, tests_epochs: bool = False) -> "Simulation":
        """A simulation in which every client fine-tunes for PA, by the method's `fine_tuner`.

        Its cohort is all clients, or this one's cohort where clients or samples do not live on the device.

        Args:
          epochs: as the user asks.
          tests_epochs: test clients before every epoch, too.
        """
        setting = self.program.setting
        plain = [
            e._replace(
                method=e.method.fine_tuner(setting, epochs),
                local=replace(e.local, epochs=epochs, local_steps=None, lr_steps=()),
            )
            for e in self.experiments
        ]
        portions = self.client_state != "device" or self.streamed
        cohort = self.cohort_size if portions else setting.num_clients
        return self.alike(plain, cohort, tests_epochs=tests_epochs)

    def alike(
        self, experiments: Sequence[Experiment], cohort: int, *, tests_epochs: bool = False,
        model: Classifier | None = None, pipeline: Pipeline | None = None,
    ) -> "Simulation":  # fmt: skip
        """A simulation of other experiments with this one's ways, its statistics averaged; all are there.

        Args:
          model, pipeline: in place of this one's.
        """
        program, experiments = self.program, [e._replace(availability=None) for e in experiments]
        return Simulation(
            model or program.model, experiments, pipeline=pipeline or program.pipeline, cohort=cohort,
            lanes=program.lanes,
            devices=program.devices, client_state=self.client_state,
            stream=self.streamed.memory if self.streamed else None, eval_batch=program.eval_batch, block=self.block,
            dtype=program.dtype, param_dtype=self.param_dtype, tests_epochs=tests_epochs,
        )  # fmt: skip
