"""The analyses against the golden vectors."""

import jax.numpy as jnp
import numpy as np
import pytest
from golden_vectors import cases

from fedjax_pcdd.analysis.angles import class_angles, pairwise_angles
from fedjax_pcdd.analysis.spectrum import class_eigenvalue_variance, correlation, eigenvalue_variance

RTOL = {"float64": 1e-9, "float32": 2e-5}


@pytest.fixture(params=["float64", "float32"])
def dtype(request):
    if request.param == "float64":
        request.getfixturevalue("x64")
    return request.param


@pytest.mark.parametrize("g", cases("angles"))
def test_pairwise_angles_agree_with_the_vectors(g, dtype):
    expected = g["out_angle_matrix"].copy()
    np.fill_diagonal(expected, 0)  # the file holds rounding there, up to 1.3e-6 degrees
    angles = pairwise_angles(jnp.asarray(g["in_W"], dtype))
    np.testing.assert_allclose(angles, expected, rtol=RTOL[dtype])


@pytest.mark.parametrize("group", ["existing", "missing", "all"])
@pytest.mark.parametrize("g", cases("angles"))
def test_mean_angles_agree_with_the_vectors(g, group, dtype):
    angles = class_angles(jnp.asarray(g["in_W"], dtype), jnp.asarray(g["in_present"]) > 0)
    np.testing.assert_allclose(getattr(angles, group), g[f"out_{group}"], rtol=RTOL[dtype])


@pytest.mark.parametrize("classes", [3, 10, 100])
def test_columns_of_a_simplex_stand_at_the_etf_angle(classes):
    simplex = jnp.eye(classes) - 1 / classes
    expected = np.degrees(np.arccos(-1 / (classes - 1)))
    np.testing.assert_allclose(class_angles(simplex, jnp.ones(classes, bool)).all, expected, rtol=2e-5)


def test_zero_vector_makes_no_nan_in_a_mean_angle():
    vectors = jnp.asarray([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    np.testing.assert_allclose(class_angles(vectors, jnp.asarray([True, True, True])).all, 90, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("g", cases("eig_variance"))
def test_eigenvalue_variance_agrees_with_the_vectors(g, dtype):
    eigenvalues, variance = eigenvalue_variance(g["in_z"].astype(dtype), int(g["par_topk"]))
    atol = RTOL[dtype] * g["out_eigs"].max()
    np.testing.assert_allclose(eigenvalues, g["out_eigs"], rtol=RTOL[dtype], atol=atol)
    np.testing.assert_allclose(variance, g["out_var_topk"], rtol=RTOL[dtype])


@pytest.mark.parametrize("g", cases("eig_variance"))
def test_unbiased_correlation_agrees_with_the_vectors(g):
    matrix = correlation(g["in_z"], unbiased=True)
    np.testing.assert_allclose(matrix, g["out_M_unbiased"], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("g", cases("eig_variance"))
def test_spread_of_all_eigenvalues_is_the_frobenius_norm_less_the_trace(g):
    samples, dimensions = g["in_z"].shape
    _, variance = eigenvalue_variance(g["in_z"], dimensions, unbiased=True)
    matrix = correlation(g["in_z"], unbiased=True)
    np.testing.assert_allclose(variance * samples, g["out_lemma_lhs"], rtol=1e-9)
    np.testing.assert_allclose(np.sum(matrix**2) - dimensions, g["out_lemma_rhs"], rtol=1e-9)


def test_printed_divisors_change_the_lemma_to_a_diagonal_of_n_over_n_minus_one():
    features = np.asarray([[0, 0], [1, 2], [2, 1]])
    _, variance = eigenvalue_variance(features)
    np.testing.assert_allclose(correlation(features), [[1.5, 0.75], [0.75, 1.5]])
    np.testing.assert_allclose(3 * variance, 5.625 - 2 * 1.5**2)


def test_constant_dimension_adds_a_zero_eigenvalue():
    features = np.random.default_rng(0).normal(size=(20, 3))
    eigenvalues, _ = eigenvalue_variance(features)
    extended, _ = eigenvalue_variance(np.column_stack([features, np.full(20, 0.1)]))
    np.testing.assert_allclose(extended, [*eigenvalues, 0], atol=1e-12)


def test_class_eigenvalue_variance_is_the_mean_over_classes_with_two_samples():
    features = np.random.default_rng(1).normal(size=(21, 4))
    labels = np.asarray([0] * 12 + [2] * 8 + [3])
    class_variances = [eigenvalue_variance(features[:12])[1], eigenvalue_variance(features[12:20])[1]]
    np.testing.assert_allclose(class_eigenvalue_variance(features, labels), np.mean(class_variances))
