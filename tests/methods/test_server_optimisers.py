"""Server optimisers: FedAvgM, FedAdam, FedYogi, FedAdagrad and FedExP, alone and wrapped around other methods."""

from dataclasses import fields

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from flax import struct
from golden_vectors import cases
from hooks import aggregate, context, hyper, params, setting, start

from fedjax_pcdd import methods
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.fedavgm import FedAvgM
from fedjax_pcdd.methods.fedexp import FedExP
from fedjax_pcdd.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fedjax_pcdd.methods.method import Message, ServerContext
from fedjax_pcdd.methods.server_optimised import ServerOptimised
from fedjax_pcdd.methods.wrappers import averages_models

EXACT = {"rtol": 1e-9, "atol": 1e-11}
SUFFIXES = ["avgm", "adam", "yogi", "adagrad", "exp"]
OPTIMISERS = {
    "sgd": (ServerOptimised, {}),
    "avgm": (FedAvgM, {}),
    "avgm_nesterov": (FedAvgM, {"server_nesterov": True}),
    "adagrad_paper": (FedAdagrad, {}),
    "adagrad_beta1": (FedAdagrad, {"server_beta1": "par_beta1"}),
    "adagrad_optax": (FedAdagrad, {"server_form": "optax"}),
    **{f"adam_{form}": (FedAdam, {"server_form": form}) for form in ("paper", "optax", "keras")},
    **{f"yogi_{form}": (FedYogi, {"server_form": form}) for form in ("paper", "optax", "keras")},
}
FEDEXP = {"paper": {}, "code": {"epsilon_times_cohort": True}, "uniform": {}}
each_case = pytest.mark.parametrize("g", cases("server_optimizers"))


def w(variables):
    return np.asarray(variables["params"]["w"])


def servers_after_rounds(method, g, weights=None):
    """The server after each round of a golden file."""
    weights = g["in_n"] if weights is None else weights
    server, clients = start(method, g["in_w0"], g["in_n"].astype(int))
    for deltas, chosen in zip(g["in_deltas"], g["in_selected"], strict=True):
        chosen, messages = np.flatnonzero(chosen), []
        for k in chosen:
            client_context = context(method, server, clients[k], sizes=g["in_n"].astype(int), k=k)
            messages.append(method.upload(params(w(server.variables) + deltas[k]), (), client_context)[1])
        server = aggregate(method, server, messages, weights[chosen], clients=len(weights))
        yield server


def optimiser(g, name):
    """The method of this name with the constants of a golden file."""
    cls, options = OPTIMISERS[name]
    field_names = {field.name for field in fields(cls)}
    constants = {"server_lr": "par_eta", "server_momentum": "par_momentum", "server_tau": "par_tau"}
    constants |= {"server_beta2": "par_beta2"} | ({} if cls is FedAdagrad else {"server_beta1": "par_beta1"})
    values = {option: value for option, value in constants.items() if option in field_names} | options
    return cls(**{option: float(g[v]) if v in g else v for option, v in values.items()})


@pytest.mark.usefixtures("x64")
@each_case
@pytest.mark.parametrize("name", OPTIMISERS)
def test_steps_of_an_optimiser_agree_with_the_vectors(g, name):
    method, server = optimiser(g, name), None
    for server, expected in zip(servers_after_rounds(method, g), g[f"out_{name}"], strict=True):
        np.testing.assert_allclose(w(server.variables), expected, **EXACT)
    for suffix, names in (("m", ("mu", "trace")), ("v", ("nu", "sum_of_squares"))):
        if f"out_{name}__{suffix}" in g:
            (moment,) = [getattr(server.moments, field) for field in names if hasattr(server.moments, field)]
            np.testing.assert_allclose(moment["w"], g[f"out_{name}__{suffix}"], **EXACT)


