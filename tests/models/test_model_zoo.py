"""The small networks of heterogeneous federations: sizes, shapes, blocks, lanes."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fedjax_pcdd.models import build, feature_dim, forward, initialise, sizes, with_uniform_kernels
from fedjax_pcdd.models.classifier import Classifier, layers
from fedjax_pcdd.models.convolution import client_conv
from fedjax_pcdd.models.efficientnet import EfficientNet
from fedjax_pcdd.models.efficientnet import InvertedBlock as EfficientBlock
from fedjax_pcdd.models.efficientnet import Stage as EfficientStage
from fedjax_pcdd.models.googlenet import GoogLeNet, Inception, Widths
from fedjax_pcdd.models.layers import ConvNorm, average_pool, max_pool
from fedjax_pcdd.models.mobilenet import InvertedBlock, MobileNet
from fedjax_pcdd.models.resnet import Block, ResNet
from fedjax_pcdd.models.shufflenet import ShuffleBlock, ShuffleNet, shuffle
from fedjax_pcdd.models.wide_resnet import WideBlock

IMAGE = (32, 32, 3)
FEATURES = {"resnet10": 512, "resnet12": 512, "mobilenet_v2": 1280, "googlenet": 1024, "shufflenet_g2": 800}
KERNEL_INITS_OF = {"resnet10": "uniform", "resnet12": "uniform", "efficientnet_b0": "uniform", "resnet18": "fan_out"}
SMALL = (8, 8, 3)
NARROW = {
    "mobilenet": MobileNet(((1, 6, 1, 1), (2, 8, 1, 2)), stem=4, last=8),
    "googlenet": GoogLeNet(((), (Widths(3, 2, 4, 1, 2, 3),)), stem=4),
    "shufflenet": ShuffleNet((16,), (2,), stem=8),
}


def images(shape=SMALL, batch=2, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((batch, *shape)), jnp.float32)


def full(name, **options):
    """The full model, and the shapes of its variables, which its kind of norm and its type of numbers do not change."""
    shapes = jax.eval_shape(
        lambda: initialise(build(name, num_classes=10, image_shape=IMAGE), jax.random.key(0), IMAGE)
    )
    if options.get("norm") == "group":
        shapes = {"params": shapes["params"]}
    return build(name, num_classes=10, image_shape=IMAGE, **options), shapes


def narrow(name, norm="batch"):
    return Classifier(NARROW[name].clone(norm=norm), 3)


def drawn(model, shape, seed=0):
    """Variables drawn by NumPy: compiling the initialisation takes longer than all else here."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: initialise(model, jax.random.key(0), shape))
    fan_in = lambda x: math.prod(x.shape[:-1]) if len(x.shape) > 1 else 4  # noqa: E731
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0.1, fan_in(x) ** -0.5, x.shape), x.dtype), shapes["params"])
    initial = jax.tree_util.tree_map_with_path(lambda path, x: jnp.full(x.shape, float("var" in str(path[-1]))), shapes)
    return {**initial, "params": params}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "params", "full"),
    [
        ("resnet10", 4_903_242, 4_909_014),
        ("resnet12", 4_977_226, 4_983_256),
        ("mobilenet_v2", 2_296_922, 2_332_067),
        ("googlenet", 6_166_250, 6_182_122),
        ("shufflenet_g2", 887_582, 907_407),
    ],
)
def test_sizes_are_those_of_the_layer_lists(name, params, full):
    features = FEATURES[name]
    model = build(name, num_classes=10, image_shape=IMAGE)
    assert sizes(model, IMAGE) == (params, full, features, (features + 1) * 10)


STAGES = {
    "resnet12": ("stage", [73_984 * 2, 230_144, 919_040, 3_673_088]),
    "mobilenet_v2": ("stage", [2_528, 14_400, 39_696, 183_872, 309_504, 795_264, 525_760]),
    "googlenet": ("group", [165_552 + 424_096, 386_016 + 462_936 + 523_912 + 611_072 + 952_704, 1_127_808 + 1_496_144]),
    "shufflenet_g2": ("stage", [39_002, 305_750, 534_700]),
}


