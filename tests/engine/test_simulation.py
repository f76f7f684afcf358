"""The engine on the toy federation: aggregation, batch norm, precision, sweeps, lanes, compilation."""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from flax import struct

from fedjax_pcdd import models
from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine import schedule, tuning
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.program import stream_of
from fedjax_pcdd.engine.round import training_round
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Local, Message, Method, Summary, hyperparameter
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.testing import leaves


def params(state):
    return jax.tree.map(np.array, state.servers.variables["params"])


def assert_close(a, b, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, tolerance, tolerance), a, b)


@pytest.mark.parametrize("rule", ["keep", "drop"])
def test_batches_larger_than_all_clients_train_as_whole_clients_do_and_are_hardly_wider(rule):
    most = max(toy.SIZES)
    whole, huge = (toy.simulation(batch_size=size, last_batch=rule) for size in (most, 10**6))
    assert huge.plan(0)[0].indices.shape[-1] < 2 * most
    assert huge.program.setting.batch_size == 10**6  # what methods see is what was asked for
    assert_close(params(toy.train(huge, (0, 1))[0]), params(toy.train(whole, (0, 1))[0]))


def test_batches_are_as_wide_as_asked_for_where_their_size_has_a_meaning():
    for options in ({"last_batch": "top_up"}, {"weights": "batches", "last_batch": "keep"}):
        assert toy.simulation(batch_size=64, **options).local.batch_size == 64


def simulate(model, *, methods=None, seeds=(0,), lanes=2, cohort=5, **options):
    base = toy.simulation()
    methods = methods or [Method()] * len(seeds)
    experiments = [
        Experiment(base.experiments[0].federation, m, base.local, s) for m, s in zip(methods, seeds, strict=True)
    ]
    return toy.shared(
        Simulation(
            methods[0].build(model), experiments, pipeline=Pipeline(), cohort=cohort, rounds=3,
            **toy.options(lanes=lanes, **options),
        )
    )  # fmt: skip


@pytest.mark.thorough
def test_training_one_client_equals_centralised_training():
    simulated = toy.simulation(cohort=5, lanes=1)
    k = 4
    federation = simulated.experiments[0].federation
    one_client = Federation(
        federation.dataset, Partition((federation.partition.train[k],), (federation.partition.test[k],))
    )
    single = Simulation(
        simulated.program.model, [Experiment(one_client, Method(), simulated.local, 0)], pipeline=Pipeline(), cohort=1
    )
    state = single.start()
    variables = jax.tree.map(lambda x: x[0], state.servers.variables)
    _, batches = single.jobs(0)
    local = simulated.local
    optimiser = optax.chain(optax.add_decayed_weights(local.weight_decay), optax.sgd(local.lr, local.momentum))
    weights = variables["params"]
    optimiser_state = optimiser.init(weights)

    @jax.jit
    def step(weights, optimiser_state, index):
        images = prepare(Pipeline(), jnp.asarray(federation.dataset.x_train)[index], None, train=True)
        labels = jnp.asarray(federation.dataset.y_train)[index]

        def loss(weights):
            outputs, _ = forward(simulated.program.model, {"params": weights}, images, train=True)
            return cross_entropy(outputs.logits, labels)

        value, gradients = jax.value_and_grad(loss)(weights)
        updates, optimiser_state = optimiser.update(gradients, optimiser_state, weights)
        return optax.apply_updates(weights, updates), optimiser_state, value

    losses = []
    for index in batches[0]:
        weights, optimiser_state, value = step(weights, optimiser_state, index)
        losses.append(float(value))
    state, report = single.step(state, 0)
    assert_close(params(state), jax.tree.map(lambda x: x[None], weights), 1e-6)
    np.testing.assert_allclose(report.loss, [np.mean(losses)], 1e-5)


@pytest.mark.thorough
def test_the_mean_of_clients_with_the_same_data_equals_one_of_them():
    base = toy.simulation(cohort=5, lanes=1)
    federation, k = base.experiments[0].federation, 4
    states = []
    for copies in (1, 3):
        partition = Partition((federation.partition.train[k],) * copies, (federation.partition.test[k],) * copies)
        local = dataclasses.replace(base.local, shuffle=False)
        simulation = base.alike([Experiment(Federation(federation.dataset, partition), Method(), local, 0)], copies)
        states.append(params(simulation.step(simulation.start(), 0)[0]))
    assert_close(*states, 1e-6)


