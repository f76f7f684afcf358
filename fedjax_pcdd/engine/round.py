"""A federated simulation: its initial state, one round, and its evaluation, each one compiled function.

    simulation = Simulation(model, experiments, local, cohort=10, lanes=2)
    state = simulation.start()
    state, report = simulation.step(state, round=0)
    simulation.evaluate(state)

Several experiments (a sweep) run as one program: they share model, data set and the method's static fields, and differ
in seed, partition and traced hyper-parameters. Letters: E experiments, K clients, R = E * K rows, S cohort, J = E * S.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.engine import schedule
from fedjax_pcdd.engine.blocks import choose_blocks, client_pass
from fedjax_pcdd.engine.device_errors import in_sentences
from fedjax_pcdd.engine.evaluation import evaluation_batch, generic_correct, personal_correct
from fedjax_pcdd.engine.mesh import EVERYWHERE, here, place, sharding
from fedjax_pcdd.engine.optimiser import make_optimiser
from fedjax_pcdd.engine.planning import Experiment as Experiment
from fedjax_pcdd.engine.planning import Local as Local
from fedjax_pcdd.engine.planning import Planned, Planner
from fedjax_pcdd.engine.program import (
    OPTIMISER,
    Program,
    State,
    Tree,
    compiler_options,
    facts_of,
    load_data,
)
from fedjax_pcdd.engine.storage import OnDevice, OnHost
from fedjax_pcdd.engine.training_round import Evaluation as Evaluation
from fedjax_pcdd.engine.training_round import Launched as Launched
from fedjax_pcdd.engine.training_round import Report as Report
from fedjax_pcdd.engine.training_round import training_round
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Hyper, Server, Setting
from fedjax_pcdd.models import normalises, uses_batch_norm
from fedjax_pcdd.models.classifier import Classifier, feature_dim, initialise
from fedjax_pcdd.trees import select, zeros_like


def _stack(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *x: jnp.stack([jnp.asarray(v) for v in x]), *trees)


def _hyper(local: Local) -> Hyper:
    clip = np.inf if local.clip is None else local.clip
    momentum = local.momentum if local.optimizer == "sgd" else 0.0  # Adam has none of its kind
    return Hyper(*(jnp.asarray(v, jnp.result_type(float)) for v in (local.lr, momentum, local.weight_decay, clip)))


def _setting(model: Classifier, experiments: Sequence[Experiment], rounds: int, weights: str) -> Setting:
    federation, local = experiments[0].federation, experiments[0].local
    return Setting(
        num_classes=model.num_classes,
        feature_dim=feature_dim(model, federation.image_shape),
        num_clients=federation.num_clients,
        rounds=rounds,
        epochs=int(np.max(local.epochs)),
        batch_size=local.batch_size,
        normalised=normalises(model, federation.image_shape),
        one_class_clients=max(int(((e.federation.class_counts > 0).sum(1) == 1).sum()) for e in experiments),
        own_weights=weights == "method",
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
        keeps_optimiser: bool = False,
        client_state: Literal["device", "host"] = "device",
        public: tuple[Any, Pipeline] | None = None,
        eval_batch: int | None = None,
        block: int | None = None,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
    ):
        """Prepare the data and the programs; nothing is compiled yet.

        Args:
          model: as `Method.build` returned it.
          experiments: equal in model, data set, method's static fields, local epochs, batch size and optimiser.
          cohort: S, clients a round; clients without samples are never chosen.
          lanes: L of each device, at most E * S are used.
          devices: D; each trains its share of a round's jobs, and has data and state in its memory.
          weights: aggregation weights: the method's own, equal, or the number of full batches (the papers' code).
          local_statistics: keep batch-norm statistics with the client.
          keeps_optimiser: keep the local optimiser's state with the client, too.
          client_state: where the clients' state lives between rounds.
          eval_batch: samples at a time in passes that train nothing; by default what runs well on the device.
          block: b, jobs that begin or end as one, at most L; by default what runs well on the device.
          public: unlabelled images [N, H, W, channels] uint8 and what prepares them, for methods that need them.
          param_dtype: of the parameters (float64 needs JAX's x64 mode).
        """
        first = experiments[0]
        federation, local = first.federation, first.local
        traits = first.method.traits()
        if traits.public and public is None:
            raise UserError("this method needs unlabelled public images: name a data set with `public`.")
        numbers = tuple(range(federation.num_clients))
        self.numbers = np.array([e.numbers or numbers for e in experiments], np.int32)
        setting = _setting(model, experiments, rounds, weights)
        self.sizes = np.stack([e.federation.sizes for e in experiments])
        self.local = local
        asked = self._of_each(local.epochs if traits.epochs is None else traits.epochs)
        self.epochs = np.array([int(e) + traits.more_epochs for e in asked])
        self.experiments, self.cohort_size, self.param_dtype = experiments, cohort, param_dtype
        self.client_state: Literal["device", "host"] = client_state
        self.block = block
        hyper = [_hyper(e.local) for e in experiments]
        configured = [e.method.configure(setting, h) for e, h in zip(experiments, hyper, strict=True)]
        self.advice = [advice for _, advice in configured]  # of each experiment
        self.methods = place(_stack([method for method, _ in configured]), devices)
        self.hyper = place(_stack(hyper), devices)
        self.data = place(load_data([e.federation for e in experiments], public and public[0]), devices)
        self.steps = np.array([[self._epoch_steps(n) for n in sizes] for sizes in self.sizes])
        most = schedule.most_jobs(len(experiments) * cohort, devices)
        rows, lanes, steps = self.sizes.size, max(1, min(lanes, most)), self.steps * self.epochs
        blocks = choose_blocks(
            steps.ravel(), most, lanes, everybody=devices == 1 and cohort >= (steps > 0).sum(1).max(), size=block
        )
        eval_batch = eval_batch or evaluation_batch(lanes * local.batch_size)
        tests = np.concatenate([e.federation.test_sizes for e in experiments])
        self.storage = OnDevice(rows, devices) if client_state == "device" else OnHost(rows, cohort, devices)
        own_statistics = local_statistics and uses_batch_norm(model, federation.image_shape)
        self.program = Program(
            model=model,
            setting=setting,
            pipeline=pipeline,
            lanes=lanes,
            experiments=len(experiments),
            optimizer=local.optimizer,
            clip=any(e.local.clip is not None for e in experiments),
            local_statistics=own_statistics,
            masked=self._has_padding(),
            blocks=blocks,
            eval_batch=eval_batch,
            train_pass=client_pass(self.sizes.ravel(), eval_batch, blocks.size),
            batch_pass=client_pass(self.sizes.ravel(), eval_batch, blocks.size, batch=local.batch_size),
            test_pass=client_pass(tests, eval_batch, blocks.size),
            dtype=dtype,
            public_pipeline=public and public[1],
            devices=devices,
            split_clients=self.storage.split,
            keeps_optimiser=keeps_optimiser,
            in_place=devices == 1,
        )
        self.keys = place(jnp.stack([jax.random.fold_in(jax.random.key(e.seed), 1) for e in experiments]), devices)
        self.capacity = schedule.most_steps(list(steps), cohort, lanes, devices, blocks.quantum)
        self.weights = self._raw_weights(weights)
        self.round = jax.jit(
            partial(training_round, self.program), donate_argnums=4, out_shardings=self._shardings(),
            compiler_options=compiler_options(devices, one_step=blocks.steps == 1),
        )  # fmt: skip
        self._generic_correct = jax.jit(partial(generic_correct, self.program))
        self._personal_correct = jax.jit(partial(personal_correct, self.program), static_argnums=0)

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

        methods, data = here((self.methods, self.data))

        def weight(row):
            method = jax.tree.map(lambda x: x[row // self.program.setting.num_clients], methods)
            return method.weight(facts_of(self.program, data, row))

        return np.asarray(jax.vmap(weight)(jnp.arange(self.sizes.size)), float).reshape(self.sizes.shape)

    def start(self, variables: Tree = None) -> State:
        """State before the first round; a function of the seeds, and of the variables [E, ...] if they are given."""
        setting, program = self.program.setting, self.program
        methods, data, variables = here((self.methods, self.data, variables))
        servers, clients = [], []
        for e, (federation, _, _, seed, _) in enumerate(self.experiments):
            method = jax.tree.map(lambda x, e=e: x[e], methods)
            init, _, server_key, client_key = (jax.random.fold_in(jax.random.key(seed), i) for i in range(4))
            if variables is None:
                first = initialise(program.model, init, federation.image_shape)
                first = jax.tree.map(lambda x: x.astype(self.param_dtype), first)
            else:
                first = select(variables, e)
            rows = np.arange(setting.num_clients) + e * setting.num_clients
            server = method.init_server(setting, first, data.class_counts[rows], server_key)
            servers.append(server)

            # A participant begins with a model of its own.
            known = Server(first) if method.traits().own_models else server

            def init_client(row, method=method, server=known, key=client_key):
                facts = facts_of(program, data, row)
                return method.init_client(setting, server, facts, jax.random.fold_in(key, facts.client))

            clients.append(self.storage.initial(init_client, rows))
        clients = self.storage.concatenate(clients)
        return self.storage.placed(State(_stack(servers), clients, self._kept(servers[0], clients)))

    def _kept(self, server: Tree, clients: Tree) -> Tree:
        """What the engine keeps of each client beside its method, before the first round."""
        program, kept = self.program, {}
        if program.local_statistics:
            shape = self.experiments[0].federation.image_shape
            variables = dict(initialise(program.model, jax.random.key(0), shape))
            variables.pop("params")
            kept |= jax.tree.map(lambda x: x.astype(self.param_dtype), variables)
        if program.keeps_optimiser:
            method, hyper = select((here(self.methods), here(self.hyper)), 0)
            params = jax.eval_shape(method.download, server, select(clients, 0))["params"]
            apart = method.traits().apart
            optimiser = make_optimiser(program.optimizer, hyper, clip=program.clip, apart=apart)
            kept[OPTIMISER] = optimiser.init(zeros_like(params))
        return self.storage.initial(lambda row: kept, np.arange(self.sizes.size)) if kept else ()

    def hyper_at(self, round: int) -> Hyper:
        """Settings of local training [E] in a round: the learning rate falls at `lr_steps`."""
        fallen = sum(round >= step for step in self.local.lr_steps)
        return self.hyper._replace(lr=self.hyper.lr * self.local.lr_decay**fallen) if fallen else self.hyper

    def step(self, state: State, round: int, plan: Planned | None = None) -> tuple[State, Report]:
        """One round. The state passed in is donated: use the one returned.

        Returns:
          (State, Report); both are still being computed when this returns.
        """
        return self.settle(self.launch(state, round, plan))

    def launch(self, state: State, round: int, plan: Planned | None = None) -> Launched:
        """Begin a round, for the host to do something else meanwhile; `settle` ends it."""
        plan = plan or self.plan(round)
        after, report = self.round(*self._arguments(state, round, plan))
        return Launched(state, after, report, plan)

    def compile(self, state: State) -> jax.stages.Compiled:
        """The compiled round, which `step` will use.

        Raises:
          UserError: the compiler fails.
        """
        with in_sentences("compiling a round"):
            return self.round.lower(*self._arguments(state, 0, self.plan(0))).compile()

    def _arguments(self, state: State, round: int, plan: Planned) -> tuple[Any, ...]:
        arrays, jobs = plan
        hyper, held = self.hyper_at(round), self.fetch(state, plan)
        return self.methods, hyper, self.data, self.keys, held, self._placed(arrays), jobs, np.int32(round)

    def prefetch(self, launched: Launched, plan: Planned) -> None:
        """Fetch what the next round's plan needs of clients in host memory while the launched one is computed."""
        self.storage.prefetch(launched.before, self._seen(*plan)[0])

    def settle(self, launched: Launched) -> tuple[State, Report]:
        """The result of a launched round; waits for it where clients live in host memory."""
        return self.storage.store(launched.before, launched.after, *self._seen(*launched.plan)), launched.report

    def fetch(self, state: State, plan: Planned) -> State:
        """The state as the round of a plan sees it, on its devices."""
        return self.storage.fetch(state, self._seen(*plan)[0])

    @property
    def compilations(self) -> int:
        """How often the round was compiled; 1 after any number of rounds."""
        return self.round._cache_size()  # pyright: ignore[reportFunctionMemberAccess, reportAttributeAccessIssue]

    def evaluate(self, state: State, *, personal: bool = False) -> Evaluation:
        """Count correct predictions.

        Args:
          personal: also test every client's personal model between rounds on its own data.
        """
        generic, further = self.general(state)
        local = () if self.experiments[0].method.traits().global_model else self._personal(state, own=False)
        return Evaluation(generic, self._personal(state, own=True) if personal else (), local, further)

    def general(self, state: State) -> tuple[Any, dict[str, Any]]:
        """Correct predictions of the server's models alone: the fields `generic` and `further` of an `Evaluation`."""
        return self._generic_correct(self.methods, state.servers, self.data)

    def _personal(self, state: State, *, own: bool) -> np.ndarray:
        """Correct predictions [R, C] of all personal models."""
        found = []
        for rows in self.storage.chunks():
            held, slots = self.storage.fetch(state, rows), self.storage.slots(rows)
            found.append(np.asarray(self._personal_correct(own, self.methods, held, self.data, rows, slots)))
        return np.concatenate(found)[: self.sizes.size]

    def tuner(self, epochs: int) -> "Simulation":
        """A simulation in which every client fine-tunes for PA, by the method's `fine_tuner`.

        Its cohort is everybody, or this one's cohort where clients live on the host.
        """
        setting = self.program.setting
        plain = [
            e._replace(method=e.method.fine_tuner(setting, epochs), local=replace(e.local, epochs=epochs, lr_steps=()))
            for e in self.experiments
        ]
        return self.alike(plain, self.cohort_size if self.client_state == "host" else setting.num_clients)

    def alike(self, experiments: Sequence[Experiment], cohort: int) -> "Simulation":
        """A simulation of other experiments with this one's model and ways, its statistics averaged."""
        program = self.program
        return Simulation(
            program.model, experiments, pipeline=program.pipeline, cohort=cohort, lanes=program.lanes,
            devices=program.devices, client_state=self.client_state, eval_batch=program.eval_batch, block=self.block,
            dtype=program.dtype, param_dtype=self.param_dtype,
        )  # fmt: skip
