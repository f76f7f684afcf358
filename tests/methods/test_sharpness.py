"""FedSAM, MoFedSAM, FedCM, FedLESAM, FedGF and FedSMOO: three rounds against the reference, and invariants."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from golden_vectors import cases
from hooks import aggregate, context, facts, hyper, params, setting, start
from trajectories import train

from fedjax_pcdd import methods
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.fedcm import FedCM
from fedjax_pcdd.methods.fedgf import FedGF
from fedjax_pcdd.methods.fedlesam import Client, FedLESAM
from fedjax_pcdd.methods.fedsam import FedSAM
from fedjax_pcdd.methods.fedsmoo import FedSMOO
from fedjax_pcdd.methods.method import Evaluated, Step
from fedjax_pcdd.methods.mofedsam import MoFedSAM
from fedjax_pcdd.methods.sharpness import ascent, of_length

EXACT = {"rtol": 1e-9, "atol": 1e-11}
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

MEMORY = {"memory": "server", "norm": "sum"}
GLOBAL = {"global_rho": "par_global_rho", "threshold": "par_threshold", "window": "par_window"}
MOMENTUM, CLIP = {"momentum": 0.9}, {"clip": 0.5}
RHO, SMOO = {"rho": "par_rho"}, {"rho": "par_rho", "lam": "par_lambda"}
MO, GF = {"rho": "par_rho", "alpha": "par_beta"}, {"rho": "par_rho", **GLOBAL}
SETTINGS = {
    "fedavg": ("fedavg", {}, {}),
    "fedsam": ("fedsam", RHO, {}),
    "fedsam_momentum0.9": ("fedsam", RHO, MOMENTUM),
    "fedsam_clip0.5": ("fedsam", RHO, CLIP),
    "mofedsam": ("mofedsam", MO, {}),
    "mofedsam_clip0.5": ("mofedsam", MO, CLIP),
    "fedcm": ("fedcm", {"alpha": "par_alpha"}, {}),
    "fedcm_clip0.5": ("fedcm", {"alpha": "par_alpha"}, CLIP),
    "fedcm_per_client": ("fedcm", {"alpha": "par_alpha", "direction": "per_client"}, {}),
    "fedlesam_paper": ("fedlesam", RHO, {}),
    "fedlesam_code": ("fedlesam", RHO | MEMORY, {}),
    "fedsmoo": ("fedsmoo", SMOO, {}),
    "fedsmoo_clip0.5": ("fedsmoo", SMOO, CLIP),
    "fedsmoo_momentum0.9": ("fedsmoo", SMOO, MOMENTUM),
    "fedgf": ("fedgf", GF, {}),
    "fedgf_momentum0.9": ("fedgf", GF, MOMENTUM),
}


def flat(problem, tree, row):
    return problem.flatten(jax.tree.map(lambda x: x[row], tree))


def golden_values(problem, state, clients):
    """The values of a state that a golden file has beside the server's model, by their suffixes."""
    server, client_states = state.servers, state.clients
    trees = {"delta": "direction", "s": "state"}
    result = {k: flat(problem, getattr(server, v), 0) for k, v in trees.items() if getattr(server, v, ()) != ()}
    if hasattr(server, "previous"):
        method = FedGF(global_rho=problem.g["par_global_rho"].item())
        far = jax.vmap(lambda *models: method.far_point(*models, setting(1)))
        result["perturbed"] = flat(problem, far(server.variables["params"], server.previous), 0)
    numbers = {"c": "share", "divergence": "divergence"}
    result |= {k: getattr(server, v)[0] for k, v in numbers.items() if hasattr(server, v)}
    dual = {"mu": "state", "h": "drift"} if hasattr(client_states, "drift") else {}
    return result | {
        k: np.stack([flat(problem, getattr(client_states, v), c) for c in range(clients)]) for k, v in dual.items()
    }


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("sharpness"))
@pytest.mark.parametrize("setting", SETTINGS)
def test_three_rounds_agree_with_the_reference(g, setting):
    name, options, local = SETTINGS[setting]
    constants = {k: g[v].item() if v in g else v for k, v in options.items()}
    problem, states = train(g, name, 3, **local, **constants)
    further_keys = [key for key in g if key.startswith(f"out_{setting}__") and not key.endswith("__steps")]
    for r, state in enumerate(states):
        np.testing.assert_allclose(flat(problem, state.servers.variables["params"], 0), g[f"out_{setting}"][r], **EXACT)
        values = golden_values(problem, state, problem.clients)
        for key in further_keys:
            np.testing.assert_allclose(values[key.rpartition("__")[2]], g[key][r], err_msg=key, **EXACT)


