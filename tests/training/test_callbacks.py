"""Callbacks: what they see, how they end a run, and that their state is part of a checkpoint."""

import json
import shutil
import warnings
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct

import fedjax_pcdd as fp
from fedjax_pcdd.api import runs
from fedjax_pcdd.engine.program import Report, State
from fedjax_pcdd.engine.schedule import Jobs
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Method as FedAvg
from fedjax_pcdd.methods.method import Server
from fedjax_pcdd.training.accuracies import Accuracies
from fedjax_pcdd.training.callbacks import as_callbacks
from fedjax_pcdd.training.checkpoint import Checkpoints
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.lock import Lock
from fedjax_pcdd.training.loop import Each, Progress, Runs, loop
from fedjax_pcdd.training.metrics import History, new_history
from fedjax_pcdd.training.tasks import setup

SMALL = {"rounds": 4, "local_epochs": 1, "batch_size": 32, "lanes": 1, "fine_tune_epochs": 0}
RUN = SMALL | {"method": "fedavg", "clients": 4, "quiet": True}


@pytest.fixture(scope="module")
def federation():
    return fp.partition(fp.load_dataset("digits"), "dirichlet", clients=4, beta=0.3, seed=3)


class StopAt(fp.Callback):
    """Ends a run after a given round, and remembers which rounds it has seen."""

    def __init__(self, round):
        self.last, self.seen = round, []

    def on_round(self, run, report):
        self.seen.append(run.round)
        return run.round == self.last

    def state(self):
        return self.seen

    def restore(self, state):
        self.seen = state


@pytest.mark.parametrize("true", [True, np.bool_(True), np.array(True), jax.numpy.float32(1) > 0])
def test_whatever_is_true_ends_a_run_and_numbers_do_not(federation, true):
    for value, rounds in ((true, 1), (1, 2), (np.ones(3, bool), 2)):
        ended = fp.simulate(federation, **SMALL | {"rounds": 2}, callbacks=[lambda run, report, value=value: value])
        assert len(ended.rows) == rounds


@pytest.mark.parametrize("number", [np.float32(1.5), jax.numpy.float32(1.5), np.array([1.5, 2])])
def test_numbers_that_a_callback_adds_to_a_row_are_written_in_plain_types(federation, tmp_path, number):
    def add(run, report):
        run.history.rows[-1]["norm"] = number

    fp.simulate(federation, **SMALL | {"rounds": 2}, callbacks=[add], run_dir=tmp_path / "run")
    assert [row["norm"] for row in rows_of(tmp_path / "run")] == [number.tolist()] * 2
    assert fp.load_run(tmp_path / "run").rows[-1]["norm"] == number.tolist()


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_a_callback_ends_a_run(federation):
    history = fp.simulate(federation, callbacks=[StopAt(2)], **SMALL)
    assert len(history) == history.summary["rounds"] == 2


@pytest.mark.thorough
def test_a_callback_that_does_not_end_the_run_changes_no_bit(federation):
    plain, with_callback = (fp.simulate(federation, callbacks=callbacks, **SMALL) for callbacks in ([], [StopAt(9)]))
    np.testing.assert_array_equal(plain.ga, with_callback.ga)


@pytest.mark.thorough
def test_callbacks_are_called_in_order_and_end_in_reverse_order(federation):
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
    seen = {}

    def look(run, report):
        seen.update(clients=report.jobs.row.tolist(), seconds=report.seconds)
        seen["client"] = jax.tree.map(np.array, run.client_variables(1))
        seen["global"] = jax.tree.map(np.array, run.variables)

    history = fp.simulate(federation, callbacks=[look], **SMALL | {"rounds": 1})
    assert seen["clients"] == [0, 1, 2, 3]
    assert seen["seconds"] == history.rows[0]["seconds"]
    jax.tree.map(np.testing.assert_array_equal, seen["global"], history.variables)
    jax.tree.map(np.testing.assert_array_equal, seen["client"], history.client_variables(1))


@pytest.mark.thorough
def test_on_end_sees_the_error_that_ended_the_run(federation):
    errors = []

    class Fail(fp.Callback):
        def on_round(self, run, report):
            raise RuntimeError("mine")

        def on_end(self, run):
            errors.append(str(run.error))

    with pytest.raises(RuntimeError, match="mine"):
        fp.simulate(federation, callbacks=[Fail()], **SMALL)
    assert errors == ["mine"]


