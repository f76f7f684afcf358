"""Modules of the user's own as models: any Flax module, Linen or NNX, a backbone or a whole classifier.

What modules of this package do by themselves is done for them: convolutions take the forms of `client_conv`, masked
samples stay out of the statistics of Flax's batch norms, and there is no dropout without a key. They are called with
those of `train`, `training`, `is_training`, `deterministic`, `use_running_average` and `mask` that they take; an NNX
module is also put into its training or evaluation mode. A module whose output is that of a dense layer with C outputs
that is called once is a whole classifier: this layer becomes the model's head, with its own initialisation, and the
rest the backbone.

Letters: B batch, C classes.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax

from fedjax_pcdd.errors import UserError, shortened
from fedjax_pcdd.models.convolution import client_conv
from fedjax_pcdd.models.layers import linear_init
from fedjax_pcdd.registry import from_outside

Path = tuple[Any, ...]


class OwnHead(NamedTuple):
    """A whole classifier's last layer: where it is in the module, and what it starts from."""

    path: Path  # () where the backbone lacks it already
    use_bias: bool
    kernel_init: Callable[..., jax.Array]
    bias_init: Callable[..., jax.Array]


def spelled(call: Callable, train: bool, mask: Any) -> dict[str, Any]:
    """The arguments by which a module is told whether it trains, and which samples are valid."""
    taken = inspect.signature(call).parameters
    known = {"train": train, "mask": mask, "training": train, "is_training": train}
    known |= {"deterministic": not train, "use_running_average": not train}
    first = (nn.Sequential.__call__, nnx.Sequential.__call__)  # who hand them on to their first layer, whatever it is
    every = call not in first and any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    return {name: value for name, value in known.items() if name in taken or (every and name in ("train", "mask"))}


def in_this_engine(mask: jax.Array | None, cut: Path = ()) -> Any:
    """A context in which Flax's own Linen layers do what ours do, and the layer of a path gives what it reads."""

    def intercept(call, args, kwargs, context):
        layer = context.module
        if context.method_name != "__call__":
            return call(*args, **kwargs)
        drops = isinstance(layer, nn.Dropout) and (layer.has_rng(layer.rng_collection) or layer.has_rng("params"))
        if (cut and layer.path == cut) or (isinstance(layer, nn.Dropout) and not drops):
            return args[0] if args else kwargs["inputs"]
        if isinstance(layer, nn.Conv) and layer.conv_general_dilated is layer.conv_general_dilated_cls is None:
            object.__setattr__(layer, "conv_general_dilated", client_conv)  # of this call's copy of a frozen module
        if isinstance(layer, nn.BatchNorm) and mask is not None and kwargs.get("mask") is None:
            return _with_valid_samples(layer, call, mask, *args, **kwargs)
        return call(*args, **kwargs)

    return nn.intercept_methods(intercept)


def _with_valid_samples(layer: nn.BatchNorm, call: Callable, mask: jax.Array, x: jax.Array, *args, **kwargs):
    """A batch norm's call whose statistics are of valid samples; without any, the running ones stay."""
    old = {name: layer.get_variable("batch_stats", name) for name in ("mean", "var")}
    out = call(x, *args, **{**kwargs, "mask": _positions(mask, x)})
    if layer.is_mutable_collection("batch_stats") and not layer.is_initializing():
        for name, value in old.items():
            new = layer.get_variable("batch_stats", name)
            layer.put_variable("batch_stats", name, jnp.where(mask.any(), new, value))
    return out


def _positions(mask: jax.Array, x: jax.Array) -> jax.Array | None:
    """The mask [B] as Flax's batch norms take it; all of it where it counts nothing, None where x has another batch."""
    if len(mask) != len(x):
        return None
    return jnp.where(mask.any(), mask, 1).astype(bool).reshape(-1, *[1] * (x.ndim - 1))


_mask: ContextVar[jax.Array | None] = ContextVar("mask", default=None)
_given: ContextVar[list] = ContextVar("given")


class _BatchNorm(nnx.BatchNorm):
    """NNX's batch norm, with statistics of valid samples."""

    def __call__(self, x, use_running_average=None, *, mask=None):
        valid = _mask.get()
        if mask is not None or valid is None:
            return super().__call__(x, use_running_average, mask=mask)
        old = {name: getattr(self, name)[...] for name in ("mean", "var")}
        out = super().__call__(x, use_running_average, mask=_positions(valid, x))
        for name, value in old.items():
            variable = getattr(self, name)
            variable[...] = jnp.where(valid.any(), variable[...], value)
        return out


_NNX_NORMS = (nnx.BatchNorm, nnx.GroupNorm, nnx.LayerNorm, nnx.InstanceNorm, nnx.RMSNorm)


class _Linear(nnx.Linear):
    """NNX's linear layer, which notes what it gives while a module's head is looked for."""

    def __call__(self, inputs, *args, **kwargs):
        out = super().__call__(inputs, *args, **kwargs)
        _given.get([]).append((self, out))
        return out


class _Through(nnx.Module):
    """In the place of a layer that was cut out."""

    def __call__(self, x):
        return x