def w(variables):
    return np.asarray(variables["params"]["w"])


def one_step(method, client_context, gradient, variables, lr=0.1):
    """Parameters and collections after a step of SGD with this gradient, and the points where gradients were taken."""
    points = []

    def evaluate(variables):
        points.append(w(variables))
        return Evaluated(0.0, {}, {"w": gradient(variables["params"]["w"])})

    def step(gradients):
        return Step({"w": -lr * gradients["w"]}, ())

    _, state, result = method.local_update(evaluate, step, variables, None, client_context)
    return params(variables["params"]["w"] + result.updates["w"]) | state, points


def first_context(method, values, **local):
    """The context of the only client in its first step."""
    server, (client,) = start(method, np.asarray(values), (1,))
    return context(method, server, client, **local)._replace(step=0)


@pytest.mark.usefixtures("x64")
def test_fedsams_step_matches_the_worked_example():
    client_context = first_context(FedSAM(rho=0.1), [1.0])
    after, points = one_step(FedSAM(rho=0.1), client_context, lambda x: 2 * x, client_context.start)
    np.testing.assert_allclose(points, [[1.0], [1.1]], **EXACT)
    np.testing.assert_allclose(w(after), 1 - 0.1 * 2.2, **EXACT)


def test_a_perturbation_has_the_length_rho_over_all_parameters_together():
    gradients = {"a": jnp.asarray([3.0, 0.0]), "b": jnp.asarray([[4.0]])}
    perturbation = of_length(gradients, 0.5)
    np.testing.assert_allclose(perturbation["a"], [0.3, 0.0], rtol=1e-6)
    np.testing.assert_allclose(perturbation["b"], [[0.4]], rtol=1e-6)


def test_a_zero_gradient_gives_a_zero_perturbation():
    zero = {"a": jnp.zeros(2)}
    np.testing.assert_array_equal(of_length(zero, 0.5)["a"], 0)
    np.testing.assert_array_equal(ascent(zero, zero, 0.5, adaptive=True)["a"], 0)


def test_adaptive_perturbations_grow_with_the_weights():
    weights, gradients = {"a": jnp.asarray([2.0, -1.0, 0.0])}, {"a": jnp.asarray([1.0, 1.0, 5.0])}
    expected = np.array([4.0, 1.0, 0.0]) * 0.1 / np.sqrt(5)
    np.testing.assert_allclose(ascent(gradients, weights, 0.1, adaptive=True)["a"], expected, rtol=1e-6)


def test_fedsam_may_perturb_each_weight_in_proportion_to_its_size():
    method = FedSAM(rho=0.1, adaptive=True)
    client_context = first_context(method, [2.0, 1.0])
    _, points = one_step(method, client_context, jnp.ones_like, client_context.start)
    np.testing.assert_allclose(points[1] - points[0], np.array([0.4, 0.1]) / np.sqrt(5), rtol=1e-5)


@pytest.mark.parametrize(("statistics", "expected"), [("first", 1), ("both", 2)])
def test_running_statistics_count_the_passes_asked_for(statistics, expected):
    method = FedSAM(statistics=statistics)

    def evaluate(variables):
        return Evaluated(0.0, {"batch_stats": variables["batch_stats"] + 1}, {"w": variables["params"]["w"]})

    variables = params(np.ones(1), batch_stats=0)
    _, state, _ = method.local_update(evaluate, lambda g: Step(g, ()), variables, None, first_context(method, [1.0]))
    assert state["batch_stats"] == expected


