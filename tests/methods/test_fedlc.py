"""FedLC: calibrated logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_vectors import cases
from linear_model import dense, loss_and_gradients

from fedjax_pcdd.losses.logit_adjustment import calibration_margins, pairwise_cross_entropy
from fedjax_pcdd.methods import Method
from fedjax_pcdd.methods.fedlc import FedLC
from fedjax_pcdd.methods.method import Setting

LOGITS = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
LABELS, COUNTS = np.array([0, 0, 1, 1, 0, 1]), [40, 2, 0]
FORMS = pytest.mark.parametrize("form", ["softmax", "pairwise"])


def value_and_gradient(method, logits=LOGITS, labels=LABELS, counts=COUNTS, **facts):
    """The loss and its gradient for logits [B, C], which a head that is the identity passes on."""
    classes = logits.shape[-1]
    layers = {"head": dense(np.eye(classes, dtype=logits.dtype), np.zeros(classes, logits.dtype))}
    value, (_, gradient) = loss_and_gradients(method, layers, logits, labels, counts, **facts)
    return value, gradient


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("fedlc"))
@pytest.mark.parametrize("missing", ["masked", "constant"])
@FORMS
def test_loss_and_gradient_agree_with_the_golden_vectors(g, form, missing):
    method = FedLC(tau=float(g["par_tau"]), form=form, missing=missing)
    value, gradient = value_and_gradient(method, g["in_logits"], g["in_y"], g["in_counts"])
    np.testing.assert_allclose(value, g[f"out_loss_{form}"], 1e-9)
    np.testing.assert_allclose(gradient, g[f"out_grad_{form}"], 1e-9, 1e-12)


def test_margins_have_the_values_of_the_worked_example():
    np.testing.assert_allclose(calibration_margins(jnp.asarray([16.0, 1.0]), 1.0), [0.5, 1.0])


@pytest.mark.thorough
def test_loss_has_the_value_of_the_worked_example():
    value, _ = value_and_gradient(FedLC(tau=1.0), np.zeros((1, 2), np.float32), np.array([0]), [16, 1])
    np.testing.assert_allclose(value, 0.474077, 1e-6)


def test_equal_counts_give_the_plain_cross_entropy():
    calibrated, plain = (value_and_gradient(m, counts=[5, 5, 5]) for m in (FedLC(tau=2.0), Method()))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-7), calibrated, plain)


@pytest.mark.parametrize("missing", ["masked", "constant"])
def test_tau_zero_is_plain_cross_entropy_although_a_class_is_missing(missing):
    calibrated, plain = value_and_gradient(FedLC(tau=0.0, missing=missing)), value_and_gradient(Method())
    jax.tree.map(np.testing.assert_array_equal, calibrated, plain)


@FORMS
def test_a_constant_on_all_logits_changes_nothing(form):
    method = FedLC(tau=0.7, form=form)
    shifted, unshifted = value_and_gradient(method, LOGITS + np.float32(3)), value_and_gradient(method)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), shifted, unshifted)


@FORMS
def test_client_with_one_class_has_no_loss_and_no_gradient(form):
    value, gradient = value_and_gradient(FedLC(form=form), labels=np.full(6, 1), counts=[0, 9, 0])
    assert value == 0
    assert np.all(gradient == 0)


def test_pairwise_loss_can_be_negative():
    assert pairwise_cross_entropy(jnp.asarray([[9.0, 0.0, 0.0]]), jnp.asarray([0])) < 0


def test_pairwise_loss_leaves_masked_samples_out():
    mask = np.arange(6) % 2 == 0
    masked = pairwise_cross_entropy(jnp.asarray(LOGITS), jnp.asarray(LABELS), mask=jnp.asarray(mask))
    removed = pairwise_cross_entropy(jnp.asarray(LOGITS[mask]), jnp.asarray(LABELS[mask]))
    np.testing.assert_allclose(masked, removed, 1e-6)


def test_missing_class_stays_in_the_softmax_only_with_a_constant_count():
    gradients = {m: value_and_gradient(FedLC(tau=0.01, missing=m))[1][:, 2] for m in ("masked", "constant")}
    assert np.all(gradients["masked"] == 0)
    assert np.all(gradients["constant"] > 0)


def test_global_counts_are_those_of_all_clients():
    everyone = [COUNTS, [1, 7, 5]]
    pooled = value_and_gradient(FedLC(counted="global"), everyone=everyone)
    expected = value_and_gradient(FedLC(), counts=np.sum(everyone, 0))
    jax.tree.map(np.testing.assert_array_equal, pooled, expected)


@pytest.mark.thorough
def test_advice_is_given_if_classes_are_masked_or_the_loss_is_unbounded():
    setting = Setting(3, 2, 5, 1, 1, 4, False, one_class_clients=2)
    assert len(FedLC().configure(setting, None)[1]) == 1
    assert (
        FedLC(tau=0.0).configure(setting, None)[1]
        == FedLC(tau=0.1, missing="constant").configure(setting, None)[1]
        == []
    )
    assert "does nothing" in FedLC(missing="constant").configure(setting, None)[1][0]
    assert "unstable" in FedLC(form="pairwise", missing="constant").configure(setting, None)[1][0]
