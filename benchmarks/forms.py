"""Every form of every operation of the convolutions that models have, as programs to be compiled.

A form may fail to compile only if its operands have other users (so the ResNets crashed XLA's compiler). Operands are
therefore results of a ReLU, which are returned, too.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.cases import PRECISIONS
from benchmarks.convolutions import COMPUTE, Layer, layers
from benchmarks.workloads import WORKLOADS, Workload
from fedjax_pcdd.models import MODELS, smallest_side
from fedjax_pcdd.models.convolution_forms import FORMS, fits
from fedjax_pcdd.models.convolution_table import LANES as WAYS

BATCH, LANES = 50, 4
TEXT = ("lstm",)


class Form(NamedTuple):
    """One operation of a layer in one form: alone, or in lanes as one of `WAYS`."""

    operation: str
    form: str
    way: str
    precision: str

    def __str__(self):
        return " ".join(self)


def side_of(model: str) -> int:
    """Side in pixels of the images for which a model is compiled."""
    return max(32, 2 * smallest_side(model))


@cache
def model_layers() -> dict[str, Layer]:
    """The distinct convolutions of all models that choose a form on an accelerator, by their descriptions."""
    sides = {name: side_of(name) for name in MODELS if name not in TEXT}
    works = [Workload(name, (side, side, 3), 1, BATCH, BATCH) for name, side in sides.items()]
    works += [Workload(w.model, w.shape, 1, BATCH, BATCH) for name, w in WORKLOADS.items() if name in ("w1", "w2")]
    with mock.patch.object(jax, "default_backend", return_value="gpu"):
        return {str(layer): layer for layer in layers(works)}


def forms_of(layer: Layer) -> Iterator[Form]:
    """All forms of a layer."""
    for precision in PRECISIONS:
        for operation, names in FORMS.items():
            shape = (operation, layer.window, layer.inputs, layer.outputs)
            yield from (Form(operation, form, "alone", precision) for form in names if fits(form, *shape))
            yield from (Form(operation, "gemm" if way == "gemm" else "direct", way, precision) for way in WAYS)


def program_of(layer: Layer, form: Form) -> tuple[Callable[[jax.Array, jax.Array], tuple], tuple]:
    """A form as a function of the operation's two operands, and their shapes."""
    lanes = () if form.way == "alone" else (LANES,)
    operands = jax.eval_shape(lambda: layer.operands(form.operation, lanes))
    operands = tuple(jax.ShapeDtypeStruct(x.shape, jnp.dtype(form.precision)) for x in operands)

    def one(a, b):
        return COMPUTE[form.operation](form.form, a, b, layer.window)

    def function(a, b):
        a, b = jax.nn.relu(a), jax.nn.relu(b)
        if form.way == "loop":
            return a, b, lax.map(lambda pair: one(*pair), (a, b))
        return a, b, (one if form.way == "alone" else jax.vmap(one))(a, b)

    return function, operands