@pytest.mark.parametrize("name", STAGES)
def test_stages_have_the_documented_sizes(name):
    prefix, expected = STAGES[name]
    params = full(name)[1]["params"]["backbone"]
    counts = [
        sum(math.prod(x.shape) for part, tree in params.items() if part.startswith(f"{prefix}{i}_")
            for x in jax.tree.leaves(tree))
        for i in range(1, len(expected) + 1)
    ]  # fmt: skip
    assert counts == expected


@pytest.mark.thorough
@pytest.mark.parametrize(("norm", "dtype"), [("batch", None), ("group", jnp.bfloat16)])
@pytest.mark.parametrize("name", FEATURES)
def test_features_and_logits_are_float32_in_each_norm_and_type(name, norm, dtype):
    model, variables = full(name, norm=norm, dtype=dtype)
    outputs, state = jax.eval_shape(lambda v: forward(model, v, images(IMAGE), train=True), variables)
    assert (outputs.features.shape, outputs.logits.shape) == ((2, FEATURES[name]), (2, 10))
    assert {x.dtype for x in jax.tree.leaves((outputs, state))} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "resnet10" else pytest.mark.slow) for name in FEATURES]
)
def test_a_neck_without_head_gives_its_own_features(name):
    model = build(name, num_classes=7, image_shape=IMAGE).clone(neck=2, neck_width=5, head=False)
    outputs, _ = jax.eval_shape(
        lambda: forward(model, initialise(model, jax.random.key(0), IMAGE), images(IMAGE), train=False)
    )
    assert (outputs.features.shape, outputs.logits) == ((2, 5), None)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "sides"),
    [
        ("resnet10", [32, 32, 16, 8]),
        ("mobilenet_v2", [32, 32, 32, 16, 8, 8, 4, 4]),
        ("googlenet", [32, 32, 16, 16, 16, 16, 16, 8, 8]),
        ("shufflenet_g2", [32, 16, 8]),
    ],
)
def test_sides_are_halved_where_the_layer_lists_say(name, sides):
    model, variables = full(name)
    layer_outputs = jax.eval_shape(lambda v: layers(model, v, images(IMAGE), train=False)[0], variables)
    assert [layer.shape[1] for layer in layer_outputs[:-2]] == sides


@pytest.mark.thorough
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", NARROW)
def test_outputs_are_finite_in_training_and_evaluation(name, norm):
    model = narrow(name, norm)
    variables = drawn(model, SMALL)
    outputs = jax.jit(lambda x: [forward(model, variables, x, train=train) for train in (True, False)])(images())
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(outputs))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("name", FEATURES)
def test_outputs_of_the_full_models_are_finite(name, norm):
    model = build(name, num_classes=10, image_shape=IMAGE, norm=norm)
    run = jax.jit(lambda v, x: [forward(model, v, x, train=train) for train in (True, False)])
    outputs = run(initialise(model, jax.random.key(0), IMAGE), images(IMAGE))
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(outputs))


@pytest.mark.thorough
@pytest.mark.parametrize("name", NARROW)
def test_a_step_of_two_clients_together_equals_a_step_of_each(name):
    model = narrow(name)

    def step(variables, x, labels):
        other_collections = {k: v for k, v in variables.items() if k != "params"}

        def loss(params):
            outputs, state = forward(model, {"params": params, **other_collections}, x, train=True)
            return -jnp.take_along_axis(nn.log_softmax(outputs.logits), labels[:, None], 1).mean(), state

        gradient, state = jax.grad(loss, has_aux=True)(variables["params"])
        return {"params": jax.tree.map(lambda w, g: w - 0.1 * g, variables["params"], gradient), **state}

    clients = [(drawn(model, SMALL, seed), images(seed=seed), jnp.asarray([seed, 2])) for seed in range(2)]
    single = jax.jit(step)
    expected = jax.tree.map(lambda *a: jnp.stack(a), *[single(*client) for client in clients])
    together = jax.jit(jax.vmap(step))(*jax.tree.map(lambda *a: jnp.stack(a), *clients))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), together, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NARROW)
