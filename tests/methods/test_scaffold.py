"""SCAFFOLD: vectors, invariants, and each option."""

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


def trained(method, at, gradient, steps, *, momentum=0.0):
    """The parameter after some steps of heavy-ball SGD with the method's corrections."""
    x, buffer, lr = at.start["params"]["w"], 0.0, at.hyper.lr

    def evaluate(variables):
        return Evaluated(0.0, {}, {"w": gradient(variables["params"]["w"])})

    def step(gradients):
        after = momentum * buffer + gradients["w"]
        return Step({"w": -lr * after}, after)

    for _ in range(steps):
        _, _, (updates, buffer) = method.local_update(evaluate, step, params(x), None, at)
        x = x + updates["w"]
    return params(x)


def uploaded(method, models, sizes, **at):
    """Server and clients after a round in which client k ends at models[k]."""
    server, clients = start(method, np.zeros(models.shape[1]), sizes)
    kept, messages = [], []
    for k, model in enumerate(models):
        client, message = method.upload(params(model), (), context(method, server, clients[k], sizes=sizes, k=k, **at))
        kept.append(client)
        messages.append(message)
    return aggregate(method, server, messages, sizes, clients=len(sizes)), kept


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("scaffold"))
def test_rounds_on_quadratics_agree_with_the_vectors(g):
    method, sizes, lr = Scaffold(), g["in_n"], float(g["par_lr"])
    server, clients = start(method, g["in_x0"], sizes)
    for r, chosen in enumerate(np.flatnonzero(row > 0) for row in g["in_selected"]):
        messages = []
        for k in chosen:
            steps = int(g["in_steps"][k])
            at = context(method, server, clients[k], sizes=sizes, k=k, steps=steps, lr=lr)
            model = trained(method, at, lambda x, k=k: g["in_A"][k] @ (x - g["in_b"][k]), steps)
            clients[k], message = method.upload(model, (), at)
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
def test_the_sheets_example():
    method = Scaffold()
    server, clients = start(method, np.zeros(1), (1,))
    at = context(method, server, clients[0], steps=2, lr=0.1)
    model = trained(method, at, lambda x: x - 1, 2)
    control, _ = method.upload(model, (), at)
    np.testing.assert_allclose([w(model)[0], control["w"][0]], [0.19, -0.95], **EXACT)


@pytest.mark.usefixtures("x64")
def test_the_servers_control_is_the_mean_of_all_clients():
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
            at = context(method, server, clients[k], sizes=(1, 1), k=k, steps=5 + 3 * k, lr=0.1)
            model = trained(method, at, lambda x, k=k: x - optima[k], 5 + 3 * k)
            clients[k], message = method.upload(model, (), at)
            messages.append(message)
        server = aggregate(method, server, messages, (1, 1), clients=2)
    np.testing.assert_allclose(w(server.variables), np.mean(optima, 0), rtol=1e-6, atol=1e-6)


@pytest.mark.thorough
def test_the_first_round_is_fedavg():
    controlled, _ = toy.train(toy.simulation("scaffold"), (0,))
    plain, _ = toy.train(toy.simulation(method=Method()), (0,))
    for a, b in zip(*map(jax.tree.leaves, (controlled.servers.variables, plain.servers.variables)), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.usefixtures("x64")
def test_eta_g_scales_the_servers_step():
    server, _ = uploaded(Scaffold(eta_g=0.5), np.array([[1.0], [2.0]]), (10, 30))
    np.testing.assert_allclose(w(server.variables), 0.875, **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("normaliser", "steps"), [("steps", 5), ("a_k", 13.1441)])
def test_the_update_is_divided_by_its_steps_or_by_what_momentum_makes_of_them(normaliser, steps):
    method = Scaffold(step_normaliser=normaliser)
    _, clients = uploaded(method, np.array([[1.0]]), (1,), steps=5, momentum=0.9, lr=0.1)
    np.testing.assert_allclose(clients[0]["w"], -1 / (steps * 0.1), **EXACT)


@pytest.mark.usefixtures("x64")
def test_a_k_makes_the_control_the_gradient():
    method = Scaffold(step_normaliser="a_k")
    server, clients = start(method, np.zeros(1), (1,))
    server = server._replace(control={"w": jnp.full(1, 0.3)})
    at = context(method, server, clients[0], steps=7, momentum=0.9)
    model = trained(method, at, lambda x: jnp.full(1, 2.0), 7, momentum=0.9)
    np.testing.assert_allclose(method.upload(model, (), at)[0]["w"], 2.0, **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("correction", "steps"), [("gradient", 13.1441), ("post_step", 5)])
def test_momentum_amplifies_a_correction_of_the_gradient_alone(correction, steps):
    method = Scaffold(correction=correction)
    server, clients = start(method, np.zeros(1), (1,))
    at = context(method, server._replace(control={"w": jnp.ones(1)}), clients[0], lr=0.1)
    model = trained(method, at, lambda x: 0 * x, 5, momentum=0.9)
    np.testing.assert_allclose(w(model), -0.1 * steps, **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("trajectories")[:1])
def test_option_one_is_the_gradient_at_the_received_weights(g):
    problem = Problem(g)
    simulation = problem.simulation(METHODS["scaffold"](control="I"), lanes=2)
    state = simulation.start()
    start_at = jax.tree.map(lambda x: jnp.array(x[0]), state.servers.variables)
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
        expected = problem.flatten(gradient(start_at["params"], images, jnp.asarray(g[f"in_y{k}"])))
        actual = problem.flatten(jax.tree.map(lambda x, k=k: x[k], state.clients))
        np.testing.assert_allclose(actual, expected, **EXACT)


@struct.dataclass
class Normed(Scaffold):
    """With batch statistics."""

    def build(self, model):
        return model.clone(feature_norm=True)


@pytest.mark.thorough
def test_option_one_takes_its_gradient_in_the_batches_of_training():
    few, many = (
        toy.train(toy.simulation(method=Normed(control="I"), eval_batch=size), (0,))[0].clients for size in (4, 500)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), few, many)


