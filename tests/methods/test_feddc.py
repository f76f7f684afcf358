"""FedDC: golden vectors, invariants, and each option."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_vectors import cases
from hooks import aggregate, context, hyper, params, setting, start

from fedjax_pcdd.methods.drift import size_factor
from fedjax_pcdd.methods.feddc import FedDC
from fedjax_pcdd.methods.steps import effective_steps

EXACT = {"rtol": 1e-9, "atol": 1e-11}


def w(variables):
    return np.asarray(variables["params"]["w"])


def tree(values):
    return {"w": jnp.asarray(values)}


def after_round(method, server, clients, models, *, cohort, sizes=None, **options):
    """Server and clients after a round in which client k of the cohort ends at models[k]."""
    sizes = sizes or (1,) * len(clients)
    clients, messages = list(clients), []
    for k in cohort:
        client_context = context(method, server, clients[k], sizes=sizes, k=k, **options)
        clients[k], message = method.upload(params(models[k]), (), client_context)
        messages.append(message)
    return aggregate(method, server, messages, np.ones(len(messages)), clients=len(clients)), clients


def first_delta(method, *, sizes=(1,), k=0, move=1.0, **options):
    """Delta_k, the state of client k, after a first round in which it moved by `move`."""
    server, clients = start(method, np.zeros(1), sizes)
    client, _ = method.upload(
        params(np.full(1, move)), (), context(method, server, clients[k], sizes=sizes, k=k, **options)
    )
    return float(client.state["w"][0])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("feddc"))
def test_regulariser_and_states_agree_with_the_golden_vectors(g):
    method = FedDC(alpha=float(g["par_alpha"]))
    server, clients = start(method, g["in_w_global"], (1,))
    server = server._replace(state=tree(g["in_global_last"]))
    client = clients[0]._replace(drift=tree(g["in_drift"]), state=tree(g["in_local_last"]))
    client_context = context(method, server, client, epochs=int(g["par_n_steps"]), lr=float(g["par_lr"]))
    value, gradient = jax.value_and_grad(method.regulariser)(params(g["in_w"])["params"], client_context)
    np.testing.assert_allclose(value, g["out_reg"], **EXACT)
    np.testing.assert_allclose(gradient["w"], g["out_grad"], **EXACT)
    next_client, _ = method.upload(params(g["in_w"]), (), client_context)
    np.testing.assert_allclose(next_client.drift["w"], g["out_new_drift"], **EXACT)
    np.testing.assert_allclose(next_client.state["w"], g["out_new_local_state"], **EXACT)


@pytest.mark.usefixtures("x64")
def test_regulariser_and_gradient_have_the_values_of_the_worked_example():
    method = FedDC(alpha=0.1)
    server, clients = start(method, np.zeros(1), (1,))
    client_context = context(method, server, clients[0]._replace(drift=tree(np.full(1, 0.5))))
    value, gradient = jax.value_and_grad(method.regulariser)(params(np.ones(1))["params"], client_context)
    np.testing.assert_allclose([value, gradient["w"][0]], [0.1125, 0.15], **EXACT)


@pytest.mark.usefixtures("x64")
def test_the_first_round_moves_the_model_by_twice_the_mean_update():
    models = np.array([[1.0], [3.0]])
    server, _ = after_round(FedDC(), *start(FedDC(), np.zeros(1), (5, 5)), models, cohort=(0, 1), sizes=(5, 5))
    np.testing.assert_allclose(w(server.variables), 4.0, **EXACT)


@pytest.mark.usefixtures("x64")
def test_the_servers_state_and_drift_are_means_over_all_clients():
    method, rng = FedDC(), np.random.default_rng(0)
    server, clients = start(method, rng.normal(size=3), (1,) * 4)
    for cohort in ((0, 2), (1,), (2, 3)):
        server, clients = after_round(method, server, clients, rng.normal(size=(4, 3)), cohort=cohort)
    np.testing.assert_allclose(server.state["w"], np.mean([c.state["w"] for c in clients], 0), **EXACT)
    np.testing.assert_allclose(server.drift["w"], np.mean([c.drift["w"] for c in clients], 0), **EXACT)


@pytest.mark.usefixtures("x64")
def test_changes_of_the_state_are_sent_times_the_size_factor():
    sizes = (1, 3)
    server, clients = after_round(
        FedDC(), *start(FedDC(), np.zeros(1), sizes), np.ones((2, 1)), cohort=(0, 1), sizes=sizes
    )
    expected = np.mean([0.5 * float(clients[0].state["w"][0]), 1.5 * float(clients[1].state["w"][0])])
    np.testing.assert_allclose(server.state["w"], expected, **EXACT)


def test_the_size_factor_is_right_where_clients_times_samples_exceed_32_bits():
    server, clients = start(FedDC(), np.zeros(1), (1,))
    client_context = context(FedDC(), server, clients[0])
    facts = client_context.facts._replace(num_samples=jnp.int32(43_000), federation_counts=jnp.array([[93_000]]))
    setting = client_context.setting._replace(num_clients=50_000)
    factor = size_factor(client_context._replace(facts=facts, setting=setting))
    np.testing.assert_allclose(factor, 50_000 * 43_000 / 93_000, rtol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("scaling", "factor"), [("inverse_size", 0.5), ("common", 1.0)])
def test_the_size_factor_divides_alpha_and_the_global_state(scaling, factor):
    method, sizes = FedDC(alpha=0.1, alpha_scaling=scaling), (10, 30)
    server, clients = start(method, np.zeros(1), sizes)
    client_context = context(method, server._replace(state=tree(np.ones(1))), clients[0], sizes=sizes)
    value = method.regulariser(params(np.full(1, 2.0))["params"], client_context)
    np.testing.assert_allclose(value, (0.05 * 4 + 2) / factor, **EXACT)


@pytest.mark.usefixtures("x64")
def test_delta_is_divided_by_the_steps_of_a_client_of_mean_size():
    sizes = (4, 17)  # 10.5 samples are 3 batches of 4
    for k in (0, 1):
        delta = first_delta(FedDC(), sizes=sizes, k=k, epochs=2, batch=4, lr=0.1, steps=99)
        np.testing.assert_allclose(delta, -1 / (2 * 3 * 0.1), **EXACT)


def test_delta_is_divided_by_the_option_local_steps_if_it_is_set():
    server, clients = start(FedDC(), np.zeros(1), (8, 8))
    client_context = context(FedDC(), server, clients[0], sizes=(8, 8), epochs=2, batch=4)
    client_context = client_context._replace(hyper=replace(client_context.hyper, local_steps=5))
    client, _ = FedDC().upload(params(np.ones(1)), (), client_context)
    np.testing.assert_allclose(client.state["w"], -1 / (5 * 0.1), 1e-6)


def test_compiled_code_counts_no_step_too_many_for_full_batches():
    sizes = (150,) * 5  # 750 samples are 3 batches of 50 on each client
    server, clients = start(FedDC(), np.zeros(1), sizes)
    client_context = context(FedDC(), server, clients[0], sizes=sizes, epochs=2, batch=50)
    client, _ = jax.jit(lambda facts: FedDC().upload(params(np.ones(1)), (), client_context._replace(facts=facts)))(
        client_context.facts
    )
    np.testing.assert_allclose(client.state["w"], -1 / (2 * 3 * 0.1), 1e-6)


@pytest.mark.usefixtures("x64")
def test_delta_can_be_divided_by_the_effective_steps_under_momentum():
    delta = first_delta(FedDC(step_normaliser="a_k"), steps=5, momentum=0.9, lr=0.1)
    np.testing.assert_allclose(delta, -1 / (effective_steps(5, 0.9) * 0.1), **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("choice", "expected"), [("cloud", [3, 5.5]), ("selected_mean", [2, 4]), ("all_mean", [1, 3])])
def test_the_evaluated_model_is_the_chosen_one_of_three(choice, expected):
    method = FedDC(eval=choice)
    server, clients = start(method, np.zeros(1), (1, 1))
    evaluated = []
    for end, client in ((2.0, 0), (4.0, 1)):  # drifts 2 and 4 - 3, so the cloud is 2 + 2 / 2, then 4 + (2 + 1) / 2
        server, clients = after_round(method, server, clients, np.full((2, 1), end), cohort=(client,))
        evaluated.append(float(w(method.generic_variables(server))[0]))
    assert evaluated == expected


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("momentum", "divisor"), [(0.9, 13.1441), (0.0, 6)])
def test_by_default_the_divisor_of_delta_depends_on_momentum(momentum, divisor):
    delta = first_delta(FedDC(), sizes=(12,), epochs=2, batch=4, steps=5, momentum=momentum, lr=0.1)
    np.testing.assert_allclose(delta, -1 / (divisor * 0.1), **EXACT)


@pytest.mark.parametrize(
    ("method", "options", "excerpt"),
    [
        (FedDC(step_normaliser="steps"), {"momentum": 0.9}, "by -7.21 in a round of 50 local steps"),
        (FedDC(), {"momentum": 0.9}, "`grad_clip=10`"),
        (FedDC(server_step="none", eval="cloud"), {}, "`eval=cloud` does nothing"),
    ],
    ids=["diverges", "is not clipped", "is not read"],
)
def test_options_that_cannot_work_are_advised_against(method, options, excerpt):
    _, (sentence,) = method.configure(setting(2)._replace(steps=50), hyper(**options))
    assert excerpt in sentence


@pytest.mark.parametrize("momentum", [0.0, 1e-4])
def test_no_advice_without_a_momentum_that_amplifies(momentum):
    assert FedDC(step_normaliser="steps").configure(setting(2), hyper(momentum=momentum))[1] == []


def test_with_clipped_gradients_the_default_needs_no_advice():
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
        client_context = context(method, server, clients[k], sizes=sizes, k=k)
        clients[k], message = method.upload(params(np.array(model)), (), client_context)
        weights.append(method.weight(client_context.facts))
        messages.append(message)
    server = aggregate(method, server, messages, weights, clients=2)
    np.testing.assert_allclose(w(method.generic_variables(server)), 2.5, **EXACT)
    np.testing.assert_allclose([c.drift["w"][0] for c in clients], [1, 3], **EXACT)
    np.testing.assert_allclose(server.state["w"], np.mean([0.5 * -5 * 1, 1.5 * -5 * 3]), **EXACT)
    assert (server.drift, method.further_models(server)) == ((), {})
