"""FedGELA: its predictions and losses by hand, and what each option changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from linear_model import context, dense
from scipy.special import log_softmax

from fedjax_pcdd import models
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import Batch, Setting
from fedjax_pcdd.methods.fedgela import FedGELA, Server
from fedjax_pcdd.models import Outputs, forward, normalises
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.setup import Given, Setup

C, D, B = 3, 4, 7
RNG = np.random.default_rng(0)
FEATURES, LABELS = RNG.normal(size=(B, D)).astype(np.float32), np.array([0, 1, 0, 0, 1, 0, 1])
ETF = models.simplex_etf(D, C, seed=0)
COUNTS, EVERYBODY = np.array([30, 10, 0]), np.array([[30, 10, 0], [0, 10, 10]])
PHI = np.array([2.25, 0.75, 0.0])
COSINES = FEATURES / np.linalg.norm(FEATURES, axis=1, keepdims=True) @ ETF


def seen(method, layers=()):
    """Context and model of a client with COUNTS, whose features are the images, and its configured method."""
    made = context(method, COUNTS, features=D, everyone=EVERYBODY)
    method, _ = method.configure(made.setting, None)
    server = Server({"params": dict(layers)}, jnp.asarray(ETF, jnp.float32))
    client = method.init_client(made.setting, server, made.facts, jax.random.key(0))
    return method, made._replace(server=server, client=client)


def generic(method, **layers):
    method, made = seen(method, layers)
    return np.array(method.logits(made.model, made.server.variables, FEATURES, made.server))


def personal(method, **layers):
    method, made = seen(method, layers)
    of_client = made.server, made.client, made.facts
    return np.array(method.logits(made.model, made.server.variables, FEATURES, *of_client, scope="personal"))


def loss(method, **layers):
    method, made = seen(method, layers)
    outputs, _ = forward(made.model, made.server.variables, jnp.asarray(FEATURES), train=True)
    return method.classification(outputs, Batch(None, jnp.asarray(LABELS), jnp.ones(B)), made)


def cross_entropy(logits):
    return -log_softmax(logits, axis=1)[np.arange(B), LABELS].mean()


def plain(**options):
    """Without linear layers, so that features are the images."""
    return FedGELA(layers=0, **options)


# Prediction


def test_generic_prediction_knows_neither_phi_nor_the_clients_classes():
    for options in ({}, {"denominator": "present"}, {"phi": "none"}):
        np.testing.assert_allclose(generic(plain(ew=100.0, **options)), 10 * COSINES, rtol=1e-4, atol=1e-5)


def test_generic_prediction_does_not_depend_on_kappa():
    guesses = [generic(plain(ew=ew)).argmax(1) for ew in (1.0, 1e4)]
    np.testing.assert_array_equal(*guesses)


def test_personal_prediction_has_phi_and_all_classes():
    np.testing.assert_allclose(personal(plain(ew=100.0)), 10 * PHI * COSINES, rtol=1e-4, atol=1e-5)


def test_personal_prediction_is_restricted_where_the_softmax_was():
    found, expected = personal(plain(ew=100.0, denominator="present")), 10 * PHI * COSINES
    np.testing.assert_allclose(found[:, :2], expected[:, :2], rtol=1e-4, atol=1e-5)
    assert np.all(found[:, 2] == -np.inf)
    assert np.any(found.argmax(1) != expected.argmax(1))  # a missing class's 0 beats negative logits


@pytest.mark.parametrize(("pa_model", "protocol"), [("local", "last"), ("server", "received"), (None, None)])
def test_pa_model_is_another_name_of_a_protocol(pa_model, protocol):
    assert FedGELA(pa_model=pa_model).traits().protocol == protocol


@pytest.mark.thorough
def test_pa_of_the_server_model_counts_what_is_predicted_with_each_clients_phi():
    simulated = toy.simulation("fedgela", pa_model="server", cohort=5, lanes=1)
    state = jax.tree.map(jnp.array, toy.train(simulated, (0,))[0])
    found, federation = simulated.evaluate(state, personal=True).personal, simulated.experiments[0].federation
    server, data = jax.tree.map(lambda x: x[0], state.servers), federation.dataset
    outputs, _ = forward(simulated.program.model, server.variables, jnp.asarray(data.x_test / 255.0), train=False)
    scores = np.asarray(outputs.features) @ np.asarray(server.etf)
    phi = toy.CLASSES * federation.class_counts / federation.sizes[:, None]
    for k, own in enumerate(federation.partition.test):
        assert found[k].sum() == ((phi[k] * scores[own]).argmax(1) == data.y_test[own]).sum()


# Loss


@pytest.mark.parametrize(("scale", "kappa"), [("sqrt", 2.0), ("linear", 4.0)])
@pytest.mark.parametrize(("denominator", "classes"), [("all", 3), ("present", 2)])
def test_loss_is_the_cross_entropy_of_the_rescaled_logits(scale, kappa, denominator, classes):
    expected = cross_entropy((kappa * PHI * COSINES)[:, :classes])
    np.testing.assert_allclose(loss(plain(ew=4.0, scale=scale, denominator=denominator)), expected, rtol=1e-4)


SHARES = EVERYBODY / EVERYBODY.sum(1, keepdims=True)
WEIGHTS = EVERYBODY.sum(1) / EVERYBODY.sum()


@pytest.mark.parametrize(("phi", "curve"), [("sqrt", np.sqrt), ("exp", np.exp)])
def test_other_functions_are_scaled_by_the_server_unless_asked_otherwise(phi, curve):
    method, made = seen(plain(phi=phi))
    assert method.gamma == "serverscaled"
    np.testing.assert_allclose(made.client, curve(SHARES[0]) / (WEIGHTS @ curve(SHARES)), rtol=1e-5)


@pytest.mark.parametrize("phi", ["sqrt", "exp"])
def test_client_may_scale_other_functions_itself(phi):
    curve = {"sqrt": np.sqrt, "exp": np.exp}[phi](SHARES[0])
    np.testing.assert_allclose(seen(plain(phi=phi, gamma="localgamma"))[1].client, curve / curve.mean(), rtol=1e-5)


def test_missing_class_stays_in_the_softmax_where_its_scale_is_positive():
    options = {"ew": 4.0, "denominator": "present"}
    with_exp = np.asarray(seen(plain(phi="exp"))[1].client)
    np.testing.assert_allclose(loss(plain(phi="exp", **options)), cross_entropy(2 * with_exp * COSINES), rtol=1e-4)
    with_sqrt = np.asarray(seen(plain(phi="sqrt"))[1].client)
    expected = cross_entropy((2 * with_sqrt * COSINES)[:, :2])
    np.testing.assert_allclose(loss(plain(phi="sqrt", **options)), expected, rtol=1e-4)


HEAD = RNG.normal(size=(C, D)).astype(np.float32)


def test_learned_classifier_is_rescaled_by_phi_and_reads_raw_features():
    method, logits = plain(classifier="learned"), FEATURES @ HEAD.T
    np.testing.assert_allclose(loss(method, head=dense(HEAD)), cross_entropy(PHI * logits), rtol=1e-4)
    np.testing.assert_allclose(personal(method, head=dense(HEAD)), PHI * logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(generic(method, head=dense(HEAD)), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_learned_classifier_has_no_bias_and_no_etf():
    simulated = toy.simulation("fedgela", classifier="learned")
    server = simulated.start().servers
    assert set(server.variables["params"]["head"]) == {"kernel"}
    assert server.etf == ()


def test_batch_norm_of_the_features_takes_the_place_of_unit_length():
    method, made = seen(plain(normalise="batch", ew=4.0))
    assert made.model.feature_norm
    outputs = Outputs(jnp.asarray(FEATURES), None)
    value = method.classification(outputs, Batch(None, jnp.asarray(LABELS), jnp.ones(B)), made)
    np.testing.assert_allclose(value, cross_entropy(2 * PHI * (FEATURES @ ETF)), rtol=1e-4)


# Model and defaults


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_linear_layers_stand_between_backbone_and_etf(layers):
    model = models.build("mlp", num_classes=C, image_shape=(5,))
    params = jax.eval_shape(lambda: models.initialise(FedGELA(layers=layers).build(model), jax.random.key(0), (5,)))
    assert set(params["params"]) == {"backbone"} | ({"neck"} if layers else set())
    assert len(params["params"].get("neck", {})) == layers


def test_linear_layers_end_linearly():
    model = FedGELA(layers=1).build(models.build("mlp", num_classes=C, image_shape=(5,)))
    variables = models.initialise(model, jax.random.key(0), (5,))
    assert (forward(model, variables, jnp.ones((2, 5)), train=False)[0].features < 0).any()


@pytest.mark.parametrize(
    ("name", "norm", "ew"), [("resnet10", "batch", 1e4), ("resnet10", "group", 1e4), ("mlp", "batch", 4.0)]
)
@pytest.mark.parametrize("normalise", ["l2", "batch"])
def test_default_energy_depends_on_norm_layers_of_the_backbone(name, norm, ew, normalise):
    method = FedGELA(normalise=normalise)
    model = method.build(models.build(name, num_classes=C, image_shape=(8, 8, 3), norm=norm))
    setting = Setting(C, 512, 1, 1, 1, 1, normalises(model, (8, 8, 3)))
    assert method.configure(setting, None)[0].ew == ew


def test_energy_that_was_given_is_kept():
    assert FedGELA(ew=7.0).configure(Setting(C, D, 1, 1, 1, 1, True), None)[0].ew == 7


def test_too_few_features_are_refused():
    setting, key = Setting(10, 9, 1, 1, 1, 1, False), jax.random.key(0)
    with pytest.raises(UserError, match="10 classes needs 10 or more features, not 9"):
        FedGELA().configure(setting, None)[0].init_server(setting, {}, None, key)
    FedGELA(classifier="learned").configure(setting, None)[0].init_server(setting, {}, None, key)


@pytest.mark.parametrize(("given", "clip"), [({}, 20.0), ({"grad_clip": "none"}, np.inf), ({"grad_clip": 3.0}, 3.0)])
def test_gradients_are_clipped_at_20_unless_asked_otherwise(given, clip):
    config, method = build({"method": "fedgela", "model": "mlp"} | given)
    simulated = Setup([(config, method)], Given(toy.federation())).simulation
    assert simulated.hyper.clip[0] == clip
    assert simulated.program.clip == np.isfinite(clip)


@pytest.mark.parametrize(
    ("options", "sentences"), [({}, 0), ({"ew": 4.0}, 1), ({"scale": "linear"}, 1), ({"normalise": "batch"}, 1)]
)
def test_options_of_the_etf_are_advised_against_without_one(options, sentences):
    setting = Setting(C, D, 1, 1, 1, 1, False)
    for classifier, number in (("learned", sentences), ("etf", 0)):
        _, advice = FedGELA(classifier=classifier, **options).configure(setting, None)
        assert len(advice) == number
