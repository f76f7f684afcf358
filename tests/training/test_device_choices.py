"""Forms of convolutions that are timed on the device: which are tried, which is chosen, where it is kept and used."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pcdd.api import runs
from fedjax_pcdd.engine import tuning
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.models import convolution_table as choices
from fedjax_pcdd.models.classifier import Classifier, forward
from fedjax_pcdd.models.cnn import mcmahan_cnn
from fedjax_pcdd.models.convolution_table import Choices, Rule, as_json, from_json
from fedjax_pcdd.models.resnet import ResNet
from fedjax_pcdd.training import device_choices
from fedjax_pcdd.training import folder as records
from fedjax_pcdd.training.config import build

SHAPE, BATCH = (8, 8, 3), 4
RULE = Rule("gemm", "grouped")
SMALL = {
    "model": "mcmahan_cnn", "rounds": 2, "local_epochs": 1, "clients": 3, "train_samples": 60, "test_samples": 30,
    "batch_size": 8, "fine_tune_epochs": 0, "quiet": True, "lanes": 2, "min_samples": 1,
}  # fmt: skip


def small_resnet() -> Classifier:
    return Classifier(ResNet((1, 1), width=4, norm="batch"), 3)


def operations_of(model, lanes=2):
    return tuning.operations(model, SHAPE, BATCH, lanes, jnp.float32)


@pytest.fixture
def unmeasured(monkeypatch, tmp_path):
    """A device that the packaged table does not know, and an empty cache folder."""
    monkeypatch.setattr(device_choices, "table", dict)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fedjax_pcdd" / "convolutions"


@pytest.fixture
def timed(monkeypatch):
    """The operations that were timed, all of which get the rule `RULE`; a test may clear the list."""
    timed_operations = []

    def time_forms(operations, deadline):
        timed_operations.extend(operations)
        return Choices(tuple((operation, RULE) for operation in operations))

    monkeypatch.setattr(device_choices, "time_forms", time_forms)
    return timed_operations


def chosen_convolutions(recorded=None, messages=None, **options):
    config, _ = build({"method": "fedavg", **SMALL, **options})
    simulated = toy.simulation(model="mcmahan_cnn", lanes=1)
    say = messages.append if messages is not None else pytest.fail
    return device_choices.convolutions_of(config, simulated, simulated.start(), recorded, say)


def test_each_distinct_convolution_of_a_training_step_is_listed_once():
    operations = operations_of(small_resnet())
    assert len(set(operations)) == len(operations)
    layers = {
        (operation.window.kernel, operation.window.strides, operation.inputs, operation.outputs)
        for operation in operations
    }
    assert layers == {((3, 3), (1, 1), 3, 4), ((3, 3), (1, 1), 4, 4), ((3, 3), (2, 2), 4, 8), ((3, 3), (1, 1), 8, 8)}
    assert {(operation.batch, operation.lanes, operation.dtype) for operation in operations} == {(BATCH, 2, "float32")}
    # Each layer has all three operations, except that the images need no gradient.
    assert sorted((operation.name, operation.inputs) for operation in operations if operation.inputs == 3) == [
        ("forward", 3), ("weight_gradient", 3),
    ]  # fmt: skip
    assert len(operations) == 3 * len(layers) - 1


def test_the_convolutions_with_most_arithmetic_come_first():
    work = [
        operation.batch
        * np.prod([*operation.window.out, *operation.window.kernel, operation.inputs, operation.outputs])
        for operation in operations_of(small_resnet())
    ]
    assert work == sorted(work, reverse=True) != work[::-1]


@pytest.mark.thorough
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_short_measurement_gives_a_rule_to_every_operation(lanes):
    operations = operations_of(small_resnet(), lanes)[:2]
    measured = tuning.time_forms(operations, time.perf_counter() + 60)
    assert [operation for operation, _ in measured.timed] == operations
    assert from_json(json.loads(json.dumps(as_json(measured)))) == measured


def test_a_form_replaces_the_default_only_where_it_is_faster_by_a_tenth(monkeypatch):
    times = {"direct": 1.0, "gemm": 0.95, "rows": 2.0}
    monkeypatch.setattr(tuning, "_compiled", lambda name, operands: name)
    monkeypatch.setattr(tuning, "_seconds", lambda name, operands, deadline: times[name])
    names = {name: name for name in times}
    assert tuning._fastest(names, (), "direct", 0.0) == "direct"
    times["gemm"] = 0.9
    assert tuning._fastest(names, (), "direct", 0.0) == "gemm"


def test_a_form_that_the_compiler_refuses_is_no_candidate(monkeypatch):
    operation = operations_of(small_resnet(), lanes=1)[0]
    compute = tuning._compute

    def refuse(operation, form, a, b):
        if form != "gemm":
            raise jax.errors.JaxRuntimeError("INTERNAL: this cannot be compiled")
        return compute(operation, form, a, b)

    monkeypatch.setattr(tuning, "_compute", refuse)
    assert tuning._fastest_rule(operation, time.perf_counter() + 60).single == "gemm"


@pytest.mark.parametrize(("backend", "ways"), [("cpu", ["gemm", "grouped", "loop"]), ("gpu", ["gemm", "grouped"])])
def test_a_loop_over_lanes_is_a_candidate_on_a_cpu_only(monkeypatch, backend, ways):
    operation, tried = operations_of(small_resnet(), lanes=2)[0], []

    def fastest(candidates, operands, default, deadline):
        tried.append(sorted(candidates))
        return default

    monkeypatch.setattr(tuning, "_fastest", fastest)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    tuning._fastest_rule(operation, 0.0)
    assert tried[-1] == ways
    # Where lanes may be a loop over single convolutions, the forms of a single one are tried too.
    assert len(tried) == (2 if backend == "cpu" else 1)


def test_nothing_is_timed_after_the_deadline():
    assert tuning.time_forms(operations_of(small_resnet()), time.perf_counter() - 1) == Choices()


@pytest.mark.thorough
@pytest.mark.parametrize("rule", [Rule("gemm", "loop"), Rule("direct", "gemm")])
def test_a_model_computes_the_same_by_any_rule(rule):
    plain = small_resnet()
    rules = tuple((operation, rule) for operation in operations_of(plain))
    keys, images = jax.random.split(jax.random.key(0)), jax.random.normal(jax.random.key(1), (2, BATCH, *SHAPE))
    variables = jax.vmap(lambda key: plain.init(key, images[0], train=False))(keys)

    def gradient(model):
        def loss(variables, x):
            return jnp.sum(forward(model, variables, x, train=True)[0].logits ** 2)

        return jax.jit(jax.vmap(jax.grad(loss)))(variables, images)

    rules_taken = []
    original = Choices.rule
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Choices, "rule", lambda self, operation: rules_taken.append(original(self, operation)) or rules_taken[-1]
        )
        tuned_gradient = gradient(plain.clone(convolutions=Choices(rules)))
    assert rule in rules_taken
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), tuned_gradient, gradient(plain))


def test_an_operation_takes_the_rule_timed_with_the_nearest_number_of_lanes():
    few, many = (operations_of(small_resnet(), lanes)[0] for lanes in (2, 16))
    timed_rules = Choices(((few, Rule("gemm", "loop")), (many, Rule("gemm", "gemm"))))
    assert timed_rules.rule(few._replace(lanes=4)).lanes == "loop"
    assert timed_rules.rule(few._replace(lanes=40, batch=7)).lanes == "gemm"
    assert timed_rules.rule(few._replace(dtype="bfloat16")) == few._replace(dtype="bfloat16").default


@pytest.mark.thorough
def test_rules_that_were_timed_are_kept_for_the_next_run(unmeasured, timed):
    first = chosen_convolutions()
    assert {operation.name for operation in timed} == {"forward", "input_gradient", "weight_gradient"}
    assert first.timed == tuple((operation, RULE) for operation in timed)
    (path,) = unmeasured.iterdir()
    assert jax.__version__ in path.name
    timed.clear()
    assert chosen_convolutions() == first
    assert not timed
    chosen_convolutions(lanes=1)  # for other operations no rule is known
    assert {operation.lanes for operation in timed} == {1}
    timed.clear()
    assert chosen_convolutions() == first
    assert not timed


@pytest.mark.thorough
def test_rules_that_another_run_has_timed_meanwhile_stay(unmeasured, timed, monkeypatch):
    cache = device_choices.Kept(jax.local_devices()[0].device_kind, pytest.fail)
    other_operation, time_forms = operations_of(small_resnet())[0], device_choices.time_forms

    def meanwhile(operations, deadline):
        cache.write({other_operation: RULE})
        return time_forms(operations, deadline)

    monkeypatch.setattr(device_choices, "time_forms", meanwhile)
    chosen_convolutions()
    assert cache.read().keys() == {other_operation, *timed}


@pytest.mark.thorough
@pytest.mark.parametrize(("lanes", "expected"), [("auto", 3), (2, 2), (9, 3)])
def test_convolutions_are_timed_with_no_more_lanes_than_jobs(unmeasured, timed, lanes, expected):
    chosen_convolutions(lanes=lanes)
    assert {operation.lanes for operation in timed} == {expected}


@pytest.mark.thorough
def test_nothing_is_timed_where_the_table_has_the_device_or_with_tune_off(unmeasured, timed, monkeypatch):
    assert chosen_convolutions(tune="off") is None
    monkeypatch.setattr(device_choices, "table", lambda: {"cpu": {"shapes": [{}]}})
    assert chosen_convolutions() is None
    assert not timed


@pytest.mark.thorough
def test_a_damaged_cache_is_reported_in_a_sentence_and_written_anew(unmeasured, timed):
    first = chosen_convolutions()
    (path,) = unmeasured.iterdir()
    entries = as_json(first)
    for text in ("{", "[1]", json.dumps([entries[0] | {"rule": ["sideways", "loop"]}]), "\0"):
        path.write_text(text)
        messages = []
        assert chosen_convolutions(messages=messages) == first
        assert all("cannot be read" in sentence and "\n" not in sentence for sentence in messages)
        assert messages
        assert from_json(json.loads(path.read_text())) == first


def test_a_cache_that_cannot_be_written_is_reported_in_a_sentence(unmeasured, timed, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    messages = []
    assert chosen_convolutions(messages=messages).timed
    assert any("cannot be written" in sentence for sentence in messages)


def rows(path):
    """The lines of a run's metrics without the times."""
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in lines]


