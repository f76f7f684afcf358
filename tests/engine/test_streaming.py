"""Samples that stay on the host give the same bits as samples on the device."""

import dataclasses
import os

import jax
import numpy as np
import pytest
import toy

import fedjax_pcdd as fp
from fedjax_pcdd import models
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Lists, Partition
from fedjax_pcdd.data.mapped import Rows
from fedjax_pcdd.engine import tuning
from fedjax_pcdd.engine.evaluator import _paced
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.program import start_of
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.engine.streaming import Split
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.training import setup as training_setup
from fedjax_pcdd.training.config import build as build_config
from fedjax_pcdd.training.setup import Setup
from fedjax_pcdd.training.tracking import Tracker

MEGABYTE = 10**6


def simulated(name, *, stream=None, cohort=3, seeds=(0,), federation=None, **options):
    federation, method = federation or toy.federation(), METHODS[name](**options.pop("hyper", {}))
    plain = models.build("mlp", num_classes=toy.CLASSES, image_shape=federation.image_shape)
    local = Local(1, 8, options.pop("last_batch", "drop"), lr=0.05)
    experiments = [Experiment(federation, method, local, seed) for seed in seeds]
    options = {"pipeline": Pipeline(flip=True), "eval_batch": 7, "lanes": 1} | options
    return Simulation(
        method.build(plain), experiments, cohort=cohort, rounds=3, **toy.options(stream=stream, **options)
    )


def trained(simulation, rounds=3):
    """The state after some rounds with prefetching, their reports, and the counts of an evaluation."""
    state, plan, reports = simulation.start(), simulation.plan(0), []
    for r in range(rounds):
        following = simulation.plan(r + 1)
        state, report = simulation.step(state, r, plan, lambda following=following: following)
        plan = following
        reports.append(jax.tree.map(np.array, report))
    return jax.tree.map(np.array, (state, reports, simulation.evaluate(state, personal=True)))


def assert_same(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {}),
        ("fedmr", {"hyper": {"prototype_inputs": "augmented"}, "lanes": 2}),
        ("scaffold", {"client_state": "host", "last_batch": "strict"}),
        ("fedrep", {"cohort": 2}),
        ("fedprox", {"seeds": (0, 1), "lanes": 3, "block": 2}),
    ],
)
def test_streamed_rounds_and_evaluations_equal_those_on_the_device(name, options):
    assert_same(trained(simulated(name, stream=MEGABYTE, **options)), trained(simulated(name, **options)))


@pytest.mark.thorough
def test_evaluation_in_chunks_has_the_batches_of_the_whole_test_set(tmp_path):
    """A quarter of the memory holds two batches of 7, and the samples are in a memory-mapped file."""
    federation = toy.federation()
    np.save(tmp_path / "x.npy", federation.dataset.x_train)
    mapped = dataclasses.replace(federation.dataset, x_train=np.load(tmp_path / "x.npy", mmap_mode="r"))
    small = simulated("solo", stream=1900, federation=Federation(mapped, federation.partition), cohort=1)
    numbers = [np.array(data.test.numbers) for data in small.streamed.whole_test(7)]
    assert len(numbers) == 2
    assert sorted(np.concatenate(numbers)) == list(range(len(federation.dataset.y_test)))
    assert (np.concatenate(numbers[:1]) % -(-len(federation.dataset.y_test) // 7) < 2).all()
    assert_same(trained(small), trained(simulated("solo", cohort=1)))


def test_a_device_holds_the_samples_of_the_cohort_only():
    simulation = simulated("fedavg", stream=MEGABYTE, cohort=1)
    assert simulation.data.train.images.shape[0] == 0
    data = simulation.data_of(*simulation.plan(0))
    assert data.train.images.shape[0] == max(toy.SIZES)


def test_data_sent_for_a_round_does_not_grow_with_the_number_of_clients():
    """Apart from the number of samples of each client, which the device knows from the start."""
    shapes = []
    for clients in (10, 1000):
        images, labels = np.zeros((2 * clients, 4, 4, 1), np.uint8), np.zeros(2 * clients, np.int32)
        split = Split(images, labels, Lists(np.arange(2 * clients), np.full(clients, 2)), 3)
        shard = split.shard(np.array([7, 2, 9]))
        assert [int(start_of(shard, row)) for row in (2, 7, 9, 5)] == [2, 0, 4, 0]
        assert shard.size is split.sizes
        shapes.append([np.shape(array) for array in shard._replace(size=())])
    assert shapes[0] == shapes[1]


@pytest.mark.thorough
def test_fine_tuning_goes_through_the_clients_in_portions():
    tuners = [simulated("fedavg", stream=stream, cohort=2).tuner(1) for stream in (MEGABYTE, None)]
    assert tuners[0].cohort_size == 2
    variables = jax.tree.map(np.array, simulated("fedavg").start().servers.variables)
    cohort = [np.array([1, 4])]
    losses = [np.array(tuner.step(tuner.start(variables), 0, tuner.plan(0, cohort))[1].loss) for tuner in tuners]
    assert_same(losses[0], losses[1][losses[1] > 0])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "memory", "options"),
    [
        ("scaffold", 5200, {"lanes": 2}),
        ("fedmr", 5200, {"client_state": "host"}),
        ("fedavg", 3200, {"last_batch": "strict"}),
    ],
)
def test_a_round_in_chunks_gives_the_same_bits_as_on_the_device(name, memory, options):
    """Half of the memory holds the samples of little more than the clients in lanes."""
    options["cohort"] = 5
    small = simulated(name, stream=memory, **options)
    plan, jobs = small.plan(0)
    sizes = [int((chunk.data.train.numbers > 0).sum()) for chunk in small.streamed.chunks(plan, jobs)]
    assert len(sizes) > 1
    with pytest.raises(UserError, match="looks at more samples than are on the device"):
        Tracker(("angles",), small, 0)
    assert_same(trained(small), trained(simulated(name, **options)))


