"""FedRL: the review of one layer after another."""

from functools import partial

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import linear_model
import numpy as np
import pytest
import toy
from golden_vectors import cases

import fedjax_pcdd as fp
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.contrastive import ROUNDING, review_distance
from fedjax_pcdd.methods import Batch
from fedjax_pcdd.methods.fedrl import FedRL
from fedjax_pcdd.models.classifier import Classifier, initialise
from fedjax_pcdd.models.mlp import MLP
from fedjax_pcdd.models.resnet import ResNet

VECTOR_NAMES = {"per_sample": "persample_mean", "batch_norm": "batch_norm"}
LAYERS = [("backbone", "fc1"), ("backbone", "fc2"), ("head",)]
MLP2 = Classifier(MLP((6, 5)), num_classes=3)
RESNET = Classifier(ResNet((1,), width=4), num_classes=3)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("distance", VECTOR_NAMES)
@pytest.mark.parametrize("g", cases("fedrl"))
def test_distance_and_gradient_agree_with_the_vectors(g, distance):
    layer, received = jnp.asarray(g["in_kr"]), jnp.asarray(g["in_kr_global"])
    value, gradient = jax.value_and_grad(lambda x: review_distance(x, received, distance=distance))(layer)
    np.testing.assert_allclose(value, g[f"out_{VECTOR_NAMES[distance]}"], 1e-9)
    np.testing.assert_allclose(gradient, g[f"out_grad_{VECTOR_NAMES[distance]}"], 1e-9, 1e-12)


@pytest.mark.parametrize(("distance", "expected"), [("per_sample", 2.5), ("batch_norm", 5.0), ("squared", 12.5)])
def test_distance_matches_the_worked_example(distance, expected):
    layer = jnp.array([[3.0, 4.0], [0.0, 0.0]])
    np.testing.assert_allclose(review_distance(layer, jnp.zeros((2, 2)), distance=distance), expected)


@pytest.mark.parametrize("distance", VECTOR_NAMES)
def test_equal_layers_have_distance_and_gradient_zero(distance):
    layer = jnp.ones((4, 2, 3))
    value, gradient = jax.value_and_grad(lambda x: review_distance(x, layer, distance=distance))(layer)
    assert value == 0
    assert not gradient.any()


@pytest.mark.parametrize("distance", ["per_sample", "batch_norm", "squared"])
@pytest.mark.parametrize(("relative", "differs"), [(1e-6, False), (1e-4, True)])
def test_rounding_is_no_distance(distance, relative, differs):
    received = 100 * jax.random.normal(jax.random.key(0), (4, 30))
    layer = received * (1 + relative * jax.random.normal(jax.random.key(1), (4, 30)))
    for rounding, expected in ((ROUNDING, differs), (0.0, True)):
        distance_of = partial(review_distance, received=received, distance=distance, rounding=rounding)
        value, gradient = jax.value_and_grad(distance_of)(layer)
        assert (value > 0, *gradient.any(1)) == (expected,) * 5


def test_the_first_step_of_a_round_is_that_of_fedavg():
    x, y = np.random.default_rng(0).random((96, 28, 28, 1), np.float32), np.arange(96) % 3
    thirds = np.split(np.arange(96), 3)
    federation = fp.Federation(fp.from_arrays(x, y, x, y), fp.Partition(thirds, thirds))
    steps = {"rounds": 1, "local_steps": 1, "batch_size": 32, "fine_tune_epochs": 0, "model": "mlp", "lanes": 3}
    fedavg, fedrl = (fp.simulate(federation, method, **steps) for method in (fp.FedAvg(), FedRL(mu=50.0)))
    chex.assert_trees_all_close(fedrl.variables, fedavg.variables, rtol=0, atol=1e-6)


@pytest.mark.parametrize("distance", VECTOR_NAMES)
def test_masked_samples_do_not_count(distance):
    layer = jnp.array([[3.0, 4.0], [7.0, 7.0]])
    masked = review_distance(layer, jnp.zeros((2, 2)), distance=distance, mask=jnp.array([1.0, 0.0]))
    np.testing.assert_allclose(masked, 5.0)