@pytest.mark.thorough
def test_early_stopping_waits_for_patience_evaluations(federation):
    history = fp.simulate(federation, callbacks=[fp.EarlyStopping("ga", patience=2, least=1.0)], **SMALL)
    assert len(history) == 3  # the first evaluation counts as a rise
    with pytest.raises(fp.UserError, match="knows no 'gaa'"):
        fp.simulate(federation, callbacks=[fp.EarlyStopping("gaa")], **SMALL)
    with pytest.raises(fp.UserError, match="of which 'ga_per_class' has several"):
        fp.simulate(federation, callbacks=[fp.EarlyStopping("ga_per_class")], **SMALL)


def test_small_rises_that_add_up_count_as_a_rise():
    stopping, run = fp.EarlyStopping("ga", patience=3, least=0.01), SimpleNamespace(history=History())
    for ga in (0.1, 0.104, 0.108, 0.112, 0.116, 0.12):
        run.history.rows.append({"ga": ga})
        assert not stopping.on_round(run, None)  # 0.112 is 0.01 above the first
    assert (stopping.best, stopping.waited) == (0.112, 2)


def test_early_stopping_takes_numbers_of_numpy_and_jax():
    stopping = fp.EarlyStopping("norm", patience=np.int64(1), least=np.float32(0.125))
    run = SimpleNamespace(history=History())
    for norm, ends in ((np.float32(0.5), False), (jnp.float32(0.75), False), (np.array(0.75), True)):
        run.history.rows.append({"ga": 0.1, "norm": norm})
        assert bool(stopping.on_round(run, None)) == ends
    assert json.loads(json.dumps(stopping.state())) == [0.75, 1]


def test_restored_early_stopping_waits_on_and_equal_accuracy_is_no_rise():
    first, restored = (fp.EarlyStopping("ga", patience=2) for _ in range(2))
    run = SimpleNamespace(history=History([{"ga": 0.5}]), round=2)
    assert [first.on_round(run, None) for _ in range(2)] == [False, False]
    restored.restore(json.loads(json.dumps(first.state())))
    restored.on_start(run)
    assert restored.on_round(run, None)


def test_early_stopping_of_another_run_forgets_it_when_a_run_without_it_is_resumed():
    stopping, run = fp.EarlyStopping("ga", patience=2), SimpleNamespace(history=History([{"ga": 0.9}]), round=3)
    stopping.on_round(run, None)
    stopping.on_start(run)  # resumed in round 3, but nothing was restored
    assert (stopping.best, stopping.waited) == (float("-inf"), 0)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"callbacks": [3]}, "callbacks takes fp.Callback objects and functions of a run and a report, not 3"),
        ({"callbacks": [StopAt]}, "callbacks takes"),
        ({"callbacks": StopAt(1)}, "callbacks takes a list"),
        ({"callback": 3}, "callback takes a function of the history, not 3"),
        ({"model": 42}, "model 42 must be a Flax module, or what returns one, not int"),
        ({"pipeline": "grey"}, "pipeline takes an fp.Pipeline, not 'grey'"),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(federation, options, sentence):
    with pytest.raises(fp.UserError) as error:
        fp.simulate(federation, **SMALL | options)
    assert str(error.value).startswith(sentence)


