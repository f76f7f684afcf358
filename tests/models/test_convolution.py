"""client_conv against lax.conv_general_dilated: values, gradients, vmap over one or both operands, loops."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_pcdd.models import convolution_table
from fedjax_pcdd.models.convolution import client_conv
from fedjax_pcdd.models.convolution_forms import Window, fits, weight_gradient
from fedjax_pcdd.models.convolution_table import Rule, default_rule

LAYOUT = ("NHWC", "HWIO", "NHWC")
CASES = {  # batch, image, in, out channels, kernel, strides, padding
    "5x5 valid, few channels": (4, (12, 12), 3, 6, (5, 5), (1, 1), "VALID"),
    "5x5 valid, width no multiple of a block": (2, (9, 9), 3, 6, (5, 5), (1, 1), "VALID"),
    "5x5 same, one channel": (3, (8, 8), 1, 32, (5, 5), (1, 1), "SAME"),
    "3x3 same, many channels": (2, (5, 6), 4, 40, (3, 3), (1, 1), "SAME"),
    "3x3 padded, stride 2, even size": (2, (8, 8), 3, 32, (3, 3), (2, 2), ((1, 1), (1, 1))),
    "3x3 same, stride 2, odd size": (2, (7, 7), 3, 4, (3, 3), (2, 2), "SAME"),
    "3x3 valid, stride 2, unreached edge": (2, (8, 8), 3, 4, (3, 3), (2, 2), "VALID"),
    "1x1 stride 2": (2, (6, 6), 3, 4, (1, 1), (2, 2), "SAME"),
    "1x1 padded": (2, (5, 5), 3, 4, (1, 1), (2, 2), ((1, 1), (0, 2))),
    "unequal sides and strides": (2, (9, 7), 2, 3, (4, 2), (3, 1), ((2, 0), (0, 1))),
    "padding beyond the kernel": (2, (5, 5), 2, 3, (2, 2), (1, 1), ((3, 2), (0, 3))),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
FEW = [list(CASES)[i] for i in (0, 4, 9)]
few_cases = pytest.mark.parametrize("case", [CASES[name] for name in FEW], ids=FEW)
RULES = [
    Rule("rows", "loop"),
    Rule("pieces", "loop"),
    Rule("gemm", "loop"),
    Rule("direct", "gemm"),
    Rule("direct", "grouped"),
]


def plain(x, w, case):
    return lax.conv_general_dilated(x, w, case[5], case[6], dimension_numbers=LAYOUT)


def ours(x, w, case):
    return client_conv(x, w, case[5], case[6], dimension_numbers=LAYOUT)


def operands(case, lanes=(), dtype=jnp.float32):
    """Input, kernel and the output's cotangent, with leading lane axes."""
    batch, image, inputs, outputs, kernel, *_ = case
    x, w = (*lanes, batch, *image, inputs), (*lanes, *kernel, inputs, outputs)
    single = [jnp.zeros(s[len(lanes) :]) for s in (x, w)]
    dy = (*lanes, *jax.eval_shape(functools.partial(plain, case=case), *single).shape)
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in (x, w, dy)]


@functools.cache
def value_and_gradients(convolution, case, lanes=None):
    def run(x, w, dy):
        y, pullback = jax.vjp(lambda x, w: convolution(x, w, case), x, w)
        return y, *pullback(dy)

    return jax.jit(jax.vmap(run, lanes) if lanes else run)


def assert_same(actual, expected, tolerance=2e-5):
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance * np.abs(e).max())


@cases
def test_value_and_gradients_are_those_of_lax_in_float32(case):
    args = operands(case)
    assert_same(value_and_gradients(ours, case)(*args), value_and_gradients(plain, case)(*args))


@cases
def test_value_and_gradients_are_those_of_lax_in_float64(case, x64):
    args = operands(case, dtype=jnp.float64)
    expected = value_and_gradients(plain, case)(*args)
    assert_same(value_and_gradients(ours, case)(*args), expected, tolerance=1e-12)


@pytest.mark.parametrize("rule", RULES)
@few_cases
def test_every_form_gives_the_values_and_gradients_of_lax(case, rule, monkeypatch):
    monkeypatch.setattr(convolution_table, "rule_for", lambda *_: rule)
    args = operands(case, lanes=(2,))
    single = value_and_gradients(plain, case)
    expected = [jnp.stack(lanes) for lanes in zip(*(single(*lane) for lane in zip(*args, strict=True)), strict=True)]
    assert_same(value_and_gradients.__wrapped__(ours, case, lanes=(0, 0, 0))(*args), expected)


@pytest.mark.parametrize("form", ["pieces", "blocked_pieces"])
@pytest.mark.parametrize("batch", [10, 11])
def test_the_weight_gradients_of_pieces_of_a_batch_add_up_to_the_whole(batch, form):
    case = (batch, *CASES["5x5 valid, few channels"][1:])
    x, _, dy = operands(case)
    window = Window((12, 12), (5, 5), (1, 1), ((0, 0), (0, 0)))
    assert fits(form, "weight_gradient", window, 3, 6)
    assert_same([weight_gradient(form, x, dy, window)], [value_and_gradients(plain, case)(*operands(case))[2]])


