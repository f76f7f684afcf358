"""FedDyn: golden vectors, the paper's states as drifts, and each option."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from golden_vectors import cases
from hooks import aggregate, context, hyper, params, setting, start
from in_memory import trained
from trajectories import train

from fedjax_pcdd import models
from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods.feddc import FedDC
from fedjax_pcdd.methods.feddyn import FedDyn
from fedjax_pcdd.methods.method import Local, Method
from fedjax_pcdd.methods.scaffold import Scaffold
from fedjax_pcdd.models.classifier import forward

EXACT = {"rtol": 1e-9, "atol": 1e-11}


def after_round(method, server, clients, models, sizes=None, cohort=None):
    """Server and clients after a round in which client k ends at models[k] (an array, or variables)."""
    sizes = sizes or (1,) * len(clients)
    cohort = range(len(clients)) if cohort is None else cohort
    clients, messages = list(clients), []
    for k in cohort:
        trained_variables = models[k] if isinstance(models[k], dict) else params(models[k])
        client_context = context(method, server, clients[k], sizes=sizes, k=k)
        clients[k], message = method.upload(trained_variables, (), client_context)
        messages.append(message)
    weights = [float(method.weight(context(method, server, clients[k], sizes=sizes, k=k).facts)) for k in cohort]
    return aggregate(method, server, messages, weights, clients=len(clients)), clients


def w(variables):
    return np.asarray(variables["params"]["w"])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("feddyn"))
def test_regulariser_agrees_with_the_golden_vectors(g):
    method = FedDyn(alpha=float(g["par_alpha"]))
    server, clients = start(method, g["in_w_global"], (1,))
    client = clients[0]._replace(drift={"w": jnp.asarray(-g["in_grad_state"] / g["par_alpha"])})
    client_context = context(method, server, client)
    value, gradient = jax.value_and_grad(method.regulariser)(params(g["in_w"])["params"], client_context)
    np.testing.assert_allclose(value, g["out_reg"], **EXACT)
    np.testing.assert_allclose(gradient["w"], g["out_grad"], **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("feddyn"))
def test_rounds_agree_with_the_golden_vectors(g):
    alpha, models, participation = float(g["par_alpha"]), g["in_round_wk"], g["in_round_selected"] > 0
    method = FedDyn(alpha=alpha)
    server, clients = start(method, g["in_w0"], (1,) * participation.shape[1])
    for r, took_part in enumerate(participation):
        server, clients = after_round(method, server, clients, models[r], cohort=np.flatnonzero(took_part))
        np.testing.assert_allclose(w(server.variables), g["out_round_w_global"][r], **EXACT)
        np.testing.assert_allclose(-alpha * server.drift["w"], g["out_round_h"][r], **EXACT)
        gradient_states = [-alpha * c.drift["w"] for c in clients]
        np.testing.assert_allclose(gradient_states, g["out_round_grad_state"][r], **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("trajectories"))
def test_state_and_evaluated_model_agree_with_the_reference(g):
    problem, states = train(g, "feddyn", 3, alpha=0.1)
    for r, state in enumerate(states):
        server = jax.tree.map(lambda x: x[0], state.servers)
        np.testing.assert_allclose(-0.1 * problem.flatten(server.drift), g["out_feddyn_alpha0.1__h"][r], **EXACT)
        evaluated = problem.flatten(FedDyn().generic_variables(server)["params"])
        np.testing.assert_allclose(evaluated, g["out_feddyn_alpha0.1__selected_mean"][r], **EXACT)


@pytest.mark.usefixtures("x64")
def test_the_first_round_has_the_values_of_the_worked_example():
    method = FedDyn(alpha=1.0)
    server, clients = after_round(method, *start(method, np.zeros(1), (1, 1)), np.array([[1.0], [3.0]]))
    assert [float(-c.drift["w"][0]) for c in clients] == [-1, -3]
    assert float(-server.drift["w"][0]) == -2
    assert float(w(server.variables)[0]) == 4


@pytest.mark.usefixtures("x64")
def test_the_server_holds_the_mean_of_all_drifts():
    method, rng = FedDyn(alpha=0.1), np.random.default_rng(0)
    server, clients = start(method, rng.normal(size=3), (1,) * 4)
    for cohort in ((0, 2), (1,), (2, 3)):
        server, clients = after_round(method, server, clients, rng.normal(size=(4, 3)), cohort=cohort)
    np.testing.assert_allclose(server.drift["w"], np.mean([c.drift["w"] for c in clients], 0), **EXACT)


@pytest.mark.thorough
@pytest.mark.parametrize("weights", ["method", "batches"])
@pytest.mark.parametrize("name", ["feddyn", "feddc"])
def test_the_servers_drift_is_the_mean_drift_however_models_are_weighted(name, weights):
    state, _ = toy.train(toy.simulation(name, weights=weights, momentum=0.0))
    means = jax.tree.map(lambda x: x.mean(0), state.clients.drift)
    for drift, mean in zip(jax.tree.leaves(state.servers.drift), jax.tree.leaves(means), strict=True):
        assert np.abs(mean).max() > 1e-4
        np.testing.assert_allclose(drift[0], mean, rtol=1e-4, atol=1e-7)


def many_clients(method, weights, clients=100):
    """A simulation of many clients of four samples; all take part in every round, with one step each."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (4 * clients, 2, 2, 1)).astype(np.uint8), rng.integers(0, 4, 4 * clients)
    client_samples = tuple(np.split(np.arange(4 * clients), clients))
    federation = Federation(
        Dataset("made up", images, labels, images, labels, 4), Partition(client_samples, client_samples)
    )
    model = models.build("mlp", num_classes=4, image_shape=(2, 2, 1))
    local = Local(1, 4, "drop", "sgd", 0.01, 0.0, 0.0, None)
    experiments = [Experiment(federation, method, local, 0)]
    return Simulation(model, experiments, pipeline=Pipeline(), cohort=clients, rounds=30, weights=weights)


