"""A model: backbone, neck and head, with functions to initialise, run and measure it.

Letters: B batch, D feature width, C classes. Image shapes are (H, W, channels), or what the backbone accepts.
"""

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_pcdd.models.convolution_table import Choices, choosing
from fedjax_pcdd.models.layers import BatchNorm, Linear, Typed
from fedjax_pcdd.models.linen_modules import OwnHead, in_this_engine, spelled
from fedjax_pcdd.trees import size

Variables = dict[str, Any]


class Outputs(NamedTuple):
    """Outputs of a model, at least float32.

    Attributes:
      features: [B, D], input of the head.
      logits: [B, C], or None if the model has no trained head.
    """

    features: jax.Array
    logits: Any


class Sizes(NamedTuple):
    """Numbers of scalars.

    Attributes:
      params: trainable ones.
      full: these, running means and variances, and one counter per batch-norm layer: what the papers count.
      features: D.
      head: trainable ones of the head.
    """

    params: int
    full: int
    features: int
    head: int


class Classifier(Typed):
    """Backbone [B, D'], then `neck` linear layers, then a linear head.

    Its parameters are {"backbone": ..., "neck": ..., "feature_norm": ..., "head": ...}, without parts that it lacks.

    Attributes:
      backbone: a Linen module that returns [B, D'], called with the arguments of `linen_modules.spelled`.
      num_classes: C.
      neck: 0, 1 or 2 linear layers with a ReLU between them but not at the end.
      neck_width: D, outputs of the neck's last layer; None for as many as the backbone has.
      feature_norm: whether batch norm is applied to the features before the head.
      head: whether the model has a trained head.
      head_bias: whether that head has a bias.
      own_head: the backbone's own last layer, which the head replaces; None if there is none.
      norm: "batch" or "group", for models built beside this one, in case its backbone has no norm layers to show it.
      precision: of products of float32 operands in backbone and neck, and of their gradients, as for
        `jax.default_matmul_precision`; None for that of the surrounding context, which the head always uses.
      convolutions: forms of the convolutions; None for those of the packaged table.
      dtype: of the computation, except for the head, which reads at least float32; None promotes.
    """

    backbone: nn.Module
    num_classes: int
    neck: int = 0
    neck_width: int | None = None
    feature_norm: bool = False
    head: bool = True
    head_bias: bool = True
    own_head: OwnHead | None = None
    norm: str = "batch"
    precision: str | None = None
    convolutions: Choices | None = None

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool, mask: jax.Array | None = None) -> Outputs:
        """Runs [B, ...] inputs; mask [B] is 1 for valid samples, which alone enter batch statistics."""
        own_head = self.own_head
        cut = (*self.path, "backbone", *own_head.path) if own_head and own_head.path else ()
        precision = nullcontext() if self.precision is None else jax.default_matmul_precision(self.precision)
        with precision, choosing(self.convolutions), in_this_engine(mask, cut):
            features = self.backbone(x, **spelled(self.backbone, train, mask))
            if self.neck:
                features = Neck(self.neck, self.neck_width, name="neck", **self.types)(features)
        if self.feature_norm:
            features = BatchNorm(name="feature_norm", **self.types)(features, train=train, mask=mask)
        features = features.astype(jnp.promote_types(features.dtype, jnp.float32))
        if not self.head:
            return Outputs(features, None)
        inits = (own_head.kernel_init, own_head.bias_init) if own_head else ()
        head = Linear(self.num_classes, self.head_bias, *inits, param_dtype=self.param_dtype, name="head")
        return Outputs(features, self.kept(head(features)))


class Neck(Typed):
    """Linear layers with ReLU between them: [B, D] to [B, width], or to [B, D] if `width` is None."""

    layers: int
    width: int | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(self.layers):
            last = i == self.layers - 1
            width = self.width if last and self.width else x.shape[-1]
            x = Linear(width, name=f"fc{i + 1}", **self.types)(x)
            x = self.kept(x if last else nn.relu(x))
        return x


@functools.partial(jax.jit, static_argnames=("model", "image_shape"))
def initialise(model: Classifier, key: jax.Array, image_shape: tuple[int, ...]) -> Variables:
    """Fresh variables: "params", "batch_stats" if the model has batch norm, and any other collections of the model."""
    return model.init(key, jnp.zeros((1, *image_shape)), train=False)  # pyright: ignore[reportReturnType]


