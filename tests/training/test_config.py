"""The run's configuration: what it refuses, and that its YAML is complete."""

import json
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pcdd.api import runs
from fedjax_pcdd.errors import UserError, as_path
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.fedgela import FedGELA
from fedjax_pcdd.methods.fedmr import FedMR
from fedjax_pcdd.training.config import (
    GROUPS,
    RESERVED,
    RUN,
    RunConfig,
    build,
    difference,
    dump,
    parse_config,
    partition_tag,
    run_folder,
    values,
)
from fedjax_pcdd.training.fields import convert_all, load_mapping, options_of
from fedjax_pcdd.training.options import configure
from fedjax_pcdd.training.presets import read_run


@pytest.mark.parametrize("name", METHODS)
def test_no_hyperparameter_shadows_a_run_option(name):
    assert not options_of(METHODS[name]).keys() & {*RUN, *RESERVED}


@pytest.mark.parametrize("name", [name for name in RUN if name != "method"])
def test_every_run_option_has_a_help_text_and_a_group(name):
    assert RUN[name].help
    assert RUN[name].group in GROUPS


@pytest.mark.parametrize("name", METHODS)
def test_every_hyperparameter_has_a_help_text(name):
    assert all(option.help for option in options_of(METHODS[name]).values())


@pytest.mark.parametrize("name", METHODS)
def test_defaults_survive_the_round_trip_through_yaml(name):
    config_and_method = RunConfig(method=name), METHODS[name]()
    assert parse_config(dump(*config_and_method)) == config_and_method


def test_dump_is_complete_and_flat():
    config_and_method = RunConfig(method="fedmr"), FedMR()
    recorded = yaml.safe_load(dump(*config_and_method))
    assert list(recorded) == [*RUN, *options_of(FedMR)]
    assert not any(isinstance(value, dict | list) for value in recorded.values())


numbers = st.floats(min_value=1e-38, max_value=3e38)
names = st.text(min_size=1, max_size=20).filter(lambda text: text.lower() != "none" and text.isprintable())


@pytest.mark.thorough
@settings(max_examples=40, deadline=None)
@given(
    lr=numbers, clip=st.sampled_from(["method", "none"]) | numbers, folder=names, dataset=names, mu1=st.none() | numbers
)
def test_any_value_survives_the_round_trip_through_yaml(lr, clip, folder, dataset, mu1):
    config = RunConfig(
        method="fedmr", lr=lr, grad_clip=clip, data_dir=Path(os.path.expanduser(folder)), dataset=dataset, lanes=3,
        retry=False, cohort=4,
    )  # fmt: skip
    config_and_method = config, FedMR(mu1=mu1, lite=0, terms="intra")
    assert parse_config(dump(*config_and_method)) == config_and_method


def test_a_tilde_in_a_path_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert convert_all({"run_dir": "~/a"}, RUN, "X")["run_dir"] == tmp_path / "a"
    assert as_path("~/a", "run_dir") == tmp_path / "a"


def test_types_survive_the_round_trip_through_yaml():
    method = FedGELA(ew=10.0, layers=0, gamma="class")
    config_and_method = parse_config(dump(RunConfig(method="fedgela", lanes=2, run_dir=Path("a/b")), method))
    recorded = values(*config_and_method)
    types = {name: type(recorded[name]) for name in ("ew", "layers", "lanes", "retry", "seed", "lr")}
    assert types == {"ew": float, "layers": int, "lanes": int, "retry": bool, "seed": int, "lr": float}
    assert recorded["run_dir"] == Path("a/b")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lr: [1, 2]", "'lr' in X takes one value, not several."),
        ("bta: 1", "unknown key 'bta' in X: did you mean 'beta'?"),
        ("mu1: 1", "unknown key 'mu1' in X: "),
        ("rounds: ten", "'rounds' in X takes an integer, not 'ten'."),
        ("rounds: 2.5", "'rounds' in X takes an integer, not '2.5'."),
        ("rounds:", "'rounds' in X takes an integer, so it cannot be empty."),
        ("lr: .nan", "'lr' in X must be a finite number, not nan."),
        ("method: fedgella", "there is no method 'fedgella': did you mean 'fedgela'?"),
        ("{", "X is not valid YAML at line 1: correct it."),
        ("lr-decay: 0.2\nlr_decay: 0.5", "X gives the key 'lr_decay' twice: correct it."),
        ("- 1", "X must hold `name: value` lines, not '[1]'."),
    ],
)
def test_an_invalid_configuration_file_is_refused_in_one_sentence(text, sentence):
    with pytest.raises(UserError) as error:
        parse_config(text, "X")
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


