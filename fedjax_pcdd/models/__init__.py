"""Models: `build` makes a model by its name, `MODELS` lists the names."""

import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.models import layers
from fedjax_pcdd.models.classifier import Classifier, Outputs, Sizes, feature_dim, forward, initialise, sizes
from fedjax_pcdd.models.cnn import fedrl_cnn, femnist_cnn, mcmahan_cnn, simple_cnn
from fedjax_pcdd.models.efficientnet import EfficientNet, flamby_efficientnet
from fedjax_pcdd.models.etf import etf_from, simplex_etf
from fedjax_pcdd.models.googlenet import GoogLeNet
from fedjax_pcdd.models.linen_modules import spelled
from fedjax_pcdd.models.lstm import LSTM
from fedjax_pcdd.models.mlp import MLP
from fedjax_pcdd.models.mobilenet import MobileNet
from fedjax_pcdd.models.nnx_modules import NnxBackbone, abstract, keeps_statistics, nnx_norms
from fedjax_pcdd.models.own_modules import adapted
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
"""Modules that normalise their inputs."""


class _Family(NamedTuple):
    """A backbone factory, its smallest image side (0: any input), a description; whether it reads text."""

    backbone: Callable[..., nn.Module]
    smallest: int
    description: str
    text: bool = False


_OWN = {
    "mlp": _Family(MLP, 0, "one hidden layer of 200, for inputs of any shape"),
    "simple_cnn": _Family(simple_cnn, 16, "two 5x5 convolutions of 6 and 16 channels (MOON, FedRL)"),
    "mcmahan_cnn": _Family(mcmahan_cnn, 4, "two 5x5 convolutions of 32 and 64 channels (FedAvg)"),
    "fedrl_cnn": _Family(fedrl_cnn, 16, "two 5x5 convolutions of 6 and 16 channels, one hidden layer (FedRL on MNIST)"),
    "femnist_cnn": _Family(femnist_cnn, 4, "two 5x5 convolutions of 32 and 64 channels (LEAF on FEMNIST)"),
    "resnet8": _Family(partial(ResNet, (1, 1, 1), width=16), 4, "ResNet8 of 16 to 64 channels"),
    "resnet8_stride2": _Family(
        partial(ResNet, (1, 1, 1), width=16, stem_stride=2), 8, "ResNet8 with a stem of stride 2, which a CPU can train"
    ),
    "resnet10": _Family(partial(ResNet, (1, 1, 1, 1), kernel_init="uniform"), 8, "ResNet10 for 32x32 images (FCCL)"),
    "resnet12": _Family(partial(ResNet, (2, 1, 1, 1), kernel_init="uniform"), 8, "ResNet12 for 32x32 images (FCCL)"),
    "resnet18": _Family(partial(ResNet, (2, 2, 2, 2)), 8, "ResNet18 for 32x32 images (FedMR, FedGELA)"),
    "resnet50": _Family(
        partial(ResNet, (3, 4, 6, 3), bottleneck=True), 8, "ResNet50 for 32x32 images (FedRL on CIFAR-100)"
    ),
    "wrn28_10": _Family(WideResNet, 4, "WRN-28-10 with dropout 0.3 (FedMR on CIFAR-100)"),
    "efficientnet_b0": _Family(
        partial(EfficientNet, last=None, dropout=0.2, kernel_init="uniform"),
        16,
        "EfficientNet-B0 for 32x32 images, with 320 features (FCCL)",
    ),
    "efficientnet_b0_1280": _Family(EfficientNet, 16, "EfficientNet-B0 for 32x32 images, with 1280 features"),
    "efficientnet_b0_isic": _Family(
        partial(EfficientNet, stem_stride=2, projection=640),
        32,
        "EfficientNet-B0 for large images, with 640 features (FedMR on ISIC2019)",
    ),
    "efficientnet_b0_flamby": _Family(
        flamby_efficientnet, 32, "EfficientNet-B0 for large images, with 1280 features (FLamby on Fed-ISIC2019)"
    ),
    "mobilenet_v2": _Family(MobileNet, 8, "MobileNetV2 for 32x32 images (FCCL)"),
    "googlenet": _Family(GoogLeNet, 4, "GoogLeNet with norms for 32x32 images (FCCL)"),
    "shufflenet_g2": _Family(ShuffleNet, 8, "ShuffleNet in 2 groups for 32x32 images (FCCL)"),
    "lstm": _Family(LSTM, 0, "embedding of 8, two LSTM layers of 256, for text (LEAF)", text=True),
}

MODELS = {name: family.description for name, family in _OWN.items()}
"""Names of this package's models, each with one line that describes it."""

BACKBONES: Registry[Any] = Registry("model", "models", _OWN)
"""Backbones by name: those of this package, and from outside Flax modules or functions that return one."""


