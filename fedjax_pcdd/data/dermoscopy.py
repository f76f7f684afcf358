"""Fed-ISIC2019 as its benchmark prepares and augments it (FLamby, Ogier du Terrail et al., NeurIPS 2022).

Each of these with probability 1/2: a scale in [0.93, 1.07], a rotation by up to 50 degrees, brightness by up to 0.15
and contrast by up to 0.1, a flip (left to right, upside down, or both), a shear of 0.1 degrees, holes of 16 x 16
pixels; and always a window of 200 x 200, random for training and central for tests. The number of holes is drawn
once for the data set, from 1 to 8: the reference passes it as the maximum per image, which its library also uses as
the minimum. The geometric transforms are combined into one map from pixels of the result to pixels of the image, with
nearest neighbours and mirrored edges (ours; the reference interpolates after each). Lengths are for images of
224 x 224 and scale with the side.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SIDE, WINDOW, HOLE, MOST_HOLES = 224, 200, 16, 8
SCALE, ROTATION, SHEAR, BRIGHTNESS, CONTRAST = 0.07, 50.0, 0.1, 0.15, 0.1


def colour_constancy(image: np.ndarray, power: float = 6.0) -> np.ndarray:
    """Colour-correct an image [H, W, 3] uint8 to white light, by the shades-of-grey method.

    Channel c is multiplied by |v| / (sqrt(3) v_c), where v_c is the mean of x^power over its pixels, to the power
    1 / power. Values above 255 become 255 (ours; in the reference they wrap around to 0). A black channel stays black.
    """
    light = np.mean(image.astype(float) ** power, axis=(0, 1)) ** (1 / power)
    gain = np.divide(np.linalg.norm(light), math.sqrt(3) * light, out=np.zeros(3), where=light > 0)
    return np.minimum(image * gain, 255).astype(np.uint8)


def window_of(side: int) -> int:
    """Side of the window that a model sees in images with this side.

    >>> window_of(224)
    200
    """
    return round(side * WINDOW / SIDE)


class Draws(NamedTuple):
    """Random draws for one image; a transform that is not applied has its neutral value."""

    scale: jax.Array
    rotation: jax.Array  # radians
    flip: jax.Array  # [2] bool, of rows and of columns
    shear: jax.Array  # radians
    gain: jax.Array  # factor on pixels
    offset: jax.Array  # added to them
    corner: jax.Array  # [2] of the window, as a share of its range
    holed: jax.Array  # whether there are holes
    places: jax.Array  # [holes, 2] of their first row and column, as a share of their range


@dataclass(frozen=True)
class Dermoscopy:
    """The training transforms as a function of one image [S, S, channels] uint8 and a key, for `Pipeline.own`.

    Args:
      window: side of the result.
      holes: number of holes in an image that has any.
    """

    window: int = WINDOW
    holes: int = MOST_HOLES

    def __call__(self, image: jax.Array, key: jax.Array) -> jax.Array:
        """Draw and apply the transforms; the result is [window, window, channels]."""
        return self.apply(image, self.draw(key))

    def draw(self, key: jax.Array) -> Draws:
        """Independent draws for one image."""
        use_key, values_key, corner_key, places_key = jax.random.split(key, 4)
        used = jax.random.bernoulli(use_key, 0.5, (6,))
        drawn = jax.random.uniform(values_key, (6,), jnp.float32, -1.0, 1.0)
        scale, turn, shear, gain, offset, kind = jnp.where(used[jnp.array([0, 1, 2, 3, 3, 4])], drawn, 0.0)
        flips = jnp.array([kind < 1 / 3, kind > -1 / 3]) & used[4]  # a third each: rows only, both, columns only
        return Draws(
            1 + SCALE * scale, jnp.deg2rad(ROTATION * turn), flips, jnp.deg2rad(SHEAR * shear), 1 + CONTRAST * gain,
            255 * BRIGHTNESS * offset, jax.random.uniform(corner_key, (2,)),
            used[5], jax.random.uniform(places_key, (self.holes, 2)),
        )  # fmt: skip

    def apply(self, image: jax.Array, own: Draws) -> jax.Array:
        """Transform one image as given by the draws `own`; uint8."""
        side, rows = image.shape[0], jnp.arange(self.window, dtype=jnp.float32)
        scaled = jnp.floor(side * own.scale)
        y, x = (rows + jnp.floor(share * (scaled - self.window + 1)) for share in own.corner)
        middle = (scaled - 1) / 2
        y, x = jnp.broadcast_arrays((y - middle)[:, None], (x - middle)[None, :])
        x = x - jnp.tan(own.shear) * y
        y, x = (jnp.where(flip, -z, z) for flip, z in zip(own.flip, (y, x), strict=True))
        cos, sin = jnp.cos(own.rotation), jnp.sin(own.rotation)
        y, x = (_mirrored(z + middle, scaled - 1) for z in (cos * y + sin * x, cos * x - sin * y))
        y, x = (jnp.clip(jnp.round((z + 0.5) / own.scale - 0.5), 0, side - 1).astype(jnp.int32) for z in (y, x))
        pixels = image[y, x].astype(jnp.float32)
        pixels = jnp.clip(jnp.round(own.gain * pixels + own.offset), 0, 255).astype(jnp.uint8)
        return jnp.where(self._hole(own, side)[..., None], jnp.uint8(0), pixels)

    def _hole(self, own: Draws, side: int) -> jax.Array:
        """Which pixels of the result lie in a hole, [window, window]."""
        size = max(1, round(side * HOLE / SIDE))
        start = jnp.floor(own.places * (self.window - size + 1))[:, :, None]
        within = (jnp.arange(self.window) >= start) & (jnp.arange(self.window) < start + size)  # [holes, 2, window]
        return (within[:, 0, :, None] & within[:, 1, None, :]).any(0) & own.holed


def drawn_once(window: int, seed: int) -> Dermoscopy:
    """The transforms of a run, with its number of holes, 1 to 8, drawn from the seed."""
    return Dermoscopy(window, int(np.random.default_rng([seed, MOST_HOLES]).integers(1, MOST_HOLES + 1)))


def _mirrored(z: jax.Array, last: jax.Array) -> jax.Array:
    """Coordinates in [0, last], mirrored at the edges without repeating them."""
    return last - jnp.abs(last - jnp.mod(z, 2 * last))
