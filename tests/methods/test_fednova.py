"""FedNova: golden vectors, the count of effective steps, and each option."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import toy
from golden_vectors import cases
from hooks import aggregate, context, hyper, params, setting, start

from fedjax_pcdd.methods.fednova import FedNova
from fedjax_pcdd.methods.method import Method
from fedjax_pcdd.methods.steps import effective_steps

EXACT = {"rtol": 1e-9, "atol": 1e-11}


def averaged(method, x0, models, sizes, steps, statistics=None, **local):
    """The server after one round in which client k sends models[k] after steps[k] steps."""
    collections = {} if statistics is None else {"batch_stats": 0.0 * statistics[0]}
    server, clients = start(method, x0, sizes, **collections)
    messages = []
    for k, model in enumerate(models):
        variables = params(model, **({} if statistics is None else {"batch_stats": statistics[k]}))
        client_context = context(method, server, clients[k], sizes=sizes, k=k, steps=int(steps[k]), **local)
        messages.append(method.upload(variables, (), client_context)[1])
    return aggregate(method, server, messages, np.asarray(sizes) / np.sum(sizes), clients=len(sizes))


def weights_of(server):
    return server.variables["params"]["w"]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("fednova"))
def test_steps_with_momentum_agree_with_the_vectors(g):
    a = [effective_steps(int(tau), g["par_momentum"]) for tau in g["in_tau"]]
    np.testing.assert_allclose(a, g["out_a"], **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("fednova"))
def test_the_round_agrees_with_the_vectors(g):
    rates = {"lr": g["par_lr"], "momentum": g["par_momentum"]}
    server = averaged(FedNova(), g["in_x0"], g["out_local"], g["in_n"], g["in_tau"], **rates)
    np.testing.assert_allclose(weights_of(server), g["out_x"], **EXACT)


@pytest.mark.parametrize(("steps", "expected"), [(0, 0), (1, 1), (5, 13.1441), (10, 41.38106), (100, 910.00239)])
def test_effective_steps_match_the_worked_examples(steps, expected):
    np.testing.assert_allclose(effective_steps(steps, 0.9), expected, rtol=1e-5)


@pytest.mark.parametrize("most", [1, 3, 4, 7, 8])
def test_the_largest_number_of_steps_bounds_the_work_alone(most):
    np.testing.assert_array_equal(effective_steps(most, 0.9, most=most), effective_steps(most, 0.9))


@pytest.mark.parametrize("steps", [1, 7, 1000])
def test_without_momentum_a_step_counts_once(steps):
    np.testing.assert_allclose(effective_steps(steps, 0.0), steps, rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_the_count_is_continuous_where_momentum_vanishes():
    np.testing.assert_allclose(effective_steps(50, 1e-9), effective_steps(50, 0.0), rtol=1e-7)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.5), (0.9, 0.0), (0.9, 0.5)])
def test_the_count_is_the_distance_moved_under_a_constant_gradient(momentum, mu):
    lr, distance, buffer = 0.1, 0.0, 0.0
    for _ in range(13):
        buffer = momentum * buffer + 1 - lr * mu * distance
        distance += buffer
    np.testing.assert_allclose(effective_steps(13, momentum, lr * mu), distance, **EXACT)


@pytest.mark.usefixtures("x64")
def test_the_count_with_a_proximal_term_follows_its_recursion():
    a = 0.0
    for _ in range(9):
        a = (1 - 0.05) * a + 1
    np.testing.assert_allclose(effective_steps(9, 0.0, 0.05), a, **EXACT)


@pytest.mark.usefixtures("x64")
def test_models_are_averaged_with_the_effective_weights():
    sizes, steps, models = np.array([10.0, 30.0]), np.array([2, 5]), np.array([[1.0], [2.0]])
    p = sizes / sizes.sum()
    q = p * (p * steps).sum() / steps
    server = averaged(FedNova(), np.zeros(1), models, sizes, steps)
    np.testing.assert_allclose(weights_of(server), q @ models, **EXACT)


@pytest.mark.thorough
def test_with_equal_steps_it_is_fedavg():
    fednova, _ = toy.train(toy.simulation("fednova", batch_size=32))
    fedavg, _ = toy.train(toy.simulation(method=Method(), batch_size=32))
    for a, b in zip(*map(jax.tree.leaves, (fednova.servers.variables, fedavg.servers.variables)), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.thorough
def test_with_unequal_steps_it_is_not_fedavg():
    fednova, _ = toy.train(toy.simulation("fednova"), (0,))
    fedavg, _ = toy.train(toy.simulation(method=Method()), (0,))
    kernels = [s.servers.variables["params"]["head"]["kernel"] for s in (fednova, fedavg)]
    assert np.abs(np.array(kernels[0]) - np.array(kernels[1])).max() > 1e-4


@pytest.mark.thorough
def test_with_adam_momentum_does_not_change_the_count_of_steps():
    with_momentum, without = (
        toy.train(toy.simulation("fednova", optimizer="adam", lr=0.01, momentum=rho), (0,))[0] for rho in (0.9, 0.0)
    )
    jax.tree.map(np.testing.assert_array_equal, with_momentum, without)


@pytest.mark.usefixtures("x64")
def test_mu_pulls_towards_the_received_weights():
    method = FedNova(mu=0.5)
    server, clients = start(method, np.zeros(2), (1,))
    client_context = context(method, server, clients[0])
    gradient = jax.grad(method.regulariser)(params(np.array([1.0, 2.0]))["params"], client_context)
    np.testing.assert_allclose(gradient["w"], [0.5, 1.0], **EXACT)


@pytest.mark.usefixtures("x64")
def test_mu_enters_the_count():
    models, steps = np.array([[1.0], [2.0]]), [1, 8]
    plain, proximal = (averaged(FedNova(mu=mu), np.zeros(1), models, (1, 1), steps) for mu in (0.0, 2.0))
    a = (1 - 0.8**8) / 0.2
    np.testing.assert_allclose(weights_of(plain), (1 + 8) / 2 * (1 + 2 / 8) / 2, **EXACT)
    np.testing.assert_allclose(weights_of(proximal), (1 + a) / 2 * (1 + 2 / a) / 2, **EXACT)


@pytest.mark.usefixtures("x64")
def test_tau_eff_may_be_the_mean_number_of_steps():
    models, steps, a = np.array([[1.0], [2.0]]), [1, 2], np.array([1, 2.9])
    server = averaged(FedNova(tau_eff="steps"), np.zeros(1), models, (1, 1), steps, momentum=0.9)
    np.testing.assert_allclose(weights_of(server), 1.5 * (models[:, 0] / a).mean(), **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("normalise", "expected"), [(False, 4.0), (True, 1.5 * (2 / 1 + 6 / 2) / 2)])
def test_running_statistics_are_averaged_or_normalised(normalise, expected):
    statistics = np.array([2.0, 6.0])
    method = FedNova(normalise_statistics=normalise)
    server = averaged(method, np.zeros(1), np.ones((2, 1)), (1, 1), (1, 2), statistics)
    np.testing.assert_allclose(server.variables["batch_stats"], expected, **EXACT)


def test_a_mu_with_which_steps_overshoot_is_advised_against():
    local = replace(hyper(momentum=0.0), lr=0.05)
    (advice,) = FedNova(mu=40.0).configure(setting(2), local)[1]
    assert "`mu=40` times `lr` is 2, so steps go past the global model: lower `mu`." in advice
    assert FedNova(mu=1.0).configure(setting(2), local)[1] == []


@pytest.mark.parametrize(("momentum", "kept", "advised"), [(0.9, True, 1), (0.9, False, 0), (0.0, True, 0)])
def test_kept_momentum_which_the_count_of_steps_leaves_out_is_advised_against(momentum, kept, advised):
    advice = FedNova().configure(setting(2)._replace(keeps_optimiser=kept), hyper(momentum=momentum))[1]
    assert ["counts steps as if momentum began anew" in sentence for sentence in advice] == [True] * advised
