"""Linen modules of the user's own: how they are called, and their layers made to behave like those of this package.

Convolutions take the forms of `client_conv`, masked samples do not enter the statistics of batch norms, and there is no
dropout without a key.

Letters: B batch.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.models.convolution import client_conv

Path = tuple[Any, ...]
RULE = "must neither draw nor change its variables when it is not trained (let it take `train` and pass it on)"


class OwnHead(NamedTuple):
    """A whole classifier's last layer: where it is in the module, and how it is initialised."""

    path: Path  # () if the backbone no longer contains it
    use_bias: bool
    kernel_init: Callable[..., jax.Array]
    bias_init: Callable[..., jax.Array]


def spelled(module: Any, train: bool = False, mask: Any = None) -> dict[str, Any]:
    """Keyword arguments that tell a module whether it trains and which samples are valid, as far as it accepts them."""
    call = type(module).__call__
    parameters = inspect.signature(call).parameters
    available = {"train": train, "mask": mask, "training": train, "is_training": train}
    available |= {"deterministic": not train, "use_running_average": not train}
    sequential = (nn.Sequential.__call__, nnx.Sequential.__call__)  # they pass the arguments on to their first layer
    takes_any = call not in sequential and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepted = {*parameters, "train", "mask"} if takes_any else parameters
    return {name: value for name, value in available.items() if name in accepted}


def in_this_engine(mask: jax.Array | None, cut: Path = ()) -> Any:
    """A context in which Flax's Linen layers behave like ours; the layer at the path `cut` returns its input."""

    def intercept(call, args, kwargs, context):
        layer = context.module
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        drops = isinstance(layer, nn.Dropout) and (layer.has_rng(layer.rng_collection) or layer.has_rng("params"))
        if (cut and layer.path == cut) or (isinstance(layer, nn.Dropout) and not drops):
            return args[0] if args else kwargs["inputs"]
        if isinstance(layer, nn.Conv) and layer.conv_general_dilated is layer.conv_general_dilated_cls is None:
            object.__setattr__(layer, "conv_general_dilated", client_conv)  # in this call's copy of a frozen module
        # A subclass without a mask calls Flax's own method, which passes here as well.
        takes_mask = "mask" in inspect.signature(context.orig_method).parameters
        if isinstance(layer, nn.BatchNorm) and takes_mask and mask is not None and kwargs.get("mask") is None:
            return _with_valid_samples(layer, call, mask, *args, **kwargs)
        return call(*args, **kwargs)

    return nn.intercept_methods(intercept)


def _with_valid_samples(layer: nn.BatchNorm, call: Callable, mask: jax.Array, x: jax.Array, *args, **kwargs):
    """Call a batch norm with statistics of valid samples only; if there are none, the running statistics stay."""
    old = {name: layer.get_variable("batch_stats", name) for name in ("mean", "var")}
    x, rows = with_usual_rows(mask, x)
    out = call(x, *args, **{**kwargs, "mask": rows})
    if layer.is_mutable_collection("batch_stats") and not layer.is_initializing():
        for name, value in old.items():
            new = layer.get_variable("batch_stats", name)
            layer.put_variable("batch_stats", name, jnp.where(mask.any(), new, value))
    return out


def with_usual_rows(mask: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The input of Flax's batch norms [n B, ...], and their mask: all True if no sample [B] is valid.

    Of n B rows, as where the patches of an image are samples, n belong to each sample, one sample after another. The
    mean of the valid rows is in place of the others: with one valid element the variance is 0, and the others would
    grow by 316 in every layer, to inf. UserError if the first axis is not that of the samples.
    """
    rows, rest = divmod(len(x), len(mask))
    if rest or not rows:
        raise UserError(
            "the input of a batch norm must begin with the axis of the samples, as padding would count: transpose it, "
            "or pass `mask` to the norm."
        )
    mask = jnp.repeat(mask, rows)
    mask = jnp.where(mask.any(), mask, 1).astype(bool).reshape(-1, *[1] * (x.ndim - 1))
    return jnp.where(mask, x, jax.lax.stop_gradient(jnp.mean(x, axis=0, keepdims=True, where=mask))), mask


def linen_head(module: nn.Module, image: jax.Array, heads: list[OwnHead]) -> Any:
    """The module's output; the dense layer that returned it, if any, is appended to `heads`."""
    layers = []

    def note(call, args, kwargs, context):
        out = call(*args, **kwargs)
        layers.extend([(context.module, out)] if isinstance(context.module, nn.Dense) else [])
        return out

    with nn.intercept_methods(note), in_this_engine(None):
        out, _ = module.init_with_output(jax.random.key(0), image, **spelled(module))
    for layer, result in layers:
        if result is out and sum(layer.path == other.path for other, _ in layers) == 1:
            heads.append(OwnHead(layer.path, layer.use_bias, layer.kernel_init, layer.bias_init))
    return out


def hashed(module: nn.Module, name: str) -> nn.Module:
    """The module as a static argument: lists in its fields become tuples; UserError for other unhashable fields."""
    for candidate in (module, _with_tuples(module)):
        with suppress(TypeError):
            hash(candidate)
            return candidate
    raise UserError(f"model {name} has a field that cannot be hashed: give numbers, texts or tuples.")


def _with_tuples(value: Any) -> Any:
    if type(value) in (list, tuple):
        return tuple(map(_with_tuples, value))
    if not isinstance(value, nn.Module):
        return value
    names = [field.name for field in fields(value) if field.init and field.name not in ("name", "parent")]
    return value.clone(**{name: _with_tuples(getattr(value, name)) for name in names})
