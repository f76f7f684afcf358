"""Models: sizes, parameter trees, layers, lanes."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd import models
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.models import (
    build,
    classifier,
    etf_from,
    feature_dim,
    forward,
    initialise,
    normalises,
    simplex_etf,
    sizes,
    uses_batch_norm,
)
from fedjax_pcdd.models.classifier import Classifier
from fedjax_pcdd.models.layers import BatchNorm, Conv, GroupNorm, conv_init, linear_init, max_pool, norm
from fedjax_pcdd.models.mlp import MLP
from fedjax_pcdd.models.resnet import ResNet

SMALLEST = {
    "mlp": (4, 4, 1),
    "simple_cnn": (16, 16, 3),
    "mcmahan_cnn": (4, 4, 1),
    "fedrl_cnn": (16, 16, 1),
    "femnist_cnn": (4, 4, 1),
    "resnet8": (4, 4, 3),
    "resnet8_stride2": (8, 8, 3),
    "resnet10": (8, 8, 3),
    "resnet12": (8, 8, 3),
    "resnet18": (8, 8, 3),
    "resnet50": (8, 8, 3),
    "wrn28_10": (4, 4, 3),
    "efficientnet_b0": (16, 16, 3),
    "efficientnet_b0_1280": (16, 16, 3),
    "efficientnet_b0_isic": (32, 32, 3),
    "efficientnet_b0_flamby": (32, 32, 3),
    "mobilenet_v2": (8, 8, 3),
    "googlenet": (4, 4, 3),
    "shufflenet_g2": (8, 8, 3),
    "lstm": (1, 1, 1),
}


shapes = functools.cache(classifier._shapes)


def images(shape, batch=6, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((batch, *shape)), jnp.float32)


def narrow_resnet(norm="batch", dtype=None):
    return Classifier(ResNet((1, 1), width=4, norm=norm, dtype=dtype), num_classes=3, dtype=dtype)


@functools.cache
def narrow_variables():
    return initialise(narrow_resnet(), jax.random.key(0), (8, 8, 3))


@pytest.mark.parametrize(
    ("name", "shape", "classes", "params", "full", "features"),
    [
        ("mlp", (28, 28, 1), 10, 159_010, 159_010, 200),
        ("simple_cnn", (32, 32, 3), 10, 62_006, 62_006, 84),
        ("mcmahan_cnn", (28, 28, 1), 10, 1_663_370, 1_663_370, 512),
        ("resnet18", (32, 32, 3), 10, 11_173_962, 11_183_582, 512),
        ("resnet18", (28, 28, 1), 10, 11_172_810, 11_182_430, 512),
        ("resnet18", (32, 32, 3), 100, 11_220_132, 11_229_752, 512),
        ("fedrl_cnn", (28, 28, 1), 10, 34_622, 34_622, 120),
        ("femnist_cnn", (28, 28, 1), 62, 6_603_710, 6_603_710, 2048),
        ("resnet50", (32, 32, 3), 100, 23_705_252, 23_758_425, 2048),
        ("wrn28_10", (32, 32, 3), 100, 36_546_980, 36_564_957, 640),
        ("resnet8", (32, 32, 3), 10, 78_042, 78_042 + 2 * 336 + 9, 64),
        ("resnet8_stride2", (32, 32, 3), 10, 78_042, 78_042 + 2 * 336 + 9, 64),
        ("resnet8", (28, 28, 1), 10, 78_042 - 288, 78_042 - 288 + 2 * 336 + 9, 64),
        # The paper's code has 1 088 more, of layers in the first block that are never called.
        ("efficientnet_b0", (32, 32, 3), 10, 3_598_598, 3_598_598 + 2 * 19_728 + 48, 320),
        ("efficientnet_b0", (32, 32, 3), 65, 3_616_253, 3_616_253 + 2 * 19_728 + 48, 320),
        ("efficientnet_b0_1280", (32, 32, 3), 10, 4_007_548 + 12_810, 4_049_613 + 12_810, 1280),
        ("efficientnet_b0_isic", (200, 200, 3), 8, 4_832_516, 4_874_581, 640),
        ("efficientnet_b0_flamby", (200, 200, 3), 8, 4_007_548 + 10_248, 4_049_613 + 10_248, 1280),
    ],
)
def test_sizes_are_the_published_ones(name, shape, classes, params, full, features):
    model = build(name, num_classes=classes, image_shape=shape)
    assert sizes(model, shape) == (params, full, features, (features + 1) * classes)


@pytest.mark.thorough
@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_runs_on_its_smallest_images(name, monkeypatch):
    monkeypatch.setattr(classifier, "_shapes", shapes)  # so that `feature_dim` reuses what is traced here
    shape = SMALLEST[name]
    model = build(name, num_classes=3, image_shape=shape, text=name == "lstm")
    variables = shapes(model, shape)[1]
    outputs = jax.eval_shape(lambda v: forward(model, v, images(shape), train=True), variables)
    assert outputs[0].logits.shape == (6, 3)
    assert outputs[0].features.shape == (6, feature_dim(model, shape))


@pytest.mark.parametrize("name", [name for name in models.MODELS if name not in ("mlp", "lstm")])
def test_too_small_images_are_refused_with_a_model_that_fits(name):
    height, width, channels = SMALLEST[name]
    with pytest.raises(UserError, match=f"at least {height}x{height} pixels, not {height}x{width - 1}x.*: take .*mlp"):
        build(name, num_classes=3, image_shape=(height, width - 1, channels))


def test_inputs_that_are_no_images_are_refused():
    with pytest.raises(UserError, match=r"not 2: take mlp\."):
        build("resnet18", num_classes=3, image_shape=(2,))


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'resnet18'"):
        build("resnet1", num_classes=3, image_shape=(32, 32, 3))
    with pytest.raises(UserError, match="did you mean 'batch'"):
        build("mlp", num_classes=3, image_shape=(2,), norm="batchnorm")


def test_parameters_are_those_of_backbone_neck_and_head():
    model = build("mlp", num_classes=3, image_shape=(4,)).clone(neck=2)
    params = initialise(model, jax.random.key(0), (4,))["params"]
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes["neck"] == {f"fc{i}": {"kernel": (200, 200), "bias": (200,)} for i in (1, 2)}
    assert set(shapes) == {"backbone", "neck", "head"}


def test_a_model_without_head_gives_no_logits():
    model = build("mlp", num_classes=3, image_shape=(4,)).clone(head=False)
    variables = initialise(model, jax.random.key(0), (4,))
    assert set(variables["params"]) == {"backbone"}
    assert forward(model, variables, images((4,)), train=False)[0].logits is None
    assert sizes(model, (4,)).head == 0


def test_the_head_may_have_no_bias():
    model = build("mlp", num_classes=3, image_shape=(4,)).clone(head_bias=False)
    assert sizes(model, (4,)).head == 200 * 3


@pytest.mark.parametrize("neck", [0, 1, 2])
def test_the_head_reads_the_features(neck):
    model = Classifier(MLP((5,)), num_classes=3, neck=neck)
    variables = initialise(model, jax.random.key(0), (4,))
    outputs, _ = forward(model, variables, images((4,)), train=False)
    head = variables["params"]["head"]
    np.testing.assert_allclose(outputs.features @ head["kernel"] + head["bias"], outputs.logits, rtol=1e-5)


@pytest.mark.parametrize("neck", [1, 2])
def test_a_neck_ends_linearly(neck):
    model = Classifier(MLP((5,)), num_classes=3, neck=neck)
    variables = initialise(model, jax.random.key(0), (4,))
    assert (forward(model, variables, images((4,)), train=False)[0].features < 0).any()


def test_a_neck_of_two_has_a_relu_between():
    model = Classifier(MLP((5,)), num_classes=3, neck=2, head=False)
    params = initialise(model, jax.random.key(0), (4,))["params"]
    x = images((4,))
    before = forward(model.clone(neck=0), {"params": {"backbone": params["backbone"]}}, x, train=False)[0].features
    first, second = params["neck"]["fc1"], params["neck"]["fc2"]
    middle = jnp.maximum(before @ first["kernel"] + first["bias"], 0)
    expected = middle @ second["kernel"] + second["bias"]
    np.testing.assert_allclose(forward(model, {"params": params}, x, train=False)[0].features, expected, rtol=1e-5)


@pytest.mark.thorough
def test_bfloat16_computes_in_bfloat16_and_returns_float32():
    model, x = narrow_resnet(dtype=jnp.bfloat16), images((8, 8, 3))
    run = jax.jit(lambda v, x: forward(model, v, x, train=True))
    outputs, new = run(narrow_variables(), x)
    exact, _ = jax.jit(lambda v, x: forward(narrow_resnet(), v, x, train=True))(narrow_variables(), x)
    assert {a.dtype for a in jax.tree.leaves((outputs, new))} == {jnp.dtype(jnp.float32)}
    difference = jnp.abs(outputs.logits - exact.logits).max()
    assert 0 < difference < 0.1 * jnp.abs(exact.logits).max()


@pytest.mark.thorough
def test_lanes_do_not_change_results():
    model, x = narrow_resnet(), np.stack([images((8, 8, 3), seed=s) for s in range(2)])

    def gradient(variables, x):
        other_collections = {k: v for k, v in variables.items() if k != "params"}

        def loss(params):
            outputs, new = forward(model, {"params": params, **other_collections}, x, train=True)
            return jnp.square(outputs.logits).sum(), new

        return jax.grad(loss, has_aux=True)(variables["params"])

    variables = jax.tree.map(lambda w: np.stack([w, 1.1 * np.array(w)]), narrow_variables())
    lanes = jax.jit(jax.vmap(gradient))(variables, x)
    single = jax.jit(gradient)
    each = [single(jax.tree.map(lambda a, i=i: a[i], variables), x[i]) for i in range(2)]
    expected = jax.tree.map(lambda *a: np.stack(a), *each)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), lanes, expected)


@pytest.mark.thorough
def test_evaluation_changes_no_statistics_and_training_does():
    model, variables, x = narrow_resnet(), narrow_variables(), images((8, 8, 3))
    assert jax.eval_shape(lambda: forward(model, variables, x, train=False))[1] == {}
    _, new = jax.jit(lambda: forward(model, variables, x, train=True))()
    jax.tree.map(
        lambda old, new: pytest.fail("unchanged") if (old == new).all() else None,
        variables["batch_stats"],
        new["batch_stats"],
    )


def test_only_batch_norm_counts_as_batch_norm():
    assert uses_batch_norm(narrow_resnet(), (8, 8, 3))
    assert not uses_batch_norm(narrow_resnet("group"), (8, 8, 3))
    assert not uses_batch_norm(build("mlp", num_classes=3, image_shape=(4,)), (4,))


class Foreign(nn.Module):
    """A backbone of Flax's own layers, as someone else would write it."""

    normed: bool = True

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(5)(x)
        return nn.BatchNorm(use_running_average=not train)(x) if self.normed else x


