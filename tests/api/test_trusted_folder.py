"""A run continues with what it began with, or says what differs; one process at a time; models that are finite."""

import contextlib
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import yaml
from commands import results
from flax import struct

import fedjax_pcdd as fp
from fedjax_pcdd.api import records
from fedjax_pcdd.api.data import from_arrays
from fedjax_pcdd.api.runs import load_run, resume, run
from fedjax_pcdd.cli.run import main as run_main
from fedjax_pcdd.cli.sweep import sweep_main
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine.program import State
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.fedavg import FedAvg
from fedjax_pcdd.methods.fedmd import FedMD
from fedjax_pcdd.methods.fedrep import FedRep
from fedjax_pcdd.training import inputs
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.finite import not_finite
from fedjax_pcdd.training.folder import RunFolder
from fedjax_pcdd.training.loop import Callback
from fedjax_pcdd.training.presets import read_run

OPTIONS = {
    "method": "scaffold", "clients": 3, "rounds": 4, "local_epochs": 1, "batch_size": 16, "lanes": 1, "quiet": True,
    "checkpoint_every": 1,
    "train_samples": 120, "test_samples": 40, "min_samples": 1, "fine_tune_epochs": 0, "beta": 0.5,
}  # fmt: skip


class Interrupt(Callback):
    def __init__(self, rounds):
        self.rounds = rounds

    def on_round(self, run, report):
        if run.round == self.rounds:
            raise KeyboardInterrupt


def begin(folder, rounds=2, **options):
    """Begin a run that is interrupted after some rounds."""
    config, method = build(OPTIONS | options | {"run_dir": folder})
    with pytest.raises(KeyboardInterrupt):
        run(config, method, last=[Interrupt(rounds)])


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trusted") / "run"
    begin(folder)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    config, method = build(OPTIONS | {"run_dir": folder})
    run(config, method)
    return folder


@pytest.fixture
def folder(interrupted, tmp_path):
    return shutil.copytree(interrupted, tmp_path / "run")


