"""Properties of the losses of the heterogeneous methods: invariants, worked examples, masks, degenerate batches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ensembles import ensemble_kl

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.correlation import cross_correlation, cross_correlation_loss
from fedjax_pcdd.losses.distillation import (
    ENSEMBLES,
    absolute_error,
    confident,
    ensemble_target,
    helper_consistency,
    kl_to_probabilities,
    kl_to_target,
    kl_to_teacher,
    mutual_losses,
    pseudo_labels,
    squared_error,
)

B, C, K = 12, 5, 3
WEIGHT = 0.0051
LABELS = jnp.arange(B) % C
ALL_ROWS, SOME_ROWS = jnp.ones(B, bool), jnp.arange(B) % 3 != 1


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def collaboration(logits, target, mask=None, eps=0.0):
    return cross_correlation_loss(cross_correlation(logits, target, eps=eps, mask=mask), WEIGHT)


def mutual(logits, target, mask=None):
    return sum(mutual_losses(logits, target, jnp.argmax(target, axis=-1), alpha=0.3, beta=0.6, mask=mask))


def ensemble(logits, target, mask=None, *, form):
    return ensemble_kl(jnp.stack([target, 2 * target, target[:, ::-1]]), logits, form=form, temperature=2.0, mask=mask)


def consistency(logits, target, mask=None):
    helpers = jnp.stack([target, target[:, ::-1]])
    return helper_consistency(logits, helpers, ALL_ROWS[: len(logits)] if mask is None else mask)


# Losses of logits [B, C], a target [B, C] and a mask [B].
DISTANCES = {
    "kl_to_teacher": lambda z, t, mask=None: kl_to_teacher(t, z, temperature=2.0, mask=mask),
    "kl_to_probabilities": lambda z, t, mask=None: kl_to_probabilities(jax.nn.softmax(t), z, mask=mask),
    "absolute_error": lambda z, t, mask=None: absolute_error(t, z, mask),
    "squared_error": lambda z, t, mask=None: squared_error(t, z, mask),
    "mutual_losses": mutual,
    "helper_consistency": consistency,
    **{form: partial(ensemble, form=form) for form in ENSEMBLES},
}
LOSSES = {**DISTANCES, "cross_correlation": collaboration, "with eps": partial(collaboration, eps=1e-6)}
GRADIENTS = {name: jax.jit(jax.value_and_grad(loss)) for name, loss in LOSSES.items()}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
every_gradient = pytest.mark.parametrize("value_and_grad", GRADIENTS.values(), ids=GRADIENTS.keys())


# Masks and degenerate batches


@every_gradient
def test_masked_rows_equal_removed_rows(value_and_grad):
    logits, target = normal((B, C)), normal((B, C), 1)
    value, gradient = value_and_grad(logits, target, SOME_ROWS)
    expected, expected_gradient = value_and_grad(logits[SOME_ROWS], target[SOME_ROWS], ALL_ROWS[SOME_ROWS])
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient[SOME_ROWS], expected_gradient, rtol=1e-4, atol=1e-6)


@every_gradient
def test_masked_rows_have_zero_gradient(value_and_grad):
    _, gradient = value_and_grad(normal((B, C)), normal((B, C), 1), SOME_ROWS)
    assert np.all(gradient[~SOME_ROWS] == 0)


@every_loss
def test_no_mask_is_a_mask_of_ones(loss):
    logits, target = normal((B, C)), normal((B, C), 1)
    np.testing.assert_allclose(loss(logits, target), loss(logits, target, ALL_ROWS), rtol=1e-6)


@pytest.mark.parametrize("name", DISTANCES)
def test_empty_mask_gives_zero_and_zero_gradient(name):
    value, gradient = GRADIENTS[name](normal((B, C)), normal((B, C), 1), ~ALL_ROWS)
    assert value == 0
    assert np.all(gradient == 0)


@pytest.mark.parametrize("name", ["cross_correlation", "with eps"])
def test_empty_mask_gives_no_correlation_and_zero_gradient(name):
    value, gradient = GRADIENTS[name](normal((B, C)), normal((B, C), 1), ~ALL_ROWS)
    np.testing.assert_allclose(value, C + WEIGHT * C * (C - 1), rtol=1e-6)
    assert np.all(gradient == 0)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"mutual_losses"}))
def test_a_target_is_a_constant(name):
    gradient = jax.jit(jax.grad(LOSSES[name], argnums=1))(normal((B, C)), normal((B, C), 1))
    assert np.all(gradient == 0)


@every_gradient
def test_single_sample_has_a_finite_gradient(value_and_grad):
    value, gradient = value_and_grad(normal((1, C)), normal((1, C), 1))
    assert np.all(np.isfinite([value, *gradient[0]]))


@every_gradient
def test_large_and_equal_logits_have_finite_gradients(value_and_grad):
    logits = normal((B, C)).at[:, 0].set(0.1).at[0].set(jnp.arange(C) * 1e3)
    value, gradient = value_and_grad(logits, normal((B, C), 1))
    assert np.all(np.isfinite([value, *gradient.ravel()]))


@every_loss
def test_losses_of_half_precision_logits_are_float32(loss):
    logits = jax.ShapeDtypeStruct((B, C), jnp.bfloat16)
    assert jax.eval_shape(loss, logits, logits).dtype == jnp.float32


@every_gradient
def test_stacked_lanes_equal_lanes_one_by_one(value_and_grad):
    lanes = normal((2, B, C)), normal((2, B, C), 1), jnp.stack([ALL_ROWS, SOME_ROWS])
    stacked, gradients = jax.jit(jax.vmap(value_and_grad))(*lanes)
    single, single_gradients = zip(*(value_and_grad(*lane) for lane in zip(*lanes, strict=True)), strict=True)
    np.testing.assert_allclose(stacked, jnp.stack(single), rtol=1e-5)
    np.testing.assert_allclose(gradients, jnp.stack(single_gradients), rtol=1e-4, atol=1e-6)


# Collaboration (FCCL)


def test_collaboration_ignores_positive_scales_and_shifts_of_each_class():
    logits, mean, slopes, shifts = normal((B, C)), normal((B, C), 1), jnp.exp(normal(C, 2)), 10 * normal(C, 3)
    expected = collaboration(logits, mean)
    np.testing.assert_allclose(collaboration(slopes * logits + shifts, mean), expected, rtol=1e-4)
    np.testing.assert_allclose(collaboration(logits, slopes * mean + shifts), expected, rtol=1e-4)


def test_collaboration_ignores_the_order_of_the_batch():
    logits, mean, order = normal((B, C)), normal((B, C), 1), np.random.default_rng(2).permutation(B)
    np.testing.assert_allclose(collaboration(logits[order], mean[order]), collaboration(logits, mean), rtol=1e-5)


def test_a_class_that_agrees_with_the_mean_has_correlation_1_minus_1_over_b():
    logits = normal((B, C))
    np.testing.assert_allclose(jnp.diag(cross_correlation(logits, logits)), (B - 1) / B, rtol=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 3, B])
@pytest.mark.parametrize("sign", [1, -1])
def test_correlations_are_at_most_one(batch, sign):
    logits = 100 + normal((batch, C))
    assert np.all(np.abs(cross_correlation(logits, sign * logits)) <= 1)


@pytest.mark.thorough
def test_two_opposite_classes_have_the_least_loss_up_to_the_divisor():
    column = normal(B)
    logits = jnp.stack([column, 3 - 2 * column], axis=1)
    matrix = cross_correlation(logits, logits)
    np.testing.assert_allclose(matrix, (B - 1) / B * np.asarray([[1, -1], [-1, 1]]), rtol=1e-5)
    np.testing.assert_allclose(cross_correlation_loss(matrix, WEIGHT), (2 + 2 * WEIGHT) / B**2, rtol=1e-4)


@pytest.mark.parametrize("eps", [0.0, 1e-12])
def test_one_sample_has_no_correlation_and_zero_gradient(eps):
    value_and_grad = jax.jit(jax.value_and_grad(partial(collaboration, eps=eps)))
    value, gradient = value_and_grad(normal((1, C)), normal((1, C), 1))
    np.testing.assert_allclose(value, C + WEIGHT * C * (C - 1), rtol=1e-6)
    assert np.all(gradient == 0)


def test_a_class_of_equal_logits_has_no_correlation_and_zero_gradient():
    logits = normal((B, C)).at[:, 2].set(0.1)
    assert np.all(cross_correlation(logits, normal((B, C), 1))[2] == 0)
    assert np.all(GRADIENTS["cross_correlation"](logits, normal((B, C), 1))[1][:, 2] == 0)


def test_eps_limits_the_gradient_of_a_class_of_nearly_equal_logits():
    logits, mean = normal((B, C)).at[:, 2].multiply(1e-9), normal((B, C), 1)
    unlimited, limited = (
        np.max(np.abs(GRADIENTS[name](logits, mean)[1])) for name in ("cross_correlation", "with eps")
    )
    assert limited < 1e3 < 1e6 < unlimited


# Teachers (FCCL, FML)


@pytest.mark.thorough
def test_kl_of_equal_outputs_is_zero_with_zero_gradient():
    logits = normal((B, C))
    value, gradient = jax.value_and_grad(lambda z: kl_to_teacher(logits, z))(logits + normal((B, 1), 1))
    np.testing.assert_allclose([value, *gradient.ravel()], 0, atol=1e-6)


def test_kl_to_the_probabilities_of_a_teacher_is_the_kl_to_the_teacher():
    teacher, logits = normal((B, C)), normal((B, C), 1)
    value = kl_to_probabilities(jax.nn.softmax(teacher / 3), logits, temperature=3.0)
    np.testing.assert_allclose(value, kl_to_teacher(teacher, logits, temperature=3.0), rtol=1e-5)


def test_kl_to_one_hot_probabilities_is_cross_entropy():
    logits = normal((B, C))
    value = kl_to_probabilities(jax.nn.one_hot(LABELS, C), logits)
    np.testing.assert_allclose(value, cross_entropy(logits, LABELS), rtol=1e-6)


def test_mutual_learning_with_full_weight_on_labels_is_cross_entropy():
    private, meme = normal((B, C)), normal((B, C), 1)
    losses = mutual_losses(private, meme, LABELS, alpha=1.0, beta=1.0)
    np.testing.assert_array_equal(losses, [cross_entropy(private, LABELS), cross_entropy(meme, LABELS)])


@pytest.mark.thorough
def test_each_mutual_loss_holds_the_other_model_constant():
    jacobian = jax.jit(jax.jacrev(lambda a, b: jnp.stack(mutual_losses(a, b, LABELS)), argnums=(0, 1)))
    private_jacobian, meme_jacobian = jacobian(normal((B, C)), normal((B, C), 1))
    assert np.all(private_jacobian[1] == 0)
    assert np.all(meme_jacobian[0] == 0)


# Mean logits (FedMD, RCFL)


def test_two_participants_have_the_distances_of_the_worked_example():
    logits = jnp.asarray([[[1.0, 3.0]], [[3.0, 5.0]]])
    target = ensemble_target(logits)
    np.testing.assert_array_equal(target, [[2, 4]])
    np.testing.assert_array_equal(jax.vmap(partial(absolute_error, target))(logits), [1, 1])


def test_deviations_from_the_ensemble_target_average_to_zero():
    logits = normal((K, B, C))
    np.testing.assert_allclose(jnp.mean(logits - ensemble_target(logits), axis=0), 0, atol=1e-6)


@pytest.mark.parametrize("error", [absolute_error, squared_error])
def test_a_single_participant_has_no_distance_and_zero_gradient(error):
    logits = normal((1, B, C))
    value, gradient = jax.value_and_grad(lambda z: error(ensemble_target(logits), z))(logits[0])
    assert value == 0
    assert np.all(gradient == 0)


def test_squared_error_is_the_mean_of_squares():
    np.testing.assert_array_equal(squared_error(jnp.asarray([[2.0, 4.0]]), jnp.asarray([[1.0, 7.0]])), 5)


# Ensembles (FedDF)


@pytest.mark.parametrize("form", ENSEMBLES)
def test_a_student_that_equals_its_only_teacher_has_no_loss(form):
    logits = normal((B, C))
    np.testing.assert_allclose(ensemble_kl(logits[None], logits, form=form), 0, atol=1e-6)


@pytest.mark.parametrize("form", ["avg_logits", "avg_probs"])
def test_the_ensemble_target_gives_the_loss_of_all_teachers(form):
    teachers, logits, settings = normal((K, B, C)), normal((B, C), 1), {"form": form, "temperature": 2.0}
    value = kl_to_target(ensemble_target(teachers, **settings), logits, **settings)
    np.testing.assert_allclose(value, ensemble_kl(teachers, logits, **settings), rtol=1e-6)


def test_mean_losses_exceed_the_loss_of_mean_probabilities_by_a_constant():
    teachers = normal((K, B, C))

    def excess(logits):
        mean_of_losses, loss_of_mean = (ensemble_kl(teachers, logits, form=f) for f in ("avg_losses", "avg_probs"))
        return mean_of_losses - loss_of_mean

    np.testing.assert_allclose(excess(normal((B, C), 1)), excess(normal((B, C), 2)), rtol=1e-5)


def test_an_unknown_form_of_ensemble_is_refused_with_the_nearest_one():
    with pytest.raises(UserError, match="avg_probs"):
        ensemble_kl(normal((K, B, C)), normal((B, C)), form="avg_prob")


# Helpers (FedMatch)


def test_a_sample_at_the_confidence_is_kept():
    np.testing.assert_array_equal(confident(jnp.zeros((1, 4)), 0.25), [True])


def test_a_padded_sample_is_not_kept():
    np.testing.assert_array_equal(
        confident(jnp.asarray([[9.0, 0], [9, 0], [0.1, 0]]), 0.9, mask=jnp.arange(3) != 1), [1, 0, 0]
    )


def test_of_classes_with_equal_votes_the_lowest_is_the_label():
    local, helper = jnp.asarray([[0.0, 0, 9]]), jnp.asarray([[[0.0, 9, 0]]])
    np.testing.assert_array_equal(pseudo_labels(local, helper), [1])


@pytest.mark.parametrize("helpers", [normal((0, B, C)), normal((K, B, C), 1)], ids=["absent", "invalid"])
def test_without_helpers_the_label_is_the_local_prediction(helpers):
    logits = normal((B, C))
    labels = pseudo_labels(logits, helpers, valid=jnp.zeros(len(helpers), bool))
    np.testing.assert_array_equal(labels, jnp.argmax(logits, axis=-1))


@pytest.mark.thorough
@pytest.mark.parametrize("helpers", [normal((0, B, C)), normal((K, B, C), 1)], ids=["absent", "invalid"])
def test_without_helpers_consistency_is_zero_with_zero_gradient(helpers):
    valid = jnp.zeros(len(helpers), bool)
    value, gradient = jax.value_and_grad(helper_consistency)(normal((B, C)), helpers, ALL_ROWS, valid=valid)
    assert value == 0
    assert np.all(gradient == 0)


def test_invalid_helpers_equal_removed_helpers():
    logits, helpers, valid = normal((B, C)), normal((K, B, C), 1), jnp.asarray([True, False, True])
    value = helper_consistency(logits, helpers, SOME_ROWS, valid=valid)
    np.testing.assert_allclose(value, helper_consistency(logits, helpers[valid], SOME_ROWS), rtol=1e-6)


@pytest.mark.thorough
def test_no_confident_sample_gives_zero_and_zero_gradients():
    helpers = normal((K, B, C), 1)

    def loss(logits, augmented):
        confident_rows = confident(logits, 1.0)
        labelled = cross_entropy(augmented, pseudo_labels(logits, helpers), mask=confident_rows)
        return helper_consistency(logits, helpers, confident_rows) + labelled

    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(normal((B, C)), normal((B, C), 2))
    assert value == 0
    assert np.all(np.stack(gradients) == 0)


@pytest.mark.thorough
def test_consistency_without_a_floor_is_the_mean_kl_to_the_helpers():
    logits, helpers = 30 * normal((B, C)), normal((K, B, C), 1)
    value = helper_consistency(logits, helpers, SOME_ROWS, floor=0.0)
    np.testing.assert_allclose(value, ensemble_kl(helpers, logits, form="avg_losses", mask=SOME_ROWS), rtol=1e-5)


@pytest.mark.thorough
def test_the_floor_raises_both_probabilities():
    local, helper = jnp.asarray([[0.0, -50.0]]), jnp.asarray([[[-50.0, 0.0]]])
    expected = np.log(1e7) - 1e-7 * np.log(1e7)
    np.testing.assert_allclose(helper_consistency(local, helper, jnp.ones(1, bool), floor=1e-7), expected, rtol=1e-5)
