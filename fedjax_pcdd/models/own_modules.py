"""User-defined modules as models: any Flax module, Linen or NNX, a backbone or a whole classifier.

They behave like modules of this package: convolutions take the forms of `client_conv`, masked samples do not enter the
statistics of Flax's batch norms, and there is no dropout without a key. They are called with those of the arguments
`train`, `training`, `is_training`, `deterministic`, `use_running_average` and `mask` that they accept; an NNX module
is also put into its training or evaluation mode. A module whose output is that of a dense layer with C outputs,
called once, is a whole classifier: this layer becomes the model's head, with its own initialisation, and the rest the
backbone.

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
    """A whole classifier's last layer: where it is in the module, and how it is initialised."""

    path: Path  # () if the backbone no longer contains it
    use_bias: bool
    kernel_init: Callable[..., jax.Array]
    bias_init: Callable[..., jax.Array]


def spelled(call: Callable, train: bool, mask: Any) -> dict[str, Any]:
    """Keyword arguments that tell a module whether it trains and which samples are valid, as far as it accepts them."""
    parameters = inspect.signature(call).parameters
    available = {"train": train, "mask": mask, "training": train, "is_training": train}
    available |= {"deterministic": not train, "use_running_average": not train}
    sequential = (nn.Sequential.__call__, nnx.Sequential.__call__)  # they pass the arguments on to their first layer
    takes_any = call not in sequential and any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {
        name: value
        for name, value in available.items()
        if name in parameters or (takes_any and name in ("train", "mask"))
    }


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
        if isinstance(layer, nn.BatchNorm) and mask is not None and kwargs.get("mask") is None:
            return _with_valid_samples(layer, call, mask, *args, **kwargs)
        return call(*args, **kwargs)

    return nn.intercept_methods(intercept)


def _with_valid_samples(layer: nn.BatchNorm, call: Callable, mask: jax.Array, x: jax.Array, *args, **kwargs):
    """Call a batch norm with statistics of valid samples only; if there are none, the running statistics stay."""
    old = {name: layer.get_variable("batch_stats", name) for name in ("mean", "var")}
    out = call(x, *args, **{**kwargs, "mask": _positions(mask, x)})
    if layer.is_mutable_collection("batch_stats") and not layer.is_initializing():
        for name, value in old.items():
            new = layer.get_variable("batch_stats", name)
            layer.put_variable("batch_stats", name, jnp.where(mask.any(), new, value))
    return out


def _positions(mask: jax.Array, x: jax.Array) -> jax.Array | None:
    """The mask [B] as Flax's batch norms take it: all True if no sample is valid, None if x has another batch size.

    Of n B rows, as where the patches of an image are samples, n belong to each sample, one sample after another.
    """
    rows, rest = divmod(len(x), len(mask))
    if rest or not rows:
        return None
    mask = jnp.repeat(mask, rows)
    return jnp.where(mask.any(), mask, 1).astype(bool).reshape(-1, *[1] * (x.ndim - 1))


_mask: ContextVar[jax.Array | None] = ContextVar("mask", default=None)
_given: ContextVar[list] = ContextVar("given")


class _BatchNorm(nnx.BatchNorm):
    """NNX's batch norm, with statistics of valid samples only."""

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
            structure, params, statistics, random = _split(self.make(nnx.Rngs(self.make_rng("params")), self.cut))
            for name, state in (("params", params), ("batch_stats", statistics)):
                for key, value in _tree(state).items():
                    self.put_variable(name, key, value)
        else:
            structure, params, statistics, random = abstract(self.make, self.cut)
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
    abstract_module = nnx.eval_shape(lambda: module.make(nnx.Rngs(0), module.cut))
    layers: list[tuple[Path, Any]] = list(nnx.iter_modules(abstract_module))
    return frozenset(tuple(map(str, path)) for path, layer in layers if isinstance(layer, _NNX_NORMS))


def _split(module: Any) -> tuple[Any, Any, Any, Any]:
    """Structure, parameters, statistics and random numbers of an NNX module."""
    structure, params, random, statistics = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return structure, params, statistics, random


