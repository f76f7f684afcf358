"""Several devices give the same numbers as one, and each trains jobs of its own; one process sees eight devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pcdd.cli.run import main
from fedjax_pcdd.engine import devices, mesh, schedule, tuning
from fedjax_pcdd.errors import UserError

TESTS = Path(__file__).parents[1]
CASES = (
    *("fedavg", "scaffold, clients on the host", "fedmr", "fedgela", "stacked messages", "no global model"),
    *("two experiments", "blocks, clients on the host", "blocks of whole jobs", "blocks of two experiments"),
    *("samples from the host", "ensemble", "ensemble, clients on the host", "layers of the clients' own"),
)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The results that `eight_devices.py` printed."""
    command = [sys.executable, TESTS / "eight_devices.py", tmp_path_factory.mktemp("runs")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_devices_do_not_change_results(results, case):
    assert max(result["difference"] for result in results[case]) < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_devices_do_not_change_evaluation_counts(results, case):
    assert all(result["counts"] for result in results[case])


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_rounds_on_several_devices_compile_once(results, case):
    assert {result["compilations"] for result in results[case]} == {1}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_repeating_rounds_on_several_devices_gives_the_same_bits(results, case):
    assert all(result["repeated"] for result in results[case])


@pytest.mark.thorough
def test_clients_from_the_host_are_divided_among_the_devices(results):
    assert results["placement"] == {"shards": [results["placement"]["most"]], "most": 3, "servers": [4]}


@pytest.mark.thorough
def test_a_run_on_two_devices_writes_the_same_metrics(results):
    np.testing.assert_allclose(results["run on 1"], results["run on 2"], 1e-5)


job_steps = st.lists(st.integers(0, 30), min_size=1, max_size=14)
device_counts = st.integers(2, 8)


def divided(steps, lanes, device_count, capacity=None):
    batches = [np.full((n, 2), j, np.int32) for j, n in enumerate(steps)]
    capacity = capacity or schedule.most_steps([np.array(steps)], len(steps), lanes, device_count)
    return schedule.divide(batches, lanes, device_count, steps=capacity)


@settings(deadline=None, max_examples=80)
@given(job_steps, st.integers(1, 3), device_counts)
def test_every_step_of_every_job_is_on_exactly_one_device(steps, lanes, device_count):
    shares = divided(steps, lanes, device_count)
    jobs_of_steps = shares.plan.indices[shares.plan.indices[..., 0] >= 0][:, 0]
    np.testing.assert_array_equal(np.bincount(jobs_of_steps, minlength=len(steps)), steps)


@settings(deadline=None, max_examples=80)
@given(job_steps, st.integers(1, 3), device_counts)
def test_every_job_has_exactly_one_position(steps, lanes, device_count):
    shares = divided(steps, lanes, device_count)
    np.testing.assert_array_equal(shares.members.ravel()[shares.position], np.arange(len(steps)))
    assert (shares.members >= 0).sum() == len(steps)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=12), st.integers(1, 3), device_counts, st.data())
def test_shapes_are_the_same_for_every_cohort(steps, lanes, device_count, data):
    cohort = data.draw(st.integers(1, len(steps)))
    chosen = data.draw(st.permutations(steps))[:cohort]
    capacity = schedule.most_steps([np.array(steps)], cohort, lanes, device_count)
    shares = divided(chosen, lanes, device_count, capacity)
    assert shares.plan.indices.shape == (device_count, capacity, lanes, 2)
    assert shares.members.shape == (device_count, schedule.most_jobs(cohort, device_count))


@pytest.mark.parametrize("device_count", [2, 4, 8])
def test_devices_finish_at_about_the_same_time(device_count):
    steps = np.random.default_rng(0).integers(1, 50, 200)
    shares = divided(steps, 2, device_count)
    assert shares.plan.step_stop.max() * 2 * device_count <= 1.05 * steps.sum()


@pytest.mark.thorough
@given(job_steps, st.integers(1, 3), st.integers(1, 3), st.data())
def test_jobs_are_trained_by_the_process_that_owns_their_client(steps, lanes, devices_per_process, data):
    owners = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(steps), max_size=len(steps))))
    batches = [np.zeros((n, 2), np.int32) for n in steps]
    capacity = schedule.most_steps([np.array(steps)], len(steps), lanes, devices_per_process)
    shares = schedule.divide(batches, lanes, 3 * devices_per_process, steps=capacity, owners=owners, processes=3)
    device = shares.position // shares.members.shape[1]
    np.testing.assert_array_equal(device // devices_per_process, owners)
    assert sorted(shares.members[shares.members >= 0].tolist()) == list(range(len(steps)))


def test_asking_for_more_devices_than_exist_is_a_user_error():
    available = len(jax.devices())
    with pytest.raises(UserError, match=f"devices={available + 1} is more than the {available} cpu devices"):
        devices.count_devices(available + 1)


def test_a_mesh_of_more_devices_than_exist_is_a_user_error():
    available = len(jax.devices())
    with pytest.raises(UserError, match=rf"there are no {available + 1} devices: use at most {available}\."):
        mesh.mesh_of(available + 1)


def test_auto_is_one_device_on_a_cpu():
    assert devices.count_devices("auto") == 1


def test_lane_candidates_are_for_the_cores_of_one_device(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert tuning.candidates(100, 4) == [1, 2]


def test_several_devices_are_refused_for_participants_with_own_models(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # the run may add flags to it
    jax.devices()  # once the devices are known, the CPU cannot be divided
    assert main(["--method=fedmd", "--devices=2", f"--run-dir={tmp_path / 'run'}"]) == 2
    assert "--devices" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
