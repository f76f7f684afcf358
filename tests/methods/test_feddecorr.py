"""FedDecorr: features decorrelated over the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.decorrelation import batch_decorrelation, intra_class
from fedjax_pcdd.methods.feddecorr import FedDecorr
from fedjax_pcdd.methods.method import Batch, Setting
from fedjax_pcdd.models import Outputs

FEATURES = jnp.asarray(np.random.default_rng(0).normal(size=(7, 4)), jnp.float32)
FORMS = pytest.mark.parametrize("form", ["offdiag", "frobenius"])


@pytest.mark.parametrize(("form", "expected"), [("offdiag", 1 / 3), ("frobenius", 0.625)])
def test_decorrelation_has_the_value_of_the_worked_example(form, expected):
    triangle = jnp.asarray([[0.0, 0.0], [1.0, 2.0], [2.0, 1.0]])
    np.testing.assert_allclose(batch_decorrelation(triangle, form=form), expected, rtol=1e-6)


@FORMS
def test_scaling_and_shifting_dimensions_change_nothing(form):
    transformed = FEATURES * jnp.asarray([2.0, -0.5, 1.0, 7.0]) + jnp.asarray([0.0, 3.0, -1.0, 9.0])
    expected = batch_decorrelation(FEATURES, form=form)
    np.testing.assert_allclose(batch_decorrelation(transformed, form=form), expected, rtol=1e-4)


@FORMS
def test_order_of_the_samples_changes_nothing(form):
    expected = batch_decorrelation(FEATURES, form=form)
    np.testing.assert_allclose(batch_decorrelation(FEATURES[::-1], form=form), expected, rtol=1e-5)


def test_uncorrelated_dimensions_have_no_loss():
    signs = jnp.asarray([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    np.testing.assert_allclose(batch_decorrelation(signs), 0, atol=1e-6)


def test_equal_dimensions_have_the_largest_loss():
    equal = jnp.repeat(FEATURES[:, :1], 3, axis=1)
    np.testing.assert_allclose(batch_decorrelation(equal), 36 / 7, rtol=1e-5)


@FORMS
def test_a_constant_dimension_has_a_finite_loss_and_no_gradient(form):
    value, gradient = jax.value_and_grad(lambda z: batch_decorrelation(z, form=form))(FEATURES.at[:, 1].set(3.7))
    assert np.all(np.isfinite([value, *gradient.ravel()]))
    np.testing.assert_allclose(gradient[:, 1], 0, atol=1e-3)


def test_a_single_dimension_has_no_loss_and_no_gradient():
    value, gradient = jax.value_and_grad(batch_decorrelation)(FEATURES[:, :1])
    assert value == 0
    assert np.all(gradient == 0)


def test_the_forms_differ_by_their_scale_and_the_diagonal():
    size, dim = FEATURES.shape
    frobenius = batch_decorrelation(FEATURES, form="frobenius")
    expected = (size - 1) ** 2 / size * (dim**2 * frobenius - dim) / (dim * (dim - 1))
    np.testing.assert_allclose(batch_decorrelation(FEATURES), expected, rtol=1e-5)


def test_a_batch_of_one_class_has_fedmrs_intra_class_loss():
    np.testing.assert_array_equal(batch_decorrelation(FEATURES), intra_class(FEATURES, jnp.full(7, 2), 3))


def test_unknown_form_is_refused():
    with pytest.raises(UserError, match="Unknown form 'frob'"):
        batch_decorrelation(FEATURES, form="frob")


@FORMS
def test_the_penalty_is_beta_times_the_form_asked_for(form):
    batch = Batch(FEATURES, jnp.zeros(7, int), jnp.ones(7))
    value = FedDecorr(beta_dec=0.5, decorr_form=form).penalty(None, Outputs(FEATURES, None), batch, None)
    np.testing.assert_allclose(value, 0.5 * batch_decorrelation(FEATURES, form=form), rtol=1e-6)


def test_advice_is_given_if_there_is_nothing_to_decorrelate():
    setting = Setting(5, 4, 1, 1, 1, 8, False)
    assert FedDecorr().configure(setting, None)[1] == []
    for small_setting in (setting._replace(batch_size=1), setting._replace(feature_dim=1)):
        assert "nothing to decorrelate" in FedDecorr().configure(small_setting, None)[1][0]