ODD = """
from __future__ import annotations
import enum
from pathlib import Path
from typing import TYPE_CHECKING
import jax
from flax import struct
import fedjax_pcdd as fp
if TYPE_CHECKING:
    from jax import Array

class Kind(str, enum.Enum):
    A = "a"

@struct.dataclass
class Sized(fp.Method):
    sizes: tuple[int, ...] = fp.hyperparameter((1, 2), help="s", static=True)

@struct.dataclass
class Chosen(fp.Method):
    kind: Kind = fp.hyperparameter(Kind.A, help="k", static=True)

@struct.dataclass
class Hidden(fp.Method):
    table: Array | None = fp.hyperparameter(None, help="t")

@struct.dataclass
class Needy(fp.Method):
    mu: float = struct.field(kw_only=True)

@struct.dataclass
class United(fp.Method):
    mu: float | jax.Array = fp.hyperparameter(0.1, help="m")

@struct.dataclass
class Filed(fp.Method):
    path: Path | None = fp.hyperparameter(None, help="p", static=True)
"""


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"method": "Sized"},
            "sizes, a tuple, cannot be an option: declare it as int, float, bool, str, Path or Literal",
        ),
        ({"method": "Sized", "sizes": "1,2"}, "sizes cannot be an option: declare it as"),
        ({"method": "Chosen"}, "kind, <Kind.A: 'a'>, cannot be an option"),
        ({"method": "Chosen", "kind": "a"}, "kind cannot be an option"),
        (
            {"method": "Hidden"},
            "Hidden has a field of an unknown type (name 'Array' is not defined): import it outside",
        ),
        ({"method": "Needy"}, "mu has no default: give its value."),
    ],
    ids=lambda value: "=".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_hyperparameter_that_cannot_be_an_option_is_refused(tmp_path, options, sentence):
    (tmp_path / "odd.py").write_text(ODD)
    with pytest.raises(UserError) as error:
        configure(options | {"method": f"{tmp_path}/odd.py:{options['method']}"})
    assert str(error.value).startswith(sentence)


def test_of_a_union_an_option_takes_the_plain_types(tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    assert configure({"method": f"{tmp_path}/odd.py:United", "mu": "0.5"})[1].mu == 0.5


@pytest.mark.thorough
def test_a_hyperparameter_may_be_a_path(tmp_path):
    (tmp_path / "odd.py").write_text(ODD)
    run, method = configure(
        {"method": f"{tmp_path}/odd.py:Filed", "path": "a/b", "dataset": "digits", "model": "mlp", "rounds": "1"}
        | {"local_epochs": "1", "fine_tune_epochs": "0", "quiet": "true", "run_dir": str(tmp_path / "run")}
    )
    runs.run(run, method)
    assert json.loads((tmp_path / "run/resolved.json").read_text())["hyperparameters"] == {"path": "a/b"}
    assert read_run(tmp_path / "run")[1] == method


@pytest.mark.parametrize("text", ["weight-decay: 1e-5", "weight_decay: '1e-5'", "weight_decay: 0.00001"])
def test_keys_with_hyphens_and_numbers_in_any_notation_are_accepted(text):
    assert parse_config(text)[0].weight_decay == 1e-5


@pytest.mark.parametrize(
    "option",
    [
        {"beta": 0.0},
        {"beta": float("inf")},
        {"rounds": 0},
        {"clients": 0},
        {"classes_per_client": 0},
        {"batch_size": 0},
        {"local_epochs": 0},
        {"lr": 0.0},
        {"lr": float("nan")},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"weight_decay": -1e-9},
        {"cohort": 0},
        {"cohort": 11},
        {"lanes": 0},
        {"eval_every": 0},
        {"keep": 1},
        {"grad_clip": 0.0},
        {"seed": -1},
        {"seed": 2**32},
    ],
)
def test_a_value_out_of_bounds_is_refused(option):
    with pytest.raises(UserError, match=next(iter(option))):
        RunConfig(**option)


