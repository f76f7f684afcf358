"""FedDyn: vectors, what the drift form keeps of the paper's states, and each option."""

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
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.methods.feddc import FedDC
from fedjax_pcdd.methods.feddyn import FedDyn
from fedjax_pcdd.methods.method import Local, Method
from fedjax_pcdd.methods.scaffold import Scaffold
from fedjax_pcdd.models.classifier import forward

EXACT = {"rtol": 1e-9, "atol": 1e-11}


def round_of(method, server, clients, models, sizes=None, chosen=None):
    """Server and clients after a round in which client k ends at models[k] (an array, or variables)."""
    sizes = sizes or (1,) * len(clients)
    chosen = range(len(clients)) if chosen is None else chosen
    clients, messages = list(clients), []
    for k in chosen:
        sent = models[k] if isinstance(models[k], dict) else params(models[k])
        at = context(method, server, clients[k], sizes=sizes, k=k)
        clients[k], message = method.upload(sent, (), at)
        messages.append(message)
    weights = [float(method.weight(context(method, server, clients[k], sizes=sizes, k=k).facts)) for k in chosen]
    return aggregate(method, server, messages, weights, clients=len(clients)), clients


def w(variables):
    return np.asarray(variables["params"]["w"])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("feddyn"))
def test_regulariser_agrees_with_the_vectors(g):
    method = FedDyn(alpha=float(g["par_alpha"]))
    server, clients = start(method, g["in_w_global"], (1,))
    client = clients[0]._replace(drift={"w": jnp.asarray(-g["in_grad_state"] / g["par_alpha"])})
    at = context(method, server, client)
    value, gradient = jax.value_and_grad(method.regulariser)(params(g["in_w"])["params"], at)
    np.testing.assert_allclose(value, g["out_reg"], **EXACT)
    np.testing.assert_allclose(gradient["w"], g["out_grad"], **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("feddyn"))
def test_rounds_agree_with_the_vectors(g):
    alpha, models, picked = float(g["par_alpha"]), g["in_round_wk"], g["in_round_selected"] > 0
    method = FedDyn(alpha=alpha)
    server, clients = start(method, g["in_w0"], (1,) * picked.shape[1])
    for r, chosen in enumerate(picked):
        server, clients = round_of(method, server, clients, models[r], chosen=np.flatnonzero(chosen))
        np.testing.assert_allclose(w(server.variables), g["out_round_w_global"][r], **EXACT)
        np.testing.assert_allclose(-alpha * server.drift["w"], g["out_round_h"][r], **EXACT)
        memory = [-alpha * c.drift["w"] for c in clients]
        np.testing.assert_allclose(memory, g["out_round_grad_state"][r], **EXACT)


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
def test_the_sheets_example():
    method = FedDyn(alpha=1.0)
    server, clients = round_of(method, *start(method, np.zeros(1), (1, 1)), np.array([[1.0], [3.0]]))
    assert [float(-c.drift["w"][0]) for c in clients] == [-1, -3]
    assert float(-server.drift["w"][0]) == -2
    assert float(w(server.variables)[0]) == 4


@pytest.mark.usefixtures("x64")
def test_the_server_holds_the_mean_of_all_drifts():
    method, rng = FedDyn(alpha=0.1), np.random.default_rng(0)
    server, clients = start(method, rng.normal(size=3), (1,) * 4)
    for chosen in ((0, 2), (1,), (2, 3)):
        server, clients = round_of(method, server, clients, rng.normal(size=(4, 3)), chosen=chosen)
    np.testing.assert_allclose(server.drift["w"], np.mean([c.drift["w"] for c in clients], 0), **EXACT)


@pytest.mark.thorough
@pytest.mark.parametrize("weights", ["method", "batches"])
@pytest.mark.parametrize("name", ["feddyn", "feddc"])
def test_the_servers_drift_is_that_mean_however_the_models_are_weighted(name, weights):
    state, _ = toy.train(toy.simulation(name, weights=weights, momentum=0.0))
    means = jax.tree.map(lambda x: x.mean(0), state.clients.drift)
    for found, mean in zip(jax.tree.leaves(state.servers.drift), jax.tree.leaves(means), strict=True):
        assert np.abs(mean).max() > 1e-4
        np.testing.assert_allclose(found[0], mean, rtol=1e-4, atol=1e-7)


