"""Users' own models, from Python and from the command line, including those of the documentation."""

import json
import warnings
from pathlib import Path

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

import fedjax_pcdd as fp
from fedjax_pcdd.cli.run import main

PAGE = Path(__file__).parents[2] / "docs/bring_your_own.md"
RECIPES = [text.split("```")[0] for text in PAGE.read_text().split("```python\n") if "class Net(" in text]


def class_of(code):
    namespace = {}
    exec(code, namespace)
    return namespace["Net"]


LINEN, NNX = map(class_of, RECIPES)


class Backbone(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(16)(x.reshape(len(x), -1)))


class Classifier(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(64, 16, rngs=rngs), nnx.Linear(16, 10, rngs=rngs)])

    def __call__(self, x):
        return self.layers[1](nnx.relu(self.layers[0](x.reshape(len(x), -1))))


MODELS = {"linen": LINEN, "linen object": Backbone(), "nnx": NNX, "nnx object": Classifier(nnx.Rngs(1))}
SMALL = {"rounds": 2, "local_epochs": 2, "batch_size": 20, "lanes": 1, "fine_tune_epochs": 0, "last_batch": "keep"}


@pytest.fixture(scope="module")
def federation():
    digits = fp.load_dataset("digits")
    subset = fp.from_arrays(digits.x_train[:130], digits.y_train[:130], digits.x_test[:60], digits.y_test[:60])
    return fp.partition(subset, "dirichlet", clients=3, beta=0.5)


@pytest.mark.thorough
@pytest.mark.parametrize("method", [fp.FedMR(), fp.FedGELA(ew=4.0)], ids=["fedmr", "fedgela"])
@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_methods_that_change_head_or_features_train_a_users_model(federation, method, model):
    history = fp.simulate(federation, method, model=model, lr=0.02, momentum=0.0, **SMALL)
    assert np.isfinite(history.loss).all()
    assert history.loss[1] != history.loss[0]
    assert history.simulation.compilations == 1


@pytest.mark.thorough
def test_normalisation_layers_of_an_nnx_model_stay_with_the_clients(federation):
    history = fp.simulate(federation, fp.FedAvg(), model=NNX, bn="local-layers", **SMALL)
    assert set(flatten_dict(history.state.statistics["layers"])) == {
        ("backbone", "norm", name) for name in ("bias", "scale")
    }


@pytest.mark.parametrize("model", [LINEN, NNX], ids=["linen", "nnx"])
def test_bn_group_is_refused_for_a_model_with_its_own_batch_norms(federation, model):
    with pytest.raises(fp.UserError, match="leaves the model's own batch norms"):
        fp.simulate(federation, fp.FedAvg(), model=model, bn="group", **SMALL)


@pytest.mark.thorough
@pytest.mark.parametrize("pretrain_epochs", [0, 1])
def test_each_participant_may_have_its_own_model(federation, pretrain_epochs):
    models = [Backbone(), NNX, "mlp"]
    history = fp.simulate(federation, "solo", model=models, pretrain_epochs=pretrain_epochs, **SMALL)
    assert np.isfinite(history.pa).all()
    with pytest.raises(fp.UserError, match="fedavg trains one model: give that, not several"):
        fp.simulate(federation, "fedavg", model=models, **SMALL)


