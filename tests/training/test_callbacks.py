"""Callbacks: what they see, how they end a run, and that what they keep is part of a checkpoint."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import fedjax_pcdd as fp
from fedjax_pcdd.api import runs
from fedjax_pcdd.training.callbacks import as_callbacks
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.loop import Progress, loop
from fedjax_pcdd.training.metrics import History, new_history
from fedjax_pcdd.training.tasks import setup

SMALL = {"rounds": 4, "local_epochs": 1, "batch_size": 32, "lanes": 1, "fine_tune_epochs": 0}
RUN = SMALL | {"method": "fedavg", "clients": 4, "quiet": True}


@pytest.fixture(scope="module")
def federation():
    return fp.partition(fp.load_dataset("digits"), "dirichlet", clients=4, beta=0.3, seed=3)


class StopAt(fp.Callback):
    """Ends a run after a round, and remembers which it has seen."""

    def __init__(self, round):
        self.last, self.seen = round, []

    def on_round(self, run, report):
        self.seen.append(run.round)
        return run.round == self.last

    def state(self):
        return self.seen

    def restore(self, state):
        self.seen = state


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_a_callback_ends_a_run(federation):
    history = fp.simulate(federation, callbacks=[StopAt(2)], **SMALL)
    assert len(history) == history.summary["rounds"] == 2


@pytest.mark.thorough
def test_a_run_without_a_stop_has_the_same_bits(federation):
    plain, told = (fp.simulate(federation, callbacks=own, **SMALL) for own in ([], [StopAt(9)]))
    np.testing.assert_array_equal(plain.ga, told.ga)


@pytest.mark.thorough
def test_callbacks_are_called_in_order_and_end_in_the_opposite_one(federation):
    calls = []

    class Note(fp.Callback):
        def __init__(self, name):
            self.name = name

        def on_start(self, run):
            calls.append((self.name, "start", run.round))

        def on_round(self, run, report):
            calls.append((self.name, run.round, len(run.history.rows)))

        def on_end(self, run):
            calls.append((self.name, "end", run.error))

    fp.simulate(federation, callbacks=[Note("a"), Note("b")], **SMALL | {"rounds": 1})
    assert calls == [
        ("a", "start", 0), ("b", "start", 0), ("a", 1, 1), ("b", 1, 1), ("b", "end", None), ("a", "end", None),
    ]  # fmt: skip


@pytest.mark.thorough
def test_a_callback_sees_models_and_reports(federation):
    found = {}

    def look(run, report):
        found.update(clients=report.jobs.row.tolist(), seconds=report.seconds, own=run.client_variables(1))
        found["global"] = jax.tree.map(np.array, run.variables)

    history = fp.simulate(federation, callbacks=[look], **SMALL | {"rounds": 1})
    assert found["clients"] == [0, 1, 2, 3]
    assert found["seconds"] == history.rows[0]["seconds"]
    jax.tree.map(np.testing.assert_array_equal, found["global"], history.variables)


@pytest.mark.thorough
def test_an_error_is_told_at_the_end(federation):
    ended = []

    class Fail(fp.Callback):
        def on_round(self, run, report):
            raise RuntimeError("mine")

        def on_end(self, run):
            ended.append(str(run.error))

    with pytest.raises(RuntimeError, match="mine"):
        fp.simulate(federation, callbacks=[Fail()], **SMALL)
    assert ended == ["mine"]


@pytest.mark.thorough
def test_early_stopping_waits_for_as_many_evaluations_as_it_is_told(federation):
    history = fp.simulate(federation, callbacks=[fp.EarlyStopping("ga", patience=2, least=1.0)], **SMALL)
    assert len(history) == 3  # the first is a rise from nothing
    with pytest.raises(fp.UserError, match="knows no 'gaa'"):
        fp.simulate(federation, callbacks=[fp.EarlyStopping("gaa")], **SMALL)
    with pytest.raises(fp.UserError, match="of which 'ga_per_class' has several"):
        fp.simulate(federation, callbacks=[fp.EarlyStopping("ga_per_class")], **SMALL)


def test_small_rises_that_add_up_are_one():
    stopping, run = fp.EarlyStopping("ga", patience=3, least=0.01), SimpleNamespace(history=History())
    for ga in (0.1, 0.104, 0.108, 0.112, 0.116, 0.12):
        run.history.rows.append({"ga": ga})
        assert not stopping.on_round(run, None)  # 0.112 is 0.01 above the first
    assert (stopping.best, stopping.waited) == (0.112, 2)


def test_early_stopping_waits_on_where_a_run_was_interrupted_and_takes_no_equal_accuracy_for_a_rise():
    first, again = (fp.EarlyStopping("ga", patience=2) for _ in range(2))
    run = SimpleNamespace(history=History([{"ga": 0.5}]))
    assert [first.on_round(run, None) for _ in range(2)] == [False, False]
    again.restore(json.loads(json.dumps(first.state())))
    assert again.on_round(run, None)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"callbacks": [3]}, "callbacks takes fp.Callback objects and functions of a run and a report, not 3"),
        ({"callbacks": [StopAt]}, "callbacks takes"),
        ({"callbacks": StopAt(1)}, "callbacks takes a list"),
        ({"callback": 3}, "callback takes a function of the history, not 3"),
        ({"model": 42}, "model 42 must be a Flax module, or what returns one, not int"),
        ({"pipeline": "grey"}, "pipeline takes an fp.Pipeline, not 'grey'"),
    ],
)
def test_objects_that_are_not_understood_are_refused(federation, given, sentence):
    with pytest.raises(fp.UserError) as caught:
        fp.simulate(federation, **SMALL | given)
    assert str(caught.value).startswith(sentence)


def patient():
    return [fp.EarlyStopping(name, patience=9) for name in ("ga", "pa")]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that a callback ended after two of four rounds."""
    folder = tmp_path_factory.mktemp("callbacks") / "run"
    runs.run(*build(RUN | {"run_dir": folder}), callbacks=[StopAt(2), *patient()])
    return folder