class Maker(NamedTuple):
    """Makes an NNX module from the `rngs`: by a class or function and its arguments, or as a copy of an object."""

    part: Any
    arguments: tuple[tuple[str, Any], ...] = ()

    def __call__(self, rngs: nnx.Rngs, cut: Path = ()) -> Any:
        """The module, whose layers do what ours do, the one of a path nothing."""
        copied = isinstance(self.part, nnx.Module)
        module: Any = nnx.clone(self.part) if copied else self.part(**dict(self.arguments), rngs=rngs)
        layers: list[tuple[Path, Any]] = list(nnx.iter_modules(module))
        for path, layer in layers:
            if isinstance(layer, nnx.Conv) and layer.conv_general_dilated is lax.conv_general_dilated:
                layer.conv_general_dilated = client_conv
            ours: Any = {nnx.BatchNorm: _BatchNorm, nnx.Linear: _Linear}
            setattr(layer, "__class__", ours.get(type(layer), type(layer)))  # noqa: B010 - of its own copy
            if cut and path == cut:
                del layer.kernel, layer.bias
                setattr(layer, "__class__", _Through)  # noqa: B010
        return module


@dataclass(frozen=True)
class _FromMaker:
    """Initialises a head as that of a fresh module; by `linear_init` where it reads another number of features."""

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
    """An NNX module as a Linen one: its `nnx.Param` are "params", all else but random numbers is "batch_stats"."""

    make: Maker
    cut: Path = ()

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool = False, mask: jax.Array | None = None) -> jax.Array:
        if self.is_initializing():
            structure, params, statistics, random = _split(self.make(nnx.Rngs(self.make_rng("params")), self.cut))
            for name, state in (("params", params), ("batch_stats", statistics)):
                for key, value in _tree(state).items():
                    self.put_variable(name, key, value)
        else:
            structure, params, statistics, random = _abstract(self.make, self.cut)
            params = _filled(params, self.variables.get("params", {}))
            statistics = _filled(statistics, self.variables.get("batch_stats", {}))
        key = self.make_rng("dropout") if self.has_rng("dropout") else None
        module = nnx.merge(structure, params, statistics, _drawn(random, key))
        (module.train if train else module.eval)()
        if key is None:
            module.set_attributes(deterministic=True, raise_if_not_found=False)
        token = _mask.set(mask)
        try:
            out = module(x, **spelled(type(module).__call__, train, mask))
        finally:
            _mask.reset(token)
        if train and self.is_mutable_collection("batch_stats") and not self.is_initializing():
            for name, value in _tree(_split(module)[2]).items():
                self.put_variable("batch_stats", name, value)
        return out


def nnx_norms(module: NnxBackbone) -> frozenset[Path]:
    """Paths of an NNX module's normalisation layers, as in its variables."""
    made = nnx.eval_shape(lambda: module.make(nnx.Rngs(0), module.cut))
    layers: list[tuple[Path, Any]] = list(nnx.iter_modules(made))
    return frozenset(tuple(map(str, path)) for path, layer in layers if isinstance(layer, _NNX_NORMS))


def _split(module: Any) -> tuple[Any, Any, Any, Any]:
    """Structure, parameters, statistics and random numbers of an NNX module."""
    structure, params, random, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return structure, params, rest, random


@functools.lru_cache(maxsize=64)
def _abstract(make: Maker, cut: Path) -> tuple[Any, Any, Any, Any]:
    """The same of a fresh module of which only shapes are known."""
    return _split(nnx.eval_shape(lambda: make(nnx.Rngs(0), cut)))


