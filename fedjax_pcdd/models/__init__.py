"""Models: `build` makes one by its name, `MODELS` lists them."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.models import layers
from fedjax_pcdd.models.classifier import (
    Classifier,
    Outputs,
    Sizes,
    feature_dim,
    forward,
    initialise,
    sizes,
)
from fedjax_pcdd.models.cnn import fedrl_cnn, mcmahan_cnn, simple_cnn
from fedjax_pcdd.models.efficientnet import EfficientNet
from fedjax_pcdd.models.etf import etf_from, simplex_etf
from fedjax_pcdd.models.googlenet import GoogLeNet
from fedjax_pcdd.models.lstm import LSTM
from fedjax_pcdd.models.mlp import MLP
from fedjax_pcdd.models.mobilenet import MobileNet
from fedjax_pcdd.models.pair import Pair
from fedjax_pcdd.models.resnet import ResNet
from fedjax_pcdd.models.shufflenet import ShuffleNet
from fedjax_pcdd.models.wide_resnet import WideResNet
from fedjax_pcdd.registry import Registry

__all__ = [
    "MODELS",
    "Classifier",
    "Outputs",
    "Sizes",
    "build",
    "etf_from",
    "feature_dim",
    "forward",
    "initialise",
    "normalises",
    "simplex_etf",
    "sizes",
    "uses_batch_norm",
]


NORMS = (layers.BatchNorm, layers.GroupNorm, nn.BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm, nn.RMSNorm)
"""Modules that normalise what they are given."""


class _Family(NamedTuple):
    """A backbone by `backbone(norm, **types)`, the smallest image side (0: any input), one line; does it read text."""

    backbone: Callable[..., nn.Module]
    smallest: int
    description: str
    text: bool = False


_OWN = {
    "mlp": _Family(lambda norm, **types: MLP(**types), 0, "one hidden layer of 200, for inputs of any shape"),
    "simple_cnn": _Family(
        lambda norm, **types: simple_cnn(**types),
        16,
        "two 5x5 convolutions of 6 and 16 channels (MOON, FedRL)",
    ),
    "mcmahan_cnn": _Family(
        lambda norm, **types: mcmahan_cnn(**types), 4, "two 5x5 convolutions of 32 and 64 channels (FedAvg)"
    ),
    "fedrl_cnn": _Family(
        lambda norm, **types: fedrl_cnn(**types),
        16,
        "two 5x5 convolutions of 6 and 16 channels, one hidden layer (FedRL on MNIST)",
    ),
    "resnet10": _Family(
        lambda norm, **types: ResNet((1, 1, 1, 1), norm=norm, **types), 8, "ResNet10 for 32x32 images (FCCL)"
    ),
    "resnet12": _Family(
        lambda norm, **types: ResNet((2, 1, 1, 1), norm=norm, **types), 8, "ResNet12 for 32x32 images (FCCL)"
    ),
    "resnet18": _Family(
        lambda norm, **types: ResNet((2, 2, 2, 2), norm=norm, **types),
        8,
        "ResNet18 for 32x32 images (FedMR, FedGELA)",
    ),
    "resnet50": _Family(
        lambda norm, **types: ResNet((3, 4, 6, 3), bottleneck=True, norm=norm, **types),
        8,
        "ResNet50 for 32x32 images (FedRL on CIFAR-100)",
    ),
    "wrn28_10": _Family(
        lambda norm, **types: WideResNet(norm=norm, **types), 4, "WRN-28-10 with dropout 0.3 (FedMR on CIFAR-100)"
    ),
    "efficientnet_b0": _Family(
        lambda norm, **types: EfficientNet(norm=norm, **types),
        16,
        "EfficientNet-B0 for 32x32 images (FCCL)",
    ),
    "efficientnet_b0_isic": _Family(
        lambda norm, **types: EfficientNet(stem_stride=2, projection=640, norm=norm, **types),
        32,
        "EfficientNet-B0 for large images, with 640 features (FedMR on ISIC2019)",
    ),
    "mobilenet_v2": _Family(
        lambda norm, **types: MobileNet(norm=norm, **types), 8, "MobileNetV2 for 32x32 images (FCCL)"
    ),
    "googlenet": _Family(
        lambda norm, **types: GoogLeNet(norm=norm, **types), 4, "GoogLeNet with norms for 32x32 images (FCCL)"
    ),
    "shufflenet_g2": _Family(
        lambda norm, **types: ShuffleNet(norm=norm, **types), 8, "ShuffleNet in 2 groups for 32x32 images (FCCL)"
    ),
    "lstm": _Family(
        lambda norm, **types: LSTM(**types), 0, "embedding of 8, two LSTM layers of 256, for text (LEAF)", text=True
    ),
}

MODELS = {name: family.description for name, family in _OWN.items()}
"""Names of this package's models, each with one line that describes it."""