@struct.dataclass
class Normed(Method):
    def build(self, model):
        return model.clone(feature_norm=True)


@pytest.mark.thorough
def test_at_learning_rate_0_only_running_statistics_move():
    simulated = toy.simulation(method=Normed(), lr=0.0, cohort=1, lanes=1)
    before = jax.tree.map(np.array, simulated.start().servers.variables)
    after = jax.tree.map(np.array, simulated.step(simulated.start(), 0)[0].servers.variables)
    jax.tree.map(np.testing.assert_array_equal, before["params"], after["params"])
    (k,), federation = simulated.clients_of(0)[0], simulated.experiments[0].federation
    images = prepare(Pipeline(), federation.dataset.x_train[federation.partition.train[k]], None, train=False)
    model = simulated.program.model.clone(feature_norm=False)
    plain_params = jax.tree.map(lambda x: x[0], before["params"] | {"feature_norm": {}})
    features = np.asarray(forward(model, {"params": plain_params}, images, train=False)[0].features)
    (start, end) = (v["batch_stats"]["feature_norm"]["mean"][0] for v in (before, after))
    target = features.mean(0)
    assert np.linalg.norm(end - target) < 0.7 * np.linalg.norm(start - target)


@pytest.mark.parametrize("weights", ["method", "uniform", "batches"])
def test_client_weights_follow_the_weights_option(weights):
    simulated = toy.simulation(weights=weights, cohort=5)
    jobs, _ = simulated.jobs(0)
    sizes = np.array(toy.SIZES)
    raw = {"method": sizes, "uniform": np.ones(5), "batches": sizes // 8}[weights]
    np.testing.assert_allclose(jobs.weight, raw / raw.sum(), 1e-6)


def test_strict_rule_leaves_small_clients_out():
    jobs, batches = toy.simulation(last_batch="strict", cohort=5).jobs(0)
    assert len(batches[0]) == 0
    assert jobs.weight[0] == 0
    assert np.isclose(jobs.weight.sum(), 1)


@struct.dataclass
class Poisoned(Method):
    """Client 1 has no weight, and sends what is not finite."""

    def weight(self, facts):
        return jnp.where(facts.client == 1, 0.0, 1.0)

    def upload(self, variables, summary, context):
        poison = jnp.where(context.facts.client == 1, jnp.nan, 0.0)
        return (), Message(mean=jax.tree.map(lambda x: x + poison, variables))


@pytest.mark.parametrize("size", [{"lanes": 1}, pytest.param({"lanes": 3, "block": 3}, marks=pytest.mark.thorough)])
def test_a_client_without_weight_cannot_spoil_the_mean(size):
    simulated = toy.simulation(method=Poisoned(), cohort=5, **size)
    state, _ = simulated.step(simulated.start(), 0)
    assert all(np.isfinite(x).all() for x in leaves(state.servers))


def test_cohort_does_not_depend_on_the_method():
    cohorts = [[tuple(toy.simulation(name).clients_of(r)[0]) for r in range(3)] for name in ("fedavg", "fedgela")]
    assert cohorts[0] == cohorts[1]


@pytest.mark.thorough
def test_running_statistics_are_averaged_with_the_weights_of_parameters():
    simulated = simulate(toy.narrow_resnet())
    state, _ = simulated.step(simulated.start(), 0)
    single = [simulate(toy.narrow_resnet(), cohort=5, lanes=1)]
    jobs, batches = single[0].jobs(0)
    total = None
    for j in range(5):
        alone = jobs._replace(weight=np.eye(5, dtype=np.float32)[j])
        client_batches = [b if i == j else b[:0] for i, b in enumerate(batches)]
        plan = schedule.pack(client_batches, 1, steps=single[0].capacity)
        result, _ = single[0].step(single[0].start(), 0, (plan, alone))
        scaled = jax.tree.map(lambda x, j=j: jobs.weight[j] * np.array(x), result.servers.variables)
        total = scaled if total is None else jax.tree.map(np.add, total, scaled)
    assert_close(jax.tree.map(np.array, state.servers.variables), total)


@pytest.mark.thorough
def test_local_statistics_stay_with_their_client():
    simulated = simulate(toy.narrow_resnet(), cohort=3, local_statistics=True)
    before = jax.tree.leaves(jax.tree.map(np.array, simulated.start().statistics))
    state, _ = simulated.step(simulated.start(), 0)
    after = jax.tree.leaves(jax.tree.map(np.array, state.statistics))
    moved = np.any([(a != b).reshape(5, -1).any(1) for a, b in zip(after, before, strict=True)], axis=0)
    np.testing.assert_array_equal(np.flatnonzero(moved), simulated.clients_of(0)[0])


@pytest.mark.thorough
def test_group_norm_has_no_running_statistics():
    state = simulate(toy.narrow_resnet(norm="group")).start()
    assert set(state.servers.variables) == {"params"}


QUICK = ("fedavg", "fedmr", "fedgela", "moon", "solo")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name, cls in METHODS.items()
        if not cls().traits().public  # there are no public images here
    ],
)
def test_batch_norm_model_trains_without_nan(name):
    method = METHODS[name](**{"meme": "mlp"} if name == "fml" else {})
    simulated = simulate(toy.narrow_resnet(), methods=[method], cohort=5)
    state, report = simulated.step(simulated.start(), 0)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.tree.map(np.array, state)))
    assert np.isfinite(np.array(report.loss)).all()


