"""FedProto: its loss, personal models and prototypes against the reference, and what each option changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from golden_vectors import cases
from trajectories import train

from fedjax_pcdd.losses.prototypes import nearest_prototype_scores, squared_distance_to_own
from fedjax_pcdd.methods.fedproto import FedProto
from fedjax_pcdd.models import forward

RTOL, ATOL = 1e-9, 1e-11


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("g", cases("trajectories"))
@pytest.mark.parametrize("lanes", [1, 3])
def test_personal_models_and_prototypes_agree_with_the_reference(g, lanes):
    problem, states = train(g, "fedproto", lanes, lam=1.0)
    for r, state in enumerate(states):
        rows = [jax.tree.map(lambda x, k=k: x[k], state.clients["params"]) for k in range(problem.clients)]
        models = np.stack([problem.flatten(params) for params in rows])
        np.testing.assert_allclose(models, g["out_fedproto_lambda1__personal"][r], RTOL, ATOL)
        np.testing.assert_allclose(state.servers.prototypes[0], g["out_fedproto_lambda1__protos"][r], RTOL, ATOL)


def test_distance_matches_the_worked_example():
    value = squared_distance_to_own(jnp.ones((1, 2)), jnp.zeros(1, int), jnp.zeros((1, 2)), jnp.ones(1, bool))
    assert value == 1


def test_distance_is_invariant_to_a_permutation_of_classes():
    rng = np.random.default_rng(0)
    z, g, labels = jnp.asarray(rng.normal(size=(8, 3))), jnp.asarray(rng.normal(size=(4, 3))), jnp.arange(8) % 4
    order, valid = jnp.asarray([2, 0, 3, 1]), jnp.asarray([True, False, True, True])
    permuted = squared_distance_to_own(z, jnp.argsort(order)[labels], g[order], valid[order])
    np.testing.assert_allclose(permuted, squared_distance_to_own(z, labels, g, valid), rtol=1e-6)


def test_class_without_prototype_is_never_predicted():
    scores = nearest_prototype_scores(jnp.zeros((2, 3)), jnp.zeros((4, 3)).at[3].set(1), jnp.arange(4) == 3)
    np.testing.assert_array_equal(scores, [[-np.inf] * 3 + [-1]] * 2)


def states(name, rounds=3, **options):
    """The simulation, and its states after each round."""
    simulated = toy.simulation(name, **options)
    state, history = simulated.start(), []
    for r in range(rounds):
        state, _ = simulated.step(state, r)
        history.append(jax.tree.map(np.array, state))
    return simulated, history


def distance(a, b):
    return max(np.abs(x * 1.0 - y).max() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize(("lam", "equal"), [(0.0, True), (None, False)])
def test_only_without_its_term_it_equals_solo(lam, equal):
    _, fedproto = states("fedproto", **({} if lam is None else {"lam": lam}))
    _, solo = states("solo")
    assert (distance(fedproto[-1].clients, solo[-1].clients) < 1e-6) == equal


@pytest.mark.thorough
def test_no_parameter_reaches_the_server():
    simulated, history = states("fedproto")
    assert distance(history[-1].servers.variables, simulated.start().servers.variables) == 0


@pytest.mark.thorough
def test_prototypes_are_weighted_equally_by_default():
    (_, equal), (_, samples) = (
        states("fedproto", 1, cohort=5, **options) for options in ({}, {"prototype_weights": "samples"})
    )
    assert FedProto().prototype_weights == "equal"
    assert distance(equal[0].clients, samples[0].clients) < 1e-6
    assert distance(equal[0].servers.prototypes, samples[0].servers.prototypes) > 1e-3


@pytest.mark.thorough
def test_last_epoch_features_change_the_prototypes_but_not_the_models():
    (_, final), (_, last_epoch) = (
        states("fedproto", 1, cohort=5, **options) for options in ({}, {"prototype_features": "last_epoch"})
    )
    assert distance(final[0].clients, last_epoch[0].clients) < 1e-6
    assert distance(final[0].servers.prototypes, last_epoch[0].servers.prototypes) > 1e-3


@pytest.mark.thorough
def test_the_last_epoch_is_that_of_each_client():
    simulated = toy.simulation("fedproto", epochs=(3, 1, 2, 2, 2), prototype_features="last_epoch")
    state, _ = simulated.step(simulated.start(), 0, simulated.plan(0, [np.array([1])]))
    np.testing.assert_array_equal(state.servers.valid[0], np.isin(np.arange(toy.CLASSES), toy.OWNED[1]))


@pytest.mark.thorough
def test_a_client_without_prototypes_of_its_classes_predicts_none_of_them():
    simulated = toy.simulation("fedproto", predict="prototype", cohort=1)
    state, _ = simulated.step(simulated.start(), 0, simulated.plan(0, [np.array([0])]))
    correct = np.array(simulated.evaluate(state, personal=True).personal)
    assert not correct[1].any()  # it owns classes 0 and 1, and only 2 has a prototype
    assert correct[0].any()


@pytest.mark.thorough
def test_a_class_that_no_client_sends_is_dropped_if_asked():
    simulated, history = states("fedproto", 2, cohort=1, seed=5, stale="drop")
    owned = simulated.experiments[0].federation.class_counts[simulated.clients_of(1)[0][0]] > 0
    assert (history[0].servers.valid[0] & ~owned).any()
    np.testing.assert_array_equal(history[1].servers.valid[0], owned)


def outputs(simulated, variables, images):
    return forward(simulated.program.model, variables, jnp.asarray(images / 255.0, jnp.float32), train=False)[0]


def nearest_classes(simulated, state, k, images, classes):
    """Those of the given classes whose prototypes are nearest, in the feature space of client k."""
    variables = jax.tree.map(lambda x: x[k], state.clients)
    z = np.asarray(outputs(simulated, variables, images).features)
    squared_distances = ((z[:, None] - state.servers.prototypes[0, classes]) ** 2).sum(-1)
    return classes[squared_distances.argmin(1)]


@pytest.mark.thorough
def test_prototype_predictions_use_own_classes_for_pa_and_all_for_ga():
    simulated, history = states("fedproto", 2, predict="prototype", cohort=5)
    federation, state = simulated.experiments[0].federation, history[-1]
    counts = simulated.evaluate(jax.tree.map(jnp.asarray, state), personal=True)
    data, differing = federation.dataset, 0
    for k, test_indices in enumerate(federation.partition.test):
        owned, valid = np.flatnonzero(federation.class_counts[k]), np.flatnonzero(state.servers.valid[0])
        pa = nearest_classes(simulated, state, k, data.x_test[test_indices], owned) == data.y_test[test_indices]
        ga = nearest_classes(simulated, state, k, data.x_test, valid) == data.y_test
        differing += np.any(nearest_classes(simulated, state, k, data.x_test, owned) != nearest_classes(
            simulated, state, k, data.x_test, valid
        ))  # fmt: skip
        assert (int(counts.personal[k].sum()), int(counts.local[k].sum())) == (pa.sum(), ga.sum())
    assert differing


@pytest.mark.thorough
def test_prediction_by_the_classifier_is_the_default():
    simulated, history = states("fedproto", 2, cohort=5)
    data = simulated.experiments[0].federation.dataset
    counts = simulated.evaluate(jax.tree.map(jnp.asarray, history[-1]), personal=True)
    for k in range(5):
        variables = jax.tree.map(lambda x, k=k: x[k], history[-1].clients)
        logits = np.asarray(outputs(simulated, variables, data.x_test).logits)
        assert int(counts.local[k].sum()) == (np.argmax(logits, 1) == data.y_test).sum()


@pytest.mark.parametrize(("predict", "model"), [("classifier", "local"), ("prototype", "server")])
def test_pa_by_prototypes_uses_those_of_the_same_round(predict, model):
    assert FedProto(predict=predict).traits().personal_model == model
