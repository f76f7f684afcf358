"""FedVLS: calibration, suppression, and distillation of vacant classes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_model import context, dense

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.masked_distillation import masked_kl
from fedjax_pcdd.losses.vacant_classes import calibrated_cross_entropy, logit_suppression
from fedjax_pcdd.methods.fedvls import FedVLS
from fedjax_pcdd.methods.method import Batch, Method, Setting
from fedjax_pcdd.models import Outputs

RNG = np.random.default_rng(0)
LOGITS = jnp.asarray(RNG.normal(size=(6, 5)), jnp.float32)
LABELS, COUNTS = jnp.asarray([0, 0, 1, 3, 3, 4]), jnp.asarray([9, 2, 0, 8, 1])
VACANT, ROWS = COUNTS == 0, jnp.arange(6)
each_form = pytest.mark.parametrize("form", ["code", "paper"])


@pytest.mark.thorough
def test_terms_match_the_worked_examples():
    logits, labels, counts = jnp.asarray([[1.0, 0.0, 2.0]]), jnp.asarray([0]), jnp.asarray([3, 1, 0])
    calibrated = calibrated_cross_entropy(logits, labels, counts, form="paper")
    np.testing.assert_allclose(calibrated, 0.115671, atol=5e-7)
    np.testing.assert_allclose(logit_suppression(logits, labels, counts), 0.071921, atol=5e-7)
    np.testing.assert_allclose(logit_suppression(logits, labels, counts, form="paper"), 0, atol=1e-7)
    assert masked_kl(logits[:, ::-1], logits, counts == 0) == 0


@each_form
def test_equal_counts_of_all_classes_give_plain_cross_entropy(form):
    value = calibrated_cross_entropy(LOGITS, LABELS, jnp.full(5, 7), form=form)
    np.testing.assert_allclose(value, cross_entropy(LOGITS, LABELS), rtol=1e-6)


@each_form
def test_labels_and_vacant_classes_are_not_suppressed(form):
    gradient = jax.grad(logit_suppression)(LOGITS, LABELS, COUNTS, form=form)
    assert np.all(gradient[:, VACANT] == 0)
    assert np.all(gradient[ROWS, LABELS] == 0)
    others = (jnp.arange(5) != LABELS[:, None]) & ~VACANT
    assert np.all(gradient[others] > 0)


def test_only_the_printed_suppression_falls_with_all_owned_logits():
    lowered = jnp.where(VACANT, LOGITS, LOGITS - 10)
    values = {
        form: [logit_suppression(o, LABELS, COUNTS, form=form) for o in (LOGITS, lowered)] for form in ("code", "paper")
    }
    np.testing.assert_allclose(values["paper"][0] - values["paper"][1], 10, rtol=1e-5)
    assert values["code"][1] > values["code"][0] - 5  # the 0 that stands for the label bounds it


def test_printed_suppression_omits_a_class_that_is_the_label_of_all_samples():
    labels = jnp.full(6, 3)
    value, gradient = jax.value_and_grad(logit_suppression)(LOGITS, labels, COUNTS, form="paper")
    expected = sum(COUNTS[c] / 20 * (jax.nn.logsumexp(LOGITS[:, c]) - np.log(6)) for c in (0, 1, 4))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert np.all(gradient[:, 3] == 0)


@each_form
def test_a_client_with_one_class_is_neither_calibrated_nor_suppressed(form):
    labels, counts = jnp.full(6, 3), jnp.asarray([0, 0, 0, 20, 0])
    gradient = jax.grad(calibrated_cross_entropy)(LOGITS, labels, counts, form=form)
    np.testing.assert_allclose(gradient, 0, atol=1e-7)
    gradient = jax.grad(logit_suppression)(LOGITS, labels, counts, form=form)
    assert np.all(gradient == 0)


@each_form
def test_a_client_without_samples_has_zero_losses_and_gradients(form):
    no_counts = jnp.zeros(5, int)
    for loss in (calibrated_cross_entropy, logit_suppression):
        value, gradient = jax.value_and_grad(loss)(LOGITS, LABELS, no_counts, form=form, mask=jnp.zeros(6))
        assert value == 0
        assert np.all(gradient == 0)


@each_form
def test_permuting_classes_permutes_the_gradients(form):
    order = jnp.asarray([3, 1, 4, 0, 2])
    labels = jnp.argsort(order)[LABELS]
    for loss in (calibrated_cross_entropy, logit_suppression):
        expected = jax.grad(loss)(LOGITS, LABELS, COUNTS, form=form)
        permuted = jax.grad(loss)(LOGITS[:, order], labels, COUNTS[order], form=form)
        np.testing.assert_allclose(permuted, expected[:, order], 1e-5, 1e-7)


def test_unknown_forms_are_refused():
    for loss in (calibrated_cross_entropy, logit_suppression):
        with pytest.raises(UserError, match="Unknown form 'printed'"):
            loss(LOGITS, LABELS, COUNTS, form="printed")


# The method

FEATURES = RNG.normal(size=(6, 4)).astype(np.float32)
LAYERS = {"head": dense(RNG.normal(size=(5, 4)).astype(np.float32), RNG.normal(size=5).astype(np.float32))}
MOVED = jax.tree.map(lambda x: x + 0.3 * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape) / x.size, LAYERS)


def value_and_gradient(method, received, counts=COUNTS):
    """Loss of a client with LAYERS that received other layers, and its gradient for the head."""
    client_context = context(method, counts, features=4)._replace(start={"params": received})
    batch = Batch(jnp.asarray(FEATURES), LABELS, jnp.ones(6))
    return jax.value_and_grad(lambda layers: method.loss({"params": layers}, batch, client_context)[0])(LAYERS)


def assert_close(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), actual, expected)


def test_a_client_with_the_received_weights_has_nothing_to_distil():
    methods = [FedVLS(lam=lam, omega=0.005) for lam in (5.0, 0.0)]
    assert_close(*(value_and_gradient(method, LAYERS) for method in methods))


def test_a_client_with_all_classes_or_all_but_one_has_nothing_to_distil():
    for counts in (jnp.asarray([9, 2, 3, 8, 1]), COUNTS):
        methods = [FedVLS(lam=lam, omega=0.005) for lam in (5.0, 0.0)]
        assert_close(*(value_and_gradient(method, MOVED, counts) for method in methods))


def test_a_client_that_lacks_two_classes_is_drawn_to_the_received_model():
    counts = jnp.asarray([9, 0, 0, 8, 1])
    distilled, undistilled = (value_and_gradient(FedVLS(lam=lam, omega=0.005), MOVED, counts) for lam in (5.0, 0.0))
    assert distilled[0] > undistilled[0]
    assert np.all(distilled[1]["head"]["bias"][1:3] != undistilled[1]["head"]["bias"][1:3])


def test_without_calibration_and_both_weights_it_is_fedavg():
    assert_close(
        value_and_gradient(FedVLS(lam=0.0, omega=0.0, calibrated=False), MOVED), value_and_gradient(Method(), MOVED)
    )


@pytest.mark.parametrize("calibrated", [True, False])
def test_padding_does_not_change_the_supervised_loss(calibrated):
    method, client_context = FedVLS(omega=0.005, calibrated=calibrated), context(FedVLS(), COUNTS, features=5)
    padded, plain = (
        method.classification(Outputs((), LOGITS[:n]), Batch((), LABELS[:n], jnp.arange(n) < 4), client_context)
        for n in (6, 4)
    )
    np.testing.assert_allclose(padded, plain, rtol=1e-6)


def test_default_weight_of_the_suppression_depends_on_its_form():
    setting = Setting(5, 4, 1, 1, 1, 6, False)
    weights = {form: FedVLS(form=form).configure(setting, None)[0].omega for form in ("code", "paper")}
    assert weights == {"code": 0.005, "paper": 1.0}
    assert FedVLS(omega=0.3).configure(setting, None)[0].omega == 0.3


def test_advice_is_given_where_the_loss_is_unbounded_or_constant():
    no_single_class, some_single_class = (Setting(5, 4, 1, 1, 1, 6, False, one_class_clients=n) for n in (0, 3))
    assert FedVLS().configure(some_single_class, None)[1] == []
    assert "unbounded below" in FedVLS(form="paper").configure(no_single_class, None)[1][0]
    assert FedVLS(form="paper", omega=0.05).configure(no_single_class, None)[1] == []
    assert "set `lam` above 0" in FedVLS(lam=0.0).configure(some_single_class, None)[1][0]
    assert "calibrated=false" in FedVLS().configure(some_single_class._replace(num_classes=2), None)[1][0]


@pytest.mark.parametrize(("fewest", "count"), [(3, 0), (4, 1), (5, 1)])
def test_a_partition_in_which_no_client_lacks_two_classes_is_advised_against(fewest, count):
    setting = Setting(5, 4, 1, 1, 1, 6, False, fewest_classes=fewest)
    advice = FedVLS().configure(setting, None)[1]
    assert len(advice) == count
    assert all("`partition`" in sentence for sentence in advice)
    assert FedVLS(lam=0.0).configure(setting, None)[1] == []
