"""Flax modules of the user's own, Linen and NNX, as backbones and as whole classifiers."""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fedjax_pcdd import models
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.models import forward, initialise, normalisation_params, normalises, uses_batch_norm
from fedjax_pcdd.models.classifier import apply_head
from fedjax_pcdd.models.convolution_table import Listing, choosing

SHAPE = (8, 8, 1)
IMAGES = jax.random.uniform(jax.random.key(0), (6, *SHAPE))
FIRST_FOUR = jnp.array([1, 1, 1, 1, 0, 0])


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(7)(nn.Conv(4, (3, 3))(x).reshape(len(x), -1)))


class Normed(nn.Module):
    rate: float = 0.5

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3))(x)))
        return nn.Dropout(self.rate, deterministic=not train)(x.mean((1, 2)))


class Masked(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic, mask):
        seen = self.variable("counters", "samples", jnp.zeros, ())
        if not deterministic:
            seen.value += mask.sum()
        return nn.relu(nn.Dense(5)(x.reshape(len(x), -1)))


class Whole(nn.Module):
    num_classes: int

    def setup(self):
        self.body = Plain()
        self.last = nn.Dense(self.num_classes, use_bias=False, kernel_init=nn.initializers.zeros)

    def __call__(self, x):
        return self.last(self.body(x))


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(nnx.relu(self.norm(self.conv(x))).mean((1, 2)))


class NnxWhole(nnx.Module):
    def __init__(self, num_classes: int, image_shape, rngs: nnx.Rngs):
        width = int(np.prod(image_shape))
        self.layers = nnx.List([nnx.Linear(width, 5, rngs=rngs), nnx.Linear(5, num_classes, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.layers[0](x.reshape(len(x), -1))))


def built(module, num_classes=3):
    return models.build(module, num_classes=num_classes, image_shape=SHAPE)


def trained(model, variables, mask=None, key=None):
    return jax.jit(lambda v, k: forward(model, v, IMAGES, train=True, mask=mask, key=k))(variables, key)


ALL = [Plain, Normed, Masked, Whole, NnxNet, NnxWhole, NnxNet(nnx.Rngs(0)), Plain()]
NAMES = [getattr(module, "__name__", f"{type(module).__name__}()") for module in ALL]


@pytest.mark.parametrize("module", ALL, ids=NAMES)
def test_a_module_gives_features_and_logits_of_its_head(module):
    model = built(module)
    variables = initialise(model, jax.random.key(1), SHAPE)
    outputs, _ = forward(model, variables, IMAGES, train=False)
    assert outputs.logits.shape == (6, 3)
    np.testing.assert_allclose(apply_head(variables["params"]["head"], outputs.features), outputs.logits, 1e-5, 1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("module", ALL, ids=NAMES)
def test_gradients_reach_all_parameters_under_vmap(module):
    model = built(module)
    keys = jax.random.split(jax.random.key(1))
    lanes = jax.vmap(lambda key: initialise(model, key, SHAPE))(keys)

    def loss(params, variables, key):
        outputs, state = forward(model, {**variables, "params": params}, IMAGES, train=True, mask=FIRST_FOUR, key=key)
        return jnp.sum(jnp.square(outputs.logits - 1) * FIRST_FOUR[:, None]), state

    step = jax.jit(jax.vmap(jax.grad(loss, has_aux=True)))
    gradients, state = step(lanes["params"], lanes, keys)
    alone = jax.grad(loss, has_aux=True)(*jax.tree.map(lambda x: x[1], (lanes["params"], lanes, keys)))
    second = jax.tree.map(lambda x: x[1], (gradients, state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), second, alone)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients["head"]))