def assert_same_model(first, second, rounds=(0, 1, 2)):
    """Assert that two methods train the same global model."""
    (a, _), (b, _) = (toy.train(toy.simulation(name, **hyper), rounds) for name, hyper in (first, second))
    for x, y in zip(*(jax.tree.leaves(s.servers.variables) for s in (a, b)), strict=True):
        np.testing.assert_allclose(x, y, **CLOSE)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("special_case", "expected"),
    [
        (("mofedsam", {"rho": 0.0, "alpha": 0.3}), ("fedcm", {"alpha": 0.3})),
        (("mofedsam", {"rho": 0.1, "alpha": 1.0}), ("fedsam", {"rho": 0.1})),
        (("fedgf", {"rho": 0.1, "threshold": float("inf")}), ("fedsam", {"rho": 0.1})),
        (("fedsmoo", {"rho": 0.0, "lam": 0.1}), ("feddyn", {"alpha": 0.1})),
    ],
    ids=["mofedsam-fedcm", "mofedsam-fedsam", "fedgf-fedsam", "fedsmoo-feddyn"],
)
def test_a_special_case_of_a_method_is_another_method(special_case, expected):
    assert_same_model(special_case, expected)


def after_one_round(method, models, sizes, values=(0.0,), **local):
    """Server and clients after a round in which client k ends at models[k]."""
    server, clients = start(method, np.asarray(values), sizes)
    new_clients, messages = [], []
    for k, model in enumerate(models):
        client_context = context(method, server, clients[k], sizes=sizes, k=k, **local)
        client, message = method.upload({**client_context.start, **params(np.asarray(model))}, (), client_context)
        new_clients.append(client)
        messages.append(message)
    weights = [float(method.weight(facts(sizes, k))) for k in range(len(sizes))]
    return aggregate(method, server, messages, weights, clients=len(sizes)), new_clients


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["mean_steps", "per_client"])
def test_the_direction_of_one_step_is_the_gradient(form):
    server, _ = after_one_round(FedCM(direction=form), [[-0.2], [-0.6]], (1, 3), steps=1, lr=0.1)
    np.testing.assert_allclose(server.direction["w"], 0.25 * 2 + 0.75 * 6, **EXACT)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("normaliser", "steps"), [("steps", 5), ("a_k", 13.1441)])
def test_the_direction_is_divided_by_steps_or_by_effective_steps(normaliser, steps):
    method = FedCM(step_normaliser=normaliser)
    server, _ = after_one_round(method, [[-1.0]], (1,), steps=5, lr=0.1, momentum=0.9)
    np.testing.assert_allclose(server.direction["w"], 1 / (0.1 * steps), rtol=1e-5)


