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
from fedjax_pcdd.training.advice import idle
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.setup import Given, Setup

C, D, B = 3, 4, 7
RNG = np.random.default_rng(0)
FEATURES, LABELS = RNG.normal(size=(B, D)).astype(np.float32), np.array([0, 1, 0, 0, 1, 0, 1])
ETF = models.simplex_etf(D, C, seed=0)
COUNTS, ALL_COUNTS = np.array([30, 10, 0]), np.array([[30, 10, 0], [0, 10, 10]])
PHI = np.array([2.25, 0.75, 0.0])
COSINES = FEATURES / np.linalg.norm(FEATURES, axis=1, keepdims=True) @ ETF


def configured(method, layers=()):
    """The configured method, and the context of a client with COUNTS whose features are the images."""
    client_context = context(method, COUNTS, features=D, everyone=ALL_COUNTS)
    method, _ = method.configure(client_context.setting, None)
    server = Server({"params": dict(layers)}, jnp.asarray(ETF, jnp.float32))
    client = method.init_client(client_context.setting, server, client_context.facts, jax.random.key(0))
    return method, client_context._replace(server=server, client=client)


def generic_logits(method, **layers):
    method, client_context = configured(method, layers)
    return np.array(
        method.logits(client_context.model, client_context.server.variables, FEATURES, client_context.server)
    )


def personal_logits(method, scope="personal", **layers):
    method, client_context = configured(method, layers)
    client_arguments = client_context.server, client_context.client, client_context.facts
    return np.array(
        method.logits(client_context.model, client_context.server.variables, FEATURES, *client_arguments, scope=scope)
    )


def loss(method, **layers):
    method, client_context = configured(method, layers)
    outputs, _ = forward(client_context.model, client_context.server.variables, jnp.asarray(FEATURES), train=True)
    return method.classification(outputs, Batch(None, jnp.asarray(LABELS), jnp.ones(B)), client_context)


def cross_entropy(logits):
    return -log_softmax(logits, axis=1)[np.arange(B), LABELS].mean()


def without_layers(**options):
    """FedGELA without linear layers, so that features are the images."""
    return FedGELA(layers=0, **options)


# Prediction


def test_generic_prediction_knows_neither_phi_nor_the_clients_classes():
    for options in ({}, {"denominator": "present"}, {"phi": "none"}):
        np.testing.assert_allclose(
            generic_logits(without_layers(ew=100.0, **options)), 10 * COSINES, rtol=1e-4, atol=1e-5
        )


def test_generic_prediction_does_not_depend_on_kappa():
    predictions = [generic_logits(without_layers(ew=ew)).argmax(1) for ew in (1.0, 1e4)]
    np.testing.assert_array_equal(*predictions)


def test_personal_prediction_uses_phi_and_all_classes():
    np.testing.assert_allclose(personal_logits(without_layers(ew=100.0)), 10 * PHI * COSINES, rtol=1e-4, atol=1e-5)


def test_ga_of_clients_models_is_predicted_with_phi_too():
    method = without_layers(ew=100.0)
    np.testing.assert_array_equal(personal_logits(method, scope="local"), personal_logits(method))


def test_personal_prediction_is_restricted_to_the_classes_of_the_softmax():
    logits, expected = personal_logits(without_layers(ew=100.0, denominator="present")), 10 * PHI * COSINES
    np.testing.assert_allclose(logits[:, :2], expected[:, :2], rtol=1e-4, atol=1e-5)
    assert np.all(logits[:, 2] == -np.inf)
    assert np.any(logits.argmax(1) != expected.argmax(1))  # unrestricted, a missing class's 0 beats negative logits


@pytest.mark.parametrize(("pa_model", "protocol"), [("local", "last"), ("server", "received"), (None, None)])
def test_pa_model_is_another_name_for_a_protocol(pa_model, protocol):
    assert FedGELA(pa_model=pa_model).traits().protocol == protocol


@pytest.mark.thorough
def test_pa_of_the_server_model_predicts_with_the_phi_of_each_client():
    simulated = toy.simulation("fedgela", pa_model="server", cohort=5, lanes=1)
    state = jax.tree.map(jnp.array, toy.train(simulated, (0,))[0])
    correct, federation = simulated.evaluate(state, personal=True).personal, simulated.experiments[0].federation
    server, data = jax.tree.map(lambda x: x[0], state.servers), federation.dataset
    outputs, _ = forward(simulated.program.model, server.variables, jnp.asarray(data.x_test / 255.0), train=False)
    scores = np.asarray(outputs.features) @ np.asarray(server.etf)
    phi = toy.CLASSES * federation.class_counts / federation.sizes[:, None]
    for k, client_samples in enumerate(federation.partition.test):
        assert correct[k].sum() == ((phi[k] * scores[client_samples]).argmax(1) == data.y_test[client_samples]).sum()


# Loss


@pytest.mark.parametrize(("scale", "kappa"), [("sqrt", 2.0), ("linear", 4.0)])
@pytest.mark.parametrize(("denominator", "classes"), [("all", 3), ("present", 2)])
def test_loss_is_the_cross_entropy_of_the_rescaled_logits(scale, kappa, denominator, classes):
    expected = cross_entropy((kappa * PHI * COSINES)[:, :classes])
    np.testing.assert_allclose(loss(without_layers(ew=4.0, scale=scale, denominator=denominator)), expected, rtol=1e-4)


SHARES = ALL_COUNTS / ALL_COUNTS.sum(1, keepdims=True)
WEIGHTS = ALL_COUNTS.sum(1) / ALL_COUNTS.sum()