def run(path, **options):
    config, method = build({"method": "fedavg", "run_dir": path, **SMALL, **options})
    return runs.run(config, method, say=pytest.fail)


@pytest.mark.thorough
def test_a_resumed_run_computes_by_the_rules_that_it_recorded(unmeasured, timed, tmp_path, monkeypatch):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(whole)
    resolved = json.loads((whole / "resolved.json").read_text())
    assert from_json(resolved["convolutions"]).timed == tuple((operation, RULE) for operation in timed)
    append = records.RunFolder.append

    def interrupted(self, row, name=records.METRICS):
        if row["round"] == 2:
            raise KeyboardInterrupt
        append(self, row, name)

    with monkeypatch.context() as patch:
        patch.setattr(records.RunFolder, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(cut, checkpoint_every=1)
    timed.clear()
    (path,) = unmeasured.iterdir()
    path.write_text("[]")  # now the cache knows nothing, and a new run would time again
    rules_taken = []
    original = Choices.rule
    monkeypatch.setattr(
        Choices, "rule", lambda self, operation: rules_taken.append(original(self, operation)) or rules_taken[-1]
    )
    run(cut, checkpoint_every=1, resume=cut)
    assert not timed
    assert RULE in rules_taken
    assert rows(cut) == rows(whole)


def test_a_damaged_record_of_rules_is_refused_in_a_sentence():
    with pytest.raises(UserError, match="start a new run"):
        chosen_convolutions({"lanes": 1, "convolutions": [{"name": "forward"}]})


def test_with_an_empty_xdg_cache_home_the_cache_is_below_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert device_choices.cache_folder() == tmp_path / ".cache" / "fedjax_pcdd"


def test_models_without_recorded_rules_take_the_packaged_table_and_time_nothing(unmeasured, timed):
    assert chosen_convolutions({}) is None
    assert chosen_convolutions({"lanes": 1}) is None
    assert choices.in_use() == Choices()
    assert not timed


@pytest.mark.thorough
def test_nothing_is_timed_for_participants_without_convolutions(unmeasured, timed):
    config, _ = build({"method": "fedmd", "quiet": True})
    groups = toy.groups()  # of perceptrons
    assert device_choices.convolutions_of(config, groups, groups.start(), None, pytest.fail) is None
    assert not timed
    model = Classifier(mcmahan_cnn(), 4)
    assert len(tuning.operations(model, (5, 5, 1), 8, 1, jnp.float32)) == 5
