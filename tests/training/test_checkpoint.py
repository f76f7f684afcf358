"""Checkpoints survive what happens to runs: kills, full disks, damaged files, donated buffers."""

import errno
import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_pcdd.engine import program
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training import checkpoint, named_arrays
from fedjax_pcdd.training.checkpoint import Checkpoints, Pace
from fedjax_pcdd.training.loop import Callback
from fedjax_pcdd.training.metrics import History
from fedjax_pcdd.training.saving import Checkpoint, check_space, required_bytes


class State(NamedTuple):
    variables: dict
    momentum: tuple
    extra: Any


def server(round):
    kernel = jax.random.normal(jax.random.key(round), (30, 20))
    return {"params": {"dense": {"kernel": kernel, "bias": jnp.full(20, round / 3, jnp.float32)}}}


def clients(round):
    return jnp.arange(50.0).reshape(10, 5) * round


def save(checkpoints, *rounds):
    for round in rounds:
        checkpoints.save(round, server(round), clients(round), json.dumps({"rows": [{"round": round}]}))
    checkpoints.wait()


def rounds_in(folder):
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def same_bits(left, right):
    equal = jax.tree.map(lambda a, b: a.dtype == b.dtype and bytes(a.tobytes()) == bytes(b.tobytes()), left, right)
    return jax.tree.structure(left) == jax.tree.structure(right) and all(jax.tree.leaves(equal))