def test_unknown_distances_are_refused():
    with pytest.raises(UserError, match="did you mean 'per_sample'"):
        review_distance(jnp.ones((1, 1)), jnp.ones((1, 1)), distance="persample")


def review_inputs(model, shape, shift):
    """Variables that have shifted since the start of training, those at the start, and a batch."""
    start = initialise(model, jax.random.key(0), shape)
    variables = {**start, "params": jax.tree.map(lambda x: x + shift, start["params"])}
    images = jax.random.normal(jax.random.key(1), (8, *shape))
    return variables, start, Batch(images, jnp.arange(8) % 3, jnp.ones(8))


@jax.jit
def gradients_of(method, variables, start, batch, step, round):
    context = linear_model.context(method, [1, 1, 1], features=5)
    context = context._replace(model=MLP2, start=start, step=step, round=round)
    return jax.grad(lambda params: method.loss({"params": params}, batch, context)[0])(variables["params"])


def review_gradient(step=0, round=0, **options):
    """The gradient of the review term alone."""
    arguments = *review_inputs(MLP2, (4,), 0.1), step, round
    with_review, without_review = (gradients_of(FedRL(mu=mu, **options), *arguments) for mu in (1.0, 0.0))
    return jax.tree.map(jnp.subtract, with_review, without_review)


def layer_maxima(gradients):
    """The largest absolute gradient of each layer's kernel."""
    leaves = [gradients[path[0]] if len(path) == 1 else gradients[path[0]][path[1]] for path in LAYERS]
    return np.array([jnp.abs(layer["kernel"]).max() for layer in leaves])


@pytest.mark.thorough
@pytest.mark.parametrize("layer", range(3))
def test_the_review_of_a_layer_trains_only_it_and_the_layers_before_it(layer):
    is_trained = layer_maxima(review_gradient(step=layer)) > 1e-6
    np.testing.assert_array_equal(is_trained, np.arange(3) <= layer)


@pytest.mark.thorough
def test_after_the_last_layer_comes_the_first():
    jax.tree.map(np.testing.assert_array_equal, review_gradient(step=4), review_gradient(step=1))


@pytest.mark.thorough
def test_the_layer_may_advance_with_rounds():
    expected = review_gradient(step=1)
    actual = review_gradient(step=0, round=4, cycle="round")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), actual, expected)


def test_steps_do_not_move_a_layer_that_advances_with_rounds():
    actual, expected = review_gradient(step=2, round=1, cycle="round"), review_gradient(step=0, round=1, cycle="round")
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_the_batch_norm_distance_changes_the_gradients():
    assert jnp.abs(layer_maxima(review_gradient()) - layer_maxima(review_gradient(distance="batch_norm"))).max() > 1e-4


def review_at_the_start(mode):
    """The review term where the weights have not moved, for a model with batch norm."""
    variables, start, batch = review_inputs(RESNET, (4, 4, 1), 0.0)

    @jax.jit
    def loss(method):
        context = linear_model.context(method, [1, 1, 1], features=4)
        context = context._replace(model=RESNET, start=start)
        return method.loss(variables, batch, context)[0]

    return float(loss(FedRL(mu=1.0, received_mode=mode)) - loss(FedRL(mu=0.0, received_mode=mode)))


@pytest.mark.thorough
def test_a_received_model_in_train_mode_gives_no_review_at_the_first_step():
    assert abs(review_at_the_start("train")) < 1e-6


@pytest.mark.thorough
def test_a_received_model_in_eval_mode_differs_by_its_statistics():
    assert review_at_the_start("eval") > 0.01


class Bare(nn.Module):
    """A backbone that offers no layers."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.relu(nn.Dense(6)(x.reshape(len(x), -1)))


def test_a_backbone_that_offers_no_layers_gives_a_warning():
    simulated = toy.simulation(method=FedRL(), model=Classifier(Bare(), toy.CLASSES))
    with pytest.warns(UserWarning, match="offers no layers, so FedRL reviews the logits alone"):
        simulated.round.lower(*simulated.arguments(simulated.start(), 0, simulated.plan(0)))
