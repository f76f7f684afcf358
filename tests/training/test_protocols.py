"""Protocols of PA: worked examples, their order, what they leave unchanged, and what contradicts them."""

import json

import jax
import numpy as np
import pytest
import toy
from in_memory import trained

import fedjax_pcdd as fp
from fedjax_pcdd.data.federation import hold_out
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.schedule import Jobs
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.fedgela import FedGELA
from fedjax_pcdd.methods.method import Traits
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.fine_tuning import fine_tuned
from fedjax_pcdd.training.loop import Progress, loop
from fedjax_pcdd.training.metrics import History, accuracy
from fedjax_pcdd.training.progress import pa_name
from fedjax_pcdd.training.protocols import by_epoch, protocol_of, rules
from fedjax_pcdd.training.tasks import setup

SMALL = {
    "lanes": 1, "rounds": 3, "local_epochs": 2, "clients": 4, "lr": 0.1, "beta": 1.0, "batch_size": 50, "cohort": 3,
}  # fmt: skip
PROTOCOLS = ("last", "received", "best_epoch", "best_mean")
UNDER_THE_PROTOCOL = ("pa", "pa_std", "pa_worst10", "pa_balanced")  # PA under the protocol of the run, and its spread


def accuracies(correct, tests):
    """Accuracy of each client by protocol, from correct answers [n, E + 1] to its tests [n], all of one class."""
    counted = rules(correct[:, :, None], tests[:, None])
    return {name: accuracy(chosen[:, 0], tests) for name, chosen in counted.items()}


def test_protocols_match_the_worked_example_of_two_clients():
    correct, tests = np.array([[60, 70, 55], [60, 54, 58]]), np.array([100, 100])
    means = {name: values.mean() for name, values in accuracies(correct, tests).items()}
    assert means == pytest.approx({"last": 0.565, "best_epoch": 0.65, "best_mean": 0.62})


def test_the_earliest_of_equal_epochs_counts():
    chosen = accuracies(np.array([[3, 2, 3], [1, 2, 1]]), np.array([4, 4]))["best_mean"]
    np.testing.assert_array_equal(chosen, [0.75, 0.25])


def test_clients_count_alike_however_many_tests_they_have():
    chosen = accuracies(np.array([[8, 0], [0, 1]]), np.array([10, 1]))["best_mean"]
    np.testing.assert_array_equal(chosen, [0, 1])


def test_means_that_differ_only_by_rounding_count_as_equal():
    chosen = accuracies(np.array([[3, 1], [2, 2], [1, 3]]), np.array([10, 10, 10]))["best_mean"]
    np.testing.assert_array_equal(chosen, [0.3, 0.2, 0.1])


def test_a_client_without_tests_has_no_accuracy_under_any_protocol():
    chosen = accuracies(np.array([[0, 0], [1, 2]]), np.array([0, 4]))
    assert all(np.isnan(values[0]) and values[1] == 0.5 for values in chosen.values())


def test_a_client_with_fewer_epochs_keeps_its_last_count():
    columns = [np.zeros(2, int)] * 5
    jobs = Jobs(*columns, steps=np.array([6, 2]), epoch_steps=np.array([2, 2]))
    counts = by_epoch(jobs, np.array([[1, 2, 3], [4, 0, 0]])[:, :, None], np.array([5, 6])[:, None])
    np.testing.assert_array_equal(counts[:, :, 0], [[1, 2, 3, 5], [4, 6, 6, 6]])


