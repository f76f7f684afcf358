"""FedETF: a fixed simplex ETF, a balanced softmax, and the personal tuning after the last round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from golden_vectors import cases
from linear_model import context, dense

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.logit_adjustment import scaled_logits
from fedjax_pcdd.methods.fedetf import FedETF, Server
from fedjax_pcdd.methods.fedetf_tuning import FedETFTuning
from fedjax_pcdd.methods.method import Batch, Evaluated, Setting, Step
from fedjax_pcdd.models.etf import etf_from
from fedjax_pcdd.training.fine_tuning import fine_tuned

RNG = np.random.default_rng(0)
FEATURES, LABELS, COUNTS = RNG.normal(size=(6, 4)).astype(np.float32), np.array([0, 0, 1, 1, 0, 1]), [4, 2, 0]
ETF = jnp.asarray(etf_from(RNG.uniform(size=(3, 3))), jnp.float32)


def parameters(beta=2.0, seed=1):
    rng = np.random.default_rng(seed)
    neck = dense(rng.normal(size=(3, 4)).astype(np.float32), rng.normal(size=3).astype(np.float32))
    return {"neck": {"fc1": neck}, "beta": jnp.asarray(beta, jnp.float32)}


def value_and_gradient(method, params, counts=COUNTS, etf=ETF, labels=LABELS):
    client_context = context(method, counts, features=4)._replace(server=Server((), etf))
    batch = Batch(jnp.asarray(FEATURES), jnp.asarray(labels), jnp.ones(len(labels)))
    return jax.value_and_grad(lambda params: method.loss({"params": params}, batch, client_context)[0])(params)


@pytest.mark.thorough
def test_loss_has_the_value_of_the_worked_example():
    etf = jnp.asarray([[1.0, -1.0], [-1.0, 1.0]]) / np.sqrt(2)
    method = FedETF()
    client_context = context(method, [3, 1], features=2)._replace(server=Server((), etf))
    params = {"neck": {"fc1": dense(np.eye(2, dtype=np.float32), np.zeros(2, np.float32))}, "beta": jnp.ones(())}
    batch = Batch(jnp.asarray([[5.0, 0.0]]), jnp.asarray([0]), jnp.ones(1))
    np.testing.assert_allclose(method.loss({"params": params}, batch, client_context)[0], 0.077923, atol=5e-7)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("fedetf"))
def test_tuning_agrees_with_the_golden_vectors(g):
    cycles, steps = len(g["out_tuned_M"]), len(g["out_tuning_losses"]) // (2 * len(g["out_tuned_M"]))
    width, classes = g["in_a"].shape
    method = FedETFTuning(projection=width, tuning_cycles=cycles, tuning_epochs=steps, epochs=0)
    server_params = {"neck": {"fc1": dense(g["in_Wp"], g["in_bp"])}, "beta": jnp.asarray(g["in_beta"])}
    server = Server({"params": server_params}, jnp.asarray(etf_from(g["in_a"])))
    batch = Batch(jnp.asarray(g["in_f"]), jnp.asarray(g["in_y"]), jnp.ones(len(g["in_y"])))
    variables, losses = method.download(server, ()), []

    @jax.jit
    def train_epoch(variables, epoch):
        client_context = context(method, 1 + np.arange(classes), features=width, epochs=2 * cycles * steps, epoch=epoch)
        return local_step(method, variables, batch, client_context._replace(server=server))

    for epoch in range(2 * cycles * steps):
        variables, loss = train_epoch(variables, epoch)
        losses.append(loss)
        if (epoch + 1) % (2 * steps) == 0:
            cycle, params = epoch // (2 * steps), variables["params"]
            np.testing.assert_allclose(params["etf"], g["out_tuned_M"][cycle], 1e-9)
            np.testing.assert_allclose(params["neck"]["fc1"]["kernel"].T, g["out_tuned_Wp"][cycle], 1e-9)
            np.testing.assert_allclose(params["neck"]["fc1"]["bias"], g["out_tuned_bp"][cycle], 1e-9)
    np.testing.assert_allclose(losses, g["out_tuning_losses"], 1e-9)
    assert variables["params"]["beta"] == g["in_beta"]


def local_step(method, variables, batch, client_context):
    """Variables and loss after a local step; outside the tuning turns the optimiser is plain gradient descent."""

    def evaluate(variables):
        def loss(params):
            return method.loss({**variables, "params": params}, batch, client_context)

        (value, state), gradients = jax.value_and_grad(loss, has_aux=True)(variables["params"])
        return Evaluated(value, state, gradients)

    def step(gradients):
        return Step(jax.tree.map(lambda g: -g, gradients), ())

    loss, state, step_taken = method.local_update(evaluate, step, variables, batch, client_context)
    params = jax.tree.map(jnp.add, variables["params"], step_taken.updates)
    return {**variables, **state, "params": params}, loss


@pytest.mark.thorough
def test_epochs_before_the_tuning_leave_the_etf_alone_and_train_all_else():
    method = FedETFTuning(tuning_cycles=1, tuning_epochs=1, epochs=1)
    server = Server({"params": parameters()}, ETF)
    client_context = context(method, COUNTS, features=4, epochs=3, epoch=0)._replace(server=server)
    before = method.download(server, ())
    batch = Batch(jnp.asarray(FEATURES), jnp.asarray(LABELS), jnp.ones(6))
    after, loss = local_step(method, before, batch, client_context)
    np.testing.assert_array_equal(after["params"]["etf"], ETF)
    value, gradient = value_and_gradient(FedETF(), parameters())
    np.testing.assert_allclose(loss, value, 1e-6)  # the balanced loss
    moved = jax.tree.map(jnp.subtract, before["params"], after["params"])
    for part in ("neck", "beta"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), moved[part], gradient[part])


@pytest.mark.thorough
@pytest.mark.parametrize("epoch", [0, 1])
def test_relative_tuning_rates_scale_with_the_learning_rate_of_the_run(epoch):
    updates = []
    for method in (FedETFTuning(tuning_rates="relative"), FedETFTuning(etf_lr=0.2, projection_lr=0.1)):
        method = method.replace(tuning_cycles=1, tuning_epochs=1, epochs=0)
        server = Server({"params": parameters()}, ETF)
        client_context = context(method, COUNTS, features=4, epochs=2, epoch=epoch)._replace(server=server)
        client_context = client_context._replace(hyper=client_context.hyper.replace(lr=0.08))
        batch = Batch(jnp.asarray(FEATURES), jnp.asarray(LABELS), jnp.ones(6))
        before = method.download(server, ())
        after, _ = local_step(method, before, batch, client_context)
        updates.append(jax.tree.map(jnp.subtract, after["params"], before["params"]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6), *updates)
    part = ("etf", "neck")[epoch]
    assert any(np.abs(leaf).max() > 1e-4 for leaf in jax.tree.leaves(updates[0][part]))


def test_tuning_takes_the_published_number_of_epochs_after_those_of_a_round():
    tuner = FedETF().fine_tuner(Setting(3, 4, 5, 1, 7, 4, False), epochs=10)
    assert tuner.traits().epochs == 127


@pytest.mark.thorough
def test_tuning_starts_from_the_servers_etf_and_yields_pa_alone():
    simulated = toy.simulation("fedetf", cohort=5, tuning_cycles=1, tuning_epochs=1, last_batch="keep")
    state, tuner = simulated.start(), simulated.tuner(epochs=1)
    start = tuner.start(state.servers.variables)
    np.testing.assert_array_equal(start.servers.etf, state.servers.etf)
    (by_protocol,), ga, _ = fine_tuned(tuner, start, 3)
    pa = by_protocol["last"]["pa"]
    assert ga is None
    assert pa.shape == (5,)
    assert np.all((pa >= 0) & (pa <= 1))


def test_beta_starts_at_the_value_asked_for():
    variables = {"params": {"neck": parameters()["neck"]}}
    server = FedETF(start_beta=7.0).init_server(Setting(3, 3, 5, 1, 1, 4, False), variables, None, jax.random.key(0))
    assert server.variables["params"]["beta"] == 7


def test_predicted_logits_are_at_most_1_as_beta_is_left_out():
    method = FedETF()
    model = context(method, COUNTS, features=4).model
    logits = method.logits(model, {"params": parameters(9.0)}, jnp.asarray(100 * FEATURES), Server((), ETF))
    assert np.abs(logits).max() <= 1 + 1e-6  # without beta, which no prediction needs


@pytest.mark.thorough
def test_equal_counts_of_all_classes_give_the_plain_cross_entropy():
    values = [
        value_and_gradient(FedETF(prior_power=power), parameters(), counts=[2, 2, 2])[0] for power in (0.0, 1.0, 3.0)
    ]
    np.testing.assert_allclose(values, values[0], rtol=1e-5)


def test_options_for_missing_classes_agree_if_none_is_missing():
    values = [value_and_gradient(FedETF(missing=m), parameters(), counts=[3, 2, 1])[0] for m in ("one", "removed")]
    np.testing.assert_allclose(*values, rtol=1e-6)


def test_a_client_with_one_class_learns_only_if_missing_classes_count():
    labels = np.zeros(6, int)
    for missing, moves in (("one", True), ("removed", False)):
        _, gradient = value_and_gradient(FedETF(missing=missing), parameters(), counts=[6, 0, 0], labels=labels)
        assert any(np.any(np.abs(x) > 0) for x in jax.tree.leaves(gradient)) == moves


def test_rotating_etf_and_projection_together_changes_nothing():
    rotation = jnp.asarray(np.linalg.qr(RNG.normal(size=(3, 3)))[0], jnp.float32)
    params = parameters()
    rotated = {**params, "neck": jax.tree.map(lambda x: x @ rotation.T, params["neck"])}
    values = value_and_gradient(FedETF(), params)[0], value_and_gradient(FedETF(), rotated, etf=rotation @ ETF)[0]
    np.testing.assert_allclose(*values, rtol=1e-5)


def test_gradient_is_orthogonal_to_the_projected_feature():
    def loss(h):
        return jnp.sum(scaled_logits(h, ETF, jnp.ones(3), 2.0)[:, 0])

    h = jnp.asarray(FEATURES[:, :3])
    np.testing.assert_allclose(jnp.sum(h * jax.grad(loss)(h), axis=1), 0, atol=1e-6)


def test_a_projection_narrower_than_the_classes_is_refused():
    with pytest.raises(UserError, match="FedETF with projection=3 has no ETF of 10 classes: choose 10 or more"):
        FedETF(projection=3).configure(Setting(10, 3, 5, 1, 1, 4, False), None)


def test_advice_is_given_if_clients_of_one_class_have_no_gradient():
    setting = Setting(3, 3, 5, 1, 1, 4, False, one_class_clients=2)
    assert FedETF().configure(setting, None)[1] == []
    assert "missing=one" in FedETF(missing="removed").configure(setting, None)[1][0]