@pytest.mark.thorough
@pytest.mark.parametrize("weights", ["method", "batches"])
@pytest.mark.parametrize(
    ("method", "states"),
    [
        (FedDyn(alpha=0.1), lambda s: (s.servers.drift, s.clients.drift)),
        (FedDC(alpha=0.1), lambda s: ((s.servers.drift, s.servers.state), (s.clients.drift, s.clients.state))),
        (Scaffold(), lambda s: (s.servers.control, s.clients)),
    ],
    ids=["feddyn", "feddc", "scaffold"],
)
def test_server_states_stay_the_mean_of_many_clients_in_single_precision(method, states, weights):
    state, _ = toy.train(many_clients(method, weights), range(30))
    server_states, client_states = states(state)
    for server_leaf, client_leaf in zip(jax.tree.leaves(server_states), jax.tree.leaves(client_states), strict=True):
        mean = np.asarray(client_leaf, float).mean(0)
        assert np.linalg.norm(server_leaf[0] - mean) < 3e-6 * np.linalg.norm(mean)


@pytest.mark.thorough
def test_the_regulariser_is_clipped_together_with_the_loss():
    simulated = toy.simulation("feddyn", alpha=100.0, clip=0.01, epochs=1, momentum=0.0, cohort=1, batch_size=30)
    client = simulated.clients_of(0)[0]
    state, _ = toy.train(simulated, (0,))
    before = jax.tree.map(lambda x: np.array(x[client]), state.clients.drift)
    after, _ = simulated.step(state, 1, simulated.plan(1, [client]))
    drift_change = jax.tree.map(lambda a, b: a[client] - b, after.clients.drift, before)
    norm = np.sqrt(sum(float(np.sum(np.square(x))) for x in jax.tree.leaves(drift_change)))
    assert norm <= 0.05 * (0.01 + 1e-4) * 1.001  # learning rate times the clipped gradient and the decay