@pytest.mark.thorough
def test_a_whole_classifiers_last_layer_is_the_head():
    linen_model, nnx_model = built(Whole), built(NnxWhole)
    params = initialise(linen_model, jax.random.key(0), SHAPE)["params"]
    assert set(params["backbone"]) == {"body"}
    assert set(params["head"]) == {"kernel"}
    assert not np.any(params["head"]["kernel"])  # its own initialisation
    variables = initialise(nnx_model, jax.random.key(0), SHAPE)
    assert set(variables["params"]["backbone"]["layers"]) == {"0"}
    assert variables["params"]["head"]["kernel"].shape == (5, 3)
    assert "head" not in initialise(linen_model.clone(head=False), jax.random.key(0), SHAPE)["params"]
    assert initialise(linen_model.clone(neck=1, neck_width=2), jax.random.key(0), SHAPE)["params"]["head"][
        "kernel"
    ].shape == (2, 3)


def test_an_nnx_object_keeps_its_initial_values():
    module = NnxWhole(3, SHAPE, nnx.Rngs(5))
    model = built(module)
    outputs, _ = forward(model, initialise(model, jax.random.key(9), SHAPE), IMAGES, train=False)
    np.testing.assert_allclose(outputs.logits, module(IMAGES), 1e-5, 1e-6)


def test_a_linen_classifier_gives_the_logits_it_gives_outside_this_package():
    model = built(Whole)
    variables = initialise(model, jax.random.key(0), SHAPE)
    kernel = jax.random.normal(jax.random.key(1), (7, 3))
    variables["params"]["head"]["kernel"] = kernel
    classifier_variables = {"params": {**variables["params"]["backbone"], "last": {"kernel": kernel}}}
    outputs, _ = forward(model, variables, IMAGES, train=False)
    np.testing.assert_allclose(outputs.logits, Whole(3).apply(classifier_variables, IMAGES), 1e-5, 1e-6)


class Deep(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = x.reshape(len(x), -1)
        for _ in range(18):
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x)) + 0.1)
        return x


class NnxDeep(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(int(np.prod(SHAPE)) if i == 0 else 8, 8, rngs=rngs) for i in range(18)])
        self.norms = nnx.List([nnx.BatchNorm(8, rngs=rngs) for _ in range(18)])

    def __call__(self, x):
        x = x.reshape(len(x), -1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = nnx.relu(norm(layer(x)) + 0.1)
        return x


@pytest.mark.thorough
@pytest.mark.parametrize("module", [Deep, NnxDeep], ids=["linen", "nnx"])
def test_padding_beside_one_valid_sample_stays_finite(module):
    model, mask = built(module), jnp.zeros(6).at[1].set(1)
    variables = initialise(model, jax.random.key(1), SHAPE)

    def loss(params, images, mask):
        outputs, state = forward(model, {**variables, "params": params}, images, train=True, mask=mask)
        return (outputs.logits[:, 0] * mask).sum(), (outputs.logits, state)

    step = jax.jit(jax.grad(loss, has_aux=True))
    gradients, (logits, state) = step(variables["params"], IMAGES, mask)
    _, (alone, expected) = step(variables["params"], IMAGES[1:2], jnp.ones(1))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((gradients, logits)))
    np.testing.assert_allclose(logits[1], alone[0], 1e-5, 1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), state, expected)


@pytest.mark.parametrize("module", [Normed, NnxNet], ids=["linen", "nnx"])
def test_masked_samples_stay_out_of_batch_statistics(module):
    model = built(module)
    variables = initialise(model, jax.random.key(1), SHAPE)
    masked, state = trained(model, variables, FIRST_FOUR)
    alone, expected_state = forward(model, variables, IMAGES[:4], train=True)
    np.testing.assert_allclose(masked.features[:4], alone.features, 1e-5, 1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), state, expected_state)
    _, state_without_samples = trained(model, variables, jnp.zeros(6))
    jax.tree.map(np.testing.assert_array_equal, state_without_samples["batch_stats"], variables["batch_stats"])
    assert not np.allclose(*map(np.ravel, (jax.tree.leaves(state)[0], jax.tree.leaves(variables["batch_stats"])[0])))


