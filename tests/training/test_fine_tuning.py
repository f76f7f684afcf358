"""PA of methods with a global model: every client fine-tunes the best and the last global model."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import toy
from flax import struct

from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods.fedrep import FedRep
from fedjax_pcdd.models import forward
from fedjax_pcdd.training.fine_tuning import from_global, from_last

RESULT = {"ga_best_round": 1, "pa_best": 0.25, "pa_last": 0.5, "ga_best": 0.75}


def global_models(lr=0.05):
    """The simulation that fine-tunes, and the global variables [1, ...] after one and three rounds."""
    simulated = toy.simulation(cohort=5, noise=120)
    models = [jax.tree.map(np.array, toy.train(simulated, rounds)[0].servers.variables) for rounds in ((0,), (0, 1, 2))]
    tuner = toy.simulation(cohort=5, noise=120, lr=lr).tuner(epochs=2)
    return tuner, *models


def accuracies(tuner, models):
    """PA of each client's own model [1, ...], [K]."""
    federation = tuner.experiments[0].federation
    client_accuracies = []
    for variables, test_indices in zip(models, federation.partition.test, strict=True):
        images = prepare(Pipeline(), federation.dataset.x_test[test_indices], None, train=False)
        client_variables = jax.tree.map(lambda x: x[0], variables)
        logits = forward(tuner.program.model, client_variables, images, train=False)[0].logits
        client_accuracies.append((np.argmax(logits, 1) == federation.dataset.y_test[test_indices]).mean())
    return np.array(client_accuracies)


def tuned_by_client(tuner, variables, k):
    """The global model after a round in which client k alone trains."""
    state, _ = tuner.step(tuner.start(variables), 3, tuner.plan(3, [np.array([k])]))
    return state.servers.variables


@pytest.mark.thorough
def test_from_global_tests_every_clients_tuned_model():
    tuner, best, last = global_models()
    (result,) = from_global(tuner, best, last, 3, [RESULT])
    for name, model in (("best", best), ("last", last)):
        expected = accuracies(tuner, [tuned_by_client(tuner, model, k) for k in range(5)])
        assert result[f"pa_{name}"] == pytest.approx(expected.mean())
        assert expected.mean() != pytest.approx(accuracies(tuner, [model] * 5).mean())  # tuning changes something
    assert result["pa_std"] == pytest.approx(expected.std())  # of the last models, as in other rows
    np.testing.assert_allclose(result["pa_best_per_client"], accuracies(tuner, [
        tuned_by_client(tuner, best, k) for k in range(5)
    ]))  # fmt: skip


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_client_whose_fine_tuning_diverges_leaves_no_pa_and_is_named():
    tuner, best, last = global_models(lr=1e30)
    (result,) = from_global(tuner, best, last, 3, [RESULT])
    assert result["diverged_client"] in range(5)
    assert result["pa_best"] is result["pa_last"] is result["pa_last_best"] is None
    assert set(result["pa_best_per_client"]) == {None}
    assert result["pa_received_best"] > 0
    assert (result["pa_local_best"], result["pa_local_last"]) == (0.25, 0.5)


@pytest.mark.thorough
def test_from_global_without_learning_rate_tests_the_given_models():
    tuner, best, last = global_models(lr=0.0)
    (result,) = from_global(tuner, best, last, 3, [RESULT])
    actual, expected = [result["pa_best"], result["pa_last"]], [accuracies(tuner, [m] * 5).mean() for m in (best, last)]
    np.testing.assert_allclose(actual, expected)
    assert actual[0] != actual[1]


@pytest.mark.thorough
def test_from_global_keeps_what_was_measured_during_training():
    tuner, best, last = global_models(lr=0.0)
    (result,) = from_global(tuner, best, last, 3, [RESULT])
    assert (result["pa_local_best"], result["pa_local_last"], result["pa_best_round"]) == (0.25, 0.5, 1)
    assert result["pa_protocol"] == "global model fine-tuned for 2 epochs"
    assert "ga_best" not in result


@pytest.mark.thorough
def test_a_client_without_steps_counts_with_the_model_as_received():
    simulated = toy.simulation(cohort=5, noise=120, last_batch="strict")  # client 0 has one sample, a batch 8
    model = jax.tree.map(np.array, simulated.start().servers.variables)
    model["params"]["head"]["bias"] += 10 * (np.arange(toy.CLASSES) == toy.OWNED[0][0])
    (result,) = from_global(simulated.tuner(epochs=2), model, model, 3, [RESULT])
    received, tuned = accuracies(simulated, [model] * 5), np.array(result["pa_best_per_client"])
    assert tuned[0] == received[0] == 1
    assert any(tuned[1:] != received[1:])


@pytest.mark.thorough
def test_only_the_experiment_whose_fine_tuning_diverges_has_no_pa():
    base = toy.simulation(cohort=5)
    experiments = [base.experiments[0]._replace(local=replace(base.local, lr=lr)) for lr in (0.05, 1e30)]
    simulated = Simulation(base.program.model, experiments, pipeline=toy.PLAIN, cohort=5)
    models = jax.tree.map(np.array, simulated.start().servers.variables)
    trained, diverged = from_global(simulated.tuner(1), models, models, 3, [RESULT] * 2)
    assert "diverged_client" not in trained
    assert trained["pa_last"] > 0
    assert diverged["diverged_client"] in range(5)
    assert diverged["pa_last"] is None


@struct.dataclass
class Normed(FedRep):
    """FedRep on a model with running statistics."""

    def build(self, model):
        return super().build(model).clone(feature_norm=True)


@pytest.mark.thorough
def test_tuned_heads_have_the_same_ga_however_many_are_tuned_at_once():
    results = []
    for client_state in ("device", "host"):  # on the host, as many at once as take part in a round
        simulated = toy.simulation(method=Normed(fine_tune_heads=True), cohort=2, client_state=client_state, noise=120)
        state, _ = toy.train(simulated)
        results += from_last(simulated.tuner(2), state, 3)
    assert results[0] == results[1]


@pytest.mark.thorough
def test_ga_of_tuned_heads_counts_no_validation_samples():
    simulated = toy.simulation("fedrep", fine_tune_heads=True, cohort=5, lr=0.0, held=True)
    correct = np.array(simulated.evaluate(simulated.start()).local)[:, : toy.CLASSES]
    (result,) = from_last(simulated.tuner(1), simulated.start(), 0)
    assert result["ga_tuned"] == pytest.approx(correct.sum(1).mean() / len(toy.federation().dataset.y_test))


@pytest.mark.thorough
def test_fine_tuning_starts_from_averaged_statistics_and_not_from_those_of_clients():
    simulated = toy.simulation(method=Normed(), cohort=5, local_statistics=True, noise=120)
    state, _ = toy.train(simulated)
    spoilt = state._replace(statistics=jax.tree.map(lambda x: x * np.nan, state.statistics))
    first, second = (from_last(simulated.tuner(2), each, 3) for each in (state, spoilt))
    assert first == second