def build(
    model: Any,
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
      model: a key of MODELS, a registered name, or the import path of a module, such as "my.package:Net"; or a Flax
        module itself, Linen or NNX, or a class or function that returns one: a backbone, or a whole classifier that
        ends with a dense layer.
      num_classes: C.
      image_shape: (H, W, channels); any shape for "mlp"; (T, 1, 1) for text.
      text: whether inputs are character codes in [0, C), not images.
      norm: "batch", "group" or "slow_batch" (epsilon and momentum of TensorFlow's), for models that normalise.
      dtype: of the computation, for example jnp.bfloat16; None computes in the dtype of the parameters.
      param_dtype: of the parameters.
      precision: of products of float32 operands, as for `jax.default_matmul_precision`.

    Raises:
      UserError: an unknown name or norm, images that are too small for the model, text instead of images or images
        instead of text, or something that is not a module.

    >>> build("mlp", num_classes=10, image_shape=(28, 28, 1)).num_classes
    10
    """
    layers.norm(norm)
    types = {"dtype": dtype, "param_dtype": param_dtype}
    common = types | {"norm": norm, "precision": precision}
    family = BACKBONES.find(model) if isinstance(model, str) else model
    if not isinstance(family, _Family):
        arguments = {"num_classes": num_classes, "image_shape": tuple(image_shape), "norm": norm, **types}
        name = model if isinstance(model, str) else getattr(model, "__name__", type(model).__name__)
        backbone, head = adapted(family, name, arguments, num_classes, tuple(image_shape))
        return Classifier(backbone, num_classes, head_bias=head is None or head.use_bias, own_head=head, **common)
    if not _fits(family, image_shape, text):
        raise UserError(_misfit(model, image_shape, text))
    accepted = inspect.signature(family.backbone).parameters
    kind = {name: value for name, value in (("norm", norm), ("vocabulary", num_classes)) if name in accepted}
    return Classifier(family.backbone(**kind, **types), num_classes, **common)


def with_uniform_kernels(model: Classifier) -> Classifier:
    """The model with uniform initial kernels, if the network has a choice, as in all networks of the FCCL paper."""
    backbone: Any = model.backbone
    return model.clone(backbone=backbone.clone(kernel_init="uniform")) if hasattr(backbone, "kernel_init") else model


def smallest_side(name: str) -> int:
    """Side in pixels of the smallest images that a known model takes; 0 for any."""
    return _OWN[name].smallest if name in _OWN else 0


def uses_batch_norm(model: nn.Module, image_shape: tuple[int, ...]) -> bool:
    """Whether the model keeps running statistics."""
    return "batch_stats" in _traced(model, image_shape)[0]


def normalises(model: nn.Module, image_shape: tuple[int, ...]) -> bool:
    """Whether the backbone has normalisation layers: ours or Flax's, or variables like theirs."""
    model = model.private if isinstance(model, Pair) else model
    backbone = getattr(model, "backbone", model)
    variables, norms = _traced(backbone, image_shape)
    names = {path[-1] for path in flatten_dict(variables.get("params", {}))}
    statistics = keeps_statistics(backbone) if isinstance(backbone, NnxBackbone) else "batch_stats" in variables
    return statistics or "scale" in names or bool(norms)


def normalisation_params(model: nn.Module, image_shape: tuple[int, ...]) -> tuple[tuple[str, ...], ...]:
    """Paths in `variables["params"]` of the parameters of all normalisation layers, such as scale and bias."""
    variables, norms = _traced(model, image_shape)
    leaves = flatten_dict(variables["params"])
    # Where a transformation such as nn.remat wraps a norm, the norm inside has the path (), the wrapper the real one.
    return tuple(path for path in sorted(leaves) if any(norm and path[: len(norm)] == norm for norm in norms))


def is_own(model: Any) -> bool:
    """Whether a model, a name or an object, is the user's."""
    if isinstance(model, str):
        return model not in _OWN
    return not isinstance(getattr(model, "backbone", None), layers.Typed)


def forget() -> None:
    """Forget what was traced of modules, as it does not follow a change of an object or of a global that they read."""
    _traced.cache_clear()
    abstract.cache_clear()
    initialise.clear_cache()  # pyright: ignore[reportAttributeAccessIssue]


@functools.lru_cache(maxsize=64)
def _traced(model: nn.Module, image_shape: tuple[int, ...]) -> tuple[dict[str, Any], frozenset[Any]]:
    """Shapes of a module's variables, and paths of its normalisation layers; nothing is computed."""
    norms: set[Any] = set()

    def note(call, args, kwargs, context):
        if isinstance(context.module, NORMS):
            norms.add(context.module.path)
        if isinstance(context.module, NnxBackbone):
            norms.update(context.module.path + path for path in nnx_norms(context.module))
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        image = jnp.zeros((1, *image_shape))
        variables: Any = jax.eval_shape(lambda: model.init(jax.random.key(0), image, **spelled(model)))
    return dict(variables), frozenset(norms)


def _fits(family: _Family, image_shape: tuple[int, ...], text: bool) -> bool:
    if family.text or text:
        return family.text and text
    return not family.smallest or (len(image_shape) == 3 and min(image_shape[:2]) >= family.smallest)


def _misfit(name: str, image_shape: tuple[int, ...], text: bool) -> str:
    side, size = _OWN[name].smallest, "x".join(map(str, image_shape))
    fitting = " or ".join(other for other, family in _OWN.items() if _fits(family, image_shape, text))
    if text != _OWN[name].text:
        kind, other = ("images", "text") if text else ("text", "images")
        return f"Model '{name}' reads {kind}, not {other}: take {fitting}."
    return f"Model '{name}' needs images of at least {side}x{side} pixels, not {size}: take {fitting}."
