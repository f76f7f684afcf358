"""FedBABU: the body is trained under a head that never moves; and fine-tuning of head and body."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import struct

from fedjax_pcdd.api.runs import run
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.fedbabu import FedBABU
from fedjax_pcdd.testing import leaves
from fedjax_pcdd.training.config import RunConfig
from fedjax_pcdd.training.fine_tuning import fine_tuned


def moved(before, after, part):
    """For each client, whether its parameters [K, ...] of a part differ from the earlier ones [1, ...]."""
    leaf_pairs = zip(leaves(before["params"][part]), leaves(after["params"][part]), strict=True)
    return np.any([(a != b).any(axis=tuple(range(1, a.ndim))) for a, b in leaf_pairs], axis=0)


@pytest.mark.thorough
def test_the_head_stays_bitwise_the_same_in_all_rounds():
    simulated = toy.simulation("fedbabu")
    initial = simulated.start().servers.variables
    state, _ = toy.train(simulated)
    assert not moved(initial, state.servers.variables, "head").any()
    assert moved(initial, state.servers.variables, "backbone").all()


@struct.dataclass
class KeepsModels(FedBABU):
    """FedBABU whose clients keep the model that they have trained."""

    def init_client(self, setting, server, facts, key):
        return server.variables

    def upload(self, variables, summary, context):
        return variables, super().upload(variables, summary, context)[1]


@pytest.mark.thorough
def test_no_client_trains_its_head():
    simulated = toy.simulation(method=KeepsModels(), cohort=5)
    before = jax.tree.map(jnp.copy, simulated.start().clients)
    state, _ = simulated.step(simulated.start(), 0)
    assert not moved(before, state.clients, "head").any()
    assert moved(before, state.clients, "backbone").all()


@pytest.mark.thorough
@pytest.mark.parametrize(("part", "moving"), [("all", (True, True)), ("head", (True, False)), ("body", (False, True))])
def test_fine_tuning_moves_only_the_chosen_part(part, moving):
    simulated = toy.simulation("fedbabu", fine_tune_part=part, ga="mean_best_local")
    tuner = simulated.tuner(1)
    initial = jax.tree.map(jnp.copy, simulated.start().servers.variables)
    state, _ = tuner.step(tuner.start(initial), 0)
    clients = state.clients
    assert (moved(initial, clients, "head").all(), moved(initial, clients, "backbone").all()) == moving
    assert (moved(initial, clients, "head").any(), moved(initial, clients, "backbone").any()) == moving


@pytest.mark.thorough
@pytest.mark.parametrize("ga", ["global", "mean_best_local"])
def test_fine_tuning_returns_a_ga_only_if_ga_is_that_of_the_tuned_models(ga):
    simulated = toy.simulation("fedbabu", ga=ga)
    tuner = simulated.tuner(1)
    (by_protocol,), tuned_ga, _ = fine_tuned(tuner, tuner.start(simulated.start().servers.variables), 3)
    pa = by_protocol["last"]["pa"]
    assert np.all((pa >= 0) & (pa <= 1))
    assert (tuned_ga is None) == (ga == "global")


@pytest.mark.thorough
def test_accuracy_of_kept_models_is_that_of_the_models_just_trained():
    method = FedBABU(ga="mean_best_local")
    simulated = toy.simulation(method=method, cohort=5)
    tuner = simulated.tuner(2)
    state, report = tuner.step(tuner.start(simulated.start().servers.variables), 0)
    np.testing.assert_array_equal(tuner.evaluate(state, personal=True).personal, report.correct)


def small_run(folder, method, **hyper):
    config = RunConfig(
        method=method, rounds=2, local_epochs=1, fine_tune_epochs=2, clients=4, lanes=1, batch_size=50, beta=1.0,
        run_dir=folder, quiet=True,
    )  # fmt: skip
    return run(config, METHODS[method](**hyper))


def last_row(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.thorough
def test_a_run_reports_ga_of_fine_tuned_models_beside_that_of_the_global_one(tmp_path):
    summary = small_run(tmp_path / "run", "fedbabu", ga="mean_best_local")
    assert summary["ga_global_last"] == last_row(tmp_path / "run")["ga"]
    assert 0 <= summary["ga_last"] != summary["ga_global_last"]


@pytest.mark.thorough
def test_a_run_reports_accuracies_of_fine_tuned_heads_beside_the_others(tmp_path):
    summary = small_run(tmp_path / "run", "fedrep", fine_tune_heads=True)
    assert summary["pa_last"] == last_row(tmp_path / "run")["pa"]
    assert summary["pa_tuned"] > summary["pa_last"]
    assert 0 <= summary["ga_tuned"] <= 1
