"""The losses against the golden vectors, in float64 and in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_vectors import assert_close, cases

from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.contrastive import model_contrast, prototype_contrast
from fedjax_pcdd.losses.decorrelation import intra_class
from fedjax_pcdd.losses.logit_adjustment import class_scales, scaled_logits
from fedjax_pcdd.losses.prototypes import (
    inter_class,
    merge_prototypes,
    nearest_prototype_scores,
    squared_distance_to_own,
)
from fedjax_pcdd.trees import squared_distance


@pytest.mark.parametrize("g", cases("fedprox"))
def test_half_mu_squared_distance_is_the_proximal_term(g, precision):
    w, start = precision.array(g["in_w"]), precision.array(g["in_w_global"])
    mu = precision.array(g["par_mu"])
    value, gradient = jax.value_and_grad(lambda w: 0.5 * mu * squared_distance(w, start))(w)
    assert_close(value, g["out_loss"], precision.rtol)
    assert_close(gradient, g["out_grad"], precision.rtol)


@pytest.mark.parametrize("form", ["offdiag", "frobenius"])
@pytest.mark.parametrize("g", cases("fedmr_intra"))
def test_intra_class_agrees_with_its_vectors(g, form, precision):
    labels = jnp.asarray(g["in_y"])
    num_classes = int(g["in_y"].max()) + 1

    def loss(z):
        return intra_class(z, labels, num_classes, form=form, epsilon=float(g["par_eps"]))

    value, gradient = jax.jit(jax.value_and_grad(loss))(precision.array(g["in_z"]))
    assert_close(value, g[f"out_loss_{form}"], precision.rtol)
    assert_close(gradient, g[f"out_grad_{form}"], precision.rtol_correlations)


@pytest.mark.parametrize("prototypes", ["allvalid", "oneinvalid"])
@pytest.mark.parametrize("negatives", ["local", "all"])
@pytest.mark.parametrize("g", cases("fedmr_inter"))
def test_inter_class_agrees_with_its_vectors(g, negatives, prototypes, precision):
    labels = jnp.asarray(g["in_y"])
    present = jnp.asarray(g["in_present"]) > 0
    candidates = present if negatives == "local" else jnp.ones_like(present)
    valid = jnp.asarray(g[f"in_valid_{prototypes}"]) > 0
    protos = precision.array(g["in_protos"])

    def loss(z):
        return inter_class(z, labels, protos, valid, candidates)

    value, gradient = jax.jit(jax.value_and_grad(loss))(precision.array(g["in_z"]))
    assert_close(value, g[f"out_loss_{negatives}_{prototypes}"], precision.rtol)
    assert_close(gradient, g[f"out_grad_{negatives}_{prototypes}"], precision.rtol)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("g", cases("proto_aggregation"))
def test_merged_prototypes_agree_with_their_vectors(g, partial, precision):
    local, counts = precision.array(g["in_local_protos"]), precision.array(g["in_counts"])
    if partial:
        counts = counts * precision.array(g["in_submit_mask"])[:, None]
    sums = jnp.sum(counts[:, :, None] * local, axis=0)
    no_previous = jnp.zeros_like(sums), jnp.zeros(sums.shape[0], bool)
    prototypes, valid = merge_prototypes(sums, jnp.sum(counts, axis=0), *no_previous)
    suffix = "_partial" if partial else ""
    assert_close(prototypes, g[f"out_global{suffix}"], precision.rtol)
    np.testing.assert_array_equal(valid, g[f"out_valid{suffix}"] > 0)


@pytest.mark.parametrize("g", cases("fedgela"))
def test_default_class_scales_agree_with_phi(g, precision):
    counts = precision.array(g["in_counts"])
    assert_close(class_scales(counts, counts[None]), g["out_phi"], precision.rtol)


@pytest.mark.parametrize("gamma", ["localgamma", "serverscaled"])
@pytest.mark.parametrize("function", ["identity", "sqrt", "exp"])
@pytest.mark.parametrize("g", cases("fedgela"))
def test_class_scales_of_other_functions_agree_with_phi(g, function, gamma, precision):
    federation = precision.array(g["in_counts_clients"])

    def scales(counts):
        return class_scales(counts, federation, function=function, gamma=gamma)

    assert_close(jax.jit(jax.vmap(scales))(federation), g[f"out_phi_{function}_{gamma}"], precision.rtol)


@pytest.mark.parametrize("variant", ["all", "present", "ge"])
@pytest.mark.parametrize("g", cases("fedgela"))
def test_rescaled_logits_and_their_loss_agree_with_fedgela(g, variant, precision):
    labels, directions = jnp.asarray(g["in_y"]), precision.array(g["out_M"])
    counts, kappa = precision.array(g["in_counts"]), 1 / precision.array(g["par_temperature"])
    scales = jnp.ones_like(counts) if variant == "ge" else class_scales(counts, counts[None])
    classes = counts > 0 if variant == "present" else None

    def loss(h):
        logits = scaled_logits(h, directions, scales, kappa)
        return cross_entropy(logits, labels, classes=classes), logits

    (value, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(precision.array(g["in_h"]))
    assert_close(logits, g["out_logits_ge" if variant == "ge" else "out_logits_la"], precision.rtol)
    assert_close(value, g[f"out_loss_{variant}"], precision.rtol)
    assert_close(gradient, g[f"out_grad_{variant}"], precision.rtol)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("previous", [0, 1, 2])
@pytest.mark.parametrize("g", cases("moon"))
def test_model_contrast_agrees_with_moon(g, previous, slots, precision):
    received, *past = (precision.array(g[f"in_f_{name}"]) for name in ("global", "prev", "prev2", "prev"))
    mu, tau = precision.array(g["par_mu"]), precision.array(g["par_tau"])
    negatives, valid = jnp.stack(past[:slots]), jnp.arange(slots) < previous

    def loss(f):
        return mu * model_contrast(f, received, negatives, valid, tau)

    value, gradient = jax.jit(jax.value_and_grad(loss))(precision.array(g["in_f"]))
    assert_close(value, g[f"out_loss_p{previous}"], precision.rtol)
    assert_close(gradient, g[f"out_grad_p{previous}"], precision.rtol)


@pytest.mark.parametrize("prototypes", ["allvalid", "oneinvalid"])
@pytest.mark.parametrize("tau", ["1.0", "0.5"])
@pytest.mark.parametrize("g", cases("fedproc"))
def test_prototype_contrast_agrees_with_fedproc(g, tau, prototypes, precision):
    labels, valid = jnp.asarray(g["in_y"]), jnp.asarray(g[f"in_valid_{prototypes}"]) > 0
    protos = precision.array(g["in_protos"])

    def loss(f):
        return prototype_contrast(f, labels, protos, valid, float(tau))

    value, gradient = jax.jit(jax.value_and_grad(loss))(precision.array(g["in_f"]))
    assert_close(value, g[f"out_loss_tau{tau}_{prototypes}"], precision.rtol)
    assert_close(gradient, g[f"out_grad_tau{tau}_{prototypes}"], precision.rtol)


@pytest.mark.parametrize("prototypes", ["allvalid", "oneinvalid"])
@pytest.mark.parametrize("g", cases("fedproto"))
def test_squared_distance_to_own_agrees_with_fedproto(g, prototypes, precision):
    labels, valid = jnp.asarray(g["in_y"]), jnp.asarray(g[f"in_valid_{prototypes}"]) > 0
    protos = precision.array(g["in_protos"])

    def loss(f):
        return squared_distance_to_own(f, labels, protos, valid)

    value, gradient = jax.jit(jax.value_and_grad(loss))(precision.array(g["in_f"]))
    assert_close(value, g[f"out_loss_{prototypes}"], precision.rtol)
    assert_close(gradient, g[f"out_grad_{prototypes}"], precision.rtol)


@pytest.mark.parametrize("g", cases("fedproto"))
def test_nearest_prototype_agrees_with_fedproto(g, precision):
    protos = precision.array(g["in_protos"])
    scores = nearest_prototype_scores(precision.array(g["in_f"]), protos, jnp.ones(len(protos), bool))
    np.testing.assert_array_equal(jnp.argmax(scores, axis=1), g["out_pred_nearest"])
