"""FedDC: vectors, invariants, and each option."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_vectors import cases
from hooks import aggregate, context, hyper, params, setting, start

from fedjax_pcdd.methods.feddc import FedDC
from fedjax_pcdd.methods.steps import effective_steps

EXACT = {"rtol": 1e-9, "atol": 1e-11}


def w(variables):
    return np.asarray(variables["params"]["w"])


def state(values):
    return {"w": jnp.asarray(values)}


def round_of(method, server, clients, models, *, chosen, sizes=None, **at):
    """Server and clients after a round in which client k of the cohort ends at models[k]."""
    sizes = sizes or (1,) * len(clients)
    clients, messages = list(clients), []
    for k in chosen:
        where = context(method, server, clients[k], sizes=sizes, k=k, **at)
        clients[k], message = method.upload(params(models[k]), (), where)
        messages.append(message)
    return aggregate(method, server, messages, np.ones(len(messages)), clients=len(clients)), clients


def uploaded(method, *, sizes=(1,), k=0, move=1.0, **at):
    """Delta_k after a first round in which client k moved that far."""
    server, clients = start(method, np.zeros(1), sizes)
    client, _ = method.upload(params(np.full(1, move)), (), context(method, server, clients[k], sizes=sizes, k=k, **at))
    return float(client.state["w"][0])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("feddc"))
def test_regulariser_and_states_agree_with_the_vectors(g):
    method = FedDC(alpha=float(g["par_alpha"]))
    server, clients = start(method, g["in_w_global"], (1,))
    server = server._replace(state=state(g["in_global_last"]))
    client = clients[0]._replace(drift=state(g["in_drift"]), state=state(g["in_local_last"]))
    at = context(method, server, client, epochs=int(g["par_n_steps"]), lr=float(g["par_lr"]))
    value, gradient = jax.value_and_grad(method.regulariser)(params(g["in_w"])["params"], at)
    np.testing.assert_allclose(value, g["out_reg"], **EXACT)
    np.testing.assert_allclose(gradient["w"], g["out_grad"], **EXACT)
    kept, _ = method.upload(params(g["in_w"]), (), at)
    np.testing.assert_allclose(kept.drift["w"], g["out_new_drift"], **EXACT)
    np.testing.assert_allclose(kept.state["w"], g["out_new_local_state"], **EXACT)


@pytest.mark.usefixtures("x64")
def test_the_sheets_example():
    method = FedDC(alpha=0.1)
    server, clients = start(method, np.zeros(1), (1,))
    at = context(method, server, clients[0]._replace(drift=state(np.full(1, 0.5))))
    value, gradient = jax.value_and_grad(method.regulariser)(params(np.ones(1))["params"], at)
    np.testing.assert_allclose([value, gradient["w"][0]], [0.1125, 0.15], **EXACT)


@pytest.mark.usefixtures("x64")
def test_the_first_round_moves_twice_the_mean():
    models = np.array([[1.0], [3.0]])
    server, _ = round_of(FedDC(), *start(FedDC(), np.zeros(1), (5, 5)), models, chosen=(0, 1), sizes=(5, 5))
    np.testing.assert_allclose(w(server.variables), 4.0, **EXACT)


@pytest.mark.usefixtures("x64")
def test_the_servers_states_are_means_of_the_clients():
    method, rng = FedDC(), np.random.default_rng(0)
    server, clients = start(method, rng.normal(size=3), (1,) * 4)
    for chosen in ((0, 2), (1,), (2, 3)):
        server, clients = round_of(method, server, clients, rng.normal(size=(4, 3)), chosen=chosen)
    np.testing.assert_allclose(server.state["w"], np.mean([c.state["w"] for c in clients], 0), **EXACT)
    np.testing.assert_allclose(server.drift["w"], np.mean([c.drift["w"] for c in clients], 0), **EXACT)


@pytest.mark.usefixtures("x64")
def test_changes_are_sent_times_the_size_factor():
    sizes = (1, 3)
    server, clients = round_of(
        FedDC(), *start(FedDC(), np.zeros(1), sizes), np.ones((2, 1)), chosen=(0, 1), sizes=sizes
    )
    expected = np.mean([0.5 * float(clients[0].state["w"][0]), 1.5 * float(clients[1].state["w"][0])])
    np.testing.assert_allclose(server.state["w"], expected, **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("scaling", "factor"), [("inverse_size", 0.5), ("common", 1.0)])
def test_the_size_factor_divides_alpha_and_the_global_state(scaling, factor):
    method, sizes = FedDC(alpha=0.1, alpha_scaling=scaling), (10, 30)
    server, clients = start(method, np.zeros(1), sizes)
    at = context(method, server._replace(state=state(np.ones(1))), clients[0], sizes=sizes)
    value = method.regulariser(params(np.full(1, 2.0))["params"], at)
    np.testing.assert_allclose(value, (0.05 * 4 + 2) / factor, **EXACT)


@pytest.mark.usefixtures("x64")
def test_steps_are_those_of_a_client_of_mean_size():
    sizes = (4, 17)  # 10.5 samples are 3 batches of 4
    for k in (0, 1):
        delta = uploaded(FedDC(), sizes=sizes, k=k, epochs=2, batch=4, lr=0.1, steps=99)
        np.testing.assert_allclose(delta, -1 / (2 * 3 * 0.1), **EXACT)


def test_steps_are_those_that_a_round_counts():
    server, clients = start(FedDC(), np.zeros(1), (8, 8))
    at = context(FedDC(), server, clients[0], sizes=(8, 8), epochs=2, batch=4)
    at = at._replace(hyper=replace(at.hyper, local_steps=5))
    kept, _ = FedDC().upload(params(np.ones(1)), (), at)
    np.testing.assert_allclose(kept.state["w"], -1 / (5 * 0.1), 1e-6)


def test_compiled_steps_of_full_batches_alone_are_not_one_too_many():
    sizes = (150,) * 5  # 750 samples are 3 batches of 50 on each client
    server, clients = start(FedDC(), np.zeros(1), sizes)
    at = context(FedDC(), server, clients[0], sizes=sizes, epochs=2, batch=50)
    kept, _ = jax.jit(lambda facts: FedDC().upload(params(np.ones(1)), (), at._replace(facts=facts)))(at.facts)
    np.testing.assert_allclose(kept.state["w"], -1 / (2 * 3 * 0.1), 1e-6)


@pytest.mark.usefixtures("x64")
def test_the_update_may_be_divided_by_what_momentum_makes_of_its_steps():
    delta = uploaded(FedDC(step_normaliser="a_k"), steps=5, momentum=0.9, lr=0.1)
    np.testing.assert_allclose(delta, -1 / (effective_steps(5, 0.9) * 0.1), **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("choice", "expected"), [("cloud", [3, 5.5]), ("selected_mean", [2, 4]), ("all_mean", [1, 3])])
def test_three_models_can_be_evaluated(choice, expected):
    method = FedDC(eval=choice)
    server, clients = start(method, np.zeros(1), (1, 1))
    seen = []
    for end, chosen in ((2.0, 0), (4.0, 1)):  # drifts 2 and 4 - 3, so the cloud is 2 + 2 / 2, then 4 + (2 + 1) / 2
        server, clients = round_of(method, server, clients, np.full((2, 1), end), chosen=(chosen,))
        seen.append(float(w(method.generic_variables(server))[0]))
    assert seen == expected


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("momentum", "divisor"), [(0.9, 13.1441), (0.0, 6)])
def test_by_default_momentum_decides_between_the_divisors(momentum, divisor):
    delta = uploaded(FedDC(), sizes=(12,), epochs=2, batch=4, steps=5, momentum=momentum, lr=0.1)
    np.testing.assert_allclose(delta, -1 / (divisor * 0.1), **EXACT)


@pytest.mark.parametrize(
    ("method", "at", "told"),
    [
        (FedDC(step_normaliser="steps"), {"momentum": 0.9}, "by -7.21 in a round of 50 local steps"),
        (FedDC(), {"momentum": 0.9}, "`grad_clip=10`"),
        (FedDC(server_step="none", eval="cloud"), {}, "`eval=cloud` does nothing"),
    ],
    ids=["diverges", "is not clipped", "is not read"],
)
def test_what_cannot_work_is_advised_against(method, at, told):
    _, (sentence,) = method.configure(setting(2)._replace(steps=50), hyper(**at))
    assert told in sentence


@pytest.mark.parametrize("momentum", [0.0, 1e-4])
def test_no_advice_without_a_momentum_that_amplifies(momentum):
    assert FedDC(step_normaliser="steps").configure(setting(2), hyper(momentum=momentum))[1] == []


def test_the_default_needs_no_advice_where_it_is_clipped():
    clipped = replace(hyper(momentum=0.9), clip=10.0)
    assert FedDC().configure(setting(2), clipped)[1] == []
    assert FedDC().traits().clip == 10


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_without_the_servers_step_the_models_are_averaged_by_size():
    sizes, method = (1, 3), FedDC(server_step="none")
    server, clients = start(method, np.zeros(1), sizes)
    weights, messages = [], []
    for k, model in enumerate(([1.0], [3.0])):
        at = context(method, server, clients[k], sizes=sizes, k=k)
        clients[k], message = method.upload(params(np.array(model)), (), at)
        weights.append(method.weight(at.facts))
        messages.append(message)
    server = aggregate(method, server, messages, weights, clients=2)
    np.testing.assert_allclose(w(method.generic_variables(server)), 2.5, **EXACT)
    np.testing.assert_allclose([c.drift["w"][0] for c in clients], [1, 3], **EXACT)
    np.testing.assert_allclose(server.state["w"], np.mean([0.5 * -5 * 1, 1.5 * -5 * 3]), **EXACT)
    assert (server.drift, method.further_models(server)) == ((), {})
