"""The layer outputs that a model gives on request, and the blocks of the large models."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd.models import build, forward, initialise
from fedjax_pcdd.models.classifier import Classifier, apply_head, layers
from fedjax_pcdd.models.efficientnet import EfficientNet, SqueezeExcite, Stage
from fedjax_pcdd.models.layers import Conv
from fedjax_pcdd.models.mlp import MLP
from fedjax_pcdd.models.resnet import ResNet
from fedjax_pcdd.models.wide_resnet import WideResNet

SHAPE = (8, 8, 3)
NARROW = {
    "bottleneck": Classifier(ResNet((1, 1), width=4, bottleneck=True), 3),
    "wide": Classifier(WideResNet(1, 1), 3),
    "efficientnet": Classifier(EfficientNet((Stage(1, 3, 1, 4, 1), Stage(2, 5, 2, 6, 2)), last=8, projection=5), 3),
}


def images(shape=SHAPE, batch=4, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal((batch, *shape)), jnp.float32)


@functools.cache
def variables(name):
    """Variables drawn by NumPy: compiling the initialisation takes longer than all else here."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: initialise(NARROW[name], jax.random.key(0), SHAPE))
    drawn = jax.tree.map(lambda x: jnp.asarray(rng.normal(0.1, 0.3, x.shape), x.dtype), shapes["params"])
    initial = jax.tree_util.tree_map_with_path(lambda path, x: jnp.full(x.shape, float("var" in str(path[-1]))), shapes)
    return {**initial, "params": drawn}


@functools.partial(jax.jit, static_argnames=("model", "train"))
def run(model, variables, x, key=None, *, train=True):
    return forward(model, variables, x, train=train, key=key)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("mlp", (4, 4, 1), 2),
        ("simple_cnn", (32, 32, 3), 5),
        ("mcmahan_cnn", (28, 28, 1), 4),
        ("fedrl_cnn", (28, 28, 1), 4),
        ("resnet18", (8, 8, 3), 6),
        ("resnet50", (8, 8, 3), 6),
        ("wrn28_10", (8, 8, 3), 5),
        ("efficientnet_b0", (16, 16, 3), 10),
        ("resnet8", (8, 8, 3), 5),
    ],
)
def test_models_have_a_layer_for_each_stage_and_the_head(name, shape, count):
    model = build(name, num_classes=3, image_shape=shape)
    layer_outputs, outputs, _ = jax.eval_shape(
        lambda x: layers(model, initialise(model, jax.random.key(0), shape), x, train=True), images(shape)
    )
    assert len(layer_outputs) == count
    assert layer_outputs[-1].shape == outputs.logits.shape
    assert all(layer.shape[0] == 4 for layer in layer_outputs)


@pytest.mark.thorough
def test_layers_are_returned_from_first_to_last():
    model = Classifier(MLP((7, 6)), 3, neck=2)
    shapes = [layer.shape[-1] for layer in layers(model, initialise(model, jax.random.key(0), (5,)), images((5,)),
                                                  train=False)[0]]  # fmt: skip
    assert shapes == [7, 6, 6, 6, 3]


@pytest.mark.thorough
def test_layers_are_returned_after_their_activation():
    model = Classifier(MLP((7,)), 3, neck=2)
    hidden, first, last, _ = layers(model, initialise(model, jax.random.key(0), (5,)), images((5,)), train=False)[0]
    assert hidden.min() == first.min() == 0
    assert last.min() < 0


def test_layers_are_returned_after_their_pooling():
    model = build("simple_cnn", num_classes=3, image_shape=(32, 32, 3))
    layer_outputs = jax.eval_shape(lambda: layers(model, initialise(model, jax.random.key(0), (32, 32, 3)),
                                                  images((32, 32, 3)), train=False))[0]  # fmt: skip
    assert [layer.shape[1:] for layer in layer_outputs] == [(14, 14, 6), (5, 5, 16), (120,), (84,), (3,)]


@pytest.mark.thorough
def test_asking_for_layers_changes_neither_outputs_nor_statistics():
    model = NARROW["wide"]
    layer_outputs, outputs, state = jax.jit(lambda v, x: layers(model, v, x, train=True))(variables("wide"), images())
    expected = run(model, variables("wide"), images())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), (outputs, state), expected)
    np.testing.assert_array_equal(layer_outputs[-1], outputs.logits)


@pytest.mark.thorough
def test_layers_are_not_kept_unless_requested():
    assert set(variables("wide")) == {"params", "batch_stats"}
    assert set(run(NARROW["wide"], variables("wide"), images())[1]) == {"batch_stats"}


@pytest.mark.parametrize("bias", [True, False])
def test_apply_head_gives_the_logits_of_the_model(bias):
    model = Classifier(MLP((5,)), 3, head_bias=bias)
    variables = initialise(model, jax.random.key(0), (4,))
    outputs, _ = forward(model, variables, images((4,)), train=False)
    np.testing.assert_allclose(apply_head(variables["params"]["head"], outputs.features), outputs.logits, 1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NARROW)
def test_large_models_train_on_images(name):
    outputs, state = run(NARROW[name], variables(name), images())
    assert outputs.logits.shape == (4, 3)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves((outputs, state)))


@pytest.mark.parametrize("name", NARROW)
def test_large_models_take_group_norm(name):
    model = NARROW[name].clone(backbone=NARROW[name].backbone.clone(norm="group"))
    shapes = jax.eval_shape(lambda: initialise(model, jax.random.key(0), SHAPE))
    assert set(shapes) == {"params"}


@pytest.mark.thorough
def test_dropout_acts_in_training_only():
    model, keys = NARROW["wide"], jax.random.split(jax.random.key(0))
    trained = [run(model, variables("wide"), images(), key)[0].logits for key in keys]
    evaluated = [run(model, variables("wide"), images(), key, train=False)[0].logits for key in keys]
    assert jnp.abs(trained[0] - trained[1]).max() > 1e-3
    np.testing.assert_array_equal(*evaluated)


@pytest.mark.thorough
def test_the_last_norm_of_a_wide_network_takes_nine_tenths_of_the_batch():
    statistics = run(NARROW["wide"], variables("wide"), images(batch=1))[1]["batch_stats"]["backbone"]
    _, state_after_shift = run(NARROW["wide"], {**variables("wide"), "batch_stats": shifted()}, images(batch=1))
    change = jax.tree.map(jnp.subtract, state_after_shift["batch_stats"]["backbone"], statistics)
    np.testing.assert_allclose(change["norm"]["mean"], 0.1, 1e-4)
    np.testing.assert_allclose(change["group1_block1"]["norm1"]["mean"], 0.9, 1e-4)


def shifted():
    """Running statistics larger by 1."""
    return jax.tree.map(lambda x: x + 1, variables("wide")["batch_stats"])


def test_depthwise_convolutions_keep_channels_apart():
    layer = Conv(3, 3, groups=3)
    x = images()
    variables = layer.init(jax.random.key(0), x)
    changed = layer.apply(variables, x.at[..., 1].add(1.0)) != layer.apply(variables, x)
    np.testing.assert_array_equal(changed.any((0, 1, 2)), [False, True, False])


def test_squeeze_excite_scales_each_channel_by_a_gate():
    x = images()
    out, _ = SqueezeExcite(2).init_with_output(jax.random.key(0), x)
    gates = out / x
    assert (gates > 0).all()
    assert (gates < 1).all()
    np.testing.assert_allclose(gates, jnp.broadcast_to(gates[:, :1, :1], x.shape), 1e-4)
