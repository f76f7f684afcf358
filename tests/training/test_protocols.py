"""Protocols of PA: worked numbers, their order, what they leave alone, and what contradicts."""

import json

import numpy as np
import pytest
import toy
from in_memory import trained

import fedjax_pcdd as fp
from fedjax_pcdd.data.federation import hold_out
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.engine.schedule import Jobs
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.fedgela import FedGELA
from fedjax_pcdd.methods.method import Traits
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.fine_tuning import fine_tuned
from fedjax_pcdd.training.loop import Progress, loop
from fedjax_pcdd.training.metrics import History, accuracy
from fedjax_pcdd.training.protocols import by_epoch, protocol_of, rules
from fedjax_pcdd.training.tasks import setup

SMALL = {
    "lanes": 1, "rounds": 3, "local_epochs": 2, "clients": 4, "lr": 0.1, "beta": 1.0, "batch_size": 50, "cohort": 3,
}  # fmt: skip
NAMES = ("last", "received", "best_epoch", "best_mean")
OF_THE_RULE = ("pa", "pa_std", "pa_worst10", "pa_balanced")  # PA under the protocol of the run, and its spread


def shares(correct, tests):
    """What each client counts with, by protocol, of correct answers [n, E + 1] among tests [n] of one class."""
    counted = rules(correct[:, :, None], tests[:, None])
    return {name: accuracy(own[:, 0], tests) for name, own in counted.items()}


def test_the_worked_example_of_two_clients():
    correct, tests = np.array([[60, 70, 55], [60, 54, 58]]), np.array([100, 100])
    means = {name: values.mean() for name, values in shares(correct, tests).items()}
    assert means == pytest.approx({"last": 0.565, "best_epoch": 0.65, "best_mean": 0.62})


def test_of_equal_epochs_the_earliest_counts():
    chosen = shares(np.array([[3, 2, 3], [1, 2, 1]]), np.array([4, 4]))["best_mean"]
    np.testing.assert_array_equal(chosen, [0.75, 0.25])


def test_clients_count_alike_however_many_tests_they_have():
    chosen = shares(np.array([[8, 0], [0, 1]]), np.array([10, 1]))["best_mean"]
    np.testing.assert_array_equal(chosen, [0, 1])


def test_means_that_are_equal_but_for_rounding_are_equal():
    chosen = shares(np.array([[3, 1], [2, 2], [1, 3]]), np.array([10, 10, 10]))["best_mean"]
    np.testing.assert_array_equal(chosen, [0.3, 0.2, 0.1])


def test_a_client_without_tests_counts_nowhere():
    chosen = shares(np.array([[0, 0], [1, 2]]), np.array([0, 4]))
    assert all(np.isnan(values[0]) and values[1] == 0.5 for values in chosen.values())


def test_a_client_with_fewer_epochs_keeps_its_last_number():
    columns = [np.zeros(2, int)] * 5
    jobs = Jobs(*columns, steps=np.array([6, 2]), epoch_steps=np.array([2, 2]))
    counts = by_epoch(jobs, np.array([[1, 2, 3], [4, 0, 0]])[:, :, None], np.array([5, 6])[:, None])
    np.testing.assert_array_equal(counts[:, :, 0], [[1, 2, 3, 5], [4, 6, 6, 6]])


def test_an_epoch_is_chosen_by_all_tests_and_its_other_accuracies_go_with_it():
    """Two classes, validation samples behind them: the second epoch has the most tests right, the first the rest."""
    correct = np.array([[[5, 1, 9, 9], [7, 0, 1, 1], [3, 3, 5, 5]]])
    counted = rules(correct, np.array([[10, 10]]))
    np.testing.assert_array_equal(counted["best_epoch"], correct[:, 1])
    np.testing.assert_array_equal(counted["best_mean"], correct[:, 1])
    np.testing.assert_array_equal(counted["last"], correct[:, 2])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "more"),
    [("fedgela", {}), ("fedrep", {}), ("fedrod", {}), ("fedproto", {}), ("solo", {"models": "mlp", "cohort": None})],
)
def test_what_is_chosen_on_tests_is_never_below_what_is_not(method, more):
    run = trained(method=method, pa_protocol="best_epoch", **SMALL | more)
    for row in run.history.rows:
        assert row["pa"] == row["pa_best_epoch"] >= row["pa_best_mean"] >= row["pa_last"]
        assert row["pa_received"] is not None
    gained = any(row["pa_best_epoch"] > row["pa_last"] for row in run.history.rows)
    assert gained or method not in ("fedgela", "fedrep")


def own_numbers(row):
    return {k: v for k, v in row.items() if "sec" not in k and k not in OF_THE_RULE}


