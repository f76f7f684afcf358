"""Several devices: the same numbers as on one, each device with its own jobs; one process sees eight."""

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

HERE = Path(__file__).parents[1]
CASES = (
    *("fedavg", "scaffold, clients on the host", "fedmr", "fedgela", "stacked messages", "no global model"),
    *("two experiments", "blocks, clients on the host", "blocks of whole jobs", "blocks of two experiments"),
    *("samples from the host", "ensemble", "ensemble, clients on the host", "layers of the clients' own"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `eight_devices.py` printed."""
    command = [sys.executable, HERE / "eight_devices.py", tmp_path_factory.mktemp("runs")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_devices_do_not_change_results(found, case):
    assert max(one["difference"] for one in found[case]) < 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_every_test_sample_is_counted_once(found, case):
    assert all(one["counts"] for one in found[case])


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_rounds_on_several_devices_compile_once(found, case):
    assert {one["compilations"] for one in found[case]} == {1}


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_several_devices_give_the_same_bits_again(found, case):
    assert all(one["repeated"] for one in found[case])


@pytest.mark.thorough
def test_clients_from_the_host_are_divided_among_the_devices(found):
    assert found["placement"] == {"shards": [found["placement"]["most"]], "most": 3, "servers": [4]}


@pytest.mark.thorough
def test_a_run_on_two_devices_writes_the_same_metrics(found):
    np.testing.assert_allclose(found["run on 1"], found["run on 2"], 1e-5)


steps_of_jobs = st.lists(st.integers(0, 30), min_size=1, max_size=14)
counts = st.integers(2, 8)


def divided(steps, lanes, number, capacity=None):
    batches = [np.full((n, 2), j, np.int32) for j, n in enumerate(steps)]
    capacity = capacity or schedule.most_steps([np.array(steps)], len(steps), lanes, number)
    return schedule.divide(batches, lanes, number, steps=capacity)


@settings(deadline=None, max_examples=80)
@given(steps_of_jobs, st.integers(1, 3), counts)
def test_every_step_of_every_job_is_some_devices(steps, lanes, number):
    shares = divided(steps, lanes, number)
    done = shares.plan.indices[shares.plan.indices[..., 0] >= 0][:, 0]
    np.testing.assert_array_equal(np.bincount(done, minlength=len(steps)), steps)


@settings(deadline=None, max_examples=80)
@given(steps_of_jobs, st.integers(1, 3), counts)
def test_every_job_has_one_place(steps, lanes, number):
    shares = divided(steps, lanes, number)
    np.testing.assert_array_equal(shares.members.ravel()[shares.position], np.arange(len(steps)))
    assert (shares.members >= 0).sum() == len(steps)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=12), st.integers(1, 3), counts, st.data())
def test_shapes_of_all_devices_hold_for_every_cohort(steps, lanes, number, data):
    cohort = data.draw(st.integers(1, len(steps)))
    chosen = data.draw(st.permutations(steps))[:cohort]
    capacity = schedule.most_steps([np.array(steps)], cohort, lanes, number)
    shares = divided(chosen, lanes, number, capacity)
    assert shares.plan.indices.shape == (number, capacity, lanes, 2)
    assert shares.members.shape == (number, schedule.most_jobs(cohort, number))


@pytest.mark.parametrize("number", [2, 4, 8])
def test_devices_finish_at_about_the_same_time(number):
    steps = np.random.default_rng(0).integers(1, 50, 200)
    shares = divided(steps, 2, number)
    assert shares.plan.step_stop.max() * 2 * number <= 1.05 * steps.sum()


@pytest.mark.thorough
@given(steps_of_jobs, st.integers(1, 3), st.integers(1, 3), st.data())
def test_jobs_are_trained_by_the_process_that_owns_their_client(steps, lanes, each, data):
    owners = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(steps), max_size=len(steps))))
    batches = [np.zeros((n, 2), np.int32) for n in steps]
    capacity = schedule.most_steps([np.array(steps)], len(steps), lanes, each)
    shares = schedule.divide(batches, lanes, 3 * each, steps=capacity, owners=owners, processes=3)
    device = shares.position // shares.members.shape[1]
    np.testing.assert_array_equal(device // each, owners)
    assert sorted(shares.members[shares.members >= 0].tolist()) == list(range(len(steps)))


def test_more_devices_than_there_are_is_a_sentence():
    there = len(jax.devices())
    with pytest.raises(UserError, match=f"devices={there + 1} is more than the {there} cpu devices"):
        devices.count_devices(there + 1)


def test_a_mesh_of_more_devices_than_there_are_is_a_sentence():
    there = len(jax.devices())
    with pytest.raises(UserError, match=rf"there are no {there + 1} devices: use at most {there}\."):
        mesh.mesh_of(there + 1)


def test_auto_is_one_device_on_a_cpu():
    assert devices.count_devices("auto") == 1


def test_lanes_are_tried_for_the_cores_of_one_device(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    assert tuning.candidates(100, 4) == [1, 2]


def test_participants_with_own_models_stay_on_one_device(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))  # which the run may add to
    jax.devices()  # from now on the CPU is not divided any more
    assert main(["--method=fedmd", "--devices=2", f"--run-dir={tmp_path / 'run'}"]) == 2
    assert "--devices" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