def _tree(state: Any) -> dict[str, Any]:
    """The values of an NNX state, in nested mappings with names for keys."""
    return unflatten_dict({tuple(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(state)})


def _filled(state: Any, tree: Mapping[str, Any]) -> Any:
    """An NNX state with the values that `_tree` gave of it."""
    values = flatten_dict(tree)
    return nnx.from_flat_state([(p, leaf.replace(values[tuple(map(str, p))])) for p, leaf in nnx.to_flat_state(state)])


def _drawn(state: Any, key: jax.Array | None) -> Any:
    """NNX's random numbers, from a key; any where there is none, since nothing reads them."""
    key = jax.random.key(0) if key is None else key

    def value(i: int, leaf: Any) -> jax.Array:
        kept = leaf.get_value()
        is_key = jnp.issubdtype(kept.dtype, jax.dtypes.prng_key)
        return jax.random.fold_in(key, i) if is_key else jnp.zeros(kept.shape, kept.dtype)

    leaves = enumerate(nnx.to_flat_state(state))
    return nnx.from_flat_state([(path, leaf.replace(value(i, leaf))) for i, (path, leaf) in leaves])


def adapted(
    part: Any, name: str, known: Mapping[str, Any], num_classes: int, image_shape: tuple[int, ...]
) -> tuple[nn.Module, OwnHead | None]:
    """A backbone from a module, or from what makes one, and the head that was its last layer, if it had one.

    Args:
      part: a Linen or NNX module, or a class or function that returns one.
      name: for sentences.
      known: arguments that classes and functions get where they take them; beside these `rngs` for NNX.

    Raises:
      UserError: it is none of that, lacks arguments, cannot read such images, or gives no [B, features].
    """
    with from_outside(f"model {name} cannot be made"):
        module = _module(part, name, known)
    head: Any = _nnx_head if isinstance(module, NnxBackbone) else _linen_head
    image, given = jnp.zeros((1, *image_shape)), []
    with from_outside(f"model {name} fails on images of {'x'.join(map(str, image_shape))}"):
        out = jax.eval_shape(lambda: head(module, image, given))
    if not isinstance(out, jax.ShapeDtypeStruct) or len(out.shape) != 2 or out.shape[0] != 1:
        shapes = jax.tree.map(lambda leaf: [*leaf.shape], out)
        raise UserError(f"model {name} gives {shapes} for one image: it must give features or logits, [1, width].")
    if not given and out.shape[1] == num_classes:
        warnings.warn(
            f"model {name} gives {num_classes} numbers, one for each class, that are not a dense layer's: they are "
            "taken for features, and a linear head follows. Let a whole classifier end with its dense layer, without "
            "softmax.",
            stacklevel=3,
        )
    if not given or out.shape[1] != num_classes:
        return module, None
    own: OwnHead = given[0]
    return (module.clone(cut=own.path), own._replace(path=())) if isinstance(module, NnxBackbone) else (module, own)


def _module(part: Any, name: str, known: Mapping[str, Any]) -> nn.Module:
    if isinstance(part, nn.Module):
        return _hashed(part, name)
    if isinstance(part, nnx.Module):
        return NnxBackbone(Maker(part))
    if not callable(part):
        label = shortened(part) if name == type(part).__name__ else name
        raise UserError(f"model {label} must be a Flax module, or what returns one, not {type(part).__name__}.")
    own = inspect.isclass(part) and issubclass(part, nnx.Module)  # whose own signature is that of any NNX class
    try:
        taken = inspect.signature(functools.partial(part.__init__, None) if own else part).parameters
    except ValueError as error:  # of C, as int is
        raise UserError(f"model {part!r} is no Flax module, nor a function that returns one.") from error
    needed = [
        key for key, p in taken.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if lacking := [key for key in needed if key not in known and key != "rngs"]:
        raise UserError(
            f"model {name} needs '{lacking[0]}': pass a Flax module, or a class that needs no more than some of "
            f"{', '.join([*known, 'rngs'])}."
        )
    arguments = {key: value for key, value in known.items() if key in taken}
    if "rngs" in taken:
        maker = Maker(part, tuple(arguments.items()))
        made = nnx.eval_shape(lambda: maker(nnx.Rngs(0)))
        module = NnxBackbone(maker)
    else:
        made = module = part(**arguments)
    if not isinstance(made, nn.Module | nnx.Module):
        raise UserError(f"model {name} must be a Flax module, or what returns one, not {type(made).__name__}.")
    return _module(module, name, known)


def _hashed(module: nn.Module, name: str) -> nn.Module:
    """The module, static in compiled code, with tuples where its fields are lists; UserError for other such things."""
    for one in (module, _with_tuples(module)):
        with suppress(TypeError):
            hash(one)
            return one
    raise UserError(f"model {name} has a field that cannot be hashed: give numbers, texts or tuples.")


def _with_tuples(value: Any) -> Any:
    if type(value) in (list, tuple):
        return tuple(map(_with_tuples, value))
    if not isinstance(value, nn.Module):
        return value
    own = [field.name for field in fields(value) if field.init and field.name not in ("name", "parent")]
    return value.clone(**{name: _with_tuples(getattr(value, name)) for name in own})


def _linen_head(module: nn.Module, image: jax.Array, given: list[OwnHead]) -> Any:
    """The module's output; the dense layer whose output that is becomes known."""
    layers = []

    def note(call, args, kwargs, context):
        out = call(*args, **kwargs)
        layers.extend([(context.module, out)] if isinstance(context.module, nn.Dense) else [])
        return out

    with nn.intercept_methods(note), in_this_engine(None):
        arguments = spelled(type(module).__call__, False, None)
        out, _ = module.init_with_output(jax.random.key(0), image, **arguments)
    once = [one for one, result in layers if result is out and sum(one.path == other.path for other, _ in layers) == 1]
    given.extend(OwnHead(one.path, one.use_bias, one.kernel_init, one.bias_init) for one in once)
    return out


def _nnx_head(module: NnxBackbone, image: jax.Array, given: list[OwnHead]) -> Any:
    """The same of an NNX module."""
    made, layers = module.make(nnx.Rngs(0)), []
    made.eval()
    token = _given.set(layers)
    try:
        out = made(image, **spelled(type(made).__call__, False, None))
    finally:
        _given.reset(token)
    modules: list[tuple[Path, Any]] = list(nnx.iter_modules(made))
    for path, layer in modules:
        if [result is out for one, result in layers if layer is one] == [True]:
            inits = [_FromMaker(module.make, path, name) for name in ("kernel", "bias")]
            given.append(OwnHead(path, layer.bias is not None, *inits))
    return out
