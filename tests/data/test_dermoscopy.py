"""Fed-ISIC2019 as in its benchmark: colour constancy, class counts by centre, class weights, transforms."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd.data.augment import pipeline, prepare
from fedjax_pcdd.data.dermoscopy import Dermoscopy, Draws, colour_constancy, drawn_once, window_of
from fedjax_pcdd.losses.logit_adjustment import class_scales
from fedjax_pcdd.methods.method import Facts, class_weights
from fedjax_pcdd.training.presets import PAPERS

NEUTRAL = Draws(
    jnp.ones(()), jnp.zeros(()), jnp.zeros(2, bool), jnp.zeros(()), jnp.ones(()), jnp.zeros(()), jnp.zeros(2),
    jnp.zeros((), bool), jnp.zeros((8, 2)),
)  # fmt: skip
IMAGE = jnp.asarray(np.random.default_rng(0).integers(0, 255, (28, 28, 3), dtype=np.uint8))
SMALL = Dermoscopy(window=25)
CLASSES = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")


def test_colour_constancy_of_four_pixels():
    image = np.array([[[10, 20, 0], [20, 20, 0]], [[30, 40, 0], [40, 40, 0]]], np.uint8)
    red = ((10**6 + 20**6 + 30**6 + 40**6) / 4) ** (1 / 6)  # 32.76
    green = ((2 * 20**6 + 2 * 40**6) / 4) ** (1 / 6)  # 35.73
    length = np.hypot(red, green)
    expected = [[[10, 20], [20, 20]], [[30, 40], [40, 40]]] * np.array([length / red, length / green]) / np.sqrt(3)
    np.testing.assert_array_equal(colour_constancy(image)[..., :2], expected.astype(np.uint8))
    assert not colour_constancy(image)[..., 2].any()


def test_grey_light_changes_nothing():
    grey = np.repeat(np.arange(0, 250, 10, dtype=np.uint8).reshape(5, 5, 1), 3, axis=2)
    assert np.abs(colour_constancy(grey).astype(int) - grey).max() <= 1


def test_values_above_a_byte_are_clipped():
    image = np.full((8, 8, 3), 250, np.uint8)
    image[..., 2] = 0
    image[3, 3, 2] = 250  # one of 64 pixels, so that the norm of blue is 125
    corrected = colour_constancy(image)
    length = np.sqrt((250**2 + 250**2 + 125**2) / 3)  # 216.5, so that this pixel's blue would be 433
    assert corrected[3, 3].tolist() == [int(length), int(length), 255]
    assert (corrected[..., 2] > 0).sum() == 1


def counts(fold):
    """Class counts of a fold, [6, 8] by centre and class."""
    result = np.zeros((6, 8), int)
    with open(PAPERS / "expected/fed_isic2019_counts.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["fold"] == fold:
                result[int(row["centre"]), CLASSES.index(row["class"])] = int(row["count"])
    return result


def test_centres_and_classes_have_the_benchmarks_counts():
    assert counts("train").sum(1).tolist() == [9930, 3163, 2691, 1807, 655, 351]
    assert counts("test").sum(1).tolist() == [2483, 791, 672, 452, 164, 88]
    assert counts("train")[4].tolist() == [166, 349, 0, 0, 140, 0, 0, 0]


def test_class_weights_are_those_of_the_benchmark():
    train = jnp.asarray(counts("train"), float)
    facts = Facts(jnp.int32(4), train[4], train[4].sum(), train)
    pooled = [5.5813, 2.0472, 7.0204, 26.1194, 9.5369, 101.0707, 92.5224, 38.3443]
    np.testing.assert_allclose(class_weights(facts, "pooled"), pooled, atol=5e-5)
    np.testing.assert_allclose(class_weights(facts, "local")[:5], [655 / 166, 655 / 349, 0, 0, 655 / 140], rtol=1e-6)
    assert class_weights(facts, "none") is None


def test_phi_of_centre_4_follows_from_its_class_counts():
    train = jnp.asarray(counts("train"), float)
    phi = class_scales(train[4], train, function="identity", gamma="class")
    np.testing.assert_allclose(phi, [2.0275, 4.2626, 0, 0, 1.7099, 0, 0, 0], atol=5e-5)


@pytest.mark.thorough
def test_neutral_draws_give_a_window_of_the_image():
    np.testing.assert_array_equal(SMALL.apply(IMAGE, NEUTRAL), IMAGE[:25, :25])
    last_window = SMALL.apply(IMAGE, NEUTRAL._replace(corner=jnp.full(2, 0.999)))
    np.testing.assert_array_equal(last_window, IMAGE[3:, 3:])


@pytest.mark.thorough
def test_rows_and_columns_of_a_window_are_placed_by_draws_of_their_own():
    window = SMALL.apply(IMAGE, NEUTRAL._replace(corner=jnp.array([0.0, 0.999])))
    np.testing.assert_array_equal(window, IMAGE[:25, 3:])


@pytest.mark.thorough
def test_a_scale_enlarges_the_image():
    ramp = jnp.broadcast_to(jnp.arange(200, dtype=jnp.uint8)[:, None, None], (200, 200, 3))
    rows = Dermoscopy(window=180).apply(ramp, NEUTRAL._replace(scale=jnp.float32(2)))[:, 0, 0]
    np.testing.assert_array_equal(rows, np.arange(180) // 2)


@pytest.mark.thorough
def test_what_a_shear_moves_in_from_outside_is_mirrored_without_repeating_the_edge():
    image = np.random.default_rng(1).integers(0, 255, (29, 29, 3), dtype=np.uint8)
    sheared = Dermoscopy(window=29).apply(jnp.asarray(image), NEUTRAL._replace(shear=jnp.float32(np.pi / 4)))
    wide = np.pad(image, ((0, 0), (14, 14), (0, 0)), mode="reflect")
    np.testing.assert_array_equal(sheared, [row[28 - i : 57 - i] for i, row in enumerate(wide)])


@pytest.mark.thorough
def test_a_half_turn_is_both_flips():
    turned = Dermoscopy(window=28).apply(IMAGE, NEUTRAL._replace(rotation=jnp.float32(np.pi)))
    flipped = Dermoscopy(window=28).apply(IMAGE, NEUTRAL._replace(flip=jnp.ones(2, bool)))
    np.testing.assert_array_equal(flipped, IMAGE[::-1, ::-1])
    np.testing.assert_array_equal(turned, flipped)


@pytest.mark.thorough
def test_brightness_and_contrast_are_applied_to_bytes():
    bright = SMALL.apply(IMAGE, NEUTRAL._replace(gain=jnp.float32(1.1), offset=jnp.float32(-20)))
    expected = np.clip(np.round(np.float32(1.1) * np.array(IMAGE[:25, :25], np.float32) - 20), 0, 255)
    assert np.abs(np.array(bright, int) - expected).max() <= 1


@pytest.mark.thorough
def test_holes_are_squares_of_a_fourteenth_of_the_side():
    holed = Dermoscopy(window=200, holes=1).apply(
        jnp.full((224, 224, 3), 7, jnp.uint8), NEUTRAL._replace(holed=jnp.asarray(True), places=jnp.full((1, 2), 0.999))
    )
    assert (holed[-16:, -16:] == 0).all()
    assert int((holed == 7).all(-1).sum()) == 200 * 200 - 16 * 16


@pytest.mark.thorough
def test_each_transform_is_applied_with_probability_one_half():
    draws = jax.vmap(Dermoscopy(holes=5).draw)(jax.random.split(jax.random.key(0), 4000))
    scale, gain = draws.scale - 1, draws.gain - 1
    used = np.array([scale != 0, draws.rotation != 0, draws.shear != 0, gain != 0, draws.flip.any(1), draws.holed])
    np.testing.assert_allclose(used.mean(1), 0.5, atol=0.03)
    np.testing.assert_allclose(np.corrcoef(used), np.eye(6), atol=0.06)
    assert ((draws.offset != 0) == used[3]).all()
    assert np.mean(draws.flip.all(1)) == pytest.approx(1 / 6, abs=0.03)
    largest = [float(np.abs(x).max()) for x in (scale, draws.rotation, draws.shear, gain, draws.offset)]
    np.testing.assert_allclose(largest, [0.07, *np.deg2rad([50, 0.1]), 0.1, 0.15 * 255], rtol=0.01)
    assert draws.places.shape == (4000, 5, 2)  # every image with holes has the same number of them


def test_the_number_of_holes_is_drawn_once_for_a_seed():
    assert {drawn_once(200, seed).holes for seed in range(40)} == set(range(1, 9))
    assert drawn_once(200, 3) == drawn_once(200, 3)


@pytest.mark.thorough
def test_tests_see_the_central_window_and_training_random_ones():
    isic = pipeline("isic2019", True, (28, 28, 3), seed=1)
    assert isic.shape((28, 28, 3)) == (window_of(28), window_of(28), 3) == (25, 25, 3)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    evaluated = prepare(isic, IMAGE[None], None, train=False)
    np.testing.assert_allclose(evaluated[0], (np.array(IMAGE[1:26, 1:26]) / 255 - mean) / std, atol=1e-5)
    keys = jax.random.key(0), jax.random.key(1)
    augmented = [np.array(prepare(isic, IMAGE[None], key, train=True)) for key in keys]
    assert augmented[0].shape == evaluated.shape
    assert (augmented[0] != augmented[1]).any()
