"""Properties of the losses: invariants and worked examples of the methods, masks, degenerate batches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.classification import correct_per_class, cross_entropy, masked_mean
from fedjax_pcdd.losses.contrastive import model_contrast, prototype_contrast
from fedjax_pcdd.losses.decorrelation import batch_decorrelation, intra_class
from fedjax_pcdd.losses.logit_adjustment import class_scales, l2_normalise, scaled_logits
from fedjax_pcdd.losses.masked_distillation import label_masking_distillation, masked_kl, not_true_distillation
from fedjax_pcdd.losses.prototypes import (
    class_sums,
    inter_class,
    margin_cross_entropy,
    merge_prototypes,
    random_subset,
    squared_distance_to_own,
)
from fedjax_pcdd.losses.uniformity import prediction_variance, uniformity
from fedjax_pcdd.losses.vacant_classes import calibrated_cross_entropy, logit_suppression

C, D, B = 5, 4, 12
FORMS = ["offdiag", "frobenius"]
PRESENT = jnp.asarray([True, True, False, True, True])  # class 2 absent, class 4 with one sample
LABELS = jnp.asarray([0, 0, 0, 1, 1, 3, 3, 3, 3, 1, 0, 4])


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


PROTOTYPES = normal((C, D), seed=7)


def linear_cross_entropy(features, labels, mask=None):
    return cross_entropy(features @ PROTOTYPES.T, labels, mask=mask, classes=PRESENT)


def margin(features, labels, mask=None):
    return inter_class(features, labels, PROTOTYPES, jnp.ones(C, bool), PRESENT, mask=mask)


def rescaled(features, labels, mask=None):
    scales = class_scales(jnp.asarray([4, 3, 0, 4, 1]), jnp.ones((2, C)))
    return cross_entropy(scaled_logits(features, PROTOTYPES.T, scales, 10.0), labels, mask=mask, classes=PRESENT)


def decorrelation(features, labels, mask=None, *, form):
    return intra_class(features, labels, C, form=form, mask=mask)


def contrast_of_models(features, labels, mask=None):
    past = jnp.stack([features[:, ::-1], 1 - features])
    return model_contrast(features, 2 * features + 1, past, jnp.asarray([True, False]), 0.5, mask=mask)


def contrast_of_prototypes(features, labels, mask=None):
    return prototype_contrast(features, labels, PROTOTYPES, PRESENT, 0.5, mask=mask)


def distance(features, labels, mask=None):
    return squared_distance_to_own(features, labels, PROTOTYPES, PRESENT, mask=mask)


def margin_of_targets(features, labels, mask=None):
    return margin_cross_entropy(features, labels, PROTOTYPES, 2.0, mask=mask)


COUNTS, VACANT = jnp.asarray([4, 3, 0, 4, 1]), jnp.asarray([False, True, True, False, True])


def as_loss_of_features(loss, *, with_labels=False, with_teacher=False):
    """A loss of logits [B, C] as one of features; its teacher is the same linear model on other features."""

    def of_features(features, labels, mask=None):
        logits, teacher = features @ PROTOTYPES.T, (features[:, ::-1] + 1) @ PROTOTYPES.T
        arguments = [teacher] * with_teacher + [logits] + [labels] * with_labels
        return loss(*arguments, mask=mask)

    return of_features


LOSSES = {
    "vacant_kl": as_loss_of_features(partial(masked_kl, teacher_classes=VACANT), with_teacher=True),
    "not_true_distillation": as_loss_of_features(not_true_distillation, with_labels=True, with_teacher=True),
    "label_masking": as_loss_of_features(
        partial(label_masking_distillation, majority=VACANT), with_labels=True, with_teacher=True
    ),
    "calibrated": as_loss_of_features(partial(calibrated_cross_entropy, class_counts=COUNTS), with_labels=True),
    "suppression": as_loss_of_features(partial(logit_suppression, class_counts=COUNTS), with_labels=True),
    "suppression_paper": as_loss_of_features(
        partial(logit_suppression, class_counts=COUNTS, form="paper"), with_labels=True
    ),
    "batch_decorrelation": lambda features, labels, mask=None: batch_decorrelation(features, mask=mask),
    "batch_frobenius": lambda features, labels, mask=None: batch_decorrelation(features, form="frobenius", mask=mask),
    "prediction_variance": as_loss_of_features(prediction_variance),
    "uniformity": lambda features, labels, mask=None: uniformity(features, mask=mask),
    "model_contrast": contrast_of_models,
    "prototype_contrast": contrast_of_prototypes,
    "squared_distance_to_own": distance,
    "cross_entropy": linear_cross_entropy,
    "rescaled": rescaled,
    "inter_class": margin,
    "margin_cross_entropy": margin_of_targets,
    "offdiag": partial(decorrelation, form="offdiag"),
    "frobenius": partial(decorrelation, form="frobenius"),
}
GRADIENTS = {name: jax.jit(jax.value_and_grad(loss)) for name, loss in LOSSES.items()}
every_loss = pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
every_gradient = pytest.mark.parametrize("value_and_grad", GRADIENTS.values(), ids=GRADIENTS.keys())


# Masks and degenerate batches

ALL_ROWS, SOME_ROWS = jnp.ones(B, bool), jnp.arange(B) % 3 != 0  # the first one is masked


@pytest.mark.thorough
@every_gradient
def test_masked_rows_equal_removed_rows(value_and_grad):
    features = normal((B, D))
    value, gradient = value_and_grad(features, LABELS, SOME_ROWS)
    expected, expected_gradient = value_and_grad(features[SOME_ROWS], LABELS[SOME_ROWS], ALL_ROWS[SOME_ROWS])
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient[SOME_ROWS], expected_gradient, rtol=1e-4, atol=1e-5)


@every_gradient
def test_masked_rows_have_zero_gradient(value_and_grad):
    _, gradient = value_and_grad(normal((B, D)), LABELS, SOME_ROWS)
    assert np.all(gradient[~SOME_ROWS] == 0)


@every_gradient
def test_huge_numbers_in_masked_rows_have_no_effect(value_and_grad):
    features = normal((B, D))
    expected = value_and_grad(features, LABELS, SOME_ROWS)
    huge = value_and_grad(jnp.where(SOME_ROWS[:, None], features, 1e25), LABELS, SOME_ROWS)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), huge, expected)


@every_gradient
def test_no_mask_is_a_mask_of_ones(value_and_grad):
    features = normal((B, D))
    value, expected = value_and_grad(features, LABELS)[0], value_and_grad(features, LABELS, ALL_ROWS)[0]
    np.testing.assert_allclose(value, expected, rtol=1e-6)


@every_gradient
def test_empty_mask_gives_zero_and_zero_gradient(value_and_grad):
    value, gradient = value_and_grad(normal((B, D)), LABELS, ~ALL_ROWS)
    assert value == 0
    assert np.all(gradient == 0)


DEGENERATE = {"normal": normal((B, D)), "zero": jnp.zeros((B, D)), "on prototypes": PROTOTYPES[LABELS]}


@every_gradient
@pytest.mark.parametrize("labels", [LABELS, 0 * LABELS, LABELS // 4], ids=["mixed", "one class", "single"])
@pytest.mark.parametrize("features", DEGENERATE.values(), ids=DEGENERATE.keys())
def test_degenerate_batches_have_finite_gradients(value_and_grad, labels, features):
    value, gradient = value_and_grad(features, labels, ALL_ROWS)
    assert np.all(np.isfinite([value, *gradient.ravel()]))


@every_gradient
def test_single_sample_has_a_finite_gradient(value_and_grad):
    value, gradient = value_and_grad(normal((1, D)), LABELS[:1], ALL_ROWS[:1])
    assert np.all(np.isfinite([value, *gradient[0]]))


@every_loss
def test_losses_of_half_precision_features_are_float32(loss):
    features = jax.ShapeDtypeStruct((B, D), jnp.bfloat16)
    assert jax.eval_shape(loss, features, LABELS).dtype == jnp.float32


@every_gradient
def test_stacked_lanes_equal_lanes_one_by_one(value_and_grad):
    lanes = normal((2, B, D)), jnp.stack([LABELS, LABELS[::-1]]), jnp.stack([ALL_ROWS, SOME_ROWS])
    stacked, gradients = jax.vmap(value_and_grad)(*lanes)
    single, single_gradients = zip(*(value_and_grad(*lane) for lane in zip(*lanes, strict=True)), strict=True)
    np.testing.assert_allclose(stacked, jnp.stack(single), rtol=1e-5)
    np.testing.assert_allclose(gradients, jnp.stack(single_gradients), rtol=1e-4, atol=1e-5)


# Classification


@pytest.mark.thorough
def test_cross_entropy_restricted_to_classes_equals_the_smaller_problem():
    logits, classes_kept = normal((3, C)), jnp.asarray([0, 1, 3, 4])
    restricted = cross_entropy(logits, classes_kept[:3], classes=PRESENT)
    np.testing.assert_allclose(restricted, cross_entropy(logits[:, classes_kept], jnp.arange(3)), rtol=1e-6)


@pytest.mark.thorough
def test_cross_entropy_with_one_class_is_zero_with_zero_gradient():
    loss = partial(cross_entropy, labels=jnp.full(4, 3), classes=jnp.arange(C) == 3)
    value, gradient = jax.value_and_grad(loss)(100 * normal((4, C)))
    assert value == 0
    assert np.all(gradient == 0)


@pytest.mark.parametrize("classes", [PRESENT, jnp.zeros(C, bool)], ids=["label outside", "no class"])
def test_masked_sample_with_a_label_outside_the_classes_is_harmless(classes):
    loss = partial(cross_entropy, labels=jnp.full(4, 2), mask=jnp.zeros(4), classes=classes)
    value, gradient = jax.value_and_grad(loss)(normal((4, C)))
    assert value == 0
    assert np.all(gradient == 0)


def test_cross_entropy_is_finite_for_huge_logits():
    value, gradient = jax.value_and_grad(cross_entropy)(1e7 * normal((4, C)), jnp.arange(4))
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))


def test_masked_mean_counts_only_unmasked_entries():
    assert masked_mean(jnp.asarray([1.0, 5.0, jnp.nan]), jnp.asarray([1, 1, 0])) == 3


def test_correct_per_class_counts_ties_for_the_lowest_index():
    logits = jnp.asarray([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 2.0], [0.0, 0.0, 2.0]])
    correct = correct_per_class(logits, jnp.asarray([0, 1, 2, 2]), jnp.asarray([1, 1, 1, 0]), 3)
    np.testing.assert_array_equal(correct, [1, 0, 1])


def test_a_label_whose_logit_is_minus_infinity_or_nan_is_never_correct():
    logits = jnp.asarray([[-jnp.inf, -jnp.inf], [jnp.nan, 0.0], [-jnp.inf, 1.0]])
    np.testing.assert_array_equal(correct_per_class(logits, jnp.asarray([0, 0, 1]), None, 2), [0, 1])


# FedMR, within classes

intra = jax.jit(intra_class, static_argnames=("num_classes", "form"))
TRIANGLE = jnp.asarray([[0.0, 0.0], [1.0, 2.0], [2.0, 1.0]])


@pytest.mark.parametrize(("form", "expected"), [("offdiag", 1 / 3), ("frobenius", 5.625)])
def test_intra_class_has_the_value_of_the_worked_example(form, expected):
    np.testing.assert_allclose(intra(TRIANGLE, jnp.zeros(3, int), 1, form=form), expected, rtol=1e-6)


def loop_intra_class(features, labels, form):
    """The definition, class by class with [D, D] matrices."""
    terms, samples = [], 0
    for c in range(C):
        x = features[labels == c]
        if len(x) >= 2:
            offdiag = form == "offdiag"
            x = (x - x.mean(0)) / np.sqrt(1e-8 + x.var(0, ddof=int(offdiag)))
            square = (x.T @ x) ** 2
            off = (square.sum() - np.trace(square)) / (D * (D - 1))
            terms.append(off if offdiag else square.sum() / (len(x) - 1) ** 2)
            samples += len(x)
    return sum(terms) / (samples if form == "offdiag" else len(terms))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(5))
def test_intra_class_equals_its_definition(form, seed):
    features, labels = normal((40, D), seed), np.random.default_rng(seed).integers(0, C, 40)
    labels[labels == 2] = 3
    expected = loop_intra_class(np.asarray(features, np.float64), labels, form)
    np.testing.assert_allclose(intra(features, jnp.asarray(labels), C, form=form), expected, rtol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_intra_class_is_invariant_to_scale_and_shift_of_a_dimension(form):
    features, scale, shift = normal((B, D)), jnp.asarray([2.0, -0.5, 8.0, 1.0]), normal((D,), seed=1)
    loss = partial(intra, labels=LABELS, num_classes=C, form=form)
    np.testing.assert_allclose(loss(scale * features + shift), loss(features), rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_intra_class_is_invariant_to_the_order_of_samples(form):
    features, order = normal((B, D)), np.random.default_rng(3).permutation(B)
    loss = partial(intra, num_classes=C, form=form)
    np.testing.assert_allclose(loss(features[order], LABELS[order]), loss(features, LABELS), rtol=1e-5)


def test_offdiag_of_uncorrelated_dimensions_is_zero():
    square = jnp.asarray([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    np.testing.assert_allclose(intra(square, jnp.zeros(4, int), 1), 0, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_intra_class_without_two_samples_of_a_class_is_zero_with_zero_gradient(form):
    value, gradient = jax.value_and_grad(intra)(normal((C, D)), jnp.arange(C), C, form=form)
    assert value == 0
    assert np.all(gradient == 0)


@pytest.mark.parametrize("step", [0, 1234.567])
@pytest.mark.parametrize("value", [0.25, 1234.567])
@pytest.mark.parametrize("form", FORMS)
def test_dimensions_constant_in_each_class_add_nothing_but_their_share_of_the_mean(form, value, step):
    features = normal((B, D))
    extended = jnp.column_stack([features, jnp.full((B, 3), value) + step * LABELS[:, None]])
    share = D * (D - 1) / ((D + 3) * (D + 2)) if form == "offdiag" else 1
    loss = partial(intra, labels=LABELS, num_classes=C, form=form)
    np.testing.assert_allclose(loss(extended), share * loss(features), rtol=1e-5)


def test_offdiag_of_a_single_dimension_is_zero_with_zero_gradient():
    value, gradient = jax.value_and_grad(intra)(normal((B, 1)), LABELS, C)
    assert value == 0
    assert np.all(gradient == 0)


def test_unknown_form_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'offdiag'"):
        intra_class(normal((B, D)), LABELS, C, form="offdiagonal")


def test_intra_class_makes_no_array_of_size_classes_times_dimensions_squared():
    classes, dimensions = 7, 31
    trace = jax.make_jaxpr(jax.grad(partial(intra_class, num_classes=classes)))
    jaxpr = trace(normal((B, dimensions)), LABELS)
    largest = max(np.prod(v.aval.shape) for equation in jaxpr.eqns for v in equation.outvars)  # pyright: ignore
    assert largest <= max(B * dimensions, B * B, classes * dimensions)


# FedMR, between classes


@pytest.mark.thorough
def test_inter_class_has_the_value_of_the_worked_example():
    prototypes, all_classes = jnp.asarray([[3.0, 4.0], [1.0, 0.0]]), jnp.ones(2, bool)
    assert inter_class(jnp.zeros((1, 2)), jnp.zeros(1, int), prototypes, all_classes, all_classes) == 4


@pytest.mark.thorough
def test_inter_class_is_zero_for_features_on_their_prototypes():
    value, gradient = jax.value_and_grad(margin)(PROTOTYPES[LABELS], LABELS)
    assert value == 0
    assert np.all(gradient == 0)


def test_inter_class_is_positive_once_a_sample_is_nearer_to_a_negative():
    assert margin(PROTOTYPES[LABELS].at[0].set(PROTOTYPES[1]), LABELS) > 0


def test_inter_class_is_invariant_to_joint_rotation_and_translation():
    features, shift = normal((B, D)), normal((D,), seed=2)
    rotation = jnp.linalg.qr(normal((D, D), seed=3))[0]
    all_classes = jnp.ones(C, bool)
    moved = inter_class(features @ rotation + shift, LABELS, PROTOTYPES @ rotation + shift, all_classes, PRESENT)
    np.testing.assert_allclose(moved, margin(features, LABELS), rtol=1e-5)


@pytest.mark.parametrize("case", ["one class", "none valid", "no candidate"])
def test_inter_class_without_a_pair_is_zero_with_zero_gradient(case):
    labels = jnp.zeros(B, int) if case == "one class" else LABELS
    valid = jnp.zeros(C, bool) if case == "none valid" else jnp.ones(C, bool)
    candidates = {"one class": jnp.arange(C) == 0, "no candidate": jnp.zeros(C, bool)}.get(case, PRESENT)
    value, gradient = jax.value_and_grad(inter_class)(normal((B, D)), labels, PROTOTYPES, valid, candidates)
    assert value == 0
    assert np.all(gradient == 0)


@pytest.mark.parametrize("candidates", [PRESENT, jnp.ones(C, bool)], ids=["local", "all"])
def test_prototypes_of_absent_classes_matter_only_where_they_are_candidates(candidates):
    inter = partial(inter_class, normal((B, D)), LABELS, valid=jnp.ones(C, bool), candidates=candidates)
    moved = inter(PROTOTYPES) != inter(PROTOTYPES.at[2].add(0.5))
    assert moved == candidates[2]


def test_the_gradient_of_the_margin_has_no_array_of_samples_by_classes_by_features():
    samples, classes, features = 16, 50, 64
    given = jnp.zeros(samples, int), jnp.zeros((classes, features)), jnp.ones(classes, bool), jnp.ones(classes, bool)
    gradient = jax.jit(jax.grad(inter_class)).lower(normal((samples, features)), *given).compile()
    assert gradient.memory_analysis().temp_size_in_bytes < 4 * samples * classes * features / 2


def test_the_gradient_of_the_margin_is_precise_where_features_have_much_in_common(x64):
    """One prototype of another scale does not exist."""
    common = 6 + 1e-5 * normal((B + C, D), seed=4).astype(jnp.float32)
    features, prototypes, valid = common[:B], common[B:].at[2].set(0), jnp.arange(C) != 2

    def inter(features):
        return inter_class(features, LABELS, prototypes.astype(features.dtype), valid, jnp.ones(C, bool))

    gradient, expected = jax.grad(inter)(features), jax.grad(inter)(features.astype(jnp.float64))
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-5 * float(jnp.abs(expected).max()))
    step = normal((B, D), seed=5).astype(jnp.float32)
    np.testing.assert_allclose(jax.jvp(inter, (features,), (step,))[1], jnp.vdot(gradient, step), rtol=1e-4)


def test_prototypes_are_constants_of_the_margin():
    inter = partial(inter_class, normal((B, D)), LABELS, valid=jnp.ones(C, bool), candidates=PRESENT)
    assert np.all(jax.grad(inter)(PROTOTYPES) == 0)


# Prototypes


def test_class_sums_over_counts_are_the_class_means():
    features = normal((B, D))
    sums, counts = class_sums(features, LABELS, C)
    means = np.stack([np.asarray(features)[c == LABELS].mean(0) for c in (0, 1, 3, 4)])
    np.testing.assert_allclose((sums / counts[:, None])[PRESENT], means, rtol=1e-5)
    np.testing.assert_array_equal(counts, [4, 3, 0, 4, 1])


def test_class_sums_leave_masked_rows_out():
    mask = jnp.arange(B) % 2 == 0
    masked = class_sums(normal((B, D)), LABELS, C, mask)
    removed = class_sums(normal((B, D))[mask], LABELS[mask], C)
    np.testing.assert_allclose(masked[0], removed[0], rtol=1e-6)
    np.testing.assert_array_equal(masked[1], removed[1])


@pytest.mark.parametrize(("stale", "expected_valid"), [("carry", [True, True, False]), ("drop", [True, False, False])])
def test_a_class_that_no_client_submitted_is_carried_or_dropped(stale, expected_valid):
    previous, counts = normal((3, D)), jnp.asarray([4.0, 0.0, 0.0])
    sums = counts[:, None] * jnp.ones((3, D))
    prototypes, valid = merge_prototypes(sums, counts, previous, jnp.asarray([True, True, False]), stale=stale)
    expected = jnp.stack([jnp.ones(D), previous[1] * expected_valid[1], jnp.zeros(D)])
    np.testing.assert_array_equal(valid, expected_valid)
    np.testing.assert_array_equal(prototypes, expected)


def test_merged_prototype_of_identical_clients_is_the_local_one():
    counts, previous = jnp.asarray([3.0, 5.0]), jnp.zeros((2, D))
    local = normal((2, D))
    prototypes, _ = merge_prototypes(4 * counts[:, None] * local, 4 * counts, previous, jnp.zeros(2, bool))
    np.testing.assert_allclose(prototypes, local, rtol=1e-6)


def test_merged_prototype_lies_between_the_local_ones():
    local, counts = normal((6, 2, D)), jnp.asarray(np.random.default_rng(0).integers(1, 9, (6, 2)))
    sums = jnp.sum(counts[:, :, None] * local, axis=0)
    prototypes, _ = merge_prototypes(sums, counts.sum(0), jnp.zeros((2, D)), jnp.zeros(2, bool))
    assert np.all((prototypes > local.min(0)) & (prototypes < local.max(0)))


def test_unknown_treatment_of_stale_prototypes_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'carry'"):
        merge_prototypes(PROTOTYPES, jnp.ones(C), PROTOTYPES, PRESENT, stale="cary")


@pytest.mark.parametrize("n", [0, 1, 5, 8, 12, 100])
def test_random_subset_has_n_of_the_unmasked_rows(n):
    mask = jnp.arange(B) % 3 != 0
    subset = jax.jit(random_subset)(jax.random.key(n), mask, n)
    assert subset.sum() == min(n, 8)
    assert not np.any(subset & ~mask)


def test_padding_changes_no_draw_of_a_random_subset():
    mask = jnp.arange(64) < 50
    subsets = [random_subset(jax.random.key(3), jnp.pad(mask, (0, more)), 20)[:64] for more in (0, 64)]
    np.testing.assert_array_equal(*subsets)


def test_random_subset_is_uniform():
    mask = jnp.arange(6) < 5
    keys = jax.random.split(jax.random.key(0), 4000)
    frequency = jax.vmap(lambda key: random_subset(key, mask, 2))(keys).mean(0)
    np.testing.assert_allclose(frequency, [0.4] * 5 + [0], atol=0.04)


# FedGELA


def test_class_scales_have_the_values_of_the_worked_example():
    counts = jnp.asarray([30, 10, 0])
    np.testing.assert_allclose(class_scales(counts, counts[None]), [2.25, 0.75, 0], rtol=1e-6)


@pytest.mark.parametrize("gamma", ["class", "localgamma"])
def test_class_scales_average_to_one_over_classes(gamma):
    counts = jnp.asarray([4, 3, 0, 4, 1])
    np.testing.assert_allclose(class_scales(counts, counts[None], gamma=gamma).mean(), 1, rtol=1e-6)


def test_class_scales_of_a_uniform_client_are_one():
    counts = jnp.full(C, 7)
    np.testing.assert_allclose(class_scales(counts, counts[None]), 1, rtol=1e-6)


FEDERATION = jnp.asarray([[6, 0, 2, 0], [0, 8, 2, 2], [0, 0, 0, 0], [3, 1, 5, 7]])


def mean_scales(federation, **options):
    """sum_k p_k Phi_k with p_k = n_k / n."""
    weights = federation.sum(1) / federation.sum()
    return weights @ jax.vmap(lambda counts: class_scales(counts, federation, **options))(federation)


def test_class_scales_without_a_function_are_one_for_every_client():
    for counts in FEDERATION:
        np.testing.assert_array_equal(class_scales(counts, FEDERATION, function="none"), 1)


def test_mean_of_default_class_scales_is_the_federations_imbalance():
    expected = 4 * FEDERATION.sum(0) / FEDERATION.sum()
    np.testing.assert_allclose(mean_scales(FEDERATION), expected, rtol=1e-6)


@pytest.mark.parametrize("function", ["identity", "sqrt", "exp"])
def test_mean_of_serverscaled_class_scales_is_one(function):
    mean = mean_scales(FEDERATION, function=function, gamma="serverscaled")
    np.testing.assert_allclose(mean, 1, rtol=1e-6)


@pytest.mark.parametrize("gamma", ["localgamma", "serverscaled"])
@pytest.mark.parametrize("function", ["identity", "sqrt", "exp"])
def test_class_scales_of_a_client_without_samples_are_zero(function, gamma):
    scales = class_scales(FEDERATION[2], FEDERATION, function=function, gamma=gamma)
    np.testing.assert_array_equal(scales, 0)


def test_a_class_that_no_client_owns_has_scale_zero():
    federation = FEDERATION.at[:, 1].set(0)
    assert class_scales(federation[0], federation, gamma="serverscaled")[1] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": "sqr"}, "did you mean 'sqrt'"),
        ({"gamma": "serverscale"}, "did you mean 'serverscaled'"),
        ({"function": "sqrt", "gamma": "class"}, "choose gamma 'serverscaled'"),
    ],
)
def test_wrong_options_of_class_scales_are_refused_with_what_to_choose(options, message):
    with pytest.raises(UserError, match=message):
        class_scales(FEDERATION[0], FEDERATION, **options)


def test_rotating_features_and_directions_changes_no_logit():
    features, scales = normal((B, D)), jnp.arange(1.0, C + 1)
    rotation = jnp.linalg.qr(normal((D, D), seed=3))[0]
    logits = scaled_logits(features, PROTOTYPES.T, scales, 5.0)
    rotated = scaled_logits(features @ rotation, (PROTOTYPES @ rotation).T, scales, 5.0)
    np.testing.assert_allclose(rotated, logits, rtol=1e-4, atol=1e-4)


def test_generic_prediction_does_not_depend_on_kappa():
    predict = lambda kappa: scaled_logits(normal((B, D)), PROTOTYPES.T, jnp.ones(C), kappa).argmax(1)  # noqa: E731
    np.testing.assert_array_equal(predict(1.0), predict(1e3))


@pytest.mark.thorough
@pytest.mark.parametrize(("classes", "trains"), [(jnp.arange(C) == 0, False), (None, True)], ids=["present", "all"])
def test_client_with_one_class_trains_only_against_all_classes(classes, trains):
    scales = class_scales(jnp.asarray([9, 0, 0, 0, 0]), jnp.ones((2, C)))

    def loss(features):
        logits = scaled_logits(features, PROTOTYPES.T, scales, 5.0)
        return cross_entropy(logits, jnp.zeros(B, int), classes=classes)

    assert np.any(jax.grad(loss)(normal((B, D))) != 0) == trains


@pytest.mark.thorough
def test_normalised_vectors_have_length_one():
    np.testing.assert_allclose(jnp.linalg.norm(l2_normalise(normal((B, D))), axis=1), 1, rtol=1e-6)


@pytest.mark.thorough
def test_zero_vector_stays_zero_with_zero_gradient():
    value, gradient = jax.value_and_grad(lambda v: l2_normalise(v).sum())(jnp.zeros((2, D)))
    assert value == 0
    assert np.all(gradient == 0)


@pytest.mark.thorough
def test_vectors_shorter_than_epsilon_are_divided_by_epsilon():
    np.testing.assert_allclose(l2_normalise(jnp.asarray([[3e-13, 0.0]])), [[0.3, 0.0]], rtol=1e-6)