def forward(
    model: Classifier,
    variables: Variables,
    x: jax.Array,
    *,
    train: bool,
    mask: jax.Array | None = None,
    key: jax.Array | None = None,
    mutable: Sequence[str] = (),
) -> tuple[Outputs, Variables]:
    """Runs the model.

    Args:
      variables: as returned by `initialise`.
      x: [B, ...] inputs.
      train: whether batch norm uses the batch's statistics and dropout is on.
      mask: [B], 1 for valid samples, which alone enter batch statistics; None for all.
      key: for dropout.
      mutable: further collections that the model may write.

    Returns:
      The outputs, and new values of all collections but the parameters, as {"batch_stats": ...}; {} without training.
    """
    # Flax draws from "params" if a user-defined layer requests a stream of another name.
    rngs = None if key is None else {"dropout": key, "params": jax.random.fold_in(key, 1)}
    changing = [*mutable, *(name for name in variables if train and name != "params")]
    return model.apply(variables, x, train=train, mask=mask, rngs=rngs, mutable=changing)  # pyright: ignore[reportReturnType]


def layers(
    model: Classifier, variables: Variables, x: jax.Array, **how: Any
) -> tuple[tuple[jax.Array, ...], Outputs, Variables]:
    """Runs the model as `forward` does, with its keyword arguments, and returns the output of each layer, too.

    A layer is a parametrised operation (in a residual network a stage) with its activation and the pooling that
    directly follows. Backbones and necks record them by `self.sow("intermediates", "layers", x)`, which has no effect
    unless they are requested here.

    Returns:
      The layers' outputs [B, ...], first to last, the logits being the last; and the two results of `forward`.
    """
    outputs, state = forward(model, variables, x, **how, mutable=["intermediates"])
    sown = state.pop("intermediates", {})
    parts = (sown.get("backbone", {}), sown.get("neck", {}), sown)
    return tuple(layer for part in parts for layer in part.get("layers", ())), outputs, state


def apply_head(params: Variables, features: jax.Array) -> jax.Array:
    """Logits [B, C] for features [B, D] by a head's parameters, "kernel" [D, C] and, if it has one, "bias" [C]."""
    logits = features @ params["kernel"]
    return logits + params["bias"] if "bias" in params else logits


def feature_dim(model: Classifier, image_shape: tuple[int, ...]) -> int:
    """D; nothing is run."""
    return _shapes(model, image_shape)[0].features.shape[-1]


def sizes(model: Classifier, image_shape: tuple[int, ...]) -> Sizes:
    """Count the model's scalars; nothing is run."""
    outputs, variables = _shapes(model, image_shape)
    statistics, params = variables.get("batch_stats", {}), size(variables["params"])
    counters = len(jax.tree.leaves(statistics)) // 2
    head = size(variables["params"].get("head", {}))
    return Sizes(params, params + size(statistics) + counters, outputs.features.shape[-1], head)


def features_type(model: Classifier, image_shape: tuple[int, ...]) -> Any:
    """The dtype in which the backbone gives the features of bfloat16 images."""
    backbone, image = model.backbone, jnp.zeros((1, *image_shape), jnp.bfloat16)
    return jax.eval_shape(lambda: backbone.init_with_output(jax.random.key(0), image, **spelled(backbone)))[0].dtype


def arithmetic(model: Classifier, image_shape: tuple[int, ...]) -> float:
    """Floating-point operations of one image's forward pass, as counted by XLA; nothing is run or compiled."""
    variables, image = _shapes(model, image_shape)[1], jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    counts = jax.jit(functools.partial(model.apply, train=False)).lower(variables, image).cost_analysis()
    return (counts or {}).get("flops", 0.0)


def _shapes(model: Classifier, image_shape: tuple[int, ...]) -> tuple[Any, Variables]:
    image = jax.ShapeDtypeStruct((1, *image_shape), jnp.result_type(float))
    return jax.eval_shape(lambda image: model.init_with_output(jax.random.key(0), image, train=False), image)