@pytest.mark.usefixtures("x64")
@each_case
@pytest.mark.parametrize("form", FEDEXP)
def test_extrapolation_agrees_with_the_vectors(g, form):
    method = FedExP(epsilon=float(g["par_epsilon"]), **FEDEXP[form])
    weights = np.ones_like(g["in_n"]) if form == "uniform" else None
    name = f"out_fedexp_{form}"
    for r, server in enumerate(servers_after_rounds(method, g, weights)):
        np.testing.assert_allclose(w(server.variables), g[name][r], **EXACT)
        np.testing.assert_allclose(server.extrapolation, g[f"{name}__eta"][r], **EXACT)
        np.testing.assert_allclose(w(method.generic_variables(server)), g[f"{name}__evaluated"][r], **EXACT)
        np.testing.assert_allclose(w(method.further_models(server)["last"]), g[name][r], **EXACT)


def after_one_round(method, models, sizes, values):
    """The server after a round in which the clients end at these models."""
    server, clients = start(method, np.asarray(values), sizes)
    messages = [
        method.upload(params(np.asarray(x)), (), context(method, server, client, sizes=sizes))[1]
        for x, client in zip(models, clients, strict=True)
    ]
    return aggregate(method, server, messages, sizes, clients=len(sizes))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("form", "expected"), [("paper", 0.0905), ("optax", 0.0990)])
def test_fedadam_matches_the_worked_example(form, expected):
    server = after_one_round(FedAdam(server_form=form), [[0.1]], (1,), [0.0])
    np.testing.assert_allclose(w(server.variables), expected, atol=5e-5)