def edit(file, **changes):
    file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | changes, sort_keys=False))


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "value", "was"), [("beta", 5.0, "0.5"), ("lr", 0.5, "0.01"), ("seed", 7, "0")])
def test_an_edited_configuration_is_refused_with_the_option_that_differs(folder, name, value, was):
    edit(folder / "config.yaml", **{name: value})
    with pytest.raises(UserError, match=rf"{name} was {was} when the run in .* began, and config.yaml has {value}"):
        resume(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("lines_kept", [0, 1, 5, 20, 40])
def test_a_configuration_that_was_cut_short_never_continues_as_another_run(folder, lines_kept):
    lines = (folder / "config.yaml").read_text().splitlines(keepends=True)
    (folder / "config.yaml").write_text("".join(lines[:lines_kept]))
    with pytest.raises(UserError, match=r"when the run in .* began, and config\.yaml has"):
        resume(folder)


@pytest.mark.thorough
def test_an_edited_configuration_is_refused_even_if_resolved_json_agrees(folder):
    edit(folder / "config.yaml", lr=0.5)
    resolved = json.loads((folder / "resolved.json").read_text())
    resolved["inputs"]["options"]["lr"] = 0.5
    resolved["crc"] = inputs._crc(resolved)
    (folder / "resolved.json").write_text(json.dumps(resolved))
    with pytest.raises(UserError, match=r"lr was 0\.01 when the run"):
        resume(folder)


@pytest.mark.thorough
def test_another_data_set_of_the_same_shape_is_refused(tmp_path):
    rng = np.random.default_rng(0)
    data = {f"x_{part}": rng.integers(0, 255, (60, 8, 8), np.uint8) for part in ("train", "test")}
    data |= {f"y_{part}": np.arange(60) % 3 for part in ("train", "test")}
    np.savez(tmp_path / "mine.npz", **data)
    options = {"dataset": str(tmp_path / "mine.npz"), "model": "mlp", "train_samples": None}
    begin(tmp_path / "run", method="fedavg", **options)
    data["x_train"][7, 3, 3] ^= 1
    np.savez(tmp_path / "mine.npz", **data)
    with pytest.raises(UserError, match=r"mine\.npz has changed|the data set of the run in .* is not the one"):
        resume(tmp_path / "run")
    edit(tmp_path / "run" / "config.yaml", from_outside=None)
    with pytest.raises(UserError, match=r"the data set of the run in .* is not the one that it began with"):
        resume(tmp_path / "run")


@pytest.mark.thorough
def test_a_sweep_does_not_mix_results_on_different_data(tmp_path, capsys):
    rng = np.random.default_rng(0)
    for name in "ab":
        data = {f"x_{part}": rng.integers(0, 255, (60, 8, 8), np.uint8) for part in ("train", "test")}
        (tmp_path / name).mkdir()
        np.savez(tmp_path / name / "mine.npz", **data, y_train=np.arange(60) % 3, y_test=np.arange(60) % 3)
    options = ["--dataset=mine", "--model=mlp", "--rounds=1", "--local-epochs=1", "--clients=3", "--min-samples=1"]
    options += ["--lanes=1", "--fine-tune-epochs=0", "--partition=iid", f"--sweep-dir={tmp_path / 'sweep'}"]
    assert sweep_main([*options, f"--data-dir={tmp_path / 'a'}", "--seed=0"]) == 0
    assert sweep_main([*options, f"--data-dir={tmp_path / 'b'}", "--seed=0:2"]) == 1
    assert "s1: the data set is not the one that" in capsys.readouterr().err
    assert not (tmp_path / "sweep/fedavg-s1/summary.json").exists()
    assert sweep_main([*options, f"--data-dir={tmp_path / 'b'}", "--seed=1", f"--sweep-dir={tmp_path / 'other'}"]) == 0
    shutil.rmtree(tmp_path / "sweep/fedavg-s1")
    shutil.copytree(tmp_path / "other/fedavg-s1", tmp_path / "sweep/fedavg-s1")
    assert sweep_main([*options, f"--data-dir={tmp_path / 'a'}", "--seed=0:2"]) == 2
    assert "were trained on different data sets" in capsys.readouterr().err


class Stop(Exception):
    """Ends a run as a kill would."""


class Layer(nn.Module):
    activation: str

    @nn.compact
    def __call__(self, x):
        return getattr(nn, self.activation)(nn.Dense(4)(x.reshape(len(x), -1)))


def method_of_a_script():
    @struct.dataclass
    class Mine(FedAvg):
        pass

    return Mine()


def edited_method_of_the_script():
    @struct.dataclass
    class Mine(FedAvg):
        def regulariser(self, params, context):
            return 0.0

    return Mine()


def stopped_in_python(folder, method, model):
    def stop(run, report):
        raise Stop

    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=3)
    options = {"rounds": 2, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 0, "model": model, "run_dir": folder}
    with pytest.raises(Stop):
        fp.simulate(federation, method, callbacks=[stop], **options)
    return lambda method, model: fp.simulate(federation, method, resume=True, **options | {"model": model})


@pytest.mark.thorough
def test_another_module_or_method_class_is_refused_when_a_run_of_python_resumes(tmp_path, monkeypatch):
    known = dict(METHODS.data)
    monkeypatch.setattr(METHODS, "data", dict(known))
    resumed = stopped_in_python(tmp_path / "run", method_of_a_script(), Layer("relu"))
    with pytest.raises(UserError, match=r"the model is not the one that the run in .* began with"):
        resumed(method_of_a_script(), Layer("tanh"))
    monkeypatch.setattr(METHODS, "data", dict(known))  # as in a new process
    with pytest.raises(UserError, match=r"the method is not the one that the run in .* began with"):
        resumed(edited_method_of_the_script(), Layer("relu"))
    monkeypatch.setattr(METHODS, "data", dict(known))
    with pytest.warns(UserWarning, match="no full checkpoint in .*: starting from round 0"):
        assert len(resumed(method_of_a_script(), Layer("relu")).ga) == 2


def test_a_part_without_a_source_is_described_by_its_code():
    def typed(text):
        scope = {"__name__": "__main__"}
        exec(text, scope)
        return scope["f"]

    first, same, other = (typed(f"def f(x): return {value}") for value in ("x + 1", "x + 1", "x + 2"))
    assert inputs.described(first) == inputs.described(same) != inputs.described(other)
    classes = [typed(f"class f:\n    def g(self): return {value}") for value in (1, 1, 2)]
    assert inputs.described(classes[0]) == inputs.described(classes[1]) != inputs.described(classes[2])
    modules = [typed(f"import flax.linen as nn\nclass f(nn.Module):\n    def g(self): return {v}") for v in (1, 1, 2)]
    assert inputs.described(modules[0]) == inputs.described(modules[1]) != inputs.described(modules[2])


class Factory:
    def __init__(self, width):
        self.width = width

    def __repr__(self):
        return f"Factory({self.width})"

    def __call__(self):
        return nn.Dense(self.width)