@pytest.mark.usefixtures("x64")
def test_the_server_does_not_move_if_no_client_moves():
    method, initial = FedDyn(alpha=0.1), np.array([1.0, -2.0])
    server, _ = after_round(method, *start(method, initial, (1, 1)), np.stack([initial] * 2))
    np.testing.assert_array_equal(w(server.variables), initial)


@pytest.mark.usefixtures("x64")
def test_the_mean_of_the_models_is_unweighted():
    method = FedDyn(alpha=1.0)
    first_states = start(method, np.zeros(1), (1, 9))
    server, _ = after_round(method, *first_states, np.array([[1.0], [3.0]]), sizes=(1, 9))
    assert float(w(server.variables)[0]) == 4


@pytest.mark.thorough
def test_alpha_zero_is_uniform_fedavg():
    feddyn, _ = toy.train(toy.simulation("feddyn", alpha=0.0))
    fedavg, _ = toy.train(toy.simulation(method=Method(), weights="uniform"))
    for a, b in zip(*map(jax.tree.leaves, (feddyn.servers.variables, fedavg.servers.variables)), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def test_alpha_zero_is_advised_against():
    assert len(FedDyn(alpha=0.0).configure(setting(2), hyper())[1]) == 1
    assert FedDyn(alpha=0.1).configure(setting(2), hyper())[1] == []


def test_the_servers_step_is_advised_against_with_local_momentum():
    long_rounds = setting(2)._replace(steps=460)
    _, (sentence,) = FedDyn(alpha=1e-4).configure(long_rounds, hyper(lr=0.01, momentum=0.9))
    assert "about 0.9954" in sentence
    assert "`server_step=none`" in sentence
    assert FedDyn(alpha=1e-4, server_step="none").configure(long_rounds, hyper(momentum=0.9))[1] == []


@pytest.mark.usefixtures("x64")
def test_without_the_servers_step_the_models_are_averaged():
    method = FedDyn(alpha=1.0, server_step="none")
    server, clients = after_round(method, *start(method, np.zeros(1), (1, 1)), np.array([[1.0], [3.0]]))
    assert [float(-c.drift["w"][0]) for c in clients] == [-1, -3]
    assert float(w(method.generic_variables(server))[0]) == 2
    assert method.further_models(server) == {}


@pytest.mark.thorough
def test_without_the_servers_step_a_small_alpha_is_fedavg():
    feddyn, _ = toy.train(toy.simulation("feddyn", alpha=1e-9, server_step="none"))
    fedavg, _ = toy.train(toy.simulation(method=Method()))
    for a, b in zip(*map(jax.tree.leaves, (feddyn.servers.variables, fedavg.servers.variables)), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("scaling", "factor"), [("common", 1.0), ("inverse_size", 1 / 0.5)])
def test_alpha_can_be_divided_by_the_relative_client_size(scaling, factor):
    method = FedDyn(alpha=0.1, alpha_scaling=scaling)
    server, clients = start(method, np.zeros(1), (10, 30))
    client_context = context(method, server, clients[0], sizes=(10, 30))
    value = method.regulariser(params(np.array([2.0]))["params"], client_context)
    np.testing.assert_allclose(value, 0.5 * 0.1 * factor * 4, **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("choice", "expected"), [("cloud", [3, 5.5]), ("selected_mean", [2, 4]), ("all_mean", [1, 3])])
def test_the_evaluated_model_is_the_chosen_one_of_three(choice, expected):
    method = FedDyn(alpha=1.0, eval=choice)
    server, clients = start(method, np.zeros(1), (1, 1))
    evaluated = []
    for end, client in ((2.0, 0), (4.0, 1)):  # drifts 2 and 4 - 3, so the cloud is 2 + 2 / 2, then 4 + (2 + 1) / 2
        server, clients = after_round(method, server, clients, np.full((2, 1), end), cohort=(client,))
        evaluated.append(float(w(method.generic_variables(server))[0]))
    assert evaluated == expected


@pytest.mark.usefixtures("x64")
def test_the_mean_of_all_latest_models_has_each_client_once():
    method = FedDyn(alpha=1.0, eval="all_mean")
    server, clients = start(method, np.full(1, 8.0), (1, 1))
    for end in (2.0, 4.0):
        server, clients = after_round(method, server, clients, np.full((2, 1), end), cohort=(0,))
    np.testing.assert_allclose(w(method.generic_variables(server)), (4 + 8) / 2, **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("weighted", "expected"), [(False, 2.0), (True, 2.8)])
def test_running_statistics_are_averaged_equally_or_by_size(weighted, expected):
    method, sizes = FedDyn(alpha=1.0, weighted_statistics=weighted), (1, 9)
    models = [params(np.ones(1), batch_stats=jnp.asarray(s)) for s in (1.0, 3.0)]
    server, _ = after_round(method, *start(method, np.zeros(1), sizes, batch_stats=jnp.zeros(())), models, sizes=sizes)
    np.testing.assert_allclose(server.variables["batch_stats"], expected, **EXACT)
    np.testing.assert_allclose(w(server.variables), 2.0, **EXACT)


def correct(simulated, variables):
    """Correct predictions of each class [C] by a model on the whole test set, counted in numpy."""
    dataset = simulated.experiments[0].federation.dataset
    images = prepare(Pipeline(), dataset.x_test, None, train=False)
    predictions = np.argmax(forward(simulated.program.model, variables, images, train=False)[0].logits, -1)
    return np.bincount(dataset.y_test, weights=predictions == dataset.y_test, minlength=toy.CLASSES)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("choice", "others"),
    [("all_mean", {"cloud", "selected_mean"}), ("selected_mean", {"cloud"}), ("cloud", {"selected_mean"})],
)
def test_models_that_are_not_chosen_are_evaluated_beside_the_chosen_one(choice, others):
    simulated = toy.simulation("feddyn", alpha=1.0, eval=choice)
    state, _ = toy.train(simulated, (0, 1))
    server = jax.tree.map(lambda x: x[0], state.servers)
    mean = {"params": jax.tree.map(jnp.subtract, server.variables["params"], server.drift)}
    models = {"cloud": server.variables, "selected_mean": mean, "all_mean": server.latest}
    counts = simulated.evaluate(state)
    assert set(counts.further) == others
    np.testing.assert_array_equal(counts.generic[0], correct(simulated, models[choice]))
    for name in others:
        np.testing.assert_array_equal(counts.further[name][0], correct(simulated, models[name]))
    simulated.evaluate(state)
    assert (simulated.compilations, simulated.evaluator.generic_correct._cache_size()) == (1, 1)


@pytest.fixture(scope="module")
def one_round():
    """A run of one round."""
    return trained(method="feddyn", lanes=1, rounds=1, local_epochs=2, lr=0.1)


@pytest.mark.thorough
def test_a_run_records_the_models_that_are_not_chosen(one_round):
    (row,) = one_round.history.rows
    counts = one_round.simulation.evaluate(one_round.state).further["cloud"]
    assert row["ga_cloud"] == np.sum(counts) / len(one_round.federation.dataset.y_test)
    assert row["ga_cloud"] != row["ga"]


@pytest.mark.thorough
def test_a_run_keeps_the_model_that_was_evaluated_as_its_best(one_round):
    server = one_round.state.servers
    evaluated = jax.tree.map(lambda x, v: np.asarray(x - v), server.variables["params"], server.drift)
    for a, b in zip(*map(jax.tree.leaves, (one_round.best["params"], evaluated)), strict=True):
        np.testing.assert_allclose(a, b, 1e-6, 1e-7)
    assert max(np.abs(x).max() for x in jax.tree.leaves(server.drift)) > 1e-4
