"""Client state in host memory or on disk: what the device holds of it, and runs that compare it with the device."""

import gc
import json
import os
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from fedjax_pcdd.cli.run import main
from fedjax_pcdd.engine.program import State
from fedjax_pcdd.engine.storage import OnDevice, OnDisk, OnHost
from fedjax_pcdd.errors import UserError


@pytest.mark.thorough
def test_the_device_holds_the_state_of_the_cohort_only():
    simulated = toy.simulation("moon", client_state="host")
    state, rows = simulated.start(), np.array([4, 1, 3])
    fetched = simulated.storage.fetch(state, rows)
    for all_rows, cohort_rows in zip(jax.tree.leaves(state.clients), jax.tree.leaves(fetched.clients), strict=True):
        assert isinstance(cohort_rows, jax.Array)
        np.testing.assert_array_equal(all_rows[rows], cohort_rows)


def test_states_of_several_experiments_are_freed_leaf_by_leaf_as_they_are_joined(monkeypatch):
    parts, alive = [], []

    def make(e, rows):
        leaves = {name: jnp.full((len(rows), 2), 10.0 * e + i) for i, name in enumerate("abc")}
        parts.extend(map(weakref.ref, leaves.values()))
        return leaves

    def joined(arrays, join=jnp.concatenate):
        alive.append(sum(part() is not None for part in parts))
        return join(arrays)

    monkeypatch.setattr(jnp, "concatenate", joined)
    state = OnDevice(4, 1, None).initial(make, 2)
    assert alive == [6, 4, 2]
    assert {name: x[:, 0].tolist() for name, x in state.items()} == {
        "a": [0, 0, 10, 10], "b": [1, 1, 11, 11], "c": [2, 2, 12, 12]
    }  # fmt: skip


def test_only_clients_that_trained_are_written():
    storage = OnHost(4, chunk=2)
    state = State((), {"w": np.arange(4.0)}, ())
    after = State((), {"w": np.array([10.0, 20.0])}, ())
    stored = storage.store(state, after, np.array([2, 0]), np.array([True, False]))
    assert stored.clients["w"].tolist() == [0.0, 1.0, 10.0, 3.0]


def test_clients_that_trained_are_reported_once_for_the_next_checkpoint():
    storage, state = OnHost(4, chunk=2), State((), {"w": np.arange(4.0)}, ())
    for rows in ([2, 0], [3, 1]):
        storage.store(state, State((), {"w": np.ones(2)}, ()), np.array(rows), np.array([True, False]))
    assert storage.changed().tolist() == [2, 3]
    assert storage.changed().tolist() == []


def test_a_client_repeated_to_fill_up_a_portion_counts_as_first_only_once(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    storage, state = OnDevice(5, 1, np.array([0, 0, 0, 1, 1])), State((), {"w": np.arange(5.0)}, ())
    portions = list(storage.portions(state, 2))
    assert [portion.rows.tolist() for portion in portions] == [[0, 3], [1, 4], [2, 4]]
    assert [portion.first.tolist() for portion in portions] == [[True, True], [True, True], [True, False]]


def test_chunks_are_equally_long_and_cover_all_rows():
    chunks = list(OnHost(5, chunk=2).chunks())
    assert {len(c) for c in chunks} == {2}
    assert np.concatenate(chunks)[:5].tolist() == [0, 1, 2, 3, 4]


def test_clients_that_fit_in_one_chunk_are_processed_in_one():
    assert [rows.tolist() for rows in OnDevice(3, 1, None).chunks(9)] == [[0, 1, 2]]


@pytest.mark.thorough
def test_local_statistics_are_the_same_on_device_and_host():
    statistics = {}
    for client_state in ("device", "host"):
        simulated = toy.simulation("fedgela", normalise="batch", client_state=client_state, local_statistics=True)
        statistics[client_state] = toy.train(simulated, (0, 1))[0].statistics
    for a, b in zip(jax.tree.leaves(statistics["device"]), jax.tree.leaves(statistics["host"]), strict=True):
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def test_prefetched_rows_are_updated_by_the_round_in_between():
    """Rows 0, 3 and 2 are fetched during the round of rows 2 and 0, in which 2 turns out not to have trained."""
    storage = OnHost(4, chunk=2)
    before = State((), {"w": np.arange(4.0)}, {"s": np.arange(4.0) * 2})
    storage.prefetch(before, np.array([0, 3, 2]))
    held = storage._ahead.held
    after = State((), {"w": np.array([10.0, 20.0])}, {"s": np.array([30.0, 40.0])})
    state = storage.store(before, after, np.array([2, 0]), np.array([False, True]))
    state.clients["w"][3] = np.nan  # prefetched rows are not read again
    fetched = storage.fetch(state, np.array([0, 3, 2]))
    assert np.array(fetched.clients["w"]).tolist() == [20.0, 3.0, 2.0]
    assert np.array(fetched.statistics["s"]).tolist() == [40.0, 6.0, 4.0]
    assert all(array.is_deleted() for array in jax.tree.leaves(held))  # its memory is that of the new rows


def test_prefetched_rows_serve_no_other_rows_and_no_other_state():
    storage = OnHost(3, chunk=2)
    state, other_state = (State((), {"w": np.arange(3.0) + shift}, ()) for shift in (0, 5))
    for requested_state, rows, expected in ((state, [1, 2], [1.0, 2.0]), (other_state, [0, 1], [5.0, 6.0])):
        storage.prefetch(state, np.array([0, 1]))
        assert np.array(storage.fetch(requested_state, np.array(rows)).clients["w"]).tolist() == expected


def test_prefetched_statistics_serve_no_other_state_where_clients_keep_nothing_else():
    storage = OnHost(3, chunk=2)
    state, other_state = (State((), (), {"s": np.arange(3.0) + shift}) for shift in (0, 5))
    storage.prefetch(state, np.array([0, 1]))
    assert np.array(storage.fetch(other_state, np.array([0, 1])).statistics["s"]).tolist() == [5.0, 6.0]
    storage.prefetch(state, np.array([0, 1]))
    assert np.array(storage.fetch(state, np.array([0, 1])).statistics["s"]).tolist() == [0.0, 1.0]


def test_rows_on_disk_survive_partial_writes_and_reads(monkeypatch):
    read, write = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: read(file, [buffers[0][:5]], offset))
    monkeypatch.setattr(os, "pwrite", lambda file, content, offset: write(file, content[:3], offset))
    storage, values = OnDisk(4, chunk=2), np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    array = storage.array((4, 3), np.dtype(np.float32))
    storage.put(array, np.array([2, 0]), values)
    np.testing.assert_array_equal(storage.get(array, np.array([0, 1, 2])), [values[1], [0, 0, 0], values[0]])