def patient_stoppings():
    return [fp.EarlyStopping(name, patience=9) for name in ("ga", "pa")]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that a callback ended after two of four rounds."""
    folder = tmp_path_factory.mktemp("callbacks") / "run"
    runs.run(*build(RUN | {"run_dir": folder}), callbacks=[StopAt(2), *patient_stoppings()])
    return folder


@pytest.mark.thorough
def test_the_state_of_callbacks_is_restored(stopped):
    stop, stoppings = StopAt(9), patient_stoppings()
    history = fp.resume(stopped, callbacks=[stop, *stoppings])
    assert stop.seen == [1, 2]
    assert [stopping.best for stopping in stoppings] == [np.max(history.ga), np.max(history.pa)]


@pytest.mark.thorough
def test_a_run_that_a_callback_ended_stays_ended_on_resume(stopped):
    rows_before = rows_of(stopped)
    history = fp.resume(stopped)
    assert rows_of(stopped) == rows_before
    assert (len(history), history.summary["rounds"]) == (2, 2)


@pytest.mark.thorough
def test_options_say_how_often_checkpoints_and_their_clients_are_written(tmp_path):
    options = {"rounds": 5, "checkpoint_every": 2, "checkpoint_clients_every": 2, "keep": 9}
    runs.run(*build(RUN | options | {"method": "solo", "run_dir": tmp_path / "run"}))
    has_clients = {path.name: (path / "clients").is_dir() for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert has_clients == {"2": False, "4": True, "5": True}  # the last round in any case


@pytest.mark.thorough
def test_load_run_returns_what_simulate_would_have_returned(tmp_path):
    runs.run(*build(RUN | {"run_dir": tmp_path / "run", "beta": 0.3, "seed": 3}))
    federation = fp.partition(fp.load_dataset("digits"), "dirichlet", clients=4, beta=0.3, seed=3)
    expected, loaded = fp.simulate(federation, seed=3, **SMALL), fp.load_run(tmp_path / "run")
    for name in ("ga", "pa", "loss", "ga_per_class", "pa_per_client"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(expected, name))
    images = federation.dataset.x_test
    np.testing.assert_array_equal(loaded.outputs(images).logits, expected.outputs(images).logits)
    assert loaded.summary["ga_best"] == expected.summary["ga_best"]


@pytest.mark.thorough
def test_early_stopping_starts_afresh_with_every_run():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    stopping = fp.EarlyStopping(patience=1)
    options = {"local_epochs": 1, "lanes": 1, "fine_tune_epochs": 0, "callbacks": [stopping]}
    assert len(fp.simulate(federation, fp.FedAvg(), rounds=2, lr=0.05, **options).rows) == 2
    assert len(fp.simulate(federation, fp.FedAvg(), rounds=2, lr=0.001, **options).rows) == 2


@pytest.mark.thorough
def test_early_stopping_waits_for_evaluated_rounds():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    options = {"local_epochs": 1, "lanes": 1, "fine_tune_epochs": 0, "eval_every": 2}
    stopping = fp.EarlyStopping("ga_balanced", patience=1)
    assert len(fp.simulate(federation, fp.FedAvg(), rounds=4, callbacks=[stopping], **options).rows) == 4


@pytest.mark.thorough
def test_outputs_accepts_images_of_other_integer_types_and_scaled_ones():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    history = fp.simulate(federation, fp.FedAvg(), rounds=1, local_epochs=1, lanes=1, fine_tune_epochs=0)
    images = federation.dataset.x_test[:5]
    for converted in (images.astype(np.int64), images / np.float32(255)):
        np.testing.assert_allclose(
            history.outputs(converted).logits, history.outputs(images).logits, rtol=1e-5, atol=1e-5
        )
    with pytest.raises(fp.UserError, match="integers from 0 to 255"):
        history.outputs(images.astype(int) + 300)


def test_a_given_model_refuses_the_option_neck():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    model = fp.build_model("mlp", federation.dataset)
    with pytest.raises(fp.UserError, match="drop neck"):
        fp.simulate(federation, fp.FedAvg(), model=model, neck=2, rounds=1)


@pytest.mark.thorough
def test_heads_are_tuned_after_training_to_the_same_pa_with_clients_on_disk():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=3)
    options = {"rounds": 1, "local_epochs": 2, "lanes": 1, "fine_tune_epochs": 1}
    accuracies = [
        fp.simulate(federation, fp.FedRep(fine_tune_heads=True), client_state=state, **options).summary["pa_tuned"]
        for state in ("device", "disk")
    ]
    assert accuracies[0] == pytest.approx(accuracies[1], abs=1e-6)


@pytest.mark.thorough
def test_loading_a_folder_without_run_or_checkpoints_is_a_user_error(stopped, tmp_path):
    with pytest.raises(fp.UserError, match="there is no folder"):
        fp.load_run(tmp_path / "nothing")
    (tmp_path / "config.yaml").write_text((stopped / "config.yaml").read_text())
    with pytest.raises(fp.UserError, match="has no checkpoint left, or none yet: resume it"):
        fp.load_run(tmp_path)
    (tmp_path / "summary.json").write_text((stopped / "summary.json").read_text())
    with pytest.raises(
        fp.UserError, match="is finished, and its checkpoints are gone: for its models, run it in a new"
    ):
        fp.load_run(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("going_on", [True, False])
def test_a_run_is_loaded_although_it_removes_the_checkpoint_that_is_being_read(stopped, monkeypatch, going_on):
    restore, tries = Checkpoints.restore, []

    def restore_too_late(self, *templates):
        tries.append(templates)
        return restore(self, *templates) if len(tries) > 1 else None

    monkeypatch.setattr(Checkpoints, "restore", restore_too_late)
    with Lock.take(stopped / "lock") if going_on else pytest.raises(fp.UserError, match="checkpoints are gone"):
        assert len(fp.load_run(stopped).rows) > 0
    assert len(tries) == 1 + going_on


@pytest.mark.thorough
def test_one_run_of_a_sweep_may_stop_while_the_others_go_on(tmp_path):
    pairs = [build(RUN | {"run_dir": tmp_path / str(seed), "seed": seed}) for seed in (0, 1)]
    results = runs.run_together([runs.Asked(*pairs[0], callbacks=[StopAt(2)]), runs.Asked(*pairs[1])])
    assert [result["rounds"] for result in results] == [2, 4]
    assert [len(rows_of(tmp_path / name)) for name in "01"] == [2, 4]
    ended = fp.load_run(tmp_path / "0")
    assert ended.ga[-1] == pytest.approx(
        np.mean(np.argmax(ended.outputs(ended.federation.dataset.x_test).logits, 1) == ended.federation.dataset.y_test)
    )


@pytest.mark.thorough
def test_a_failed_run_of_a_sweep_is_neither_trained_nor_written_any_further(tmp_path):
    def fail(run, report):
        if run.round == 2:
            raise fp.UserError("mine")

    pairs = [build(RUN | {"run_dir": tmp_path / str(seed), "seed": seed}) for seed in (0, 1)]
    error, _ = runs.run_together([runs.Asked(*pairs[0], callbacks=as_callbacks([fail])), runs.Asked(*pairs[1])])
    assert str(error) == "mine"
    assert [len(rows_of(tmp_path / name)) for name in "01"] == [1, 4]


@pytest.mark.thorough
def test_a_stopped_experiment_does_not_keep_the_others_from_going_on():
    prepared = setup([build(RUN | {"seed": seed}) for seed in (0, 1)])
    progress = [Progress(3, new_history(4), stopped=stopped) for stopped in (True, False)]
    _, other = loop(prepared.simulation, prepared.simulation.start(), 4, [], progress)
    assert other.round == 4


@pytest.mark.thorough
def test_an_experiment_that_a_callback_ended_is_fine_tuned_as_if_it_were_alone_also_after_a_kill(tmp_path):
    def fail(run, report):
        if run.round == 3:
            raise fp.UserError("killed")

    def asked(name, last_callbacks=(), **more):
        options = RUN | {"fine_tune_epochs": 1, "lr": 0.05} | more
        pairs = [build(options | {"seed": seed, "run_dir": tmp_path / name / str(seed)}) for seed in (0, 1)]
        return [
            runs.Asked(*pair, callbacks=[*as_callbacks(callbacks)])
            for pair, callbacks in zip(pairs, ([StopAt(2)], last_callbacks), strict=True)
        ]

    names = ("ga_last", "pa_last", "pa_best", "rounds")
    alone = [runs.run_together([request])[0] for request in asked("alone")]
    assert [summary["rounds"] for summary in alone] == [2, 4]
    runs.run_together(asked("killed", [fail]))
    (tmp_path / "killed" / "0" / "summary.json").unlink()
    resumed = [
        request._replace(config=replace(request.config, resume=request.config.run_dir)) for request in asked("killed")
    ]
    for requests in (asked("together"), resumed):
        for summary, expected in zip(runs.run_together(requests), alone, strict=True):
            assert {name: summary[name] for name in names} == pytest.approx({name: expected[name] for name in names})


@pytest.mark.thorough
def test_only_a_boolean_returned_by_a_callback_ends_a_run(federation):
    callbacks = [lambda run, report: 1, lambda run, report: report.loss, lambda run, report: "yes"]
    assert len(fp.simulate(federation, callbacks=callbacks, **SMALL | {"rounds": 2})) == 2


@pytest.mark.thorough
def test_what_a_callback_records_must_be_writable(federation, tmp_path):
    def record(run, report):
        run.history.rows[-1]["model"] = object()

    with pytest.raises(fp.UserError, match="a callback keeps or records what cannot be written"):
        fp.simulate(federation, "fedavg", callbacks=[record], run_dir=tmp_path / "run", **SMALL)


def test_the_last_round_of_a_run_that_a_callback_ended_is_evaluated(federation):
    history = fp.simulate(federation, callbacks=[StopAt(3)], eval_every=2, **SMALL)
    expected = fp.simulate(federation, **SMALL | {"rounds": 3})
    assert np.isnan(history.ga[0])
    assert history.ga[1:].tolist() == expected.ga[1:].tolist()
    assert (history.summary["ga_last"], history.summary["pa_last"]) == (expected.ga[2], expected.pa[2])


@pytest.mark.thorough
def test_metrics_of_the_last_round_of_such_a_run_are_measured_too(federation, tmp_path):
    options = SMALL | {"callbacks": [StopAt(3)], "eval_every": 2, "metrics": {"seen": lambda run: run.round}}
    for run_dir in (None, tmp_path / "run"):
        history = fp.simulate(federation, run_dir=run_dir, **options)
        assert [row["seen"] for row in history.rows] == [None, 2.0, 3.0]


@pytest.mark.thorough
def test_a_callback_gets_the_same_history_with_and_without_a_run_folder(federation, tmp_path):
    seen = {}

    def note(name):
        return lambda history: seen.setdefault(name, []).append((history.label, history.pa_per_client.tolist()))

    folder = tmp_path / "run"
    fp.simulate(federation, callback=note("memory"), **SMALL)
    fp.simulate(federation, callback=note("folder"), run_dir=folder, **SMALL)
    assert seen["memory"] == seen["folder"]
    assert np.isfinite(seen["folder"][-1][1]).all()


@pytest.mark.thorough
def test_a_round_in_which_no_client_trains_has_no_loss(tmp_path):
    options = RUN | {"clients": 6, "cohort": 1, "lost_share": 0.7, "rounds": 4, "run_dir": str(tmp_path / "run")}
    runs.run(*build(options))
    losses = [row["loss"] for row in rows_of(tmp_path / "run")]
    assert None in losses
    assert all(loss is None or loss > 0 for loss in losses)


@pytest.mark.thorough
def test_a_callback_that_a_resumed_run_lacks_is_named_and_metrics_go_on(federation, tmp_path):
    def interrupt(run, report):
        if run.round == 2:
            raise KeyboardInterrupt

    folder, metrics = tmp_path / "run", {"seen": lambda run: run.round}
    with pytest.raises(KeyboardInterrupt):
        fp.simulate(federation, run_dir=folder, callbacks=[fp.EarlyStopping(), interrupt], metrics=metrics, **SMALL)
    with pytest.warns(UserWarning, match="was trained with EarlyStopping"):
        resumed = fp.resume(folder, metrics=metrics, federation=federation)
    assert [row["seen"] for row in resumed.rows] == [1, 2, 3, 4]


@pytest.mark.thorough
def test_a_run_that_goes_on_without_its_metrics_is_told(federation, tmp_path):
    def interrupt(run, report):
        if run.round == 2:
            raise KeyboardInterrupt

    folder, metrics = tmp_path / "run", {"seen": lambda run: run.round}
    with pytest.raises(KeyboardInterrupt):
        fp.simulate(federation, run_dir=folder, callbacks=[interrupt], metrics=metrics, **SMALL)
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.warns(UserWarning, match="was trained with the metric 'seen': to go on with it, resume in Python with"):
        fp.resume(tmp_path / "copy", federation=federation, metrics={"other": lambda run: run.round})
    with pytest.warns(UserWarning, match="was trained with Metrics: to go on with it, resume in Python with the metr"):
        resumed = fp.resume(folder, federation=federation)
    assert "seen" not in resumed.rows[-1]
    more = {"seen": lambda run: run.round, "other": lambda run: run.round}
    with pytest.warns(UserWarning, match="the run is finished without 'other': metrics are measured as it is trained"):
        fp.simulate(federation, run_dir=folder, resume=True, metrics=more, **SMALL)
    with pytest.warns(UserWarning, match="the run is finished without 'other'"):
        fp.resume(folder, federation=federation, metrics=more)


def test_a_function_named_almost_like_one_that_the_loop_calls_is_warned_of():
    class Misspelt(fp.Callback):
        def on_rounds(self, run, report):
            return True

    with pytest.warns(UserWarning, match=r"Misspelt\.on_rounds is not a hook: did you mean on_round\?"):
        as_callbacks([Misspelt()])


def test_a_callback_whose_functions_are_none_or_take_something_else_is_refused():
    class Field(fp.Callback):
        state = 0

    class Curious(fp.Callback):
        def restore(self):
            """Takes no state."""

    with pytest.raises(UserError, match=r"Field\.state must be callable as def state\(self\): define it so"):
        as_callbacks([Field()])
    instance = fp.Callback()
    instance.state = {}
    with pytest.raises(UserError, match=r"Callback\.state must be callable as def state\(self\): define"):
        as_callbacks([instance])
    with pytest.raises(UserError, match=r"Curious\.restore must be callable as def restore\(self, state\): define"):
        as_callbacks([Curious()])


@pytest.mark.parametrize("takes_back", [True, False])
def test_a_state_that_no_resumed_run_gets_back_is_warned_of(takes_back):
    class Counter(fp.Callback):
        def state(self):
            return 1

    class Complete(Counter):
        def restore(self, state):
            """Nothing is left to do."""

    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        as_callbacks([Complete() if takes_back else Counter()])
    sentences = (
        [] if takes_back else ["Counter has a state, but no restore(state) that takes it back when a run is resumed"]
    )
    assert [str(warning.message).split(":")[0] for warning in given] == sentences


def test_what_a_round_reports_is_copied_to_the_host_at_once_where_jobs_without_steps_have_no_loss():
    events = []

    class OnDevice:
        def copy_to_host_async(self):
            events.append("begin")

        def __array__(self, dtype=None, copy=None):
            events.append("end")
            return np.zeros((1, 2, 3))

    jobs = Jobs(*np.zeros((7, 1), int))
    simulation = SimpleNamespace(
        methods=FedAvg(), federations=[toy.federation()], plan=lambda _: (None, jobs),
        step=lambda state, *_: (state, Report(OnDevice(), OnDevice(), OnDevice())),
        evaluate=lambda state, personal: (OnDevice(), OnDevice()),
    )  # fmt: skip
    runs = Runs(simulation, State((), (), ()), 1)
    (report,) = runs.train()
    assert np.isnan(report.loss).all()
    np.testing.assert_array_equal(report.correct, np.zeros((1, 2, 3)))
    assert events == ["begin"] * 3 + ["end"] * 3
    runs.evaluate(personal=False)
    assert events[6:] == ["begin"] * 2 + ["end"] * 2


@struct.dataclass
class Recording(FedAvg):
    def traits(self):
        return super().traits()._replace(recorded=("variables",))


def test_models_of_several_experiments_are_read_without_copies_of_clients_and_such_copies_end_with_the_round():
    federation, jobs, copies = toy.federation(), Jobs(*np.zeros((7, 2), int)), []

    def count_copies():
        copies.append(sum(array.shape == (federation.num_clients, 11) for array in jax.live_arrays()))

    def step(state, *_):
        count_copies()
        return state, Report(np.zeros(2), np.zeros((2, toy.CLASSES)), np.zeros((2, 0, toy.CLASSES)))

    class Look(fp.Callback):
        def on_round(self, run, report):
            Accuracies("recording", every=9).on_round(run, report)
            assert run.history.rows[-1]["variables"] == run.generic == run.index
            count_copies()
            _ = run.index == 1 and run.state
            return run.round == 3 - run.index

    simulation = SimpleNamespace(
        methods=Recording(), federations=[federation] * 2, cohort_size=1, step=step, plan=lambda _: (None, jobs)
    )
    state = State(Server(jax.numpy.arange(2.0)), jax.numpy.zeros((2 * federation.num_clients, 11)), ())
    loop(simulation, state, 4, [Each([[Look()], [Look()]])])
    assert copies == [0, 0, 0, 0, 0, 0, 1, 1]  # of the second, which has ended, only in the last round