def test_a_cohort_of_all_clients_is_accepted():
    assert RunConfig(clients=7, cohort=7).cohort == 7


def test_difference_names_the_fields_that_differ():
    recorded = RunConfig(method="fedmr"), FedMR()
    changed = RunConfig(method="fedmr", lr=0.1), FedMR(mu2=1.0)
    assert difference(recorded, changed) == ["lr", "mu2"]


def test_equal_runs_have_no_difference():
    assert difference((RunConfig(), FedMR()), (RunConfig(), FedMR())) == []


@pytest.mark.parametrize(
    ("options", "tag"),
    [
        ({}, "dirichlet0.1"),
        ({"partition": "pcdd", "clients": 5}, "P5C2"),
        ({"partition": "iid"}, "iid"),
        ({"partition": "natural"}, "natural"),
    ],
)
def test_the_partition_tag_has_the_scheme_and_its_parameters(options, tag):
    assert partition_tag(vars(RunConfig(**options))) == tag


def test_a_taken_run_folder_gets_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, folders = RunConfig(seed=4), []
    for _ in range(3):
        folders.append(str(run_folder(config)))
        run_folder(config).mkdir(parents=True)
    assert folders == [f"runs/fedavg-digits-dirichlet0.1-s4{end}" for end in ("", "-2", "-3")]


def test_a_given_run_folder_is_kept(tmp_path):
    assert run_folder(RunConfig(run_dir=tmp_path)) == tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 2**31}, "rounds must be at least 1 and at most 10000000, not 2147483648"),
        ({"train_samples": 2**40}, "train_samples must be at most 2147483647"),
        ({"clients": 10**9}, "clients must be at least 1 and at most 1000000"),
        ({"devices": 1000}, "devices must be at least 1 and at most 256"),
        ({"lr": 1e39}, "lr must be at most 3.4e"),
        ({"lr_steps": "5,3"}, "lr_steps=5,3 must be rising round numbers"),
        ({"lr_steps": "-1"}, "lr_steps=-1 must be rising round numbers"),
        ({"lr_steps": "5,x"}, "lr_steps=5,x must be rising round numbers"),
        ({"coordinator": "foo", "processes": 2, "process": 0}, "coordinator=foo must be HOST:PORT"),
    ],
)
def test_impossible_options_are_refused_before_anything_is_loaded(options, message):
    with pytest.raises(UserError, match=message):
        build(options)


@pytest.mark.parametrize("name", ["run_dir", "resume", "data_dir"])
def test_an_empty_path_is_refused(name):
    with pytest.raises(UserError, match=f"'{name}' in X takes a path or none, not ''"):
        convert_all({name: ""}, RUN, "X")


@pytest.mark.parametrize("text", ["lr: 1\nlr: 2", "run: {lr: 1, lr: 2}", "a: " + "[" * 5000])
def test_yaml_with_a_key_given_twice_or_nested_too_deeply_is_refused(text):
    with pytest.raises(
        UserError, match=r"X is not valid YAML.*(the key 'lr' is given twice|nested too deeply).*: correct it"
    ):
        load_mapping(text, "X")


def test_names_of_files_that_are_not_utf8_are_read_as_they_were_written():
    options = {"data_dir": os.fsdecode(b"caf\xe9"), "method": "fedavg"}
    assert load_mapping(yaml.safe_dump(options), "X") == options
