"""The losses of the heterogeneous methods against the golden vectors, in float64 and in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ensembles import ensemble_kl
from golden_vectors import assert_close, cases

from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.correlation import cross_correlation, cross_correlation_loss
from fedjax_pcdd.losses.distillation import (
    absolute_error,
    confident,
    ensemble_target,
    helper_consistency,
    kl_to_target,
    kl_to_teacher,
    mutual_losses,
    pseudo_labels,
)


@pytest.mark.parametrize("g", cases("fccl_col"))
def test_cross_correlation_agrees_with_fccl(g, precision):
    matrix = cross_correlation(precision.array(g["in_z"]), precision.array(g["in_zbar"]))
    assert_close(matrix, g["out_corr"], precision.rtol)


@pytest.mark.parametrize("g", cases("fccl_col"))
def test_cross_correlation_loss_and_gradient_agree_with_fccl(g, precision):
    mean, weight = precision.array(g["in_zbar"]), precision.array(g["par_lambda"])

    def loss(z):
        return cross_correlation_loss(cross_correlation(z, mean), weight)

    value, gradient = jax.jit(jax.value_and_grad(loss))(precision.array(g["in_z"]))
    assert_close(value, g["out_loss"], precision.rtol)
    assert_close(gradient, g["out_grad_z"], precision.rtol_correlations)


@pytest.mark.parametrize("g", cases("fccl_dual"))
def test_cross_entropy_and_two_teachers_agree_with_fccl(g, precision):
    labels = jnp.asarray(g["in_y"])
    previous, pretrained = (precision.array(g[f"in_logits_{name}"]) for name in ("prev", "pretrained"))

    def loss(logits):
        labelled = cross_entropy(logits, labels)
        inter, intra = kl_to_teacher(previous, logits), kl_to_teacher(pretrained, logits)
        return labelled + inter + intra, {"ce": labelled, "inter": inter, "intra": intra}

    (value, terms), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(precision.array(g["in_logits"]))
    assert_close(value, g["out_loss"], precision.rtol)
    assert_close(gradient, g["out_grad_logits"], precision.rtol)
    for name, term in terms.items():
        assert_close(term, g[f"out_{name}"], precision.rtol)


@pytest.mark.parametrize("g", cases("fedmd"))
def test_absolute_error_from_the_mean_logits_agrees_with_fedmd(g, precision):
    target = ensemble_target(precision.array(g["in_all_logits"]))
    value, gradient = jax.jit(jax.value_and_grad(lambda z: absolute_error(target, z)))(precision.array(g["in_logits"]))
    assert_close(target, g["out_target"], precision.rtol)
    assert_close(value, g["out_loss"], precision.rtol)
    assert_close(gradient, g["out_grad"], precision.rtol)


@pytest.mark.parametrize("form", ["avg_logits", "avg_probs", "avg_losses"])
@pytest.mark.parametrize("g", cases("feddf"))
def test_a_student_of_all_teachers_agrees_with_feddf(g, form, precision):
    teachers = precision.array(g["in_teachers"])

    def loss(student):
        return ensemble_kl(teachers, student, form=form)

    value, gradient = jax.jit(jax.value_and_grad(loss))(precision.array(g["in_student"]))
    assert_close(value, g[f"out_loss_{form}"], precision.rtol)
    assert_close(gradient, g[f"out_grad_{form}"], precision.rtol)


@pytest.mark.parametrize("form", ["avg_logits", "avg_probs", "avg_losses"])
@pytest.mark.parametrize("g", cases("feddf"))
def test_a_student_of_the_ensemble_target_has_the_gradient_of_feddf(g, form, precision):
    target = ensemble_target(precision.array(g["in_teachers"]), form=form)
    gradient = jax.grad(lambda student: kl_to_target(target, student, form=form))(precision.array(g["in_student"]))
    assert_close(gradient, g[f"out_grad_{form}"], precision.rtol)


@pytest.mark.parametrize("g", cases("fml"))
def test_mutual_losses_and_the_gradients_of_their_sum_agree_with_fml(g, precision):
    labels = jnp.asarray(g["in_y"])
    alpha, beta = precision.array(g["par_alpha"]), precision.array(g["par_beta"])

    def loss(private, meme):
        losses = mutual_losses(private, meme, labels, alpha=alpha, beta=beta)
        return sum(losses), losses

    logits = precision.array(g["in_logits_local"]), precision.array(g["in_logits_meme"])
    gradients, values = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(*logits)
    for name, value, gradient in zip(("local", "meme"), values, gradients, strict=True):
        assert_close(value, g[f"out_loss_{name}"], precision.rtol)
        assert_close(gradient, g[f"out_grad_{name}"], precision.rtol)


@pytest.mark.parametrize("g", cases("fedmatch"))
def test_confident_samples_and_pseudo_labels_agree_with_fedmatch(g, precision):
    logits, helpers = precision.array(g["in_logits"]), precision.array(g["in_helper_logits"])
    np.testing.assert_array_equal(confident(logits, precision.array(g["par_conf"])), g["out_conf_mask"] > 0)
    np.testing.assert_array_equal(pseudo_labels(logits, helpers), g["out_pseudo"])


@pytest.mark.parametrize("g", cases("fedmatch"))
def test_unsupervised_terms_and_their_gradients_agree_with_fedmatch(g, precision):
    helpers, confidence = precision.array(g["in_helper_logits"]), precision.array(g["par_conf"])
    lambda_i, lambda_a = precision.array(g["par_lambda_i"]), precision.array(g["par_lambda_a"])

    def loss(logits, augmented):
        confident_rows = confident(logits, confidence)
        consistency = lambda_i * helper_consistency(logits, helpers, confident_rows, floor=1e-7)
        labelled = lambda_a * cross_entropy(augmented, pseudo_labels(logits, helpers), mask=confident_rows)
        return consistency + labelled, {"icc": consistency, "pseudo_ce": labelled}

    logit_pair = precision.array(g["in_logits"]), precision.array(g["in_logits_aug"])
    (value, terms), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*logit_pair)
    assert_close(value, g["out_loss"], precision.rtol)
    for name, gradient in zip(("logits", "logits_aug"), gradients, strict=True):
        assert_close(gradient, g[f"out_grad_{name}"], precision.rtol)
    for name, term in terms.items():
        assert_close(term, g[f"out_{name}"], precision.rtol)
