"""The Python interface: data in, `simulate`, and a history that plots itself."""

import inspect
import json
import re
import runpy
import subprocess
import sys
import warnings
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
from fedjax_pcdd.api.data import LOADED
from fedjax_pcdd.cli.run import main
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.models import forward
from fedjax_pcdd.training.config import RUN, RunConfig
from fedjax_pcdd.training.loop import own_state
from fedjax_pcdd.training.trained_models import TrainedModels

mpl.use("agg")
DRAWS_PICTURES = True


def small(**options: Any) -> dict[str, Any]:
    """Options of a short experiment, with the given ones added or changed."""
    return {"rounds": 2, "local_epochs": 1, "batch_size": 32, "lanes": 1, "fine_tune_epochs": 0} | options


@pytest.fixture(scope="module")
def federation():
    return fp.partition(fp.load_dataset("digits"), "dirichlet", clients=4, beta=0.3, seed=3)


@pytest.fixture(scope="module")
def seen_variables():
    """Weights of the global model as a callback saw them, an entry per round."""
    return []


@pytest.fixture(scope="module")
def history(federation, seen_variables):
    def keep_variables(history):
        seen_variables.append(jax.tree.map(np.array, history.variables))

    return fp.simulate(federation, fp.FedAvg(), callback=keep_variables, **small(rounds=3, eval_every=2))


def test_calls_within_compiled_once_share_a_program_and_give_the_bits_of_calls_outside(federation):
    def simulated(mu):
        return fp.simulate(federation, fp.FedProx(mu=mu), **small())

    outside = simulated(0.5)
    with fp.compiled_once():
        first, second = simulated(0.1), simulated(0.5)
    assert [h.simulation.compilations for h in (outside, first, second)] == [1, 1, 0]
    jax.tree.map(np.testing.assert_array_equal, second.variables, outside.variables)
    assert [row["ga"] for row in second.rows] == [row["ga"] for row in outside.rows]


def test_import_loads_nothing_heavy():
    code = "import sys, fedjax_pcdd; print({'jax', 'numpy', 'matplotlib'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


@pytest.mark.thorough
def test_simulate_gives_the_same_bits_as_the_command_line(tmp_path):
    flags = ["--clients=4", "--beta=0.3", "--seed=5", "--rounds=2", "--local-epochs=2", "--batch-size=32"]
    flags += ["--mu=0.1", "--lanes=1", "--fine-tune-epochs=1", "--quiet"]
    assert main(["--method=fedprox", *flags, f"--run-dir={tmp_path / 'run'}"]) == 0
    federation = fp.partition(fp.load_dataset("digits"), "dirichlet", clients=4, beta=0.3, seed=5)
    history = fp.simulate(federation, fp.FedProx(mu=0.1), seed=5, **small(local_epochs=2, fine_tune_epochs=1))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("ga", "pa", "loss", "ga_per_class"):
        assert [row[name] for row in history.rows] == [line[name] for line in lines]
    client_lines = [json.loads(line) for line in (tmp_path / "run" / "clients.jsonl").read_text().splitlines()]
    assert [row["pa_per_client"] for row in history.rows] == [line["pa_per_client"] for line in client_lines]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    accuracies = {name: value for name, value in history.summary.items() if name.startswith(("ga", "pa"))}
    assert accuracies == {name: summary[name] for name in accuracies}


def test_arguments_have_the_defaults_of_the_command_line():
    defaults = {name: p.default for name, p in inspect.signature(fp.simulate).parameters.items() if name in RUN}
    defaults |= {name: p.default for name, p in inspect.signature(fp.partition).parameters.items() if name in RUN}
    for name in ("method", "dataset", "resume"):
        del defaults[name]
    assert defaults == {name: RUN[name].default for name in defaults} | {"clients": None, "local_epochs": None}


def test_every_method_is_a_class_of_the_package():
    for cls in fp.methods.OWN.values():
        assert getattr(fp, cls.__name__) is cls


def test_windows_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="needs Linux or macOS: on Windows, install it in WSL"):
        runpy.run_path(str(fp.__file__))


def test_stub_is_up_to_date_and_dir_lists_names_without_importing_jax():
    assert stub.STUB.read_text(encoding="utf-8") == stub.stub(), "write it anew by python docs/hooks/stub.py"
    code = "import sys, fedjax_pcdd as fp; print('FedGELA' in dir(fp), 'simulate' in dir(fp), 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True True False\n"


