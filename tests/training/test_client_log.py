"""The log of changes to clients' states for checkpoints, and runs whose clients' states live on disk."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fedjax_pcdd.cli.run import main
from fedjax_pcdd.training import client_log
from fedjax_pcdd.training.checkpoint import Checkpoints
from fedjax_pcdd.training.client_log import Changed, ClientLog


def states(value=0.0):
    return {"a": np.full((6, 2), value, np.float32), "b": [np.full(6, int(value))]}


def written_log(folder, rounds=8, seed=0):
    """A log of some rounds, and the states after each of them."""
    log, current, states_after = ClientLog(folder), states(), {0: states()}
    rng = np.random.default_rng(seed)
    for r in range(1, rounds + 1):
        rows = np.sort(rng.choice(6, 3, replace=False))
        current["a"][rows], current["b"][0][rows] = rng.normal(size=(3, 2)), r
        log.append(r, rows, [current["a"][rows], current["b"][0][rows]])
        states_after[r] = {"a": current["a"].copy(), "b": [current["b"][0].copy()]}
    return log, states_after


def assert_replays(log, round, expected):
    fresh = states()
    log.check(round, None)
    log.replay(round, fresh)
    np.testing.assert_array_equal(fresh["a"], expected["a"])
    np.testing.assert_array_equal(fresh["b"][0], expected["b"][0])


def test_a_replay_gives_the_states_of_any_round(tmp_path):
    log, states_after = written_log(tmp_path)
    for r in (1, 5, 8):
        assert_replays(log, r, states_after[r])


def test_merged_entries_give_the_same_states(tmp_path):
    log, states_after = written_log(tmp_path)
    log.merge(5, states())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["5-merged", "6", "7", "8"]
    for r in (5, 6, 8):
        assert_replays(log, r, states_after[r])
    log.merge(7, states())
    assert_replays(log, 8, states_after[8])


def test_a_kill_while_entries_are_merged_loses_nothing(tmp_path):
    log, states_after = written_log(tmp_path / "log")
    shutil.copytree(tmp_path / "log", tmp_path / "before")
    log.merge(5, states())
    shutil.copytree(tmp_path / "before" / "3", tmp_path / "log" / "3")  # not removed yet
    (tmp_path / "log" / "7-merged.unfinished").mkdir()
    assert_replays(log, 8, states_after[8])
    log.discard_after(6)
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["5-merged", "6"]
    assert_replays(log, 6, states_after[6])


@pytest.mark.parametrize("damage", ["flip", "cut", "remove file", "remove entry", "remove last"])
def test_damage_of_an_entry_is_noticed(tmp_path, damage):
    log, _ = written_log(tmp_path)
    file = tmp_path / "4" / "0.npy"
    if damage == "flip":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-4])
    elif damage == "remove file":
        file.unlink()
    else:
        shutil.rmtree(tmp_path / ("4" if damage == "remove entry" else "8"))
    with pytest.raises((ValueError, FileNotFoundError)):
        log.check(8, None)
    log.check(3, None)


def mark_of(entry):
    return json.loads((entry / "entry.json").read_text())["mark"]


def test_entries_of_another_run_are_noticed(tmp_path):
    log, _ = written_log(tmp_path / "a")
    written_log(tmp_path / "b", seed=1)
    mark = mark_of(tmp_path / "a" / "8")
    log.check(8, mark)
    with pytest.raises(ValueError, match="the entry 8 of b is of another run"):
        ClientLog(tmp_path / "b").check(8, mark)
    shutil.rmtree(tmp_path / "a" / "4")
    shutil.copytree(tmp_path / "b" / "4", tmp_path / "a" / "4")
    with pytest.raises(ValueError, match="the entry 4 of a is damaged, or not of the one before"):
        log.check(8, mark)


def test_a_resume_drops_the_entries_of_rounds_after_its_checkpoint(tmp_path):
    server, current = {"w": np.zeros(1)}, {"a": np.zeros((6, 2), np.float32)}
    with Checkpoints(tmp_path / "checkpoints", say=lambda _: None) as checkpoints:
        for r in (1, 2, 3):
            current["a"][r] = r
            checkpoints.save(r, server, partial(Changed, np.array([r]), current), "{}")
        checkpoints.wait()
        (tmp_path / "checkpoints/3/server/manifest.ocdbt").unlink()
        fresh = {"a": np.zeros((6, 2), np.float32)}
        assert checkpoints.restore(server, fresh).round == 2
    assert fresh["a"][:, 0].tolist() == [0, 1, 2, 0, 0, 0]
    assert sorted(path.name for path in (tmp_path / "clients").iterdir()) == ["1", "2"]


def test_entries_are_measured_once_and_anew_where_rounds_are_repeated(tmp_path, monkeypatch):
    log, large = ClientLog(tmp_path), np.zeros((6, 1000), np.float32)
    log.append(1, np.array([0]), [large[:1]])
    log.append(2, np.array([1]), [large[:1]])
    log.merge(2, large)
    with monkeypatch.context() as patched:
        patched.setattr(client_log, "_parts", lambda entry: pytest.fail(f"{entry} is listed again"))
        log.merge(2, large)
    log.discard_after(1)
    log.append(2, np.arange(6), [large])
    log.merge(2, large)  # 7 of 12 rows
    log.append(3, np.arange(5), [large[:5]])
    log.merge(3, large)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3-merged"]


def test_what_is_no_entry_stays_where_it_is(tmp_path):
    log, _ = written_log(tmp_path, rounds=3)
    for name in ("4.parts", "3.unfinished", "2.parts.unfinished", "analysis"):
        (tmp_path / name).mkdir()
    (tmp_path / "README.md").write_text("mine")
    log.discard_after(1)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "analysis", "README.md"}


def test_a_merged_entry_has_the_mark_of_its_last_one(tmp_path):
    log, _ = written_log(tmp_path)
    mark_of_5, mark_of_8 = mark_of(tmp_path / "5"), mark_of(tmp_path / "8")
    log.merge(5, states())
    log.check(5, mark_of_5)
    log.check(8, mark_of_8)


def test_entries_without_marks_are_still_read_and_marked_ones_may_follow(tmp_path):
    log, states_after = written_log(tmp_path, rounds=3)
    for entry in tmp_path.iterdir():
        record = json.loads((entry / "entry.json").read_text())
        (entry / "entry.json").write_text(json.dumps({"before": record["before"], "files": record["files"]}))
    assert_replays(log, 3, states_after[3])
    mark = log.append(4, np.array([0]), [np.zeros((1, 2), np.float32), np.zeros(1, int)])
    log.check(4, mark)
    log.merge(3, states())
    log.check(4, mark)


def log_of_three_processes(folder, rounds=8):
    """As `written_log`, where each of three processes writes the rows of its own two clients."""
    log, current, states_after = ClientLog(folder), states(), {}
    rng = np.random.default_rng(1)
    for r in range(1, rounds + 1):
        rows = np.sort(rng.choice(6, 4, replace=False))
        current["a"][rows], current["b"][0][rows] = rng.normal(size=(4, 2)), r
        rows_of = [rows[rows // 2 == p] for p in range(3)]
        parts = [
            log.append_part(r, p, rows_of[p], [current["a"][rows_of[p]], current["b"][0][rows_of[p]]]) for p in (1, 2)
        ]
        log.append(r, rows_of[0], [current["a"][rows_of[0]], current["b"][0][rows_of[0]]], parts)
        states_after[r] = {"a": current["a"].copy(), "b": [current["b"][0].copy()]}
    return log, states_after


def test_parts_of_processes_are_replayed_merged_and_removed_with_entries(tmp_path):
    log, states_after = log_of_three_processes(tmp_path)
    for r in (1, 8):
        assert_replays(log, r, states_after[r])
    log.merge(5, states())
    assert {path.name for path in tmp_path.iterdir()} == {
        "5-merged",
        *(f"{r}{x}" for r in (6, 7, 8) for x in ("", ".parts")),
    }
    assert_replays(log, 8, states_after[8])
    log.append_part(
        9, 1, np.array([2]), [np.zeros((1, 2), np.float32), np.zeros(1, int)]
    )  # killed before the first process wrote
    log.discard_after(7)
    assert {path.name for path in tmp_path.iterdir()} == {"5-merged", "6", "6.parts", "7", "7.parts"}
    assert_replays(log, 7, states_after[7])


def test_damage_of_a_part_is_noticed(tmp_path):
    log, _ = log_of_three_processes(tmp_path)
    file = tmp_path / "4.parts" / "2" / "0.npy"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    log.check(3, None)
    with pytest.raises(ValueError, match=r"entry 4 of .* is damaged"):
        log.check(8, None)
    shutil.rmtree(file.parent)
    with pytest.raises(FileNotFoundError):
        log.check(8, None)


RUN = ["--method=scaffold", "--rounds=4", "--cohort=3", "--clients=8", "--local-epochs=1", "--fine-tune-epochs=0"]
RUN += ["--lanes=1", "--train-samples=160", "--test-samples=40", "--tune=off", "--quiet", "--checkpoint-every=1"]


def rows(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [[line[name] for name in ("round", "loss", "ga", "pa")] for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run with its clients' states on disk."""
    folder = tmp_path_factory.mktemp("disk") / "run"
    assert main([*RUN, "--client-state=disk", f"--run-dir={folder}"]) == 0
    return folder