def test_the_mask_reaches_every_norm(name):
    model, mask = narrow(name), jnp.asarray([1, 0, 1])
    variables, x = drawn(model, SMALL), images(batch=3)
    run = jax.jit(lambda x: forward(model, variables, x, train=True, mask=mask))
    (outputs, state), (expected, expected_state) = run(x), run(x.at[1].set(images()[0]))
    np.testing.assert_array_equal(outputs.logits[mask == 1], expected.logits[mask == 1])
    jax.tree.map(np.testing.assert_array_equal, state, expected_state)


@pytest.mark.parametrize(("stride", "side"), [(1, 6), (2, 3)])
def test_padded_max_pool_and_its_gradient_are_those_of_windows(stride, side):
    def ours(x):
        return max_pool(x, 3, stride, 1)

    def windows(x):
        return nn.max_pool(x, (3, 3), (stride, stride), ((1, 1), (1, 1)))

    @jax.jit
    def values_and_gradients(x):
        return [(pool(x), jax.vjp(pool, x)[1](pool(x))[0]) for pool in (ours, windows)]

    (value, gradient), (expected, expected_gradient) = values_and_gradients(images((6, 6, 2)))
    assert value.shape == (2, side, side, 2)
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kernel", "stride", "inputs", "features", "groups"),
    [(3, 1, 6, 6, 6), (5, 2, 6, 6, 6), (1, 1, 6, 4, 2), (3, 2, 6, 4, 2), (3, 1, 3, 6, 3)],
)
def test_grouped_convolutions_and_their_gradients_are_those_of_xla(kernel, stride, inputs, features, groups):
    x, w = images((7, 6, inputs)), images((kernel, inputs // groups, features), kernel, 1)
    strides_and_padding = (stride, stride), ((kernel // 2,) * 2,) * 2

    def xla(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, w, *strides_and_padding, dimension_numbers=numbers, feature_group_count=groups
        )

    def ours(x, w):
        return client_conv(x, w, *strides_and_padding, feature_group_count=groups)

    @jax.jit
    def values_and_gradients(x, w):
        outputs = [(conv(x, w), jax.vjp(conv, x, w)[1]) for conv in (ours, xla)]
        return [(out, pull(jnp.cos(out))) for out, pull in outputs]

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), *values_and_gradients(x, w))


def test_average_pool_counts_the_zeros_at_the_edges():
    x = images((8, 8, 2))
    expected = nn.avg_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1)), count_include_pad=True)
    np.testing.assert_allclose(average_pool(x, 3, 2, 1), expected, rtol=1e-5, atol=1e-6)


def test_shuffling_with_the_complementary_groups_undoes_it():
    x = np.arange(12)
    np.testing.assert_array_equal(shuffle(shuffle(x, 3), 4), x)
    assert (shuffle(x, 3) != x).any()


def block_output(block, x, silent):
    """The output of a block in evaluation when the norm of its part `silent` gives 0."""

    @jax.jit
    def run(x):
        variables = block.init(jax.random.key(0), x, train=False)
        params = variables["params"]
        part = {**params[silent], "norm": jax.tree.map(jnp.zeros_like, params[silent]["norm"])}
        return block.apply({**variables, "params": {**params, silent: part}}, x, train=False)

    return run(x)


def test_an_inverted_block_of_stride_1_adds_its_input():
    x = images((4, 4, 3))
    np.testing.assert_array_equal(block_output(InvertedBlock(3, 2), x, "project"), x)


def test_an_inverted_block_of_stride_2_adds_nothing():
    assert (block_output(InvertedBlock(3, 2, 2), images((4, 4, 3)), "project") == 0).all()


def test_a_shuffle_block_of_stride_1_adds_its_input():
    x = images((4, 4, 8))
    np.testing.assert_array_equal(block_output(ShuffleBlock(8), x, "expand"), nn.relu(x))


@pytest.mark.thorough
def test_a_shuffle_block_of_stride_2_appends_its_averaged_input():
    x = images((4, 4, 8))
    out = block_output(ShuffleBlock(16, 2), x, "expand")
    assert (out[..., :8] == 0).all()
    np.testing.assert_array_equal(out[..., 8:], nn.relu(average_pool(x, 3, 2, 1)))


