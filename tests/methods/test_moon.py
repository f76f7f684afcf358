"""MOON: properties of its loss, which models are contrasted, and what each option changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct

from fedjax_pcdd.losses.contrastive import cosine, cosines, model_contrast
from fedjax_pcdd.methods import METHODS, Method
from fedjax_pcdd.methods.method import Batch
from fedjax_pcdd.methods.moon import MOON, Client
from fedjax_pcdd.models import Classifier, forward, initialise
from fedjax_pcdd.models.mlp import MLP

B, D = 6, 4


def normal(shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.result_type(float))


# The loss


def test_model_contrast_matches_the_worked_example():
    q, other = jnp.asarray([[1.0, 0.0]]), jnp.asarray([[0.0, 1.0]])
    value = model_contrast(q, q, other[None], jnp.ones(1, bool), 0.5)
    np.testing.assert_allclose(value, 0.126928, rtol=1e-5)


@pytest.mark.thorough
def test_previous_model_equal_to_the_global_one_gives_log_2_and_no_gradient():
    target = normal((B, D), 1)
    contrast = jax.value_and_grad(model_contrast)
    value, gradient = contrast(normal((B, D)), target, target[None], jnp.ones(1, bool), 0.5)
    np.testing.assert_allclose(value, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(gradient, 0, atol=1e-7)


def test_scale_of_a_representation_does_not_matter():
    arguments = normal((B, D), 1), normal((1, B, D), 2), jnp.ones(1, bool), 0.5
    np.testing.assert_allclose(
        model_contrast(7 * normal((B, D)), *arguments), model_contrast(normal((B, D)), *arguments), rtol=1e-5
    )


def test_cosines_of_all_pairs_are_the_cosines_of_each():
    a, b = normal((3, D)), normal((5, D), 1)
    np.testing.assert_allclose(cosines(a, b), cosine(a[:, None], b), rtol=1e-5)


# The penalty: which models are contrasted, and in which mode

MODEL = Classifier(MLP((5,)), num_classes=3, feature_norm=True)
IMAGES = normal((B, 2, 2, 1), 5)


def variables(seed):
    """Variables whose running statistics depend on the seed."""
    initial = initialise(MODEL, jax.random.key(seed), (2, 2, 1))
    statistics = jax.tree.map(lambda x: x + 0.3 * seed, initial["batch_stats"])
    return {"params": initial["params"], "batch_stats": statistics}


def penalty(method, models, count, round=1):
    """The penalty of variables(1) that started from variables(2)."""
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *models)
    client = Client(stacked, jnp.int32(count))
    context = toy.context(model=MODEL, start=variables(2), client=client, round=round)
    outputs, _ = forward(MODEL, variables(1), IMAGES, train=True)
    batch = Batch(IMAGES, jnp.zeros(B, int), jnp.ones(B))
    return method.penalty(variables(1), outputs, batch, context)


def expected_penalty(mu, tau, *previous):
    q = forward(MODEL, variables(1), IMAGES, train=True)[0].features
    frozen = [forward(MODEL, v, IMAGES, train=False)[0].features for v in (variables(2), *previous)]
    scores = jnp.exp(jnp.stack([cosine(q, f) for f in frozen]) / tau)
    return -mu * jnp.log(scores[0] / scores.sum(0)).mean()


@pytest.mark.thorough
@pytest.mark.parametrize(("mu", "tau"), [(1.0, 0.5), (3.0, 0.2)])
def test_frozen_models_run_in_eval_mode_with_their_own_statistics(mu, tau):
    value = penalty(MOON(mu=mu, tau=tau), [variables(3)], 1)
    np.testing.assert_allclose(value, expected_penalty(mu, tau, variables(3)), rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("count", [1, 2])
def test_only_models_that_exist_are_contrasted(count):
    models = [variables(3), variables(4)]
    value = penalty(MOON(mu=1.0, previous=2), models, count)
    np.testing.assert_allclose(value, expected_penalty(1.0, 0.5, *models[:count]), rtol=1e-5)


@pytest.mark.parametrize(("first_time", "round", "contrasted"), [("skip", 1, 0), ("initial", 0, 0), ("initial", 1, 1)])
def test_first_participation_is_skipped_or_contrasted_with_the_initial_model(first_time, round, contrasted):
    value = penalty(MOON(mu=1.0, first_time=first_time), [variables(3)], 0, round)
    expected = expected_penalty(1.0, 0.5, variables(3)) if contrasted else 0
    np.testing.assert_allclose(value, expected, rtol=1e-5)


# Whole rounds


@struct.dataclass
class Normed(MOON):
    """MOON on a model with running statistics."""

    def build(self, model):
        return model.clone(feature_norm=True)


def close(a, b, tolerance=1e-6):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.allclose(x, y, tolerance, tolerance) for x, y in pairs)


def states(rounds, **options):
    """The simulation, and its state after each round as numpy arrays."""
    simulated = toy.simulation(**options)
    state, history = simulated.start(), []
    for r in range(rounds):
        state, _ = simulated.step(state, r)
        history.append(jax.tree.map(np.array, state))
    return simulated, history


@pytest.mark.thorough
def test_first_round_is_fedavg_and_later_ones_are_not():
    _, moon = states(2, name="moon", cohort=5)
    _, fedavg = states(2, method=Method(), cohort=5)
    assert close(moon[0].servers.variables, fedavg[0].servers.variables)
    assert not close(moon[1].servers.variables, fedavg[1].servers.variables, 1e-3)


@pytest.mark.thorough
def test_a_client_keeps_the_model_it_sent_with_its_running_statistics():
    simulated, (state,) = states(1, method=Normed(), cohort=1)
    (k,) = simulated.clients_of(0)[0]
    kept = jax.tree.map(lambda x: x[k, 0], state.clients.models)
    assert "batch_stats" in kept
    assert close(kept, jax.tree.map(lambda x: x[0], state.servers.variables))


@pytest.mark.thorough
def test_an_unselected_client_keeps_its_state():
    simulated, (before, after) = states(2, name="moon")
    unselected = np.setdiff1d(np.arange(5), simulated.clients_of(1)[0])
    assert len(unselected)
    for a, b in zip(jax.tree.leaves(before.clients), jax.tree.leaves(after.clients), strict=True):
        np.testing.assert_array_equal(a[unselected], b[unselected])


@pytest.mark.thorough
def test_previous_models_are_first_in_first_out():
    _, (first, second, third) = states(3, method=MOON(previous=2), cohort=5)
    for earlier, later in ((first, second), (second, third)):
        for a, b in zip(jax.tree.leaves(earlier.clients.models), jax.tree.leaves(later.clients.models), strict=True):
            np.testing.assert_array_equal(a[:, 0], b[:, 1])
    assert [int(s.clients.count.min()) for s in (first, second, third)] == [1, 2, 2]


@pytest.mark.thorough
def test_an_initial_model_that_was_contrasted_stays_among_the_previous_ones():
    simulated, history = states(2, method=MOON(previous=2, first_time="initial"))
    late = np.setdiff1d(simulated.clients_of(1)[0], simulated.clients_of(0)[0])
    early = np.setdiff1d(simulated.clients_of(0)[0], simulated.clients_of(1)[0])
    assert len(late)
    assert len(early)
    assert (history[1].clients.count[late] == 2).all()
    assert (history[1].clients.count[early] == 1).all()


@pytest.mark.thorough
def test_the_projection_is_the_papers_and_feeds_the_classifier():
    simulated = toy.simulation("moon", projection=7)
    params = simulated.start().servers.variables["params"]
    shapes = [params[part][layer]["kernel"].shape[1:] for part, layer in (("neck", "fc1"), ("neck", "fc2"))]
    assert [*shapes, params["head"]["kernel"].shape[1:]] == [(200, 200), (200, 7), (7, 4)]
    assert simulated.program.setting.feature_dim == 7


def test_by_default_the_model_is_unchanged():
    model = Classifier(MLP((5,)), num_classes=3)
    assert METHODS["moon"]().build(model) is model