@pytest.mark.thorough
def test_a_run_on_disk_equals_one_on_the_host_and_writes_what_changed(whole, tmp_path):
    assert main([*RUN, "--client-state=host", f"--run-dir={tmp_path / 'run'}"]) == 0
    assert rows(tmp_path / "run") == rows(whole)
    assert [len(np.load(whole / "clients" / str(r) / "rows.npy")) for r in range(1, 5)] == [3, 3, 3, 3]


@pytest.mark.thorough
@pytest.mark.parametrize("damaged", [False, True])
def test_a_run_is_resumed_from_its_log_to_the_same_bits(whole, tmp_path, damaged, capsys):
    shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    if damaged:
        file = tmp_path / "run" / "clients" / "3" / "1.npy"
        file.write_bytes(file.read_bytes()[:-1])
    assert main([f"--resume={tmp_path / 'run'}", "--no-quiet"]) == 0
    assert rows(tmp_path / "run") == rows(whole)
    assert ("checkpoint of round 3 is damaged" in capsys.readouterr().err) == damaged


@pytest.mark.thorough
def test_states_of_another_run_are_not_trained_on(whole, tmp_path, capsys):
    other, folder = tmp_path / "other", tmp_path / "run"
    assert main([*RUN, "--client-state=disk", "--seed=1", f"--run-dir={other}"]) == 0
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "4")
    shutil.rmtree(folder / "clients")
    shutil.copytree(other / "clients", folder / "clients")
    assert main([f"--resume={folder}"]) == 2
    assert "the entry 3 of clients is of another run" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_full_disk_while_the_log_is_written_is_reported_and_loses_nothing(whole, tmp_path, capsys, monkeypatch):
    def full(folder, rows, values, original=client_log._save):
        if folder.name.startswith("3"):
            raise OSError(28, "No space left on device")
        original(folder, rows, values)

    with monkeypatch.context() as patch:
        patch.setattr(client_log, "_save", full)
        assert main([*RUN, "--client-state=disk", f"--run-dir={tmp_path / 'run'}"]) == 2
    err = capsys.readouterr().err
    assert (err.count("\n"), "free some and resume the run" in err) == (1, True)
    assert main([f"--resume={tmp_path / 'run'}"]) == 0
    assert rows(tmp_path / "run") == rows(whole)


