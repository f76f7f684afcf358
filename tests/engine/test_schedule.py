"""Schedules: every sample of a job exactly once an epoch, nothing lost or doubled, whatever the packing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedjax_pcdd.engine import schedule

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12)
rules = st.sampled_from(["drop", "keep", "top_up", "strict"])


def jobs_of(counts, batch, rule, epochs=2):
    first = np.cumsum([0, *counts])
    lists, each = [np.arange(first[k], first[k + 1]) for k in range(len(counts))], np.full(len(counts), epochs)
    common = {"clients": np.arange(len(counts)), "batch": batch, "rule": rule}
    return schedule.job_batches(lists, schedule.streams(0, 1), epochs=each, **common)


def replay(plan, lanes):
    """The batches each job gets when the segments are followed as the lanes follow them."""
    job_of, got = [None] * lanes, {}
    for g in range(int(plan.num_segments)):
        for i in range(plan.load_stop[g], plan.load_stop[g + 1]):
            job_of[plan.load_lane[i]] = int(plan.load_job[i])
            got[int(plan.load_job[i])] = []
        for t in range(plan.step_stop[g], plan.step_stop[g + 1]):
            for lane in range(lanes):
                if job_of[lane] is not None:
                    got[job_of[lane]].append(plan.indices[t, lane])
        for i in range(plan.finish_stop[g], plan.finish_stop[g + 1]):
            assert job_of[plan.finish_lane[i]] == plan.finish_job[i]
            job_of[plan.finish_lane[i]] = None
    assert job_of == [None] * lanes
    return got


quanta = st.sampled_from([1, 2, 3, 8, 100])


@settings(deadline=None, max_examples=100)
@given(sizes, st.integers(1, 9), rules, st.integers(1, 5), quanta, st.integers(1, 3))
def test_lanes_replay_every_job_in_order_and_then_at_most_wait(counts, batch, rule, lanes, quantum, block):
    jobs = jobs_of(counts, batch, rule)
    steps = schedule.most_steps([np.array([len(b) for b in jobs])], len(jobs), lanes, quantum=quantum)
    got = replay(schedule.pack(jobs, lanes, steps=steps, quantum=quantum, block=block), lanes)
    assert sorted(got) == [j for j, b in enumerate(jobs) if len(b)]
    for j, batches in got.items():
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
    one = {"clients": np.zeros(1, int), "epochs": np.ones(1, int), "batch": batch, "rule": rule}
    (epoch,) = schedule.job_batches([samples], schedule.streams(3, 0), **one)
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
    able, there = np.flatnonzero(np.arange(1000) % 7), np.arange(1000) % 2 == 0
    assert schedule.cohort(0, 3, able, 6).tolist() == [50, 262, 457, 601, 844, 894]
    assert schedule.cohort(0, 3, able, 6, there).tolist() == [48, 262, 454, 598, 842, 890]


def test_cohorts_differ_between_rounds_and_seeds():
    able = np.arange(50)
    draws = {tuple(schedule.cohort(s, r, able, 10)) for s in range(3) for r in range(3)}
    assert len(draws) == 9


def test_streams_differ_in_every_coordinate():
    places = np.vstack([np.zeros(4, int), np.eye(4, dtype=int)])
    assert len({schedule.stream(*map(int, place)).integers(2**62) for place in places}) == 5


@pytest.mark.parametrize("client", [0, 7, schedule.NOBODY])
def test_a_stream_is_a_generator_of_its_own_whatever_was_drawn_before(client):
    draws, counter = schedule.streams(5, 3), np.array([0, 0, client, 1], np.uint64)
    draws(2, 0).integers(9, size=7, dtype=np.int32)  # leaves half of a number behind
    fresh = np.random.Generator(np.random.Philox(key=[5, 3], counter=counter))
    np.testing.assert_array_equal(draws(client, 1).permutation(50), fresh.permutation(50))


def test_without_shuffling_every_epoch_has_the_stored_order():
    samples = np.array([7, 3, 9, 1])
    one = {"clients": np.zeros(1, int), "epochs": np.array([2]), "batch": 2, "rule": "drop", "shuffle": False}
    (batches,) = schedule.job_batches([samples], schedule.streams(0, 0), **one)
    np.testing.assert_array_equal(batches, [[7, 3], [9, 1]] * 2)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 5), rules, st.integers(0, 40), st.data())
def test_a_job_s_batches_do_not_depend_on_the_others(counts, batch, rule, round, data):
    k, epochs = data.draw(st.integers(0, len(counts) - 1)), np.arange(len(counts)) % 3
    lists, numbers = [np.arange(n) + 100 * i for i, n in enumerate(counts)], 7 * np.arange(len(counts))
    how = {"batch": batch, "rule": rule}
    own = schedule.streams(1, round)(int(numbers[k]), 0).permutation(lists[k])
    together = schedule.job_batches(lists, schedule.streams(1, round), clients=numbers, epochs=epochs, **how)
    one = {"clients": numbers[k : k + 1], **how}
    (alone,) = schedule.job_batches(lists[k : k + 1], schedule.streams(1, round), epochs=epochs[k : k + 1], **one)
    np.testing.assert_array_equal(together[k], alone)
    first = alone[: schedule.batches_per_epoch(counts[k], batch, rule)].ravel()
    used = min(len(first), counts[k])
    np.testing.assert_array_equal(first[:used], own[:used])
    draws = schedule.streams(1, 0)
    together = schedule.endless_batches(lists, draws, clients=numbers, round=round, steps=4, **how)
    (alone,) = schedule.endless_batches(lists[k : k + 1], draws, round=round, steps=4, **one)
    np.testing.assert_array_equal(together[k], alone)


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_packing_wastes_little_when_clients_outnumber_lanes(lanes):
    steps = np.random.default_rng(0).integers(1, 50, 100)
    plan = schedule.pack([np.zeros((n, 1), np.int32) for n in steps], lanes, steps=int(steps.sum()))
    assert plan.step_stop.max() * lanes <= 1.05 * steps.sum()


def test_devices_have_about_equally_much_to_do():
    batches = [np.zeros((steps, 1), np.int32) for steps in (8, 4, 2, 2)]
    members = schedule.divide(batches, 1, 2, steps=16).members
    assert [own[own >= 0].tolist() for own in members] == [[0], [1, 2, 3]]