@pytest.mark.parametrize(("warm", "share"), [(False, 0.1), (True, 1.0)])
def test_a_warm_start_takes_whole_gradients_only_in_the_first_round(warm, share):
    method = FedCM(warm=warm)
    client_context = first_context(method, [1.0])
    for round_context, expected in ((client_context, share), (client_context._replace(round=1), 0.1)):
        after, _ = one_step(method, round_context, jnp.ones_like, round_context.start)
        np.testing.assert_allclose(w(after), 1 - 0.1 * expected, rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_eta_g_scales_the_servers_step():
    server, _ = after_one_round(FedCM(eta_g=0.5), [[1.0], [2.0]], (10, 30))
    np.testing.assert_allclose(w(server.variables), 0.875, **EXACT)


@pytest.mark.usefixtures("x64")
def test_fedlesam_perturbs_towards_the_model_received_last():
    method = FedLESAM(rho=0.5)
    server, (client,) = start(method, np.array([3.0, 4.0]), (1,))
    client_context = context(method, server, client)
    np.testing.assert_array_equal(method.perturbation(client_context)["w"], 0)  # has not received a model before
    client, _ = method.upload(params(np.array([9.0, 9.0])), (), client_context)
    np.testing.assert_array_equal(client.received["w"], [3, 4])  # not its own result
    later_context = context(method, server._replace(variables=params(np.zeros(2))), client)
    np.testing.assert_allclose(method.perturbation(later_context)["w"], [0.3, 0.4], **EXACT)


def client_that_received(tree):
    """The state of a client of FedLESAM that has received these parameters."""
    return Client((), tree, jnp.ones((), bool))


@pytest.mark.parametrize("options", [{}, {"memory": "server"}, {"norm": "sum"}])
def test_fedlesam_perturbs_nothing_if_the_model_did_not_change(options):
    method = FedLESAM(**options)
    server, (client,) = start(method, np.array([3.0, 4.0]), (1,))
    if client != ():
        client = client_that_received(server.variables["params"])
    np.testing.assert_array_equal(method.perturbation(context(method, server, client))["w"], 0)


def test_fedgf_without_perturbations_still_interpolates_between_the_models():
    method = FedGF(rho=0.0, global_rho=0.0)
    client_context = first_context(method, [1.0])
    client_context = client_context._replace(server=client_context.server._replace(share=jnp.asarray(0.25)))
    _, points = one_step(method, client_context, lambda x: x, params(jnp.full(1, 5.0)))
    np.testing.assert_allclose(points, [[5.0], [4.0]], rtol=1e-6)


def test_fedlesam_needs_one_gradient_per_step():
    method = FedLESAM()
    client_context = first_context(method, [1.0])._replace(client=client_that_received({"w": jnp.full(1, 2.0)}))
    _, points = one_step(method, client_context, lambda x: x, client_context.start)
    np.testing.assert_allclose(points, [[1.1]], rtol=1e-6)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("threshold", "share"), [(2.0, 0.0), (1.9, 1.0)])
def test_fedgf_counts_rounds_strictly_above_the_threshold(threshold, share):
    server, _ = after_one_round(FedGF(threshold=threshold, rho=0.1), [[1.0], [3.0]], (1, 9))
    assert float(server.divergence) == 2  # not weighted
    assert float(server.share) == share
    far = FedGF(rho=0.1).far_point(server.variables["params"], server.previous, setting(2))
    np.testing.assert_allclose(far["w"], 2.8 - 0.1, **EXACT)