@pytest.mark.usefixtures("x64")
def test_bias_corrected_adam_first_moves_every_coordinate_by_its_rate():
    method = FedAdam(server_form="optax", server_tau=1e-12)
    server = after_one_round(method, [[3.0, -1e-3]], (1,), [0.0, 0.0])
    np.testing.assert_allclose(w(server.variables), [0.1, -0.1], rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_extrapolation_matches_the_worked_example():
    server = after_one_round(FedExP(), [[1.0], [-0.5]], (1, 1), [0.0])
    np.testing.assert_allclose(server.extrapolation, 0.625 / 0.127, rtol=1e-12)


def test_equal_updates_are_not_extrapolated():
    server = after_one_round(FedExP(), [[1.0], [1.0]], (1, 3), [0.0])
    assert (float(server.extrapolation), w(server.variables)) == (1.0, [1.0])


def test_layers_that_stay_with_their_clients_are_not_extrapolated():
    variables = [{"params": {"w": jnp.array([w]), "scale": jnp.array([s])}} for w, s in ((0.0, 1.0), (0.25, 3.0))]
    server = start(FedExP(), [0.0], (1, 1))[0]._replace(variables=variables[0])
    keeping = setting(2)._replace(own_layers=(("scale",),))
    cohort = ServerContext(None, keeping, hyper(), 0, np.arange(2), 2, jax.random.key(0))
    moved = jnp.float32((1.0**2 + 0.5**2) / 2)
    after = FedExP().aggregate(server, Message(mean=(variables[1], moved)), np.ones(2), cohort)
    assert float(after.extrapolation) > 1
    np.testing.assert_allclose(after.variables["params"]["scale"], [3.0])
    np.testing.assert_allclose(after.variables["params"]["w"], 0.25 * after.extrapolation, rtol=1e-6)


def test_models_that_do_not_move_cause_no_division_by_zero():
    server = after_one_round(FedExP(epsilon=0.0), [[2.0]], (1,), [2.0])
    assert (float(server.extrapolation), w(server.variables)) == (1.0, [2.0])


def test_epsilon_follows_the_square_of_the_learning_rate():
    moved, step = np.float32(3), np.float32(0)
    shrunk = FedExP()._extrapolation(moved, step, 0.5, 1)
    np.testing.assert_allclose(shrunk, 4 * FedExP()._extrapolation(moved, step, 1.0, 1), rtol=1e-6)
    constant = FedExP(epsilon_decay=False)
    assert constant._extrapolation(moved, step, 0.5, 1) == constant._extrapolation(moved, step, 1.0, 1)


def extrapolation_after(*rates):
    """The step's length after a round at each learning rate in which the clients' updates cancel."""
    server, _ = start(FedExP(), np.zeros(1), (1,))
    for lr in rates:
        cohort = ServerContext(None, setting(1), hyper(lr), 0, np.arange(1), 1, jax.random.key(0))
        server = FedExP().aggregate(server, Message(mean=(server.variables, jnp.ones(()))), np.ones(1), cohort)
    return float(server.extrapolation)


def test_epsilon_shrinks_with_a_learning_rate_that_has_decayed_since_the_first_round():
    assert extrapolation_after(0.1) == extrapolation_after(0.05) == extrapolation_after(0.1, 0.1)
    np.testing.assert_allclose(extrapolation_after(0.1, 0.1, 0.05), 4 * extrapolation_after(0.1), rtol=1e-6)


@pytest.mark.usefixtures("x64")
def test_the_second_moment_starts_at_the_value_asked_for():
    server = after_one_round(FedAdagrad(server_v0=3.0), [[1.0]], (1,), [0.0])
    np.testing.assert_allclose(w(server.variables), 0.1 / (np.sqrt(3 + 1) + 1e-3), **EXACT)


@pytest.mark.parametrize("cls", [FedAdam, FedYogi, FedAdagrad, FedAvgM])
def test_a_coordinate_without_updates_keeps_its_exact_value(cls):
    server = after_one_round(cls(), [[0.7, 1.0]], (1,), [0.7, 0.0])
    assert w(server.variables)[0] == np.float32(0.7)


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_fedavg_with_a_server_optimiser_is_the_method_of_that_name(suffix):
    (wrapped, _), (named, _) = (
        toy.train(toy.simulation(method=methods.get(name)()), (0, 1)) for name in (f"fedavg+{suffix}", f"fed{suffix}")
    )
    jax.tree.map(np.testing.assert_array_equal, wrapped.servers.variables, named.servers.variables)


@pytest.mark.thorough
def test_a_neutral_server_optimiser_does_not_change_a_method():
    for name in ("scaffold", "feddyn"):
        method = methods.get(f"{name}+avgm")(server_momentum=0.0)
        (wrapped, _), (plain, _) = (toy.train(toy.simulation(method=m), (0, 1)) for m in (method, METHODS[name]()))
        for a, b in zip(*map(jax.tree.leaves, (wrapped.servers.variables, plain.servers.variables)), strict=True):
            np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.thorough
def test_prototypes_and_a_server_optimiser_compose_in_either_order():
    assert methods.get("moon+prototypes+adam") is methods.get("moon+adam+prototypes")
    state, _ = toy.train(toy.simulation(method=methods.get("fedprox+prototypes+adam")()), (0,))
    assert state.servers.valid.any()
    assert all(np.isfinite(x).all() for x in map(np.asarray, jax.tree.leaves(state.servers.variables)))


@struct.dataclass
class Decaying(ServerOptimised):
    def server_rule(self):
        return optax.add_decayed_weights(0.1)


def test_a_rule_may_read_the_servers_parameters():
    method = Decaying(server_lr=0.5)
    server, _ = start(method, [2.0, -1.0], [1])
    after = aggregate(method, server, [Message(mean=params([1.0, -1.0]))], [1], clients=1)
    np.testing.assert_allclose(w(after.variables), [2 - 0.5 * (1 + 0.2), -1 + 0.5 * 0.1])


@pytest.mark.parametrize("lr", [0.0, 0.5])
@pytest.mark.parametrize("cls", [FedAdam, FedAvgM])
def test_running_statistics_are_those_of_the_mean(cls, lr):
    method = cls(server_lr=lr)
    server, (client,) = start(method, np.zeros(1), (1,), batch_stats=np.zeros(2))
    client_context = context(method, server, client)
    _, message = method.upload(params(np.ones(1), batch_stats=np.array([3.0, 4.0])), (), client_context)
    after = aggregate(method, server, [message], (1,), clients=1)
    np.testing.assert_array_equal(after.variables["batch_stats"], [3, 4])
    assert w(after.variables) != 1
    assert (w(after.variables) == 0) == (lr == 0)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("solo", "solo is not a method that averages models"),
        ("fedmd", "fedmd is not a method that averages models"),
        ("fedadam", "fedadam has a step of the server already"),
        ("fedavg+avgm", "has a step of the server already|names a suffix twice"),
    ],
)
def test_a_method_without_a_mean_or_with_a_server_step_is_refused(name, reason, suffix):
    with pytest.raises(UserError, match=reason):
        methods.get(f"{name}+{suffix}")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_server_optimiser_wraps_every_other_method_that_averages_models(suffix):
    optimisers, same_option = {f"fed{suffix}" for suffix in SUFFIXES}, {"feddf"} if suffix != "exp" else set()
    for name, cls in METHODS.items():
        if averages_models(cls()) and not cls().traits().pauses and name not in optimisers | same_option:
            assert issubclass(methods.get(f"{name}+{suffix}"), cls)


