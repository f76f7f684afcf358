"""FedProc: properties of its loss, its two modes, where prototypes come from, and what each option changes."""

import jax
import jax.numpy as jnp
import linear_model
import numpy as np
import pytest
import toy
from flax import struct

from fedjax_pcdd.cli.run import main
from fedjax_pcdd.losses.contrastive import prototype_contrast
from fedjax_pcdd.methods import Method
from fedjax_pcdd.methods.fedproc import FedProc
from fedjax_pcdd.methods.method import Batch, Message, Setting
from fedjax_pcdd.methods.prototypical import SEEN, Server
from fedjax_pcdd.models import Outputs, forward

B, C, D = 9, 4, 3
LABELS = jnp.asarray([0, 1, 2, 3, 0, 1, 2, 3, 0])
VALID = jnp.asarray([True, True, False, True])


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


FEATURES, PROTOTYPES = normal((B, D)), normal((C, D), 1)


def contrast(features=FEATURES, prototypes=PROTOTYPES, labels=LABELS, valid=VALID, tau=0.5):
    return prototype_contrast(features, labels, prototypes, valid, tau)


# The loss


@pytest.mark.thorough
def test_contrast_matches_the_worked_example():
    value = contrast(jnp.asarray([[1.0, 0.0]]), jnp.eye(2), jnp.zeros(1, int), jnp.ones(2, bool), tau=1.0)
    np.testing.assert_allclose(value, 0.313262, rtol=1e-5)


def test_contrast_is_invariant_to_the_scale_of_features_and_prototypes():
    scaled = contrast(3 * FEATURES, PROTOTYPES * jnp.asarray([[2.0], [0.5], [1.0], [9.0]]))
    np.testing.assert_allclose(scaled, contrast(), rtol=1e-5)


@pytest.mark.parametrize("tau", [0.05, 0.5, 1.0])
def test_contrast_is_bounded(tau):
    opposite_features = -PROTOTYPES[LABELS]
    assert contrast(opposite_features, tau=tau) <= np.log(3) + 2 / tau


def test_contrast_is_invariant_to_a_permutation_of_classes():
    order = jnp.asarray([2, 0, 3, 1])
    permuted = contrast(prototypes=PROTOTYPES[order], labels=jnp.argsort(order)[LABELS], valid=VALID[order])
    np.testing.assert_allclose(permuted, contrast(), rtol=1e-5)


@pytest.mark.parametrize("count", [0, 1])
def test_contrast_with_fewer_than_two_classes_is_zero_with_zero_gradient(count):
    value, gradient = jax.value_and_grad(lambda z: contrast(z, valid=jnp.arange(C) < count))(FEATURES)
    assert value == 0
    assert np.all(gradient == 0)


@pytest.mark.thorough
def test_samples_of_a_class_without_a_prototype_count_in_the_divisor():
    has_prototype = VALID[LABELS]
    restricted = contrast(FEATURES[has_prototype], labels=LABELS[has_prototype])
    np.testing.assert_allclose(contrast(), restricted * has_prototype.sum() / B, rtol=1e-5)


# The two modes


def objective(method, round, valid=VALID, rounds=5):
    """Supervised term and penalty of one batch."""
    setting = Setting(C, D, 1, rounds, 1, B, False)
    context = toy.context(setting=setting, server=Server((), PROTOTYPES, valid), round=round)
    outputs, batch = Outputs(FEATURES, normal((B, C), 2)), Batch(jnp.zeros(B), LABELS, jnp.ones(B))
    return method.classification(outputs, batch, context), method.penalty({}, outputs, batch, context)


CE, _ = objective(FedProc(), 0)


@pytest.mark.parametrize(("mu", "tau"), [(0.5, 0.5), (2.0, 1.0)])
def test_additive_mode_adds_mu_times_the_contrast(mu, tau):
    ce, penalty = objective(FedProc(mu=mu, tau=tau), 3)
    np.testing.assert_allclose([ce, penalty], [CE, mu * contrast(tau=tau)], rtol=1e-5)


@pytest.mark.parametrize(("round", "alpha"), [(1, 0.75), (2, 0.5), (4, 0.0)])
def test_convex_mode_moves_from_the_contrast_to_cross_entropy(round, alpha):
    ce, penalty = objective(FedProc(mode="convex"), round)
    np.testing.assert_allclose([ce, penalty], [(1 - alpha) * CE, alpha * contrast()], rtol=1e-5)


def test_convex_mode_without_prototypes_is_cross_entropy():
    np.testing.assert_allclose(objective(FedProc(mode="convex"), 0, ~VALID & False), [CE, 0 * CE], rtol=1e-6)


def test_convex_mode_of_a_single_round_is_cross_entropy():
    np.testing.assert_allclose(objective(FedProc(mode="convex"), 0, ~VALID & False, rounds=1), [CE, 0 * CE], rtol=1e-6)


# Whole rounds


def run(rounds, **options):
    """The simulation, and its state after `rounds` rounds as numpy arrays."""
    simulated = toy.simulation(**options)
    state, _ = toy.train(simulated, range(rounds))
    return simulated, jax.tree.map(np.array, state)