def test_layers_that_stay_with_their_clients_do_not_shorten_fedgfs_global_perturbation():
    models = [{"w": jnp.array([w]), "scale": jnp.array([s])} for w, s in ((0.25, 3.0), (0.0, 1.0))]
    far = FedGF(rho=0.1).far_point(*models, setting(2)._replace(own_layers=(("scale",),)))
    np.testing.assert_allclose(far["w"], 0.25 - 0.1, rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_fedgf_at_c_one_takes_its_gradient_at_the_perturbed_global_model():
    method = FedGF(rho=0.1)
    client_context = first_context(method, [1.0])
    client_context = client_context._replace(
        server=client_context.server._replace(share=jnp.ones(()), previous={"w": jnp.full(1, 7.0)})
    )
    _, points = one_step(method, client_context, lambda x: x, client_context.start)
    np.testing.assert_allclose(points, [[1.0], [1.1]], **EXACT)


@pytest.mark.parametrize("name", ["fedgf", "fedgf+avgm", "fedgf+adam"])
def test_fedgf_looks_from_the_model_that_is_sent_also_after_a_step_of_the_server(name):
    method = methods.get(name)(rho=0.05)
    server, clients = start(method, np.zeros(1), (1,))
    for _ in range(3):
        message = method.upload(params(w(server.variables) + 1.0), (), context(method, server, clients[0]))[1]
        server = aggregate(method, server, [message], (1.0,), clients=1)
        client_context = context(method, server._replace(share=jnp.ones(())), clients[0])._replace(step=0)
        _, points = one_step(method, client_context, lambda x: x, client_context.start)
        np.testing.assert_allclose(points[1] - points[0], [-0.05], rtol=1e-4)


@pytest.mark.usefixtures("x64")
def test_fedsmoo_with_all_clients_doubles_the_first_step():
    server, clients = after_one_round(FedSMOO(), [[1.0], [3.0]], (1, 9), values=[0.5])
    np.testing.assert_allclose(w(server.variables), 0.5 + 2 * 1.5, **EXACT)
    np.testing.assert_allclose(server.drift["w"], np.mean([c.drift["w"] for c in clients], 0), **EXACT)


def test_ga_of_fedsmoo_is_that_of_the_servers_model():
    server, _ = after_one_round(FedSMOO(), [[1.0], [3.0]], (1, 9))
    assert w(FedSMOO().generic_variables(server)) == 2 + 2
    assert w(FedSMOO().further_models(server)["selected_mean"]) == 2


def test_fedsmoo_without_the_servers_step_averages():
    server, clients = after_one_round(FedSMOO(server_step="none"), [[1.0], [3.0]], (1, 3))
    np.testing.assert_allclose(w(server.variables), 2.5, rtol=1e-6)
    assert [float(client.drift["w"][0]) for client in clients] == [1, 3]
    assert server.state["w"].shape == clients[0].state["w"].shape == (1,)


@pytest.mark.usefixtures("x64")
def test_fedsmoo_without_its_regulariser_adds_no_drift():
    server, _ = after_one_round(FedSMOO(lam=0.0), [[1.0], [3.0]], (1, 9))
    np.testing.assert_allclose(w(server.variables), 2.0, **EXACT)


@pytest.mark.usefixtures("x64")
def test_fedsmoos_dual_moves_by_the_local_minus_the_common_perturbation():
    method = FedSMOO(rho=0.1)
    client_context = first_context(method, [1.0])
    client_context = client_context._replace(server=client_context.server._replace(state={"w": jnp.full(1, 0.04)}))
    after, points = one_step(method, client_context, lambda x: 2 * x, client_context.start)
    np.testing.assert_allclose(points, [[1.0], [1.1]], **EXACT)
    np.testing.assert_allclose(after["dual"]["w"], 0.1 - 0.04, **EXACT)


@pytest.mark.thorough
@pytest.mark.parametrize(("clip", "equal"), [(None, True), (0.5, False)])
def test_fedsmoos_place_of_lambda_w_matters_only_with_clipping(clip, equal):
    (clipped, _), (decayed, _) = (
        toy.train(toy.simulation("fedsmoo", lam=0.5, quadratic=quadratic, clip=clip))
        for quadratic in ("clipped", "decay")
    )
    pairs = zip(*(jax.tree.leaves(state.servers.variables["params"]) for state in (clipped, decayed)), strict=True)
    assert all(np.allclose(a, b, **CLOSE) for a, b in pairs) == equal


@pytest.mark.usefixtures("x64")
def test_fedsmoo_may_apply_lambda_w_with_the_weight_decay():
    method, step_arguments = FedSMOO(rho=0.1, lam=0.5, quadratic="decay"), {}
    client_context = first_context(method, [2.0])
    client_context = client_context._replace(client=client_context.client._replace(drift={"w": jnp.full(1, 0.7)}))

    def step(gradients, unclipped):
        step_arguments.update(gradients=gradients["w"], unclipped=unclipped["w"])
        return Step(gradients, ())

    method.local_update(
        lambda v: Evaluated(0.0, {}, {"w": 2 * v["params"]["w"]}), step, client_context.start, None, client_context
    )
    np.testing.assert_allclose(step_arguments["gradients"], 2 * 2.1 + 0.5 * (0.7 - 2.0), **EXACT)
    np.testing.assert_allclose(step_arguments["unclipped"], 0.5 * 2.0, **EXACT)


@pytest.mark.usefixtures("x64")
def test_the_common_perturbation_of_fedsmoo_has_the_length_rho():
    method = FedSMOO(rho=0.1)
    server, (client,) = start(method, np.zeros(2), (1,))
    client_context = context(method, server, client)
    _, message = method.upload(params(np.ones(2), dual={"w": jnp.asarray([3.0, 4.0])}), (), client_context)
    after = aggregate(method, server, [message], (1,), clients=1)
    np.testing.assert_allclose(after.state["w"], [0.06, 0.08], **EXACT)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (FedSAM(rho=0.0), "perturbs nothing at twice the cost"),
        (FedLESAM(rho=0.0), "`rho=0` perturbs nothing"),
        (MoFedSAM(rho=0.0), "FedCM at twice the cost"),
        (FedSMOO(rho=0.0), "FedDyn at twice the cost"),
        (FedGF(threshold=-1.0), "`threshold` below 0"),
        (FedGF(rho=0.0), "perturbs nothing"),
        (FedSMOO(server_step="none", eval="all_mean"), "`eval=all_mean` does nothing"),
        (methods.get("fedsmoo+avgm")(eval="selected_mean"), "GA is that of the server's model"),
    ],
)
def test_pointless_settings_are_advised_against(method, sentence):
    assert any(sentence in advice for advice in method.configure(setting(2), hyper())[1])