def test_a_copy_of_clients_on_disk_has_all_rows_and_shares_none():
    storage, all_rows = OnDisk(5, chunk=2), np.arange(5)
    array, values = storage.array((5, 3), np.dtype(np.float32)), np.arange(15, dtype=np.float32).reshape(5, 3)
    storage.put(array, all_rows, values)
    copy = storage.copied(State((), {"w": array}, ())).clients["w"]
    np.testing.assert_array_equal(storage.get(copy, all_rows), values)
    storage.put(copy, all_rows, -values)
    np.testing.assert_array_equal(storage.get(array, all_rows), values)


def test_another_thread_may_make_a_state_while_what_was_read_leaves_memory(monkeypatch):
    made = []

    class Memory:
        def madvise(self, advice):
            made.append(Memory())
            files[made[-1]] = 0

    first, files = Memory(), weakref.WeakKeyDictionary()
    files[first] = 0
    monkeypatch.setattr(OnDisk, "_files", files)
    OnDisk(4, chunk=2).release()
    assert len(made) == 1


def test_the_file_of_an_unused_state_is_closed():
    storage = OnDisk(4, chunk=2)
    array = storage.array((4, 3), np.dtype(np.float32))
    file = storage._file(array)
    os.fstat(file)
    del array
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


@pytest.mark.parametrize("storage", [OnDevice(3, 1, None), OnHost(3, chunk=2)])
def test_a_copy_of_a_state_shares_no_memory_with_it(storage):
    state = State({"v": np.zeros(2)}, {"w": np.arange(3.0)}, {"s": np.zeros(3)})
    copy = storage.copied(state)
    for original, copied in zip(jax.tree.leaves(state), jax.tree.leaves(copy), strict=True):
        np.testing.assert_array_equal(original, copied)
        assert not np.shares_memory(original, copied)


def test_a_disk_without_room_for_client_state_is_a_user_error(monkeypatch):
    def report_full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", report_full_disk)
    with pytest.raises(
        UserError, match=r"has no room for 0 MB of clients' state \(No space left on device\): set TMPDIR"
    ):
        toy.simulation("moon", client_state="disk").start()


@pytest.mark.thorough
def test_a_disk_that_is_full_when_state_is_written_is_a_user_error(monkeypatch):
    simulation = toy.simulation("moon", client_state="disk")
    state, plan = simulation.start(), simulation.plan(0)

    def report_full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", report_full_disk)
    with pytest.raises(UserError, match=r"has no room .*No space left on device.* resume the run if it had begun"):
        simulation.step(state, 0, plan)


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["fedrep", "feddyn"])
def test_a_run_with_clients_on_the_host_gives_the_same_and_can_be_resumed(method, tmp_path):
    """Fine-tuning is included, as it visits every client."""
    options = ["--rounds=3", "--cohort=4", "--local-epochs=1", "--fine-tune-epochs=2", "--lanes=1", "--quiet"]
    results = {}
    for client_state in ("device", "host"):
        folder = tmp_path / client_state
        assert main([f"--method={method}", *options, f"--client-state={client_state}", f"--run-dir={folder}"]) == 0
        results[client_state] = json.loads((folder / "summary.json").read_text())
    for key in ("ga_best", "ga_last", "pa_best", "pa_last"):
        assert results["device"][key] == pytest.approx(results["host"][key], abs=1e-6)
    assert main([f"--resume={tmp_path / 'host'}", "--quiet"]) == 0
    resumed = json.loads((tmp_path / "host" / "summary.json").read_text())
    assert resumed["pa_last"] == results["host"]["pa_last"]
