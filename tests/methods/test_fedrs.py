"""FedRS: the restricted softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from golden_vectors import cases
from linear_model import context, dense, loss, loss_and_gradients

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.logit_adjustment import restricted_scales
from fedjax_pcdd.methods import METHODS, Method
from fedjax_pcdd.methods.fedrs import FedRS

RNG = np.random.default_rng(0)
FEATURES, LABELS = RNG.normal(size=(6, 4)).astype(np.float32), np.array([0, 0, 1, 1, 0, 1])
WEIGHTS, BIAS = RNG.normal(size=(3, 4)).astype(np.float32), RNG.normal(size=3).astype(np.float32)
ONE_MISSING, NONE_MISSING = [4, 2, 0], [4, 2, 3]


def cross_entropy(logits, labels=LABELS):
    return -np.mean(np.asarray(jax.nn.log_softmax(logits))[np.arange(len(labels)), labels])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["hard", "soft"])
@pytest.mark.parametrize("g", cases("fedrs"))
def test_loss_and_gradients_agree_with_the_vectors(g, form):
    method = FedRS(alpha=float(g["par_alpha"]), form=form)
    value, (layers, features) = loss_and_gradients(
        method, {"head": dense(g["in_W"])}, g["in_f"], g["in_y"], g["in_counts"]
    )
    np.testing.assert_allclose(value, g[f"out_loss_{form}"], 1e-9)
    np.testing.assert_allclose(features, g[f"out_grad_f_{form}"], 1e-9, 1e-12)
    np.testing.assert_allclose(layers["head"]["kernel"].T, g[f"out_grad_W_{form}"], 1e-9, 1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("form", ["hard", "soft"])
@pytest.mark.parametrize("g", cases("fedrs"))
def test_scales_agree_with_the_vectors(g, form):
    scales = restricted_scales(jnp.asarray(g["in_counts"]), float(g["par_alpha"]), form=form)
    np.testing.assert_allclose(scales, g[f"out_scale_{form}"], 1e-9)


def test_scaled_logits_match_the_worked_example():
    weights = [[2.0], [1.0], [1.0]]
    value = loss(FedRS(alpha=0.5), {"head": dense(weights)}, jnp.ones((1, 1)), [0], ONE_MISSING)
    np.testing.assert_allclose(value, cross_entropy(np.array([[2.0, 1.0, 0.5]]), [0]), 1e-6)


def test_alpha_of_zero_leaves_missing_classes_in_the_softmax():
    logits = FEATURES @ WEIGHTS.T * [1, 1, 0]
    value = loss(FedRS(alpha=0.0), {"head": dense(WEIGHTS)}, FEATURES, LABELS, ONE_MISSING)
    np.testing.assert_allclose(value, cross_entropy(logits), 1e-6)


@pytest.mark.parametrize(
    ("alpha", "form", "counts"), [(1.0, "hard", ONE_MISSING), (1.0, "soft", ONE_MISSING), (0.3, "hard", NONE_MISSING)]
)
def test_without_restriction_the_loss_is_plain_cross_entropy_bitwise(alpha, form, counts):
    arguments = {"head": dense(WEIGHTS)}, FEATURES, LABELS, counts
    restricted = loss_and_gradients(FedRS(alpha=alpha, form=form), *arguments)
    plain = loss_and_gradients(Biasless(), *arguments)
    jax.tree.map(np.testing.assert_array_equal, restricted, plain)


@struct.dataclass
class Biasless(Method):
    def build(self, model):
        return model.clone(head_bias=False)


def test_head_row_of_a_missing_class_has_alpha_times_the_plain_gradient():
    _, (restricted, _) = loss_and_gradients(FedRS(alpha=0.2), {"head": dense(WEIGHTS)}, FEATURES, LABELS, ONE_MISSING)
    scaled = WEIGHTS * np.float32([[1], [1], [0.2]])
    _, (plain, _) = loss_and_gradients(Biasless(), {"head": dense(scaled)}, FEATURES, LABELS, ONE_MISSING)
    rows = restricted["head"]["kernel"][:, 2], 0.2 * plain["head"]["kernel"][:, 2]
    np.testing.assert_allclose(*rows, 1e-5)


def test_head_has_a_bias_only_if_asked_for():
    assert not context(FedRS(), NONE_MISSING, features=4).model.head_bias
    assert context(FedRS(bias=True), NONE_MISSING, features=4).model.head_bias


def test_bias_is_not_scaled():
    value = loss(FedRS(alpha=0.2, bias=True), {"head": dense(WEIGHTS, BIAS)}, FEATURES, LABELS, ONE_MISSING)
    np.testing.assert_allclose(value, cross_entropy(FEATURES @ WEIGHTS.T * [1, 1, 0.2] + BIAS), 1e-6)


def test_unknown_form_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'hard'"):
        restricted_scales(jnp.ones(3), 0.5, form="hart")


@pytest.mark.thorough
def test_fedrs_is_registered():
    assert METHODS["fedrs"] is FedRS