BACKBONES: Registry[Any] = Registry("model", "models", _OWN)
"""What makes a backbone, by name: of this package, or from outside a Flax module or a function that returns one."""


def build(
    name: str,
    *,
    num_classes: int,
    image_shape: tuple[int, ...],
    text: bool = False,
    norm: str = "batch",
    dtype: Any = None,
    param_dtype: Any = jnp.float32,
    precision: str | None = None,
) -> Classifier:
    """A model with a linear head and no neck; `model.clone(neck=2, head=False)` changes that.

    Args:
      name: a key of MODELS, a registered name, or the import path of a backbone, as "my.package:Net".
      num_classes: C.
      image_shape: (H, W, channels); any shape for "mlp"; (T, 1, 1) for text.
      text: whether inputs are character codes in [0, C), not images.
      norm: "batch" or "group", for models that normalise.
      dtype: of the computation, as jnp.bfloat16; None computes in the type of the parameters.
      param_dtype: of the parameters.
      precision: of products of float32 operands, as for `jax.default_matmul_precision`.

    Raises:
      UserError: for an unknown name or norm, images that are too small for the model, or text in their place.

    >>> build("mlp", num_classes=10, image_shape=(28, 28, 1)).num_classes
    10
    """
    layers.norm(norm)
    family, types = BACKBONES.find(name), {"dtype": dtype, "param_dtype": param_dtype}
    if not isinstance(family, _Family):
        backbone = _from_outside(name, family, {"num_classes": num_classes, "norm": norm, **types})
    elif not _fits(family, image_shape, text):
        raise UserError(_misfit(name, image_shape, text))
    else:
        backbone = family.backbone(norm, **({"vocabulary": num_classes} if text else {}), **types)
    return Classifier(backbone, num_classes, **types, norm=norm, precision=precision)


def _from_outside(name: str, part: Any, known: dict[str, Any]) -> nn.Module:
    """A backbone `__call__(x, train=False)` from images to features, made with those of the arguments that it takes."""
    if not isinstance(part, nn.Module):
        taken = inspect.signature(part).parameters if callable(part) else {}
        part = part(**{key: value for key, value in known.items() if key in taken}) if callable(part) else part
    if not isinstance(part, nn.Module):
        raise UserError(
            f"model {name} must be a Flax module or a function that returns one, not {type(part).__name__}."
        )
    return part


def smallest_side(name: str) -> int:
    """Side in pixels of the smallest images that a known model takes; 0 for any."""
    return _OWN[name].smallest if name in _OWN else 0


def uses_batch_norm(model: nn.Module, image_shape: tuple[int, ...]) -> bool:
    """Whether the model keeps running statistics."""
    return "batch_stats" in _traced(model, image_shape)[0]


def normalises(model: nn.Module, image_shape: tuple[int, ...]) -> bool:
    """Whether the backbone has normalisation layers, over batches, groups, layers or instances: ours or Flax's."""
    model = model.private if isinstance(model, Pair) else model
    return any(issubclass(module, NORMS) for module in _traced(getattr(model, "backbone", model), image_shape)[1])


@functools.lru_cache(maxsize=64)
def _traced(model: nn.Module, image_shape: tuple[int, ...]) -> tuple[frozenset[str], frozenset[type]]:
    """The collections of a module's variables, and the types of the modules that it calls; nothing is computed."""
    types: set[type] = set()

    def note(call, args, kwargs, context):
        types.add(type(context.module))
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        image = jnp.zeros((1, *image_shape))
        variables = jax.eval_shape(lambda: model.init(jax.random.key(0), image, train=False))
    return frozenset(variables), frozenset(types)


def _fits(family: _Family, image_shape: tuple[int, ...], text: bool) -> bool:
    if family.text or text:
        return family.text and text
    return not family.smallest or (len(image_shape) == 3 and min(image_shape[:2]) >= family.smallest)


def _misfit(name: str, image_shape: tuple[int, ...], text: bool) -> str:
    side, reads_text = _OWN[name].smallest, _OWN[name].text
    given = "x".join(map(str, image_shape))
    fitting = " or ".join(other for other, family in _OWN.items() if _fits(family, image_shape, text))
    if text != reads_text:
        kind, other = ("text", "images") if reads_text else ("images", "text")
        return f"Model '{name}' reads {kind}, not {other}: take {fitting}."
    return f"Model '{name}' needs images of at least {side}x{side} pixels, not {given}: take {fitting}."