def test_a_checkpoint_with_all_states_is_resumed_and_logged_from_there_on(tmp_path):
    """Runs of earlier versions with clients on the host have such checkpoints."""
    server, folder = {"w": np.zeros(2)}, tmp_path / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, server, states(1.0), "{}")
    with Checkpoints(folder) as checkpoints:
        current = checkpoints.restore(server, states()).clients
        current["a"][2] = 5.0
        checkpoints.save(2, server, lambda: Changed(np.array([2]), current), "{}")
        checkpoints.wait()
        current["a"][3] = 6.0
        checkpoints.save(3, server, lambda: Changed(np.array([3]), current), "{}")
    assert [len(np.load(tmp_path / "clients" / str(r) / "rows.npy")) for r in (2, 3)] == [6, 1]
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore(server, states()).clients
    np.testing.assert_array_equal(restored["a"], current["a"])
    np.testing.assert_array_equal(restored["b"][0], current["b"][0])


@pytest.mark.slow
def test_a_run_on_disk_survives_kill_9(whole, tmp_path):
    folder = tmp_path / "run"
    code = "import sys; from fedjax_pcdd.cli.run import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *RUN, "--client-state=disk", f"--run-dir={folder}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (folder / "checkpoints" / "1").is_dir() and process.poll() is None:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert main([f"--resume={folder}", "--quiet"]) == 0
    assert rows(folder) == rows(whole)


MEMORY = """
import sys
from pathlib import Path
import jax, numpy as np
from fedjax_pcdd import models
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Partition
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.training.checkpoint import Checkpoints
from fedjax_pcdd.training.saving import Checkpoint
from fedjax_pcdd.training.loop import loop

def peak():
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]) * 1024

where, folder, clients = sys.argv[1], Path(sys.argv[2]), 10_000
rng = np.random.default_rng(0)
x, y = rng.integers(0, 256, (clients, 8, 8, 1), np.uint8), rng.integers(0, 10, clients)
lists = tuple(np.split(np.arange(clients), clients))
parts = Federation(Dataset("random", x, y, x[:100], y[:100], 10), Partition(lists, tuple(i[:0] for i in lists)))
model, method = models.build("mlp", num_classes=10, image_shape=(8, 8, 1)), METHODS["scaffold"]()
def made(clients, where):
    local = Local(1, 1, "keep")
    return Simulation(method.build(model), [Experiment(clients, method, local, 0)], pipeline=Pipeline(), cohort=50,
                      rounds=3, execution=Execution(client_state=where))
few = Federation(parts.dataset, Partition(parts.partition.train[:100], parts.partition.test[:100]))
warm = made(few, "host")
loop(warm, warm.start(), 2, [Checkpoint(Checkpoints(folder / "warm" / "checkpoints"))])
before = peak()
simulation = made(parts, where)
state = simulation.start()
size = sum(leaf.nbytes for leaf in jax.tree.leaves((state.clients, state.statistics)))
loop(simulation, state, 3, [Checkpoint(Checkpoints(folder / "run" / "checkpoints"))])
print((peak() - before) / size, size)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize(("client_state", "limit"), [("host", 1.3), ("disk", 0.5)])
def test_memory_for_ten_thousand_states_is_bounded_by_their_size(client_state, limit, tmp_path):
    process = subprocess.run([sys.executable, "-c", MEMORY, client_state, tmp_path], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    share, size = map(float, process.stdout.split())
    assert size > 2e8
    assert share <= limit