@functools.lru_cache(maxsize=64)
def abstract(make: Maker, cut: Path) -> tuple[Any, Any, Any, Any]:
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


def adapted(
    part: Any, name: str, known: Mapping[str, Any], num_classes: int, image_shape: tuple[int, ...]
) -> tuple[nn.Module, OwnHead | None]:
    """Make a backbone of a module or its factory, and return its last layer as the head, if it is a whole classifier.

    Args:
      part: a Linen or NNX module, or a class or function that returns one.
      name: for messages.
      known: arguments that classes and functions receive if they accept them; NNX modules also get `rngs`.

    Raises:
      UserError: it is none of these, needs other arguments, cannot read such images, or does not return [B, features].
    """
    with from_outside(f"model {name} cannot be made"):
        module = _module(part, name, known)
    find_head: Any = _nnx_head if isinstance(module, NnxBackbone) else _linen_head
    image, heads = jnp.zeros((1, *image_shape)), []
    with from_outside(f"model {name} fails on images of {'x'.join(map(str, image_shape))}"):
        out = jax.eval_shape(lambda: find_head(module, image, heads))
    _check_variables(module, name, image)
    if not isinstance(out, jax.ShapeDtypeStruct) or len(out.shape) != 2 or out.shape[0] != 1:
        shapes = jax.tree.map(lambda leaf: [*leaf.shape], out)
        raise UserError(f"model {name} gives {shapes} for one image: it must give features or logits, [1, width].")
    if not heads and out.shape[1] == num_classes:
        warnings.warn(
            f"model {name} gives {num_classes} numbers, one for each class, that are not a dense layer's: they are "
            "taken for features, and a linear head follows. Let a whole classifier end with its dense layer, without "
            "softmax.",
            stacklevel=3,
        )
    if not heads or out.shape[1] != num_classes:
        return module, None
    head: OwnHead = heads[0]
    return (module.clone(cut=head.path), head._replace(path=())) if isinstance(module, NnxBackbone) else (module, head)


def _check_variables(module: nn.Module, name: str, image: jax.Array) -> None:
    """Raise a UserError for variables that cannot be averaged, and norms whose statistics would include padding.

    Also for a module that in evaluation changes its variables or draws, as norms and dropout that ignore `train` do.
    """
    arguments = spelled(type(module).__call__, False, None)
    variables: Any = jax.eval_shape(lambda: module.init(jax.random.key(0), image, **arguments))
    leaves: Any = flatten_dict(dict(variables))
    if lists := ["/".join(map(str, path)) for path, x in leaves.items() if not hasattr(x, "dtype")]:
        raise UserError(
            f"model {name} keeps a list in '{lists[0]}', as by sow: sow into 'intermediates', or not at all."
        )
    rule = "must neither draw nor change its variables when it is not trained (let it take `train` and pass it on)"
    with from_outside(f"model {name} {rule}"), in_this_engine(None):
        jax.eval_shape(lambda v: module.apply(v, image, **arguments), variables)
    if others := ["/".join(map(str, path)) for path, x in leaves.items() if not jnp.issubdtype(x.dtype, jnp.floating)]:
        kind = "as a number with a fraction, which it becomes by averaging; a NumPy array in the module's code stays"
        with from_outside(f"model {name} cannot use '{others[0]}' {kind}"):
            averaged = jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.zeros(x.shape).astype(jnp.float32), variables))
            jax.eval_shape(lambda v: module.apply(v, image, **arguments), averaged)
    if isinstance(module, NnxBackbone):
        if written := _written(module, image):
            raise UserError(f"model {name} {rule}: it changes {written[0]}.")
        instance = nnx.eval_shape(lambda: module.make(nnx.Rngs(0)))
        layers: list[tuple[Path, Any]] = list(nnx.iter_modules(instance))
        own = [type(n).__name__ for _, n in layers if isinstance(n, nnx.BatchNorm) and type(n) is not _BatchNorm]
        if own and "mask" not in spelled(type(instance).__call__, False, None):
            raise UserError(
                f"model {name} has a batch norm of a class of its own, {own[0]}, to which padding would count: let the "
                "module take `mask` and pass it on, or use nnx.BatchNorm."
            )