@pytest.mark.parametrize("method", [FedSMOO(), FedSMOO(server_step="none"), methods.get("fedsmoo+avgm")()])
def test_the_default_eval_of_fedsmoo_is_never_called_idle(method):
    assert not any("eval" in advice for advice in method.configure(setting(2), hyper())[1])


STEPS = {"step_normaliser": "steps"}


@pytest.mark.parametrize(
    ("name", "options", "remedy"),
    [
        ("fedcm", STEPS, "`step_normaliser=a_k`"), ("mofedsam", STEPS, "`step_normaliser=a_k`"),
        ("fedgf", {}, "a higher `threshold`"),
    ],
)  # fmt: skip
def test_momentum_that_harms_a_method_is_advised_against(name, options, remedy):
    method = METHODS[name](**options)
    (advice,) = method.configure(setting(2), hyper(momentum=0.9))[1]
    assert f"{remedy}, or `momentum=0`" in advice
    assert method.configure(setting(2), hyper(momentum=0.0))[1] == []


@pytest.mark.parametrize("method", [FedCM(), MoFedSAM(), FedSAM(), FedGF(threshold=float("inf"))])
def test_no_advice_where_momentum_does_no_harm(method):
    assert method.configure(setting(2), hyper(momentum=0.9))[1] == []


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("normaliser", "expected"), [("a_k", 1.0), ("steps", 4.13811)])
def test_with_momentum_only_a_k_keeps_the_direction_of_a_constant_gradient(normaliser, expected):
    method, tau, lr = FedCM(step_normaliser=normaliser), 10, 0.1
    server, (client,) = start(method, np.zeros(1), (1,))
    server = server._replace(direction={"w": jnp.ones(1)})
    client_context = context(method, server, client, steps=tau, lr=lr, momentum=0.9)
    velocity = displacement = 0.0
    for _ in range(tau):
        velocity = 0.9 * velocity + method.mixed({"w": jnp.ones(1)}, client_context)["w"]
        displacement = displacement - lr * velocity
    _, message = method.upload(params(displacement), (), client_context)
    after = aggregate(method, server, [message], (1,), clients=1)
    np.testing.assert_allclose(after.direction["w"], expected, rtol=1e-5)


@pytest.mark.thorough
def test_an_alpha_that_ignores_the_data_is_refused():
    with pytest.raises(UserError, match="learns nothing"):
        FedCM(alpha=0.0).configure(setting(2), hyper())


@pytest.mark.thorough
def test_the_global_perturbation_is_as_long_as_the_local_one_unless_set():
    assert FedGF(rho=0.3).configure(setting(2), hyper())[0].global_rho == 0.3
    assert FedGF(global_rho=0.2).configure(setting(2), hyper())[0].global_rho == 0.2
