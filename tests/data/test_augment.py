"""Augmentation and normalisation against plain numpy."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd.data import augment
from fedjax_pcdd.data.augment import Draws, Pipeline
from fedjax_pcdd.errors import UserError

prepare = jax.jit(augment.prepare, static_argnames=("pipeline", "train", "dtype"))
draw = jax.jit(augment.draw, static_argnums=(0, 2))
CIFAR100 = augment.pipeline("cifar100", True, (32, 32, 3))


def random_pixels(*shape, seed=0):
    return np.random.default_rng(seed).integers(1, 256, shape, dtype=np.uint8)


transform = jax.jit(augment.transform, static_argnums=0)


def transformed(pipeline, image, offset=(0, 0), flip=False, degrees=0.0):
    draws = Draws(jnp.array(offset, jnp.int32), jnp.array(flip), jnp.float32(degrees))
    return np.asarray(transform(pipeline, image, draws))


def cropped(image, offset, border):
    widths = ((4, 4), (4, 4), (0, 0))
    padded = np.pad(image, widths, mode="reflect" if border == "reflect" else "constant")
    top, left = offset[0] + 4, offset[1] + 4
    return padded[top : top + image.shape[0], left : left + image.shape[1]]


def turned(image, degrees):
    """Pixel by pixel: the nearest source pixel of a counter-clockwise turn about the centre, 0 outside."""
    height, width, _ = image.shape
    angle, result = np.deg2rad(degrees), np.zeros_like(image)
    for i in range(height):
        for j in range(width):
            y, x = i + 0.5 - height / 2, j + 0.5 - width / 2
            row = int(np.floor(np.sin(angle) * x + np.cos(angle) * y + height / 2))
            column = int(np.floor(np.cos(angle) * x - np.sin(angle) * y + width / 2))
            if 0 <= row < height and 0 <= column < width:
                result[i, j] = image[row, column]
    return result


@pytest.mark.parametrize("border", ["reflect", "zero"])
@pytest.mark.parametrize("offset", [(0, 0), (-4, -4), (4, 4), (-3, 2), (1, -4)])
def test_crop_is_a_window_of_the_padded_image(border, offset):
    image = random_pixels(9, 7, 3)
    result = transformed(Pipeline(crop=border), image, offset)
    np.testing.assert_array_equal(result, cropped(image, offset, border))


@pytest.mark.parametrize("flip", [False, True])
def test_flip_mirrors_left_and_right(flip):
    image = random_pixels(6, 5, 1)
    np.testing.assert_array_equal(transformed(Pipeline(flip=True), image, flip=flip), image[:, ::-1] if flip else image)


@pytest.mark.parametrize("shape", [(32, 32, 3), (8, 8, 1), (9, 12, 2)])
@pytest.mark.parametrize("degrees", [0.0, 14.9, -15.0, 7.3, -3.1])
def test_rotation_takes_the_nearest_pixel_and_zeros_outside(shape, degrees):
    image = random_pixels(*shape)
    result = transformed(Pipeline(rotate=15.0), image, degrees=degrees)
    np.testing.assert_array_equal(result, turned(image, degrees))


def test_quarter_turn_is_exact():
    image = random_pixels(8, 8, 3)
    np.testing.assert_array_equal(transformed(Pipeline(rotate=90.0), image, degrees=90.0), np.rot90(image))


@pytest.mark.parametrize("border", ["reflect", "zero"])
def test_the_order_is_crop_then_flip_then_rotation(border):
    image, offset, degrees = random_pixels(12, 12, 3), (3, -4), 12.5
    pipeline = Pipeline(crop=border, flip=True, rotate=15.0)
    expected = turned(cropped(image, offset, border)[:, ::-1], degrees)
    np.testing.assert_array_equal(transformed(pipeline, image, offset, True, degrees), expected)


def test_normalisation_scales_then_standardises(x64):
    pipeline = augment.pipeline("cifar10", False, (4, 4, 3))
    images = random_pixels(5, 4, 4, 3)
    result = augment.prepare(pipeline, images, None, train=True, dtype=jnp.float64)
    expected = (images / 255 - np.array([0.4914, 0.4822, 0.4465])) / np.array([0.2470, 0.2435, 0.2615])
    np.testing.assert_allclose(result, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16])
def test_the_result_has_the_requested_dtype(x64, dtype):
    images = random_pixels(2, 32, 32, 3)
    assert prepare(CIFAR100, images, jax.random.key(0), train=True, dtype=dtype).dtype == dtype


@pytest.mark.parametrize("name", ["svhn", "mnist", "fashion_mnist", "unheard_of"])
def test_data_sets_without_a_recipe_are_not_augmented(name):
    assert not augment.pipeline(name, True, (28, 28, 3)).random


@pytest.mark.parametrize(
    ("name", "expected"),
    [("cifar10", ("reflect", True, 0.0)), ("cifar100", ("zero", True, 15.0)), ("svhn", ("none", False, 0.0))],
)
def test_recipes_are_those_of_the_papers(name, expected):
    pipeline = augment.pipeline(name, True, (32, 32, 3))
    assert (pipeline.crop, pipeline.flip, pipeline.rotate) == expected


def test_the_constants_are_those_of_the_table_in_the_documentation():
    lines = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8").splitlines()
    of_table = [line.split(" | ") for line in lines if re.match(r"\| `\w+`.*\d\.\d+, ", line)]
    constants = {
        name: tuple(tuple(map(float, text.strip(" |").split(", "))) for text in (mean, std))
        for names, _, mean, std in of_table
        for name in re.findall(r"`(\w+)`", names)
    }
    assert constants == {name: (own.mean, own.std) for name, own in augment._CUSTOMARY.items()}


def test_evaluation_only_scales_and_normalises():
    images = random_pixels(3, 32, 32, 3)
    result = prepare(CIFAR100, images, None, train=False)
    expected = (images / 255 - np.array(CIFAR100.mean)) / np.array(CIFAR100.std)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_a_pipeline_without_random_transforms_needs_no_key():
    images = random_pixels(3, 28, 28, 1)
    result = augment.prepare(Pipeline(), images, None, train=True)
    np.testing.assert_allclose(result, images.astype(np.float32) / 255, rtol=1e-6)


@pytest.mark.thorough
def test_same_key_gives_the_same_images():
    images = random_pixels(8, 32, 32, 3)
    first, second = (prepare(CIFAR100, images, jax.random.key(7), train=True) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_another_key_gives_other_images():
    images = random_pixels(8, 32, 32, 3)
    first, second = (prepare(CIFAR100, images, jax.random.key(k), train=True) for k in (7, 8))
    assert (first != second).any(axis=(1, 2, 3)).all()


def test_equal_images_in_a_batch_are_augmented_differently():
    images = np.repeat(random_pixels(1, 32, 32, 3), 8, axis=0)
    result = np.asarray(prepare(CIFAR100, images, jax.random.key(0), train=True))
    assert len(np.unique(result.reshape(8, -1), axis=0)) == 8


def test_an_own_augmentation_gets_a_different_key_for_each_image():
    def noise(image, key):
        return jax.random.bits(key, image.shape, jnp.uint8)

    result = np.asarray(prepare(Pipeline(own=noise), random_pixels(8, 4, 4, 3), jax.random.key(0), train=True))
    assert len(np.unique(result.reshape(8, -1), axis=0)) == 8


@pytest.mark.thorough
def test_draws_cover_their_ranges_evenly():
    draws = draw(CIFAR100, jax.random.key(1), 9000)
    counts = np.stack([np.bincount(np.asarray(draws.offset)[:, axis] + 4, minlength=9) for axis in (0, 1)])
    assert counts.shape == (2, 9)
    assert np.abs(counts - 1000).max() < 150
    assert abs(float(draws.flip.mean()) - 0.5) < 0.03
    assert -15 <= float(draws.degrees.min()) < -14.9 < 14.9 < float(draws.degrees.max()) <= 15
    columns = np.column_stack([draws.offset, draws.flip, draws.degrees])
    assert np.abs(np.corrcoef(columns.T) - np.eye(4)).max() < 0.05  # drawn independently


@pytest.mark.thorough
def test_draws_do_not_depend_on_x64():
    narrow = draw(CIFAR100, jax.random.key(3), 50)
    with jax.enable_x64(True):
        wide = draw(CIFAR100, jax.random.key(3), 50)
    jax.tree.map(np.testing.assert_array_equal, narrow, wide)


@pytest.mark.thorough
def test_lanes_equal_single_batches():
    images, keys = random_pixels(2, 8, 32, 32, 3), jax.random.split(jax.random.key(5), 2)
    lanes = jax.jit(jax.vmap(lambda x, key: augment.prepare(CIFAR100, x, key, train=True)))(images, keys)
    single = np.stack([prepare(CIFAR100, x, key, train=True) for x, key in zip(images, keys, strict=True)])
    np.testing.assert_allclose(lanes, single, rtol=1e-6, atol=1e-6)


def test_pipeline_is_static():
    assert hash(CIFAR100) == hash(augment.pipeline("cifar100", True, (32, 32, 3)))
    assert dataclasses.replace(CIFAR100, flip=False) != CIFAR100


def test_wrong_channels_are_refused():
    with pytest.raises(UserError, match="cifar10"):
        augment.pipeline("cifar10", True, (32, 32, 1))


def test_images_too_small_to_crop_are_refused():
    with pytest.raises(UserError, match="too small"):
        augment.check_own(augment.pipeline("cifar10", True, (4, 32, 3)), (4, 32, 3), np.uint8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding": -4}, "padding must be a number of pixels"),
        ({"padding": 1.5}, "padding must be a number of pixels"),
        ({"window": "8"}, "window must be a number of pixels"),
        ({"rotate": float("nan")}, "rotate must be an angle"),
        ({"rotate": -5.0}, "rotate must be an angle"),
    ],
)
def test_pixels_and_degrees_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Pipeline(**options)


def test_a_window_larger_than_the_images_is_refused():
    with pytest.raises(UserError, match="window of the pipeline is larger than images of 8x8"):
        augment.check_own(Pipeline(window=16), (8, 8, 1), np.uint8)


def test_dermoscopy_needs_square_images():
    with pytest.raises(UserError, match="images of isic2019 are square, not 40x24"):
        augment.pipeline("isic2019", False, (40, 24, 3))


def test_constants_may_be_numbers_of_numpy():
    mean = np.float32([0.1, 0.2])
    of_numpy, of_python = Pipeline(mean=tuple(mean), std=list(mean)), mean.tolist()
    assert repr(of_numpy) == repr(Pipeline(mean=of_python, std=of_python))
    assert Pipeline(rotate=np.float32(15)) == Pipeline(rotate=15)


def test_cifar100_keeps_its_constants_whatever_the_path_of_its_file():
    assert augment.public_pipeline("/data/cifar100_subset.npz") == augment.public_pipeline("cifar100_subset")


def test_unknown_crop_is_refused():
    with pytest.raises(UserError, match="crop"):
        Pipeline(crop="mirror")


def test_an_own_augmentation_draws_by_keys_that_no_crop_flip_or_angle_has():
    images, key = jnp.zeros((3, 4, 4, 1)), jax.random.key(0)

    def drawn(pipeline):
        return np.asarray(prepare(pipeline, images, key, train=True))

    def noise(image, key):
        return jax.random.uniform(key, image.shape)

    of_draws = jax.vmap(noise)(images, jax.random.split(key, 3))
    np.testing.assert_array_equal(drawn(Pipeline(own=noise)), of_draws)  # without crop, flip or angle: never drawn
    assert not np.isclose(drawn(Pipeline(own=noise, flip=True)), of_draws).any()


def test_padding_changes_no_draw_of_an_own_augmentation():
    def noisy(image, key):
        return image + jax.random.normal(key, image.shape)

    images, pipeline = jnp.zeros((128, 4, 4, 1)), Pipeline(own=noisy)
    wide, narrow = (prepare(pipeline, images[:width], jax.random.key(0), train=True) for width in (128, 64))
    np.testing.assert_array_equal(wide[:64], narrow)
