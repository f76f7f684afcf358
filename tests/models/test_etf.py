"""Sparse equiangular frames (FedLoGe's SSE-C); plain ones are tested with FedGELA and by golden vectors."""

import jax
import numpy as np
import pytest

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.models.etf import draw_sparse_etf, etf_from, separation, sparse_etf

DIM, CLASSES = 16, 5


def sparse_start(seed=0, sparsity=0.6):
    generator = np.random.default_rng(seed)
    frame = etf_from(generator.uniform(size=(DIM, CLASSES)))
    frame.flat[generator.permutation(frame.size)[: int(sparsity * frame.size)]] = 0
    return frame


@pytest.mark.parametrize("limit", [0.99999, 0.2])  # with the smaller one some cosines are clamped
def test_gradient_of_the_separation_is_that_of_its_value(limit):
    vectors, step = np.random.default_rng(1).normal(size=(DIM, CLASSES)), 1e-6
    numeric = np.zeros_like(vectors)
    for index in np.ndindex(vectors.shape):
        up, down = vectors.copy(), vectors.copy()
        up[index], down[index] = vectors[index] + step, vectors[index] - step
        numeric[index] = (separation(up, 0.1, limit)[0] - separation(down, 0.1, limit)[0]) / (2 * step)
    np.testing.assert_allclose(separation(vectors, 0.1, limit)[1], numeric, 1e-5, 1e-8)


def test_zeros_stay_and_columns_move_apart():
    start = sparse_start()
    values = sparse_etf(start, length=0.1, steps=500)
    np.testing.assert_array_equal(values == 0, start == 0)
    assert separation(values, 0.1)[0] < separation(start, 0.1)[0]


@pytest.mark.thorough
def test_a_drawn_frame_is_sparse_and_short_with_wide_angles():
    frame = np.asarray(draw_sparse_etf(jax.random.key(3), DIM, CLASSES, sparsity=0.6, length=0.1))
    assert (frame == 0).sum() >= int(0.6 * DIM * CLASSES)
    np.testing.assert_allclose(np.linalg.norm(frame, axis=0), 0.1, rtol=0.2)
    units = frame / np.linalg.norm(frame, axis=0)
    cosines = (units.T @ units)[~np.eye(CLASSES, dtype=bool)]
    assert cosines.max() < 0.01


@pytest.mark.thorough
def test_a_drawn_frame_depends_on_its_key_alone():
    draws = [draw_sparse_etf(jax.random.key(k), DIM, CLASSES, sparsity=0.6, length=0.1) for k in (3, 3, 4)]
    np.testing.assert_array_equal(draws[0], draws[1])
    assert np.any(draws[0] != draws[2])


def test_too_few_features_are_refused():
    with pytest.raises(UserError, match="5 classes needs 5 or more features, not 4"):
        draw_sparse_etf(jax.random.key(0), 4, CLASSES, sparsity=0.6, length=0.1)


def test_too_many_zeros_are_refused():
    with pytest.raises(UserError, match="choose a smaller one"):
        draw_sparse_etf(jax.random.key(0), DIM, CLASSES, sparsity=0.99, length=0.1)