def largest_file(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def truncate(folder):
    path = largest_file(folder / "server")
    os.truncate(path, path.stat().st_size // 2)


def flip_bit(folder):
    path = largest_file(folder / "server")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def delete_data(folder):
    largest_file(folder / "server").unlink()


def delete_manifest(folder):
    (folder / "server" / "manifest.ocdbt").unlink()


def change_history(folder):
    path = folder / "record" / "metadata"
    path.write_text(path.read_text().replace('round\\": 3', 'round\\": 8'))


def delete_clients(folder):
    shutil.rmtree(folder / "clients")


DAMAGES = [truncate, flip_bit, delete_data, delete_manifest, change_history, delete_clients]


@pytest.fixture
def sentences():
    return []


@pytest.fixture
def opened(tmp_path, sentences):
    all_opened = []

    def open_checkpoints(**options):
        all_opened.append(Checkpoints(tmp_path, say=sentences.append, **options))
        return all_opened[-1]

    yield open_checkpoints
    for checkpoints in all_opened:
        checkpoints.close()


def test_a_restored_checkpoint_is_the_saved_one_bit_for_bit(opened):
    tree = State(
        variables={"params": {"a/b": jnp.array([0.1, np.nan, -0.0, np.inf])}, "batch_stats": {}},
        momentum=(jnp.array([True, False]), jnp.arange(5, dtype=jnp.int32), jnp.uint8(7), ()),
        extra=[jnp.full((2, 3), 1 / 3, jnp.bfloat16), np.array([1 / 3, 1e-300]), jnp.zeros((0, 4)), jnp.float32(1 / 3)],
    )
    checkpoints = opened()
    checkpoints.save(4, tree, (), json.dumps({"rows": [{"round": 4, "loss": 1 / 3}]}))
    checkpoints.wait()
    restored = opened().restore(tree, ())
    assert restored.round == 4
    assert restored.clients == ()
    assert restored.history == {"rows": [{"round": 4, "loss": 1 / 3}]}
    assert same_bits(restored.server, tree)


def test_float64_is_restored_bit_for_bit(x64, opened):
    tree = {"w": jnp.array([1 / 3, 1e-300], dtype=jnp.float64)}
    checkpoints = opened()
    checkpoints.save(1, tree, tree, "{}")
    assert same_bits(checkpoints.restore(tree, tree).clients, tree)


def test_an_abstract_template_is_enough_to_restore(opened):
    checkpoints = opened()
    save(checkpoints, 1)
    abstract = jax.eval_shape(lambda: (server(1), clients(1)))
    assert same_bits(checkpoints.restore(*abstract).server, server(1))


def test_restoring_from_an_empty_folder_gives_none(opened):
    assert opened().restore(server(0), clients(0)) is None


def test_what_a_killed_process_left_is_removed_and_copies_set_aside_are_not(tmp_path, opened):
    for name in ("best", "7.old", "7.orbax-checkpoint-tmp", "8.orbax-checkpoint-tmp-123", "removed"):
        (tmp_path / name / "server").mkdir(parents=True)
    opened()
    assert {path.name for path in tmp_path.iterdir()} == {"best", "7.old"}


def test_the_newest_checkpoints_are_kept(tmp_path, opened):
    save(opened(keep=3), 1, 2, 3, 4, 5)
    assert rounds_in(tmp_path) == [3, 4, 5]


def test_two_full_checkpoints_are_kept_behind_newer_server_only_ones(tmp_path, opened):
    save(opened(keep=2, clients_every=4), *range(1, 12))
    assert rounds_in(tmp_path) == [4, 8, 10, 11]


def test_retention_counts_full_checkpoints_of_earlier_processes(tmp_path, opened):
    save(opened(keep=1, clients_every=2), 1, 2, 3, 4, 5)
    save(opened(keep=1, clients_every=2), 6, 7)
    assert rounds_in(tmp_path) == [4, 6, 7]


def test_every_thins_checkpoints_and_force_overrides_it(tmp_path, opened):
    checkpoints = opened(every=4)
    save(checkpoints, 1, 2, 3, 4, 5, 6)
    checkpoints.save(7, server(7), clients(7), "{}", force=True)
    checkpoints.wait()
    assert rounds_in(tmp_path) == [4, 7]


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves by itself only while a checkpoint is written, by two seconds."""
    clock, write = SimpleNamespace(seconds=100.0), Checkpoints._write

    def slow_write(self, *arguments):
        clock.seconds += 2
        return write(self, *arguments)

    monkeypatch.setattr(checkpoint, "perf_counter", lambda: clock.seconds)
    monkeypatch.setattr(Checkpoints, "_write", slow_write)
    return clock


def test_paced_checkpoints_take_a_tenth_of_the_time(tmp_path, opened, clock):
    checkpoints = opened(every=Pace(), keep=9)
    save(checkpoints, 1, 2)
    clock.seconds += 17.9
    save(checkpoints, 3)
    clock.seconds += 0.2
    save(checkpoints, 4, 5)
    assert rounds_in(tmp_path) == [1, 4]


def test_what_comes_before_a_checkpoint_is_of_the_tenth_if_training_waits_for_it(tmp_path, opened, clock):
    checkpoints = opened(every=Pace(), keep=9)
    clock.seconds += 1
    checkpoints.save(1, server(1), clients(1), "{}", started=clock.seconds - 1)
    checkpoints.wait()
    clock.seconds += 26.9
    save(checkpoints, 2)
    clock.seconds += 0.2
    save(checkpoints, 3)
    assert rounds_in(tmp_path) == [1, 3]


def test_a_paced_checkpoint_is_not_due_while_one_is_being_written(opened, monkeypatch):
    may_write, write = threading.Event(), Checkpoints._write
    monkeypatch.setattr(Checkpoints, "_write", lambda self, *a: (may_write.wait(60), write(self, *a)))
    monkeypatch.setattr(checkpoint, "_RESTS", 0)
    checkpoints = opened(every=Pace())
    checkpoints.save(1, server(1), clients(1), "{}")
    assert not checkpoints.is_due(2)
    may_write.set()
    checkpoints.wait()
    assert until_due(checkpoints, 3)


def until_due(checkpoints, round):
    """The first round from the given one in which a checkpoint is due, asked for again and again."""
    while not checkpoints.is_due(round):
        round += 1
        time.sleep(0.01)
    return round


def test_experiments_with_one_pace_have_checkpoints_of_the_same_rounds(tmp_path, clock):
    pace = Pace()
    with Checkpoints(tmp_path / "a", every=pace, keep=9) as first, Checkpoints(tmp_path / "b", every=pace, keep=9) as b:
        for round in range(1, 60):
            save(first, round)
            clock.seconds += 1.5
            save(b, round)
        rounds = rounds_in(tmp_path / "a")
        assert rounds == rounds_in(tmp_path / "b")
    assert rounds == [1, 35]  # from the first one's start to the second one's end 5.5 s, then a rest of 33 rounds


def test_several_processes_write_every_round(tmp_path, monkeypatch):
    pace = Pace()
    pace.begin(1, 0.0)  # one is being written, so that nothing is due by the pace
    with Checkpoints(tmp_path / "alone", every=pace) as alone:
        assert not alone.is_due(2)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with Checkpoints(tmp_path / "one of two", every=pace) as one_of_two:
        assert one_of_two.is_due(2)


def test_force_overrides_the_pace(tmp_path, opened, clock):
    checkpoints = opened(every=Pace())
    save(checkpoints, 1, 2)
    checkpoints.save(3, server(3), clients(3), "{}", force=True)
    checkpoints.wait()
    assert rounds_in(tmp_path) == [1, 3]


def test_of_paced_checkpoints_the_first_is_full_and_every_nth_after_it(opened, clock):
    checkpoints = opened(every=Pace(), clients_every=2, keep=9)
    full = []
    for round in (1, 2, 5, 6, 7):
        save(checkpoints, round)
        full.append(checkpoints.newest_full)
        clock.seconds += 6 if round == 2 else 20
    assert full == [1, 1, 1, 6, 6]


@pytest.mark.parametrize("nothing", [(), ((), {})])
def test_every_checkpoint_is_full_where_clients_keep_nothing(opened, nothing):
    checkpoints = opened(clients_every=5)
    checkpoints.save(3, server(3), nothing, "{}")
    restored = checkpoints.restore(server(0), nothing)
    assert (restored.round, restored.clients) == (3, nothing)


def test_a_failed_write_is_reported_after_the_next_round_without_a_rest(opened, clock, monkeypatch):
    def fail(*_):
        clock.seconds += 2
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Checkpoints, "_write", fail)
    checkpoints = opened(every=Pace())
    checkpoints.save(1, server(1), clients(1), "{}")
    round = until_due(checkpoints, 2)
    with pytest.raises(UserError, match="no space left"):
        checkpoints.save(round, server(2), clients(2), "{}")


def test_clients_every_counts_checkpoints_not_rounds(opened):
    checkpoints = opened(every=2, clients_every=2)
    save(checkpoints, *range(1, 7))
    assert checkpoints.newest_full == 4


def test_a_resume_starts_from_the_newest_full_checkpoint_and_drops_newer_ones(tmp_path, opened):
    checkpoints = opened(clients_every=3, keep=4)
    save(checkpoints, 3, 4, 5)
    restored = checkpoints.restore(server(0), clients(0))
    assert restored.round == 3
    assert same_bits(restored.clients, clients(3))
    assert rounds_in(tmp_path) == [3]


def test_without_any_full_checkpoint_a_resume_starts_afresh_and_says_so(tmp_path, opened, sentences):
    checkpoints = opened(clients_every=3)
    save(checkpoints, 1, 2)
    assert checkpoints.restore(server(0), clients(0)) is None
    assert "starting from round 0" in sentences[0]
    assert rounds_in(tmp_path) == []


def test_force_completes_a_server_only_checkpoint_of_the_same_round(opened):
    checkpoints = opened(clients_every=3)
    save(checkpoints, 4)
    checkpoints.save(4, server(4), clients(4), "{}", force=True)
    assert checkpoints.restore(server(0), clients(0)).round == 4


def test_a_checkpoint_in_the_folder_of_another_round_is_noticed(tmp_path, opened, sentences):
    save(opened(keep=4), 1, 2, 3)
    shutil.rmtree(tmp_path / "3")
    (tmp_path / "2").rename(tmp_path / "3")
    assert opened().restore(server(0), clients(0)).round == 1
    assert sentences == ["checkpoint of round 3 is damaged (it is that of round 2): continuing from round 1."]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_skipped(tmp_path, opened, sentences, damage):
    save(opened(), 1, 2, 3)
    damage(tmp_path / "3")
    assert opened(read_only=True).restore(server(0), clients(0)).round == 2
    assert sentences.pop().endswith("): using round 2.")
    restored = opened().restore(server(0), clients(0))
    assert restored.round == 2
    assert same_bits(restored.server, server(2))
    assert len(sentences) == 1
    assert sentences[0].startswith("checkpoint of round 3 is damaged (")
    assert sentences[0].endswith("): continuing from round 2.")


def test_a_skipped_checkpoint_can_be_saved_again(tmp_path, opened):
    save(opened(), 1, 2, 3)
    truncate(tmp_path / "3")
    checkpoints = opened()
    checkpoints.restore(server(0), clients(0))
    save(checkpoints, 3)
    assert same_bits(checkpoints.restore(server(0), clients(0)).server, server(3))


def test_a_skipped_checkpoint_is_no_longer_the_newest_full_one(tmp_path, opened):
    save(opened(), 1, 2, 3)
    truncate(tmp_path / "3")
    checkpoints = opened()
    assert checkpoints.newest_full == 3
    checkpoints.restore(server(0), clients(0))
    assert checkpoints.newest_full == 2


def test_the_newest_record_is_that_of_the_newest_full_checkpoint(opened):
    checkpoints = opened(clients_every=2)
    save(checkpoints, *range(1, 6))
    assert checkpoints.newest_record() == {"rows": [{"round": 4}]}


def test_a_folder_of_damaged_checkpoints_alone_is_a_user_error(tmp_path, opened):
    save(opened(), 1, 2)
    truncate(tmp_path / "1")
    delete_data(tmp_path / "2")
    with pytest.raises(UserError, match=r"no checkpoint in .* is intact \(round 2: .*round 1: "):
        opened().restore(server(0), clients(0))


def test_lack_of_memory_is_not_taken_for_damage(tmp_path, opened, monkeypatch):
    checkpoints = opened()
    save(checkpoints, 1, 2)

    def fail(*_, **__):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, "restore", fail)
        with pytest.raises(MemoryError):
            checkpoints.restore(server(0), clients(0))
    assert rounds_in(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"params": {"dense": {"kernel": jnp.zeros((30, 21)), "bias": jnp.zeros(20)}}}, r"float32\[30, 20\] there"),
        ({"params": {"dense": {"kernel": jnp.zeros((30, 20))}}}, "missing here"),
        ({"params": {"dense": {"kernel": jnp.zeros((30, 20)), "bias": jnp.zeros(20, jnp.int32)}}}, r"int32\[20\] here"),
    ],
)
def test_restoring_another_configuration_is_refused_and_removes_nothing(tmp_path, opened, template, message):
    checkpoints = opened()
    save(checkpoints, 1, 2)
    with pytest.raises(UserError, match=message):
        checkpoints.restore(template, clients(0))
    assert rounds_in(tmp_path) == [1, 2]


def test_buffers_may_be_donated_as_soon_as_save_returns(opened):
    overwrite = jax.jit(lambda tree: jax.tree.map(lambda a: a * 0 - 1, tree), donate_argnums=0)
    checkpoints = opened()
    for round in range(1, 6):
        state = jax.block_until_ready((server(round), clients(round)))
        checkpoints.save(round, *state, "{}")
        jax.block_until_ready(overwrite(state))
        assert jax.tree.leaves(state)[0].is_deleted()
        assert same_bits(checkpoints.restore(server(0), clients(0))[1:3], (server(round), clients(round)))


def test_a_snapshot_does_not_block_donation(opened):
    state = jax.block_until_ready(jnp.ones((256, 256)))
    address = state.unsafe_buffer_pointer()
    opened().save(1, state, (), "{}")
    assert jax.jit(lambda a: a + 1, donate_argnums=0)(state).unsafe_buffer_pointer() == address


def test_a_snapshot_of_host_memory_is_a_copy():
    array = np.zeros(3)
    (copied,) = named_arrays.snapshot("clients", array).values()
    assert not np.shares_memory(copied, array)


def test_a_restored_tree_needs_no_new_compilation(opened):
    traces = []
    step = jax.jit(lambda tree: traces.append(tree) or jax.tree.map(lambda a: a + 1, tree))
    step(server(1))
    checkpoints = opened()
    save(checkpoints, 1)
    restored = checkpoints.restore(server(0), clients(0)).server
    step(restored)
    assert len(traces) == 1
    assert all(not leaf.committed for leaf in jax.tree.leaves(restored))


def test_save_returns_before_the_checkpoint_is_written(opened, monkeypatch):
    checkpoints = opened()
    write = checkpoints._write

    def slow(*args):
        time.sleep(0.5)
        write(*args)

    monkeypatch.setattr(checkpoints, "_write", slow)
    start = time.perf_counter()
    checkpoints.save(1, server(1), clients(1), "{}")
    assert time.perf_counter() - start < 0.4
    assert checkpoints.restore(server(0), clients(0)).round == 1


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), ValueError("Error writing: [OS error 28: No space left on device]")],
)
def test_a_disk_that_fills_up_is_a_user_error_at_the_next_call(opened, monkeypatch, error):
    checkpoints = opened()
    save(checkpoints, 1)

    def full(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, "save", full)
        checkpoints.save(2, server(2), clients(2), "{}")
        with pytest.raises(UserError, match="no space left"):
            checkpoints.save(3, server(3), clients(3), "{}")
    assert checkpoints.restore(server(0), clients(0)).round == 1


MANY_LEAVES = {f"leaf{i}": np.full((10, 300), float(i)) for i in range(40)}


@pytest.mark.thorough
def test_a_full_disk_leaves_no_write_behind_that_prints_a_traceback(tmp_path, opened, monkeypatch):
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", printed.append)  # which TensorStore's threads print through
    limits_before = resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = opened()
    checkpoints.save(1, MANY_LEAVES, MANY_LEAVES, "{}")
    checkpoints.wait()
    for round in (2, 2, 2, 3):  # writes of a failed attempt may still be under way
        resource.setrlimit(resource.RLIMIT_FSIZE, (30000, limits_before[1]))
        try:
            checkpoints.save(round, MANY_LEAVES, MANY_LEAVES, "{}")
            with pytest.raises(UserError, match="larger than a file may be"):
                checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits_before)
        assert [path.name for path in tmp_path.iterdir()] == ["1"]  # what the failed attempt wrote is removed
    assert checkpoints.restore(MANY_LEAVES, MANY_LEAVES).round == 1
    assert not printed


def test_the_estimated_size_covers_a_checkpoint_and_little_more(tmp_path, opened):
    state = jnp.ones((512, 1024))
    checkpoints = opened()
    checkpoints.save(1, state, state, "{}")
    checkpoints.wait()
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert written <= required_bytes(jax.eval_shape(lambda: state), state) <= 1.1 * written


def test_too_little_space_is_a_user_error_before_the_start(tmp_path, monkeypatch):
    required = 4 * required_bytes(server(1), clients(1))
    check_space(tmp_path / "not" / "yet", required)
    usage = shutil.disk_usage(tmp_path)._replace(free=required - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match="free some space"):
        check_space(tmp_path / "not" / "yet", required)


def finished_run(state, best, stopped):
    """A run after its last round, with the attributes that a checkpoint reads."""
    attributes = {"round": 2, "is_over": True, "history": History([{"round": 1}, {"round": 2}]), "stopped": stopped}
    return SimpleNamespace(state=state, best=best, simulation=None, runs=[], **attributes)


def test_states_of_callbacks_of_equally_named_classes_are_kept_apart(opened):
    class Counting(Callback):
        def __init__(self, count):
            self.count = count

        def state(self):
            return self.count

        def restore(self, state):
            self.count = state

    counting = [Counting(1), type("Counting", (Counting,), {})(2), Counting(3)]
    run = finished_run(program.State(server(2), clients(2), ()), server(1), False)
    saving = Checkpoint(opened(every=5), counting)
    saving.on_round(run, None)
    saving.on_end(run)
    restored = [type(callback)(0) for callback in counting]
    Checkpoint(opened(), restored).begin(program.State(server(0), clients(0), ()), server(0))
    assert [callback.count for callback in restored] == [1, 2, 3]


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_begins_with_the_saved_state_best_model_and_history(opened, stopped):
    initial_state = program.State(server(0), clients(0), {"mean": jnp.zeros(3)})
    state = program.State(server(2), clients(2), {"mean": jnp.arange(3.0)})
    callback, run = Checkpoint(opened(every=5)), finished_run(state, server(1), stopped)
    callback.on_round(run, None)
    callback.on_end(run)
    restored, progress = Checkpoint(opened()).begin(initial_state, server(0))
    assert same_bits(restored, state)
    assert same_bits(progress.best, server(1))
    assert (progress.round, progress.history.rows, progress.stopped) == (2, [{"round": 1}, {"round": 2}], stopped)


def test_orbax_logs_nothing_and_other_users_of_its_logger_still_do(opened, caplog):
    caplog.set_level(logging.INFO, logger="absl")
    save(opened(), 1)
    assert not caplog.records
    logging.getLogger("absl").warning("mine")
    assert [record.message for record in caplog.records] == ["mine"]


ENDLESS = """
import json
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_checkpoint import Checkpoints, clients, server

with Checkpoints(Path(sys.argv[1]), keep=2) as checkpoints:
    restored = checkpoints.restore(server(0), clients(0))
    round = 0 if restored is None else restored.round
    while True:
        round += 1
        checkpoints.save(round, server(round), clients(round), json.dumps({"rows": list(range(round))}))
        print(round, flush=True)
"""


@pytest.mark.thorough
def test_a_killed_process_leaves_usable_checkpoints(tmp_path, opened, sentences):
    rng = random.Random(0)
    for _ in range(3):
        command = [sys.executable, "-c", ENDLESS, str(tmp_path), os.path.dirname(__file__)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        saved_rounds = [int(process.stdout.readline()) for _ in range(4)]
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        saved_rounds += [int(line) for line in process.communicate()[0].split()]
        restored = opened(keep=2).restore(server(0), clients(0))
        assert restored.round >= max(saved_rounds) - 1
        assert same_bits(restored.server, server(restored.round))
        assert restored.history == {"rows": list(range(restored.round))}
        assert [path.name for path in tmp_path.iterdir() if not path.name.isdigit()] == []
    assert sentences == []