def test_an_epoch_is_chosen_by_all_tests_and_its_other_accuracies_go_with_it():
    """Tests of two classes, then validation samples: the second epoch is the best on tests, the first on validation."""
    correct = np.array([[[5, 1, 9, 9], [7, 0, 1, 1], [3, 3, 5, 5]]])
    counted = rules(correct, np.array([[10, 10]]))
    np.testing.assert_array_equal(counted["best_epoch"], correct[:, 1])
    np.testing.assert_array_equal(counted["best_mean"], correct[:, 1])
    np.testing.assert_array_equal(counted["last"], correct[:, 2])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "overrides"),
    [("fedgela", {}), ("fedrep", {}), ("fedrod", {}), ("fedproto", {}), ("solo", {"models": "mlp", "cohort": None})],
)
def test_pa_of_an_epoch_chosen_on_tests_is_never_below_that_of_the_last(method, overrides):
    run = trained(method=method, pa_protocol="best_epoch", **SMALL | overrides)
    for row in run.history.rows:
        assert row["pa"] == row["pa_best_epoch"] >= row["pa_best_mean"] >= row["pa_last"]
        assert row["pa_received"] is not None
    gained = any(row["pa_best_epoch"] > row["pa_last"] for row in run.history.rows)
    assert gained or method not in ("fedgela", "fedrep")


def other_numbers(row):
    return {k: v for k, v in row.items() if "sec" not in k and k not in UNDER_THE_PROTOCOL}


@pytest.mark.thorough
def test_a_protocol_changes_no_weight_and_no_other_number():
    runs = {name: trained(method="fedgela", pa_protocol=name, **SMALL) for name in PROTOCOLS}
    last, *others = ([other_numbers(row) for row in run.history.rows] for run in runs.values())
    for rows in others:
        assert all(row | last_row == row for row, last_row in zip(rows, last, strict=True))
    first, *finals = (run.variables for run in runs.values())
    for final in finals:
        jax.tree.map(np.testing.assert_array_equal, first, final)
    for name, run in runs.items():
        assert [row["pa"] for row in run.history.rows] == [row[f"pa_{name}"] for row in run.history.rows]


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedgela", "solo"])
def test_clients_that_do_not_learn_have_the_same_pa_under_all_protocols(method):
    (row,) = trained(method=method, pa_protocol="best_mean", **SMALL | {"lr": 1e-30, "rounds": 1}).history.rows
    assert len({row[f"pa_{name}"] for name in PROTOCOLS}) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("lanes", [1, 3])
