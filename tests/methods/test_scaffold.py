"""SCAFFOLD: golden vectors, invariants, and each option."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct
from golden_vectors import cases
from hooks import aggregate, context, hyper, params, setting, start
from trajectories import Problem, train

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Evaluated, Method, Step
from fedjax_pcdd.methods.scaffold import Scaffold
from fedjax_pcdd.models.classifier import forward

EXACT = {"rtol": 1e-9, "atol": 1e-11}


def w(variables):
    return np.asarray(variables["params"]["w"])


def trained(method, client_context, gradient, steps, *, momentum=0.0):
    """The parameter after some steps of heavy-ball SGD with the method's corrections."""
    x, buffer, lr = client_context.start["params"]["w"], 0.0, client_context.hyper.lr

    def evaluate(variables):
        return Evaluated(0.0, {}, {"w": gradient(variables["params"]["w"])})

    def step(gradients):
        velocity = momentum * buffer + gradients["w"]
        return Step({"w": -lr * velocity}, velocity)

    for _ in range(steps):
        _, _, (updates, buffer) = method.local_update(evaluate, step, params(x), None, client_context)
        x = x + updates["w"]
    return params(x)


def uploaded(method, models, sizes, **local):
    """Server and clients after a round in which client k ends at models[k]."""
    server, clients = start(method, np.zeros(models.shape[1]), sizes)
    new_clients, messages = [], []
    for k, model in enumerate(models):
        client, message = method.upload(
            params(model), (), context(method, server, clients[k], sizes=sizes, k=k, **local)
        )
        new_clients.append(client)
        messages.append(message)
    return aggregate(method, server, messages, sizes, clients=len(sizes)), new_clients


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("scaffold"))
def test_rounds_on_quadratics_agree_with_the_vectors(g):
    method, sizes, lr = Scaffold(), g["in_n"], float(g["par_lr"])
    server, clients = start(method, g["in_x0"], sizes)
    for r, chosen in enumerate(np.flatnonzero(row > 0) for row in g["in_selected"]):
        messages = []
        for k in chosen:
            steps = int(g["in_steps"][k])
            client_context = context(method, server, clients[k], sizes=sizes, k=k, steps=steps, lr=lr)
            model = trained(method, client_context, lambda x, k=k: g["in_A"][k] @ (x - g["in_b"][k]), steps)
            clients[k], message = method.upload(model, (), client_context)
            messages.append(message)
        server = aggregate(method, server, messages, sizes[chosen], clients=len(sizes))
        np.testing.assert_allclose(w(server.variables), g["out_x"][r], **EXACT)
        np.testing.assert_allclose(server.control["w"], g["out_c"][r], **EXACT)
        np.testing.assert_allclose([c["w"] for c in clients], g["out_ck"][r], **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("trajectories"))
def test_control_agrees_with_the_reference(g):
    problem, states = train(g, "scaffold", 3, momentum=0.0, decay=0.0)
    for state, expected in zip(states, g["out_scaffold_rho0_wd0__c"], strict=True):
        control = jax.tree.map(lambda x: x[0], state.servers.control)
        np.testing.assert_allclose(problem.flatten(control), expected, **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("trajectories")[:1])
def test_without_momentum_the_correction_may_follow_the_step(g):
    problem, states = train(g, "scaffold", 3, momentum=0.0, decay=0.0, correction="post_step")
    params = jax.tree.map(lambda x: x[0], states[-1].servers.variables["params"])
    np.testing.assert_allclose(problem.flatten(params), g["out_scaffold_rho0_wd0"][-1], **EXACT)


@pytest.mark.usefixtures("x64")
def test_two_steps_match_the_worked_example():
    method = Scaffold()
    server, clients = start(method, np.zeros(1), (1,))
    client_context = context(method, server, clients[0], steps=2, lr=0.1)
    model = trained(method, client_context, lambda x: x - 1, 2)
    control, _ = method.upload(model, (), client_context)
    np.testing.assert_allclose([w(model)[0], control["w"][0]], [0.19, -0.95], **EXACT)


@pytest.mark.usefixtures("x64")
def test_the_servers_control_is_the_mean_of_all_clients_controls():
    server, clients = uploaded(Scaffold(), np.array([[1.0], [2.0], [-5.0]]), (10, 30, 20))
    np.testing.assert_allclose(server.control["w"], np.mean([c["w"] for c in clients], 0), **EXACT)


@pytest.mark.thorough
@pytest.mark.usefixtures("x64")
def test_equal_hessians_converge_to_the_optimum_of_the_mean():
    method, optima = Scaffold(), [np.array([1.0, 0.0]), np.array([-2.0, 4.0])]
    server, clients = start(method, np.full(2, 5.0), (1, 1))
    for _ in range(60):
        messages = []
        for k in (0, 1):
            client_context = context(method, server, clients[k], sizes=(1, 1), k=k, steps=5 + 3 * k, lr=0.1)
            model = trained(method, client_context, lambda x, k=k: x - optima[k], 5 + 3 * k)
            clients[k], message = method.upload(model, (), client_context)
            messages.append(message)
        server = aggregate(method, server, messages, (1, 1), clients=2)
    np.testing.assert_allclose(w(server.variables), np.mean(optima, 0), rtol=1e-6, atol=1e-6)


