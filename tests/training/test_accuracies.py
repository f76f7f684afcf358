"""What a run records of its rounds, and before its clients have trained."""

import jax
import numpy as np
import pytest
from in_memory import trained

import fedjax_pcdd as fp
from fedjax_pcdd.training.accuracies import Accuracies
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.loop import Callback, Progress, loop
from fedjax_pcdd.training.metrics import new_history
from fedjax_pcdd.training.tasks import setup


@pytest.mark.thorough
def test_clients_without_steps_have_the_initial_models_accuracy():
    config, method = build(
        {
            "method": "fedavg", "clients": 5, "min_samples": 1, "beta": 0.1, "rounds": 1, "lanes": 1, "quiet": True,
            "last_batch": "strict", "batch_size": 256,
        }
    )  # fmt: skip
    parts, known = setup([(config, method)]), []
    idle = parts.simulation.steps[0] == 0
    assert 0 < idle.sum() < 5

    class Look(Callback):
        def on_start(self, run):
            known.extend(not np.isnan(accuracy) for accuracy in run.history.pa_clients)

    loop(parts.simulation, parts.simulation.start(), 1, [parts.accuracies(0), Look()])
    np.testing.assert_array_equal(known, parts.federations[0].test_sizes > 0)
    assert all(np.array(known)[idle])


@pytest.mark.thorough
def test_a_round_records_the_scalars_that_the_method_names():
    small = {"clients": 3, "rounds": 1, "local_epochs": 1, "train_samples": 90, "lanes": 1, "fine_tune_epochs": 0}
    run = trained(method="fedgf+exp", **small)
    (row,) = run.history.rows
    servers = run.state.servers
    for name in ("divergence", "share", "extrapolation"):
        assert row[name] == float(getattr(servers, name)[0])
    assert row["divergence"] > 0


@pytest.mark.thorough
def test_the_loss_of_a_round_is_weighted_by_samples_as_the_models_are():
    federation, reports = fp.partition(fp.load_dataset("digits"), "dirichlet", clients=3, beta=0.3), []
    small = {"rounds": 1, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 0}
    history = fp.simulate(federation, callbacks=[lambda run, report: reports.append(report)], **small)
    (report,) = reports
    assert history.loss[0] == pytest.approx(np.average(report.loss, weights=federation.sizes[report.jobs.row]))


class Told(Accuracies):
    """The second of three rounds is the best."""

    def measure(self, run, row, report):
        row["ga"] = (0.3, 0.9, 0.5)[run.round - 1]


class Models(Callback):
    """Keeps the global model of each round."""

    def __init__(self):
        self.known = []

    def on_round(self, run, report):
        self.known.append(jax.tree.map(np.array, run.generic))


@pytest.mark.thorough
def test_the_model_that_is_kept_is_that_of_the_best_round_also_where_a_run_goes_on_after_it():
    small = {"clients": 3, "rounds": 3, "local_epochs": 1, "train_samples": 90, "lanes": 1, "quiet": True}
    simulation = setup([build(small)]).simulation
    whole = loop(simulation, simulation.start(), 3, [Told("fedavg", keeps_best=True), models := Models()])
    jax.tree.map(np.testing.assert_array_equal, whole.best, models.known[1])
    history = new_history(3)
    history.rows += whole.history.rows[:2]
    since = [Progress(2, history, whole.best)]
    rest = loop(simulation, simulation.start(), 3, [Told("fedavg", keeps_best=True)], since)
    jax.tree.map(np.testing.assert_array_equal, rest.best, models.known[1])