@pytest.mark.parametrize(("phi", "function"), [("sqrt", np.sqrt), ("exp", np.exp)])
def test_sqrt_and_exp_of_the_shares_are_by_default_scaled_by_the_server(phi, function):
    method, client_context = configured(without_layers(phi=phi))
    assert method.gamma == "serverscaled"
    np.testing.assert_allclose(client_context.client, function(SHARES[0]) / (WEIGHTS @ function(SHARES)), rtol=1e-5)


@pytest.mark.parametrize("phi", ["sqrt", "exp"])
def test_a_client_can_scale_sqrt_and_exp_of_its_shares_itself(phi):
    values = {"sqrt": np.sqrt, "exp": np.exp}[phi](SHARES[0])
    np.testing.assert_allclose(
        configured(without_layers(phi=phi, gamma="localgamma"))[1].client, values / values.mean(), rtol=1e-5
    )


def test_missing_class_stays_in_the_softmax_where_its_scale_is_positive():
    options = {"ew": 4.0, "denominator": "present"}
    exp_scales = np.asarray(configured(without_layers(phi="exp"))[1].client)
    np.testing.assert_allclose(
        loss(without_layers(phi="exp", **options)), cross_entropy(2 * exp_scales * COSINES), rtol=1e-4
    )
    sqrt_scales = np.asarray(configured(without_layers(phi="sqrt"))[1].client)
    expected = cross_entropy((2 * sqrt_scales * COSINES)[:, :2])
    np.testing.assert_allclose(loss(without_layers(phi="sqrt", **options)), expected, rtol=1e-4)


HEAD = RNG.normal(size=(C, D)).astype(np.float32)


def test_learned_classifier_is_rescaled_by_phi_and_reads_raw_features():
    method, logits = without_layers(classifier="learned"), FEATURES @ HEAD.T
    np.testing.assert_allclose(loss(method, head=dense(HEAD)), cross_entropy(PHI * logits), rtol=1e-4)
    np.testing.assert_allclose(personal_logits(method, head=dense(HEAD)), PHI * logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(generic_logits(method, head=dense(HEAD)), logits, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_learned_classifier_has_no_bias_and_no_etf():
    simulated = toy.simulation("fedgela", classifier="learned")
    server = simulated.start().servers
    assert set(server.variables["params"]["head"]) == {"kernel"}
    assert server.etf == ()


def test_batch_norm_of_the_features_replaces_unit_length():
    method, client_context = configured(without_layers(normalise="batch", ew=4.0))
    assert client_context.model.feature_norm
    outputs = Outputs(jnp.asarray(FEATURES), None)
    value = method.classification(outputs, Batch(None, jnp.asarray(LABELS), jnp.ones(B)), client_context)
    np.testing.assert_allclose(value, cross_entropy(2 * PHI * (FEATURES @ ETF)), rtol=1e-4)


# Model and defaults


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_linear_layers_stand_between_backbone_and_etf(layers):
    model = models.build("mlp", num_classes=C, image_shape=(5,))
    params = jax.eval_shape(lambda: models.initialise(FedGELA(layers=layers).build(model), jax.random.key(0), (5,)))
    assert set(params["params"]) == {"backbone"} | ({"neck"} if layers else set())
    assert len(params["params"].get("neck", {})) == layers


def test_the_last_linear_layer_has_no_activation():
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


def test_an_energy_that_is_set_is_kept():
    assert FedGELA(ew=7.0).configure(Setting(C, D, 1, 1, 1, 1, True), None)[0].ew == 7


def test_fewer_features_than_classes_are_refused_unless_the_head_is_learned():
    setting, key = Setting(10, 9, 1, 1, 1, 1, False), jax.random.key(0)
    with pytest.raises(UserError, match="10 classes needs 10 or more features, not 9"):
        FedGELA().configure(setting, None)[0].init_server(setting, {}, None, key)
    FedGELA(classifier="learned").configure(setting, None)[0].init_server(setting, {}, None, key)


@pytest.mark.parametrize(("options", "clip"), [({}, 20.0), ({"grad_clip": "none"}, np.inf), ({"grad_clip": 3.0}, 3.0)])
def test_gradients_are_clipped_at_20_unless_set_otherwise(options, clip):
    config, method = build({"method": "fedgela", "model": "mlp"} | options)
    simulated = Setup([(config, method)], Given(toy.federation())).simulation
    assert simulated.hyper.clip[0] == clip
    assert simulated.program.clip == np.isfinite(clip)


@pytest.mark.parametrize(
    ("options", "sentences"), [({}, 0), ({"ew": 4.0}, 1), ({"scale": "linear"}, 1), ({"normalise": "batch"}, 1)]
)
def test_options_of_the_etf_are_advised_against_with_a_learned_classifier(options, sentences):
    for classifier, expected in (("learned", sentences), ("etf", 0)):
        assert len(idle(FedGELA(classifier=classifier, **options))) == expected


@pytest.mark.parametrize(
    ("options", "idle"),
    [
        ({"denominator": "present", "phi": "exp"}, "denominator=present"),
        ({"denominator": "present", "phi": "none"}, "denominator=present"),
        ({"gamma": "localgamma", "phi": "none"}, "gamma=localgamma"),
        ({"denominator": "present", "phi": "sqrt", "gamma": "localgamma"}, None),
    ],
)
def test_options_that_phi_leaves_without_effect_are_advised_against(options, idle):
    setting = Setting(C, D, 1, 1, 1, 1, False)
    _, advice = FedGELA(**options).configure(setting, None)
    assert [sentence.split("`")[1] for sentence in advice] == [idle] * bool(idle)