@pytest.mark.thorough
def test_the_first_round_is_fedavg():
    scaffold, _ = toy.train(toy.simulation("scaffold"), (0,))
    fedavg, _ = toy.train(toy.simulation(method=Method()), (0,))
    for a, b in zip(*map(jax.tree.leaves, (scaffold.servers.variables, fedavg.servers.variables)), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.usefixtures("x64")
def test_eta_g_scales_the_servers_step():
    server, _ = uploaded(Scaffold(eta_g=0.5), np.array([[1.0], [2.0]]), (10, 30))
    np.testing.assert_allclose(w(server.variables), 0.875, **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("normaliser", "steps"), [("steps", 5), ("a_k", 13.1441)])
def test_the_update_is_divided_by_steps_or_by_effective_steps(normaliser, steps):
    method = Scaffold(step_normaliser=normaliser)
    _, clients = uploaded(method, np.array([[1.0]]), (1,), steps=5, momentum=0.9, lr=0.1)
    np.testing.assert_allclose(clients[0]["w"], -1 / (steps * 0.1), **EXACT)


@pytest.mark.usefixtures("x64")
def test_with_a_k_the_control_is_the_gradient():
    method = Scaffold(step_normaliser="a_k")
    server, clients = start(method, np.zeros(1), (1,))
    server = server._replace(control={"w": jnp.full(1, 0.3)})
    client_context = context(method, server, clients[0], steps=7, momentum=0.9)
    model = trained(method, client_context, lambda x: jnp.full(1, 2.0), 7, momentum=0.9)
    np.testing.assert_allclose(method.upload(model, (), client_context)[0]["w"], 2.0, **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("correction", "steps"), [("gradient", 13.1441), ("post_step", 5)])
def test_momentum_amplifies_only_a_correction_of_the_gradient(correction, steps):
    method = Scaffold(correction=correction)
    server, clients = start(method, np.zeros(1), (1,))
    client_context = context(method, server._replace(control={"w": jnp.ones(1)}), clients[0], lr=0.1)
    model = trained(method, client_context, lambda x: 0 * x, 5, momentum=0.9)
    np.testing.assert_allclose(w(model), -0.1 * steps, **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("correction", "steps"), [("gradient", 13.1441), ("post_step", 5)])
def test_a_control_is_divided_by_the_weight_of_its_correction(correction, steps):
    method, model = Scaffold(correction=correction), np.array([[-1.0]])
    _, (control,) = uploaded(method, model, (1,), steps=5, lr=0.1, momentum=0.9)
    np.testing.assert_allclose(control["w"], 1 / (0.1 * steps), rtol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("trajectories")[:1])
def test_option_one_is_the_gradient_at_the_received_weights(g):
    problem = Problem(g)
    simulation = problem.simulation(METHODS["scaffold"](control="I"), lanes=2)
    state = simulation.start()
    received = jax.tree.map(lambda x: jnp.array(x[0]), state.servers.variables)
    chosen = np.arange(problem.clients)
    state, _ = simulation.step(state, 0, problem.plan(simulation, 0, chosen))

    @jax.jit
    def gradient(params, images, labels):
        def loss(params):
            logits = forward(simulation.program.model, {"params": params}, images, train=False)[0].logits
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

        return jax.grad(loss)(params)

    for k in chosen:
        images = jnp.asarray(g[f"in_x{k}"])[:, None, None, :]
        expected = problem.flatten(gradient(received["params"], images, jnp.asarray(g[f"in_y{k}"])))
        actual = problem.flatten(jax.tree.map(lambda x, k=k: x[k], state.clients))
        np.testing.assert_allclose(actual, expected, **EXACT)


@struct.dataclass
class Normed(Scaffold):
    """SCAFFOLD on a model with batch statistics."""

    def build(self, model):
        return model.clone(feature_norm=True)


@pytest.mark.thorough
def test_option_one_takes_its_gradient_in_training_batches():
    small_batches, large_batches = (
        toy.train(toy.simulation(method=Normed(control="I"), eval_batch=size), (0,))[0].clients for size in (4, 500)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), small_batches, large_batches)