@pytest.mark.thorough
def test_bfloat16_keeps_float32_parameters_and_stays_close():
    runs = []
    for dtype in (None, jnp.bfloat16):
        model = models.build("mlp", num_classes=toy.CLASSES, image_shape=(5, 5, 1), dtype=dtype)
        simulated = simulate(model, dtype=dtype or jnp.float32)
        runs.append(simulated.step(simulated.start(), 0)[0])
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(runs[1].servers))
    assert_close(params(runs[0]), params(runs[1]), 2e-2)


@pytest.mark.thorough
def test_a_sweep_gives_each_experiment_its_own_result():
    model = toy.simulation().program.model
    methods, seeds = [METHODS["fedprox"](mu=mu) for mu in (0.0, 1.0, 1.0)], (0, 0, 1)
    together = simulate(model, methods=methods, seeds=seeds, cohort=3, lanes=2)
    state = together.start()
    for r in range(2):
        state, _ = together.step(state, r)
    for e, (method, seed) in enumerate(zip(methods, seeds, strict=True)):
        alone = simulate(model, methods=[method], seeds=[seed], cohort=3, lanes=2)
        single = alone.start()
        for r in range(2):
            single, _ = alone.step(single, r)
        assert_close(jax.tree.map(lambda x, e=e: x[e], params(state)), jax.tree.map(lambda x: x[0], params(single)))


class Remembered(NamedTuple):
    """The model, and what a server is told: class counts of all clients, the cohort, and how many of it trained."""

    variables: Any
    counts: jax.Array
    cohort: jax.Array
    count: jax.Array


@struct.dataclass
class Remembering(Method):
    """FedAvg in which server and clients keep what they are told about the clients."""

    power: float = hyperparameter(1.0, help="of the samples in a client's weight")

    def init_server(self, setting, variables, class_counts, key):
        return Remembered(variables, class_counts, jnp.zeros(3, jnp.int32), jnp.zeros((), jnp.int32))

    def init_client(self, setting, server, facts, key):
        return facts

    def weight(self, facts):
        return facts.num_samples**self.power

    def aggregate(self, server, message, weights, context):
        return server._replace(variables=message.mean, cohort=context.clients, count=context.count)