@pytest.mark.parametrize(
    "make",
    [
        lambda width: partial(nn.Dense, features=width),
        lambda width: partial(nn.Dense, width),
        lambda width: partial(nn.Dense if width == 8 else nn.Conv, features=8),
        Factory,
        lambda width: partial(Factory(width)),
        lambda width: [Factory(8), nn.Dense(width)],
    ],
)
def test_partials_and_objects_that_make_models_are_described_by_what_they_hold(make):
    assert inputs.described(make(8)) == inputs.described(make(8)) != inputs.described(make(16))


def test_code_without_a_source_is_described_by_names_and_not_by_lines():
    def typed(text):
        scope = {"__name__": "__main__"}
        exec(text, scope)
        return inputs.described(scope["f"])

    function = "def f(x): return [y for y in {'a', 'b', 'c'} if x.%s(lambda: y)]"
    assert typed(function % "exp") == typed("\n\n" + function % "exp") != typed(function % "log")
    body = "class f:\n    @staticmethod\n    def g(x): return x.%s\n    @property\n    def h(self): return %d"
    assert typed(body % ("a", 1)) == typed(body % ("a", 1))
    assert len({typed(body % ("a", 1)), typed(body % ("b", 1)), typed(body % ("a", 2))}) == 3


@pytest.mark.thorough
def test_code_without_a_source_is_described_alike_in_every_process():
    program = (
        "from fedjax_pcdd.training.inputs import described; scope = {};"
        'exec(\'def f(x): return x in {"a", "b", "c", "d", "e"}\', scope); print(described(scope[\'f\']))'
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(digests) == 1


def test_a_method_is_described_alike_whatever_its_module_is_called(tmp_path, monkeypatch):
    """A script imports its method's file by a name; a resume loads it by its path, under another name."""

    def loaded(name, coefficient):
        path = tmp_path / f"{name}.py"
        path.write_text(
            "from flax import struct\nfrom fedjax_pcdd import FedAvg\n@struct.dataclass\nclass Mine(FedAvg):\n"
            f"    def penalty(self, params, context):\n        return {coefficient}\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(name).Mine

    first, same, other = loaded("mine_first", 0.5), loaded("mine_same", 0.5), loaded("mine_other", 0.25)
    assert inputs.described(first) == inputs.described(same) != inputs.described(other)


@pytest.mark.thorough
def test_a_run_of_python_may_be_moved(tmp_path):
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=3)
    options = {"rounds": 1, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 0, "model": "mlp"}
    first = fp.simulate(federation, "fedavg", run_dir=tmp_path / "first", **options)
    (tmp_path / "first").rename(tmp_path / "moved")
    assert fp.load_run(tmp_path / "moved").ga.tolist() == first.ga.tolist()
    again = fp.simulate(federation, "fedavg", run_dir=tmp_path / "moved", resume=True, **options)
    assert again.ga.tolist() == first.ga.tolist()


def test_groups_of_samples_are_part_of_a_data_sets_digest():
    arrays, groups = ([[0.0], [1.0]], [0, 1], [[0.5]], [1]), [None, ([0, 1], [0]), ([1, 0], [0]), ([0, 1], [1])]
    assert len({inputs.digest_of(from_arrays(*arrays, groups=pair)) for pair in groups}) == len(groups)


def test_all_samples_and_labels_are_part_of_a_data_sets_digest():
    arrays = [[0.0], [1.0]], [0, 1], [[0.5], [0.7]], [0, 1]
    changed = [[*arrays[:i], arrays[i][::-1], *arrays[i + 1 :]] for i in range(4)]
    assert len({inputs.digest_of(from_arrays(*each)) for each in (arrays, *changed)}) == 5


def test_training_and_test_lists_are_part_of_a_partitions_digest():
    data, lists = from_arrays([[0.0], [1.0]], [0, 1], [[0.5], [0.7]], [0, 1]), [np.array([0]), np.array([1])]
    federations = [
        Federation(data, Partition(*split)) for split in ((lists, lists), (lists, lists[::-1]), (lists[::-1], lists))
    ]
    assert len({inputs.inputs_of(*build({}), each, "", ())["partition"] for each in federations}) == len(federations)


def test_public_labels_are_part_of_the_inputs_that_a_run_began_with():
    data, lists = from_arrays([[0.0]], [0], [[0.5]], [0]), [np.array([0])]
    arguments = (*build({}), Federation(data, Partition(lists, lists)), "", ())
    recorded, changed = (inputs.inputs_of(*arguments, labels=np.array(labels)) for labels in ([0, 1], [1, 0]))
    inputs.check_inputs(recorded, recorded, Path("run"), pytest.fail)
    with pytest.raises(UserError, match="the public labels of the run in run are not those that it began with"):
        inputs.check_inputs(recorded, changed, Path("run"), pytest.fail)


@pytest.mark.thorough
def test_a_changed_module_is_refused_even_if_the_configuration_omits_it(tmp_path):
    module = tmp_path / "mine.py"
    module.write_text(
        "import fedjax_pcdd as fp\nfrom flax import struct\n@struct.dataclass\nclass Mine(fp.FedAvg): ...\n"
    )
    begin(tmp_path / "run", method=f"{module}:Mine")
    module.write_text(module.read_text() + "# changed\n")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().split("from_outside")[0])
    with pytest.raises(UserError, match=r"Mine is not what the run in .* began with"):
        resume(tmp_path / "run")


