"""NNX modules of the user's own as Linen ones, with layers that behave like those of this package.

As `linen_modules.py` does for Linen; a module is also put into its training or evaluation mode.
"""

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.models.convolution import client_conv
from fedjax_pcdd.models.layers import linear_init
from fedjax_pcdd.models.linen_modules import RULE, OwnHead, Path, spelled, with_usual_rows

_mask: ContextVar[jax.Array | None] = ContextVar("mask", default=None)
_given: ContextVar[list] = ContextVar("given")


class _BatchNorm(nnx.BatchNorm):
    """NNX's batch norm, with statistics of valid samples only."""

    def __call__(self, x, use_running_average=None, *, mask=None):
        valid = _mask.get()
        if mask is not None or valid is None:
            return super().__call__(x, use_running_average, mask=mask)
        old = {name: getattr(self, name)[...] for name in ("mean", "var")}
        x, rows = with_usual_rows(valid, x)
        out = super().__call__(x, use_running_average, mask=rows)
        for name, value in old.items():
            variable = getattr(self, name)
            variable[...] = jnp.where(valid.any(), variable[...], value)
        return out


_NNX_NORMS = (nnx.BatchNorm, nnx.GroupNorm, nnx.LayerNorm, nnx.InstanceNorm, nnx.RMSNorm)


class _Linear(nnx.Linear):
    """NNX's linear layer, which records its outputs while a module's head is searched for."""

    def __call__(self, inputs, *args, **kwargs):
        out = super().__call__(inputs, *args, **kwargs)
        _given.get([]).append((self, out))
        return out


class _Through(nnx.Module):
    """Identity in place of a layer that was cut out."""

    def __call__(self, x):
        return x


class Maker(NamedTuple):
    """Makes an NNX module from `rngs`: by a class or function with arguments, or as a copy of an object."""

    part: Any
    arguments: tuple[tuple[str, Any], ...] = ()

    def __call__(self, rngs: nnx.Rngs, cut: Path = ()) -> Any:
        """Make the module; its layers behave like ours, and the layer at the path `cut` is the identity."""
        copied = isinstance(self.part, nnx.Module)
        module: Any = nnx.clone(self.part) if copied else self.part(**dict(self.arguments), rngs=rngs)
        layers: list[tuple[Path, Any]] = list(nnx.iter_modules(module))
        for path, layer in layers:
            if isinstance(layer, nnx.Conv) and layer.conv_general_dilated is lax.conv_general_dilated:
                layer.conv_general_dilated = client_conv
            replacements: Any = {nnx.BatchNorm: _BatchNorm, nnx.Linear: _Linear}
            setattr(layer, "__class__", replacements.get(type(layer), type(layer)))  # noqa: B010 - in our own copy
            if cut and path == cut:
                del layer.kernel, layer.bias
                setattr(layer, "__class__", _Through)  # noqa: B010
        return module


@dataclass(frozen=True)
class _FromMaker:
    """Initialises a head as a fresh module's; by `linear_init` if the number of input features differs."""

    make: Maker
    path: Path
    name: str

    def __call__(self, key, shape, dtype=jnp.float32):
        layer = functools.reduce(_child, self.path, self.make(nnx.Rngs(key)))
        value = getattr(layer, self.name)[...]
        return value.astype(dtype) if value.shape == tuple(shape) else linear_init(key, shape, dtype)


def _child(module: Any, name: Any) -> Any:
    return getattr(module, name) if isinstance(name, str) else module[name]


class NnxBackbone(nn.Module):
    """An NNX module as a Linen one: its `nnx.Param` are "params", all else except random numbers is "batch_stats"."""

    make: Maker
    cut: Path = ()

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        if self.is_initializing():
            structure, params, random, statistics = _split(self.make(nnx.Rngs(self.make_rng("params")), self.cut))
            for name, state in (("params", params), ("batch_stats", statistics)):
                for key, value in _tree(state).items():
                    self.put_variable(name, key, value)
        else:
            structure, params, random, statistics = abstract(self.make, self.cut)
            params = _filled(params, self.variables.get("params", {}))
            statistics = _filled(statistics, self.variables.get("batch_stats", {}))
        key = self.make_rng("dropout") if self.has_rng("dropout") else None
        module = nnx.merge(structure, params, statistics, _drawn(random, key))
        (module.train if train else module.eval)()
        if key is None:
            module.set_attributes(deterministic=True, raise_if_not_found=False)
        with ExitStack() as context:
            context.callback(_mask.reset, _mask.set(mask))
            out = module(x, **spelled(module, train, mask))
        if train and self.is_mutable_collection("batch_stats") and not self.is_initializing():
            for name, value in _tree(_split(module)[3]).items():
                self.put_variable("batch_stats", name, value)
        return out