@pytest.mark.thorough
def test_a_sweep_tells_each_experiment_about_its_own_clients():
    base = toy.simulation()
    original = base.experiments[0].federation
    order = np.array([3, 0, 4, 2, 1])
    permuted = Federation(original.dataset, Partition(*([lists[k] for k in order] for lists in original.partition)))
    methods = Remembering(power=1.0), Remembering(power=0.0)
    experiments = [
        Experiment(federation, method, base.local, seed)
        for seed, (federation, method) in enumerate(zip((original, permuted), methods, strict=True))
    ]
    together = Simulation(base.program.model, experiments, pipeline=Pipeline(), cohort=3, execution=Execution(lanes=2))
    np.testing.assert_array_equal(together.weights, [original.sizes, np.ones(5)])
    state, _ = together.step(together.start(), 0)
    for e, federation in enumerate((original, permuted)):
        facts = jax.tree.map(lambda x, e=e: np.array(x)[5 * e : 5 * e + 5], state.clients)
        np.testing.assert_array_equal(facts.client, np.arange(5))
        np.testing.assert_array_equal(facts.class_counts, federation.class_counts)
        np.testing.assert_array_equal(facts.num_samples, federation.sizes)
        np.testing.assert_array_equal(facts.federation_counts, [federation.class_counts] * 5)
        np.testing.assert_array_equal(state.servers.counts[e], federation.class_counts)
        np.testing.assert_array_equal(state.servers.cohort[e], together.clients_of(0)[e])


def test_the_setting_describes_the_clients_of_all_experiments():
    data, experiments = Dataset("grey", *[np.zeros((30, 1, 1, 1), np.uint8), np.arange(30) % 3] * 2, 3), []
    for counts in ([[2, 0, 0], [0, 0, 0], [3, 1, 4]], [[1, 1, 1], [0, 1, 1], [1, 2, 0]]):  # of each client and class
        lists = tuple(np.concatenate([c + 3 * np.arange(n) for c, n in enumerate(row)]) for row in counts)
        experiments.append(Experiment(Federation(data, Partition(lists, lists)), Method(), Local(3, 2, "keep"), 0))
    model = models.build("mlp", num_classes=3, image_shape=(1, 1, 1))
    setting = Simulation(model, experiments, pipeline=Pipeline(), cohort=2).program.setting
    assert (setting.one_class_clients, setting.fewest_classes, setting.rarest_class, setting.steps) == (1, 1, 1, 12)


def test_the_setting_has_the_shape_of_what_the_model_reads():
    base = toy.simulation()
    cut = Simulation(base.program.model, base.experiments, pipeline=Pipeline(window=3), cohort=3)
    assert (base.program.setting.image_shape, cut.program.setting.image_shape) == ((5, 5, 1), (3, 3, 1))


class Book(NamedTuple):
    """The model, and what each client [K] sent last."""

    variables: Any
    sent: jax.Array


@struct.dataclass
class Bookkeeping(Method):
    """FedAvg whose server notes what each of its clients sends: its number, and the round."""

    def init_server(self, setting, variables, class_counts, key):
        return Book(variables, jnp.full((setting.num_clients, 2), -1.0))

    def upload(self, variables, summary, context):
        return (), Message(mean=variables, each=jnp.stack([context.facts.client, context.round]).astype(float))

    def aggregate(self, server, message, weights, context):
        return Book(message.mean, server.sent.at[context.clients].set(message.each))


def test_a_table_of_the_servers_has_no_entries_from_places_that_nobody_took():
    simulation = toy.simulation(method=Bookkeeping(), cohort=4)
    state = simulation.start()
    for round, cohort in enumerate(([3, 0], [2, 4], [1])):
        state, _ = simulation.step(state, round, simulation.plan(round, [np.array(cohort)]))
    np.testing.assert_array_equal(state.servers.sent[0], [[0, 0], [1, 2], [2, 1], [3, 0], [4, 1]])


class Told(NamedTuple):
    """The model, the counts [K, C] that the server began with, and what all participants [K] have been told."""

    variables: Any
    counts: jax.Array
    clients: jax.Array
    told: jax.Array