def crowd(method, weights, clients=100):
    """Many clients of four samples, all of which take part with one step."""
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (4 * clients, 2, 2, 1)).astype(np.uint8), rng.integers(0, 4, 4 * clients)
    own = tuple(np.split(np.arange(4 * clients), clients))
    parts = Federation(Dataset("made up", images, labels, images, labels, 4), Partition(own, own))
    model = models.build("mlp", num_classes=4, image_shape=(2, 2, 1))
    local = Local(1, 4, "drop", "sgd", 0.01, 0.0, 0.0, None)
    experiment = [Experiment(parts, method, local, 0)]
    return Simulation(model, experiment, pipeline=Pipeline(), cohort=clients, rounds=30, weights=weights)


@pytest.mark.thorough
@pytest.mark.parametrize("weights", ["method", "batches"])
@pytest.mark.parametrize(
    ("method", "kept"),
    [
        (FedDyn(alpha=0.1), lambda s: (s.servers.drift, s.clients.drift)),
        (FedDC(alpha=0.1), lambda s: ((s.servers.drift, s.servers.state), (s.clients.drift, s.clients.state))),
        (Scaffold(), lambda s: (s.servers.control, s.clients)),
    ],
    ids=["feddyn", "feddc", "scaffold"],
)
def test_what_the_server_holds_stays_the_mean_of_many_clients_in_single_precision(method, kept, weights):
    state, _ = toy.train(crowd(method, weights), range(30))
    held, clients = kept(state)
    for found, all_clients in zip(jax.tree.leaves(held), jax.tree.leaves(clients), strict=True):
        mean = np.asarray(all_clients, float).mean(0)
        assert np.linalg.norm(found[0] - mean) < 3e-6 * np.linalg.norm(mean)


@pytest.mark.thorough
def test_the_term_on_the_parameters_is_clipped_with_the_loss():
    simulated = toy.simulation("feddyn", alpha=100.0, clip=0.01, epochs=1, momentum=0.0, cohort=1, batch_size=30)
    chosen = simulated.clients_of(0)[0]
    state, _ = toy.train(simulated, (0,))
    before = jax.tree.map(lambda x: np.array(x[chosen]), state.clients.drift)
    after, _ = simulated.step(state, 1, simulated.plan(1, [chosen]))
    moved = jax.tree.map(lambda a, b: a[chosen] - b, after.clients.drift, before)
    norm = np.sqrt(sum(float(np.sum(np.square(x))) for x in jax.tree.leaves(moved)))
    assert norm <= 0.05 * (0.01 + 1e-4) * 1.001  # learning rate times the clipped gradient and the decay


@pytest.mark.usefixtures("x64")
def test_nothing_moves_where_no_client_moved():
    method, start_at = FedDyn(alpha=0.1), np.array([1.0, -2.0])
    server, _ = round_of(method, *start(method, start_at, (1, 1)), np.stack([start_at] * 2))
    np.testing.assert_array_equal(w(server.variables), start_at)


@pytest.mark.usefixtures("x64")
def test_the_mean_is_unweighted():
    method = FedDyn(alpha=1.0)
    begun = start(method, np.zeros(1), (1, 9))
    server, _ = round_of(method, *begun, np.array([[1.0], [3.0]]), sizes=(1, 9))
    assert float(w(server.variables)[0]) == 4


