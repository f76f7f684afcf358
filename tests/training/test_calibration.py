"""`calibrate=ccvr`: the head of any method's global model, retrained after the last round."""

import copy
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

import fedjax_pcdd as fp
from fedjax_pcdd.api.records import Asked
from fedjax_pcdd.api.runs import run_together
from fedjax_pcdd.data.augment import Pipeline, prepare
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.class_gaussians import class_moments
from fedjax_pcdd.methods.calibration import Calibration
from fedjax_pcdd.models.classifier import apply_head, forward
from fedjax_pcdd.training.callbacks import Function
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.fine_tuning import calibrated, check_calibration


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedprox", {}),
        ("scaffold", {"client_state": "host", "lanes": 3}),
        ("fedavg", {"last_batch": "strict", "batch_size": 30}),
        ("fedavg", {"held": True}),
    ],
)
def test_calibration_is_ccvrs_last_round_with_all_samples_of_all_clients(name, options):
    simulation = toy.simulation(name, cohort=2, noise=120, **options)
    state, _ = toy.train(simulation, (0, 1))
    before = jax.tree.map(np.array, state.servers.variables)
    (result,) = calibrated(simulation, state)
    variables = jax.tree.map(lambda x: jnp.asarray(x[0]), before)
    federation, model = simulation.federations[0], simulation.program.model
    train_indices = np.concatenate(federation.partition.train)
    images = prepare(Pipeline(), federation.dataset.x_train[train_indices], None, train=False)
    features = forward(model, variables, images, train=False)[0].features
    moments = class_moments(
        features, jnp.asarray(federation.dataset.y_train[train_indices]), toy.CLASSES, diagonal=False
    )
    key = jax.random.fold_in(jax.random.fold_in(simulation.keys[0], 1), federation.num_clients)
    head = Calibration().calibrated(variables["params"]["head"], moments, key)
    test_images = prepare(Pipeline(), federation.dataset.x_test, None, train=False)
    predictions = np.argmax(apply_head(head, forward(model, variables, test_images, train=False)[0].features), 1)
    expected = float((predictions == federation.dataset.y_test).mean())
    assert 0.3 < expected < 0.95  # a wrong head would show
    assert result["ga_ccvr"] == pytest.approx(expected, abs=0.011)
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, state.servers.variables))


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:CCVR has 140 samples")
def test_the_summary_has_the_calibrated_accuracy_beside_ga():
    federation = fp.partition(fp.load_dataset("digits"), "dirichlet", clients=3, beta=0.3)
    options = {"rounds": 1, "local_epochs": 1, "lanes": 1, "fine_tune_epochs": 0}
    plain, with_ccvr = (
        fp.simulate(federation, fp.FedAvg(), calibrate=name, **options).summary for name in ("none", "ccvr")
    )
    assert set(with_ccvr) - set(plain) == {"ga_ccvr"}
    assert with_ccvr["ga_last"] == plain["ga_last"] != with_ccvr["ga_ccvr"]


@pytest.mark.parametrize("name", ["solo", "fedetf", "fedgela"])
def test_methods_without_a_trained_global_head_are_refused(name):
    with pytest.raises(UserError, match="calibrate=ccvr"):
        check_calibration(toy.simulation(name), 0)


def test_a_method_that_calibrates_by_itself_is_refused():
    with pytest.raises(UserError, match="calibrates its last model by itself"):
        check_calibration(toy.simulation("ccvr"), 0)


def test_samples_that_do_not_fit_on_several_devices_are_refused_in_advance():
    simulation = copy.copy(toy.simulation("fedavg"))
    simulation.streamed, simulation.program = True, replace(simulation.program, devices=2)

    def alike(experiments, cohort):
        assert cohort == 5
        raise UserError("the samples of 5 clients are too many.")

    simulation.alike = alike
    with pytest.raises(UserError, match="does not hold on several devices: allow more, use devices=1, or drop it"):
        check_calibration(simulation, 0)


def test_for_a_too_large_or_singular_covariance_the_diagonal_one_is_advised():
    setting = toy.simulation("fedavg").program.setting
    with pytest.raises(UserError, match="use method=ccvr with covariance=diagonal"):
        Calibration().configure(setting._replace(num_classes=100, feature_dim=2048), None)
    (warning,) = Calibration().configure(setting._replace(rarest_class=3), None)[1]
    assert warning.endswith("for more use `method=ccvr` with `covariance=diagonal`.")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:CCVR has 140 samples")
def test_the_summary_of_ccvr_has_its_calibrated_models_accuracy_too():
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=2)
    history = fp.simulate(federation, fp.CCVR(), rounds=2, local_epochs=1, lanes=1, fine_tune_epochs=0)
    assert history.summary["ga_ccvr_last"] == history.rows[-1]["ga_ccvr"]
    assert "ga_ccvr" not in history.rows[0]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:CCVR has 140 samples")
@pytest.mark.parametrize("reason", ["stopped", "nobody is available"])
def test_without_a_calibration_there_is_no_accuracy_of_a_calibrated_model(tmp_path, reason):
    np.savez(tmp_path / "nobody.npz", probability=np.array([[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]))
    stopped = reason == "stopped"
    config, method = build(
        {"method": "ccvr", "partition": "iid", "clients": 2, "rounds": 3, "local_epochs": 1, "lanes": 1,
         "fine_tune_epochs": 0, "availability": None if stopped else str(tmp_path / "nobody.npz")}
    )  # fmt: skip
    (results,) = run_together(
        [Asked(config, method, callbacks=[Function(lambda run, report: stopped and run.round == 2)])],
        finish=lambda _, run, summary: [*run.history.rows, summary],
    )
    assert len(results) == (3 if stopped else 4)
    assert not [name for result in results for name in result if "ccvr" in name]