@struct.dataclass
class Shared(METHODS["solo"]):
    """Participants that note what they are told, and a server that is the same for all architectures."""

    def traits(self):
        return super().traits()._replace(common_server=True)

    def init_server(self, setting, variables, class_counts, key):
        clients = setting.num_clients
        return Told(variables, class_counts, jnp.zeros(clients, jnp.int32), jnp.zeros((clients, 6)))

    def init_client(self, setting, server, facts, key):
        return super().init_client(setting, server, facts, key) | {"facts": facts}

    def download(self, server, client):
        return {name: value for name, value in client.items() if name != "facts"}

    def upload(self, variables, summary, context):
        setting, facts = context.setting, context.facts
        told = [facts.client, setting.num_clients, setting.cohort, setting.rarest_class, setting.most_classes]
        told += [facts.federation_counts.sum()]
        return variables | {"facts": facts}, Message(each=jnp.stack([jnp.asarray(x, float) for x in told]))

    def aggregate(self, server, message, weights, context):
        return server._replace(clients=context.clients, told=message.each)


def test_participants_of_several_architectures_are_told_about_the_whole_federation():
    groups, counts = toy.groups(method=Shared(), necks=(0, 1, 0, 1, 0)), toy.federation().class_counts
    state = groups.start()
    for g, members in enumerate(groups.members):
        np.testing.assert_array_equal(state.servers["groups"][g].counts[0], counts)
        np.testing.assert_array_equal(state.clients[g]["facts"].client, members)
        np.testing.assert_array_equal(state.clients[g]["facts"].class_counts, counts[list(members)])
        np.testing.assert_array_equal(state.clients[g]["facts"].federation_counts, [counts] * len(members))
    servers = groups.step(state, 0)[0].servers["groups"]
    told = [[k, 5, 5, counts.sum(0).min(), (counts > 0).sum(1).max(), counts.sum()] for k in range(5)]
    for server in servers:
        np.testing.assert_array_equal(server.told[0], told)
        np.testing.assert_array_equal(server.clients[0], np.arange(5))


class Drawn(NamedTuple):
    """The model, and the random numbers that the server has drawn."""

    variables: Any
    numbers: jax.Array


@struct.dataclass
class Drawing(Method):
    """FedAvg in which server and clients start with random numbers."""

    def init_server(self, setting, variables, class_counts, key):
        return Drawn(variables, jax.random.uniform(key, (2,)))

    def init_client(self, setting, server, facts, key):
        return jax.random.uniform(key, (2,))


def test_server_and_clients_draw_from_separate_streams_of_the_seed():
    base = toy.simulation()
    experiments = [base.experiments[0]._replace(method=Drawing(), seed=seed) for seed in (0, 0, 1)]
    state = Simulation(base.program.model, experiments, pipeline=Pipeline(), cohort=3).start()
    for e, seed in enumerate((0, 0, 1)):
        server_key, client_key = (stream_of(seed, which) for which in ("server", "client"))
        expected = [jax.random.uniform(jax.random.fold_in(client_key, k), (2,)) for k in range(5)]
        np.testing.assert_array_equal(state.servers.numbers[e], jax.random.uniform(server_key, (2,)))
        np.testing.assert_array_equal(state.clients[5 * e : 5 * e + 5], expected)


@pytest.mark.thorough
def test_a_server_counts_the_clients_that_trained():
    simulated = toy.simulation(method=Remembering(), last_batch="strict")
    state, _ = simulated.step(simulated.start(), 0, simulated.plan(0, [np.array([0, 1, 4])]))
    assert state.servers.count == 2  # client 0 has one sample, a batch 8


class Seen(NamedTuple):
    variables: dict
    anyone: jax.Array
    total: jax.Array


@struct.dataclass
class Drifting(Method):
    """Its server sums into fields of narrower types."""

    def init_server(self, setting, variables, class_counts, key):
        return Seen(variables, jnp.zeros((), bool), jnp.zeros((), jnp.uint8))

    def aggregate(self, server, message, weights, context):
        total = server.total + context.count
        return Seen(message.mean, server.anyone + context.count, total)