def linear(normaliser, rounds, *, momentum=0.9, steps=10, slopes=(1.0, -1.0)):
    """The first client's control after each round on losses g_k w, through the hooks."""
    method, sizes = Scaffold(step_normaliser=normaliser), (1, 1)
    server, clients = start(method, np.zeros(1), sizes)
    controls = []
    for _ in range(rounds):
        messages = []
        for k, slope in enumerate(slopes):
            at = context(method, server, clients[k], sizes=sizes, k=k, steps=steps, momentum=momentum)
            model = trained(method, at, lambda x, slope=slope: jnp.full(1, slope), steps, momentum=momentum)
            clients[k], message = method.upload(model, (), at)
            messages.append(message)
        server = aggregate(method, server, messages, sizes, clients=2)
        controls.append(float(clients[0]["w"][0]))
    return controls


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("normaliser", "expected"), [("steps", [4.138, -8.848, 31.90, -95.98, 305.3]), ("a_k", [1] * 5), ("auto", [1] * 5)]
)
def test_with_momentum_controls_diverge_unless_their_divisor_counts_it(normaliser, expected):
    np.testing.assert_allclose(linear(normaliser, 5), expected, 1e-3 if normaliser == "steps" else 1e-9)


@pytest.mark.usefixtures("x64")
def test_a_controls_error_grows_by_the_printed_factor_each_round():
    ratios = {1: 1, 2: 1.45, 3: 1.87, 4: 2.26, 10: 4.14, 50: 8.21, 100: 9.10}  # A / K at a momentum of 0.9
    for steps, ratio in ratios.items():
        exact = (steps - 9 * (1 - 0.9**steps)) / (0.1 * steps)
        assert exact == pytest.approx(ratio, abs=0.005)
        first, second = linear("steps", 2, steps=steps)
        np.testing.assert_allclose([first, second - 1], [exact, (1 - exact) * (exact - 1)], rtol=1e-4, atol=1e-9)


def test_a_divisor_that_diverges_is_advised_against_with_the_runs_own_factor():
    _, (sentence,) = Scaffold(step_normaliser="steps").configure(setting(2)._replace(steps=10), hyper(momentum=0.9))
    assert "by -3.14 in a round of 10 local steps" in sentence
    assert "`step_normaliser=auto`" in sentence


@pytest.mark.parametrize(
    ("option", "at", "steps"),
    [
        ({"step_normaliser": "steps"}, {"momentum": 0.9}, 3),
        ({"step_normaliser": "steps"}, {"momentum": 1e-4}, 50),
        ({"correction": "post_step"}, {"momentum": 0.9}, 50),
        ({}, {"momentum": 0.0}, 50),
    ],
    ids=["few steps", "little momentum", "post_step", "no momentum"],
)
def test_no_advice_where_the_controls_stay(option, at, steps):
    assert Scaffold(**option).configure(setting(2)._replace(steps=steps), hyper(**at))[1] == []


@pytest.mark.parametrize("name", ["scaffold", "feddc", "fedcm", "mofedsam"])
def test_updates_of_another_optimiser_are_no_gradients(name):
    method, at = METHODS[name](), replace(hyper(momentum=0.0), clip=10.0)
    (sentence,) = method.configure(setting(2), replace(at, optimizer="adam"))[1]
    assert "takes its clients' updates for sums of gradients, which with `optimizer=adam` they are not" in sentence
    assert method.configure(setting(2), at)[1] == []


def test_a_gradient_of_its_own_needs_no_sgd():
    assert Scaffold(control="I").configure(setting(2), replace(hyper(momentum=0.0), optimizer="adam"))[1] == []


@pytest.mark.parametrize("option", [{}, {"control": "I"}])
def test_momentum_without_clipping_is_advised_against(option):
    method = Scaffold(**option)
    _, (sentence,) = method.configure(setting(2), hyper(momentum=0.9))
    assert "`grad_clip=10`" in sentence
    assert method.configure(setting(2), replace(hyper(momentum=0.9), clip=10.0))[1] == []
    assert method.traits().clip == 10


@pytest.mark.usefixtures("x64")
def test_what_is_clipped_is_the_corrected_gradient():
    method, seen = Scaffold(), []
    server, clients = start(method, np.zeros(1), (1,))
    at = context(method, server._replace(control={"w": jnp.full(1, 3.0)}), clients[0])

    def step(gradients):
        seen.append(float(gradients["w"][0]))
        return Step({"w": gradients["w"]}, 0.0)

    method.local_update(lambda v: Evaluated(0.0, {}, {"w": jnp.ones(1)}), step, params(np.zeros(1)), None, at)
    assert seen == [4.0]


@pytest.mark.thorough
def test_a_step_of_plain_gradients_beside_momentum_is_warned_of():
    method = Scaffold(control="I", correction="post_step")
    _, (sentence,) = method.configure(setting(2), hyper(momentum=0.9))
    assert "about 10 times" in sentence
    assert "`control=II`," in sentence
    assert method.configure(setting(2), hyper(momentum=0.0))[1] == []


@pytest.mark.thorough
def test_momentum_is_not_counted_in_a_correction_that_has_none():
    with pytest.raises(UserError, match="correction=gradient"):
        Scaffold(step_normaliser="a_k", correction="post_step").configure(setting(2), hyper())
