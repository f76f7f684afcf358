"""Images for tasks by domain: resizing as published, and domains made from scikit-learn's digits.

Letters: n images, S side in pixels. The shifts work on floats in [0, 1], their lengths scale with S / 16, and their
random numbers come from a constant seed: a domain's images are the same on every machine. The federated seed only
decides which of them are private.
"""

from collections.abc import Callable

import numpy as np
import scipy  # loads its submodules (a third of a second) only when they are used
from PIL import Image

from fedjax_pcdd.data import sources
from fedjax_pcdd.errors import UserError

Shift = Callable[[np.ndarray, np.random.Generator], np.ndarray]

_SLOTS = 10


def resize(images: np.ndarray, side: int) -> np.ndarray:
    """Stretch to S x S by Pillow's bilinear filter, as torchvision does; grey is replicated to three channels.

    [n, H, W, 1 or 3] uint8 become [n, S, S, 3]; UserError for other types and numbers of channels.
    """
    count, height, width, channels = images.shape
    if images.dtype != np.uint8:
        raise UserError(
            f"Images must be uint8 in [0, 255], not {images.dtype}: store them so (times 255, if in [0, 1])."
        )
    if channels not in (1, 3):
        raise UserError(f"Images need 1 or 3 channels, not {channels}: convert them to grey or RGB.")
    if (height, width) != (side, side):
        stretched = np.empty((count, side, side, channels), np.uint8)
        for i, image in enumerate(images):
            picture = Image.fromarray(image[..., 0] if channels == 1 else image)
            pixels = np.asarray(picture.resize((side, side), Image.Resampling.BILINEAR))
            stretched[i] = pixels.reshape(side, side, channels)
        images = stretched
    return np.broadcast_to(images, (*images.shape[:3], 3)).copy()


def windows(images: np.ndarray, side: int, random: np.random.Generator) -> np.ndarray:
    """Cut a random window from each image, [n, S, S, channels]; UserError if images are smaller."""
    count, height, width, _ = images.shape
    if min(height, width) < side:
        raise UserError(f"Images of {height}x{width} are too small for windows of {side}x{side}; use a smaller side.")
    tops = random.integers(0, height - side + 1, count)
    lefts = random.integers(0, width - side + 1, count)
    corners = zip(images, tops, lefts, strict=True)
    return np.stack([image[top : top + side, left : left + side] for image, top, left in corners])


def _rotated(x, random):
    """Rotate by 40 degrees and shrink by a fifth, so that the corners stay in the image."""
    angle = np.deg2rad(40)
    return _warped(x, 1.25 * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]))


def _warped(x, matrix):
    """Read each pixel [n, S, S] at `matrix` [2, 2] times its offset from the centre: bilinear, zero fill."""
    middle = np.full(2, (x.shape[1] - 1) / 2)
    return np.stack([scipy.ndimage.affine_transform(image, matrix, middle - matrix @ middle, order=1) for image in x])


def _blurred(x, random):
    """White, blurred digits on a background that fades from one colour to another."""
    unit = x.shape[1] / 16
    ink = scipy.ndimage.gaussian_filter(x, (0, unit, unit))[..., None]
    left, right = random.uniform(0, 0.7, (2, len(x), 1, 1, 3))
    ramp = np.linspace(0, 1, x.shape[2])[:, None]
    background = left * (1 - ramp) + right * ramp
    return background + (1 - background) * ink


def _outlined(x, random):
    size = 1 + 2 * max(1, round(x.shape[1] / 16))
    return scipy.ndimage.morphological_gradient(x, size=(1, size, size))


def _noisy(x, random):
    """Make a fifth of the pixels black or white."""
    chance = random.uniform(size=x.shape)
    return np.where(chance < 0.1, 0, np.where(chance > 0.9, 1, x))


def _tinted(x, random):
    """Draw the digits in one random colour on another."""
    ink, paper = random.uniform(0, 1, (2, len(x), 1, 1, 3))
    return paper + (ink - paper) * x[..., None]


DOMAIN_SHIFTS: dict[str, Shift] = {
    "plain": lambda x, random: x,
    "inverted": lambda x, random: 1 - x,
    "rotated": _rotated,
    "blurred": _blurred,
}
"""The private domains of `digits_domains`."""

PUBLIC_SHIFTS: dict[str, Shift] = {
    "sheared": lambda x, random: _warped(x, np.array([[1, 0], [0.5, 1]])),
    "mirrored": lambda x, random: x[:, :, ::-1],
    "outlined": _outlined,
    "noisy": _noisy,
    "tinted": _tinted,
}
"""The shifts of the unlabelled `digits_public` images; no private domain looks like these."""


def shifted_digits(name: str, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Make a private domain from its own tenth of the digits for training and another tenth for tests.

    Returns x_train [n, S, S, 3] uint8, y_train [n], x_test [m, S, S, 3] uint8, y_test [m].
    """
    position = list(DOMAIN_SHIFTS).index(name)
    images, labels, slots = digit_slots()
    train, test = slots == 2 * position, slots == 2 * position + 1
    x_train, x_test = (
        _shifted(DOMAIN_SHIFTS[name], images[part], side=side, seed=seed)
        for seed, part in enumerate((train, test), 2 * position)
    )
    return x_train, labels[train], x_test, labels[test]


def public_digits(side: int) -> np.ndarray:
    """The last two tenths of the digits, all of them under each public shift in turn: [n, S, S, 3] uint8."""
    images, _, slots = digit_slots()
    public_images = images[slots >= 2 * len(DOMAIN_SHIFTS)]
    shifts = enumerate(PUBLIC_SHIFTS.values(), _SLOTS)
    return np.concatenate([_shifted(shift, public_images, side=side, seed=seed) for seed, shift in shifts])


def public_digit_labels() -> np.ndarray:
    """Labels [n] of the `public_digits`, in [0, 10)."""
    _, labels, slots = digit_slots()
    return np.tile(labels[slots >= 2 * len(DOMAIN_SHIFTS)], len(PUBLIC_SHIFTS))


def digit_slots() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All digits [1797, 8, 8, 1] uint8, labels [1797], and which tenth [1797] of [0, 10) each belongs to.

    The images of a class are dealt out in turn, which spreads each writer, whose digits are adjacent, over all tenths.
    """
    data = sources.digits()
    labels = np.concatenate([data.y_train, data.y_test])
    return np.concatenate([data.x_train, data.x_test]), labels, sources.ranks(labels) % _SLOTS


def _shifted(shift: Shift, images: np.ndarray, *, side: int, seed: int) -> np.ndarray:
    """Resize images and apply a shift, whose grey or colour floats [n, S, S(, 3)] become [n, S, S, 3] uint8."""
    grey = resize(images, side)[..., 0] / 255
    pixels = shift(grey, np.random.default_rng(seed))
    pixels = pixels if pixels.ndim == 4 else pixels[..., None]
    rounded = np.rint(255 * np.clip(pixels, 0, 1)).astype(np.uint8)
    return np.broadcast_to(rounded, (*rounded.shape[:3], 3)).copy()
