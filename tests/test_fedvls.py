"""FedVLS: calibration, suppression, and distillation of vacant classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.masked_distillation import masked_kl
from fedjax_pcdd.losses.vacant_classes import calibrated_cross_entropy, logit_suppression

RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(RNG.normal(size=(6, 5)), jnp.float32)
LABELS, COUNTS = jnp.asarray([0, 0, 1, 3, 3, 4]), jnp.asarray([9, 2, 0, 8, 1])
VACANT, ROWS = COUNTS == 0, jnp.arange(6)
FORMS = pytest.mark.parametrize("form", ["code", "paper"])


def test_terms_have_the_sheets_values():
    logits, labels, counts = jnp.asarray([[1.0, 0.0, 2.0]]), jnp.asarray([0]), jnp.asarray([3, 1, 0])
    calibrated = calibrated_cross_entropy(logits, labels, counts, form="paper")
    np.testing.assert_allclose(calibrated, 0.115671, atol=5e-7)
    np.testing.assert_allclose(logit_suppression(logits, labels, counts), 0.071921, atol=5e-7)
    np.testing.assert_allclose(logit_suppression(logits, labels, counts, form="paper"), 0, atol=1e-7)
    assert masked_kl(logits[:, ::-1], logits, counts == 0) == 0


@FORMS
def test_equal_counts_of_all_classes_calibrate_nothing(form):
    value = calibrated_cross_entropy(LOGITS, LABELS, jnp.full(5, 7), form=form)
    np.testing.assert_allclose(value, cross_entropy(LOGITS, LABELS), rtol=1e-6)


@FORMS
def test_labels_and_vacant_classes_are_not_suppressed(form):
    gradient = jax.grad(logit_suppression)(LOGITS, LABELS, COUNTS, form=form)
    assert np.all(gradient[:, VACANT] == 0)
    assert np.all(gradient[ROWS, LABELS] == 0)
    others = (jnp.arange(5) != LABELS[:, None]) & ~VACANT
    assert np.all(gradient[others] > 0)


def test_printed_suppression_alone_falls_with_all_logits_of_owned_classes():
    lowered = jnp.where(VACANT, LOGITS, LOGITS - 10)
    values = {
        form: [logit_suppression(o, LABELS, COUNTS, form=form) for o in (LOGITS, lowered)] for form in ("code", "paper")
    }
    np.testing.assert_allclose(values["paper"][0] - values["paper"][1], 10, rtol=1e-5)
    assert values["code"][1] > values["code"][0] - 5  # what the label counts holds it


def test_printed_suppression_leaves_out_a_class_that_all_samples_of_the_batch_have():
    labels = jnp.full(6, 3)
    value, gradient = jax.value_and_grad(logit_suppression)(LOGITS, labels, COUNTS, form="paper")
    expected = sum(COUNTS[c] / 20 * (jax.nn.logsumexp(LOGITS[:, c]) - np.log(6)) for c in (0, 1, 4))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert np.all(gradient[:, 3] == 0)


@FORMS
def test_a_client_with_one_class_is_neither_calibrated_nor_suppressed(form):
    labels, counts = jnp.full(6, 3), jnp.asarray([0, 0, 0, 20, 0])
    gradient = jax.grad(calibrated_cross_entropy)(LOGITS, labels, counts, form=form)
    np.testing.assert_allclose(gradient, 0, atol=1e-7)
    gradient = jax.grad(logit_suppression)(LOGITS, labels, counts, form=form)
    assert np.all(gradient == 0)


@FORMS
def test_a_client_without_samples_has_finite_losses(form):
    nothing = jnp.zeros(5, int)
    for loss in (calibrated_cross_entropy, logit_suppression):
        value, gradient = jax.value_and_grad(loss)(LOGITS, LABELS, nothing, form=form, mask=jnp.zeros(6))
        assert value == 0
        assert np.all(gradient == 0)


def test_unknown_forms_are_refused():
    for loss in (calibrated_cross_entropy, logit_suppression):
        with pytest.raises(UserError, match="Unknown form 'printed'"):
            loss(LOGITS, LABELS, COUNTS, form="printed")