def test_pieces_of_a_batch_are_added_in_float32():
    x, dy = jnp.ones((800, 4, 4, 1), jnp.bfloat16), jnp.ones((800, 4, 4, 1), jnp.bfloat16)
    window = Window((4, 4), (1, 1), (1, 1), ((0, 0), (0, 0)))
    assert weight_gradient("pieces", x, dy, window) == jnp.asarray(12800, jnp.bfloat16)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, 0, None), (0, None, None), (None, 0, None), (None, None, 0)])
@few_cases
def test_vmap_of_some_operands(case, axes):
    args = [a if axis == 0 else a[0] for a, axis in zip(operands(case, lanes=(2,)), axes, strict=True)]
    single = value_and_gradients(plain, case)
    each = [single(*(a if x is None else a[i] for a, x in zip(args, axes, strict=True))) for i in range(2)]
    expected = [jnp.stack(lanes) for lanes in zip(*each, strict=True)]
    assert_same(value_and_gradients(ours, case, lanes=axes)(*args), expected)


@pytest.mark.parametrize("axes", [((0, 0), (0, 0)), ((0, None), (0, 0)), ((None, 0), (0, None))])
def test_vmap_of_vmap(axes):
    case = CASES["3x3 same, stride 2, odd size"]
    inner, outer = axes
    x, w, _ = operands(case, lanes=(2, 3))
    whole = slice(None)
    picks = [(whole if o == 0 else 0, whole if i == 0 else 0) for i, o in zip(inner, outer, strict=True)]
    x, w = x[picks[0]], w[picks[1]]

    def gradients(convolution):
        nested = jax.vmap(jax.vmap(lambda x, w: convolution(x, w, case), inner), outer)
        return jax.jit(jax.grad(lambda x, w: jnp.sin(nested(x, w)).sum(), (0, 1)))(x, w)

    assert_same(gradients(ours), gradients(plain))


@few_cases
def test_vmap_of_a_gradient(case):
    x, w, _ = operands(case, lanes=(2,))

    def gradients(convolution):
        return jax.jit(jax.vmap(jax.grad(lambda w, x: jnp.sin(convolution(x, w, case)).sum())))(w, x)

    assert_same([gradients(ours)], [gradients(plain)])


def test_gradient_steps_inside_a_loop():
    case = CASES["5x5 valid, few channels"]
    x, w, _ = operands(case, lanes=(2,))

    def descend(convolution):
        gradient = jax.vmap(jax.grad(lambda w, x: jnp.sin(convolution(x, w, case)).mean()))
        return jax.jit(lambda: lax.fori_loop(0, 3, lambda _, w: w - gradient(w, x), w))()

    assert_same([descend(ours)], [descend(plain)])


@pytest.mark.parametrize("unusual", [{"feature_group_count": 4}, {"kernel_dilation": 2}, {"input_dilation": 2}])
def test_unusual_convolutions_fall_through(unusual):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 7, 4)), jnp.float32)
    assert_same_layer(functools.partial(nn.Conv, 8, (3, 3), padding=((1, 1), (2, 0)), **unusual), x)


def test_one_dimensional_convolutions_fall_through():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7, 4)), jnp.float32)
    assert_same_layer(functools.partial(nn.Conv, 8, (3,)), x)


def test_client_conv_serves_as_the_convolution_of_flax():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 8, 3)), jnp.float32)
    assert_same_layer(functools.partial(nn.Conv, 6, (5, 5), strides=2), x)


def assert_same_layer(layer, x):
    variables = jax.jit(layer().init)(jax.random.key(0), x)
    expected = jax.jit(layer().apply)(variables, x)
    assert_same([jax.jit(layer(conv_general_dilated=client_conv).apply)(variables, x)], [expected])


def test_shared_weights_under_vmap_stay_one_ordinary_convolution():
    case = CASES["3x3 same, many channels"]
    x, w, _ = operands(case, lanes=(3,))
    text = str(jax.make_jaxpr(jax.vmap(lambda x: ours(x, w[0], case)))(x))
    assert (text.count("conv_general_dilated["), text.count("scan["), text.count("while[")) == (1, 0, 0)


def test_on_a_gpu_lanes_become_grouped_convolutions_and_matrix_products(monkeypatch):
    monkeypatch.setattr(convolution_table, "rule_for", lambda _, *rest: default_rule("gpu", *rest))
    case = CASES["3x3 same, many channels"]
    run = value_and_gradients.__wrapped__(ours, case, lanes=(0, 0, 0))
    text = str(jax.make_jaxpr(run)(*operands(case, lanes=(3,))))
    assert (text.count("conv_general_dilated["), text.count("feature_group_count=3")) == (2, 2)
    assert "dot_general[" in text
    assert "while[" not in text


def test_on_a_gpu_a_strided_1x1_convolution_slices_first_with_equal_results(monkeypatch):
    case = CASES["1x1 stride 2"]
    args = operands(case)
    expected = value_and_gradients(plain, case)(*args)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    sliced = jax.make_jaxpr(functools.partial(ours, case=case))(*args[:2])
    assert "optimization_barrier" in str(sliced)
    assert_same(value_and_gradients.__wrapped__(ours, case)(*args), expected)
