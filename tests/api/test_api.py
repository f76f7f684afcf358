"""The Python interface: data in, `simulate`, a history that plots itself."""

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
import pytest
import toy
from flax import struct

import fedjax_pcdd as fp
import stub
from fedjax_pcdd.api.data import options_that_load
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine.round import Simulation
from fedjax_pcdd.models import forward
from fedjax_pcdd.training.config import RUN, RunConfig
from fedjax_pcdd.training.loop import own_state
from fedjax_pcdd.training.trained_models import TrainedModels

mpl.use("agg")
DRAWS_PICTURES = True


def small(**given: Any) -> dict[str, Any]:
    """Options of a short experiment."""
    return {"rounds": 2, "local_epochs": 1, "batch_size": 32, "lanes": 1, "fine_tune_epochs": 0} | given


@pytest.fixture(scope="module")
def federation():
    return fp.partition(fp.load_dataset("digits"), "dirichlet", clients=4, beta=0.3, seed=3)


@pytest.fixture(scope="module")
def seen():
    """Weights of the global model as a callback saw them."""
    return []


@pytest.fixture(scope="module")
def history(federation, seen):
    def look(history):
        seen.append(jax.tree.map(np.array, history.variables))

    return fp.simulate(federation, fp.FedAvg(), callback=look, **small(rounds=3, eval_every=2))


def test_import_loads_nothing_heavy():
    code = "import sys, fedjax_pcdd; print({'jax', 'numpy', 'matplotlib'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.thorough
def test_same_options_give_the_bits_of_a_run(tmp_path):
    options = ["--clients=4", "--beta=0.3", "--seed=5", "--rounds=2", "--local-epochs=2", "--batch-size=32"]
    options += ["--mu=0.1", "--lanes=1", "--fine-tune-epochs=1", "--quiet"]
    assert main(["--method=fedprox", *options, f"--run-dir={tmp_path / 'run'}"]) == 0
    federation = fp.partition(fp.load_dataset("digits"), "dirichlet", clients=4, beta=0.3, seed=5)
    again = fp.simulate(federation, fp.FedProx(mu=0.1), seed=5, **small(local_epochs=2, fine_tune_epochs=1))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("ga", "pa", "loss", "ga_per_class"):
        assert [row[name] for row in again.rows] == [line[name] for line in lines]
    clients = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    assert [row["pa_per_client"] for row in again.rows] == [line["pa_per_client"] for line in clients]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    measured = {name: value for name, value in again.summary.items() if name.startswith(("ga", "pa"))}
    assert measured == {name: summary[name] for name in measured}


def test_arguments_have_the_defaults_of_the_command_line():
    given = {name: p.default for name, p in inspect.signature(fp.simulate).parameters.items() if name in RUN}
    given |= {name: p.default for name, p in inspect.signature(fp.partition).parameters.items() if name in RUN}
    for name in ("method", "dataset", "resume"):
        del given[name]
    assert given == {name: RUN[name].default for name in given} | {"clients": None, "local_epochs": None}


def test_every_method_is_a_class_of_the_package():
    for cls in fp.methods.OWN.values():
        assert getattr(fp, cls.__name__) is cls


def test_static_tools_and_dir_know_every_name_and_import_nothing():
    assert stub.STUB.read_text(encoding="utf-8") == stub.stub(), "write it anew by python docs/hooks/stub.py"
    code = "import sys, fedjax_pcdd as fp; print('FedGELA' in dir(fp), 'simulate' in dir(fp), 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True True False\n"


def test_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="FedNothing"):
        _ = fp.FedNothing  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.thorough
def test_history_has_the_shapes_it_documents(history):
    assert history.rounds.tolist() == [1, 2, 3]
    assert history.ga.shape == history.pa.shape == history.loss.shape == (3,)
    assert history.ga_per_class.shape == (3, 10)
    assert history.pa_per_client.shape == (3, 4)


@pytest.mark.thorough
def test_rounds_without_evaluation_are_nan(history):
    assert np.isnan(history.ga).tolist() == [True, False, False]
    assert np.isnan(history.ga_per_class[0]).all()
    assert np.isnan(history.pa_per_client[0]).all()
    assert not np.isnan(history.loss).any()