@pytest.mark.thorough
def test_another_version_of_jax_gives_a_warning_that_bits_may_differ(folder, monkeypatch):
    version = inputs.metadata.version
    monkeypatch.setattr(inputs.metadata, "version", lambda name: "9.9" if name == "jax" else version(name))
    with pytest.warns(UserWarning, match=r"jax was .* when the run in .* began, and is 9\.9 now: bits may differ\."):
        resume(folder)


def test_load_run_refuses_an_edited_configuration(folder):
    edit(folder / "config.yaml", beta=5.0)
    with pytest.raises(UserError, match=r"beta was 0\.5"):
        load_run(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", '{"lanes": 3}', "\x00\xff"])
def test_a_damaged_resolved_json_is_restored_from_the_checkpoint(folder, uninterrupted, damage):
    file = folder / "resolved.json"
    before = json.loads(file.read_text())
    if damage == "missing":
        file.unlink()
    else:
        file.write_text({"empty": "", "cut": file.read_text()[:100]}.get(damage, damage))
    if damage == '{"lanes": 3}':  # alone it would pass as an earlier version's, which had no checksum
        file.write_text(json.dumps(before | {"lanes": 3}))
    resume(folder)
    assert json.loads(file.read_text()) == before
    assert results(folder) == results(uninterrupted)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["partition.npz", "partition.png"])
@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.write_bytes(b""), lambda f: f.write_bytes(b"PK")])
def test_a_damaged_partition_is_made_again(folder, monkeypatch, name, damage):
    monkeypatch.setattr(records, "heat_map", lambda _, path: path.write_bytes(b"drawn"))
    before = (folder / "partition.npz").read_bytes()
    damage(folder / name)
    resume(folder)
    assert (folder / "partition.png").read_bytes() == b"drawn"
    assert same_arrays(folder / "partition.npz", io.BytesIO(before))


def same_arrays(*files):
    with np.load(files[0]) as actual, np.load(files[1]) as expected:
        return all(np.array_equal(actual[key], expected[key]) for key in expected)


@pytest.mark.thorough
def test_a_second_resume_of_a_live_run_is_refused(folder):
    code = "import sys; from fedjax_pcdd.api.runs import resume; resume(sys.argv[1])"
    attempts = []

    class ResumeAgain(Callback):
        def on_round(self, run, report):
            if not attempts:
                attempts.append(subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True))

    resume(folder, callbacks=[ResumeAgain()])
    assert attempts[0].returncode
    assert f"{folder} is in use by process" in attempts[0].stderr.splitlines()[-1]
    assert not (folder / "lock").exists()


@pytest.mark.thorough
def test_a_run_that_lost_its_lock_stops_writing(folder):
    class LoseLock(Callback):
        def on_round(self, run, report):
            (folder / "lock").write_text('{"host": "elsewhere", "process": 1, "token": "t"}')

    before = (folder / "metrics.jsonl").read_text()
    with pytest.raises(UserError, match="taken over by process 1 on elsewhere"):
        resume(folder, callbacks=[LoseLock()])
    assert (folder / "metrics.jsonl").read_text() == before


@struct.dataclass
class Overflowing(FedAvg):
    """Its server is not finite from the third round on, though all losses are."""

    def aggregate(self, server, message, weights, context):
        aggregated = super().aggregate(server, message, weights, context)
        return jax.tree.map(lambda x: jnp.where(context.round >= 2, x.at[..., 0].set(jnp.inf), x), aggregated)


