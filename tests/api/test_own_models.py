"""Users' own models, from Python and from the command line, including those of the documentation."""

import json
from pathlib import Path

import flax.linen as nn
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