def normed(x):
    """Batch norm with its initial statistics."""
    return x / np.sqrt(1 + 1e-5)


def convolved(params, x, stride=1, groups=1):
    """A layer `Conv` with a kernel of odd size, padded by half of that."""
    kernel = params["kernel"]
    pads = [(side // 2, side // 2) for side in kernel.shape[:2]]
    out = lax.conv_general_dilated(
        x, kernel, (stride, stride), pads, dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )
    return out + params.get("bias", 0)


def residual(p, x, stride):
    y = nn.relu(normed(convolved(p["conv1"], x, stride)))
    return nn.relu(normed(convolved(p["conv2"], y)) + normed(convolved(p["conv_shortcut"], x, stride)))


def bottleneck(p, x, stride):
    y = nn.relu(normed(convolved(p["conv1"], x)))
    y = nn.relu(normed(convolved(p["conv2"], y, stride)))
    return nn.relu(normed(convolved(p["conv3"], y)) + normed(convolved(p["conv_shortcut"], x, stride)))


def wide(p, x, stride):
    y = convolved(p["conv1"], nn.relu(normed(x)))
    y = convolved(p["conv2"], nn.relu(normed(y)), stride)
    return y + convolved(p["conv_shortcut"], x, stride)


def inverted(p, x, stride):
    y = nn.relu(normed(convolved(p["expand"]["conv"], x)))
    y = nn.relu(normed(convolved(p["depthwise"]["conv"], y, stride, groups=16)))
    y = normed(convolved(p["project"]["conv"], y))
    return y if stride == 2 else y + normed(convolved(p["shortcut"]["conv"], x))


def gated(p, x, stride):
    y = nn.silu(normed(convolved(p["expand"]["conv"], x)))
    y = nn.silu(normed(convolved(p["depthwise"]["conv"], y, stride, groups=16)))
    hidden = nn.silu(y.mean((1, 2)) @ p["gate"]["squeeze"]["kernel"] + p["gate"]["squeeze"]["bias"])
    y = y * nn.sigmoid(hidden @ p["gate"]["excite"]["kernel"] + p["gate"]["excite"]["bias"])[:, None, None]
    return normed(convolved(p["project"]["conv"], y))


def shuffled(p, x, stride):
    y = shuffle(nn.relu(normed(convolved(p["reduce"]["conv"], x, groups=2))), 2)
    y = nn.relu(normed(convolved(p["depthwise"]["conv"], y, stride, groups=2)))
    return nn.relu(normed(convolved(p["expand"]["conv"], y, groups=2)) + x)


def inception(p, x, stride):
    def conv(x, name):
        return nn.relu(normed(convolved(p[name]["conv"], x)))

    five = conv(conv(conv(x, "reduce5"), "conv5_1"), "conv5_2")
    branches = [conv(x, "direct"), conv(conv(x, "reduce3"), "conv3"), five, conv(max_pool(x, 3, 1, 1), "pool")]
    return jnp.concatenate(branches, -1)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("block", "formula", "stride"),
    [
        (Block(12, 2), residual, 2), (Block(4, 2, bottleneck=True), bottleneck, 2), (WideBlock(12, 2), wide, 2),
        (InvertedBlock(12, 2, 2), inverted, 2), (InvertedBlock(12, 2), inverted, 1),
        (EfficientBlock(EfficientStage(2, 3, 2, 12, 1)), gated, 2), (ShuffleBlock(8), shuffled, 1),
        (Inception(Widths(2, 3, 4, 3, 5, 2)), inception, 1),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)  # fmt: skip
def test_a_block_computes_its_formula(block, formula, stride):
    x = images((6, 6, 8))
    variables = block.init(jax.random.key(1), x, train=False)
    output = block.apply(variables, x, train=False)
    np.testing.assert_allclose(output, formula(variables["params"], x, stride), rtol=1e-4, atol=1e-5)


def test_grouped_kernels_start_uniform_within_one_over_root_fan_in_of_a_group():
    variables = ConvNorm(400, 5, groups=4).init(jax.random.key(0), jnp.zeros((1, 1, 1, 16)), train=False)
    kernel = variables["params"]["conv"]["kernel"]
    assert kernel.shape == (5, 5, 4, 400)
    np.testing.assert_allclose([kernel.min(), kernel.max(), kernel.std()], [-0.1, 0.1, 0.1 / 3**0.5], rtol=1e-2)


@pytest.mark.thorough
def test_feature_sizes_of_the_four_digits_participants_are_the_papers():
    names = ("resnet10", "resnet12", "efficientnet_b0", "mobilenet_v2")
    assert [feature_dim(build(name, num_classes=10, image_shape=IMAGE), IMAGE) for name in names] == [
        512,
        512,
        320,
        1280,
    ]


EFFICIENT_STAGES = (EfficientStage(1, 3, 1, 4, 2), EfficientStage(2, 3, 1, 4, 2))


def efficient(**options):
    model = Classifier(EfficientNet(EFFICIENT_STAGES, last=None, **options), 3)
    return model, jax.jit(lambda key: initialise(model, key, (8, 8, 3)))(jax.random.key(0))


def run_in_training(model, variables, seed):
    key = None if seed is None else jax.random.key(seed)
    return forward(model, variables, images((8, 8, 3)), train=True, key=key)[0].features


@pytest.mark.thorough
def test_fccls_efficientnet_drops_features_only_if_there_is_a_key():
    model, variables = efficient(dropout=0.5)
    plain, dropped = (run_in_training(model, variables, seed) for seed in (None, 1))
    kept = np.asarray(dropped) != 0
    assert 0 < kept.mean() < 1
    np.testing.assert_allclose(dropped, np.where(kept, 2 * plain, 0), 1e-5, 1e-6)
    np.testing.assert_array_equal(dropped, run_in_training(model, variables, 1))


@pytest.mark.thorough
def test_drop_connect_takes_whole_samples_out_of_blocks_with_a_shortcut():
    block = EfficientBlock(EfficientStage(1, 3, 1, 4, 1), drop=0.5)
    x = jnp.asarray(images((8, 8, 4), batch=16))
    variables = block.init(jax.random.key(0), x, train=False)
    plain, dropped = (
        np.asarray(block.apply(variables, x, train=True, rngs=rngs, mutable=["batch_stats"])[0] - x)
        for rngs in ({}, {"dropout": jax.random.key(1)})
    )
    removed = ~dropped.any((1, 2, 3))
    assert 0 < removed.sum() < 16
    np.testing.assert_allclose(dropped[~removed], 2 * plain[~removed], 1e-4, 1e-5)


def test_the_rate_of_drop_connect_grows_from_block_to_block():
    rates = []

    def note(call, args, kwargs, context):
        if isinstance(context.module, EfficientBlock) and context.method_name == "__call__":
            rates.append(context.module.drop)
        return call(*args, **kwargs)

    network = EfficientNet(EFFICIENT_STAGES, last=None, drop_connect=0.4)
    with nn.intercept_methods(note):
        jax.eval_shape(lambda: network.init(jax.random.key(0), images(), train=False))
    np.testing.assert_allclose(rates, [0, 0.1, 0.2, 0.3])


@pytest.mark.thorough
@pytest.mark.parametrize("network", [ResNet((1,), width=4), EfficientNet(EFFICIENT_STAGES, last=None)])
def test_kernels_start_normal_or_uniform(network):
    def largest(model):
        params = initialise(model, jax.random.key(0), (8, 8, 3))["params"]["backbone"]
        return max(
            float(np.abs(x).max()) * math.prod(x.shape[:-1]) ** 0.5 for x in jax.tree.leaves(params) if x.ndim == 4
        )

    assert largest(Classifier(network, 3)) > 1
    assert 0.9 < largest(with_uniform_kernels(Classifier(network, 3))) <= 1


def test_fccls_own_networks_start_uniform():
    kernel_inits = {
        name: build(name, num_classes=3, image_shape=IMAGE).backbone.kernel_init for name in KERNEL_INITS_OF
    }
    assert kernel_inits == KERNEL_INITS_OF