@pytest.mark.thorough
def test_what_callbacks_keep_is_restored(stopped):
    again, both = StopAt(9), patient()
    history = fp.resume(stopped, callbacks=[again, *both])
    assert again.seen == [1, 2]
    assert [one.best for one in both] == [np.max(history.ga), np.max(history.pa)]


@pytest.mark.thorough
def test_a_run_that_was_ended_stays_ended(stopped):
    before = rows_of(stopped)
    history = fp.resume(stopped)
    assert rows_of(stopped) == before
    assert (len(history), history.summary["rounds"]) == (2, 2)


@pytest.mark.thorough
def test_checkpoints_are_of_the_rounds_and_have_the_clients_that_the_options_say(tmp_path):
    often = {"rounds": 5, "checkpoint_every": 2, "checkpoint_clients_every": 2, "keep": 9}
    runs.run(*build(RUN | often | {"method": "solo", "run_dir": tmp_path / "run"}))
    found = {path.name: (path / "clients").is_dir() for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert found == {"2": False, "4": True, "5": True}  # the last one in any case


@pytest.mark.thorough
def test_a_run_in_a_folder_is_loaded_as_simulate_would_return_it(tmp_path):
    runs.run(*build(RUN | {"run_dir": tmp_path / "run", "beta": 0.3, "seed": 3}))
    federation = fp.partition(fp.load_dataset("digits"), "dirichlet", clients=4, beta=0.3, seed=3)
    expected, loaded = fp.simulate(federation, seed=3, **SMALL), fp.load_run(tmp_path / "run")
    for name in ("ga", "pa", "loss", "ga_per_class", "pa_per_client"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(expected, name))
    images = federation.dataset.x_test
    np.testing.assert_array_equal(loaded.outputs(images).logits, expected.outputs(images).logits)
    assert loaded.summary["ga_best"] == expected.summary["ga_best"]


@pytest.mark.thorough
def test_early_stopping_begins_anew_with_every_run():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    stopping = fp.EarlyStopping(patience=1)
    small = {"local_epochs": 1, "lanes": 1, "fine_tune_epochs": 0, "callbacks": [stopping]}
    assert len(fp.simulate(federation, fp.FedAvg(), rounds=2, lr=0.05, **small).rows) == 2
    assert len(fp.simulate(federation, fp.FedAvg(), rounds=2, lr=0.001, **small).rows) == 2


@pytest.mark.thorough
def test_early_stopping_waits_for_evaluated_rounds():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    small = {"local_epochs": 1, "lanes": 1, "fine_tune_epochs": 0, "eval_every": 2}
    stopping = fp.EarlyStopping("ga_balanced", patience=5)
    assert len(fp.simulate(federation, fp.FedAvg(), rounds=4, callbacks=[stopping], **small).rows) == 4


@pytest.mark.thorough
def test_whole_numbers_of_another_type_are_images_too():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    history = fp.simulate(federation, fp.FedAvg(), rounds=1, local_epochs=1, lanes=1, fine_tune_epochs=0)
    images = federation.dataset.x_test[:5]
    for given in (images.astype(np.int64), images / np.float32(255)):
        np.testing.assert_allclose(history.outputs(given).logits, history.outputs(images).logits, rtol=1e-5, atol=1e-5)
    with pytest.raises(fp.UserError, match="integers from 0 to 255"):
        history.outputs(images.astype(int) + 300)


def test_a_given_model_has_its_own_neck():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    model = fp.build_model("mlp", federation.dataset)
    with pytest.raises(fp.UserError, match="drop neck"):
        fp.simulate(federation, fp.FedAvg(), model=model, neck=2, rounds=1)


@pytest.mark.thorough
def test_heads_are_tuned_after_training_with_clients_on_disk():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=3)
    small = {"rounds": 1, "local_epochs": 2, "lanes": 1, "fine_tune_epochs": 1}
    tuned = [
        fp.simulate(federation, fp.FedRep(fine_tune_heads=True), client_state=where, **small).summary["pa_tuned"]
        for where in ("device", "disk")
    ]
    assert tuned[0] == pytest.approx(tuned[1], abs=1e-6)


