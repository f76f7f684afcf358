"""Distillation on some classes only: the parts of FedVLS, FedNTD and FedLMD."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.masked_distillation import (
    label_masking_distillation,
    majority_classes,
    masked_kl,
    not_true_distillation,
)

RNG = np.random.default_rng(0)
LOGITS, TEACHER = (jnp.asarray(RNG.normal(size=(6, 5)), jnp.float32) for _ in range(2))
LABELS, COUNTS = jnp.asarray([0, 0, 1, 3, 3, 4]), jnp.asarray([9, 2, 0, 8, 1])
ROWS = jnp.arange(6)
MAJORITY = majority_classes(COUNTS)
VACANT = jnp.asarray([False, True, True, False, True])


def vacant(teacher, logits):
    return masked_kl(teacher, logits, VACANT)


def not_true(teacher, logits, temperature=1.0):
    return not_true_distillation(teacher, logits, LABELS, temperature=temperature)


def label_masking(teacher, logits, temperature=1.0):
    return label_masking_distillation(teacher, logits, LABELS, MAJORITY, temperature=temperature)


losses = pytest.mark.parametrize("loss", [vacant, not_true, label_masking])


def test_not_true_distillation_has_the_value_of_the_worked_example():
    logits = jnp.asarray([[0.0, np.log(2), 0.0]])
    value = not_true_distillation(jnp.zeros((1, 3)), logits, jnp.asarray([0]))
    np.testing.assert_allclose(value, 0.058892, atol=5e-7)


def test_label_masking_distillation_has_the_value_of_the_worked_example():
    zeros, majority = jnp.zeros((1, 4)), majority_classes(jnp.asarray([10, 6, 0, 0]))
    value = label_masking_distillation(zeros, zeros, jnp.asarray([0]), majority)
    np.testing.assert_allclose(value, np.log(1.5), rtol=1e-6)


@losses
def test_adding_a_constant_to_all_logits_of_a_sample_changes_nothing(loss):
    constants = jnp.arange(6.0)[:, None]
    expected = jax.value_and_grad(loss, argnums=1)(TEACHER, LOGITS)
    moved = jax.value_and_grad(loss, argnums=1)(TEACHER - 2 * constants, LOGITS + constants)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), moved, expected)


@losses
def test_the_divergence_is_positive_and_its_teacher_has_no_gradient(loss):
    value, gradient = jax.value_and_grad(loss)(TEACHER, LOGITS)
    assert value > 0
    assert np.all(gradient == 0)


@pytest.mark.parametrize("loss", [vacant, not_true])
def test_a_student_that_agrees_has_no_loss_and_no_gradient(loss):
    value, gradient = jax.value_and_grad(loss, argnums=1)(TEACHER, TEACHER)
    assert value == 0
    np.testing.assert_allclose(gradient, 0, atol=1e-7)


def test_label_masking_lowers_majority_classes_of_a_student_that_agrees():
    gradient = jax.grad(label_masking, argnums=1)(TEACHER, TEACHER)
    lowered = (jnp.arange(5) != LABELS[:, None]) & MAJORITY
    assert np.all(gradient[lowered] > 0)


@pytest.mark.parametrize("loss", [not_true, label_masking])
def test_the_labels_logit_has_no_gradient_and_no_influence(loss):
    value, gradient = jax.value_and_grad(loss, argnums=1)(TEACHER, LOGITS)
    assert np.all(gradient[ROWS, LABELS] == 0)
    np.testing.assert_array_equal(loss(TEACHER, LOGITS.at[ROWS, LABELS].add(9.0)), value)


@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_gradient_of_not_true_distillation_is_the_difference_of_probabilities(tau):
    others = jnp.arange(5) != LABELS[:, None]
    student, teacher = (jax.nn.softmax(jnp.where(others, logits / tau, -jnp.inf)) for logits in (LOGITS, TEACHER))
    gradient = jax.grad(not_true, argnums=1)(TEACHER, LOGITS, tau)
    np.testing.assert_allclose(gradient, tau / 6 * (student - teacher), 1e-5, 1e-7)


def test_owned_classes_have_no_gradient_from_the_vacant_ones():
    gradient = jax.grad(vacant, argnums=1)(TEACHER, LOGITS)
    assert np.all(gradient[:, ~VACANT] == 0)
    assert np.any(gradient[:, VACANT] != 0)


@pytest.mark.parametrize("classes", [np.zeros(5, bool), np.eye(5, dtype=bool)[2]], ids=["none", "one"])
def test_fewer_than_two_classes_leave_nothing_to_distil(classes):
    value, gradient = jax.value_and_grad(lambda logits: masked_kl(TEACHER, logits, jnp.asarray(classes)))(LOGITS)
    assert value == 0
    assert np.all(gradient == 0)


def test_a_client_with_one_class_makes_label_masking_not_true_distillation():
    labels, majority = jnp.full(6, 3), majority_classes(jnp.asarray([0, 0, 0, 20, 0]))
    masked = label_masking_distillation(TEACHER, LOGITS, labels, majority)
    np.testing.assert_allclose(masked, not_true_distillation(TEACHER, LOGITS, labels), rtol=1e-6)


@pytest.mark.parametrize("classes", [3, 10, 41, 47, 55, 100])
def test_equal_counts_over_all_classes_have_no_majority(classes):
    for count in (1, 2, 7, 16, 333):
        assert not majority_classes(jnp.full(classes, float(count))).any()


def test_equal_counts_on_owned_classes_make_exactly_those_the_majority():
    counts = jnp.asarray([5, 0, 5, 5, 0])
    np.testing.assert_array_equal(majority_classes(counts), counts > 0)


def test_samples_without_a_class_to_distil_stay_in_the_divisor():
    majority = jnp.asarray([False, True, True, True, True])  # class 0 is the only one of the minority
    values = [
        label_masking_distillation(TEACHER[rows], LOGITS[rows], LABELS[rows], majority)
        for rows in (slice(None), slice(2, None))
    ]
    np.testing.assert_allclose(6 * values[0], 4 * values[1], rtol=1e-6)


def test_equal_logits_teach_the_uniform_distribution():
    value = label_masking(jnp.full((6, 5), 3.0), LOGITS)
    others = np.arange(5) != np.asarray(LABELS)[:, None]
    teacher_classes = others & ~np.asarray(MAJORITY)
    student = LOGITS - np.log((others * np.exp(LOGITS)).sum(1, keepdims=True))
    uniform = 1 / teacher_classes.sum(1, keepdims=True)
    expected = np.where(teacher_classes, uniform * (np.log(uniform) - student), 0).sum(1).mean()
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@losses
def test_huge_logits_have_a_finite_gradient(loss):
    value, gradient = jax.value_and_grad(loss, argnums=1)(1e6 * TEACHER, -1e6 * LOGITS)
    assert np.all(np.isfinite([value, *gradient.ravel()]))


@pytest.mark.thorough
def test_permuting_classes_permutes_the_gradient():
    order = jnp.asarray([3, 1, 4, 0, 2])
    labels = jnp.argsort(order)[LABELS]

    def loss(logits, teacher, labels, counts):
        return label_masking_distillation(teacher, logits, labels, majority_classes(counts))

    expected = jax.grad(loss)(LOGITS, TEACHER, LABELS, COUNTS)
    permuted = jax.grad(loss)(LOGITS[:, order], TEACHER[:, order], labels, COUNTS[order])
    np.testing.assert_allclose(permuted, expected[:, order], 1e-5, 1e-7)


@pytest.mark.thorough
def test_unknown_treatment_of_empty_samples_is_refused():
    with pytest.raises(UserError, match="Unknown treatment 'drop'"):
        label_masking_distillation(TEACHER, LOGITS, LABELS, MAJORITY, empty="drop")
