"""Parts from outside the package, by decorator, entry point or import path: recorded, and checked when resumed."""

import functools
import inspect
import json
import os
import re
import sys
from importlib.metadata import EntryPoint

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml
from commands import parse
from flax import struct

import fedjax_pcdd as fp
from fedjax_pcdd import methods, models, registry
from fedjax_pcdd.cli.help import information
from fedjax_pcdd.cli.options import configure, scan
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.data import augment, lists, partition, sources
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.registry import Registry, load_object
from fedjax_pcdd.training import loggers
from fedjax_pcdd.training.build import federate, public_images
from fedjax_pcdd.training.config import build, dump, parse_config, run_folder
from fedjax_pcdd.training.fields import options_of
from fedjax_pcdd.training.outside import origins_of
from fedjax_pcdd.training.presets import read_run

METHOD = '''
import optax
from flax import struct
from fedjax_pcdd.methods.method import Message, Method, Server, hyperparameter

@struct.dataclass
class FedStep(Method):
    """A client that counts its rounds, and a server with a rate."""

    eta: float = hyperparameter(0.5, symbol="eta", help="rate of the server", low=0.0)
    loud: bool = hyperparameter(False, help="a switch", static=True)

    def init_client(self, setting, server, facts, key):
        return facts.num_samples * 0

    def upload(self, variables, summary, context):
        return context.client + 1, Message(mean=optax.tree.sub(variables["params"], context.start["params"]))

    def aggregate(self, server, message, weights, context):
        params = optax.tree.add_scale(server.variables["params"], self.eta, message.mean)
        return server._replace(variables={**server.variables, "params": params})
'''
PARTS = """
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import fedjax_pcdd as fp

class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.relu(nn.Dense(8)(x.reshape(x.shape[0], -1)))

def by_hand(y_train, clients, seed):
    return np.array_split(np.random.default_rng(seed).permutation(len(y_train)), clients)

def norm_of(num_classes):
    return num_classes

def asks(y_train, wards):
    return []

def half_black(image, key):
    return image.at[:, :4].set(0)

class Log(fp.Callback):
    def __init__(self, folder, config):
        self.file = folder / "own.log"

    def on_round(self, run, report):
        self.file.write_text(str(run.round))

def _norm(view):
    return sum(jnp.sum(x**2) for x in jax.tree.leaves(view.variables["params"]))

norm = fp.Quantity(
    "squared norm of the parameters", _norm, lambda view, probe: _norm(view),
    lambda seen: {"norm": np.asarray(seen, float)},
    lambda seen, counts, labels, classes: {"norm": float(seen)},
)
"""
LION = """
import optax
from flax import struct
import fedjax_pcdd as fp

@struct.dataclass
class Lion(fp.ServerOptimised):
    "Signs of the pseudo-gradient."

    def server_rule(self):
        return optax.scale_by_sign()
"""
REGISTERED = {
    "register_method": "FedStep", "register_model": "Net", "register_dataset": "random",
    "register_partition": "by_hand", "register_augmentation": "half_black", "register_quantity": "norm",
    "register_logger": "Log", "register_server_optimiser": "Lion",
}  # fmt: skip
RANDOM = """
def random():
    draw = np.random.default_rng(0)
    images, labels = draw.integers(0, 256, (60, 8, 8, 1), np.uint8), np.arange(60) % 3
    return fp.from_arrays(images, labels, images, labels)
"""
SMALL = ["--rounds=2", "--local-epochs=1", "--fine-tune-epochs=0", "--lanes=1", "--quiet", "--train-samples=200"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with files that hold a method, other parts and index lists."""
    (tmp_path / "own.py").write_text(METHOD)
    (tmp_path / "parts.py").write_text(PARTS)
    order = np.random.default_rng(0).permutation(200)
    np.savez(tmp_path / "lists.npz", **{f"train_{k}": order[k::3] for k in range(3)})
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(sentence, function, *arguments):
    with pytest.raises(UserError, match=sentence) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.thorough
def test_a_run_with_parts_from_outside_records_them_and_resumes_bit_for_bit(folder, monkeypatch):
    arguments = [*SMALL, "--method=own.py:FedStep", "--eta=0.7", "--partition=lists.npz"]
    assert main([*arguments, "--run-dir=straight"]) == 0
    assert main([*arguments, "--run-dir=runs/cut"]) == 0
    recorded = yaml.safe_load((folder / "straight/config.yaml").read_text())["from_outside"]
    assert set(recorded) == {"own.py:FedStep", "lists.npz"}
    assert recorded["own.py:FedStep"]["object"] == "FedStep"
    cut_run = folder / "runs/cut"
    for path in (cut_run / "summary.json", *(cut_run / "checkpoints/2").rglob("*")):
        if path.is_file():
            path.unlink()
    monkeypatch.chdir(folder / "runs")  # from here the relative paths of the command lead nowhere
    assert main(["--resume=cut", "--quiet"]) == 0
    rows = [json.loads((run / "metrics.jsonl").read_text().splitlines()[-1]) for run in (folder / "straight", cut_run)]
    assert rows[0]["ga_per_class"] == rows[1]["ga_per_class"]
    assert rows[0]["loss"] == rows[1]["loss"]
    assert fp.load_run(cut_run).label == "FedStep"


def test_a_federation_and_public_images_by_relative_paths_are_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_recorded", {})
    monkeypatch.chdir(tmp_path)
    x, y = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 1), np.uint8), np.arange(20) % 4
    fp.write_federation("data/own", [(x, y, x, y)], name="mine")
    np.savez("plain.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    text = dump(*build({"dataset": "data/own", "partition": "natural", "public": "plain.npz", "public_samples": 20}))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    config, _ = parse_config(text)
    assert (config.dataset, sources.name_of(config.dataset)) == ("data/own", "mine")
    federation = federate(config)
    np.testing.assert_array_equal(federation.dataset.x_train, x)
    assert public_images(config, federation).shape == (20, 8, 8, 1)
    assert set(origins_of(config)) == {"data/own", "plain.npz"}


@pytest.mark.thorough
def test_a_run_is_not_resumed_if_a_file_from_outside_has_changed_or_is_gone(folder):
    main([*SMALL, "--method=own.py:FedStep", "--partition=lists.npz", "--run-dir=run"])
    (folder / "own.py").write_text(METHOD + "# another line\n")
    refused("own.py has changed since this run began: put it back", read_run, folder / "run")
    (folder / "own.py").unlink()
    refused("own.py:FedStep of this run was in .*, which is gone", read_run, folder / "run")


@pytest.mark.parametrize("options", [[], ["--loggers=none", "--track=none"]], ids=["repaired", "left out"])
def test_a_run_whose_own_logger_fails_goes_on_with_another_one_or_without(folder, capsys, options):
    fails = 'if run.round == 2: raise RuntimeError("full")\n        self.file'
    (folder / "watch.py").write_text(PARTS.replace("self.file.write_text", f"{fails}.write_text"))
    watched = ["--loggers=watch.py:Log", "--track=watch.py:norm", "--model=mlp", "--clients=2", "--checkpoint-every=1"]
    with pytest.raises(RuntimeError, match="full"):
        main([*SMALL, *watched, "--run-dir=run"])
    (folder / "watch.py").write_text(PARTS)
    assert main(["--resume=run", *options]) == 0
    assert ("watch.py:norm has changed since the run in run began" in capsys.readouterr().err) == (not options)


@pytest.mark.thorough
def test_every_kind_of_part_can_be_named_by_an_import_path(folder):
    parts = ["--model=parts.py:Net", "--partition=parts.py:by_hand", "--augmentation=parts.py:half_black"]
    records = ["--track=parts.py:norm", "--loggers=parts.py:Log"]
    assert main([*SMALL, *parts, *records, "--clients=2", "--run-dir=run"]) == 0
    run = folder / "run"
    assert (run / "own.log").read_text() == "2"
    assert (run / "track_norm.png").exists()
    assert json.loads((run / "track.jsonl").read_text().splitlines()[-1])["parts.py:norm"]["global"]["norm"] > 0
    recorded = yaml.safe_load((run / "config.yaml").read_text())["from_outside"]
    assert {name.removeprefix("parts.py:") for name in recorded} == {"Net", "by_hand", "half_black", "norm", "Log"}


@pytest.mark.thorough
def test_every_kind_of_part_can_be_named_as_it_was_registered(folder, monkeypatch):
    decorators = [name for name in dir(fp) if name.startswith("register_")]
    for decorator in decorators:
        names = getattr(fp, decorator).__self__
        monkeypatch.setattr(names, "data", dict(names.data))
    lines = [f"fp.{decorator}('own-{part.lower()}')({part})" for decorator, part in REGISTERED.items()]
    (folder / "named.py").write_text("\n".join([METHOD, PARTS, LION, RANDOM, *lines]))
    load_object("named.py:Net")
    parts = ["--model=own-net", "--dataset=own-random", "--partition=own-by_hand", "--augmentation=own-half_black"]
    given = [*SMALL, *parts, "--track=own-norm", "--loggers=own-log", "--clients=2", "--train-samples=60"]
    assert main([*given, "--method=own-fedstep", "--run-dir=method"]) == 0
    assert main([*given, "--method=fedavg+own-lion", "--run-dir=server"]) == 0
    recorded = {}
    for run in (folder / "method", folder / "server"):
        assert (run / "own.log").read_text() == "2"
        assert json.loads((run / "track.jsonl").read_text().splitlines()[-1])["own-norm"]["global"]["norm"] > 0
        recorded |= yaml.safe_load((run / "config.yaml").read_text())["from_outside"]
    assert sorted(REGISTERED) == decorators
    for decorator in decorators:  # as in another process, which finds them by what config.yaml says
        names = getattr(fp, decorator).__self__
        monkeypatch.setattr(names, "data", {name: names.data[name] for name in names.own})
    assert fp.load_run(folder / "method").label == "own-fedstep"
    assert fp.load_run(folder / "server").label == "fedavg+own-lion"
    assert {origin["object"] for origin in recorded.values()} == set(REGISTERED.values())


@pytest.mark.parametrize(("old", "new", "sentence"), [
    ("lambda seen, counts, labels, classes:", "lambda seen, counts, labels:", "'overall' must be a function of"),
    ('{"norm": float(seen)}', "float(seen)", "'overall' must return a dictionary of numbers"),
    ('{"norm": np.asarray(seen, float)}', '{"norm": 0.0}', "'per_client' must return a number of each client"),
    ("view.variables", "view.weights", "'of_client' fails: AttributeError: 'View' object has no attribute 'weights'"),
    ("return sum(", "return str(", "'of_client' must return arrays: TypeError: "),
])  # fmt: skip
def test_a_quantity_from_outside_that_is_written_wrongly_is_a_sentence(folder, capsys, old, new, sentence):
    (folder / "wrong.py").write_text(PARTS.replace(old, new))
    assert main([*SMALL, "--clients=2", "--model=mlp", "--track=wrong.py:norm", "--run-dir=run"]) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), sentence in err) == (1, True), err


def test_a_quantity_may_be_a_number_of_pythons(folder):
    (folder / "number.py").write_text(PARTS.replace("return sum(", "return 0.25 and 1 or ("))
    assert main([*SMALL, "--clients=2", "--model=mlp", "--track=number.py:norm", "--run-dir=run"]) == 0
    line = json.loads((folder / "run/track.jsonl").read_text().splitlines()[-1])
    assert line["number.py:norm"]["global"]["norm"] == 1


CHOSEN = """
from flax import struct
import fedjax_pcdd as fp

@struct.dataclass
class Chosen(fp.FedAvg):
    "FedAvg with a hyper-parameter that configure chooses."
    a: float = fp.hyperparameter(None, help="x", low=0.0)

    def configure(self, setting, hyper):
        return (self.replace(a=0.5) if self.a is None else self), []
"""


def test_a_hyperparameter_without_a_default_may_be_annotated_as_a_number(folder):
    (folder / "chosen.py").write_text(CHOSEN)
    run = ["--method=chosen.py:Chosen", "--clients=2", "--model=mlp", *SMALL]
    assert main([*run, "--run-dir=run"]) == 0
    assert main(["--resume=run"]) == 0
    assert fp.load_run("run").method.a == 0.5
    assert [parse([*run, *more])[1].a for more in ([], ["--a=none"], ["--a=0.25"])] == [None, None, 0.25]
    with pytest.raises(UserError, match="a must be at least 0"):
        parse([*run, "--a=-1"])


def test_the_help_of_a_method_with_a_field_without_a_default_says_so(folder, monkeypatch, capsys):
    (folder / "chosen.py").write_text(CHOSEN.replace(' = fp.hyperparameter(None, help="x", low=0.0)', ""))
    assert main(["--method=chosen.py:Chosen", "--help"]) == 0
    assert re.search(r"--a FLOAT +\(no default\)", capsys.readouterr().out)
    monkeypatch.setitem(methods.METHODS.data, "chosen", load_object("chosen.py:Chosen"))
    assert main(["--list-methods"]) == 0
    assert main(["--method=chosen+sam+adam", "--a=0.5", "--clients=2", "--model=mlp", *SMALL]) == 0


def test_hyperparameters_of_a_method_from_outside_are_options(folder, capsys):
    config, method = parse(["--method=own.py:FedStep", "--eta=0.25", "--loud"])
    assert (method.eta, method.loud) == (0.25, True)
    assert run_folder(config).name.startswith("FedStep-digits-")
    assert main(["--method=own.py:FedStep", "--help"]) == 0
    assert "rate of the server" in capsys.readouterr().out


def test_a_switch_of_the_method_that_is_named_last_takes_no_value(folder):
    assert parse(["--method=fedavg", "--method=own.py:FedStep", "--loud"])[1].loud
    assert parse(["--method", "own.py:FedStep", "--loud", "--eta=0.25"])[1].loud


def test_a_wrapper_applies_to_a_method_from_outside(folder):
    _, method = build({"method": "own.py:FedStep+prototypes", "prototype_mu": 0.1})
    assert method.traits().summary is not None


def test_mistakes_in_an_import_path_are_reported_in_one_sentence(folder):
    refused("own.py defines no 'FedStop': did you mean 'FedStep'", methods.get, "own.py:FedStop")
    refused("there is no file nowhere.py: check the path", methods.get, "nowhere.py:FedStep")
    build = functools.partial(models.build, num_classes=3, image_shape=(8, 8, 1))
    for find in (methods.get, build, sources.load, partition.check_name):
        refused("of a file name the object too, as own.py:NAME", find, "own.py")
    refused("nowhere:Net cannot be imported: ModuleNotFoundError", load_object, "nowhere:Net")
    refused("parts.py:Net is not a method: derive a dataclass from fp.Method", methods.get, "parts.py:Net")
    (folder / "bare.py").write_text("import fedjax_pcdd as fp\n\n\nclass Keep(fp.FedAvg):\n    pass\n")
    refused("Keep is not a dataclass: write @flax.struct.dataclass above", lambda: methods.get("bare.py:Keep")())
    (folder / "broken.py").write_text("1 / 0")
    refused("broken.py:X cannot be imported: ZeroDivisionError: division by zero", load_object, "broken.py:X")
    refused("must be a Flax module, or what returns one", build, "parts.py:norm_of")
    refused("must be a function that returns a Dataset", sources.load, "builtins:dict")


def test_an_error_in_code_from_outside_is_one_sentence_that_names_the_code(folder):
    (folder / "exits.py").write_text("import sys\n\nsys.exit(3)\n")
    refused("exits.py:X cannot be imported: SystemExit: 3.", load_object, "exits.py:X")
    (folder / "fails.py").write_text("N = None\n\n\ndef fails(*given):\n    raise KeyError('wards')\n")
    refused("data set fails.py:fails fails: KeyError: 'wards'.", sources.load, "fails.py:fails")
    split = functools.partial(partition.partition, y_train=LABELS, y_test=LABELS)
    refused("partition builtins:exit fails: SystemExit", split, "builtins:exit")
    for name in ("fails.py:N", "numpy:pi"):
        refused(f"partition {name} must be a function of some of y_train", split, name)
        build_pipeline = functools.partial(augment.pipeline, "x", True, (8, 8, 1), own=name)
        refused(f"augmentation {name} must be a function of an image and a key", build_pipeline)
    config, _ = build({"loggers": "os.path:join,"})
    refused("there is no logger '': there are none by name", loggers.check, config)
    config, _ = build({"loggers": "os.path:join"})
    refused("logger os.path:join fails: TypeError", loggers.made, config, folder)


STOPS = """
def stops(folder, options):
    return Stops()

class Stops(fp.Callback):
    def on_start(self, run):
        self.rounds = []

    def on_round(self, run, report):
        self.rounds.append(run.round)
        return True

    def on_end(self, run):
        print(self.rounds)

def stopping(folder, options):
    return fp.EarlyStopping()
"""


@pytest.mark.thorough
def test_a_logger_ends_no_run_and_one_with_a_state_is_refused(folder, capsys):
    (folder / "stops.py").write_text("import fedjax_pcdd as fp\n" + STOPS)
    model = ["--model=mlp", "--clients=2"]
    assert main([*SMALL, *model, "--loggers=stops.py:stops", "--run-dir=run"]) == 0
    assert "[1, 2]" in capsys.readouterr().out
    config, _ = build({"loggers": "stops.py:stopping"})
    refused("logger stops.py:stopping has a state, and loggers are in no checkpoint: ", loggers.made, config, folder)


def test_a_decorator_adds_a_name_and_accepts_the_same_definition_again():
    method_registry = Registry("method", "methods", {"fedavg": 1})
    assert method_registry.register("mine")(Registry) is Registry
    method_registry.register("mine")(Registry)  # as when a notebook cell is run again
    refused("there is a method 'mine' already", method_registry.register("mine"), EntryPoint)
    refused("cannot be the name of a method", method_registry.register, "a:b")
    assert (method_registry.find("mine"), list(method_registry)) == (Registry, ["fedavg", "mine"])


def run_cell():
    """The class that a notebook cell defines, a new one each time that the cell is run."""

    class Mine:
        pass

    return Mine


def test_a_class_from_a_notebook_cell_that_is_run_again_replaces_the_earlier_one():
    method_registry, classes = Registry("method", "methods"), [run_cell(), run_cell()]
    assert [method_registry.register("mine")(cls) for cls in classes] == classes
    assert method_registry.find("mine") is classes[1]


def test_a_file_is_imported_once_for_each_content_and_leaves_sys_path_unchanged(tmp_path):
    file, path = tmp_path / "mine.py", list(sys.path)
    file.write_text("class Mine:\n    number = 1\n")
    first = load_object(f"{file}:Mine")
    assert load_object(f"{file}:Mine") is first
    file.write_text("class Mine:\n    number = 2\n")
    assert (first.number, load_object(f"{file}:Mine").number) == (1, 2)
    file.write_text("1 / 0")
    refused("ZeroDivisionError", load_object, f"{file}:Mine")
    assert sys.path == path


def test_an_import_ignores_bytecode_of_an_earlier_content_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for number in (1, 2):
        (tmp_path / "mine.py").write_text(f"class Mine:\n    number = {number}\n")
        os.utime(tmp_path / "mine.py", (0, 0))  # as after a copy that keeps times, or two edits within a second
        assert load_object(f"{tmp_path / 'mine.py'}:Mine").number == number


def test_a_name_that_is_not_registered_is_loaded_from_where_a_run_recorded_it(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("class Mine:\n    number = 1\n")
    monkeypatch.setattr(registry, "_recorded", {})
    method_registry = Registry("method", "methods", {"fedavg": run_cell()})
    registry.recall({name: registry.Origin(str(tmp_path / "mine.py"), "Mine", "") for name in ("mine", "fedavg")})
    assert method_registry.find("mine").number == 1
    assert method_registry.find("fedavg") is method_registry["fedavg"]
    assert methods.suffixes_of("mine+sam+lion.py:Lion") == ["sam", "lion.py:Lion"]


def install(folder, package, points):
    """Write the metadata that pip leaves when it installs a package in a folder of modules."""
    info = folder / f"{package}-1.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
    info.joinpath("entry_points.txt").write_text("\n".join(["[fedjax_pcdd.methods]", *points]))


def test_entry_points_are_found_when_a_name_is_looked_up(tmp_path, monkeypatch):
    method_registry = Registry("method", "methods", {"fedavg": 1})
    names = list(method_registry)
    install(tmp_path, "one", ["theirs = fractions:Fraction", "broken = nowhere:X"])
    assert list(method_registry) == names
    monkeypatch.syspath_prepend(tmp_path)
    assert list(method_registry) == [*names[:1], "theirs", "broken", *names[1:]]
    assert method_registry.find("theirs").__name__ == "Fraction"
    refused("method 'broken' .nowhere:X. cannot be imported: ModuleNotFoundError", method_registry.find, "broken")
    refused("there is no method 'their': did you mean 'theirs'", method_registry.find, "their")
    assert "theirs" not in Registry("model", "models")


def test_a_broken_package_does_not_affect_the_other_methods(tmp_path, monkeypatch):
    install(tmp_path, "one", ["broken = nowhere:X", "other = fractions:Fraction"])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(methods.METHODS, "data", dict(methods.METHODS.data))
    assert "broken" in methods.METHODS
    assert not {"broken", "other"} & methods.every().keys()
    assert scan_and_configure(["--method=fedprox", "--mu=0.5"])[1].mu == 0.5
    refused("mu belongs to fedprox", scan_and_configure, ["--method=fedavg", "--mu=0.5"])
    assert "fedprox" in information({"list_methods": "true"})
    refused("method 'broken' .nowhere:X. cannot be imported", scan_and_configure, ["--method=broken"])


def scan_and_configure(argv):
    return configure(scan(argv))


def test_a_package_installed_after_the_first_look_up_is_found(tmp_path, monkeypatch):
    method_registry = Registry("method", "methods", {"fedavg": 1})
    monkeypatch.syspath_prepend(tmp_path)
    assert "theirs" not in method_registry
    os.utime(tmp_path, (0, 0))
    install(tmp_path, "two", ["theirs = fractions:Fraction"])
    assert method_registry.find("theirs").__name__ == "Fraction"


def test_metadata_of_packages_is_read_once(monkeypatch):
    method_registry, reads = Registry("method", "methods", {"fedavg": 1}), []
    monkeypatch.setattr(registry, "entry_points", lambda group: reads.append(group) or ())
    monkeypatch.syspath_prepend("no-such-folder")
    assert [name for _ in range(3) for name in method_registry] == ["fedavg"] * 3
    assert (len(method_registry), reads) == (1, ["fedjax_pcdd.methods"])


def test_one_name_of_two_kinds_of_parts_is_refused_only_if_both_come_from_outside(folder, monkeypatch):
    monkeypatch.setitem(models.BACKBONES, "mine", load_object("parts.py:Net"))
    config, _ = build({"model": "mine", "dataset": "mine", "loggers": "mine"})
    assert origins_of(config)["mine"].object == "Net"
    monkeypatch.setitem(loggers.LOGGERS, "mine", load_object("parts.py:Log"))
    refused("'mine' names two parts from outside, Net and Log: register one under another name", origins_of, config)


def test_an_instance_is_named_by_the_module_that_holds_it(folder):
    (folder / "instances.py").write_text(PARTS + "import functools\nwide, partly = Net(), functools.partial(Net)\n")
    for name in ("wide", "partly", "norm"):
        part = load_object(f"instances.py:{name}")
        assert registry.origin_of(part) == registry.origin_of_file(folder / "instances.py", name)
    nameless = type(load_object("instances.py:wide"))()
    assert registry.origin_of(nameless) == registry.origin_of_file(folder / "instances.py")


def test_only_methods_from_outside_have_an_origin(folder):
    assert all(registry.origin_of(cls) is None for cls in methods.METHODS.values())
    assert registry.origin_of(methods.get("own.py:FedStep")).path == str(folder / "own.py")


LABELS = np.repeat([0, 1], 10)


def test_test_samples_follow_the_training_samples_class_by_class():
    train = (np.arange(0, 5), np.arange(5, 20))
    test = lists.following(train, LABELS, np.repeat([0, 1], 4))
    assert [x.tolist() for x in test] == [[0, 1], [2, 3, 4, 5, 6, 7]]


def test_a_saved_partition_can_be_used_as_a_partition(folder):
    digits = fp.load_dataset("digits")
    federation = fp.partition(digits, "dirichlet", clients=3, seed=1)
    federation.save(folder / "kept.npz")
    loaded = fp.partition(digits, "kept.npz")
    for loaded_lists, original_lists in zip(loaded.partition, federation.partition, strict=True):
        np.testing.assert_array_equal(loaded_lists.flat, original_lists.flat)
        np.testing.assert_array_equal(loaded_lists.sizes, original_lists.sizes)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"train_0": np.arange(3), "train_2": np.arange(3)}, "holds no partition: it needs train_0, train_1"),
        ({"train_0": np.array([0, 99])}, "the training list of client 0 names samples outside of .0, 20."),
        ({"train_0": np.array([0.5])}, "must be integers .n., not float64 .1."),
        ({"train_0": np.array(0), "train_1": np.array(1)}, "list of client 0 must be integers .n., not int64 .."),
        (
            {"train": np.arange(0), "train_size": [], "test": np.arange(0), "test_size": []},
            "must give a list of samples",
        ),
        ({"train_0": np.arange(3), "train_1": np.arange(3), "test_0": np.arange(3)}, "as many test lists or none"),
        ({"train_0": np.arange(3), "test_1": np.arange(3)}, "test_1 belongs to no client: number the lists"),
        ({"train_0": np.arange(3), "test0": np.arange(3)}, "test0 belongs to no client: number the lists"),
    ],
)
def test_index_lists_that_do_not_fit_are_refused(arrays, sentence, tmp_path):
    np.savez(tmp_path / "bad.npz", **arrays)
    refused(sentence, lambda: partition.partition(str(tmp_path / "bad.npz"), LABELS, LABELS))


def test_labels_beside_index_lists_of_ones_own_are_passed_over(tmp_path):
    np.savez(tmp_path / "own.npz", train_0=np.arange(12), train_1=np.arange(12, 20), labels=LABELS)
    split = partition.partition(str(tmp_path / "own.npz"), LABELS, LABELS)
    assert [len(x) for x in split.train] == [12, 8]


def test_a_partition_function_receives_only_the_arguments_it_names(folder):
    arguments = {"clients": 4, "seed": 0, "num_classes": 2, "groups": None}
    parts = partition.partition("parts.py:by_hand", LABELS, LABELS, **arguments)
    assert [len(x) for x in parts.train] == [5, 5, 5, 5]
    refused(
        "asks asks for wards, which there is not",
        lambda: partition.partition("parts.py:asks", LABELS, LABELS, **arguments),
    )


@pytest.mark.parametrize(
    "returned", [None, 3, [], (), iter([LABELS]), ([np.arange(3), np.arange(2)], None), [[], [[0], [1, 2]]]]
)
def test_a_partition_function_that_returns_no_valid_lists_is_refused(returned, monkeypatch):
    monkeypatch.setitem(partition.PARTITIONS.data, "odd", lambda y_train: returned)
    refused(
        "odd(: the training list|.*must give a list of samples)", lambda: partition.partition("odd", LABELS, LABELS)
    )


def test_a_partition_function_may_change_its_labels_in_place(monkeypatch):
    monkeypatch.setitem(partition.PARTITIONS.data, "sorts", lambda y_train: y_train.sort() or [y_train])
    labels = LABELS[::-1].copy()
    partition.partition("sorts", labels, LABELS)
    np.testing.assert_array_equal(labels, LABELS[::-1])


def test_a_partition_function_that_takes_clients_must_return_that_many_lists(monkeypatch):
    monkeypatch.setitem(partition.PARTITIONS.data, "three", lambda y_train, clients: np.array_split(y_train, 3))
    assert len(partition.partition("three", LABELS, LABELS, clients=3).train) == 3
    refused(
        "three gives 3 lists where `?clients`? is 4", lambda: partition.partition("three", LABELS, LABELS, clients=4)
    )


def test_a_partition_function_that_does_not_take_clients_determines_their_number(tmp_path):
    (tmp_path / "split.py").write_text(
        "import numpy as np\n\ndef three(y_train):\n    return np.array_split(np.arange(len(y_train)), 3)\n"
    )
    split = [f"--partition={tmp_path}/split.py:three", "--rounds=1", "--local-epochs=1", "--quiet"]
    assert main([*split, f"--run-dir={tmp_path}/run"]) == 0
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["clients"] is None
    digits = fp.load_dataset("digits")
    refused(
        "three gives 3 lists where `?clients`? is 7: drop it",
        lambda: fp.partition(digits, f"{tmp_path}/split.py:three", clients=7),
    )


def test_only_options_that_a_partition_function_does_not_take_have_no_effect(monkeypatch, recwarn):
    def own(y_train, clients, beta):
        return np.array_split(np.arange(len(y_train)), clients)

    monkeypatch.setitem(partition.PARTITIONS.data, "own", own)
    digits = fp.load_dataset("digits")
    assert fp.partition(digits, "own", beta=0.7).num_clients == 10
    assert not [w for w in recwarn if "no effect" in str(w.message)]
    with pytest.warns(match="classes_per_client=3 has no effect with kind=own"):
        fp.partition(digits, "own", classes_per_client=3)


def test_a_hyperparameter_must_not_have_the_name_of_an_option(tmp_path):
    (tmp_path / "clash.py").write_text(
        "import fedjax_pcdd as fp\nfrom flax import struct\n\n@struct.dataclass\nclass Clash(fp.Method):\n"
        "    lr: float = fp.hyperparameter(0.5, help='x')\n"
    )
    name = f"{tmp_path}/clash.py:Clash"
    sentence = "Clash has a hyper-parameter lr, as an option of every run: rename it"
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    refused(sentence, lambda: fp.simulate(federation, methods.get(name)(), rounds=1))
    assert main([f"--method={name}", "--lr=0.02", f"--run-dir={tmp_path / 'run'}"]) == 2


def test_a_hyperparameter_must_not_have_the_name_of_a_function():
    @struct.dataclass
    class Twice(fp.Method):
        penalty: float = fp.hyperparameter(0.5, help="x")

        def penalty(self, variables, outputs, batch, context):  # noqa: F811
            return 0.0

    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    sentence = "Twice has a hyper-parameter and a function penalty: rename one of them"
    refused(sentence, lambda: fp.simulate(federation, Twice(), rounds=1))


def test_index_lists_determine_the_number_of_clients(folder):
    refused(
        "lists.npz has 3 clients, not 4: drop", lambda: fp.partition(fp.load_dataset("digits"), "lists.npz", clients=4)
    )


def test_an_npz_file_is_loaded_as_a_data_set_by_its_path(folder):
    x, y = np.zeros((6, 4, 4), np.uint8), np.arange(6) % 3
    np.savez(folder / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert (sources.load("mine.npz").name, sources.load("mine.npz").num_classes) == ("mine", 3)
    refused("there is no file|cannot be used|no readable npz", sources.load, "none.npz")


def test_an_augmentation_from_outside_is_applied_only_to_training_images(folder):
    from fedjax_pcdd.data.augment import pipeline, prepare

    half_black = pipeline("digits", True, (8, 8, 1), own="parts.py:half_black")
    images = jnp.full((2, 8, 8, 1), 255, jnp.uint8)
    trained, tested = (prepare(half_black, images, jax.random.key(0), train=train) for train in (True, False))
    assert (float(trained.mean()), float(tested.mean())) == (0.5, 1.0)


@pytest.mark.parametrize(
    ("augmentation", "sentence"),
    [
        (lambda image, key: image / 255.0, r"must return an image of uint8 \[8, 8, 1\], not float32 \[8, 8, 1\]"),
        (lambda image, key: image[:4], r"must return an image of uint8 \[8, 8, 1\], not uint8 \[4, 8, 1\]"),
        (lambda image, key: None, "must return an image of uint8 .*, not NoneType"),
        (lambda image: image, "fails on an image of uint8 .* and a key: TypeError"),
        (
            lambda image, key: np.flip(np.asarray(image)),
            "fails on an image of uint8 .* and a key: TracerArrayConversion",
        ),
    ],
)
def test_an_augmentation_that_returns_no_valid_image_is_refused(augmentation, sentence):
    images = np.zeros((20, 8, 8, 1), np.uint8)
    federation = fp.partition(fp.from_arrays(images, LABELS, images, LABELS), "iid", clients=2)
    refused(
        f"augmentation <lambda> {sentence}",
        lambda: fp.simulate(federation, pipeline=fp.Pipeline(own=augmentation), rounds=1),
    )


def test_an_augmentation_of_text_codes_is_refused():
    from fedjax_pcdd.data.augment import pipeline

    refused("the codes of a text are not augmented", lambda: pipeline("t", True, (8, 1, 1), text=True, own="a.py:b"))


def test_a_registered_server_optimiser_wraps_a_method_that_averages(monkeypatch):
    @struct.dataclass
    class Signs(fp.ServerOptimised):
        """w <- w - server_lr * sign(w - m)."""

        def server_rule(self):
            return optax.scale_by_sign()

    monkeypatch.setitem(methods.SERVER_OPTIMISERS, "signs", Signs)
    config, method = build({"method": "fedprox+signs", "mu": 0.5, "server_lr": 0.01})
    assert (config.method, method.mu, method.server_lr) == ("fedprox+signs", 0.5, 0.01)
    assert methods.SERVER_OPTIMISERS.group == "fedjax_pcdd.server_optimisers"
    assert methods.get("fedprox+signs") is methods.get("fedprox+signs")
    with pytest.raises(UserError, match="did you mean 'signs'"):
        methods.get("fedprox+sign")


@pytest.mark.thorough
def test_a_run_records_a_server_optimiser_named_by_its_path_and_checks_it(tmp_path, capsys):
    file = tmp_path / "lion.py"
    file.write_text(LION)
    name = f"fedavg+{file}:Lion"
    options = ["--dataset=digits", "--rounds=1", "--local-epochs=1", "--lanes=1", "--clients=3", "--quiet"]
    assert main([f"--method={name}", "--server-lr=0.01", *options, f"--run-dir={tmp_path / 'run'}"]) == 0
    (origin,) = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["from_outside"].values()
    assert (origin["path"], origin["object"]) == (str(file), "Lion")
    assert methods.get(name) is methods.get(name)
    assert methods.suffixes_of(f"fedprox+prototypes+{file}:Lion") == ["prototypes", f"{file}:Lion"]
    file.write_text(LION.replace("Signs", "The signs"))
    assert main([f"--resume={tmp_path / 'run'}"]) == 2
    assert "lion.py has changed since this run began" in capsys.readouterr().err
    refused(
        "cannot stand behind a method: derive a dataclass from fp.ServerOptimised", methods.get, "fedavg+json:loads"
    )


def test_a_suffix_that_is_no_server_optimiser_does_not_affect_the_others(monkeypatch):
    monkeypatch.setitem(methods.SERVER_OPTIMISERS.data, "odd", type("Odd", (), {}))
    assert issubclass(methods.get("fedavg+adam"), fp.Method)
    refused("odd cannot stand behind a method: derive a dataclass from fp.ServerOptimised", methods.get, "fedavg+odd")
    refused(r"there is no .\+odder.: choose one of prototypes", methods.get, "fedavg+odder")


@pytest.mark.parametrize("name", [*methods.METHODS, "fedavg+adam", "moon+prototypes"])
def test_the_docstring_of_a_method_describes_its_hyperparameters(name):
    text = inspect.getdoc(methods.get(name))
    hyperparameters = options_of(methods.get(name))
    assert all(f"{option.help}" in text and f"\n  {option.name}" in text for option in hyperparameters.values())
    assert ("Hyper-parameters:" in text) == bool(hyperparameters)
    assert not text.startswith("\n")


def test_the_docstring_of_a_method_states_defaults_and_bounds():
    assert "\n  mu (mu): weight of the proximal term [at least 0]; default: 0.01." in inspect.getdoc(fp.FedProx)