def assert_statistics_are_of_the_valid_samples(model):
    variables = initialise(model, jax.random.key(1), SHAPE)
    _, state = trained(model, variables, FIRST_FOUR)
    _, expected_state = forward(model, variables, IMAGES[:4], train=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), state, expected_state)


class OwnLinenNorm(nn.BatchNorm):
    @nn.compact
    def __call__(self, x, train):
        return super().__call__(x, use_running_average=not train)


class WithOwnLinenNorm(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        return OwnLinenNorm()(nn.Dense(4)(x.reshape(len(x), -1)), train)


def test_masked_samples_stay_out_of_the_statistics_of_a_subclass_that_takes_no_mask():
    assert_statistics_are_of_the_valid_samples(built(WithOwnLinenNorm))


class Patches(nn.Module):
    """Each image is four rows of the batch."""

    @nn.compact
    def __call__(self, x, train: bool):
        rows = nn.Dense(4)(x.reshape(4 * len(x), -1))
        return nn.BatchNorm(use_running_average=not train)(rows).reshape(len(x), 4, 4).mean(1)


def test_masked_samples_stay_out_of_the_statistics_of_their_patches():
    assert_statistics_are_of_the_valid_samples(built(Patches))


class TimeFirst(nn.Module):
    """A norm over [T, B, 4]; T may be a multiple of B."""

    steps: int = 12

    @nn.compact
    def __call__(self, x, train: bool):
        rows = nn.Dense(4)(x.reshape(1, len(x), -1)).repeat(self.steps, 0)
        return nn.BatchNorm(use_running_average=not train)(rows).mean(0)


class NnxTimeFirst(NnxNet):
    def __call__(self, x):
        return self.norm(jnp.moveaxis(self.conv(x), 0, 1)).mean((0, 2))


@pytest.mark.parametrize("module", [TimeFirst(12), TimeFirst(5), NnxTimeFirst])
def test_a_batch_norm_whose_input_does_not_begin_with_the_samples_is_refused(module):
    sentence = "the input of a batch norm must begin with the axis of the samples, as padding would count: transpose it"
    with pytest.raises(UserError, match=sentence):
        built(module)


class OwnNorm(nnx.BatchNorm):
    pass


class NnxOwnNorm(NnxNet):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.norm = OwnNorm(4, rngs=rngs)


class NnxOwnNormWithMask(NnxOwnNorm):
    def __call__(self, x, mask):
        x = self.conv(x)
        return self.norm(x, mask=None if mask is None else mask.astype(bool).reshape(-1, 1, 1, 1)).mean((1, 2))


def test_a_batch_norm_of_a_users_class_needs_the_mask():
    with pytest.raises(UserError, match="model NnxOwnNorm has a batch norm of a class of its own, OwnNorm"):
        built(NnxOwnNorm)
    assert_statistics_are_of_the_valid_samples(built(NnxOwnNormWithMask))


class Counted(nn.Module):
    """Counts its batches, and picks pixels by a table that is a variable, or a constant."""

    table: bool

    @nn.compact
    def __call__(self, x, train: bool):
        count = self.variable("batch_stats", "count", lambda: jnp.zeros((), jnp.int32))
        if train and not self.is_initializing():
            count.value += 1
        indices = np.arange(63, -1, -1)
        if self.table:
            indices = self.variable("constants", "indices", lambda: jnp.asarray(indices)).value
        return nn.Dense(4)(x.reshape(len(x), -1)[:, indices])


def test_a_table_of_indices_among_the_variables_is_refused_and_a_counter_is_not():
    with pytest.raises(UserError, match=r"model Counted cannot use '.*' as a number with a fraction"):
        built(Counted(True))
    assert built(Counted(False)).num_classes == 3


@pytest.mark.thorough
@pytest.mark.parametrize("module", [Normed, NnxNet], ids=["linen", "nnx"])
def test_dropout_acts_only_with_a_key_and_is_a_function_of_it(module):
    model = built(module)
    variables = initialise(model, jax.random.key(1), SHAPE)
    first, repeated, other = (trained(model, variables, key=jax.random.key(k))[0].features for k in (0, 0, 1))
    np.testing.assert_array_equal(first, repeated)
    assert not np.array_equal(first, other)
    without_key = trained(model, variables)[0].features
    np.testing.assert_array_equal(without_key, trained(model, variables)[0].features)
    assert np.count_nonzero(np.asarray(first) == 0) > np.count_nonzero(np.asarray(without_key) == 0)


class NnxTwoDropouts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = x.reshape(len(x), -1)
        return jnp.concatenate([self.first(x), self.second(x)], axis=1)


def test_dropouts_of_an_nnx_module_draw_independently():
    model = built(NnxTwoDropouts)
    features = trained(model, initialise(model, jax.random.key(1), SHAPE), key=jax.random.key(0))[0].features
    first, second = np.split(np.asarray(features) == 0, 2, axis=1)
    assert 0.4 < np.mean(first != second) < 0.6


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, rng_collection="noise", deterministic=not train)(x.reshape(len(x), -1))