@pytest.mark.thorough
def test_a_protocol_changes_no_weight_and_no_other_number():
    runs = {name: trained(method="fedgela", pa_protocol=name, **SMALL) for name in NAMES}
    last, *others = ([own_numbers(row) for row in run.history.rows] for run in runs.values())
    for rows in others:
        assert all(row | own == row for row, own in zip(rows, last, strict=True))
    for name, run in runs.items():
        assert [row["pa"] for row in run.history.rows] == [row[f"pa_{name}"] for row in run.history.rows]


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedgela", "solo"])
def test_clients_that_do_not_learn_have_one_number(method):
    (row,) = trained(method=method, pa_protocol="best_mean", **SMALL | {"lr": 1e-30, "rounds": 1}).history.rows
    assert len({row[f"pa_{name}"] for name in NAMES}) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("lanes", [1, 3])
def test_clients_are_tested_before_every_epoch_of_their_own(lanes):
    known = toy.simulation("fedgela", epochs=(3, 1, 2, 3, 2), cohort=5)
    given = {"pipeline": toy.PLAIN, "cohort": 5, "execution": Execution(lanes=lanes), "rounds": 3}
    simulated = Simulation(known.program.model, known.experiments, **given, tests_epochs=True)
    _, report = simulated.step(simulated.start(), 0)
    jobs = simulated.plan(0)[1]
    counts = by_epoch(jobs, np.array(report.before), np.array(report.correct))
    for epochs in (1, 2):  # the same batches, fewer epochs
        shorter = toy.simulation("fedgela", epochs=epochs, cohort=5)
        _, short = shorter.step(shorter.start(), 0)
        alike = (jobs.steps // np.maximum(jobs.epoch_steps, 1)) >= epochs
        np.testing.assert_array_equal(counts[alike, epochs], np.array(short.correct)[alike])
    received = np.array(simulated.evaluate(simulated.start(), personal=True).personal)
    np.testing.assert_array_equal(counts[:, 0], received[jobs.row])


@pytest.mark.thorough
def test_epochs_are_measured_as_the_models_between_rounds_validation_samples_too():
    known = toy.simulation(cohort=5)
    held = known.experiments[0]._replace(federation=hold_out(toy.federation(), 0.3, 0))
    simulated = Simulation(known.program.model, [held], pipeline=toy.PLAIN, cohort=5, rounds=3, tests_epochs=True)
    received = np.array(simulated.evaluate(simulated.start(), personal=True).personal)
    assert received[:, toy.CLASSES :].any()
    _, report = simulated.step(simulated.start(), 0)
    np.testing.assert_array_equal(np.array(report.before)[:, 0], received)


@pytest.mark.thorough
def test_fine_tuning_never_ends_below_the_tuned_model_on_equal_tests():
    simulated = toy.simulation(cohort=5, noise=120)
    state, _ = toy.train(simulated, (0, 1))
    tuner = simulated.tuner(3, tests_epochs=True)
    (pa,), _ = fine_tuned(tuner, tuner.start(state.servers.variables), 3)
    means = {name: np.nanmean(own["pa"]) for name, own in pa.items()}
    assert means["best_epoch"] >= means["best_mean"] >= max(means["last"], means["received"])
    (plain,), _ = fine_tuned(simulated.tuner(3), tuner.start(state.servers.variables), 3)
    assert plain.keys() == {"last", "received"}
    np.testing.assert_array_equal(plain["last"]["pa"], pa["last"]["pa"])


@pytest.mark.thorough
def test_a_client_that_is_absent_keeps_its_chosen_number():
    run = trained(method="fedgela", pa_protocol="best_epoch", **SMALL | {"rounds": 1, "cohort": 1})
    (row,), kept = run.history.rows, run.history.also["pa_best_epoch"]
    received = np.array(run.simulation.evaluate(run.simulation.start(), personal=True).personal).sum(1)
    absent = np.setdiff1d(np.arange(4), run.simulation.clients_of(0)[0])
    np.testing.assert_allclose(np.array(kept)[absent], (received / run.federation.test_sizes)[absent])
    assert row["pa"] == pytest.approx(np.mean(kept))


@pytest.mark.thorough
def test_a_history_goes_through_a_checkpoint_with_all_protocols():
    run = trained(method="fedgela", pa_protocol="best_mean", **SMALL)
    assert History(**json.loads(run.history.to_json())) == run.history


@pytest.mark.thorough
def test_a_resumed_run_has_the_same_numbers():
    options = {"method": "fedgela", "pa_protocol": "best_epoch", **SMALL}
    parts = setup([build(options)])
    first = loop(parts.simulation, parts.simulation.start(), 1, [parts.accuracies(0)])
    since = Progress(1, History(**json.loads(first.history.to_json())), first.best)
    resumed = loop(parts.simulation, first.state, 3, [parts.accuracies(0)], [since])
    names = [f"pa_{name}" for name in NAMES]
    rows, expected = ([[row[n] for n in names] for row in run.history.rows] for run in (resumed, trained(**options)))
    assert rows == expected


@pytest.mark.parametrize(("asked", "own", "expected"), [
    (None, None, "last"), ("best_mean", None, "best_mean"), (None, "received", "received"), ("last", "last", "last"),
])  # fmt: skip
def test_the_protocol_is_the_runs_or_the_methods(asked, own, expected):
    assert protocol_of(asked, Traits(protocol=own)) == expected


def test_two_protocols_at_once_are_refused():
    with pytest.raises(UserError, match="contradict: drop one"):
        trained(method="fedgela", pa_protocol="best_epoch", pa_model="server", **SMALL)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedgela", "apfl", "fedrep"])
@pytest.mark.parametrize("protocol", NAMES)
def test_accuracies_beside_pa_are_those_of_its_models(method, protocol):
    """Of clients with one class, whose mean recall is the share of correct answers."""
    options = SMALL | {"partition": "pcdd", "classes_per_client": 1, "clients": 10, "rounds": 2}
    run = trained(method=method, pa_protocol=protocol, select_by="balanced", **options)
    assert run.history.select_on == "test, balanced accuracy"
    for row in run.history.rows:
        assert row["pa_balanced"] == pytest.approx(row["pa"]) == row[f"pa_{protocol}"]
    received = [row["pa_received"] for row in run.history.rows]
    assert method == "fedrep" or received != [row["pa_last"] for row in run.history.rows]


@pytest.mark.thorough
@pytest.mark.parametrize("protocol", NAMES)
def test_after_fine_tuning_they_are_those_of_the_tuned_models(protocol):
    federation = fp.partition(fp.load_dataset("digits"), "pcdd", clients=10, classes_per_client=1)
    given = {"rounds": 2, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 1, "batch_size": 20, "lr": 0.001}
    history = fp.simulate(federation, "fedavg", pa_protocol=protocol, validation=0.2, **given)
    summary, row = history.summary, history.rows[-1]
    for when in ("best", "last"):  # of clients with one class mean recall is the share of correct answers
        assert summary[f"pa_balanced_{when}"] == pytest.approx(summary[f"pa_{when}"])
    received = protocol == "received"  # which is not tuned
    assert (summary["pa_last"] == row["pa"]) == received == (summary["pa_validation_last"] == row["pa_validation"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("chosen", "by"),
    [({"select_by": "balanced"}, "balanced"), ({"validation": 0.2, "select_on": "validation"}, "validation")],
)
def test_a_round_is_chosen_by_what_the_models_of_the_best_epochs_have(chosen, by):
    run = trained(method="fedgela", pa_protocol="best_epoch", **chosen, **SMALL)
    scores = [row[f"pa_{by}"] for row in run.history.rows]
    assert run.history.best("pa")[1] == 1 + int(np.argmax(scores))
    assert all(row["pa"] == row["pa_best_epoch"] for row in run.history.rows)
    tuned = trained(method="fedavg", pa_protocol="best_epoch", **chosen, **SMALL | {"rounds": 1})
    assert tuned.history.best("pa")[1] == 1


@pytest.mark.thorough
def test_models_between_rounds_have_their_best_epochs_counted_in_every_round():
    with pytest.raises(UserError, match="takes part: use eval_every=1"):
        trained(method="fedrep", pa_protocol="best_mean", eval_every=2, **SMALL)
    once, often = (
        trained(method="fedrep", pa_protocol="best_mean", eval_every=every, **SMALL | {"cohort": 4, "rounds": 2})
        for every in (2, 1)
    )
    assert once.history.rows[-1]["pa"] == often.history.rows[-1]["pa"]


def test_a_task_has_no_protocol_to_choose():
    with pytest.raises(UserError, match="intra-domain accuracy after each round: drop pa_protocol"):
        trained(method="solo", task="digits_domains", pa_protocol="best_epoch", rounds=1, lanes=1)


@pytest.mark.thorough
def test_python_has_all_protocols_under_their_names():
    federation = fp.partition(fp.load_dataset("digits"), clients=4, beta=1.0)
    given = {"rounds": 1, "local_epochs": 2, "lanes": 1, "fine_tune_epochs": 1, "batch_size": 50}
    history = fp.simulate(federation, FedGELA(), pa_protocol="best_epoch", **given)
    assert {f"pa_{name}_best" for name in NAMES} <= history.summary.keys()
    assert history.summary["pa_protocol"] == "during training, best epoch of each client, chosen on its tests"
    tuned = fp.simulate(federation, "fedavg", pa_protocol="best_mean", **given)
    assert tuned.summary["pa_best"] == tuned.summary["pa_best_mean_best"] >= tuned.summary["pa_received_best"]
    assert tuned.summary["pa_protocol"].startswith("global model fine-tuned for 1 epochs, epoch with the best mean")


@pytest.mark.thorough
def test_on_iid_clients_with_equal_tests_tuning_is_never_below_the_tuned_model():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=5)
    assert set(federation.test_sizes) == {71}
    given = {"rounds": 2, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 2, "batch_size": 50, "lr": 0.1}
    summary = fp.simulate(federation, "fedavg", pa_protocol="best_mean", **given).summary
    assert summary["pa_received_best"] == pytest.approx(summary["ga_best"])
    assert summary["pa_best"] == summary["pa_best_mean_best"] >= summary["ga_best"]
    assert summary["pa_best"] >= summary["pa_last_best"]
