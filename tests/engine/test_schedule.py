"""Schedules: an epoch has every sample of a job exactly once, none lost or doubled, however jobs are packed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pcdd.engine import schedule

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12)
rules = st.sampled_from(["drop", "keep", "top_up", "strict"])


def batches_of_jobs(counts, batch, rule, epochs=2):
    edges = np.cumsum([0, *counts])
    lists, job_epochs = [np.arange(edges[k], edges[k + 1]) for k in range(len(counts))], np.full(len(counts), epochs)
    options = {"clients": np.arange(len(counts)), "batch": batch, "rule": rule}
    return schedule.job_batches(lists, schedule.streams(0, 1), epochs=job_epochs, **options)


def replay(plan, lanes):
    """The batches of each job when the segments are executed as the lanes execute them."""
    job_of, batches = [None] * lanes, {}
    for g in range(int(plan.num_segments)):
        for i in range(plan.load_stop[g], plan.load_stop[g + 1]):
            job_of[plan.load_lane[i]] = int(plan.load_job[i])
            batches[int(plan.load_job[i])] = []
        for t in range(plan.step_stop[g], plan.step_stop[g + 1]):
            for lane in range(lanes):
                if job_of[lane] is not None:
                    batches[job_of[lane]].append(plan.indices[t, lane])
        for i in range(plan.finish_stop[g], plan.finish_stop[g + 1]):
            assert job_of[plan.finish_lane[i]] == plan.finish_job[i]
            job_of[plan.finish_lane[i]] = None
    assert job_of == [None] * lanes
    return batches


quanta = st.sampled_from([1, 2, 3, 8, 100])


@settings(deadline=None, max_examples=100)
@given(sizes, st.integers(1, 9), rules, st.integers(1, 5), quanta, st.integers(1, 3))
def test_lanes_train_every_job_in_order_and_then_only_wait(counts, batch, rule, lanes, quantum, block):
    jobs = batches_of_jobs(counts, batch, rule)
    steps = schedule.most_steps([np.array([len(b) for b in jobs])], len(jobs), lanes, quantum=quantum)
    replayed = replay(schedule.pack(jobs, lanes, steps=steps, quantum=quantum, block=block), lanes)
    assert sorted(replayed) == [j for j, b in enumerate(jobs) if len(b)]
    for j, batches in replayed.items():
        np.testing.assert_array_equal(batches[: len(jobs[j])], jobs[j])
        waiting = batches[len(jobs[j]) :]
        assert len(waiting) < quantum
        assert (np.array(waiting) == -1).all()


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 12))
def test_jobs_of_one_phase_each_fill_the_lanes_in_order_and_leave_them_together(steps, lanes):
    capacity = schedule.most_steps([np.array(steps)], len(steps), lanes, quantum=30)
    batches = [np.zeros((n, 1), np.int32) for n in steps]
    plan = schedule.pack(batches, lanes, steps=capacity, quantum=30, block=lanes)
    np.testing.assert_array_equal(plan.load_stop, plan.finish_stop)
    np.testing.assert_array_equal(plan.load_job, plan.finish_job)
    jobs = np.count_nonzero(steps)
    np.testing.assert_array_equal(plan.load_lane[:jobs], np.arange(jobs) % lanes)
    np.testing.assert_array_equal(plan.finish_lane[:jobs], np.arange(jobs) % lanes)
    assert plan.num_segments == -(-jobs // lanes)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 60), st.integers(1, 9), rules)
def test_an_epoch_has_each_sample_at_most_once_and_all_that_fit(count, batch, rule):
    samples = np.arange(100, 100 + count)
    options = {"clients": np.zeros(1, int), "epochs": np.ones(1, int), "batch": batch, "rule": rule}
    (epoch,) = schedule.job_batches([samples], schedule.streams(3, 0), **options)
    drawn = epoch[epoch >= 0]
    full = count // batch * batch
    expected = {"keep": count, "strict": full, "drop": full or count, "top_up": -(-count // batch) * batch}[rule]
    assert len(drawn) == expected
    assert set(drawn) <= set(samples)
    if rule != "top_up":
        assert len(set(drawn)) == len(drawn)
    elif count:
        assert set(drawn) == set(samples)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 30), min_size=2, max_size=12), st.integers(1, 4), quanta, st.data())
def test_capacity_holds_for_every_cohort(steps, lanes, quantum, data):
    cohort = data.draw(st.integers(1, len(steps)))
    chosen = data.draw(st.permutations(range(len(steps))))[:cohort]
    capacity = schedule.most_steps([np.array(steps)], cohort, lanes, quantum=quantum)
    batches = [np.zeros((steps[k], 3), np.int32) for k in chosen]
    plan = schedule.pack(batches, lanes, steps=capacity, quantum=quantum)
    assert plan.indices.shape == (capacity, lanes, 3)
    assert plan.step_stop.max() <= capacity


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, 20))
def test_cohort_is_a_set_of_clients_with_samples(seed, round, size):
    counts = np.array([0, 3, 1, 0, 9, 2, 8])
    chosen = schedule.cohort(seed, round, np.flatnonzero(counts), size)
    assert len(set(chosen)) == len(chosen) == min(size, 5)
    assert (counts[chosen] > 0).all()


def test_cohorts_are_those_of_earlier_versions():
    able, available = np.flatnonzero(np.arange(1000) % 7), np.arange(1000) % 2 == 0
    assert schedule.cohort(0, 3, able, 6).tolist() == [50, 262, 457, 601, 844, 894]
    assert schedule.cohort(0, 3, able, 6, available).tolist() == [48, 262, 454, 598, 842, 890]


def test_cohorts_differ_between_rounds_and_seeds():
    able = np.arange(50)
    draws = {tuple(schedule.cohort(s, r, able, 10)) for s in range(3) for r in range(3)}
    assert len(draws) == 9


def test_streams_differ_in_every_coordinate():
    coordinates = np.vstack([np.zeros(4, int), np.eye(4, dtype=int)]).tolist()
    numbers = {schedule.streams(s, r)(client, epoch).integers(2**62) for s, r, client, epoch in coordinates}
    assert len(numbers) == 5


@pytest.mark.parametrize("client", [0, 7, schedule.NO_CLIENT])
def test_a_stream_does_not_depend_on_what_was_drawn_before(client):
    draws, counter = schedule.streams(5, 3), np.array([0, 0, client, 1], np.uint64)
    draws(2, 0).integers(9, size=7, dtype=np.int32)  # seven of 32 bits leave half of a 64-bit number behind
    fresh = np.random.Generator(np.random.Philox(key=[5, 3], counter=counter))
    np.testing.assert_array_equal(draws(client, 1).permutation(50), fresh.permutation(50))


def test_without_shuffling_every_epoch_has_the_stored_order():
    samples = np.array([7, 3, 9, 1])
    options = {"clients": np.zeros(1, int), "epochs": np.array([2]), "batch": 2, "rule": "drop", "shuffle": False}
    (batches,) = schedule.job_batches([samples], schedule.streams(0, 0), **options)
    np.testing.assert_array_equal(batches, [[7, 3], [9, 1]] * 2)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 5), rules, st.integers(0, 40), st.data())
def test_batches_of_a_job_do_not_depend_on_other_jobs(counts, batch, rule, round, data):
    k, epochs = data.draw(st.integers(0, len(counts) - 1)), np.arange(len(counts)) % 3
    lists, clients = [np.arange(n) + 100 * i for i, n in enumerate(counts)], 7 * np.arange(len(counts))
    options = {"batch": batch, "rule": rule}
    permutation = schedule.streams(1, round)(int(clients[k]), 0).permutation(lists[k])
    together = schedule.job_batches(lists, schedule.streams(1, round), clients=clients, epochs=epochs, **options)
    alone_options = {"clients": clients[k : k + 1], **options}
    (alone,) = schedule.job_batches(
        lists[k : k + 1], schedule.streams(1, round), epochs=epochs[k : k + 1], **alone_options
    )
    np.testing.assert_array_equal(together[k], alone)
    first_epoch = alone[: schedule.batches_per_epoch(counts[k], batch, rule)].ravel()
    used = min(len(first_epoch), counts[k])
    np.testing.assert_array_equal(first_epoch[:used], permutation[:used])
    draws = schedule.streams(1, 0)
    together = schedule.endless_batches(lists, draws, clients=clients, round=round, steps=4, **options)
    (alone,) = schedule.endless_batches(lists[k : k + 1], draws, round=round, steps=4, **alone_options)
    np.testing.assert_array_equal(together[k], alone)


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_packing_wastes_little_when_clients_outnumber_lanes(lanes):
    steps = np.random.default_rng(0).integers(1, 50, 100)
    plan = schedule.pack([np.zeros((n, 1), np.int32) for n in steps], lanes, steps=int(steps.sum()))
    assert plan.step_stop.max() * lanes <= 1.05 * steps.sum()


def test_devices_get_about_equal_numbers_of_steps():
    batches = [np.zeros((steps, 1), np.int32) for steps in (8, 4, 2, 2)]
    members = schedule.divide(batches, 1, 2, steps=16).members
    assert [device_jobs[device_jobs >= 0].tolist() for device_jobs in members] == [[0], [1, 2, 3]]
