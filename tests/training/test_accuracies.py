"""What a run records after each round, and before its clients have trained."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from in_memory import trained

import fedjax_pcdd as fp
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Lists, Partition
from fedjax_pcdd.engine.devices import CompileClock
from fedjax_pcdd.engine.program import Evaluation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.training import accuracies
from fedjax_pcdd.training.accuracies import Accuracies, _copied
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.loop import Callback, Progress, loop
from fedjax_pcdd.training.metrics import new_history
from fedjax_pcdd.training.tasks import setup


@pytest.mark.thorough
def test_clients_without_steps_have_the_initial_models_accuracy(monkeypatch):
    config, method = build(
        {
            "method": "fedavg", "clients": 5, "min_samples": 1, "beta": 0.1, "rounds": 1, "lanes": 1, "quiet": True,
            "last_batch": "strict", "batch_size": 256,
        }
    )  # fmt: skip
    monkeypatch.setattr(accuracies, "_AT_A_TIME", 2)
    prepared, has_accuracy = setup([(config, method)]), []
    idle = prepared.simulation.steps[0] == 0
    assert 0 < idle.sum() < 5

    class InitialAccuracies(Callback):
        def on_start(self, run):
            has_accuracy.extend(not np.isnan(accuracy) for accuracy in run.history.pa_clients)

    loop(prepared.simulation, prepared.simulation.start(), 1, [prepared.accuracies(0), InitialAccuracies()])
    np.testing.assert_array_equal(has_accuracy, prepared.federations[0].test_sizes > 0)
    assert all(np.array(has_accuracy)[idle])


@pytest.mark.thorough
def test_a_round_records_the_scalars_that_the_method_names():
    options = {"clients": 3, "rounds": 1, "local_epochs": 1, "train_samples": 90, "lanes": 1, "fine_tune_epochs": 0}
    run = trained(method="fedgf+exp", **options)
    (row,) = run.history.rows
    servers = run.state.servers
    for name in ("divergence", "share", "extrapolation"):
        assert row[name] == float(getattr(servers, name)[0])
    assert row["divergence"] > 0


class Numbered(NamedTuple):
    variables: dict
    round: Any
    ga_own: Any


@struct.dataclass
class Records(fp.Method):
    name: str = fp.hyperparameter("round", help="what is recorded", static=True)

    def traits(self):
        return super().traits()._replace(recorded=(self.name,))

    def init_server(self, setting, variables, class_counts, key):
        return Numbered(variables, jnp.zeros(()), jnp.zeros(()))


@struct.dataclass
class Further(fp.Method):
    def further_models(self, server):
        return {"balanced": server.variables}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (Records("round"), "Records.traits.recorded names 'round', which is, or may become, a name of the rows' own"),
        (Records("ga_own"), "Records.traits.recorded names 'ga_own', which is, or may become, a name of the rows' own"),
        (Further(), "Further.further_models names 'balanced', which is, or may become, a name of the rows' own"),
    ],
    ids=["a column", "an accuracy", "a model"],
)
def test_names_of_a_methods_own_numbers_must_not_be_those_of_the_rows(method, sentence):
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    options = {"rounds": 1, "local_epochs": 1, "lanes": 1, "model": "mlp", "fine_tune_epochs": 0}
    with pytest.raises(UserError) as raised:
        fp.simulate(federation, method, **options)
    assert str(raised.value) == f"{sentence}: choose another."


@pytest.mark.parametrize(("method", "models"), [("fedavg", 1), ("solo", 2)])
def test_ga_is_that_of_the_global_model_or_the_mean_over_clients_also_by_class(method, models):
    labels, kept = np.array([0, 0, 1, 1, 1]), Lists.of([np.arange(2)] * 2)
    data = Dataset("grey", *[np.zeros((5, 1, 1, 1), np.uint8), labels] * 2, 3)
    federation = Federation(data, Partition(*[(np.arange(2, 5),) * 2] * 2), kept)
    counts = np.array([[2, 1, 0, 3, 0, 0], [1, 3, 0, 1, 0, 0]])[:models]  # on tests, then on validation samples
    run = SimpleNamespace(federation=federation, history=new_history(2), traits=METHODS[method]().traits())
    row = Accuracies(method)._generic(run, Evaluation(counts, (), counts, {}))
    assert row["ga"] == pytest.approx(np.mean([0.6, 0.8][:models]))
    assert row["ga_per_class"] == pytest.approx([np.mean([1, 0.5][:models]), np.mean([1 / 3, 1][:models]), None])
    assert row["ga_balanced"] == pytest.approx(np.mean([2 / 3, 0.75][:models]))
    assert row["ga_validation"] == pytest.approx(np.mean([0.75, 0.25][:models]))


@pytest.mark.thorough
def test_a_rounds_loss_weights_clients_by_samples_as_model_averaging_does():
    federation, reports = fp.partition(fp.load_dataset("digits"), "dirichlet", clients=3, beta=0.3), []
    options = {"rounds": 1, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 0}
    history = fp.simulate(federation, callbacks=[lambda run, report: reports.append(report)], **options)
    (report,) = reports
    assert history.loss[0] == pytest.approx(np.average(report.loss, weights=federation.sizes[report.jobs.row]))


@pytest.mark.thorough
def test_own_models_that_train_without_weights_have_a_loss():
    def losses(weights):
        history = fp.simulate(
            fp.testing.federation(), "solo", model="mlp", rounds=6, local_epochs=1, batch_size=16, weights=weights,
            lanes=1, cohort=1, fine_tune_epochs=0,
        )  # fmt: skip
        return [row["loss"] for row in history.rows]

    assert losses("batches") == losses("method")  # floor(n / B) is 0 for three of five clients


def test_a_model_is_copied_by_one_program_and_shares_no_memory_with_the_copy():
    model, clock = {name: jax.numpy.arange(2.0 * n).reshape(2, n) for n, name in ((17, "w"), (13, "b"))}, CompileClock()
    copy = _copied(model)
    assert clock.count == 1
    for name, leaf in model.items():
        np.testing.assert_array_equal(copy[name], leaf)
        assert not np.shares_memory(copy[name], leaf)


class FixedAccuracies(Accuracies):
    """Made-up accuracies of three rounds, of which the second is the best."""

    def measure(self, run, row, report):
        row["ga"] = (0.3, 0.9, 0.5)[run.round - 1]


class GlobalModels(Callback):
    """Keeps the global model of each round."""

    def __init__(self):
        self.by_round = []

    def on_round(self, run, report):
        self.by_round.append(jax.tree.map(np.array, run.generic))


@pytest.mark.thorough
def test_the_best_rounds_model_is_kept_also_by_a_run_resumed_after_it():
    options = {"clients": 3, "rounds": 3, "local_epochs": 1, "train_samples": 90, "lanes": 1, "quiet": True}
    simulation = setup([build(options)]).simulation
    whole = loop(
        simulation, simulation.start(), 3, [FixedAccuracies("fedavg", keeps_best=True), global_models := GlobalModels()]
    )
    jax.tree.map(np.testing.assert_array_equal, whole.best, global_models.by_round[1])
    history = new_history(3)
    history.rows += whole.history.rows[:2]
    progress = [Progress(2, history, whole.best)]
    resumed = loop(simulation, simulation.start(), 3, [FixedAccuracies("fedavg", keeps_best=True)], progress)
    jax.tree.map(np.testing.assert_array_equal, resumed.best, global_models.by_round[1])
