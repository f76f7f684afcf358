"""User-defined modules as models: any Flax module, Linen or NNX, a backbone or a whole classifier.

They are called with those of the arguments `train`, `training`, `is_training`, `deterministic`,
`use_running_average` and `mask` that they accept. A module whose output is that of a dense layer with C outputs,
called once, is a whole classifier: this layer becomes the model's head, with its own initialisation, and the rest the
backbone.

Letters: B batch, C classes.
"""

import functools
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict

from fedjax_pcdd.errors import UserError, shortened
from fedjax_pcdd.models.linen_modules import RULE, OwnHead, hashed, in_this_engine, linen_head, spelled
from fedjax_pcdd.models.nnx_modules import Maker, NnxBackbone, check_nnx, nnx_head
from fedjax_pcdd.registry import from_outside

SAMPLES = 127  # of a batch that is only traced; a prime, so that no other axis of a norm's input is a multiple of it


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
    find_head: Any = nnx_head if isinstance(module, NnxBackbone) else linen_head
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
    arguments = spelled(module)
    variables: Any = jax.eval_shape(lambda: module.init(jax.random.key(0), image, **arguments))
    leaves: Any = {"/".join(map(str, path)): x for path, x in flatten_dict(dict(variables)).items()}
    if others := [path for path, x in leaves.items() if not hasattr(x, "dtype")]:
        if isinstance(leaves[others[0]], nn.meta.AxisMetadata):
            raise UserError(f"model {name} keeps '{others[0]}' with metadata, as by nn.with_partitioning: drop these.")
        raise UserError(
            f"model {name} keeps a list in '{others[0]}', as by sow: sow into 'intermediates', or not at all."
        )
    mask, images = jnp.ones(SAMPLES), jax.ShapeDtypeStruct((SAMPLES, *image.shape[1:]), image.dtype)
    with from_outside(f"model {name} {RULE}"), in_this_engine(mask):
        jax.eval_shape(lambda v, x: module.apply(v, x, **spelled(module, mask=mask)), variables, images)
    if others := [path for path, x in leaves.items() if not jnp.issubdtype(x.dtype, jnp.floating)]:
        kind = "as a number with a fraction, which it becomes by averaging; a NumPy array in the module's code stays"
        with from_outside(f"model {name} cannot use '{others[0]}' {kind}"):
            averaged = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), variables)
            jax.eval_shape(lambda v: module.apply(v, image, **arguments), averaged)
    if isinstance(module, NnxBackbone):
        check_nnx(module, name, image)


def _module(part: Any, name: str, known: Mapping[str, Any]) -> nn.Module:
    if isinstance(part, nn.Module):
        return hashed(part, name)
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
        module = NnxBackbone(maker := Maker(part, tuple(arguments.items())))
        instance = nnx.eval_shape(lambda: maker(nnx.Rngs(0)))
    else:
        instance = module = part(**arguments)
    if not isinstance(instance, nn.Module | nnx.Module):
        raise UserError(f"model {name} must be a Flax module, or what returns one, not {type(instance).__name__}.")
    return _module(module, name, known)