@pytest.mark.thorough
def test_the_servers_state_keeps_the_dtypes_of_init_server():
    simulated = toy.simulation(method=Drifting(), last_batch="keep")
    first = simulated.start()
    after = toy.train(simulated)[0]
    assert jax.tree.map(lambda x: x.dtype, after.servers) == jax.tree.map(lambda x: x.dtype, first.servers)
    assert (bool(after.servers.anyone[0]), int(after.servers.total[0])) == (True, 9)


class Received(NamedTuple):
    variables: dict
    error: jax.Array
    owners: jax.Array
    hundreds: jax.Array
    batches: jax.Array


@struct.dataclass
class Narrow(Method):
    """Sends a model in bfloat16, and sums booleans and small integers over clients and over a client's batches."""

    def traits(self):
        return super().traits()._replace(summary=Summary(train=True))

    def init_server(self, setting, variables, class_counts, key):
        zero = jnp.zeros((), jnp.int32)
        return Received(variables, jnp.zeros(()), jnp.zeros(setting.num_classes, jnp.int32), zero, zero)

    def summarise(self, variables, batch, context):
        return batch.mask.any()

    def upload(self, variables, summary, context):
        sent = jax.tree.map(lambda x: x.astype(jnp.bfloat16), variables)
        totals = context.facts.class_counts > 0, jnp.uint8(100), summary
        return (), Message(mean=sent, total=totals, each=sent["params"])

    def aggregate(self, server, message, weights, context):
        mean = jax.tree.map(lambda x: jnp.tensordot(weights, x.astype(jnp.float32), 1), message.each)
        difference = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), mean, message.mean["params"])
        return Received(message.mean, jnp.stack(jax.tree.leaves(difference)).max(), *message.total)


@pytest.mark.thorough
def test_small_types_are_summed_in_32_bits():
    server = toy.train(toy.simulation(method=Narrow(), cohort=5, last_batch="keep"), (0,))[0].servers
    assert server.error[0] < 1e-6
    assert server.owners[0].tolist() == [sum(c in owned for owned in toy.OWNED) for c in range(4)]
    assert server.hundreds[0] == 100 * 5
    assert server.batches[0] == sum(-(-size // 8) for size in toy.SIZES)


@pytest.mark.thorough
def test_evaluation_counts_every_test_sample_once():
    simulated = toy.simulation(cohort=5)
    state, report = toy.train(simulated, (0,))
    federation = simulated.experiments[0].federation
    variables = jax.tree.map(lambda x: x[0], state.servers.variables)
    images = prepare(Pipeline(), federation.dataset.x_test, None, train=False)
    predictions = np.argmax(forward(simulated.program.model, variables, images, train=False)[0].logits, -1)
    correct = predictions == federation.dataset.y_test
    counts = simulated.evaluate(state, personal=True)
    by_class = np.bincount(federation.dataset.y_test, weights=correct, minlength=toy.CLASSES)
    np.testing.assert_array_equal(counts.generic[0], by_class)
    personal = [correct[x].sum() for x in federation.partition.test]
    np.testing.assert_array_equal(np.array(counts.personal).sum(1), personal)
    assert np.array(report.correct).sum() > 0


@pytest.mark.thorough
def test_fine_tuning_starts_from_the_given_model_and_moves_it():
    simulated = toy.simulation(cohort=5)
    state, _ = toy.train(simulated, (0,))
    variables = jax.tree.map(np.array, state.servers.variables)
    tuner = simulated.tuner(epochs=3)
    start = tuner.start(variables)
    jax.tree.map(np.testing.assert_array_equal, variables, jax.tree.map(np.array, start.servers.variables))
    tuned, _ = tuner.step(start, 0)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).any(), variables["params"], params(tuned))))


@pytest.mark.thorough
def test_auto_lanes_are_among_the_candidates():
    base = toy.simulation()

    def make(lanes):
        return toy.simulation(lanes=lanes)

    assert tuning.choose_lanes(make, base.start(), 3, 10**6).program.lanes in tuning.candidates(3)


