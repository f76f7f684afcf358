"""What happens to images inside the compiled step: crop, flip, rotation, then scaling and normalisation.

Order and constants are those of the papers' published code (table in docs/data.md). Images stay uint8 until
they are scaled, and the random part moves whole pixels. Letters: B batch, H and W rows and columns.

The transforms are composed as index arithmetic, backwards from the result, so that the image is read once:
on a CPU core 0.16 ms (CIFAR10) or 0.42 ms (CIFAR100) a batch of 100. Padding, slicing and one step after the
other took 0.5 and 1.0 ms; one-hot products took 0.7 ms for the crop alone, selecting among shifts 5.6 ms.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_pcdd.data.sources import spec
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.registry import Registry


@dataclass(frozen=True)
class Pipeline:
    """A data set's path from stored images to the model's input; hashable, static in compiled code.

    Args:
      mean: of each channel in units of [0, 1]; one value serves all channels.
      std: of each channel, as `mean`.
      crop: "none", or a window of the image's size, placed uniformly at random in the image with a border of
        `padding` pixels: "reflect" (mirrored without repeating the edge) or "zero".
      flip: mirror left to right with probability 1/2.
      rotate: largest angle in degrees; uniform in [-rotate, rotate], nearest pixel, zero fill.
      padding: width of the crop's border in pixels.
      codes: the stored integers are characters, which go to the model as they are.
      own: a function of one image [H, W, channels] uint8 and a key that gives another such image, applied last.

    Raises:
      UserError: an unknown crop.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    crop: str = "none"
    flip: bool = False
    rotate: float = 0.0
    padding: int = 4
    codes: bool = False
    own: Callable | None = None

    def __post_init__(self):
        if self.crop not in ("none", "reflect", "zero"):
            raise UserError(f"crop must be 'none', 'reflect' or 'zero', not {self.crop!r}.")

    @property
    def random(self) -> bool:
        """Whether training draws anything."""
        return self.moves or self.own is not None

    @property
    def moves(self) -> bool:
        """Whether training crops, flips or rotates."""
        return self.crop != "none" or self.flip or self.rotate != 0