def _written(module: NnxBackbone, image: jax.Array) -> list[str]:
    """Paths of statistics and random numbers that an NNX module changes although it is in evaluation mode."""
    changed: list[str] = []

    def call() -> None:
        instance = module.make(nnx.Rngs(0))
        instance.eval()
        instance.set_attributes(deterministic=True, raise_if_not_found=False)
        before = values(instance)
        instance(image, **spelled(type(instance).__call__, False, None))
        after = values(instance)
        changed.extend("/".join(map(str, path)) for path in before if after.get(path) is not before[path])

    def values(instance: Any) -> dict[Any, Any]:
        state = nnx.state(instance, nnx.Any(nnx.BatchStat, nnx.RngState))
        return {path: leaf.get_value() for path, leaf in nnx.to_flat_state(state)}

    jax.eval_shape(call)
    return changed


def _module(part: Any, name: str, known: Mapping[str, Any]) -> nn.Module:
    if isinstance(part, nn.Module):
        return _hashed(part, name)
    if isinstance(part, nnx.Module):
        return NnxBackbone(Maker(part))
    if not callable(part):
        label = shortened(part) if name == type(part).__name__ else name
        raise UserError(f"model {label} must be a Flax module, or what returns one, not {type(part).__name__}.")
    is_nnx = inspect.isclass(part) and issubclass(part, nnx.Module)  # its own signature is that of any NNX class
    try:
        parameters = inspect.signature(functools.partial(part.__init__, None) if is_nnx else part).parameters
    except ValueError as error:  # implemented in C, such as int
        raise UserError(f"model {part!r} is neither a Flax module nor a function that returns one.") from error
    required = [
        key for key, p in parameters.items() if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if missing := [key for key in required if key not in known and key != "rngs"]:
        raise UserError(
            f"model {name} needs '{missing[0]}': pass a Flax module, or a class that needs no more than some of "
            f"{', '.join([*known, 'rngs'])}."
        )
    arguments = {key: value for key, value in known.items() if key in parameters}
    if "rngs" in parameters:
        maker = Maker(part, tuple(arguments.items()))
        instance = nnx.eval_shape(lambda: maker(nnx.Rngs(0)))
        module = NnxBackbone(maker)
    else:
        instance = module = part(**arguments)
    if not isinstance(instance, nn.Module | nnx.Module):
        raise UserError(f"model {name} must be a Flax module, or what returns one, not {type(instance).__name__}.")
    return _module(module, name, known)


def _hashed(module: nn.Module, name: str) -> nn.Module:
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


def _linen_head(module: nn.Module, image: jax.Array, heads: list[OwnHead]) -> Any:
    """The module's output; the dense layer that returned it, if any, is appended to `heads`."""
    layers = []

    def note(call, args, kwargs, context):
        out = call(*args, **kwargs)
        layers.extend([(context.module, out)] if isinstance(context.module, nn.Dense) else [])
        return out

    with nn.intercept_methods(note), in_this_engine(None):
        arguments = spelled(type(module).__call__, False, None)
        out, _ = module.init_with_output(jax.random.key(0), image, **arguments)
    last_layers = [
        layer for layer, result in layers if result is out and sum(layer.path == other.path for other, _ in layers) == 1
    ]
    heads.extend(OwnHead(layer.path, layer.use_bias, layer.kernel_init, layer.bias_init) for layer in last_layers)
    return out


def _nnx_head(module: NnxBackbone, image: jax.Array, heads: list[OwnHead]) -> Any:
    """As `_linen_head`, for an NNX module."""
    nnx_module, layers = module.make(nnx.Rngs(0)), []
    nnx_module.eval()
    token = _given.set(layers)
    try:
        out = nnx_module(image, **spelled(type(nnx_module).__call__, False, None))
    finally:
        _given.reset(token)
    modules: list[tuple[Path, Any]] = list(nnx.iter_modules(nnx_module))
    for path, layer in modules:
        if [result is out for called, result in layers if layer is called] == [True]:
            inits = [_FromMaker(module.make, path, name) for name in ("kernel", "bias")]
            heads.append(OwnHead(path, layer.bias is not None, *inits))
    return out