@pytest.mark.thorough
def test_alpha_zero_is_uniform_fedavg():
    dynamic, _ = toy.train(toy.simulation("feddyn", alpha=0.0))
    plain, _ = toy.train(toy.simulation(method=Method(), weights="uniform"))
    for a, b in zip(*map(jax.tree.leaves, (dynamic.servers.variables, plain.servers.variables)), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def test_alpha_zero_is_said():
    assert len(FedDyn(alpha=0.0).configure(setting(2), hyper())[1]) == 1
    assert FedDyn(alpha=0.1).configure(setting(2), hyper())[1] == []


def test_a_servers_momentum_beside_the_clients_is_advised_against():
    fixed = setting(2)._replace(steps=460)
    _, (sentence,) = FedDyn(alpha=1e-4).configure(fixed, hyper(lr=0.01, momentum=0.9))
    assert "about 0.9954" in sentence
    assert "`server_step=none`" in sentence
    assert FedDyn(alpha=1e-4, server_step="none").configure(fixed, hyper(momentum=0.9))[1] == []


@pytest.mark.usefixtures("x64")
def test_without_the_servers_step_the_models_are_averaged():
    method = FedDyn(alpha=1.0, server_step="none")
    server, clients = round_of(method, *start(method, np.zeros(1), (1, 1)), np.array([[1.0], [3.0]]))
    assert [float(-c.drift["w"][0]) for c in clients] == [-1, -3]
    assert float(w(method.generic_variables(server))[0]) == 2
    assert method.further_models(server) == {}


@pytest.mark.thorough
def test_without_the_servers_step_a_small_alpha_is_fedavg():
    averaged, _ = toy.train(toy.simulation("feddyn", alpha=1e-9, server_step="none"))
    plain, _ = toy.train(toy.simulation(method=Method()))
    for a, b in zip(*map(jax.tree.leaves, (averaged.servers.variables, plain.servers.variables)), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("scaling", "factor"), [("common", 1.0), ("inverse_size", 1 / 0.5)])
def test_alpha_may_fall_with_the_clients_size(scaling, factor):
    method = FedDyn(alpha=0.1, alpha_scaling=scaling)
    server, clients = start(method, np.zeros(1), (10, 30))
    at = context(method, server, clients[0], sizes=(10, 30))
    value = method.regulariser(params(np.array([2.0]))["params"], at)
    np.testing.assert_allclose(value, 0.5 * 0.1 * factor * 4, **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("choice", "expected"), [("cloud", [3, 5.5]), ("selected_mean", [2, 4]), ("all_mean", [1, 3])])
def test_three_models_can_be_evaluated(choice, expected):
    method = FedDyn(alpha=1.0, eval=choice)
    server, clients = start(method, np.zeros(1), (1, 1))
    seen = []
    for end, chosen in ((2.0, 0), (4.0, 1)):  # drifts 2 and 4 - 3, so the cloud is 2 + 2 / 2, then 4 + (2 + 1) / 2
        server, clients = round_of(method, server, clients, np.full((2, 1), end), chosen=(chosen,))
        seen.append(float(w(method.generic_variables(server))[0]))
    assert seen == expected


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("weighted", "expected"), [(False, 2.0), (True, 2.8)])
def test_running_statistics_are_averaged_equally_or_by_size(weighted, expected):
    method, sizes = FedDyn(alpha=1.0, weighted_statistics=weighted), (1, 9)
    models = [params(np.ones(1), batch_stats=jnp.asarray(s)) for s in (1.0, 3.0)]
    server, _ = round_of(method, *start(method, np.zeros(1), sizes, batch_stats=jnp.zeros(())), models, sizes=sizes)
    np.testing.assert_allclose(server.variables["batch_stats"], expected, **EXACT)
    np.testing.assert_allclose(w(server.variables), 2.0, **EXACT)


def correct(simulated, variables):
    """Correct predictions per class [C] of a model on the whole test set, counted by hand."""
    dataset = simulated.experiments[0].federation.dataset
    images = prepare(Pipeline(), dataset.x_test, None, train=False)
    guess = np.argmax(forward(simulated.program.model, variables, images, train=False)[0].logits, -1)
    return np.bincount(dataset.y_test, weights=guess == dataset.y_test, minlength=toy.CLASSES)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("choice", "others"),
    [("all_mean", {"cloud", "selected_mean"}), ("selected_mean", {"cloud"}), ("cloud", {"selected_mean"})],
)
def test_models_that_are_not_chosen_are_counted_beside_the_one_that_is(choice, others):
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