DOMAIN_PIPELINE = Pipeline(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""Private images of the tasks by domain: ImageNet's constants, no augmentation (FCCL)."""


class Draws(NamedTuple):
    """What chance decides for each image.

    Args:
      offset: [B, 2] rows and columns by which the crop window moves, in [-padding, padding].
      flip: [B] booleans.
      degrees: [B] angles, counter-clockwise.
    """

    offset: jax.Array
    flip: jax.Array
    degrees: jax.Array


AUGMENTATIONS: Registry[Callable] = Registry("augmentation", "augmentations")
"""Functions from outside of one image and a key, by name, as `Pipeline.own`."""


def pipeline(
    dataset_name: str, augment: bool, image_shape: tuple[int, int, int], *, text: bool = False, own: str | None = None
) -> Pipeline:
    """The pipeline of a data set (table in docs/data.md).

    Args:
      dataset_name: as in `sources.DATASETS`; unknown ones are scaled to [0, 1] and not augmented.
      augment: False leaves the images as they are, as FedGELA's published code does on CIFAR10.
      image_shape: (H, W, channels).
      text: whether the data set is a text, whose codes nothing is done to.
      own: an augmentation from outside in place of what is customary, by its name or import path.

    Raises:
      UserError: the images do not suit the data set's constants.
    """
    if text:
        return Pipeline(codes=True)
    facts = spec(dataset_name)
    height, width, channels = image_shape
    if len(facts.mean) not in (1, channels):
        wanted = len(facts.mean)
        raise UserError(f"'{dataset_name}' is normalised with {wanted} channels but has {channels}; rename it.")
    if own is not None:
        return Pipeline(facts.mean, facts.std, own=AUGMENTATIONS.find(own))
    recipes = facts.augmentation if augment else ()
    crop = next((name.removeprefix("crop_") for name in recipes if name.startswith("crop_")), "none")
    made = Pipeline(facts.mean, facts.std, crop, flip="flip" in recipes, rotate=15.0 if "rotate" in recipes else 0.0)
    if crop == "reflect" and min(height, width) <= made.padding:
        raise UserError(f"images of {height}x{width} are too small to be cropped; switch augmentation off.")
    return made


def public_pipeline(name: str, side: int = 32) -> Pipeline:
    """The pipeline of public images, augmented as CIFAR-100 is (FCCL).

    Args:
      name: of the public data set; CIFAR-100 keeps its own constants, all others have ImageNet's.
      side: of the images in pixels; the crop's border is an eighth of it, 4 for the published 32.
    """
    facts = spec(name) if name.startswith("cifar100") else DOMAIN_PIPELINE
    return Pipeline(facts.mean, facts.std, crop="zero", flip=True, rotate=15.0, padding=side // 8)


def prepare(pipeline: Pipeline, images, key, *, train: bool, dtype=jnp.float32):
    """Turn stored images into a model's input; each image draws its own crop, flip and angle.

    Args:
      pipeline: static.
      images: [B, H, W, channels] uint8; `vmap` lifts it to lanes.
      key: consumed only if `train` and the pipeline is random; may else be None.
      train: whether to augment.
      dtype: of the result; half precisions are rounded once, at the end.

    Returns:
      [B, H, W, channels] of `dtype`; a text stays uint8.
    """
    if pipeline.codes:
        return jnp.asarray(images)
    if train and pipeline.moves:
        chosen = draw(pipeline, key, len(images))
        images = jax.vmap(lambda image, own: transform(pipeline, image, own))(images, chosen)
    if train and pipeline.own is not None:
        keys = jax.random.split(jax.random.fold_in(key, len(images)), len(images))
        images = jax.vmap(pipeline.own)(images, keys).astype(jnp.uint8)
    return normalise(pipeline, images, dtype)


def draw(pipeline: Pipeline, key, count: int) -> Draws:
    """Independent draws for `count` images, leaves [count, ...]; the same whether or not x64 is on."""
    crop_key, flip_key, angle_key = jax.random.split(key, 3)
    reach, widest = pipeline.padding, pipeline.rotate
    return Draws(
        jax.random.randint(crop_key, (count, 2), -reach, reach + 1, dtype=jnp.int32),
        jax.random.bernoulli(flip_key, jnp.float32(0.5), (count,)),
        jax.random.uniform(angle_key, (count,), jnp.float32, -widest, widest),
    )


def transform(pipeline: Pipeline, image, own: Draws):
    """Crop, flip, rotate ONE image [H, W, channels] as `own` (its leaves have no [B]) says; same dtype."""
    height, width, channels = image.shape
    row = jnp.arange(height, dtype=jnp.int32)[:, None]
    column = jnp.arange(width, dtype=jnp.int32)[None, :]
    inside = jnp.ones((height, width), bool)
    if pipeline.rotate:
        row, column = _rotated(row, column, own.degrees, height, width)
        inside = _within(row, height) & _within(column, width)
    if pipeline.flip:
        column = jnp.where(own.flip, width - 1 - column, column)
    if pipeline.crop != "none":
        row, column = row + own.offset[0], column + own.offset[1]
    if pipeline.crop == "reflect":
        row, column = _reflected(row, height), _reflected(column, width)
    if pipeline.crop == "zero":
        inside = inside & _within(row, height) & _within(column, width)
    pixels = image.reshape(-1, channels).at[row * width + column].get(mode="clip")
    return jnp.where(inside[..., None], pixels, jnp.zeros_like(pixels))


def _rotated(row, column, degrees, height: int, width: int):
    """Where the pixels of an image rotated counter-clockwise about its centre come from: nearest pixels.

    In fixed point with 16 binary digits, a quarter faster than floats on a CPU. `row` [H, 1] and `column`
    [1, W] are integers, `degrees` is a scalar; gives rows and columns [H, W], some outside the image.
    """
    angle = degrees * (math.pi / 180)
    cos = jnp.round(65536 * jnp.cos(angle)).astype(jnp.int32)
    sin = jnp.round(65536 * jnp.sin(angle)).astype(jnp.int32)
    y, x = 2 * row - (height - 1), 2 * column - (width - 1)
    return (sin * x + cos * y + (height << 16)) >> 17, (cos * x - sin * y + (width << 16)) >> 17


def _within(index, size: int):
    return (index >= 0) & (index < size)


def _reflected(index, size: int):
    """Mirror indices at the borders without repeating the edge; |excess| < size."""
    last = size - 1
    return last - jnp.abs(last - jnp.abs(index))


def normalise(pipeline: Pipeline, images, dtype=jnp.float32):
    """Scale uint8 images [..., channels] to [0, 1], subtract the mean, divide by the deviation."""
    precision = jnp.promote_types(dtype, jnp.float32)
    scaled = jnp.asarray(images).astype(precision) / 255
    mean, std = (jnp.asarray(values, precision) for values in (pipeline.mean, pipeline.std))
    return ((scaled - mean) / std).astype(dtype)
