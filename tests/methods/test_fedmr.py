"""FedMR: both of its terms act, the cases in which they vanish, and what each option changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct

from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import Batch, Method, Setting
from fedjax_pcdd.methods.fedmr import FedMR, Server
from fedjax_pcdd.methods.method import Facts, Keys, Summary
from fedjax_pcdd.models import Outputs, forward

OVERLAP = 120  # noise at which features of one class lie nearer to the prototype of another


def setting(clients=1, features=2):
    return Setting(2, features, clients, 3, 2, 8, False)


@functools.cache
def run(rounds=3, name="fedmr", lanes=1, **options):
    """The state after `rounds` rounds, as numpy arrays."""
    state, _ = toy.train(toy.simulation(name, noise=OVERLAP, lanes=lanes, **options), range(rounds))
    return jax.tree.map(np.array, state)


def distance(a, b):
    return max(np.abs(x * 1.0 - y).max() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def model_difference(first, second):
    """Largest difference between two global models."""
    return distance(first.servers.variables, second.servers.variables)


def run_inter_only(mu2, **options):
    return run(mu1=0.0, mu2=mu2, **options)


# Whole rounds


@pytest.mark.thorough
def test_inter_class_term_moves_the_model():
    assert model_difference(run_inter_only(1.0), run_inter_only(0.0)) > 1e-4


@pytest.mark.thorough
def test_intra_class_term_moves_the_model():
    assert model_difference(run(mu1=1.0, mu2=0.0), run_inter_only(0.0)) > 1e-4


@pytest.mark.thorough
def test_with_zero_coefficients_it_is_fedavg():
    assert model_difference(run_inter_only(0.0), run(name=None, method=Method())) < 1e-6


@pytest.mark.thorough
def test_lite_with_the_whole_batch_is_the_full_loss():
    assert model_difference(run_inter_only(1.0, lite=8), run_inter_only(1.0)) < 1e-6


@pytest.mark.thorough
def test_lite_without_samples_drops_the_inter_class_loss():
    assert model_difference(run_inter_only(1.0, lite=0), run_inter_only(0.0)) < 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("reference", [{"mu2": 1.0}, {"mu2": 0.0}])
def test_lite_with_some_samples_differs_from_all_and_from_none(reference):
    assert model_difference(run_inter_only(1.0, lite=3), run_inter_only(**reference)) > 1e-4


@pytest.mark.thorough
def test_lanes_do_not_change_which_samples_are_drawn():
    for lanes in (2, 3):
        assert distance(run_inter_only(1.0, lite=3, lanes=lanes), run_inter_only(1.0, lite=3)) < 1e-5


@pytest.mark.thorough
def test_negatives_of_all_classes_change_the_model():
    assert model_difference(run_inter_only(1.0, negatives="all"), run_inter_only(1.0)) > 1e-4


@pytest.mark.thorough
def test_unit_vector_prototypes_act_from_the_first_round_and_stay_fixed():
    state = run(1, mu1=0.0, mu2=1.0, prototypes="onehot")
    np.testing.assert_array_equal(state.servers.prototypes[0], np.eye(*state.servers.prototypes[0].shape))
    assert model_difference(state, run(1, mu1=0.0, mu2=0.0)) > 1e-4
    # Class means exist only from the end of the first round.
    assert model_difference(run(1, mu1=0.0, mu2=1.0), run(1, mu1=0.0, mu2=0.0)) < 1e-6


def test_unit_vectors_need_a_feature_for_each_class():
    with pytest.raises(UserError, match="needs a feature for each of the 3 classes, and the model has 2"):
        FedMR(prototypes="onehot").configure(setting()._replace(num_classes=3), None)


@pytest.mark.thorough
def test_augmented_inputs_change_the_prototypes_but_not_the_model():
    plain, augmented = (run(1, pipeline=Pipeline(flip=True), prototype_inputs=p) for p in ("plain", "augmented"))
    assert model_difference(plain, augmented) < 1e-6
    assert distance(plain.servers.prototypes, augmented.servers.prototypes) > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("stale", ["carry", "drop"])
def test_a_class_that_no_client_sends_is_carried_or_dropped(stale):
    options = {"cohort": 1, "seed": 5, "stale": stale}
    simulated = toy.simulation("fedmr", noise=OVERLAP, **options)
    counts = simulated.experiments[0].federation.class_counts
    (first,), (second,) = (counts[simulated.clients_of(r)[0]] > 0 for r in (0, 1))
    assert (first & ~second).any()
    np.testing.assert_array_equal(run(2, **options).servers.valid[0], second | (first & (stale == "carry")))


@struct.dataclass
class Normed(FedMR):
    """FedMR on a model with batch norm of the features."""

    def build(self, model):
        return model.clone(feature_norm=True)


ONE_CLIENT = {"cohort": 1, "batch_size": 16}


def class_means(simulated, state, train):
    """Prototypes [C, D] of the only client, from batches of up to B that mix its classes."""
    (k,), (federation, *_) = simulated.clients_of(0)[0], simulated.experiments[0]
    indices, batch_size = federation.partition.train[k], simulated.local.batch_size
    batches = -(-len(indices) // batch_size)
    assert len(indices) > batch_size
    final, sums = jax.tree.map(lambda x: x[0], state.servers.variables), 0
    for i in range(batches):
        images = jnp.asarray(federation.dataset.x_train[indices[i::batches]] / 255.0, jnp.float32)
        outputs, _ = forward(simulated.program.model, final, images, train=train)
        sums += np.eye(toy.CLASSES)[federation.dataset.y_train[indices[i::batches]]].T @ np.asarray(outputs.features)
    return sums / np.maximum(federation.class_counts[k], 1)[:, None]


@pytest.mark.thorough
@pytest.mark.parametrize("eval_batch", [4, 500])
@pytest.mark.parametrize("mode", ["eval", "train"])
def test_prototypes_use_running_or_batch_statistics_as_the_mode_says(mode, eval_batch):
    simulated = toy.simulation(method=Normed(prototype_mode=mode), noise=OVERLAP, eval_batch=eval_batch, **ONE_CLIENT)
    state = jax.tree.map(np.array, toy.train(simulated, (0,))[0])
    expected = class_means(simulated, state, mode == "train")
    np.testing.assert_allclose(state.servers.prototypes[0], expected, rtol=1e-3, atol=1e-4)
    assert distance(expected, class_means(simulated, state, mode != "train")) > 0.1


# Hooks


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (0.3, 2), (0.4, 2), (0.5, 2), (0.7, 4), (1.0, 5)])
def test_number_of_submitters_is_rounded_half_to_even(share, number):
    server = FedMR(submitters=share).init_server(setting(5), (), None, jax.random.key(0))
    assert int(server.submits.sum()) == number


@pytest.mark.parametrize("submits", [True, False])
def test_only_submitters_send_class_sums(submits):
    server = Server({}, jnp.zeros((2, 2)), jnp.zeros(2, bool), jnp.asarray([submits]))
    context = toy.context(server=server, facts=Facts(0, None, None, None))
    summary = {"sums": jnp.ones((2, 2)), "counts": jnp.ones(2)}
    _, message = FedMR().upload({}, summary, context)
    assert all((x == submits).all() for x in jax.tree.leaves(message.total))


FEATURES = np.array([[0.0, 0.0], [1.0, 2.0], [2.0, 1.0]])
PROTOTYPES = np.array([[3.0, 4.0], [1.0, 0.0]])


def penalty(**options):
    """The penalty of three samples of class 0 on a client that has both classes."""
    server = Server({}, jnp.asarray(PROTOTYPES), jnp.ones(2, bool), jnp.ones(1, bool))
    facts = Facts(0, jnp.ones(2), jnp.asarray(2), jnp.ones((1, 2)))
    context = toy.context(setting=setting(), server=server, facts=facts, keys=Keys.of(jax.random.key(0)))
    batch = Batch(jnp.zeros(3), jnp.zeros(3, int), jnp.ones(3))
    return FedMR(**{"mu1": 1.0, "mu2": 1.0} | options).penalty({}, Outputs(jnp.asarray(FEATURES), None), batch, context)


DISTANCES = np.linalg.norm(FEATURES[:, None] - PROTOTYPES, axis=-1)
INTER = np.maximum(DISTANCES[:, 0] - DISTANCES[:, 1], 0).mean()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1 / 3 + INTER),
        ({"mu1": 0.5, "mu2": 2.0}, 1 / 6 + 2 * INTER),
        ({"terms": "intra"}, 1 / 3),
        ({"terms": "inter"}, INTER),
        ({"terms": "intra", "form": "frobenius"}, 5.625),
    ],
)
def test_penalty_has_the_value_computed_by_hand(options, expected):
    np.testing.assert_allclose(penalty(**options), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("given_mu1", "features", "mu1"), [(None, 255, 0.01), (None, 256, 0.1), (0.3, 255, 0.3), (0.0, 256, 0.0)]
)
def test_default_of_mu1_depends_on_the_number_of_features(given_mu1, features, mu1):
    assert FedMR(mu1=given_mu1).configure(setting(features=features), None)[0].mu1 == mu1


@pytest.mark.parametrize(("terms", "summary"), [("both", Summary()), ("inter", Summary()), ("intra", None)])
def test_intra_alone_needs_no_pass_for_prototypes(terms, summary):
    assert FedMR(terms=terms).traits().summary == summary