def test_clients_are_tested_before_every_epoch_of_their_own(lanes):
    base = toy.simulation("fedgela", epochs=(3, 1, 2, 3, 2), cohort=5)
    options = {"pipeline": toy.PLAIN, "cohort": 5, "execution": Execution(lanes=lanes), "rounds": 3}
    simulated = Simulation(base.program.model, base.experiments, **options, tests_epochs=True)
    _, report = simulated.step(simulated.start(), 0)
    jobs = simulated.plan(0)[1]
    counts = by_epoch(jobs, np.array(report.before), np.array(report.correct))
    for epochs in (1, 2):  # the same batches, fewer epochs
        shorter = toy.simulation("fedgela", epochs=epochs, cohort=5)
        _, short_report = shorter.step(shorter.start(), 0)
        long_enough = (jobs.steps // np.maximum(jobs.epoch_steps, 1)) >= epochs
        np.testing.assert_array_equal(counts[long_enough, epochs], np.array(short_report.correct)[long_enough])
    received = np.array(simulated.evaluate(simulated.start(), personal=True).personal)
    np.testing.assert_array_equal(counts[:, 0], received[jobs.row])


@pytest.mark.thorough
def test_epochs_are_measured_as_models_between_rounds_also_on_validation():
    base = toy.simulation(cohort=5)
    experiment = base.experiments[0]._replace(federation=hold_out(toy.federation(), 0.3, 0))
    simulated = Simulation(base.program.model, [experiment], pipeline=toy.PLAIN, cohort=5, rounds=3, tests_epochs=True)
    received = np.array(simulated.evaluate(simulated.start(), personal=True).personal)
    assert received[:, toy.CLASSES :].any()
    _, report = simulated.step(simulated.start(), 0)
    np.testing.assert_array_equal(np.array(report.before)[:, 0], received)


@pytest.mark.thorough
def test_best_epochs_of_fine_tuning_are_never_below_the_model_before_it():
    simulated = toy.simulation(cohort=5, noise=120)
    state, _ = toy.train(simulated, (0, 1))
    tuner = simulated.tuner(3, tests_epochs=True)
    (pa,), _, _ = fine_tuned(tuner, tuner.start(state.servers.variables), 3)
    means = {name: np.nanmean(values["pa"]) for name, values in pa.items()}
    assert means["best_epoch"] >= means["best_mean"] >= max(means["last"], means["received"])
    (plain,), _, _ = fine_tuned(simulated.tuner(3), tuner.start(state.servers.variables), 3)
    assert plain.keys() == {"last", "received"}
    np.testing.assert_array_equal(plain["last"]["pa"], pa["last"]["pa"])


@pytest.mark.thorough
def test_an_absent_client_keeps_its_chosen_accuracy():
    run = trained(method="fedgela", pa_protocol="best_epoch", **SMALL | {"rounds": 1, "cohort": 1})
    (row,), accuracies_of_clients = run.history.rows, run.history.also["pa_best_epoch"]
    received = np.array(run.simulation.evaluate(run.simulation.start(), personal=True).personal).sum(1)
    absent = np.setdiff1d(np.arange(4), run.simulation.clients_of(0)[0])
    np.testing.assert_allclose(np.array(accuracies_of_clients)[absent], (received / run.federation.test_sizes)[absent])
    assert row["pa"] == pytest.approx(np.mean(accuracies_of_clients))


@pytest.mark.thorough
def test_a_history_with_all_protocols_survives_a_checkpoint():
    run = trained(method="fedgela", pa_protocol="best_mean", **SMALL)
    assert History(**json.loads(run.history.to_json())) == run.history


@pytest.mark.thorough
def test_a_resumed_run_has_the_same_pa_under_all_protocols():
    options = {"method": "fedgela", "pa_protocol": "best_epoch", **SMALL}
    prepared = setup([build(options)])
    first = loop(prepared.simulation, prepared.simulation.start(), 1, [prepared.accuracies(0)])
    progress = Progress(1, History(**json.loads(first.history.to_json())), first.best)
    resumed = loop(prepared.simulation, first.state, 3, [prepared.accuracies(0)], [progress])
    names = [f"pa_{name}" for name in PROTOCOLS]
    rows, expected = ([[row[n] for n in names] for row in run.history.rows] for run in (resumed, trained(**options)))
    assert rows == expected


@pytest.mark.parametrize(("of_run", "of_method", "expected"), [
    (None, None, "last"), ("best_mean", None, "best_mean"), (None, "received", "received"), ("last", "last", "last"),
])  # fmt: skip
def test_the_protocol_is_that_of_the_run_or_of_the_method(of_run, of_method, expected):
    assert protocol_of(of_run, Traits(protocol=of_method)) == expected


def test_two_protocols_at_once_are_refused():
    with pytest.raises(UserError, match="contradict: drop one"):
        trained(method="fedgela", pa_protocol="best_epoch", pa_model="server", **SMALL)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedgela", "apfl", "fedrep"])
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_accuracies_beside_pa_are_those_of_the_protocols_models(method, protocol):
    """Clients have one class each, so their mean recall is the share of correct answers."""
    options = SMALL | {"partition": "pcdd", "classes_per_client": 1, "clients": 10, "rounds": 2}
    run = trained(method=method, pa_protocol=protocol, select_by="balanced", **options)
    assert run.history.select_on == "test, balanced accuracy"
    for row in run.history.rows:
        assert row["pa_balanced"] == pytest.approx(row["pa"]) == row[f"pa_{protocol}"]
    received = [row["pa_received"] for row in run.history.rows]
    assert method == "fedrep" or received != [row["pa_last"] for row in run.history.rows]


@pytest.mark.thorough
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_accuracies_beside_pa_after_fine_tuning_are_of_the_tuned_models(protocol):
    federation = fp.partition(fp.load_dataset("digits"), "pcdd", clients=10, classes_per_client=1)
    options = {"rounds": 2, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 1, "batch_size": 20, "lr": 0.001}
    history = fp.simulate(federation, "fedavg", pa_protocol=protocol, validation=0.2, **options)
    summary, row = history.summary, history.rows[-1]
    for when in ("best", "last"):  # clients have one class, so mean recall is accuracy
        assert summary[f"pa_balanced_{when}"] == pytest.approx(summary[f"pa_{when}"])
    received = protocol == "received"  # which is not tuned
    assert (summary["pa_last"] == row["pa"]) == received == (summary["pa_validation_last"] == row["pa_validation"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("options", "criterion"),
    [({"select_by": "balanced"}, "balanced"), ({"validation": 0.2, "select_on": "validation"}, "validation")],
)
def test_the_best_round_is_chosen_by_the_models_of_the_best_epochs(options, criterion):
    run = trained(method="fedgela", pa_protocol="best_epoch", **options, **SMALL)
    scores = [row[f"pa_{criterion}"] for row in run.history.rows]
    assert run.history.best("pa")[1] == 1 + int(np.argmax(scores))
    assert all(row["pa"] == row["pa_best_epoch"] for row in run.history.rows)
    tuned = trained(method="fedavg", pa_protocol="best_epoch", **options, **SMALL | {"rounds": 1})
    assert tuned.history.best("pa")[1] == 1


@pytest.mark.thorough
def test_best_epochs_of_models_between_rounds_are_counted_in_every_round():
    with pytest.raises(UserError, match="takes part: use eval_every=1"):
        trained(method="fedrep", pa_protocol="best_mean", eval_every=2, **SMALL)
    once, often = (
        trained(method="fedrep", pa_protocol="best_mean", eval_every=every, **SMALL | {"cohort": 4, "rounds": 2})
        for every in (2, 1)
    )
    assert once.history.rows[-1]["pa"] == often.history.rows[-1]["pa"]


def test_a_task_refuses_a_protocol():
    with pytest.raises(UserError, match="intra-domain accuracy after each round: drop pa_protocol"):
        trained(method="solo", task="digits_domains", pa_protocol="best_epoch", rounds=1, lanes=1)


@pytest.mark.thorough
def test_simulate_reports_all_protocols_under_their_names():
    federation = fp.partition(fp.load_dataset("digits"), clients=4, beta=1.0)
    options = {"rounds": 1, "local_epochs": 2, "lanes": 1, "batch_size": 50}
    history = fp.simulate(federation, FedGELA(), pa_protocol="best_epoch", **options)
    assert {f"pa_{name}_best" for name in PROTOCOLS} <= history.summary.keys()
    assert history.summary["pa_protocol"] == "during training, best epoch of each client, chosen on its tests"
    tuned = fp.simulate(federation, "fedavg", pa_protocol="best_mean", fine_tune_epochs=1, **options)
    assert tuned.summary["pa_best"] == tuned.summary["pa_best_mean_best"] >= tuned.summary["pa_received_best"]
    assert tuned.summary["pa_protocol"].startswith("global model fine-tuned for 1 epochs, epoch with the best mean")


@pytest.mark.thorough
def test_pa_of_models_as_received_is_not_named_after_the_fine_tuning_that_follows():
    federation = fp.partition(fp.load_dataset("digits"), clients=4, beta=1.0)
    options = {"rounds": 1, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 1, "batch_size": 50}
    summary = fp.simulate(federation, "fedavg", pa_protocol="received", **options).summary
    assert summary["pa_best"] == summary["pa_received_best"] != summary["pa_last_best"]
    assert pa_name(summary) == "PA"


@pytest.mark.thorough
def test_with_equal_iid_tests_fine_tuning_is_never_below_the_global_model():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=5)
    assert set(federation.test_sizes) == {71}
    options = {"rounds": 2, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 2, "batch_size": 50, "lr": 0.1}
    summary = fp.simulate(federation, "fedavg", pa_protocol="best_mean", **options).summary
    assert summary["pa_received_best"] == pytest.approx(summary["ga_best"])
    assert summary["pa_best"] == summary["pa_best_mean_best"] >= summary["ga_best"]
    assert summary["pa_best"] >= summary["pa_last_best"]