@pytest.mark.thorough
def test_a_server_that_is_not_finite_ends_the_run_and_is_never_saved(tmp_path):
    config, _ = build(OPTIONS | {"method": "fedavg", "run_dir": tmp_path / "run"})
    with pytest.raises(UserError, match=r"the server's .* is not finite in round 3.*the checkpoint of round 2 is good"):
        run(config, Overflowing())
    assert sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir()) == [1, 2]


@struct.dataclass
class Spoilt(FedRep):
    """The heads that clients keep are not finite from the second round on, and no part of them is sent."""

    def upload(self, variables, summary, context):
        client, message = super().upload(variables, summary, context)
        return jax.tree.map(lambda x: jnp.where(context.round >= 1, x.at[0].set(jnp.nan), x), client), message


@struct.dataclass
class Disagreeing(FedMD):
    """The target that participants are to imitate is NaN."""

    def agree(self, public, spoken, counts):
        public, target = super().agree(public, spoken, counts)
        return public, target * jnp.nan


DIVERGING = {
    "kept by a client": ("fedrep", {}, Spoilt(), r"client [012]'s .* is not finite in round 2.*round 1 is good"),
    "distillation": (
        "feddf",
        {"server_lr": 1e38, "server_steps": 3, "public_samples": 32},
        None,
        r"the server's .* round 1.*no checkpoint",
    ),
    "generator": ("fedgen", {"generator_lr": 1e38, "generator_steps": 3}, None, r"the server's .* round 1.*no checkp"),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "options", "method", "message"), DIVERGING.values(), ids=DIVERGING.keys())
def test_anything_not_finite_after_a_round_is_named_and_never_saved(tmp_path, name, options, method, message):
    config, built_method = build(OPTIONS | {"method": name, "run_dir": tmp_path / "run"} | options)
    with pytest.raises(UserError, match=message):
        run(config, method or built_method)
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == ("round 1 is good" in message)


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_not_finite_names_the_server_or_trained_client_of_each_experiment(as_array):
    servers, clients = {"w": as_array(np.zeros((3, 2)))}, {"v": as_array(np.zeros((9, 2)))}
    simulation = SimpleNamespace(federations=[SimpleNamespace(num_clients=3)] * 3)

    def problems(server, client):
        spoilt_clients = {"v": as_array(np.where((np.arange(9) == client)[:, None], np.nan, clients["v"]))}
        spoilt_servers = {"w": as_array(np.where((np.arange(3) == server)[:, None], np.nan, servers["w"]))}
        return not_finite(simulation, State(spoilt_servers, spoilt_clients, ()), np.array([1, 2, 3, 5, 6, 7]))

    assert problems(None, 5) == [None, "client 2's v", None]
    assert problems(2, 3) == [None, "client 0's v", "the server's w"]
    assert problems(None, 8) == [None] * 3  # clients that did not train are as before


@pytest.mark.thorough
def test_a_participant_that_is_not_finite_is_named_by_its_own_number():
    simulation = toy.groups("fedmd")
    state = simulation.start()
    spoilt = jax.tree.map(lambda x: x.at[1].set(jnp.nan), state.clients[1])  # of clients 1 and 3
    (problem,) = not_finite(simulation, state._replace(clients=(state.clients[0], spoilt)), np.arange(5))
    assert problem.startswith("client 3's ")


@pytest.mark.thorough
def test_an_exchange_that_is_not_finite_is_named_and_never_saved(tmp_path):
    task = {"task": "digits_domains", "models": "mlp", "pretrain_epochs": 0, "public_samples": 64, "public_batch": 32}
    options = {"local_epochs": 1, "batch_size": 64, "lanes": 1, "quiet": True, "rounds": 2}
    config, _ = build(task | options | {"method": "fedmd", "run_dir": tmp_path / "run"})
    with pytest.raises(UserError, match=r"loss of clients 0, .* is not finite .*round 1.*no checkpoint"):
        run(config, Disagreeing(distance="squared"))
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_loss_that_is_not_finite_in_round_1_says_there_is_no_checkpoint(tmp_path):
    config, method = build(OPTIONS | {"lr": 1e30, "momentum": 0.0, "run_dir": tmp_path / "run"})
    with pytest.raises(UserError, match=r"not finite .* round 1 .*no checkpoint was written"):
        run(config, method)
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.thorough
def test_a_finished_run_without_checkpoints_is_not_trained_anew(folder):
    run(*build(OPTIONS | {"resume": folder, "run_dir": folder}))
    lines = (folder / "metrics.jsonl").read_text()
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(UserError, match="is finished, and its checkpoints are gone: its results stay as they are"):
        resume(folder)
    assert (folder / "metrics.jsonl").read_text() == lines