def test_norm_layers_of_another_library_are_recognised():
    foreign, plain = (Classifier(Foreign(normed), num_classes=3) for normed in (True, False))
    assert [f(m, (4,)) for m in (foreign, plain) for f in (uses_batch_norm, normalises)] == [True, True, False, False]


def test_a_norm_of_the_features_is_not_one_of_the_backbone():
    model = Classifier(MLP((5,)), num_classes=3, feature_norm=True)
    assert (uses_batch_norm(model, (4,)), normalises(model, (4,))) == (True, False)


def test_group_norm_has_no_statistics():
    shapes = jax.eval_shape(lambda: initialise(narrow_resnet("group"), jax.random.key(0), (8, 8, 3)))
    assert set(shapes) == {"params"}


def test_a_norm_of_the_features_comes_before_the_head():
    model = Classifier(MLP((5,)), num_classes=3, feature_norm=True)
    variables = initialise(model, jax.random.key(0), (4,))
    features = forward(model, variables, images((4,)), train=True)[0].features
    assert uses_batch_norm(model, (4,))
    np.testing.assert_allclose(features.mean(0), 0, atol=1e-5)


def test_initialisation_depends_on_the_key():
    model = build("mlp", num_classes=3, image_shape=(4,))
    kernels = [initialise(model, jax.random.key(s), (4,))["params"]["head"]["kernel"] for s in (0, 0, 1)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert (kernels[0] != kernels[2]).all()


def batch_norm(x, mask=None, statistics=None):
    layer = BatchNorm()
    variables = layer.init(jax.random.key(0), x, train=False)
    if statistics:
        variables = {**variables, "batch_stats": statistics}
    out, new = layer.apply(variables, x, train=True, mask=mask, mutable=["batch_stats"])
    return out, new["batch_stats"]


def test_masked_samples_do_not_enter_statistics():
    x, mask = images((3, 3, 2)), jnp.asarray([1, 0, 1, 1, 0, 1])
    out, statistics = batch_norm(x, mask)
    expected_out, expected = batch_norm(x[mask == 1])
    np.testing.assert_allclose(out[mask == 1], expected_out, rtol=1e-5, atol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), statistics, expected)