def nnx_norms(module: NnxBackbone) -> frozenset[Path]:
    """Paths of an NNX module's normalisation layers, as in its variables."""
    layers = nnx.iter_modules(nnx.eval_shape(lambda: module.make(nnx.Rngs(0), module.cut)))
    return frozenset(tuple(map(str, path)) for path, layer in layers if isinstance(layer, _NNX_NORMS))


def keeps_statistics(module: NnxBackbone) -> bool:
    """Whether an NNX module has running statistics, those of norms of its own too; other variables do not count."""
    return bool(nnx.state(nnx.eval_shape(lambda: module.make(nnx.Rngs(0), module.cut)), nnx.BatchStat))


def _split(module: Any) -> Any:
    """Structure, parameters, random numbers and statistics of an NNX module."""
    return nnx.split(module, nnx.Param, nnx.RngState, ...)


@functools.lru_cache(maxsize=64)
def abstract(make: Maker, cut: Path) -> Any:
    """`_split` of a fresh module, with shapes only."""
    return _split(nnx.eval_shape(lambda: make(nnx.Rngs(0), cut)))


def _tree(state: Any) -> dict[str, Any]:
    """The values of an NNX state, in nested mappings with names as keys."""
    return unflatten_dict({tuple(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)})


def _filled(state: Any, tree: Mapping[str, Any]) -> Any:
    """An NNX state filled with the values of a tree as returned by `_tree`."""
    values = flatten_dict(tree)
    return nnx.from_flat_state([(p, leaf.replace(values[tuple(map(str, p))])) for p, leaf in nnx.to_flat_state(state)])


def _drawn(state: Any, key: jax.Array | None) -> Any:
    """NNX's random state drawn from a key; arbitrary without one, as then nothing reads it."""
    key = jax.random.key(0) if key is None else key

    def value(i: int, leaf: Any) -> jax.Array:
        stored = leaf.get_value()
        is_key = jnp.issubdtype(stored.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(key, i) if is_key else jnp.zeros(stored.shape, stored.dtype)

    leaves = enumerate(nnx.to_flat_state(state))
    return nnx.from_flat_state([(path, leaf.replace(value(i, leaf))) for i, (path, leaf) in leaves])


def nnx_head(module: NnxBackbone, image: jax.Array, heads: list[OwnHead]) -> Any:
    """As `linen_head`, for an NNX module."""
    nnx_module, layers = module.make(nnx.Rngs(0)), []
    nnx_module.eval()
    with ExitStack() as context:
        context.callback(_given.reset, _given.set(layers))
        out = nnx_module(image, **spelled(nnx_module))
    modules: list[tuple[Path, Any]] = list(nnx.iter_modules(nnx_module))
    for path, layer in modules:
        if [result is out for called, result in layers if layer is called] == [True]:
            inits = [_FromMaker(module.make, path, name) for name in ("kernel", "bias")]
            heads.append(OwnHead(path, layer.bias is not None, *inits))
    return out


def check_nnx(module: NnxBackbone, name: str, image: jax.Array) -> None:
    """UserError for a module that in evaluation changes itself, or to whose own batch norms padding would count."""
    if changed := _changed_in_evaluation(module, image):
        raise UserError(f"model {name} {RULE}: it changes {changed[0]}.")
    instance = nnx.eval_shape(lambda: module.make(nnx.Rngs(0)))
    layers: list[tuple[Path, Any]] = list(nnx.iter_modules(instance))
    own = [type(n).__name__ for _, n in layers if isinstance(n, nnx.BatchNorm) and type(n) is not _BatchNorm]
    if own and "mask" not in spelled(instance):
        raise UserError(
            f"model {name} has a batch norm of a class of its own, {own[0]}, to which padding would count: let the "
            "module take `mask` and pass it on, or use nnx.BatchNorm."
        )


def _changed_in_evaluation(module: NnxBackbone, image: jax.Array) -> list[str]:
    """Paths of statistics and random numbers that an NNX module changes although it is in evaluation mode.

    Only where they are other objects, as behind `nnx.remat` all are, is the module run to compare the values.
    """

    def call(image: jax.Array) -> dict[str, Any]:
        instance = module.make(nnx.Rngs(0))
        instance.eval()
        instance.set_attributes(deterministic=True, raise_if_not_found=False)
        before = values(instance)
        instance(image, **spelled(instance))
        after = values(instance)
        other = [path for path in before if after.get(path) is not before[path]]
        return {"/".join(map(str, path)): (before[path], after.get(path)) for path in other}

    def values(instance: Any) -> dict[Any, Any]:
        state = nnx.state(instance, nnx.Any(nnx.BatchStat, nnx.RngState))
        return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(state)}

    # A mean of zeros would stay as it is.
    pairs = jax.jit(call)(jnp.ones_like(image)) if jax.eval_shape(call, image) else {}
    return [path for path, (old, new) in pairs.items() if new is None or not jnp.array_equal(old, new)]