@pytest.mark.thorough
def test_a_run_with_a_model_from_a_file_resumes_to_the_same_bits(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(RECIPES[1])
    monkeypatch.chdir(tmp_path)
    flags = ["--rounds=2", "--local-epochs=1", "--clients=2", "--lanes=1", "--quiet", "--train-samples=90"]
    flags += ["--partition=dirichlet", "--beta=0.5", "--fine-tune-epochs=0", "--last-batch=keep", "--model=net.py:Net"]
    for name in ("straight", "cut"):
        assert main([*flags, f"--run-dir={name}"]) == 0
    folder = tmp_path / "cut"
    for path in (folder / "summary.json", *(folder / "checkpoints/2").rglob("*")):
        if path.is_file():
            path.unlink()
    assert main(["--resume=cut", "--quiet"]) == 0
    last_rows = [
        json.loads((tmp_path / run / "metrics.jsonl").read_text().splitlines()[-1]) for run in ("straight", "cut")
    ]
    assert last_rows[0]["loss"] == last_rows[1]["loss"]
    assert last_rows[0]["ga_per_class"] == last_rows[1]["ga_per_class"]


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.layer, self.drop = nnx.Linear(64, 16, rngs=rngs), nnx.Dropout(0.0, rngs=rngs)

    def __call__(self, x):
        return self.drop(nnx.relu(self.layer(x.reshape(len(x), -1))))


of_notebook = {"width": 8, "initial": 0.5, "norm": False}  # as globals, which a notebook's next cell may change


class OfNotebook(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        initial = nn.initializers.constant(of_notebook["initial"])
        x = nn.relu(nn.Dense(of_notebook["width"], kernel_init=initial)(x.reshape(len(x), -1)))
        return nn.BatchNorm(use_running_average=not train)(x) if of_notebook["norm"] else x


@pytest.fixture(scope="module")
def digits():
    return fp.partition(fp.load_dataset("digits"), "iid", clients=2)


def still(federation, model, **options):
    """A history of a model that hardly moves."""
    defaults = {"rounds": 1, "local_steps": 1, "lr": 1e-9, "lanes": 1, "fine_tune_epochs": 0}
    return fp.simulate(federation, "fedavg", model=model, **defaults | options)


def test_weights_that_are_loaded_into_an_object_between_two_runs_are_trained(digits):
    net = Dropped(nnx.Rngs(0))
    still(digits, net)
    net.layer.kernel[...] = np.full((64, 16), 0.125, np.float32)
    params = flatten_dict(still(digits, net).variables["params"]["backbone"])
    np.testing.assert_allclose(params["layer", "kernel"], 0.125, atol=1e-5)


def test_an_attribute_of_an_object_that_changes_between_two_runs_is_seen(digits):
    net, fresh = Dropped(nnx.Rngs(0)), Dropped(nnx.Rngs(0))
    still(digits, net)
    net.drop.rate = fresh.drop.rate = 0.9
    same, expected = (still(digits, model, lr=0.1, rounds=2).loss for model in (net, fresh))
    np.testing.assert_array_equal(same, expected)
    with fp.compiled_once():
        np.testing.assert_array_equal(still(digits, net).loss, still(digits, net).loss)


@pytest.mark.parametrize(("name", "value"), [("width", 12), ("initial", 0.25), ("norm", True)])
def test_a_global_that_a_module_reads_is_read_again_in_the_next_run(digits, monkeypatch, name, value):
    still(digits, OfNotebook())
    monkeypatch.setitem(of_notebook, name, value)
    variables = still(digits, OfNotebook()).variables
    kernel = variables["params"]["backbone"]["Dense_0"]["kernel"]
    assert kernel.shape == (64, of_notebook["width"])
    np.testing.assert_allclose(kernel, of_notebook["initial"], atol=1e-5)
    assert ("batch_stats" in variables) == of_notebook["norm"]


def test_a_packaged_model_that_is_given_as_an_object_computes_in_bfloat16(digits):
    options = {"precision": "bfloat16", "rounds": 2, "lr": 0.1}
    given = still(digits, fp.build_model("mlp", digits), **options)
    np.testing.assert_array_equal(given.loss, still(digits, "mlp", **options).loss)


@pytest.mark.parametrize(("dtype", "warned"), [(None, True), (jnp.bfloat16, False)])
def test_a_model_of_ones_own_that_computes_in_float32_is_said_not_to_follow_the_precision(digits, dtype, warned):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.relu(nn.Dense(16, dtype=dtype)(x.reshape(len(x), -1)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        still(digits, Net(), precision="bfloat16")
    sentences = [str(w.message) for w in caught]
    assert any("precision=bfloat16 reaches the images alone" in text for text in sentences) == warned


@pytest.mark.parametrize(("largest", "warned"), [(257, True), (256, False)])
def test_codes_that_bfloat16_would_round_to_others_are_named(largest, warned):
    class Embedding(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Embed(300, 4, dtype=jnp.bfloat16)(x.reshape(len(x), -1).astype(int)).mean(1)

    codes, y = np.full((4, 3), largest), np.arange(4) % 2
    words = fp.Federation(fp.from_arrays(codes, y, codes, y), fp.Partition([[0, 1], [2, 3]], [[0, 1], [2, 3]]))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        still(words, Embedding(), precision="bfloat16")
    assert any("rounds whole numbers above 256" in str(w.message) for w in caught) == warned