def controls_on_linear_losses(normaliser, rounds, *, momentum=0.9, steps=10, slopes=(1.0, -1.0)):
    """The first client's control after each round on losses g_k w, through the hooks."""
    method, sizes = Scaffold(step_normaliser=normaliser), (1, 1)
    server, clients = start(method, np.zeros(1), sizes)
    controls = []
    for _ in range(rounds):
        messages = []
        for k, slope in enumerate(slopes):
            client_context = context(method, server, clients[k], sizes=sizes, k=k, steps=steps, momentum=momentum)
            model = trained(method, client_context, lambda x, slope=slope: jnp.full(1, slope), steps, momentum=momentum)
            clients[k], message = method.upload(model, (), client_context)
            messages.append(message)
        server = aggregate(method, server, messages, sizes, clients=2)
        controls.append(float(clients[0]["w"][0]))
    return controls


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("normaliser", "expected"), [("steps", [4.138, -8.848, 31.90, -95.98, 305.3]), ("a_k", [1] * 5), ("auto", [1] * 5)]
)
def test_with_momentum_controls_diverge_unless_their_divisor_counts_it(normaliser, expected):
    np.testing.assert_allclose(
        controls_on_linear_losses(normaliser, 5), expected, 1e-3 if normaliser == "steps" else 1e-9
    )


@pytest.mark.usefixtures("x64")
def test_a_controls_error_grows_by_the_printed_factor_each_round():
    ratios = {1: 1, 2: 1.45, 3: 1.87, 4: 2.26, 10: 4.14, 50: 8.21, 100: 9.10}  # A / K at a momentum of 0.9
    for steps, ratio in ratios.items():
        exact = (steps - 9 * (1 - 0.9**steps)) / (0.1 * steps)
        assert exact == pytest.approx(ratio, abs=0.005)
        first, second = controls_on_linear_losses("steps", 2, steps=steps)
        np.testing.assert_allclose([first, second - 1], [exact, (1 - exact) * (exact - 1)], rtol=1e-4, atol=1e-9)


def test_a_divisor_that_diverges_is_advised_against_with_its_factor():
    _, (advice,) = Scaffold(step_normaliser="steps").configure(setting(2)._replace(steps=10), hyper(momentum=0.9))
    assert "by -3.14 in a round of 10 local steps" in advice
    assert "`step_normaliser=auto`" in advice


@pytest.mark.parametrize(
    ("option", "local", "steps"),
    [
        ({"step_normaliser": "steps"}, {"momentum": 0.9}, 3),
        ({"step_normaliser": "steps"}, {"momentum": 1e-4}, 50),
        ({"correction": "post_step"}, {"momentum": 0.9}, 50),
        ({}, {"momentum": 0.0}, 50),
    ],
    ids=["few steps", "little momentum", "post_step", "no momentum"],
)
def test_no_advice_is_given_where_the_controls_stay_bounded(option, local, steps):
    assert Scaffold(**option).configure(setting(2)._replace(steps=steps), hyper(**local))[1] == []


@pytest.mark.parametrize("name", ["scaffold", "feddc", "fedcm", "mofedsam"])
def test_an_optimiser_other_than_sgd_is_advised_against(name):
    method, local = METHODS[name](), replace(hyper(momentum=0.0), clip=10.0)
    (advice,) = method.configure(setting(2), replace(local, optimizer="adam"))[1]
    assert "takes its clients' updates for sums of gradients, which with `optimizer=adam` they are not" in advice
    assert method.configure(setting(2), local)[1] == []


def test_option_one_gives_no_advice_about_another_optimiser():
    assert Scaffold(control="I").configure(setting(2), replace(hyper(momentum=0.0), optimizer="adam"))[1] == []


@pytest.mark.parametrize("option", [{}, {"control": "I"}])
def test_momentum_without_clipping_is_advised_against(option):
    method = Scaffold(**option)
    _, (advice,) = method.configure(setting(2), hyper(momentum=0.9))
    assert "`grad_clip=10`" in advice
    assert method.configure(setting(2), replace(hyper(momentum=0.9), clip=10.0))[1] == []
    assert method.traits().clip == 10


@pytest.mark.usefixtures("x64")
def test_the_corrected_gradient_is_what_is_clipped():
    method, step_gradients = Scaffold(), []
    server, clients = start(method, np.zeros(1), (1,))
    client_context = context(method, server._replace(control={"w": jnp.full(1, 3.0)}), clients[0])

    def step(gradients):
        step_gradients.append(float(gradients["w"][0]))
        return Step({"w": gradients["w"]}, 0.0)

    method.local_update(
        lambda v: Evaluated(0.0, {}, {"w": jnp.ones(1)}), step, params(np.zeros(1)), None, client_context
    )
    assert step_gradients == [4.0]


@pytest.mark.thorough
def test_option_one_with_post_step_correction_and_momentum_gives_advice():
    method = Scaffold(control="I", correction="post_step")
    _, (advice,) = method.configure(setting(2), hyper(momentum=0.9))
    assert "about 10 times" in advice
    assert "`control=II`," in advice
    assert method.configure(setting(2), hyper(momentum=0.0))[1] == []


@pytest.mark.thorough
def test_a_k_is_refused_for_a_correction_without_momentum():
    with pytest.raises(UserError, match="correction=gradient"):
        Scaffold(step_normaliser="a_k", correction="post_step").configure(setting(2), hyper())