@pytest.mark.parametrize("memory", [2500, 3200, 5200, MEGABYTE])
def test_the_samples_in_use_and_the_next_ones_fit_into_memory(memory):
    streamed = simulated("fedavg", stream=memory, cohort=5).streamed
    assert 2 * sum(split.room * split.images.width for split in (streamed.train, streamed.test)) <= memory


def test_a_chunk_is_sent_while_the_one_before_is_computed_and_used_when_that_is_done(monkeypatch):
    small, events = simulated("fedavg", stream=3200, cohort=5), []
    of_rows, part = small.streamed.of_rows, small._part
    monkeypatch.setattr(small.streamed, "of_rows", lambda rows: events.append("send") or of_rows(rows))
    monkeypatch.setattr(small, "_part", lambda *args: events.append("compute") or part(*args))
    monkeypatch.setattr(jax, "block_until_ready", lambda carry: events.append("wait"))
    small.step(small.start(), 0)
    assert len(events) > 3
    assert events == ["send", "wait", "compute"] * (len(events) // 3)


def test_at_most_two_chunks_of_the_test_set_are_in_use(monkeypatch):
    events = []
    monkeypatch.setattr(jax, "block_until_ready", lambda result: events.append(f"wait for {result}"))
    assert list(_paced(events.append(i) or i for i in range(3))) == [0, 1, 2]
    assert events == [0, "wait for ()", 1, "wait for 0", 2, "wait for 1"]


def test_the_test_samples_of_a_chunk_fit_into_memory_too():
    images, labels = np.zeros((18, 5, 5, 1), np.uint8), np.arange(18) % toy.CLASSES
    train, test = np.split(np.arange(4), 4), np.split(np.arange(18), [8, 16, 17])
    federation = Federation(Dataset("few", images[:4], labels[:4], images, labels, toy.CLASSES), Partition(train, test))
    streamed = (small := simulated("fedavg", stream=680, federation=federation, cohort=4)).streamed
    rows = [np.array(chunk.data.test.rows) for chunk in streamed.chunks(*small.plan(0))]
    assert [chunk_rows[chunk_rows < 4].tolist() for chunk_rows in rows] == [[0], [1, 2], [3]]


def test_the_tests_of_clients_evaluated_together_fit_a_quarter_of_the_memory():
    streamed = simulated("fedavg", stream=MEGABYTE, cohort=1).streamed
    sizes = np.sort(streamed.test.lists.sizes)[::-1]
    for count in (1, 2, 4):
        streamed.memory = 4 * streamed.test.images.width * int(sizes[:count].sum())
        assert streamed.tested_rows(1) == count


def test_evaluation_portions_have_only_as_many_clients_as_their_tests_allow():
    simulation = simulated("fedavg", stream=MEGABYTE)
    simulation.streamed.tested_rows = lambda cohort: cohort - 1
    portions = list(simulation.evaluator._portions(simulation.start()))
    assert [len(portion.rows) for portion in portions] == [2, 2, 2]
    assert sorted(np.concatenate([portion.rows[portion.first] for portion in portions])) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["scaffold", "fednova"])  # FedNova's sum of messages is like nothing in the state
def test_a_round_in_chunks_is_compiled_before_it_runs_and_counted_once(name):
    small = simulated(name, stream=5200, cohort=5)
    assert small.chunked
    assert small.compile(small.start()).memory_analysis().argument_size_in_bytes > 0
    assert small.compilations == 0
    trained(small)
    assert small.compilations == 1


