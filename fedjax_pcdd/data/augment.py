"""Image processing inside the compiled step: crop, flip, rotation, then scaling and normalisation.

Order and constants are those of the papers' published code (table in docs/data.md). Images stay uint8 until
they are scaled, and the random transforms move whole pixels. Letters: B batch, H and W rows and columns.

The transforms are composed as index arithmetic, backwards from the result, so that the image is read once:
on a CPU core 0.16 ms (CIFAR10) or 0.42 ms (CIFAR100) for a batch of 100. Padding and slicing, one step after the
other, took 0.5 and 1.0 ms; one-hot products took 0.7 ms for the crop alone, selecting among shifts 5.6 ms.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.dermoscopy import drawn_once, window_of
from fedjax_pcdd.errors import UserError, shortened
from fedjax_pcdd.registry import Registry, from_outside


@dataclass(frozen=True)
class Pipeline:
    """A data set's path from stored images to the model's input; hashable, static in compiled code.

    Args:
      mean, std: of each channel in units of [0, 1]; a single value applies to all channels.
      crop: "none", or a window of the image's size, placed uniformly at random in the image with a border of
        `padding` pixels: "reflect" (mirrored without repeating the edge) or "zero".
      flip: mirror left to right with probability 1/2.
      rotate: largest angle in degrees; uniform in [-rotate, rotate], nearest pixel, zero fill.
      padding: width of the crop's border in pixels.
      codes: the stored integers are characters, which are passed to the model as they are.
      own: a function of one image [H, W, channels], as stored (uint8 or float32), and a key that returns another such
        image, applied last; with a `window`, its result has that many rows and columns.
      window: side of the central square that the model sees when `own` is not applied; 0 for the whole image.

    Raises:
      UserError: an unknown crop, a switch that is no boolean, constants that are not finite numbers, or pixels or
        degrees that cannot be.
    """

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    crop: str = "none"
    flip: bool = False
    rotate: float = 0.0
    padding: int = 4
    codes: bool = False
    own: Callable | None = None
    window: int = 0

    def __post_init__(self):
        for name in ("mean", "std"):
            values = getattr(self, name)
            if not isinstance(values, tuple | list) or not all(isinstance(value, Real) for value in values):
                raise UserError(f"takes a number for each channel, as (0.5,), not {shortened(values)}.", field=name)
            if not all(map(math.isfinite, values)):
                raise UserError("must be finite numbers: correct them.", field=name)
            object.__setattr__(self, name, tuple(value if isinstance(value, int) else float(value) for value in values))
        if not all(value > 0 for value in self.std):
            raise UserError("must be above 0, as images are divided by it.", field="std")
        for name in ("flip", "codes"):
            if not isinstance(switch := getattr(self, name), bool | np.bool_):
                raise UserError(f"takes True or False, not {shortened(switch)}.", field=name)
        if self.crop not in ("none", "reflect", "zero"):
            raise UserError(f"crop must be 'none', 'reflect' or 'zero', not {self.crop!r}.")
        for name in ("padding", "window"):
            if not isinstance(pixels := getattr(self, name), Integral) or pixels < 0:
                raise UserError(f"must be a number of pixels, 0 or more, not {shortened(pixels)}.", field=name)
        if not isinstance(self.rotate, Real) or not 0 <= self.rotate <= 180:
            raise UserError(f"must be an angle from 0 to 180 degrees, not {shortened(self.rotate)}.", field="rotate")

    @property
    def random(self) -> bool:
        """Whether training uses random transforms."""
        return self.moves or self.own is not None

    def shape(self, image_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of what the model sees of an image [H, W, channels]."""
        return (self.window, self.window, *image_shape[2:]) if self.window else image_shape

    @property
    def moves(self) -> bool:
        """Whether training crops, flips or rotates."""
        return self.crop != "none" or self.flip or self.rotate != 0


