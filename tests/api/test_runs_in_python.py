"""Runs of the Python interface in folders that the command line shares; users' metrics; what is saved of a history."""

import gc
import itertools
import json
import pickle
import shutil
import subprocess
import sys
import types
from contextlib import contextmanager, nullcontext
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import struct
from flax.traverse_util import flatten_dict

import fedjax_pcdd as fp
from fedjax_pcdd.api.runs import run
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.data.lists import load_partition
from fedjax_pcdd.training import loggers, loop
from fedjax_pcdd.training.config import build

SMALL = {"local_epochs": 1, "batch_size": 32, "lanes": 1, "fine_tune_epochs": 0}


class Normalised(nn.Module):
    """A backbone with batch norm."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x.reshape(len(x), -1))))


@pytest.fixture(scope="module")
def federation():
    return fp.partition(fp.load_dataset("digits"), "dirichlet", clients=4, beta=0.3, seed=3)


@pytest.fixture(scope="module")
def uninterrupted(federation):
    return fp.simulate(federation, fp.FedProx(mu=0.1), rounds=3, **SMALL)


def assert_same(history, expected):
    assert history.ga.tolist() == expected.ga.tolist()
    assert history.pa_per_client.tolist() == expected.pa_per_client.tolist()
    for a, b in zip(jax.tree.leaves(history.variables), jax.tree.leaves(expected.variables), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
def test_a_stopped_run_is_continued_and_loaded_to_the_same_bits(federation, uninterrupted, tmp_path):
    def stop(run, report):
        if run.round == 2:
            raise KeyboardInterrupt

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fp.simulate(federation, fp.FedProx(mu=0.1), rounds=3, run_dir=folder, callbacks=[stop], **SMALL)
    with pytest.raises(fp.UserError, match="already holds a run: continue it with resume=True, or choose another"):
        fp.simulate(federation, fp.FedProx(mu=0.1), rounds=3, run_dir=folder, **SMALL)
    continued = fp.simulate(federation, fp.FedProx(mu=0.1), rounds=3, run_dir=folder, resume=True, **SMALL)
    assert_same(continued, uninterrupted)
    assert_same(
        fp.simulate(federation, fp.FedProx(mu=0.1), rounds=3, run_dir=folder, resume=True, **SMALL), uninterrupted
    )
    assert_same(fp.load_run(folder), uninterrupted)
    with pytest.raises(fp.UserError, match=r"holds another run: `?mu`? was 0.1, not 0.2"):
        fp.simulate(federation, fp.FedProx(mu=0.2), rounds=3, run_dir=folder, resume=True, **SMALL)


@pytest.mark.thorough
@pytest.mark.parametrize("damaged", [True, False])
def test_a_finished_run_whose_last_checkpoint_is_lost_is_not_mixed_with_an_older_round(
    federation, uninterrupted, tmp_path, capsys, damaged
):
    settings = {"rounds": 3, "run_dir": tmp_path / "run", **SMALL}
    fp.simulate(federation, fp.FedProx(mu=0.1), **settings)
    last = tmp_path / "run" / "checkpoints" / "3"
    if damaged:
        largest = max((path for path in last.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-5])
    else:
        shutil.rmtree(last)
    with pytest.raises(fp.UserError, match="is finished, and the checkpoint of its last round is damaged or gone"):
        fp.load_run(tmp_path / "run")
    assert ("checkpoint of round 3 is damaged" in capsys.readouterr().err) == damaged
    with pytest.warns(match="continuing from round 1") if damaged else nullcontext():
        again = fp.simulate(federation, fp.FedProx(mu=0.1), resume=True, **settings)
    assert_same(again, uninterrupted)
    assert_same(fp.load_run(tmp_path / "run"), uninterrupted)


@pytest.mark.thorough
def test_a_callback_cannot_resume_the_run_that_calls_it(federation, uninterrupted, tmp_path):
    """Nor could a thread: both would write the same lines."""
    messages = []

    def resume(run, report):
        with pytest.raises(fp.UserError) as caught:
            fp.resume(tmp_path / "run", federation=federation)
        messages.append(str(caught.value))

    assert_same(
        fp.simulate(federation, fp.FedProx(mu=0.1), rounds=3, run_dir=tmp_path / "run", callbacks=[resume], **SMALL),
        uninterrupted,
    )
    assert len(messages) == 3
    assert "run is in use by another run of this process" in messages[0]


@pytest.mark.thorough
def test_a_callback_whose_state_is_not_json_is_named_in_the_error(federation, tmp_path):
    class Counter(fp.Callback):
        def state(self):
            return np.zeros(2)

        def restore(self, state):
            """Nothing is restored here."""

    with pytest.raises(fp.UserError, match=r"the state of .*Counter.* is not JSON"):
        fp.simulate(federation, fp.FedAvg(), rounds=1, run_dir=tmp_path / "run", callbacks=[Counter()], **SMALL)


@pytest.mark.thorough
def test_the_command_line_continues_a_run_that_python_began(federation, uninterrupted, tmp_path):
    def stop(run, report):
        raise KeyboardInterrupt

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        fp.simulate(federation, fp.FedProx(mu=0.1), rounds=3, run_dir=folder, callbacks=[stop], **SMALL)
    assert main([f"--resume={folder}", "--quiet"]) == 0
    assert_same(fp.load_run(folder), uninterrupted)


@pytest.mark.thorough
def test_load_run_asks_for_objects_that_no_option_describes(tmp_path):
    digits = fp.load_dataset("digits")
    dataset = fp.from_arrays(digits.x_train[:200], digits.y_train[:200], digits.x_test, digits.y_test)
    federation = fp.partition(dataset, "iid", clients=2)
    history = fp.simulate(federation, model="mlp", rounds=1, run_dir=tmp_path / "run", **SMALL)
    with pytest.raises(fp.UserError, match="with federation="):
        fp.load_run(tmp_path / "run")
    assert_same(fp.load_run(tmp_path / "run", federation=federation), history)


@pytest.mark.thorough
def test_users_metrics_are_in_the_rows_and_in_metrics_jsonl(federation, tmp_path):
    metrics = {"worst": lambda run: min(run.history.pa_clients)}
    history = fp.simulate(federation, rounds=2, metrics=metrics, eval_every=2, run_dir=tmp_path / "r", **SMALL)
    assert [row["worst"] for row in history.rows] == [None, history.pa_per_client[1].min()]
    lines = [json.loads(line) for line in (tmp_path / "r/metrics.jsonl").read_text().splitlines()]
    assert [line["worst"] for line in lines] == [row["worst"] for row in history.rows]
    with pytest.raises(fp.UserError, match="'ga'"):
        fp.simulate(federation, rounds=1, metrics={"ga": lambda run: 0.0}, **SMALL)


@pytest.mark.thorough
def test_a_history_can_be_pickled(federation, uninterrupted):
    unpickled = pickle.loads(pickle.dumps(uninterrupted))
    assert_same(unpickled, uninterrupted)
    images = federation.dataset.x_test[:5]
    np.testing.assert_array_equal(unpickled.outputs(images).logits, uninterrupted.outputs(images).logits)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options"),
    [(f"fedavg+{suffix}", {}) for suffix in fp.methods.known_suffixes()]
    + [
        ("scaffold+prototypes+lesam+adam", {}),
        ("fedprox+sam", {"bn": "local-layers"}),
        ("solo", {"models": "mlp,mlp"}),
    ],
)
def test_histories_of_every_suffix_can_be_pickled(name, options):
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    model = None if "models" in options else Normalised()
    history = fp.simulate(federation, name, model=model, **{**SMALL, "rounds": 1}, **options)
    unpickled = pickle.loads(pickle.dumps(history))
    assert type(unpickled.method) is type(history.method)
    assert unpickled.method == history.method
    for client in (None, 1):
        if client is not None or history.method.traits().global_model:
            logits = [h.outputs(federation.dataset.x_test[:5], client).logits for h in (unpickled, history)]
            np.testing.assert_array_equal(*logits)


@pytest.mark.thorough
def test_images_may_lack_the_axes_that_the_data_set_lacked():
    rng = np.random.default_rng(0)
    for shape in ((6,), (4, 4)):
        x, y = rng.normal(size=(12, *shape)).astype(np.float32), np.arange(12) % 2
        federation = fp.partition(fp.from_arrays(x, y, x, y), "iid", clients=2)
        history = fp.simulate(federation, "fedavg", model="mlp", **{**SMALL, "rounds": 1, "batch_size": 4})
        expected = history.outputs(federation.dataset.x_test).logits
        np.testing.assert_array_equal(history.outputs(x).logits, expected)
        with pytest.raises(fp.UserError, match="takes at least one image as those of the data set"):
            history.outputs(x[0])


@pytest.mark.thorough
def test_weights_are_saved_as_safetensors(uninterrupted, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = safetensors.load_file(uninterrupted.save(tmp_path / "w.safetensors"))
    np.testing.assert_array_equal(arrays["params.head.kernel"], uninterrupted.variables["params"]["head"]["kernel"])
    with pytest.raises(fp.UserError, match=r"cannot write to .*: choose another path\.$"):
        uninterrupted.save(tmp_path / f"{'long' * 100}.safetensors")
    with pytest.raises(fp.UserError, match="safetensors"):
        uninterrupted.save(tmp_path / "w.npz")


@pytest.mark.thorough
def test_saved_weights_of_a_client_are_its_personal_ones(federation, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    history = fp.simulate(federation, fp.FedRep(), rounds=1, **SMALL)
    for client in (0, 1):
        arrays = safetensors.load_file(history.save(tmp_path / f"{client}.safetensors", client))
        kernel = history.client_variables(client)["params"]["head"]["kernel"]
        np.testing.assert_array_equal(arrays["params.head.kernel"], kernel)


class Numbered(nn.Module):
    """A backbone whose parts are named by numbers."""

    @nn.compact
    def __call__(self, x):
        draw, shape = nn.initializers.lecun_normal(), (int(np.prod(x.shape[1:])), 8)
        kernels = self.param("kernels", lambda key: {0: draw(key, shape), 1: draw(jax.random.fold_in(key, 1), shape)})
        x = x.reshape(len(x), -1)
        return nn.relu(x @ kernels[0] + x @ kernels[1])


@pytest.mark.thorough
def test_parameters_may_be_named_by_numbers(federation, tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    own = fp.FedPer(layers="head,backbone/kernels/1")
    history = fp.simulate(federation, own, model=Numbered(), rounds=1, run_dir=tmp_path / "run", **SMALL)
    arrays = safetensors.load_file(history.save(tmp_path / "0.safetensors", 0))
    kept, shared = (
        [history.client_variables(client)["params"]["backbone"]["kernels"][part] for client in (0, 1)]
        for part in (1, 0)
    )
    np.testing.assert_array_equal(arrays["params.backbone.kernels.1"], kept[0])
    assert np.abs(kept[0] - kept[1]).max() > 0
    np.testing.assert_array_equal(*shared)
    loaded = fp.load_run(tmp_path / "run", model=Numbered()).client_variables(1)
    jax.tree.map(np.testing.assert_array_equal, loaded, history.client_variables(1))


def test_mlflow_gets_the_options_and_the_scalars_of_each_round_once(tmp_path, monkeypatch):
    calls, metrics, row = [], {}, {"ga": 0.5, "seconds": 2.0}

    def log_metrics(values, step, run_id):
        calls.append((step, values))
        for name in values:
            metrics.setdefault((run_id, name), []).append(types.SimpleNamespace(step=step))

    def start_run(**options):
        calls.append(("start", options["run_id"]))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))

    metrics["7", "system/cpu"] = [types.SimpleNamespace(step=360)]  # MLflow's own, whose steps are no rounds
    client = types.SimpleNamespace(get_metric_history=lambda run_id, name: metrics.get((run_id, name), []))
    mlflow = types.SimpleNamespace(
        start_run=start_run, log_params=lambda values: calls.append(("params", values)),
        log_metrics=log_metrics, end_run=calls.append, MlflowClient=lambda: client,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    run: Any = types.SimpleNamespace(error=None)
    for rounds in (range(2), range(1, 3)):  # the second from a checkpoint after round 0
        logger = loggers.MLflow(tmp_path, {"lr": 0.1})
        logger.on_start(run)
        for round in rounds:
            logger.write(round, row)
        logger.on_end(run)
    assert calls == [
        ("start", None), ("params", {"lr": "0.1"}), (0, row), (1, row), "FINISHED",
        ("start", "7"), (2, row), "FINISHED",
    ]  # fmt: skip


@pytest.mark.thorough
def test_a_run_in_a_relative_folder_is_loaded_from_anywhere(federation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = fp.simulate(federation, "fedavg", rounds=1, run_dir="run", **SMALL)
    monkeypatch.chdir("/")
    assert_same(fp.load_run(tmp_path / "run"), first)
    continued = fp.simulate(
        federation, "fedavg", rounds=1, run_dir=tmp_path / "run", resume=True, label="mine", **SMALL
    )
    assert_same(continued, first)
    assert continued.label == "mine"


@pytest.mark.thorough
def test_a_run_that_has_lost_rounds_is_not_loaded_until_it_is_resumed(federation, uninterrupted, tmp_path):
    fp.simulate(federation, fp.FedProx(mu=0.1), rounds=3, run_dir=tmp_path / "run", **SMALL)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(fp.UserError, match=r"metrics.jsonl has lost rounds: resume the run"):
        fp.load_run(tmp_path / "run")
    assert_same(fp.resume(tmp_path / "run"), uninterrupted)
    assert_same(fp.load_run(tmp_path / "run"), uninterrupted)


@pytest.mark.thorough
def test_another_pipeline_is_refused_and_a_missing_one_asked_for(federation, tmp_path):
    bright, dark = fp.Pipeline(mean=(0.5,)), fp.Pipeline(mean=(0.1,))
    fp.simulate(federation, "fedavg", rounds=1, run_dir=tmp_path / "run", pipeline=bright, **SMALL)
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(fp.UserError, match="the pipeline of the run in"):
        fp.simulate(federation, "fedavg", rounds=1, run_dir=tmp_path / "run", pipeline=dark, resume=True, **SMALL)
    (tmp_path / "run" / "resolved.json").unlink()
    for load in (fp.load_run, fp.resume):
        with pytest.raises(fp.UserError, match=r"with pipeline=\.\.\."):
            load(tmp_path / "run")


@pytest.mark.thorough
def test_load_run_uses_the_initial_weights_and_refuses_changed_ones(federation, tmp_path):
    backbone = fp.simulate(federation, "fedavg", rounds=1, **SMALL).variables["params"]["backbone"]
    weights = {"/".join(["params", *map(str, key)]): np.full_like(x, 0.5) for key, x in flatten_dict(backbone).items()}
    np.savez(tmp_path / "w.npz", **weights)
    options = {"rounds": 1, "cohort": 2, "client_state": "host", "initial_weights": tmp_path / "w.npz", **SMALL}
    fp.simulate(federation, "ditto", run_dir=tmp_path / "run", **options)
    history = fp.load_run(tmp_path / "run")
    assert sum(_has_initial_weights(history, client) for client in range(4)) == 2
    np.savez(tmp_path / "w.npz", **{name: x + 1 for name, x in weights.items()})
    with pytest.raises(fp.UserError, match="has changed since this run began"):
        fp.load_run(tmp_path / "run")


def _has_initial_weights(history, client):
    return all((x[client] == 0.5).all() for x in jax.tree.leaves(history.state.clients["params"]["backbone"]))


def test_lists_become_options_with_commas(federation):
    with pytest.raises(fp.UserError, match=r"`?lr_steps=2,1`? must be rising round numbers"):
        fp.simulate(federation, "fedavg", lr_steps=[2, 1], **SMALL)
    with pytest.warns(UserWarning, match="lr_steps: a step after 2 of 2 rounds has no effect"):
        config = fp.simulate(federation, "solo", rounds=2, lr_steps=[1, 2], models=("mlp", "mlp"), **SMALL).config
    assert (config.lr_steps, config.models) == ("1,2", "mlp,mlp")


def test_initial_weights_that_are_no_npz_archive_are_refused(federation, tmp_path):
    for name, content in (("a.npy", None), ("empty.npz", b""), ("cut.npz", b"PK\x03\x04 and no more")):
        np.save(tmp_path / name, np.zeros(3)) if content is None else (tmp_path / name).write_bytes(content)
        with pytest.raises(fp.UserError, match="is not a readable npz archive"):
            fp.simulate(federation, "fedavg", rounds=1, initial_weights=tmp_path / name, **SMALL)


@pytest.mark.thorough
def test_pa_of_the_best_epoch_is_measured_without_fine_tuning(federation):
    options = {"rounds": 2, "local_epochs": 2, "batch_size": 32, "lanes": 1, "fine_tune_epochs": 0}
    last, best_epoch = (
        fp.simulate(federation, "fedavg", pa_protocol=rule, **options) for rule in ("last", "best_epoch")
    )
    assert "pa_best_epoch_last" not in last.summary
    assert best_epoch.summary["pa_best_epoch_last"] == best_epoch.summary["pa_last"] >= last.summary["pa_last"]


@pytest.mark.thorough
def test_the_newest_definition_of_a_class_is_the_one_that_is_loaded(federation, tmp_path):
    def signed_method(sign):
        @struct.dataclass
        class Signed(fp.FedAvg):
            def logits(self, *arguments, **scope):
                return sign * super().logits(*arguments, **scope)

        Signed.__qualname__, Signed.__module__ = "Signed", "__main__"
        return Signed()

    images = federation.dataset.x_test[:3]
    try:
        for name, sign in (("a", 1.0), ("b", -1.0)):
            history = fp.simulate(federation, signed_method(sign), rounds=1, run_dir=tmp_path / name, **SMALL)
            np.testing.assert_array_equal(
                fp.load_run(tmp_path / name).outputs(images).logits, history.outputs(images).logits
            )
    finally:
        fp.methods.METHODS.data.pop("Signed", None)


KEEP_AND_LION = """
import optax
from flax import struct