@pytest.mark.parametrize("suffix", ["avgm", "adam", "yogi", "adagrad"])
def test_an_option_name_with_two_meanings_is_refused(suffix):
    with pytest.raises(UserError, match="feddf has server_lr of its own"):
        methods.get(f"feddf+{suffix}")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["feddyn+exp", "fedcm+exp", "fedcm+adam", "fedsmoo+avgm", "fedgela+adam", "fedgf+exp"])
def test_methods_with_server_state_run_under_a_server_optimiser(name):
    simulated = toy.simulation(method=methods.get(name)())
    state, _ = toy.train(simulated, (0, 1))
    assert all(np.isfinite(x).all() for x in map(np.asarray, jax.tree.leaves(state)))
    simulated.evaluate(state, personal=True)


@pytest.mark.parametrize("form", ["optax", "keras"])
def test_yogis_moments_move_layers_that_had_a_gradient_once_and_no_others(form):
    method = FedYogi(server_form=form)
    layers = {name: jnp.ones(2) for name in ("frozen", "moved")}
    rule, gradients = method.server_rule(), {"frozen": jnp.zeros(2), "moved": jnp.asarray([0.0, 0.5])}
    first, moments = rule.update(gradients, rule.init(layers))
    second, _ = rule.update(jax.tree.map(jnp.zeros_like, gradients), moments)
    for directions in (first, second):
        assert not np.any(directions["frozen"])
        assert np.all(directions["moved"])  # an entry without gradient moves with its layer, as in optax


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["feddyn+adam", "feddc+avgm", "feddyn+exp"])
def test_wrapped_methods_with_drift_evaluate_the_servers_model(name):
    options = {"iterate": "last"} if name.endswith("exp") else {}
    method = methods.get(name)(**options)
    simulated = toy.simulation(method=method)
    state, _ = toy.train(simulated, (0, 1))
    server = jax.tree.map(lambda x: x[0], state.servers)
    for a, b in zip(*map(jax.tree.leaves, (method.generic_variables(server), server.variables)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert "selected_mean" not in method.further_models(server)
    assert any("does not keep the mean" in advice for advice in method.configure(setting(2), hyper())[1])


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (FedAvgM(server_lr=0.0), "leaves the server's parameters where they are"),
        (FedAdam(server_lr=1.0), "move every parameter by about as much a round"),
        (methods.get("feddyn+adam")(), "the drift or `eta_g` counts twice"),
        (methods.get("scaffold+adam")(eta_g=0.5), "the drift or `eta_g` counts twice"),
    ],
)
def test_harmful_server_steps_are_advised_against(method, sentence):
    assert any(sentence in advice for advice in method.configure(setting(2), hyper())[1])


def test_a_drift_that_the_server_does_not_add_counts_once():
    method = methods.get("feddyn+adam")(server_step="none")
    assert not any("counts twice" in advice for advice in method.configure(setting(2), hyper())[1])


def test_defaults_give_no_advice():
    for cls in (FedAvgM, FedAdam, FedYogi, FedAdagrad, FedExP):
        assert cls().configure(setting(2), hyper())[1] == []


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (FedAvgM(server_momentum=1.0), "less than 1"),
        (FedYogi(server_beta2=1.5), "less than 1"),
        (FedAdam(server_form="optax", server_v0=0.0), "server_form=paper"),
        (FedAdagrad(server_form="keras"), "has no Adagrad"),
        (FedAdagrad(server_form="optax", server_beta1=0.9), "has no first moment"),
    ],
)
def test_options_out_of_range_or_of_another_form_are_refused(method, sentence):
    with pytest.raises(UserError, match=sentence):
        method.configure(setting(2), hyper())