def test_a_single_valid_element_gives_no_nan():
    x, mask = images((2,)), jnp.zeros(6).at[2].set(1)
    out, statistics = batch_norm(x, mask)
    assert jnp.isfinite(out).all()
    np.testing.assert_allclose(statistics["mean"], 0.1 * x[2], rtol=1e-6)
    np.testing.assert_allclose(statistics["var"], 0.9, rtol=1e-6)


def test_padding_stays_finite_however_deep_a_network_with_one_valid_sample_is():
    x, mask, layer = images((2,)), jnp.zeros(6).at[2].set(1), BatchNorm()
    variables = layer.init(jax.random.key(0), x, train=False)

    def loss(scale, x, mask):
        own = {**variables, "params": {**variables["params"], "scale": scale}}
        for _ in range(20):  # of 1 / sqrt(1e-5) each
            x = layer.apply(own, x, train=True, mask=mask, mutable=["batch_stats"])[0] + 1
        return x[jnp.argmax(mask)].sum(), x

    gradient, out = jax.grad(loss, has_aux=True)(jnp.ones(2), x, mask)
    expected, expected_out = jax.grad(loss, has_aux=True)(jnp.ones(2), x[2:3], jnp.ones(1))
    np.testing.assert_array_equal(out, [expected_out[0]] * 6)  # padding leaves as the bias
    np.testing.assert_array_equal(gradient, expected)


