"""PA of methods with a global model: every client fine-tunes the best and the last one."""

import jax
import numpy as np
import pytest
import toy
from flax import struct

from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.methods.fedrep import FedRep
from fedjax_pcdd.models import forward
from fedjax_pcdd.training.fine_tuning import from_global, from_last

RESULT = {"ga_best_round": 1, "pa_best": 0.25, "pa_last": 0.5, "ga_best": 0.75}


def global_models(lr=0.05):
    """The simulation of the fine-tuning, and the global variables [1, ...] after one and three rounds."""
    simulated = toy.simulation(cohort=5, noise=120)
    pair = [jax.tree.map(np.array, toy.train(simulated, rounds)[0].servers.variables) for rounds in ((0,), (0, 1, 2))]
    tuner = toy.simulation(cohort=5, noise=120, lr=lr).tuner(epochs=2)
    return tuner, *pair


def accuracies(tuner, models):
    """PA of each client's own model [1, ...], [K]."""
    federation = tuner.experiments[0].federation
    found = []
    for variables, own in zip(models, federation.partition.test, strict=True):
        images = prepare(Pipeline(), federation.dataset.x_test[own], None, train=False)
        single = jax.tree.map(lambda x: x[0], variables)
        logits = forward(tuner.program.model, single, images, train=False)[0].logits
        found.append((np.argmax(logits, 1) == federation.dataset.y_test[own]).mean())
    return np.array(found)


def tuned_alone(tuner, variables, k):
    """The global model after a round of which k is the only client."""
    state, _ = tuner.step(tuner.start(variables), 3, tuner.plan(3, [np.array([k])]))
    return state.servers.variables


@pytest.mark.thorough
def test_from_global_tests_every_clients_tuned_model():
    tuner, best, last = global_models()
    (result,) = from_global(tuner, best, last, 3, [RESULT])
    for name, given in (("best", best), ("last", last)):
        alone = accuracies(tuner, [tuned_alone(tuner, given, k) for k in range(5)])
        assert result[f"pa_{name}"] == pytest.approx(alone.mean())
        assert alone.mean() != pytest.approx(accuracies(tuner, [given] * 5).mean())  # tuning changes something
    assert result["pa_std"] == pytest.approx(alone.std())  # of the last models, as that of other rows is
    np.testing.assert_allclose(result["pa_best_per_client"], accuracies(tuner, [
        tuned_alone(tuner, best, k) for k in range(5)
    ]))  # fmt: skip


@pytest.mark.thorough
def test_from_global_without_learning_rate_tests_the_given_models():
    tuner, best, last = global_models(lr=0.0)
    (result,) = from_global(tuner, best, last, 3, [RESULT])
    found, expected = [result["pa_best"], result["pa_last"]], [accuracies(tuner, [m] * 5).mean() for m in (best, last)]
    np.testing.assert_allclose(found, expected)
    assert found[0] != found[1]


@pytest.mark.thorough
def test_from_global_keeps_what_was_measured_during_training():
    tuner, best, last = global_models(lr=0.0)
    (result,) = from_global(tuner, best, last, 3, [RESULT])
    assert (result["pa_local_best"], result["pa_local_last"], result["pa_best_round"]) == (0.25, 0.5, 1)
    assert result["pa_protocol"] == "global model fine-tuned for 2 epochs"
    assert "ga_best" not in result


@struct.dataclass
class Normed(FedRep):
    """FedRep on a model with running statistics."""

    def build(self, model):
        return super().build(model).clone(feature_norm=True)


@pytest.mark.thorough
def test_tuned_heads_have_the_same_ga_however_many_are_tuned_at_once():
    results = []
    for place in ("device", "host"):  # there as many at once as take part in a round
        simulated = toy.simulation(method=Normed(fine_tune_heads=True), cohort=2, client_state=place, noise=120)
        state, _ = toy.train(simulated)
        results += from_last(simulated.tuner(2), state, 3)
    assert results[0] == results[1]