@pytest.mark.parametrize("counts", [[1, 2, 3], [3]], ids=["cpu", "accelerator"])
def test_chosen_lanes_are_among_those_whose_clients_fit_into_data_memory(monkeypatch, counts):
    monkeypatch.setattr(tuning, "candidates", lambda jobs, devices: counts)
    monkeypatch.setattr(tuning, "free_memory", lambda: 10**9)
    monkeypatch.setattr(tuning, "_probe", lambda simulation, state: (0.0, 1 / simulation.program.lanes))

    def make(lanes):
        return simulated("fedavg", stream=4000, lanes=lanes, cohort=5)

    with pytest.raises(UserError, match="data_memory"):
        make(3)
    single_lane = make(1)
    assert tuning.choose_lanes(make, single_lane.start(), 5, 10**6).program.lanes in (1, 2)


def test_too_little_memory_for_the_clients_in_lanes_is_refused():
    with pytest.raises(UserError, match="data_memory"):
        simulated("fedavg", stream=100)


@pytest.mark.parametrize("numbers", [[0, 1, 2], [1, 3, 4, 7], [5, 2, 2, 3], []])
def test_rows_of_a_mapped_file_survive_partial_reads(tmp_path, monkeypatch, numbers):
    array, read = np.arange(60, dtype=np.int16).reshape(10, 2, 3), os.preadv
    np.save(tmp_path / "x.npy", array)
    monkeypatch.setattr(os, "preadv", lambda file, buffer, offset: read(file, [buffer[0][:5]], offset))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for stored, file_rows in ((array, mapped), (array[2:], mapped[2:])):
        buffer = np.zeros((5, 2, 3), np.int16)
        Rows(file_rows).read(np.array(numbers, int), buffer)
        np.testing.assert_array_equal(buffer[: len(numbers)], stored[numbers])


def test_what_was_written_into_a_copy_on_write_map_is_read(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((3, 2), np.float32))
    mapped, buffer = np.load(tmp_path / "x.npy", mmap_mode="c"), np.zeros((2, 2), np.float32)
    mapped += 5
    Rows(mapped[1:]).read(np.array([0, 1]), buffer)
    assert (buffer == 5).all()


@pytest.mark.parametrize("truncated", [True, False])
def test_a_file_that_changes_during_a_run_is_a_user_error(tmp_path, truncated):
    federation, file = toy.federation(), tmp_path / "x.npy"
    np.save(file, federation.dataset.x_train)
    mapped = dataclasses.replace(federation.dataset, x_train=np.load(file, mmap_mode="r"))
    split = simulated("fedavg", stream=MEGABYTE, federation=Federation(mapped, federation.partition)).streamed.train
    rows = np.array([1, 2])
    images = np.array(split.shard(rows).images)
    np.testing.assert_array_equal(
        images[: split.lists.sizes[1]], federation.dataset.x_train[federation.partition.train[1]]
    )
    if truncated:
        os.truncate(file, 200)
    else:
        os.utime(file, (0, 0))
    with pytest.raises(UserError, match=r"x\.npy was changed during the run: put it back"):
        split.shard(rows)


@pytest.mark.parametrize(("free", "share"), [(3.01, None), (2.9, 2.9 / 3)])
def test_auto_streams_what_exceeds_a_third_of_the_free_memory(monkeypatch, free, share):
    data = fp.load_dataset("digits")
    size = data.x_train.nbytes + data.x_test.nbytes
    monkeypatch.setattr(training_setup, "available_memory", lambda: free * size)
    config_and_method = build_config({"data": "auto", "clients": 3, "cohort": 1, "min_samples": 1, "lanes": 1})
    streamed = Setup([config_and_method]).simulation.streamed
    assert (streamed and streamed.memory) == (share and int(free * size / 3))


@pytest.mark.thorough
def test_a_run_with_streamed_data_equals_one_with_data_on_the_device():
    federation = fp.partition(fp.load_dataset("digits"), "dirichlet", clients=6, beta=0.3)
    options = {"rounds": 2, "local_epochs": 1, "lanes": 1, "cohort": 2, "fine_tune_epochs": 1}
    on_device, streamed = (fp.simulate(federation, fp.FedMR(), data=name, **options) for name in ("device", "stream"))
    np.testing.assert_array_equal(on_device.ga, streamed.ga)
    np.testing.assert_array_equal(on_device.pa_per_client, streamed.pa_per_client)
    assert on_device.summary["pa_best"] == streamed.summary["pa_best"]