DOMAIN_PIPELINE = Pipeline(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
"""Private images of the tasks by domain: ImageNet's constants, no augmentation (FCCL)."""

_CIFAR100 = Pipeline((0.50708, 0.48655, 0.44092), (0.26733, 0.25644, 0.27615), crop="zero", flip=True, rotate=15.0)
_CUSTOMARY = {
    "cifar10": Pipeline((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2615), crop="reflect", flip=True),
    "cifar100": _CIFAR100,
    "cifar100_subset": _CIFAR100,
    "isic2019": Pipeline((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # further transforms: see `draws_once`
    "svhn": Pipeline((0.4376821, 0.4437697, 0.47280442), (0.19803012, 0.20101562, 0.19703614)),
}


class Draws(NamedTuple):
    """Random draws for each image."""

    offset: jax.Array  # [B, 2] rows and columns by which the crop window moves, in [-padding, padding]
    flip: jax.Array  # [B] booleans
    degrees: jax.Array  # [B] angles, counter-clockwise


AUGMENTATIONS: Registry[Callable] = Registry("augmentation", "augmentations")
"""Augmentations from outside by name: functions of one image and a key, as `Pipeline.own`."""


def stem(name: str) -> str:
    """A data set's name, without the folder and suffix of an npz file's path."""
    return Path(name).stem if name.endswith(".npz") else name


def draws_once(dataset_name: str, augment: bool = True) -> bool:
    """Whether the customary augmentation is drawn once for the whole data set, so that it depends on the seed."""
    return augment and stem(dataset_name) == "isic2019"


def customary(dataset_name: str) -> tuple[Pipeline, bool]:
    """What a data set's name decides: its pipeline, and `draws_once`."""
    return _CUSTOMARY.get(stem(dataset_name), Pipeline()), draws_once(dataset_name)


def pipeline(
    dataset_name: str, augment: bool, image_shape: tuple[int, int, int], *, text: bool = False, own: str | None = None,
    seed: int = 0,
) -> Pipeline:  # fmt: skip
    """The pipeline of a data set (table in docs/data.md); UserError if its images do not fit the constants.

    Args:
      dataset_name: its own name, as in `sources.DATASETS`; unknown ones are scaled to [0, 1] and not augmented.
      augment: False leaves the images as they are, as FedGELA's published code does on CIFAR10.
      image_shape: (H, W, channels).
      text: whether the data set is a text, whose codes are left as they are.
      own: name or import path of an augmentation from outside, which replaces the customary one.
      seed: for draws that are made once for the whole data set.
    """
    if text and own is not None:
        raise UserError("the codes of a text are not augmented: drop `augmentation`.")
    if own is not None and not augment:
        raise UserError(f"`augmentation={own}` needs `augment`, which is off: drop one of the two.")
    if text:
        return Pipeline(codes=True)
    usual, drawn = customary(dataset_name)
    plain = Pipeline(usual.mean, usual.std)
    height, width, channels = image_shape
    if len(plain.mean) not in (1, channels):
        expected = len(plain.mean)
        raise UserError(f"'{dataset_name}' is normalised with {expected} channels but has {channels}; rename it.")
    if own is not None:
        function = AUGMENTATIONS.find(own)
        if not callable(function):
            raise UserError(f"augmentation {own} must be a function of an image and a key.")
        return replace(plain, own=function)
    if drawn and height != width:
        raise UserError(f"images of {dataset_name} are square, not {height}x{width}: crop them, or rename it.")
    if drawn:
        window = window_of(height)
        return replace(plain, own=drawn_once(window, seed) if augment else None, window=window)
    return usual if augment else plain


def public_pipeline(name: str, side: int = 32) -> Pipeline:
    """The pipeline of public images, augmented like CIFAR-100 (FCCL); only CIFAR-100 keeps its own constants.

    `side` is that of the images in pixels; the crop's border is an eighth of it, 4 for the published 32.
    """
    constants = _CIFAR100 if customary(name)[0] == _CIFAR100 else DOMAIN_PIPELINE
    return replace(_CIFAR100, mean=constants.mean, std=constants.std, padding=side // 8)


def check_own(pipeline: Pipeline, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise a UserError unless the pipeline's constants and `own` function, if any, fit images [H, W, channels]."""
    for name, values in () if pipeline.codes else (("mean", pipeline.mean), ("std", pipeline.std)):
        if len(values) not in (1, shape[-1]):
            unfit = f"is for {len(values)} channels but the images have {shape[-1]}"
            raise UserError(f"of the pipeline {unfit}: give one for each.", field=name)
    height, width = shape[:2]
    if pipeline.crop == "reflect" and min(height, width) <= pipeline.padding:
        raise UserError(f"images of {height}x{width} are too small to be cropped; switch augmentation off.")
    if pipeline.window > min(height, width):
        raise UserError(f"of the pipeline is larger than images of {height}x{width}: lower it.", field="window")
    if pipeline.own is None:
        return
    name, wanted = getattr(pipeline.own, "__name__", "of your own"), (pipeline.shape(shape), jnp.dtype(dtype))
    with from_outside(f"augmentation {name} fails on an image of {dtype} {list(shape)} and a key"):
        out = jax.eval_shape(pipeline.own, jax.ShapeDtypeStruct(shape, dtype), jax.random.key(0))
    actual = f"{out.dtype} {list(out.shape)}" if isinstance(out, jax.ShapeDtypeStruct) else type(out).__name__
    if actual != f"{wanted[1]} {list(wanted[0])}":
        raise UserError(f"augmentation {name} must return an image of {wanted[1]} {list(wanted[0])}, not {actual}.")


def prepare(pipeline: Pipeline, images, key, *, train: bool, dtype=jnp.float32):
    """Turn stored images into a model's input; each image draws its own crop, flip and angle.

    Args:
      pipeline: static.
      images: [B, H, W, channels] uint8 or float32.
      key: consumed only if `train` and the pipeline is random; may be None otherwise.
      train: whether to augment.
      dtype: of the result [B, H, W, channels], H and W as in `Pipeline.shape`; rounding takes place once, at the
        end. A text stays uint8.
    """
    if pipeline.codes:
        return jnp.asarray(images)
    if train and pipeline.moves:
        draws = draw(pipeline, key, len(images))
        images = jax.vmap(lambda image, image_draws: transform(pipeline, image, image_draws))(images, draws)
    if train and pipeline.own is not None:
        if pipeline.moves:  # the keys of `draw` are those of positions 0, 1 and 2
            key = jax.random.fold_in(key, 2**32 - 1)
        # By position, so that the width of a batch, which padding may change, changes no draw.
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(images)))
        images = jax.vmap(pipeline.own)(images, keys)
    elif pipeline.window:
        top, left = ((side - pipeline.window) // 2 for side in images.shape[1:3])
        images = images[:, top : top + pipeline.window, left : left + pipeline.window]
    return normalise(pipeline, images, dtype)


def draw(pipeline: Pipeline, key, count: int) -> Draws:
    """Independent draws for `count` images, leaves [count, ...]; the same whether or not x64 is on."""
    crop_key, flip_key, angle_key = jax.random.split(key, 3)
    reach, widest = pipeline.padding, pipeline.rotate
    offset = jax.random.randint(crop_key, (count, 2), -reach, reach + 1, dtype=jnp.int32)
    flip = jax.random.bernoulli(flip_key, jnp.float32(0.5), (count,))
    return Draws(offset, flip, jax.random.uniform(angle_key, (count,), jnp.float32, -widest, widest))


def transform(pipeline: Pipeline, image, own: Draws):
    """Crop, flip and rotate ONE image [H, W, channels] as given by `own` (leaves without [B]); same dtype."""
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
    """Source pixels, nearest neighbours, of an image that is rotated counter-clockwise about its centre.

    In fixed point with 16 binary digits, a quarter faster than floats on a CPU. `row` [H, 1] and `column`
    [1, W] are integers, `degrees` is a scalar; returns rows and columns [H, W], some outside the image.
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
    """Scale images [..., channels] to [0, 1] if they are uint8, subtract the mean, divide by the deviation."""
    precision = jnp.promote_types(dtype, jnp.float32)
    scaled = jnp.asarray(images).astype(precision) / (255 if images.dtype == jnp.uint8 else 1)
    mean, std = (jnp.asarray(values, precision) for values in (pipeline.mean, pipeline.std))
    return ((scaled - mean) / std).astype(dtype)