def test_a_batch_without_valid_samples_leaves_the_statistics():
    statistics = {"mean": jnp.asarray([1.0, 2.0]), "var": jnp.asarray([3.0, 4.0])}
    out, new = batch_norm(images((2,)), jnp.zeros(6), statistics)
    assert jnp.isfinite(out).all()
    jax.tree.map(np.testing.assert_array_equal, new, statistics)


def test_batch_norm_of_bfloat16_keeps_float32_statistics():
    x = images((3, 3, 2))
    out, statistics = BatchNorm(dtype=jnp.bfloat16).init_with_output(jax.random.key(0), x, train=False)
    assert out.dtype == jnp.bfloat16
    assert {a.dtype for a in jax.tree.leaves(statistics)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(("channels", "groups"), [(2, 2), (64, 32), (33, 11), (48, 24)])
def test_group_norm_normalises_each_group_of_each_sample(channels, groups):
    x = 3 + 2 * images((4, 4, channels), batch=2)
    out, _ = GroupNorm().init_with_output(jax.random.key(0), x)
    grouped = out.reshape(2, 16, groups, -1)
    np.testing.assert_allclose(grouped.mean((1, 3)), 0, atol=1e-5)
    np.testing.assert_allclose(grouped.var((1, 3)), 1, rtol=1e-3)


def test_group_norm_scales_and_shifts_each_channel():
    x, scale, bias = 0.01 * images((4, 4, 48), batch=2), jnp.arange(1.0, 49.0), jnp.arange(48.0)
    out = GroupNorm().apply({"params": {"scale": scale, "bias": bias}}, x)
    grouped = np.asarray(x, np.float64).reshape(2, 16, 24, 2)
    spread = np.sqrt(grouped.var((1, 3), keepdims=True) + 1e-5)  # the images are so faint that 1e-5 counts
    normal = (grouped - grouped.mean((1, 3), keepdims=True)) / spread
    np.testing.assert_allclose(out, normal.reshape(x.shape) * scale + bias, 1e-4, 1e-4)


def test_unknown_norms_are_refused():
    with pytest.raises(UserError, match="did you mean 'group'"):
        norm("groups")


def test_max_pool_is_the_maximum_of_each_window_and_cuts_odd_sizes():
    x = images((7, 5, 2))
    windows = x[:, :6, :4].reshape(6, 3, 2, 2, 2, 2)
    np.testing.assert_array_equal(max_pool(x, 2), windows.max((2, 4)))


def test_linear_init_is_uniform_within_one_over_root_fan_in():
    kernel = linear_init(jax.random.key(0), (5, 5, 4, 400))
    np.testing.assert_allclose([kernel.min(), kernel.max(), kernel.std()], [-0.1, 0.1, 0.1 / 3**0.5], rtol=1e-2)


def test_biases_start_uniform_within_one_over_root_of_all_inputs_of_an_output():
    variables = Conv(4000, 5).init(jax.random.key(0), jnp.zeros((1, 5, 5, 4)))
    bias = variables["params"]["bias"]
    np.testing.assert_allclose([bias.min(), bias.max(), bias.std()], [-0.1, 0.1, 0.1 / 3**0.5], rtol=2e-2)


def test_conv_init_is_normal_with_fan_out():
    kernel = conv_init(jax.random.key(0), (3, 3, 100, 50))
    np.testing.assert_allclose([kernel.std(), jnp.abs(kernel).mean()], [1 / 15, (2 / np.pi) ** 0.5 / 15], rtol=2e-2)


@pytest.mark.parametrize(("dim", "classes"), [(2, 2), (10, 10), (64, 7)])
def test_etf_columns_have_unit_length_and_equal_angles(dim, classes):
    frame = simplex_etf(dim, classes, seed=1)
    assert frame.dtype == np.float64
    expected = (classes * np.eye(classes) - 1) / (classes - 1)
    np.testing.assert_allclose(frame.T @ frame, expected, atol=1e-12)


def test_etf_depends_on_the_seed_alone():
    np.testing.assert_array_equal(simplex_etf(5, 3, seed=1), simplex_etf(5, 3, seed=1))
    assert (simplex_etf(5, 3, seed=1) != simplex_etf(5, 3, seed=2)).all()


def test_etf_refuses_too_few_features_or_classes():
    with pytest.raises(UserError, match="10 or more features, not 8"):
        simplex_etf(8, 10, seed=0)
    with pytest.raises(UserError, match="at least 2 classes"):
        etf_from(np.ones((3, 1)))


@pytest.mark.parametrize(("name", "side"), [("efficientnet_b0_flamby", 6), ("efficientnet_b0_isic", 7)])
def test_flambys_network_is_padded_for_images_of_224(name, side):
    model = build(name, num_classes=8, image_shape=(200, 200, 3)).backbone
    x = jnp.zeros((1, 200, 200, 3))
    _, collections = jax.eval_shape(
        lambda key: model.init_with_output(key, x, train=False, capture_intermediates=True, mutable=True),
        jax.random.key(0),
    )
    assert collections["intermediates"]["last"]["__call__"][0].shape == (1, side, side, 1280)


def test_flambys_network_has_its_own_norm_and_dropout_rates():
    model = build("efficientnet_b0_flamby", num_classes=3, image_shape=(32, 32, 3)).backbone
    layer = norm(model.norm)()
    assert (layer.epsilon, layer.momentum, model.dropout, model.drop_connect) == (1e-3, 0.01, 0.2, 0.2)
    assert (
        build("efficientnet_b0_flamby", num_classes=3, image_shape=(32, 32, 3), norm="group").backbone.norm == "group"
    )