@pytest.mark.parametrize("quiet", [True, False])
def test_a_run_without_checkpoints_says_that_it_begins_anew_also_if_it_is_quiet(folder, capsys, quiet):
    shutil.rmtree(folder / "checkpoints")
    assert run_main([f"--resume={folder}", "--quiet" if quiet else "--no-quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err.count("starting from round 0") == 1
    if quiet:
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1
    else:
        assert "GA" in captured.out


def test_another_working_folder_during_a_run_changes_nothing(tmp_path, monkeypatch):
    digits = fp.load_dataset("digits")
    small = digits.take(train=np.arange(60), test=np.arange(20))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedjax_pcdd.training.lock.BEAT", 0.01)
    (tmp_path / "elsewhere").mkdir()
    options = {"model": "mlp", "rounds": 2, "local_epochs": 1, "batch_size": 20, "lanes": 1, "fine_tune_epochs": 0}

    def go(history):
        os.chdir(tmp_path / "elsewhere")

    fp.simulate(fp.partition(small, "iid", clients=2), run_dir="run", callback=go, **options)
    assert (tmp_path / "run/summary.json").is_file()
    assert not (tmp_path / "run/lock").exists()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_deleted_lines_of_clients_jsonl_are_reported(folder):
    (folder / "clients.jsonl").unlink()
    with pytest.warns(match=r"clients.jsonl has lost the accuracies of the clients in round 1, 2\."):
        resume(folder)


@pytest.mark.thorough
def test_of_many_clients_a_line_has_all_that_trained_since_the_one_before_also_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr("fedjax_pcdd.training.folder.MOST_WRITTEN", 2)
    run(*build(OPTIONS | {"cohort": 1, "run_dir": tmp_path / "every"}))
    begin(tmp_path / "third", cohort=1, eval_every=3)
    resume(tmp_path / "third")
    every, third = (RunFolder(tmp_path / name).rows("clients.jsonl") for name in ("every", "third"))
    known = {k: pa for line in every[:3] for k, pa in zip(line["clients"], line["pa"], strict=True)}
    assert len(known) > 1
    assert third == [{"round": 3, "clients": sorted(known), "pa": [known[k] for k in sorted(known)]}, every[3]]


@pytest.mark.thorough
def test_damaged_lines_and_unrelated_files_do_not_stop_a_resume(folder, uninterrupted):
    (folder / "clients.jsonl").write_text('{"round": 1}\n{{{\n[]\n')
    (folder / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    (folder / "mine.jsonl").write_text('{"name": "mine"}\nnot JSON\n')
    (folder / "summary.json").write_text("{")
    with pytest.warns(match=r"clients.jsonl has lost the accuracies of the clients in round 2\."):
        resume(folder)
    assert results(folder) == results(uninterrupted)
    assert (folder / "mine.jsonl").read_text() == '{"name": "mine"}\nnot JSON\n'


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*clients.jsonl has lost the accuracies")
@pytest.mark.parametrize("name", ["metrics.jsonl", "clients.jsonl", "resolved.json", "summary.json", "partition.npz"])
def test_links_in_a_run_folder_are_not_written_through(folder, tmp_path, name):
    target = tmp_path / "precious"
    target.write_text("precious")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)
    with contextlib.suppress(UserError):
        resume(folder)
    assert target.read_text() == "precious"


def test_a_link_in_place_of_the_checkpoints_is_refused(folder, tmp_path):
    shutil.move(folder / "checkpoints", tmp_path / "precious")
    (folder / "checkpoints").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=r"checkpoints is a symbolic link"):
        resume(folder)


@pytest.mark.parametrize("name", ["clients", "tensorboard", "wandb", "wandb.txt", "mlflow.txt", "profile"])
def test_a_link_in_place_of_a_folder_that_is_written_into_is_refused(folder, tmp_path, name):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "7").mkdir()
    (folder / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=rf"{name} is a symbolic link, which nothing is written through"):
        resume(folder)
    assert [path.name for path in (tmp_path / "precious").iterdir()] == ["7"]


@pytest.mark.thorough
def test_a_killed_start_leaves_a_folder_that_can_be_started_again(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".config.yaml.tmp").write_text("meth")
    (folder / ".77.config.yaml").write_text("meth")
    config, method = build(OPTIONS | {"run_dir": folder})
    run(config, method)
    assert results(folder) == results(uninterrupted)
    assert read_run(folder)
