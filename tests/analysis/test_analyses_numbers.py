"""Pure functions behind the papers' figures: angles of existing and missing classes, spectra, curves over E_W."""

import jax.numpy as jnp
import numpy as np
import pytest
from golden_vectors import cases

from fedjax_pcdd.analysis.angles import class_angles, etf_angle, pairwise_angles
from fedjax_pcdd.analysis.burden import Burden, pareto
from fedjax_pcdd.analysis.domain_figures import balanced, fluctuation
from fedjax_pcdd.analysis.pictures import draw_bilateral
from fedjax_pcdd.analysis.spectrum import (
    class_eigenvalue_variance,
    class_spectra,
    correlation,
    eigenvalue_variance,
    mean_spectrum,
)


@pytest.mark.parametrize("g", cases("angles"))
def test_class_angles_agree_with_the_vectors(g, x64):
    angles = class_angles(jnp.asarray(g["in_W"]), jnp.asarray(g["in_present"]) > 0)
    expected = [g["out_existing"], g["out_missing"], g["out_all"]]
    np.testing.assert_allclose([angles.existing, angles.missing, angles.all], expected, rtol=1e-9)


@pytest.mark.parametrize("g", cases("angles"))
def test_the_mean_over_all_pairs_is_made_up_of_the_three_kinds_of_pairs(g, x64):
    present = g["in_present"] > 0
    angles = class_angles(jnp.asarray(g["in_W"]), jnp.asarray(present))
    existing, missing = present.sum(), (~present).sum()
    pairs = np.array([existing * (existing - 1) / 2, missing * (missing - 1) / 2, existing * missing])
    np.testing.assert_allclose(np.array(angles[:3]) @ pairs / pairs.sum(), angles.all, rtol=1e-12)


@pytest.mark.thorough
def test_between_is_the_mean_over_pairs_of_an_existing_and_a_missing_class():
    vectors = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)))
    angles = class_angles(vectors, jnp.asarray([True, False, False, True]))
    crossing = np.asarray(pairwise_angles(vectors))[np.ix_([0, 3], [1, 2])]
    np.testing.assert_allclose(angles.between, crossing.mean(), rtol=1e-6)


@pytest.mark.thorough
def test_unknown_rows_are_in_no_pair():
    vectors = jnp.asarray(np.random.default_rng(1).normal(size=(5, 3)))
    present, known = jnp.asarray([True, True, True, False, False]), jnp.asarray([True, True, False, True, False])
    angles = class_angles(vectors, present, known)
    assert angles.missing == -1
    np.testing.assert_allclose(angles.existing, pairwise_angles(vectors)[0, 1], rtol=1e-6)


@pytest.mark.thorough
def test_a_single_class_has_no_angle():
    angles = class_angles(jnp.eye(2), jnp.asarray([True, False]))
    assert (angles.existing, angles.missing, angles.between) == (-1, -1, 90)


@pytest.mark.thorough
@pytest.mark.parametrize("classes", [3, 10, 100])
def test_etf_angle_is_that_of_a_centred_basis(classes):
    simplex = jnp.eye(classes) - 1 / classes
    np.testing.assert_allclose(class_angles(simplex, jnp.ones(classes, bool)).all, etf_angle(classes), rtol=2e-5)


@pytest.mark.parametrize("shape", [(40, 12), (12, 40)])
def test_eigenvalues_are_those_of_the_correlation_matrix(shape):
    features = np.random.default_rng(2).normal(size=shape)
    expected = np.linalg.eigvalsh(correlation(features))[::-1]
    np.testing.assert_allclose(eigenvalue_variance(features)[0], expected, atol=1e-10)


def test_mean_spectrum_is_the_mean_over_batches():
    batches = np.random.default_rng(3).normal(size=(3, 20, 8))
    eigenvalues, variance = mean_spectrum(batches, top=5)
    spectra = [eigenvalue_variance(batch, 5) for batch in batches]
    np.testing.assert_allclose(eigenvalues, np.mean([values[:5] for values, _ in spectra], axis=0))
    np.testing.assert_allclose(variance, np.mean([value for _, value in spectra]))


def test_collapsed_features_have_the_larger_variance():
    random = np.random.default_rng(4)
    spread, line = random.normal(size=(128, 64)), random.normal(size=(128, 1)) + 0.1 * random.normal(size=(128, 64))
    assert eigenvalue_variance(line)[1] > 5 * eigenvalue_variance(spread)[1]


def test_class_spectra_are_those_of_each_class_alone():
    features = np.random.default_rng(5).normal(size=(31, 6))
    labels = np.asarray([0] * 18 + [2] * 12 + [3])
    spectra = class_spectra(features, labels, 5, top=4)
    np.testing.assert_allclose(spectra[2], eigenvalue_variance(features[18:30])[0][:4])
    assert np.isnan(spectra[[1, 3, 4]]).all()
    class_variances = [eigenvalue_variance(features[labels == c], 4)[1] for c in (0, 2)]
    np.testing.assert_allclose(class_eigenvalue_variance(features, labels, 4), np.mean(class_variances))


@pytest.mark.thorough
def test_bilateral_curves_are_drawn(tmp_path):
    curves = np.array([[1, 50, 0, 90, 0], [10, 25, 2, 75, 1]])
    draw_bilateral({"digits": curves}, {"digits": (40, 80)}, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_of_methods_with_equal_time_the_most_accurate_is_on_the_pareto_front():
    assert [burden.label for burden in pareto([Burden("a", 1, 2, 0.4), Burden("b", 1, 2, 0.5)])] == ["b"]


def test_fluctuation_is_over_the_last_twenty_changes():
    assert fluctuation(np.array([9.0, 0.0, *[1.0] * 20])) == 1 / 20
    assert fluctuation(np.array([0.0, 1.0, 3.0])) == 1.5
    assert np.isnan(fluctuation(np.array([1.0])))


def test_a_balanced_sample_has_equally_large_classes_or_all_of_a_smaller_one():
    labels = np.repeat([0, 2, 1], [30, 4, 20])
    rows = balanced(labels, 5)
    assert labels[rows].tolist() == [0] * 5 + [1] * 5 + [2] * 4
    assert len(np.unique(rows)) == len(rows)
    assert rows[:5].tolist() != [0, 1, 2, 3, 4]