@pytest.mark.parametrize(("rounds", "most_lanes", "expected"), [(10, 2, False), (10**6, 2, True), (10**6, 1, False)])
def test_lane_counts_are_timed_only_if_there_are_several_and_the_run_is_long(monkeypatch, rounds, most_lanes, expected):
    probed = []
    monkeypatch.setattr(tuning, "candidates", lambda jobs, devices: list(range(1, most_lanes + 1)))
    monkeypatch.setattr(tuning, "_probe", lambda simulated, state: probed.append(simulated) or (0.0, 1.0))
    chosen = tuning.choose_lanes(lambda lanes: toy.simulation(lanes=lanes), None, 3, rounds)
    assert (chosen.program.lanes, bool(probed)) == (1, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["fedavg", "fedmr", "scaffold"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_rounds_of_one_step_equal_a_loop_with_one_step(name, lanes):
    simulated = toy.simulation(name, lanes=lanes, epochs=1, batch_size=64, last_batch="keep")
    program = simulated.program
    assert (program.blocks.steps, toy.simulation(name, lanes=lanes).program.blocks.steps) == (1, 0)
    blocks = dataclasses.replace(program.blocks, steps=0)
    looped = jax.jit(partial(training_round, dataclasses.replace(program, blocks=blocks)))
    expected, expected_report = looped(*simulated.arguments(simulated.start(), 0, simulated.plan(0)))
    state, report = simulated.step(simulated.start(), 0)
    assert_close(state, expected)
    np.testing.assert_allclose(report.loss, expected_report.loss, 1e-5)


def test_fine_tuning_has_the_first_learning_rate_in_every_round():
    simulated = toy.simulation()
    experiment = simulated.experiments[0]
    decaying = experiment._replace(local=dataclasses.replace(experiment.local, lr_steps=(1,)))
    tuner = Simulation(simulated.program.model, [decaying], pipeline=Pipeline(), cohort=3).tuner(epochs=1)
    np.testing.assert_allclose(tuner.hyper_at(5).lr, [0.05], 1e-6)


def test_learning_rate_falls_at_the_given_rounds():
    constant = toy.simulation()
    (experiment,) = constant.experiments
    decaying = experiment._replace(local=dataclasses.replace(experiment.local, lr_steps=(2, 4), lr_decay=0.1))
    simulated = Simulation(constant.program.model, [decaying], pipeline=Pipeline(), cohort=3)
    rates = [float(simulated.hyper_at(r).lr[0]) for r in range(6)]
    np.testing.assert_allclose(rates, [0.05, 0.05, 0.005, 0.005, 0.0005, 0.0005], 1e-6)


@pytest.mark.thorough
def test_frozen_parameters_do_not_move_at_all():
    model = toy.simulation().program.model
    simulated = simulate(model, methods=[HeadOnly()], cohort=1)
    before = params(simulated.start())
    after = params(simulated.step(simulated.start(), 0)[0])
    jax.tree.map(np.testing.assert_array_equal, before["backbone"], after["backbone"])
    assert np.any(before["head"]["kernel"] != after["head"]["kernel"])


@struct.dataclass
class HeadOnly(Method):
    def trainable(self, params, context):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key == "head", params)


class Counts(NamedTuple):
    variables: Any
    rounds: Any
    share: Any


@struct.dataclass
class CountsRounds(Method):
    """FedAvg with numbers of Python, and arrays of weak type, as its first states."""

    def init_server(self, setting, variables, class_counts, key):
        return Counts(variables, 0, jnp.asarray(0.5))

    def init_client(self, setting, server, facts, key):
        return 0.0

    def upload(self, variables, summary, context):
        return context.client + 1, Message(variables)

    def aggregate(self, server, message, weights, context):
        return Counts(message.mean, server.rounds + 1, 0.5 * server.share)


@pytest.mark.parametrize("client_state", ["device", "host"])
def test_states_that_begin_as_numbers_of_python_do_not_compile_the_second_round_anew(client_state):
    simulated = toy.simulation(method=CountsRounds(), client_state=client_state)
    compiled = simulated.compilations
    state, _ = toy.train(simulated, (0, 1, 2))
    assert simulated.compilations == compiled + 1
    assert (int(state.servers.rounds[0]), float(state.servers.share[0])) == (3, 0.0625)
    assert np.sum(state.clients) == 9  # a cohort of three in each of three rounds