@pytest.mark.thorough
def test_callback_sees_every_round(history, seen):
    assert len(seen) == 3
    for first, second in zip(jax.tree.leaves(seen[2]), jax.tree.leaves(history.variables), strict=True):
        np.testing.assert_array_equal(first, second)
    assert not np.array_equal(jax.tree.leaves(seen[0])[0], jax.tree.leaves(seen[1])[0])


@pytest.mark.thorough
def test_outputs_are_those_that_accuracy_counts(history, federation):
    features, logits = history.outputs(federation.dataset.x_test)
    assert features.shape == (355, 200)
    assert np.mean(np.argmax(logits, 1) == federation.dataset.y_test) == pytest.approx(history.ga[-1])


@pytest.mark.thorough
def test_client_outputs_are_those_of_its_own_model(federation):
    history = fp.simulate(federation, "solo", **small())
    for k, own in enumerate(federation.partition.test):
        logits = history.outputs(federation.dataset.x_test[own], client=k).logits
        accuracy = np.mean(np.argmax(logits, 1) == federation.dataset.y_test[own])
        assert accuracy == pytest.approx(history.pa_per_client[-1, k])
    with pytest.raises(fp.UserError, match="client_variables"):
        _ = history.variables


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (fp.Ditto(), {}), (fp.APFL(mix="parameters"), {}), (fp.FML(meme="mlp"), {}),
        (fp.FML(meme="mlp", answer="meme"), {}), (fp.FedMatch(), {"public_samples": 64}),
    ],
    ids=lambda x: type(x).__name__,
)  # fmt: skip
def test_features_and_logits_are_of_one_model(federation, method, options):
    history = fp.simulate(federation, method, **small() | options | {"lr": 0.1})
    features, logits = history.outputs(federation.dataset.x_test[:20], client=1)
    centred = features - features.mean(0), logits - logits.mean(0)
    head, *_ = np.linalg.lstsq(*map(np.asarray, centred), rcond=None)
    heads = [k for p, k in jax.tree_util.tree_leaves_with_path(history.client_variables(1)) if k.shape == (200, 10)]
    errors = [np.abs(centred[0] @ kernel - centred[1]).max() for kernel in heads]
    mixed = method.mix == "parameters" if isinstance(method, fp.APFL) else False
    assert mixed or min(errors) < 1e-4
    assert np.abs(centred[0] @ head - centred[1]).max() < 1e-3


@struct.dataclass
class Mapped(fp.Method):
    """Runs its model within a transformation."""

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        return jax.vmap(lambda one: super(Mapped, self).logits(model, variables, one[None], server)[0])(images)