def distance(a, b):
    return max(np.abs(x * 1.0 - y).max() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.thorough
def test_first_round_is_fedavg_and_later_ones_are_not():
    fedavg = [run(r, method=Method())[1].servers.variables for r in (1, 2)]
    fedproc = [run(r, name="fedproc", mu=1.0)[1].servers.variables for r in (1, 2)]
    assert distance(fedproc[0], fedavg[0]) < 1e-6
    assert distance(fedproc[1], fedavg[1]) > 1e-3


@pytest.mark.thorough
def test_prototypes_are_the_class_means_under_the_final_weights():
    simulated, state = run(1, name="fedproc", cohort=1)
    (k,) = simulated.clients_of(0)[0]
    federation = simulated.experiments[0].federation
    indices = federation.partition.train[k]
    images, labels = federation.dataset.x_train[indices] / 255.0, federation.dataset.y_train[indices]
    variables = jax.tree.map(lambda x: x[0], state.servers.variables)
    outputs, _ = forward(simulated.program.model, variables, jnp.asarray(images, jnp.float32), train=False)
    features = outputs.features
    expected = [np.asarray(features)[labels == c].mean(0) for c in np.unique(labels)]
    np.testing.assert_allclose(state.servers.prototypes[0, np.unique(labels)], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(np.flatnonzero(state.servers.valid[0]), np.unique(labels))


@pytest.mark.parametrize(("weights", "expected"), [("samples", 4.0), ("equal", 5.0)])
def test_clients_with_a_class_are_weighted_by_samples_or_equally(weights, expected):
    method = FedProc(prototype_weights=weights)
    three_samples = {"sums": jnp.full((1, D), 9.0), "counts": jnp.full(1, 3.0)}  # mean 3
    one_sample = {"sums": jnp.full((1, D), 7.0), "counts": jnp.full(1, 1.0)}  # mean 7
    no_samples = {"sums": jnp.zeros((1, D)), "counts": jnp.zeros(1)}
    totals = [method.split({"params": ()}, summary)[1] for summary in (three_samples, one_sample, no_samples)]
    message = Message(mean=(), total=jax.tree.map(lambda *x: sum(x), *totals))
    server = method.aggregate(Server((), jnp.zeros((1, D)), jnp.zeros(1, bool)), message, jnp.ones(3), None)
    np.testing.assert_allclose(server.prototypes, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("stale", ["carry", "drop"])
def test_a_class_that_no_client_sends_is_carried_or_dropped(stale):
    simulated, state = run(2, name="fedproc", cohort=1, seed=5, stale=stale)
    counts = simulated.experiments[0].federation.class_counts
    (first,), (second,) = (counts[simulated.clients_of(r)[0]] > 0 for r in (0, 1))
    assert (first & ~second).any()
    np.testing.assert_array_equal(state.servers.valid[0], second | (first & (stale == "carry")))


@pytest.mark.parametrize("epoch", [0, 1])
def test_only_the_last_epochs_features_are_collected(epoch):
    method = FedProc(prototype_features="last_epoch")
    head = {"head": linear_model.dense(np.ones((C, D)), np.zeros(C))}
    server = Server({"params": head}, jnp.zeros((C, D)), VALID)
    context = linear_model.context(method, np.ones(C), features=D, epoch=epoch)._replace(server=server)
    batch, variables = Batch(FEATURES, LABELS, jnp.ones(B).at[0].set(0)), method.download(server, ())
    for _ in range(2):
        variables = variables | method.loss(variables, batch, context)[1]
    np.testing.assert_array_equal(variables[SEEN]["counts"], np.multiply([4, 4, 4, 4], epoch))
    np.testing.assert_allclose(variables[SEEN]["sums"][0], 2 * epoch * (FEATURES[4] + FEATURES[8]), rtol=1e-6)


@pytest.mark.thorough
def test_last_epoch_features_equal_the_final_ones_if_weights_do_not_move():
    options = {"name": "fedproc", "clip": 1e-9, "last_batch": "keep"}
    (_, final), (_, last_epoch) = (run(1, prototype_features=f, **options) for f in ("final", "last_epoch"))
    assert distance(final.servers.variables, last_epoch.servers.variables) < 1e-6
    assert distance(final.servers.prototypes, last_epoch.servers.prototypes) < 1e-4


@struct.dataclass
class Normed(FedProc):
    """FedProc on a model with running statistics."""

    def build(self, model):
        return model.clone(feature_norm=True)


@pytest.mark.thorough
def test_last_epoch_features_are_computed_in_train_mode():
    options = {"clip": 1e-9, "last_batch": "keep"}
    methods = (Normed(prototype_features=f) for f in ("final", "last_epoch"))
    final, last_epoch = (run(1, method=m, **options)[1].servers.prototypes for m in methods)
    assert distance(final, last_epoch) > 0.1


@pytest.mark.thorough
def test_collected_features_are_not_running_statistics():
    simulated = toy.simulation(method=Normed(prototype_features="last_epoch"), local_statistics=True)
    state, _ = toy.train(simulated, (0,))
    assert set(state.statistics) == {"batch_stats"}
    assert set(state.servers.variables) == {"params", "batch_stats"}


@pytest.mark.thorough
def test_lanes_do_not_change_the_features_collected_in_training():
    one_lane, three_lanes = (run(2, name="fedproc", prototype_features="last_epoch", lanes=n)[1] for n in (1, 3))
    assert distance(one_lane.servers, three_lanes.servers) < 1e-5


@pytest.mark.thorough
def test_the_classifier_reads_the_projection():
    simulated = toy.simulation("fedproc", projection=7)
    params = simulated.start().servers.variables["params"]
    assert params["head"]["kernel"].shape[1:] == (7, 4)
    assert params["neck"]["fc1"]["kernel"].shape[1:] == (200, 200)


def test_temperature_of_zero_is_refused_by_the_command_line(tmp_path, capsys):
    assert main(["--method=fedproc", "--tau=0", f"--run-dir={tmp_path / 'run'}"]) == 2
    assert "--tau must be above 0" in capsys.readouterr().err