def test_dropout_from_a_stream_of_another_name_acts_only_with_a_key():
    model = built(Noisy)
    variables = initialise(model, jax.random.key(1), SHAPE)
    features = trained(model, variables, key=jax.random.key(0))[0].features
    assert 0.3 < np.mean(np.asarray(features) == 0) < 0.7
    assert (np.asarray(trained(model, variables)[0].features) != 0).all()


class Twice(nn.Module):
    num_classes: int

    def setup(self):
        self.first, self.layer = nn.Dense(self.num_classes), nn.Dense(self.num_classes)

    def __call__(self, x):
        return self.layer(nn.relu(self.layer(self.first(x.reshape(len(x), -1)))))


class NnxTwice(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.layer = nnx.Linear(64, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return self.layer(nnx.relu(self.layer(self.first(x.reshape(len(x), -1)))))


@pytest.mark.parametrize("module", [Twice, NnxTwice], ids=["linen", "nnx"])
def test_a_dense_layer_that_is_called_twice_is_no_head(module):
    with pytest.warns(UserWarning, match="a linear head follows"):
        model = built(module)
    params = initialise(model, jax.random.key(0), SHAPE)["params"]
    assert params["backbone"]["layer"]["kernel"].shape == params["head"]["kernel"].shape == (3, 3)


@pytest.mark.parametrize("width", [3, 5])
def test_a_softmax_at_the_end_of_a_whole_classifier_gives_a_warning(width):
    module = nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(width), nn.softmax])
    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        built(module)
    assert ["without softmax" in str(warning.message) for warning in recorded] == [True] * (width == 3)