def test_an_unknown_name_raises_attribute_error():
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
def test_callback_sees_every_round(history, seen_variables):
    assert len(seen_variables) == 3
    for seen, final in zip(jax.tree.leaves(seen_variables[2]), jax.tree.leaves(history.variables), strict=True):
        np.testing.assert_array_equal(seen, final)
    assert not np.array_equal(jax.tree.leaves(seen_variables[0])[0], jax.tree.leaves(seen_variables[1])[0])


@pytest.mark.thorough
def test_accuracy_of_the_outputs_is_the_reported_ga(history, federation):
    features, logits = history.outputs(federation.dataset.x_test)
    assert features.shape == (355, 200)
    assert np.mean(np.argmax(logits, 1) == federation.dataset.y_test) == pytest.approx(history.ga[-1])


@pytest.mark.thorough
def test_outputs_of_a_client_come_from_its_personal_model(federation):
    history = fp.simulate(federation, "solo", **small())
    for k, indices in enumerate(federation.partition.test):
        logits = history.outputs(federation.dataset.x_test[indices], client=k).logits
        accuracy = np.mean(np.argmax(logits, 1) == federation.dataset.y_test[indices])
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
def test_features_and_logits_come_from_the_same_model(federation, method, options):
    history = fp.simulate(federation, method, **small() | options | {"lr": 0.1})
    features, logits = history.outputs(federation.dataset.x_test, client=1)  # more images than features
    centred = features - features.mean(0), logits - logits.mean(0)
    fitted, *_ = np.linalg.lstsq(*map(np.asarray, centred), rcond=None)
    kernels = [x for _, x in jax.tree_util.tree_leaves_with_path(history.client_variables(1)) if x.shape == (200, 10)]
    errors = [np.abs(centred[0] @ kernel - centred[1]).max() for kernel in kernels]
    mixes_parameters = method.mix == "parameters" if isinstance(method, fp.APFL) else False
    assert mixes_parameters or min(errors) < 1e-4
    assert np.abs(centred[0] @ fitted - centred[1]).max() < 1e-3


@struct.dataclass
class Mapped(fp.Method):
    """Runs its model inside a JAX transformation, `jax.vmap`."""

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        return jax.vmap(lambda image: super(Mapped, self).logits(model, variables, image[None], server)[0])(images)