@pytest.mark.thorough
def test_a_folder_without_a_run_or_without_checkpoints_is_a_sentence(stopped, tmp_path):
    with pytest.raises(fp.UserError, match="there is no folder"):
        fp.load_run(tmp_path / "nothing")
    (tmp_path / "config.yaml").write_text((stopped / "config.yaml").read_text())
    with pytest.raises(fp.UserError, match="has no checkpoint left"):
        fp.load_run(tmp_path)


@pytest.mark.thorough
def test_one_of_a_sweep_may_stop_and_the_others_go_on(tmp_path):
    pairs = [build(RUN | {"run_dir": tmp_path / str(seed), "seed": seed}) for seed in (0, 1)]
    told = runs.run_together([runs.Asked(*pairs[0], callbacks=[StopAt(2)]), runs.Asked(*pairs[1])])
    assert [one["rounds"] for one in told] == [2, 4]
    assert [len(rows_of(tmp_path / name)) for name in "01"] == [2, 4]
    early = fp.load_run(tmp_path / "0")
    assert early.ga[-1] == pytest.approx(
        np.mean(np.argmax(early.outputs(early.federation.dataset.x_test).logits, 1) == early.federation.dataset.y_test)
    )


@pytest.mark.thorough
def test_one_of_a_sweep_that_has_failed_is_trained_and_written_no_further(tmp_path):
    def fail(run, report):
        if run.round == 2:
            raise fp.UserError("mine")

    pairs = [build(RUN | {"run_dir": tmp_path / str(seed), "seed": seed}) for seed in (0, 1)]
    error, _ = runs.run_together([runs.Asked(*pairs[0], callbacks=as_callbacks([fail])), runs.Asked(*pairs[1])])
    assert str(error) == "mine"
    assert [len(rows_of(tmp_path / name)) for name in "01"] == [1, 4]


@pytest.mark.thorough
def test_one_that_was_ended_keeps_none_of_the_others_from_going_on():
    parts = setup([build(RUN | {"seed": seed}) for seed in (0, 1)])
    since = [Progress(3, new_history(4), stopped=stopped) for stopped in (True, False)]
    assert loop(parts.simulation, parts.simulation.start(), 4, [], since).round == 4


@pytest.mark.thorough
def test_only_a_truth_value_ends_a_run(federation):
    several = [lambda run, report: 1, lambda run, report: report.loss, lambda run, report: "yes"]
    assert len(fp.simulate(federation, callbacks=several, **SMALL | {"rounds": 2})) == 2


@pytest.mark.thorough
def test_the_model_of_a_run_that_was_ended_is_measured(federation):
    history = fp.simulate(federation, callbacks=[StopAt(3)], eval_every=2, **SMALL)
    whole = fp.simulate(federation, **SMALL | {"rounds": 3})
    assert np.isnan(history.ga[0])
    assert history.ga[1:].tolist() == whole.ga[1:].tolist()
    assert (history.summary["ga_last"], history.summary["pa_last"]) == (whole.ga[2], whole.pa[2])


@pytest.mark.thorough
def test_the_history_that_a_callback_gets_is_the_same_with_and_without_a_folder(federation, tmp_path):
    seen = {}

    def note(name):
        return lambda history: seen.setdefault(name, []).append((history.label, history.pa_per_client.tolist()))

    folder = tmp_path / "run"
    fp.simulate(federation, callback=note("memory"), **SMALL)
    fp.simulate(federation, callback=note("folder"), run_dir=folder, **SMALL)
    assert seen["memory"] == seen["folder"]
    assert np.isfinite(seen["folder"][-1][1]).all()


@pytest.mark.thorough
def test_a_round_in_which_nobody_trains_has_no_loss(tmp_path):
    options = RUN | {"clients": 6, "cohort": 1, "lost_share": 0.7, "rounds": 4, "run_dir": str(tmp_path / "run")}
    runs.run(*build(options))
    losses = [row["loss"] for row in rows_of(tmp_path / "run")]
    assert None in losses
    assert all(loss is None or loss > 0 for loss in losses)


@pytest.mark.thorough
def test_a_callback_that_a_continued_run_lacks_is_named_and_metrics_go_on(federation, tmp_path):
    def interrupt(run, report):
        if run.round == 2:
            raise KeyboardInterrupt

    folder, metrics = tmp_path / "run", {"seen": lambda run: run.round}
    with pytest.raises(KeyboardInterrupt):
        fp.simulate(federation, run_dir=folder, callbacks=[fp.EarlyStopping(), interrupt], metrics=metrics, **SMALL)
    with pytest.warns(UserWarning, match="was trained with EarlyStopping"):
        again = fp.resume(folder, metrics=metrics, federation=federation)
    assert [row["seen"] for row in again.rows] == [1, 2, 3, 4]
