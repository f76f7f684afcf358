"""FedRoD: balanced softmax for the generic head, a personal head beside it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from golden_vectors import cases
from in_memory import trained
from linear_model import context, dense, loss, loss_and_gradients
from trajectories import train

from fedjax_pcdd.losses.logit_adjustment import balanced_cross_entropy
from fedjax_pcdd.methods.fedgela import FedGELA
from fedjax_pcdd.methods.fedrod import FedRoD
from fedjax_pcdd.methods.method import Batch, Server

RNG = np.random.default_rng(0)
FEATURES, LABELS = RNG.normal(size=(6, 4)).astype(np.float32), np.array([0, 0, 1, 1, 0, 1])
LAYERS = {name: dense(RNG.normal(size=(3, 4)), RNG.normal(size=3)) for name in ("head", "personal")}
COUNTS = [4, 2, 0]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("fedrod"))
def test_loss_and_gradients_agree_with_the_vectors(g):
    layers = {"head": dense(g["in_Wg"], g["in_bg"]), "personal": dense(g["in_Wp"], g["in_bp"])}
    value, (gradient, features) = loss_and_gradients(FedRoD(), layers, g["in_f"], g["in_y"], g["in_counts"])
    np.testing.assert_allclose(value, g["out_loss_g"] + g["out_loss_p"], 1e-9)
    np.testing.assert_allclose(features, g["out_grad_f"], 1e-9, 1e-12)
    for part, letter in (("head", "g"), ("personal", "p")):
        np.testing.assert_allclose(gradient[part]["kernel"].T, g[f"out_grad_W{letter}"], 1e-9, 1e-12)
        np.testing.assert_allclose(gradient[part]["bias"], g[f"out_grad_b{letter}"], 1e-9, 1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("fedrod"))
def test_personal_logits_agree_with_the_vectors(g):
    layers = {"head": dense(g["in_Wg"], g["in_bg"]), "personal": dense(g["in_Wp"], g["in_bp"])}
    np.testing.assert_allclose(logits_of_personal_model(FedRoD(), layers, g["in_f"]), g["out_logits_personal"], 1e-9)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("trajectories"))
def test_personal_heads_agree_with_the_reference(g):
    _, states = train(g, "fedrod", 2)
    for state, expected in zip(states, g["out_fedrod__personal_heads"], strict=True):
        kernels, biases = state.clients["kernel"], state.clients["bias"]
        flat = np.concatenate([kernels.transpose(0, 2, 1).reshape(len(kernels), -1), biases], axis=1)
        np.testing.assert_allclose(flat, expected, 1e-9, 1e-11)


def logits_of_personal_model(method, layers, features=FEATURES):
    model = context(method, np.ones(len(layers["head"]["bias"])), features=features.shape[-1]).model
    return method.logits(model, {"params": layers}, jnp.asarray(features), (), scope="personal")


def logits_of_generic_model(method, layers):
    model = context(method, COUNTS, features=4).model
    return method.logits(model, {"params": {"head": layers["head"]}}, jnp.asarray(FEATURES), ())


def test_balanced_cross_entropy_matches_the_worked_example():
    value = balanced_cross_entropy(jnp.zeros((1, 2)), jnp.asarray([0]), jnp.asarray([3.0, 1.0]))
    np.testing.assert_allclose(value, -np.log(0.75), 1e-6)


def test_equal_counts_give_the_plain_cross_entropy():
    values = [
        balanced_cross_entropy(FEATURES[:, :3], LABELS, jnp.asarray([7.0, 7.0, 7.0]), power=power) for power in (1, 0)
    ]
    np.testing.assert_allclose(*values, 1e-6)


def test_prior_power_is_an_exponent_on_the_counts():
    rooted = loss(FedRoD(prior_power=0.5), LAYERS, FEATURES, LABELS, COUNTS)
    np.testing.assert_allclose(rooted, loss(FedRoD(), LAYERS, FEATURES, LABELS, np.sqrt(COUNTS)), 1e-6)


def test_prior_power_of_zero_keeps_missing_classes():
    plain = loss(FedRoD(prior_power=0.0), LAYERS, FEATURES, LABELS, COUNTS)
    np.testing.assert_allclose(plain, loss(FedRoD(), LAYERS, FEATURES, LABELS, [3, 3, 3]), 1e-6)


def test_zero_personal_head_predicts_as_the_generic_model():
    zeros = LAYERS | {"personal": jax.tree.map(jnp.zeros_like, LAYERS["head"])}
    np.testing.assert_array_equal(logits_of_personal_model(FedRoD(), zeros), logits_of_generic_model(FedRoD(), zeros))


def test_personal_head_alone_predicts_without_the_generic_one():
    logits = FEATURES @ LAYERS["personal"]["kernel"] + LAYERS["personal"]["bias"]
    np.testing.assert_allclose(logits_of_personal_model(FedRoD(personal_logits="alone"), LAYERS), logits, 1e-5)


@pytest.mark.parametrize("personal_logits", ["sum", "alone"])
def test_personal_loss_trains_the_body_only_where_the_personal_head_is_alone(personal_logits):
    only_class = np.ones(6, int)  # which makes the generic loss 0
    method = FedRoD(personal_logits=personal_logits)
    _, (_, gradient) = loss_and_gradients(method, LAYERS, FEATURES, only_class, [0, 9, 0])
    assert np.any(gradient != 0) == (personal_logits == "alone")


@pytest.mark.parametrize("start", ["zeros", "generic"])
def test_the_initial_personal_head_is_zero_or_the_generic_one(start):
    head = FedRoD(personal_start=start).init_client(None, Server({"params": LAYERS}), None, None)
    expected = LAYERS["head"]["kernel"] * (start == "generic")
    np.testing.assert_array_equal(head["kernel"], expected)


@pytest.mark.parametrize("personal_logits", ["sum", "alone"])
def test_padding_does_not_change_the_loss(personal_logits):
    method = FedRoD(personal_logits=personal_logits)
    features = np.concatenate([FEATURES, RNG.normal(size=(2, 4)).astype(np.float32)])
    batch = Batch(features, jnp.asarray([*LABELS, 2, 0]), jnp.arange(8) < 6)
    padded = method.loss({"params": LAYERS}, batch, context(method, COUNTS, features=4))[0]
    np.testing.assert_allclose(padded, loss(method, LAYERS, FEATURES, LABELS, COUNTS), 1e-6)


@pytest.mark.thorough
def test_the_personal_model_is_the_global_one_with_the_personal_head():
    simulated = toy.simulation("fedrod")
    state, _ = toy.train(simulated, (0,))
    k = int(simulated.clients_of(0)[0][-1])
    server, client = (jax.tree.map(lambda x: x[0], state.servers), jax.tree.map(lambda x: x[k], state.clients))
    assert np.abs(client["kernel"]).max() > 1e-4
    expected = {"params": server.variables["params"] | {"personal": client}}
    variables = FedRoD().personal_variables(server, client)
    assert jax.tree.structure(variables) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, variables, expected)


@pytest.mark.thorough
def test_pa_is_read_from_the_model_asked_for():
    accuracies = {}
    for source in ("local", "server"):
        options = {"method": "fedrod", "pa_model": source, "lanes": 1, "rounds": 1, "local_epochs": 1, "clients": 4}
        run = trained(**options, lr=0.1, beta=1.0, batch_size=50)
        correct = np.array(run.simulation.evaluate(run.state, personal=True).personal).sum(1)
        server_pa = np.mean(correct / run.federation.test_sizes)
        accuracies[source] = run.history.rows[0]["pa"], server_pa
    assert accuracies["server"][0] == pytest.approx(accuracies["server"][1])
    assert accuracies["local"][0] != pytest.approx(accuracies["local"][1], abs=1e-3)


def test_pa_is_that_of_the_local_model_as_in_fedgela():
    assert FedRoD().traits().personal_model == FedGELA().traits().personal_model == "local"