@pytest.mark.thorough
def test_a_model_run_inside_vmap_has_the_same_features_and_logits(federation):
    images = federation.dataset.x_test[:5]
    mapped, plain = (fp.simulate(federation, method, **small()) for method in (Mapped(), fp.FedAvg()))
    for mapped_output, plain_output in zip(mapped.outputs(images), plain.outputs(images), strict=True):
        np.testing.assert_allclose(mapped_output, plain_output, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_variables_and_outputs_follow_each_clients_architecture():
    groups = toy.groups("fedmd", necks=(0, 1, 0, 1, 0))
    history = fp.History("toy", groups.method, groups.federation, RunConfig(), [], groups.start(), {}, groups)
    assert ["neck" in history.client_variables(k)["params"] for k in range(5)] == [False, True, False, True, False]
    assert history.outputs(groups.federation.dataset.x_test[:3], client=3).logits.shape == (3, 4)
    with pytest.raises(fp.UserError, match=r"choose one in \[0, 5\)"):
        history.client_variables(5)


@struct.dataclass
class Counting(fp.Method):
    """Gives as logits how many samples of each class the client has."""

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        return jnp.broadcast_to(facts.class_counts, (len(images), toy.CLASSES))


class SecondExperiment(TrainedModels):
    """Models of the second of two experiments."""

    label, method, index = "second", Counting(), 1

    def __init__(self, simulation):
        self.simulation, self.federation = simulation, simulation.federations[1]
        self.state = own_state(simulation.start(), 1, 5)


@pytest.mark.thorough
def test_client_facts_are_those_of_the_models_own_experiment():
    base = toy.simulation()
    original = base.experiments[0].federation
    permuted = Federation(
        original.dataset, Partition(*([lists[k] for k in (3, 0, 4, 2, 1)] for lists in original.partition))
    )
    experiments = [
        base.experiments[0]._replace(federation=federation, method=Counting()) for federation in (original, permuted)
    ]
    models = SecondExperiment(Simulation(base.program.model, experiments, pipeline=toy.PLAIN, cohort=3))
    for k in np.arange(5):
        logits = models.outputs(original.dataset.x_test[:2], client=k).logits
        np.testing.assert_array_equal(logits, [permuted.class_counts[k]] * 2)


def test_client_variables_hold_the_clients_own_batch_statistics():
    simulation = toy.simulation("fedgela", normalise="batch", local_statistics=True)
    statistics = jax.tree.map(
        lambda x: x + jnp.arange(5.0).reshape(-1, *[1] * (x.ndim - 1)), simulation.start().statistics
    )
    state = simulation.start()._replace(statistics=statistics)
    experiment = simulation.experiments[0]
    history = fp.History("toy", experiment.method, experiment.federation, RunConfig(), [], state, {}, simulation)
    for k in (0, 3):
        expected = jax.tree.map(lambda x, k=k: x[k], statistics["batch_stats"])
        jax.tree.map(np.testing.assert_array_equal, history.client_variables(k)["batch_stats"], expected)


@struct.dataclass
class Twice(fp.Method):
    """Sums the logits of each image and of its negative."""

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        return sum(forward(model, variables, x, train=False)[0].logits for x in (images, 1 - images))


def test_features_are_those_of_the_first_of_several_forward_passes():
    simulation = toy.simulation()
    images = simulation.federations[0].dataset.x_test[:3]
    arguments = (simulation.federations[0], RunConfig(), [], simulation.start(), {}, simulation)
    twice, plain = (fp.History("toy", method, *arguments).outputs(images) for method in (Twice(), fp.FedAvg()))
    np.testing.assert_array_equal(twice.features, plain.features)
    assert np.any(twice.logits != plain.logits)


def test_values_of_a_table_may_lie_in_any_range():
    data, lists = fp.from_arrays([[5.5], [-7.0]], [0, 1], [[0.5]], [1]), [np.array([0])]

    class Table(TrainedModels):
        federation = Federation(data, Partition(lists, lists))

    np.testing.assert_array_equal(Table()._images(data.x_train), data.x_train)


@pytest.mark.slow
def test_participants_may_differ_in_architecture(federation):
    history = fp.simulate(federation, fp.FedMD(), models="mlp,mcmahan_cnn", public_samples=64, **small(rounds=1))
    mlp_leaves, cnn_leaves = (jax.tree.leaves(history.client_variables(k)) for k in (0, 1))
    assert len(mlp_leaves) < len(cnn_leaves)
    assert history.ga.shape == (1,)


@pytest.mark.thorough
def test_simulate_writes_no_files_without_a_run_folder(federation, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fp.simulate(federation, **small(rounds=1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_given_model_and_pipeline_are_used(federation):
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
def test_a_users_method_may_have_array_hyperparameters(federation):
    anchor = np.arange(10.0)
    history = fp.simulate(federation, Anchored(anchor), **small(local_epochs=5, rounds=3))
    assert history.label == "Anchored"
    logits = np.mean(history.outputs(federation.dataset.x_test).logits, 0)
    assert np.corrcoef(logits, anchor)[0, 1] > 0.9


@pytest.mark.thorough
def test_advice_of_a_method_is_given_as_a_warning():
    digits = fp.load_dataset("digits")
    federation = fp.partition(digits, "pcdd", clients=10, classes_per_client=1)
    with pytest.warns(UserWarning, match="use denominator=all"):
        fp.simulate(federation, fp.FedGELA(denominator="present"), **small(rounds=1))


@pytest.mark.thorough
def test_a_sample_that_a_client_has_twice_by_mistake_is_warned_of(tmp_path):
    digits = fp.load_dataset("digits")
    meant = fp.partition(digits, "pcdd", clients=5, classes_per_client=4, doubled=True)
    fp.simulate(meant, "fedavg", model="mlp", run_dir=tmp_path / "run", **small(rounds=1))
    lists = [np.arange(20), np.append(np.arange(20, 40), 25)]
    mistaken = fp.Federation(digits, fp.Partition(lists, lists))
    with pytest.warns(UserWarning, match="partition gives client 1 a sample more than once"):
        fp.simulate(mistaken, "fedavg", model="mlp", **small(rounds=1))


@struct.dataclass
class Dividing(fp.Method):
    """Its penalty is not a number."""

    def penalty(self, variables, outputs, batch, context):
        return 0.0 * jnp.log(0.0 * jnp.sum(outputs.logits))


MISTAKES = {
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
    "method's own rate": ({"method": fp.Scaffold(eta_g=1e38), "rounds": 2}, "choose a smaller lr or eta_g or"),
    "a term of one's own": ({"method": Dividing()}, "or look for a division by zero or .* of zero in Dividing.$"),
    "server's rate, at the end": (
        {"method": fp.FedAvgM(server_lr=3e38), "lr": 1.0, "rounds": 1},
        "the server.s .* is not finite in round 1",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_errors_name_python_arguments_not_command_line_flags(federation, case):
    arguments, message = MISTAKES[case]
    with pytest.raises(fp.UserError, match=message) as caught:
        fp.simulate(federation, **small(**arguments))
    assert "--" not in str(caught.value)


def test_simulate_refuses_a_data_set_without_a_partition():
    with pytest.raises(fp.UserError, match="partition"):
        fp.simulate(fp.load_dataset("digits"))  # pyright: ignore[reportArgumentType]


def test_an_impossible_partition_is_refused_with_advice():
    with pytest.raises(fp.UserError, match="use fewer clients or a smaller min_samples"):
        fp.partition(fp.load_dataset("digits"), clients=400)


def test_class_counts_match_the_partition_and_a_misspelt_kind_is_refused(federation):
    assert federation.class_counts.tolist() == [
        [int(np.sum(federation.dataset.y_train[indices] == c)) for c in range(10)]
        for indices in federation.partition.train
    ]
    with pytest.raises(fp.UserError, match="did you mean 'dirichlet'"):
        fp.partition(federation.dataset, "dirichle")


def test_natural_partition_keeps_the_largest_groups():
    groups = np.array([0, 0, 0, 1, 1, 2])
    data = fp.from_arrays(np.zeros((6, 4)), np.arange(6) % 2, np.zeros((3, 4)), [0, 1, 0], groups=(groups, [0, 1, 2]))
    assert fp.partition(data, "natural").sizes.tolist() == [3, 2, 1]
    assert fp.partition(data, "natural", clients=2).sizes.tolist() == [3, 2]


def test_a_loaded_data_set_knows_the_options_that_load_it_again(tmp_path):
    x, y = np.zeros((4, 5, 5), np.uint8), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    assert LOADED.get(fp.load_dataset("mine", tmp_path)) == {"dataset": "mine", "data_dir": tmp_path}
    assert LOADED.get(fp.from_arrays(x, y, x, y)) is None
    assert LOADED.get(fp.load_dataset("digits", tmp_path)) == {"dataset": "digits"}
    assert len(fp.load_dataset(tmp_path / "mine.npz").y_train) == len(fp.load_dataset("mine", tmp_path).y_train)


@pytest.mark.parametrize("private", ["digits", "mine"])
def test_public_images_are_read_from_the_folder_that_is_asked_for_with_a_run_folder_or_without(tmp_path, private):
    x, y = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8), np.arange(40) % 4
    for place, images in (("a", x), ("b", 255 - x)):
        (tmp_path / place).mkdir()
        np.savez(tmp_path / place / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        np.savez(tmp_path / place / "other.npz", x=images)
    federation = fp.partition(fp.load_dataset(private, tmp_path / "b"), "iid", clients=2)
    options = {"public": "other", "public_samples": 8, "data_dir": tmp_path / "a", "model": "mlp", **small(rounds=1)}
    history = fp.simulate(federation, "feddf", run_dir=tmp_path / "run", **options)
    images = history.simulation.data.public
    np.testing.assert_array_equal(images, fp.simulate(federation, "feddf", **options).simulation.data.public)
    assert {x.tobytes() for x in np.asarray(images)} <= {x.tobytes() for x in x}
    given = {} if private == "digits" else {"federation": federation}
    assert fp.load_run(tmp_path / "run", **given).rows == history.rows


def test_a_run_is_loaded_from_another_working_directory(tmp_path, monkeypatch):
    x, y = np.arange(20 * 36, dtype=np.uint8).reshape(20, 6, 6), np.arange(20) % 2
    np.savez(tmp_path / "mine.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    monkeypatch.chdir(tmp_path)
    federation = fp.partition(fp.load_dataset("mine", "."), "iid", clients=2)
    history = fp.simulate(federation, "fedavg", model="mlp", run_dir="run", **small(rounds=1))
    monkeypatch.chdir("/")
    assert fp.load_run(tmp_path / "run").rows == history.rows


def test_public_images_are_normalised_as_private_ones_by_a_pipeline_that_is_given(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8)
    np.savez(tmp_path / "other.npz", x=x)
    given = fp.Pipeline(mean=(0.3,), std=(0.1,), flip=True, crop="zero", padding=1)
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    options = {"public": "other", "public_samples": 8, "data_dir": tmp_path, **small(rounds=1)}
    simulation = fp.simulate(federation, "feddf", pipeline=given, **options).simulation
    assert simulation.program.public_pipeline == fp.Pipeline(mean=(0.3,), std=(0.1,), padding=1)


@pytest.mark.parametrize(("low", "high", "warned"), [(-1.0, 1.0, True), (0.0, 1.0, False), (0.0, 3.0, True)])
def test_private_numbers_on_another_scale_than_public_images_are_warned_of(tmp_path, low, high, warned):
    np.savez(tmp_path / "other.npz", x=np.random.default_rng(0).integers(0, 256, (40, 8, 8), np.uint8))
    x, y = np.linspace(low, high, 20 * 64).reshape(20, 8, 8), np.arange(20) % 2
    federation = fp.partition(fp.from_arrays(x, y, x, y), "iid", clients=2)
    options = {"public": "other", "public_samples": 8, "data_dir": tmp_path, "model": "mlp", **small(rounds=1)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fp.simulate(federation, "feddf", **options)
    sentence = f"public images reach models scaled to [0, 1], the clients' run from {low:g} to {high:g}: scale these."
    assert (sentence in {str(w.message) for w in caught}) == warned


@pytest.mark.filterwarnings("ignore:the labels lack")
def test_classes_are_counted_over_training_and_test_labels():
    for train, test in (([0, 4], [1]), ([0, 1], [4])):
        assert fp.from_arrays([[0.0], [1.0]], train, [[0.5]], test).num_classes == 5


def test_build_model_uses_the_requested_norm():
    data = fp.from_arrays(np.zeros((1, 8, 8, 3), np.uint8), [0], np.zeros((1, 8, 8, 3), np.uint8), [0])
    models = {norm: fp.build_model("resnet18", data, norm=norm) for norm in ("batch", "group")}
    assert {norm: fp.models.uses_batch_norm(model, (8, 8, 3)) for norm, model in models.items()} == {
        "batch": True, "group": False,
    }  # fmt: skip


def test_names_give_the_number_of_classes_and_texts_of_pandas_are_groups():
    groups = (np.array(["a", "b"], object), ["b"])
    data = fp.from_arrays([[0.0], [1.0]], [0, 1], [[0.5]], [1], class_names=["a", "b", "c"], groups=groups)
    assert (data.num_classes, data.groups_train.tolist()) == (3, ["a", "b"])


def test_images_of_0_and_1_of_which_the_first_are_black_are_no_levels():
    x = np.zeros((1500, 2, 2), np.uint8)
    x[1400:] = 1
    y = np.arange(1500) % 2
    assert fp.from_arrays(x, y, x, y).x_train.max() == np.float32(1)
    assert fp.from_arrays(x, y, x, y).x_train.dtype == np.float32


def test_float_images_are_kept_as_float32():
    data = fp.from_arrays(np.full((2, 5, 4), -1.3), [0, 2], np.zeros((1, 5, 4)), [1])
    assert (data.x_train.shape, data.x_train.dtype, data.num_classes) == ((2, 5, 4, 1), np.float32, 3)
    assert data.x_train.min() == np.float32(-1.3)


def test_integers_become_uint8_in_images_and_float32_in_tables():
    image, table = np.full((1, 4, 4), 200), np.full((1, 4), 200)
    assert fp.from_arrays(image, [0], image, [0]).x_train.dtype == np.uint8
    assert fp.from_arrays(table, [0], table, [0]).x_train.dtype == np.float32


def test_channels_first_images_are_reordered_with_a_warning():
    x = np.arange(2 * 3 * 8 * 8, dtype=np.uint8).reshape(2, 3, 8, 8)
    with pytest.warns(UserWarning, match=r"x_train \[2, 3, 8, 8\] has its channels first: they are put last"):
        data = fp.from_arrays(x, [0, 1], np.moveaxis(x, 1, 3), [0, 1])
    np.testing.assert_array_equal(data.x_train, data.x_test)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.array([["a"] * 4]), "must be numbers"),
        (np.full((1, 4), np.nan), "not finite"),
        (np.zeros(1), "must be numbers"),
    ],
)
def test_arrays_that_cannot_be_samples_are_refused(samples, message):
    with pytest.raises(fp.UserError, match=f"x_train .*{message}"):
        fp.from_arrays(samples, [0], np.zeros((1, 4)), [0])


@pytest.mark.thorough
def test_float_tables_are_trained_on_without_scaling():
    rng = np.random.default_rng(0)
    y = np.arange(200) % 2
    x = rng.normal(4 * y[:, None] - 6, 0.01, (200, 3))  # about -6 or -2, which would be equal if clipped to [0, 1]
    data = fp.from_arrays(x, y, x, y)
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


def test_plot_draws_numbers_of_ones_own_too(federation):
    def thrice(run, report):
        run.history.rows[-1] |= {"thrice": jnp.float32(3 * run.round)}

    twice = {"twice": lambda run: 2.0 * run.round}
    history = fp.simulate(federation, fp.FedAvg(), metrics=twice, callbacks=[thrice], **small())
    panels = fp.plot(history, what=("twice", "thrice", "pa_std")).axes
    for ax, factor in zip(panels[:2], (2, 3), strict=True):
        np.testing.assert_allclose(ax.lines[0].get_xydata(), [[1, factor], [2, 2 * factor]])
    assert [ax.get_ylabel() for ax in panels] == ["twice", "thrice", "pa_std (%)"]


def test_plot_of_a_federation_shows_its_class_counts(federation):
    axes = federation.plot()
    np.testing.assert_array_equal(axes.images[0].get_array().filled(0), federation.class_counts.T)


@pytest.mark.thorough
def test_tables_have_one_row_per_round_or_per_history(history):
    rows = history.to_table()
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert [row["ga"] for row in rows] == [None, *history.ga[1:]]
    (row,) = fp.table([history])
    assert row["label"] == "fedavg"
    assert row["ga_last"] == history.ga[-1]


@pytest.mark.thorough
def test_a_table_refuses_an_unfinished_history(federation):
    lengths = []

    def tabulate(history):
        with pytest.raises(fp.UserError, match="not finished"):
            fp.table([history])
        lengths.append(len(history))

    fp.simulate(federation, callback=tabulate, **small(rounds=1))
    assert lengths == [1]


@pytest.mark.thorough
def test_examples_in_the_python_api_docs_run(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "python_api.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec("\n".join(code), {})
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert "FedGELA" in capsys.readouterr().out


def test_strict_promotion_is_refused_and_can_be_switched_off_for_a_run(federation):
    with jax.numpy_dtype_promotion("strict"):
        with pytest.raises(fp.UserError, match=r"refuse it .*: call it within `with jax\.numpy_dtype_promotion\("):
            fp.simulate(federation, "fedavg", **small())
        with jax.numpy_dtype_promotion("standard"):
            assert len(fp.simulate(federation, "fedavg", **small(rounds=1))) == 1


def test_double_precision_is_refused_and_can_be_switched_off_for_a_run(federation):
    with jax.enable_x64(True):
        with pytest.raises(
            fp.UserError, match=r"JAX is set to double precision .*: call it within `with jax\.enable_x64"
        ):
            fp.simulate(federation, "fedavg", **small())
        with jax.enable_x64(False):
            assert (
                fp.simulate(federation, "fedavg", **small(rounds=1)).variables["params"]["head"]["bias"].dtype == "f4"
            )


@struct.dataclass
class Untrained(fp.Method):
    """FedAvg that stays with its first model."""

    def aggregate(self, server, message, weights, context):
        """The server as it was."""
        return server

    def local_update(self, evaluate, step, variables, batch, context):
        """No step."""
        loss, state, gradients = evaluate(variables)
        return loss, state, step(jax.tree.map(jnp.zeros_like, gradients))


def test_a_run_says_which_client_diverged_in_fine_tuning(federation):
    options = {"lr": 1e30, "momentum": 0.0, "weight_decay": 0.0, "fine_tune_epochs": 3}
    with pytest.warns(
        UserWarning, match=r"fine-tuning diverged: the loss of client \d is not finite, so that PA has no"
    ):
        history = fp.simulate(federation, Untrained(), **small(rounds=1) | options)
    assert history.summary["pa_best"] is history.summary["pa_last"] is None
    assert history.summary["diverged_client"] in range(10)