import fedjax_pcdd as fp


@struct.dataclass
class Keep(fp.Method):
    "FedAvg."


@fp.register_server_optimiser("own-lion")
@struct.dataclass
class Lion(fp.ServerOptimised):
    "Signs."

    def server_rule(self):
        return optax.scale_by_sign()
"""
RESUMED = """
import sys
import fedjax_pcdd as fp

assert fp.load_run(sys.argv[1]).method.server_lr == 0.5
print(fp.resume(sys.argv[1]).ga.tolist())
"""


def stopping(run, report):
    if run.round == 2:
        raise KeyboardInterrupt


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("fedavg+adam", "fedavg+adam"),
        ("own.py:Keep+sam+adam", "Keep+sam+adam"),
        ("own.py:Keep+own.py:Lion", "Keep+own-lion"),
    ],
)
def test_a_method_with_suffixes_is_found_again_in_another_process(federation, tmp_path, monkeypatch, name, label):
    monkeypatch.setattr(fp.methods.SERVER_OPTIMISERS, "data", dict(fp.methods.SERVER_OPTIMISERS.data))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(KEEP_AND_LION)
    method, options = fp.methods.get(name)(server_lr=0.5), {"rounds": 2, "model": "mlp", **SMALL}
    whole = fp.simulate(federation, method, **options)
    with pytest.raises(KeyboardInterrupt):
        fp.simulate(federation, method, run_dir="run", callbacks=[stopping], **options)
    command = [sys.executable, "-c", RESUMED, str(tmp_path / "run")]
    result = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == whole.ga.tolist()
    assert whole.label == fp.load_run("run").label == label


@pytest.mark.thorough
def test_resuming_a_finished_run_keeps_its_summary_and_costs(federation, tmp_path):
    first = fp.simulate(federation, rounds=2, run_dir=tmp_path / "run", **SMALL)
    resumed = fp.resume(tmp_path / "run", federation=federation)
    assert resumed.summary == first.summary
    assert first.summary["compilations"] == 1


@pytest.mark.thorough
def test_local_steps_replace_local_epochs_as_on_the_command_line(federation):
    options = {name: value for name, value in SMALL.items() if name != "local_epochs"}
    history = fp.simulate(federation, rounds=1, local_steps=3, **options)
    assert (history.config.local_epochs, history.config.local_steps) == (None, 3)


def test_a_metric_may_not_be_named_like_an_accuracy(federation):
    with pytest.raises(fp.UserError, match=r"metrics may not begin with ga_ or pa_, .* rename 'ga_mine'"):
        fp.simulate(federation, metrics={"ga_mine": lambda run: 1.0}, **SMALL)


@pytest.mark.thorough
def test_costs_of_a_round_leave_out_the_first_round(federation, tmp_path):
    history = fp.simulate(federation, rounds=4, run_dir=tmp_path / "run", last_batch="keep", **SMALL)
    summary, seconds = history.summary, [row["seconds"] for row in history.rows[1:]]
    assert summary["seconds_per_round"] == pytest.approx(np.median(seconds))
    assert summary["seconds_local"] == pytest.approx(np.mean(seconds))
    assert summary["samples_per_second"] * np.median(seconds) == pytest.approx(federation.sizes.sum())


@pytest.mark.thorough
@pytest.mark.parametrize("rounds", [1, 3])
def test_samples_per_second_are_those_of_the_timed_rounds(tmp_path, monkeypatch, rounds):
    monkeypatch.setattr(loop, "perf_counter", itertools.count().__next__)  # a second between any two readings
    there = tmp_path / "there.npz"
    np.savez(there, probability=[[0, 0, 0], [1, 0, 0], [1, 0, 0]])
    config, method = build(
        {"clients": 3, "rounds": rounds, "run_dir": tmp_path / "run", "availability": str(there), "last_batch": "keep",
         "train_samples": 120, "test_samples": 40, "min_samples": 1, "quiet": True, **SMALL}
    )  # fmt: skip
    rate = run(config, method)["samples_per_second"]
    assert rate == (None if rounds == 1 else len(load_partition(tmp_path / "run" / "partition.npz").train[0]))


@contextmanager
def only_counted_references():
    """Without Python's collector of cycles; yields how many arrays there are that were not there before."""
    gc.collect()
    gc.disable()
    before = {id(array) for array in jax.live_arrays()}
    try:
        yield lambda: sum(id(array) not in before for array in jax.live_arrays())
    finally:
        gc.enable()


def test_what_a_run_had_on_the_device_is_gone_with_its_history(federation, tmp_path):
    for options in ({}, {}, {"run_dir": tmp_path / "run"}):  # the first one may leave constants of compiled functions
        with only_counted_references() as arrays:
            history = fp.simulate(federation, "fedavg", rounds=1, **SMALL, **options)
            assert arrays() > 0
            del history
            left = arrays()
    assert left == 0


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.* is not finite in round 1 of fedper")
@pytest.mark.parametrize("together", [1, 2])
def test_what_the_experiments_of_a_sweep_had_on_the_device_is_gone_even_if_they_failed(tmp_path, together):
    space = {"method": "fedper", "dataset": "digits", "clients": 3, "rounds": 1, "seed": [0, 1], "lr": [0.1, 1e30]}
    for folder in ("first", "second"):
        with only_counted_references() as arrays:
            results = fp.sweep(space | {"local_epochs": 1, "lanes": 1}, folder=tmp_path / folder, together=together)
            after = arrays()
    assert sum(isinstance(result, fp.UserError) for result in results.values()) == 2
    assert after == 0
