"""FedUV: predictions that vary, features that spread."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_model import dense, loss

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.logit_adjustment import l2_normalise
from fedjax_pcdd.losses.uniformity import prediction_variance, uniformity
from fedjax_pcdd.methods.feduv import FedUV
from fedjax_pcdd.methods.method import Batch, Setting
from fedjax_pcdd.models.classifier import Outputs

FEATURES = jnp.asarray(np.random.default_rng(0).normal(size=(7, 4)), jnp.float32)
CONFIDENT = 50.0
LABELS, COUNTS = np.array([0, 1, 2, 0, 1, 2, 0]), [3, 2, 2]


def test_uniformity_matches_the_worked_example():
    np.testing.assert_allclose(uniformity(jnp.asarray([[0.0], [1.0], [3.0]])), 0.417360, rtol=1e-5)


def test_prediction_variance_matches_the_worked_examples():
    np.testing.assert_allclose(prediction_variance(CONFIDENT * jnp.eye(2)), 0, atol=1e-6)
    np.testing.assert_allclose(prediction_variance(jnp.ones((2, 2))), 0.70711, rtol=1e-5)


@pytest.mark.parametrize("repeats", [1, 2, 4])
def test_balanced_certain_batches_have_zero_loss_only_with_c_samples(repeats):
    classes, size = 3, 3 * repeats
    value = prediction_variance(CONFIDENT * jnp.tile(jnp.eye(classes), (repeats, 1)))
    spread = np.sqrt((1 / classes) * (1 - 1 / classes) * size / (size - 1))
    np.testing.assert_allclose(value, max(1 / np.sqrt(classes) - spread, 0), atol=1e-6)


@pytest.mark.thorough
def test_constant_predictions_have_the_largest_loss_and_a_finite_gradient():
    value, gradient = jax.value_and_grad(prediction_variance)(jnp.tile(FEATURES[:1], (5, 1)))
    np.testing.assert_allclose(value, 0.5, rtol=1e-6)
    assert np.all(np.isfinite(gradient))


def test_uniformity_does_not_depend_on_the_position_or_scale_of_features():
    transformed = -3 * FEATURES + jnp.asarray([1.0, 2.0, 0.0, -1.0])
    np.testing.assert_allclose(uniformity(transformed), uniformity(FEATURES), rtol=1e-5)


@pytest.mark.parametrize(("width", "radial"), [("median", False), ("constant", True)])
def test_only_a_constant_width_pushes_features_apart_as_a_whole(width, radial):
    gradient = jax.grad(lambda z: uniformity(z, width=width))(FEATURES)
    assert (abs(jnp.vdot(gradient, FEATURES)) > 1e-3) == radial


@pytest.mark.parametrize("width", ["median", "constant"])
@pytest.mark.parametrize("size", [1e-12, 1e12])
def test_the_gradient_of_uniformity_is_finite_at_any_scale(width, size):
    gradient = jax.grad(lambda z: uniformity(z, width=width))
    np.testing.assert_allclose(gradient(size * FEATURES) * size, gradient(FEATURES), 1e-4, 1e-6)


@pytest.mark.parametrize("width", ["median", "constant"])
def test_the_gradient_of_uniformity_is_precise_where_features_have_much_in_common(x64, width):
    features = jnp.asarray(6 + 1e-3 * FEATURES, jnp.float32)
    rows, mask = jnp.concatenate([features, jnp.zeros_like(features)]), jnp.arange(2 * len(features)) < len(features)
    gradient = jax.grad(lambda z: uniformity(z, width=width, mask=mask))
    expected = gradient(rows.astype(jnp.float64))
    np.testing.assert_allclose(gradient(rows), expected, rtol=1e-3, atol=1e-5 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("width", ["median", "constant"])
def test_two_samples_are_one_pair_at_the_median_distance(width):
    np.testing.assert_allclose(uniformity(FEATURES[:2], width=width), np.exp(-1), rtol=1e-6)


def test_equal_rows_count_in_the_mean_and_not_in_the_median():
    z = jnp.asarray([[0.3, 0.1], [0.3, 0.1], [1.3, 0.1]])  # distances 0, 1, 1
    np.testing.assert_allclose(uniformity(z), (1 + 2 * np.exp(-1)) / 3, rtol=1e-6)


@pytest.mark.thorough
def test_gradient_of_uniformity_agrees_with_finite_differences(x64):
    z = np.asarray(FEATURES, np.float64)
    gradient, step = jax.grad(uniformity)(jnp.asarray(z)), 1e-6
    numeric = np.zeros_like(z)
    for index in np.ndindex(z.shape):
        up, down = z.copy(), z.copy()
        up[index], down[index] = z[index] + step, z[index] - step
        numeric[index] = (uniformity(jnp.asarray(up)) - uniformity(jnp.asarray(down))) / (2 * step)
    np.testing.assert_allclose(gradient, numeric, 1e-5, 1e-8)


def test_unknown_width_is_refused():
    with pytest.raises(UserError, match="Unknown width 'mean'"):
        uniformity(FEATURES, width="mean")


def test_a_batch_of_one_sample_is_advised_against():
    setting = Setting(5, 4, 1, 1, 1, 1, False)
    assert "it is FedAvg" in FedUV().configure(setting, None)[1][0]
    assert FedUV().configure(setting._replace(batch_size=2), None)[1] == []


@pytest.mark.parametrize("classes", [3, 100])
def test_the_weight_of_the_variance_may_grow_with_the_number_of_classes(classes):
    batch = Batch(FEATURES, LABELS, jnp.ones(7))
    outputs = Outputs(FEATURES, jnp.zeros((7, classes)))  # constant: L_V is 1 / sqrt(C)
    value = FedUV(lam_scaling="classes", mu=0.0).penalty(None, outputs, batch, None)
    np.testing.assert_allclose(value, classes / 4 / np.sqrt(classes), rtol=1e-6)
    assert FedUV(mu=0.0).penalty(None, outputs, batch, None) == pytest.approx(2.5 / np.sqrt(classes))


@pytest.mark.parametrize("width", ["median", "constant"])
def test_the_width_of_the_penalty_has_the_gradient_asked_for(width):
    method, batch = FedUV(mu=0.5, width=width), Batch(FEATURES, LABELS, jnp.ones(7))
    gradient = jax.grad(lambda z: method.penalty(None, Outputs(z, jnp.zeros((7, 3))), batch, None))(FEATURES)
    expected = jax.grad(lambda z: 0.5 * uniformity(z, width=width))(FEATURES)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("normalise", [False, True])
def test_features_are_normalised_only_if_asked(normalise):
    layers = {"head": dense(np.eye(3, 4, dtype=np.float32), np.zeros(3, np.float32))}
    stretched = np.asarray(FEATURES) * np.arange(1, 8, dtype=np.float32)[:, None]
    values = [loss(FedUV(lam=0.0, normalise=normalise), layers, z, LABELS, COUNTS) for z in (FEATURES, stretched)]
    cross_entropies = [loss(FedUV(lam=0.0, mu=0.0), layers, z, LABELS, COUNTS) for z in (FEATURES, stretched)]
    uniformities = [value - other for value, other in zip(values, cross_entropies, strict=True)]
    assert np.isclose(*uniformities, rtol=1e-4) == normalise


def test_parallel_features_of_length_one_are_at_no_distance():
    rays = jnp.asarray([[1.0, 2, 3], [0, 0, 1], [1, 0, 0]])
    features = l2_normalise(jnp.concatenate([rays, rays[:2] * 0.3, rays[:1] * 7]))
    gaps = ((features[:, None] - features) ** 2).sum(-1)[np.triu_indices(6, 1)]
    assert 0 < gaps[gaps > 0].min() < 1e-12  # there is rounding
    median = np.sort(gaps[gaps > 1e-6])[((gaps > 1e-6).sum() - 1) // 2]
    np.testing.assert_allclose(uniformity(features), np.exp(-gaps / median).mean(), rtol=1e-6)
