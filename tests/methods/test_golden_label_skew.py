"""Losses and ETF classifiers of the methods for label skew against the golden vectors, in float64 and in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_vectors import assert_close, cases

from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.decorrelation import batch_decorrelation
from fedjax_pcdd.losses.logit_adjustment import balanced_cross_entropy, scaled_logits
from fedjax_pcdd.losses.masked_distillation import (
    label_masking_distillation,
    majority_classes,
    masked_kl,
    not_true_distillation,
)
from fedjax_pcdd.losses.uniformity import prediction_variance, uniformity
from fedjax_pcdd.losses.vacant_classes import calibrated_cross_entropy, logit_suppression
from fedjax_pcdd.models.etf import etf_from, separation, sparse_etf


def value_and_gradient(loss):
    return jax.jit(jax.value_and_grad(loss))


# FedVLS

each_client = pytest.mark.parametrize("client", ["", "_allpresent", "_onevacant", "_oneclass"])


def fedvls_terms(g, client, precision):
    """For one client of the file: the terms of the objective by name, as functions of the logits, and the logits."""
    labels = jnp.asarray(g.get(f"in_y{client}", g["in_y"]))
    counts, teacher = precision.array(g[f"in_counts{client}"]), precision.array(g["in_teacher"])
    epsilon = float(g["par_eps"])
    terms = {"dis": lambda o: masked_kl(teacher, o, counts == 0)}
    for form in ("code", "paper"):
        options = {"form": form, "epsilon": epsilon}
        terms |= {
            f"cal_{form}": lambda o, options=options: calibrated_cross_entropy(o, labels, counts, **options),
            f"sup_{form}": lambda o, options=options: logit_suppression(o, labels, counts, **options),
        }
    return terms, precision.array(g["in_logits"])


@each_client
@pytest.mark.parametrize("term", ["cal_code", "cal_paper", "dis", "sup_code", "sup_paper"])
@pytest.mark.parametrize("g", cases("fedvls"))
def test_terms_of_fedvls_agree_with_their_vectors(g, term, client, precision):
    terms, logits = fedvls_terms(g, client, precision)
    value, gradient = value_and_gradient(terms[term])(logits)
    assert_close(value, g[f"out_{term}{client}"], precision.rtol, precision.atol)
    if not client:
        assert_close(gradient, g[f"out_grad_{term}"], precision.rtol)


@each_client
@pytest.mark.parametrize("form", ["code", "paper"])
@pytest.mark.parametrize("g", cases("fedvls"))
def test_objectives_of_fedvls_agree_with_their_vectors(g, form, client, precision):
    terms, logits = fedvls_terms(g, client, precision)
    weight = float(g["par_coef"]) if form == "code" else 1.0

    def loss(o):
        suppressed = weight * terms[f"sup_{form}"](o)
        return terms[f"cal_{form}"](o) + suppressed + float(g["par_lambda"]) * terms["dis"](o)

    value, gradient = value_and_gradient(loss)(logits)
    assert_close(value, g[f"out_loss_{form}{client}"], precision.rtol)
    assert_close(gradient, g[f"out_grad_loss_{form}{client}"], precision.rtol)


# FedNTD and FedLMD


@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("g", cases("fedntd"))
def test_not_true_distillation_agrees_with_fedntd(g, tau, precision):
    labels, teacher, beta = jnp.asarray(g["in_y"]), precision.array(g["in_teacher"]), float(g["par_beta"])

    def loss(o):
        ntd = not_true_distillation(teacher, o, labels, temperature=float(tau))
        return cross_entropy(o, labels) + beta * ntd, ntd

    (value, ntd), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(precision.array(g["in_logits"]))
    assert_close(ntd, g[f"out_ntd_tau{tau}"], precision.rtol)
    assert_close(value, g[f"out_loss_tau{tau}"], precision.rtol)
    assert_close(gradient, g[f"out_grad_tau{tau}"], precision.rtol)


@pytest.mark.parametrize("g", cases("fedntd"))
def test_not_true_distillation_of_two_classes_is_zero(g, precision):
    labels, teacher = jnp.asarray(g["in_y_two"]), precision.array(g["in_teacher_two"])
    value, gradient = value_and_gradient(lambda o: not_true_distillation(teacher, o, labels))(
        precision.array(g["in_logits_two"])
    )
    assert (value, g["out_ntd_two"]) == (0, 0)
    np.testing.assert_array_equal(gradient, 0)


@pytest.mark.parametrize("teacher", ["", "_tf"])
@pytest.mark.parametrize("tau", [1, 2])
@pytest.mark.parametrize("g", cases("fedlmd"))
def test_label_masking_distillation_agrees_with_fedlmd(g, tau, teacher, precision):
    labels, counts, beta = jnp.asarray(g["in_y"]), precision.array(g["in_counts"]), float(g["par_beta"])
    received = precision.array(g["in_teacher"] if not teacher else np.zeros_like(g["in_teacher"]))
    majority = majority_classes(counts)
    np.testing.assert_array_equal(majority, g["out_majority"] > 0)

    def loss(o):
        lmd = label_masking_distillation(received, o, labels, majority, temperature=float(tau))
        return cross_entropy(o, labels) + beta * lmd, lmd

    (value, lmd), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(precision.array(g["in_logits"]))
    assert_close(lmd, g[f"out_lmd{teacher}_tau{tau}"], precision.rtol)
    assert_close(value, g[f"out_loss{teacher}_tau{tau}"], precision.rtol)
    assert_close(gradient, g[f"out_grad{teacher}_tau{tau}"], precision.rtol)


@pytest.mark.parametrize("g", cases("fedlmd"))
def test_with_equal_counts_fedlmd_is_fedntd(g, precision):
    labels, counts = jnp.asarray(g["in_y"]), precision.array(g["in_counts_equal"])
    teacher, logits = precision.array(g["in_teacher"]), precision.array(g["in_logits"])
    lmd = label_masking_distillation(teacher, logits, labels, majority_classes(counts))
    assert_close(lmd, g["out_lmd_equal_tau1"], precision.rtol)
    assert_close(not_true_distillation(teacher, logits, labels), g["out_ntd_tau1"], precision.rtol)


@pytest.mark.parametrize("g", cases("fedlmd"))
def test_samples_without_a_class_to_distil_agree_with_fedlmd(g, precision):
    labels, teacher = jnp.asarray(g["in_y"]), precision.array(g["in_teacher"])
    majority = majority_classes(precision.array(g["in_counts_lone"]))
    np.testing.assert_array_equal(majority, g["out_majority_lone"] > 0)

    def loss(o, empty):
        return label_masking_distillation(teacher, o, labels, majority, empty=empty)

    logits = precision.array(g["in_logits"])
    value, gradient = value_and_gradient(lambda o: loss(o, "skip"))(logits)
    assert_close(value, g["out_lmd_lone_tau1"], precision.rtol)
    assert_close(gradient, g["out_grad_lmd_lone_tau1"], precision.rtol)
    assert_close(loss(logits, "published"), g["out_lmd_lone_thousand_tau1"], precision.rtol)


# FedDecorr


@pytest.mark.parametrize("constant", ["", "_constant"])
@pytest.mark.parametrize("form", ["offdiag", "frobenius"])
@pytest.mark.parametrize("g", cases("feddecorr"))
def test_batch_decorrelation_agrees_with_feddecorr(g, form, constant, precision):
    def loss(z):
        return batch_decorrelation(z, form=form, epsilon=float(g["par_eps"]))

    value, gradient = value_and_gradient(loss)(precision.array(g[f"in_z{constant}"]))
    assert_close(value, g[f"out_loss_{form}{constant}"], precision.rtol)
    assert_close(gradient, g[f"out_grad_{form}{constant}"], precision.rtol)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("g", cases("feddecorr"))
def test_decorrelation_of_tiny_batches_agrees_with_feddecorr(g, samples, precision):
    name = {1: "onesample", 2: "twosamples"}[samples]
    value, gradient = value_and_gradient(lambda z: batch_decorrelation(z, epsilon=float(g["par_eps"])))(
        precision.array(g["in_z"][:samples])
    )
    assert_close(value, g[f"out_loss_{name}"], precision.rtol)
    assert_close(gradient, g.get(f"out_grad_{name}", np.zeros(())), precision.rtol, precision.atol)


# FedUV


@pytest.mark.parametrize("g", cases("feduv"))
def test_prediction_variance_agrees_with_feduv(g, precision):
    value, gradient = value_and_gradient(prediction_variance)(precision.array(g["in_logits"]))
    assert_close(value, g["out_variance"], precision.rtol)
    assert_close(gradient, g["out_grad_variance"], precision.rtol)


@pytest.mark.parametrize(("rows", "width"), [("", "median"), ("_twins", "median"), ("", "constant")])
@pytest.mark.parametrize("g", cases("feduv"))
def test_uniformity_agrees_with_feduv(g, rows, width, precision):
    value, gradient = value_and_gradient(lambda z: uniformity(z, width=width))(precision.array(g[f"in_z{rows}"]))
    assert_close(value, g[f"out_uniformity{rows}"], precision.rtol)
    name = f"out_grad_uniformity{rows}" + ("_constantwidth" if width == "constant" else "")
    assert_close(gradient, g[name], precision.rtol)


@pytest.mark.parametrize("g", cases("feduv"))
def test_objective_of_feduv_agrees_with_its_vector(g, precision):
    logits, labels, z = precision.array(g["in_logits"]), jnp.asarray(g["in_y"]), precision.array(g["in_z"])
    spread = float(g["par_lambda"]) * prediction_variance(logits) + float(g["par_mu"]) * uniformity(z)
    assert_close(cross_entropy(logits, labels) + spread, g["out_loss"], precision.rtol)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("g", cases("feduv"))
def test_tiny_batches_agree_with_feduv(g, samples, precision):
    name = {1: "onesample", 2: "twosamples"}[samples]
    value, gradient = value_and_gradient(uniformity)(precision.array(g["in_z"][:samples]))
    assert_close(value, g[f"out_uniformity_{name}"], precision.rtol)
    assert_close(gradient, g.get(f"out_grad_uniformity_{name}", np.zeros(())), precision.rtol, precision.atol)
    value, gradient = value_and_gradient(prediction_variance)(precision.array(g["in_logits"][:samples]))
    assert_close(value, g[f"out_variance_{name}"], precision.rtol)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("g", cases("feduv"))
def test_equal_features_have_feduvs_largest_uniformity_and_no_gradient(g, precision):
    value, gradient = value_and_gradient(uniformity)(precision.array(np.repeat(g["in_z"][:1], 3, axis=0)))
    assert_close(value, g["out_uniformity_identical"], precision.rtol)
    np.testing.assert_array_equal(gradient, 0)


# FedETF

BALANCED = {"one": (1.0, 1.0), "removed": (1.0, None), "gamma0.5": (0.5, 1.0)}  # gamma, count that stands in for 0


def etf_logits(inputs, directions):
    f, weight, bias, beta = inputs
    return scaled_logits(f @ weight.T + bias, directions, jnp.ones(directions.shape[1], f.dtype), beta)


@pytest.mark.parametrize("variant", BALANCED)
@pytest.mark.parametrize("g", cases("fedetf"))
def test_balanced_softmax_on_an_etf_agrees_with_fedetf(g, variant, precision):
    labels, counts = jnp.asarray(g["in_y"]), precision.array(g["in_counts"])
    directions = precision.array(etf_from(g["in_a"]))
    assert_close(directions, g["out_M"], precision.rtol)
    power, missing = BALANCED[variant]

    def loss(inputs):
        logits = etf_logits(inputs, directions)
        return balanced_cross_entropy(logits, labels, counts, power=power, missing=missing), logits

    inputs = [precision.array(g[f"in_{name}"]) for name in ("f", "Wp", "bp", "beta")]
    (value, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
    assert_close(logits, g["out_logits"], precision.rtol)
    assert_close(value, g[f"out_loss_{variant}"], precision.rtol)
    for name, gradient in zip(("f", "Wp", "bp", "beta"), gradients, strict=True):
        assert_close(gradient, g[f"out_grad_{name}_{variant}"], precision.rtol)
    np.testing.assert_array_equal(jnp.argmax(logits, axis=1), g["out_prediction"])


# FedLoGe


@pytest.mark.parametrize("g", cases("fedloge"))
def test_sparse_etf_agrees_with_fedloge(g):
    start = etf_from(g["in_a"])
    assert_close(start, g["out_M"], 1e-9)
    start.flat[g["in_zero"]] = 0
    length = float(g["par_norm"])
    steps = sorted(int(name.removeprefix("out_sparse_loss_")) for name in g if name.startswith("out_sparse_loss_"))
    assert steps
    for number in steps:
        values = sparse_etf(start, length=length, steps=number, learning_rate=float(g["par_lr"]))
        assert_close(values, g[f"out_sparse_{number}"], 1e-9)
        assert_close(separation(values, length)[0], g[f"out_sparse_loss_{number}"], 1e-9)