@pytest.mark.thorough
def test_a_sequence_of_layers_is_a_model():
    linen = nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(6), nn.relu, nn.Dense(3)])
    layers = nnx.Linear(64, 6, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(6, 3, rngs=nnx.Rngs(1))
    for module in (linen, nnx.Sequential(lambda x: x.reshape(len(x), -1), *layers)):
        model = built(module)
        variables = initialise(model, jax.random.key(0), SHAPE)
        assert forward(model, variables, IMAGES, train=False)[0].logits.shape == (6, 3)
        assert variables["params"]["head"]["kernel"].shape == (6, 3)


class Listed(nn.Module):
    widths: list[int] | jax.Array

    @nn.compact
    def __call__(self, x):
        for width in self.widths:
            x = nn.Dense(width)(x.reshape(len(x), -1))
        return x


def test_fields_of_a_module_may_be_lists():
    assert trained(model := built(Listed([5, 4])), initialise(model, jax.random.key(0), SHAPE))[0].features.shape == (
        6,
        4,
    )
    with pytest.raises(
        UserError, match="model Listed has a field that cannot be hashed: give numbers, texts or tuples"
    ):
        built(Listed(jnp.array([5, 4])))


def test_other_collections_are_returned_as_state():
    model = built(Masked)
    variables = initialise(model, jax.random.key(1), SHAPE)
    _, state = trained(model, variables, FIRST_FOUR)
    assert state["counters"]["backbone"]["samples"] == 4


@pytest.mark.parametrize("module", [Plain, NnxNet], ids=["linen", "nnx"])
def test_convolutions_of_own_modules_take_this_engines_forms(module):
    model, listing = built(module), Listing()
    with choosing(listing):
        jax.eval_shape(lambda: model.init(jax.random.key(0), IMAGES, train=False))
    assert [(asked.inputs, asked.outputs) for asked in listing.asked] == [(1, 4)]


def test_normalisation_is_recognised_by_types_and_variables():
    recognised = {
        module: (normalises(built(module), SHAPE), uses_batch_norm(built(module), SHAPE))
        for module in (Plain, Normed, NnxNet)
    }
    assert recognised == {Plain: (False, False), Normed: (True, True), NnxNet: (True, True)}


class NnxNorms(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.bare = nnx.LayerNorm(1, use_bias=False, use_scale=False, rngs=rngs)
        self.rest = nnx.List([nnx.BatchNorm(1, rngs=rngs), nnx.RMSNorm(1, rngs=rngs), nnx.Linear(1, 4, rngs=rngs)])

    def __call__(self, x):
        x = self.bare(x)
        for layer in self.rest:
            x = layer(x)
        return x.mean((1, 2))


def test_normalisation_params_of_nnx_are_found_by_their_paths():
    model = built(NnxNorms)
    expected_paths = {("rest", "0", "bias"), ("rest", "0", "scale"), ("rest", "1", "scale")}
    assert normalisation_params(model, SHAPE) == tuple(sorted(("backbone", *path) for path in expected_paths))
    assert normalisation_params(built(NnxNet(nnx.Rngs(0))), SHAPE) == tuple(
        ("backbone", "norm", name) for name in ("bias", "scale")
    )


class Wrapped(nn.Module):
    """Norms within transformations of Flax, one of them in a part of the model."""

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.remat(nn.LayerNorm)()(nn.Dense(4)(x.reshape(len(x), -1)))
        x = nn.jit(nn.BatchNorm)(use_running_average=not train)(x)
        return nn.remat(Inner)()(x)


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(nn.LayerNorm)()(nn.Dense(4)(x))


def test_normalisation_params_of_norms_within_transformations_are_theirs_alone():
    names = ("CheckpointLayerNorm_0",), ("JitBatchNorm_0",), ("CheckpointInner_0", "JitLayerNorm_0")
    expected_paths = {("backbone", *name, leaf) for name in names for leaf in ("scale", "bias")}
    assert normalisation_params(built(Wrapped()), SHAPE) == tuple(sorted(expected_paths))


class Bare(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(1, use_bias=False, use_scale=False, rngs=rngs)

    def __call__(self, x):
        return self.norm(x).reshape(len(x), -1)


def test_a_norm_without_parameters_normalises():
    assert normalises(built(Bare), SHAPE)
    assert normalisation_params(built(Bare), SHAPE) == ()


class NnxCounting(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.calls, self.linear = nnx.Variable(jnp.zeros(())), nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, x):
        return self.linear(x.reshape(len(x), -1))


class NnxKeeping(NnxCounting):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.mean = nnx.BatchStat(jnp.zeros(64))


def test_variables_of_nnx_count_as_normalisation_only_if_they_are_running_statistics():
    assert [normalises(built(module), SHAPE) for module in (NnxCounting, NnxKeeping)] == [False, True]


class NnxRemat(nnx.Module):
    def __init__(self, rngs, always=None):
        self.norm, self.drop = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.running = None if always is None else not always

    @nnx.remat
    def block(self, x):
        return self.drop(self.norm(x, use_running_average=self.running))

    def __call__(self, x):
        return self.block(x.reshape(len(x), -1))


def test_what_passes_through_remat_does_not_count_as_changed():
    model = built(NnxRemat)
    variables = initialise(model, jax.random.key(0), SHAPE)
    outputs, state = trained(model, variables, key=jax.random.key(1))
    assert np.isfinite(outputs.logits).all()
    assert not np.array_equal(*(x["batch_stats"]["backbone"]["norm"]["mean"] for x in (variables, state)))


class Wide(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x.reshape(len(x), -1))


class Picture(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Conv(4, (3, 3))(x)


class Broken(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ jnp.ones((3, 3))


class AlwaysNormed(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.BatchNorm(use_running_average=False)(x.reshape(len(x), -1))


class AlwaysDropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(x.reshape(len(x), -1))


class Sowing(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("losses", "l", jnp.sum(x))
        return x.reshape(len(x), -1)


class Partitioned(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return nn.Dense(4, kernel_init=kernel_init)(x.reshape(len(x), -1))


class NnxAlways(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(64, rngs=rngs)

    def __call__(self, x):
        return self.norm(x.reshape(len(x), -1), use_running_average=False)


class NnxNoisy(nnx.Module):
    def __init__(self, rngs):
        self.rngs = nnx.Rngs(noise=0)

    def __call__(self, x):
        return x.reshape(len(x), -1) + jax.random.normal(self.rngs.noise(), (len(x), 64))


class NnxProper(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.drop = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return self.drop(self.norm(x.reshape(len(x), -1)))


@pytest.mark.parametrize("module", [AlwaysDropping, NnxProper])
def test_dropout_without_a_key_is_the_identity_so_that_it_may_ignore_train(module):
    model = built(module)
    variables = initialise(model, jax.random.key(0), SHAPE)
    images = jax.random.normal(jax.random.key(1), (4, *SHAPE))
    first, second = (forward(model, variables, images, train=False)[0].features for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert np.count_nonzero(first) == first.size


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (42, "model 42 must be a Flax module, or what returns one, not int."),
        (lambda x: x, "model <lambda> needs 'x': pass a Flax module"),
        (lambda: 3, "model <lambda> must be a Flax module, or what returns one, not int."),
        (Wide, "model Wide needs 'width': pass a Flax module"),
        (Picture, r"model Picture gives \[1, 8, 8, 4\] for one image"),
        (Broken, "model Broken fails on images of 8x8x1: TypeError"),
        (lambda: 1 / 0, "model <lambda> cannot be made: ZeroDivisionError: division by zero."),
        (nn.Dense, "model Dense needs 'features'"),
        (AlwaysNormed, "model AlwaysNormed must neither draw nor change .*: ModifyScopeVariableError: .*mean"),
        (Sowing, "model Sowing keeps a list in 'losses/l', as by sow: sow into 'intermediates'"),
        (Partitioned, "model Partitioned keeps 'params/Dense_0/kernel' with metadata, as by nn.with_partitioning: dr"),
        (lambda rngs: NnxRemat(rngs, True), "model <lambda> must neither draw .* it changes norm/mean."),
        (NnxAlways, "model NnxAlways must neither draw .* it changes norm/mean."),
        (NnxNoisy, "model NnxNoisy must neither draw .* it changes rngs/noise/count."),
    ],
)
def test_anything_but_a_model_is_refused_in_one_sentence(module, sentence):
    with pytest.raises(UserError, match=sentence) as error:
        built(module)
    assert "\n" not in str(error.value)


@pytest.mark.thorough
def test_a_dense_layer_of_another_width_belongs_to_the_backbone():
    params = initialise(built(Wide(5)), jax.random.key(0), SHAPE)["params"]
    assert params["backbone"]["Dense_0"]["kernel"].shape == (64, 5)
    assert params["head"]["kernel"].shape == (5, 3)