@pytest.mark.thorough
def test_a_model_that_runs_within_a_transformation_has_its_plain_features(federation):
    images = federation.dataset.x_test[:5]
    mapped, plain = (fp.simulate(federation, method, **small()) for method in (Mapped(), fp.FedAvg()))
    for one, other in zip(mapped.outputs(images), plain.outputs(images), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_clients_of_different_architectures_are_found():
    groups = toy.groups("fedmd", necks=(0, 1, 0, 1, 0))
    history = fp.History("toy", groups.method, groups.federation, RunConfig(), [], groups.start(), {}, groups)
    assert ["neck" in history.client_variables(k)["params"] for k in range(5)] == [False, True, False, True, False]
    assert history.outputs(groups.federation.dataset.x_test[:3], client=3).logits.shape == (3, 4)
    with pytest.raises(fp.UserError, match=r"choose one in \[0, 5\)"):
        history.client_variables(5)


@struct.dataclass
class Counting(fp.Method):
    """Says of a client how many samples of each class it has."""

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        return jnp.broadcast_to(facts.class_counts, (len(images), toy.CLASSES))


class Second(TrainedModels):
    """The second of two experiments."""

    label, method, index = "second", Counting(), 1

    def __init__(self, simulation):
        self.simulation, self.federation = simulation, simulation.federations[1]
        self.state = own_state(simulation.start(), 1, 5)


@pytest.mark.thorough
def test_what_is_known_of_a_client_is_that_of_its_own_experiment():
    base = toy.simulation()
    whole = base.experiments[0].federation
    other = Federation(whole.dataset, Partition(*([lists[k] for k in (3, 0, 4, 2, 1)] for lists in whole.partition)))
    experiments = [base.experiments[0]._replace(federation=one, method=Counting()) for one in (whole, other)]
    models = Second(Simulation(base.program.model, experiments, pipeline=toy.PLAIN, cohort=3))
    for k in np.arange(5):
        logits = models.outputs(whole.dataset.x_test[:2], client=k).logits
        np.testing.assert_array_equal(logits, [other.class_counts[k]] * 2)


def test_variables_of_a_client_have_the_statistics_that_it_keeps():
    simulated = toy.simulation("fedgela", normalise="batch", local_statistics=True)
    own = jax.tree.map(lambda x: x + jnp.arange(5.0).reshape(-1, *[1] * (x.ndim - 1)), simulated.start().statistics)
    state = simulated.start()._replace(statistics=own)
    one = simulated.experiments[0]
    history = fp.History("toy", one.method, one.federation, RunConfig(), [], state, {}, simulated)
    for k in (0, 3):
        kept = jax.tree.map(lambda x, k=k: x[k], own["batch_stats"])
        jax.tree.map(np.testing.assert_array_equal, history.client_variables(k)["batch_stats"], kept)


@struct.dataclass
class Twice(fp.Method):
    """Adds what its model says of the negative."""

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        return sum(forward(model, variables, x, train=False)[0].logits for x in (images, 1 - images))


def test_of_several_answers_the_features_are_the_first_ones():
    simulated = toy.simulation()
    images = simulated.federations[0].dataset.x_test[:3]
    given = (simulated.federations[0], RunConfig(), [], simulated.start(), {}, simulated)
    twice, plain = (fp.History("toy", method, *given).outputs(images) for method in (Twice(), fp.FedAvg()))
    np.testing.assert_array_equal(twice.features, plain.features)
    assert np.any(twice.logits != plain.logits)


def test_numbers_of_a_table_may_be_any():
    data, lists = fp.from_arrays([[5.5], [-7.0]], [0, 1], [[0.5]], [1]), [np.array([0])]

    class Table(TrainedModels):
        federation = Federation(data, Partition(lists, lists))

    np.testing.assert_array_equal(Table()._images(data.x_train), data.x_train)


@pytest.mark.slow
def test_participants_may_differ_in_architecture(federation):
    history = fp.simulate(federation, fp.FedMD(), models="mlp,mcmahan_cnn", public_samples=64, **small(rounds=1))
    few, many = (jax.tree.leaves(history.client_variables(k)) for k in (0, 1))
    assert len(few) < len(many)
    assert history.ga.shape == (1,)


@pytest.mark.thorough
def test_nothing_is_written(federation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fp.simulate(federation, **small(rounds=1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_model_and_pipeline_of_ones_own_are_used(federation):
    model = fp.build_model("mlp", federation).clone(neck=1, neck_width=3)
    dark = fp.Pipeline(mean=(0.0,), std=(1e9,))
    history = fp.simulate(federation, model=model, pipeline=dark, **small(rounds=1))
    outputs = history.outputs(federation.dataset.x_test)
    assert outputs.features.shape == (355, 3)
    np.testing.assert_allclose(outputs.logits - outputs.logits[0], 0, atol=1e-5)


@struct.dataclass
class Anchored(fp.Method):
    """FedAvg, pulled towards given logits [C]."""

    anchor: Any = fp.hyperparameter(None, help="[C]")

    def classification(self, outputs, batch, context):
        return jnp.mean(jnp.square(outputs.logits - self.anchor))


@pytest.mark.thorough
def test_method_of_ones_own_may_have_arrays(federation):
    anchor = np.arange(10.0)
    history = fp.simulate(federation, Anchored(anchor), **small(local_epochs=5, rounds=3))
    assert history.label == "Anchored"
    logits = np.mean(history.outputs(federation.dataset.x_test).logits, 0)
    assert np.corrcoef(logits, anchor)[0, 1] > 0.9


@pytest.mark.thorough
def test_advice_of_a_method_is_a_warning():
    digits = fp.load_dataset("digits")
    alone = fp.partition(digits, "pcdd", clients=10, classes_per_client=1)
    with pytest.warns(UserWarning, match="use denominator=all"):
        fp.simulate(alone, fp.FedGELA(denominator="present"), **small(rounds=1))


BAD = {
    "lr of -1": ({"lr": -1}, "lr must be above 0"),
    "unknown argument": ({"momentm": 1}, "did you mean 'momentum'"),
    "option of run folders": ({"keep": 3}, "no argument 'keep'"),
    "half a round": ({"rounds": 2.5}, "rounds takes an integer"),
    "unknown choice": ({"optimizer": "sgdd"}, "sgd or adam"),
    "cohort too large": ({"cohort": 11}, "cohort=11"),
    "unknown method": ({"method": "fedgella"}, "did you mean 'fedgela'"),
    "class in place of a method": ({"method": fp.FedAvg}, r"fp.FedAvg\(\)"),
    "unknown model": ({"model": "ml"}, "did you mean 'mlp'"),
    "hyper-parameter out of bounds": ({"method": fp.FedProx(mu=-1.0)}, "mu must be at least 0"),
    "unknown form": ({"method": fp.FedMR(form="of")}, "offdiag or frobenius"),
    "no batch": ({"batch_size": 10**6, "last_batch": "strict"}, "smaller batch_size"),
    "loss that is not finite": ({"lr": 1e30}, "choose a smaller lr or set grad_clip.$"),
    "server's rate": (
        {"method": fp.FedAvgM(server_lr=1e38), "rounds": 2},
        "not finite in round 2 .* smaller lr or server_lr or",
    ),
    "server's rate, at the end": (
        {"method": fp.FedAvgM(server_lr=3e38), "lr": 1.0, "rounds": 1},
        "the server.s .* is not finite in round 1",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_users_mistake_is_said_in_python(federation, case):
    arguments, words = BAD[case]
    with pytest.raises(fp.UserError, match=words) as caught:
        fp.simulate(federation, **small(**arguments))
    assert "--" not in str(caught.value)


def test_dataset_is_no_federation():
    with pytest.raises(fp.UserError, match="partition"):
        fp.simulate(fp.load_dataset("digits"))  # pyright: ignore[reportArgumentType]


def test_impossible_partition_is_said_in_python():
    with pytest.raises(fp.UserError, match="use fewer clients or a smaller min_samples"):
        fp.partition(fp.load_dataset("digits"), clients=400)


def test_partition_is_that_of_the_command_line(federation):
    assert federation.class_counts.tolist() == [
        [int(np.sum(federation.dataset.y_train[own] == c)) for c in range(10)] for own in federation.partition.train
    ]
    with pytest.raises(fp.UserError, match="did you mean 'dirichlet'"):
        fp.partition(federation.dataset, "dirichle")


def test_natural_partition_keeps_the_largest_groups():
    groups = np.array([0, 0, 0, 1, 1, 2])
    data = fp.from_arrays(np.zeros((6, 4)), np.arange(6) % 2, np.zeros((3, 4)), [0, 1, 0], groups=(groups, [0, 1, 2]))
    assert fp.partition(data, "natural").sizes.tolist() == [3, 2, 1]
    assert fp.partition(data, "natural", clients=2).sizes.tolist() == [3, 2]


def test_a_data_set_that_was_loaded_is_found_again_by_its_options(tmp_path):
    x, y = np.zeros((4, 5, 5), np.uint8), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert options_that_load(fp.load_dataset("mine", tmp_path)) == {"dataset": "mine", "data_dir": tmp_path}
    assert options_that_load(fp.from_arrays(x, y, x, y)) is None


def test_classes_of_arrays_are_those_of_both_splits():
    for train, test in (([0, 4], [1]), ([0, 1], [4])):
        assert fp.from_arrays([[0.0], [1.0]], train, [[0.5]], test).num_classes == 5


def test_a_model_has_the_norms_that_are_asked_for():
    data = fp.from_arrays(np.zeros((1, 8, 8, 3), np.uint8), [0], np.zeros((1, 8, 8, 3), np.uint8), [0])
    built = {norm: fp.build_model("resnet18", data, norm=norm) for norm in ("batch", "group")}
    assert {norm: fp.models.uses_batch_norm(one, (8, 8, 3)) for norm, one in built.items()} == {
        "batch": True, "group": False,
    }  # fmt: skip


def test_float_images_are_kept_as_float32():
    data = fp.from_arrays(np.full((2, 5, 4), -1.3), [0, 2], np.zeros((1, 5, 4)), [1])
    assert (data.x_train.shape, data.x_train.dtype, data.num_classes) == ((2, 5, 4, 1), np.float32, 3)
    assert data.x_train.min() == np.float32(-1.3)


def test_integers_of_images_are_levels_and_those_of_tables_numbers():
    image, table = np.full((1, 4, 4), 200), np.full((1, 4), 200)
    assert fp.from_arrays(image, [0], image, [0]).x_train.dtype == np.uint8
    assert fp.from_arrays(table, [0], table, [0]).x_train.dtype == np.float32


def test_channels_first_images_are_recognised_and_named():
    x = np.arange(2 * 3 * 8 * 8, dtype=np.uint8).reshape(2, 3, 8, 8)
    with pytest.warns(UserWarning, match=r"x_train \[2, 3, 8, 8\] has its channels first: they are put last"):
        data = fp.from_arrays(x, [0, 1], np.moveaxis(x, 1, 3), [0, 1])
    np.testing.assert_array_equal(data.x_train, data.x_test)


@pytest.mark.parametrize(
    ("samples", "sentence"),
    [
        (np.array([["a"] * 4]), "must be numbers"),
        (np.full((1, 4), np.nan), "not finite"),
        (np.zeros(1), "must be numbers"),
    ],
)
def test_arrays_that_are_no_samples_are_refused(samples, sentence):
    with pytest.raises(fp.UserError, match=f"x_train .*{sentence}"):
        fp.from_arrays(samples, [0], np.zeros((1, 4)), [0])


@pytest.mark.thorough
def test_float_tables_train_as_they_are():
    rng = np.random.default_rng(0)
    y = np.arange(200) % 2
    x = rng.normal(100 * (2 * y[:, None] - 1), 1, (200, 3))  # far outside of [0, 1]
    data = fp.from_arrays(x / 100, y, x / 100, y)
    history = fp.simulate(fp.partition(data, "iid", clients=2), fp.FedAvg(), rounds=3, local_epochs=1, batch_size=10)
    assert history.ga[-1] == 1


@pytest.mark.thorough
def test_plot_draws_the_evaluated_rounds_in_percent(history):
    figure = fp.plot([history, history], what=("ga", "loss"))
    accuracy, loss = figure.axes
    assert [len(ax.lines) for ax in (accuracy, loss)] == [2, 2]
    np.testing.assert_allclose(accuracy.lines[0].get_xydata(), [[2, 100 * history.ga[1]], [3, 100 * history.ga[2]]])
    assert loss.lines[0].get_xydata().shape == (3, 2)
    assert history.plot(accuracy, what="pa", label="mine").lines[-1].get_label() == "mine"
    with pytest.raises(fp.UserError, match="there is no curve"):
        history.plot(accuracy, what="gaa")


def test_federation_draws_its_counts(federation):
    axes = federation.plot()
    np.testing.assert_array_equal(axes.images[0].get_array().filled(0), federation.class_counts.T)


@pytest.mark.thorough
def test_tables_have_a_row_a_round_and_a_row_a_history(history):
    rows = history.to_table()
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert [row["ga"] for row in rows] == [None, *history.ga[1:]]
    (row,) = fp.table([history])
    assert row["label"] == "fedavg"
    assert row["ga_last"] == history.ga[-1]


@pytest.mark.thorough
def test_unfinished_history_has_no_row(federation):
    caught = []

    def look(history):
        with pytest.raises(fp.UserError, match="not finished"):
            fp.table([history])
        caught.append(len(history))

    fp.simulate(federation, callback=look, **small(rounds=1))
    assert caught == [1]


@pytest.mark.thorough
def test_examples_of_the_docs_run(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "python_api.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec("\n".join(code), {})
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert "FedGELA" in capsys.readouterr().out
