"""Failures below JAX: one sentence each, fewer lanes where memory runs out, and a run folder that can be resumed."""

import json
import logging
import os
import subprocess
import sys
import textwrap

import jax
import pytest
import toy

import fedjax_pcdd as fp
from fedjax_pcdd.api import runs
from fedjax_pcdd.engine import devices, tuning
from fedjax_pcdd.engine.devices import OutOfMemory, in_sentences
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.config import build

SMALL = {
    "rounds": 2, "local_epochs": 1, "clients": 4, "train_samples": 80, "test_samples": 30, "batch_size": 8,
    "fine_tune_epochs": 0, "quiet": True, "min_samples": 1, "checkpoint_every": 1,
}  # fmt: skip
EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3221225472 bytes.\n  more about it"
FAILED = "INTERNAL: ptxas exited with non-zero error code 255"
OLD_DRIVER = (
    "Unable to initialize backend 'cuda': INTERNAL: CUDA driver version is insufficient for CUDA runtime version "
    "(you may need to uninstall the failing plugin package, or set JAX_PLATFORMS=cpu to skip this backend.)"
)


def is_a_sentence(text) -> bool:
    return "\n" not in text and text.endswith(".")


@pytest.fixture
def failing(monkeypatch):
    """A device whose rounds fail: set `when(simulation, round)` and `message`; `seen` has the lanes of each attempt."""

    class Device:
        seen: list[int] = []  # noqa: RUF012
        message = EXHAUSTED

        @staticmethod
        def when(simulation, round):
            return simulation.program.lanes > 1

    device, step = Device(), Simulation.step

    def step_or_fail(self, state, round, *more):
        device.seen.append(self.program.lanes)
        if device.when(self, round):
            raise jax.errors.JaxRuntimeError(device.message)
        return step(self, state, round, *more)

    device.seen = []
    monkeypatch.setattr(Simulation, "step", step_or_fail)
    return device


def request_for(path, **options):
    return runs.Asked(*build({"method": "fedavg", "run_dir": path, **SMALL, **options}))


def run(request, say=lambda _: None):
    return runs.run(request.config, request.method, say=say)


def rows(path):
    """The lines of a run's metrics without the times."""
    lines = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in lines]


def recorded_lanes(path):
    return json.loads((path / "resolved.json").read_text())["lanes"]


@pytest.mark.thorough
def test_a_run_out_of_memory_goes_on_with_half_of_the_lanes(failing, tmp_path):
    messages = []
    run(request_for(tmp_path / "four", lanes=4), messages.append)
    assert failing.seen == [4, 2, 1, 1]
    assert recorded_lanes(tmp_path / "four") == 1
    fewer = [sentence.rsplit("with ")[-1] for sentence in messages if "lanes" in sentence]
    assert fewer == ["2 of 4 lanes.", "1 of 2 lanes."]  # besides, that no checkpoint is full yet
    assert all(map(is_a_sentence, messages))
    run(request_for(tmp_path / "one", lanes=1), messages.append)
    assert rows(tmp_path / "four") == rows(tmp_path / "one")


@pytest.mark.thorough
def test_a_run_out_of_memory_goes_on_from_its_newest_checkpoint(failing, tmp_path):
    failing.when = lambda simulation, round: round == 1 and simulation.program.lanes == 2
    run(request_for(tmp_path, lanes=2))
    assert failing.seen == [2, 2, 1]  # round 0 is not repeated
    assert [row["round"] for row in rows(tmp_path)] == [1, 2]


@pytest.mark.thorough
def test_experiments_of_one_program_go_on_together_with_fewer_lanes(failing, tmp_path):
    requests = [request_for(tmp_path / str(seed), lanes=2, seed=seed) for seed in range(2)]
    results = runs.run_together(requests, lambda _: None)
    assert [recorded_lanes(tmp_path / str(seed)) for seed in range(2)] == [1, 1]
    assert all(isinstance(result, dict) for result in results)


@pytest.mark.thorough
def test_a_run_in_memory_starts_anew_with_fewer_lanes(failing):
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=4)
    stopping = fp.EarlyStopping("ga", patience=1)
    with pytest.warns(UserWarning, match="with 1 of 2 lanes"):
        history = fp.simulate(
            federation, rounds=1, local_epochs=1, lanes=2, fine_tune_epochs=0, callbacks=[stopping]
        )  # fmt: skip
    assert len(history.ga) == 1


@pytest.mark.thorough
def test_early_stopping_of_an_earlier_run_does_not_end_one_that_starts_anew(failing):
    federation = fp.partition(fp.load_dataset("digits"), "iid", clients=4)
    stopping = fp.EarlyStopping("ga", patience=1, least=0.5)
    options = {"rounds": 2, "local_epochs": 1, "fine_tune_epochs": 0, "callbacks": [stopping]}
    assert len(fp.simulate(federation, lanes=1, **options)) == 2
    with pytest.warns(UserWarning, match="with 1 of 2 lanes"):
        assert len(fp.simulate(federation, lanes=2, lr=1e-6, **options)) == 2


class SeenRounds(fp.Callback):
    """Keeps the rounds that it has seen in one list, which grows."""

    def __init__(self):
        self.rounds = []

    def on_round(self, run, report):
        self.rounds.append(run.round)

    def state(self):
        return self.rounds

    def restore(self, state):
        self.rounds = state


@pytest.mark.thorough
@pytest.mark.parametrize("folder", [False, True])
def test_callbacks_forget_the_rounds_that_are_trained_again(failing, tmp_path, folder):
    failing.when = lambda simulation, round: round == 1 and simulation.program.lanes > 1
    federation, callback = fp.partition(fp.load_dataset("digits"), "iid", clients=4), SeenRounds()
    options = {"run_dir": tmp_path / "run"} if folder else {}
    with pytest.warns(UserWarning, match="with 1 of 2 lanes"):
        fp.simulate(
            federation, rounds=2, local_epochs=1, lanes=2, fine_tune_epochs=0, callbacks=[callback], **options
        )  # fmt: skip
    assert callback.rounds == [1, 2]


@pytest.mark.thorough
def test_one_lane_out_of_memory_is_reported_and_the_folder_is_resumable(failing, tmp_path, monkeypatch):
    failing.when = lambda simulation, round: round == 1
    with pytest.raises(OutOfMemory) as error:
        run(request_for(tmp_path, lanes=1))
    assert is_a_sentence(str(error.value))
    assert "batch_size" in str(error.value)
    failing.when = lambda simulation, round: False
    fp.resume(tmp_path)
    assert [row["round"] for row in rows(tmp_path)] == [1, 2]


@pytest.mark.thorough
def test_a_compiler_that_fails_is_reported_and_the_folder_is_resumable(failing, tmp_path):
    failing.message = FAILED
    with pytest.raises(UserError) as error:
        run(request_for(tmp_path, lanes=2))
    assert is_a_sentence(str(error.value))
    assert "ptxas exited" in str(error.value)
    failing.when = lambda simulation, round: False
    with pytest.warns(UserWarning, match="starting from round 0"):
        fp.resume(tmp_path)
    assert [row["round"] for row in rows(tmp_path)] == [1, 2]


@pytest.mark.thorough
def test_a_compiler_that_fails_before_the_first_round_is_named(monkeypatch):
    def refuse(self, *args, **kwargs):
        raise jax.errors.JaxRuntimeError(FAILED)

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    simulated = toy.simulation()
    with pytest.raises(UserError, match="failed when compiling a round"):
        simulated.compile(simulated.start())


def test_a_round_compiled_in_advance_is_the_one_that_is_run():
    simulated = toy.simulation(seed=17)
    state = simulated.start()
    simulated.compile(state)
    clock = devices.CompileClock()
    simulated.step(state, 0)
    assert simulated.compilations == 1
    assert clock.count == 0


def test_errors_of_other_kinds_pass_unchanged():
    with pytest.raises(ZeroDivisionError), in_sentences("training"):
        _ = 1 / 0


def round_memory(simulated):
    memory = simulated.compile(simulated.start()).memory_analysis()
    return memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes


def lanes_chosen(monkeypatch, free):
    """The number of lanes, of 1, 2 and 3, chosen for the toy federation where more are always faster."""
    base = toy.simulation(lanes=1)
    monkeypatch.setattr(tuning, "candidates", lambda jobs, devices: [1, 2, 3])
    monkeypatch.setattr(tuning, "free_memory", lambda: free)
    times = iter([1.0, 0.5, 0.25])
    monkeypatch.setattr(tuning, "_probe", lambda simulation, state: (0.0, next(times)))
    return tuning.choose_lanes(lambda lanes: toy.simulation(lanes=lanes), base.start(), 3, 10**6).program.lanes


@pytest.mark.thorough
def test_lanes_are_the_fastest_whose_compiled_round_fits_into_memory(monkeypatch):
    memory = {lanes: round_memory(toy.simulation(lanes=lanes)) for lanes in (1, 2, 3)}
    assert memory[2] < memory[3]
    assert lanes_chosen(monkeypatch, memory[3]) == 3
    assert lanes_chosen(monkeypatch, memory[3] - 1) == 2
    assert lanes_chosen(monkeypatch, 0) == 1


@pytest.mark.parametrize(("seconds", "lanes"), [((1.0, 0.97), 1), ((1.0, 0.9), 2), ((1.0, 0.9, 0.88), 2)])
def test_more_lanes_are_taken_only_for_a_gain_above_measurement_noise(monkeypatch, seconds, lanes):
    times = iter(seconds)
    monkeypatch.setattr(tuning, "candidates", lambda jobs, devices: list(range(1, len(seconds) + 1)))
    monkeypatch.setattr(tuning, "_probe", lambda simulation, state: (0.0, next(times)))
    chosen = tuning.choose_lanes(lambda lanes: toy.simulation(lanes=lanes), toy.simulation().start(), 3, 10**6)
    assert chosen.program.lanes == lanes


@pytest.mark.parametrize(("compiling", "tried"), [(10.0, 3), (10**9, 1)])
def test_lanes_are_tried_until_the_search_costs_a_share_of_the_run(monkeypatch, compiling, tried):
    probes = []
    monkeypatch.setattr(tuning, "candidates", lambda jobs, devices: [1, 2, 3])
    monkeypatch.setattr(tuning, "_probe", lambda *_: probes.append(1) or (compiling, 1.0))
    tuning.choose_lanes(lambda lanes: toy.simulation(lanes=lanes), toy.simulation().start(), 3, 10**6)
    assert len(probes) == tried


def test_a_probe_out_of_memory_ends_the_search_for_lanes(monkeypatch):
    def exhausted(simulation, state):
        if simulation.program.lanes > 1:
            raise jax.errors.JaxRuntimeError(EXHAUSTED)
        return 0.0, 1.0

    monkeypatch.setattr(tuning, "candidates", lambda jobs, devices: [1, 2, 3])
    monkeypatch.setattr(tuning, "_timed_step", exhausted)
    lanes_built = []
    chosen = tuning.choose_lanes(
        lambda lanes: lanes_built.append(lanes) or toy.simulation(lanes=lanes), toy.simulation().start(), 3, 10**6
    )
    assert chosen.program.lanes == 1
    assert 3 not in lanes_built


def test_free_memory_is_that_of_the_fullest_device(monkeypatch):
    class Device:
        def __init__(self, used):
            self.used = used

        def memory_stats(self):
            return {"bytes_limit": 100, "bytes_in_use": self.used}

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(10), Device(70)])
    assert devices.free_memory() == 30


def test_a_driver_that_is_too_old_is_reported_in_a_sentence(monkeypatch):
    def old():
        raise RuntimeError(OLD_DRIVER)

    monkeypatch.setattr(jax, "devices", old)
    with pytest.raises(UserError) as error:
        devices.started_platforms("gpu")
    assert is_a_sentence(str(error.value))
    assert "driver version is insufficient" in str(error.value)


def devices_without_driver():
    """`jax.devices` where the plugin for GPUs finds no driver: a traceback is logged, and the CPU remains."""
    real = jax.devices

    def listed():
        try:
            raise RuntimeError("operation cuInit(0) failed: CUDA_ERROR_NO_DEVICE\nlong\nmore")
        except RuntimeError:
            logging.getLogger("jax._src.xla_bridge").exception("Jax plugin configuration error")
        return real()

    return listed


def test_a_missing_driver_is_a_user_error_where_a_gpu_is_asked_for(monkeypatch, capfd):
    monkeypatch.setattr(jax, "devices", devices_without_driver())
    with pytest.raises(UserError) as error:
        devices.started_platforms("gpu")
    assert is_a_sentence(str(error.value))
    assert "cuInit(0) failed" in str(error.value)
    assert capfd.readouterr().err == ""


def test_a_missing_driver_is_a_warning_where_the_cpu_will_do(monkeypatch, capfd):
    monkeypatch.setattr(jax, "devices", devices_without_driver())
    assert devices.started_platforms("auto") == {"cpu"}
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("warning: ")
    assert "cuInit(0) failed" in line


def test_an_unwritable_compilation_cache_is_a_warning_and_is_not_used(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    folder, enabled = jax.config.jax_compilation_cache_dir, jax.config.jax_enable_compilation_cache
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "new" / "folder"))
        devices.check_compilation_cache()
        assert capsys.readouterr().err == ""
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "file" / "folder"))
        devices.check_compilation_cache()
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot be written" in line
        assert not jax.config.jax_enable_compilation_cache
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_enable_compilation_cache", enabled)


def process(code, *options, **settings):
    """A completed process that ran some code with command-line options."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | settings).items()]
    command = [sys.executable, "-c", textwrap.dedent(code), *flags, *options]
    return subprocess.run(command, capture_output=True, text=True)


ABORTING = """
    import os, sys, jax
    from fedjax_pcdd.cli.run import main
    from fedjax_pcdd.engine.simulation import Simulation
    jax.default_backend = lambda: "gpu"
    Simulation.step = lambda *_: os.abort()
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.thorough
def test_a_compiler_that_aborts_leaves_a_sentence_and_a_resumable_folder(tmp_path):
    aborted = process(ABORTING, lanes=1, tune="off", model="mlp", run_dir=tmp_path / "run")
    assert aborted.returncode < 0
    assert f"--resume={tmp_path / 'run'}" in aborted.stderr.splitlines()[-1]
    with pytest.warns(UserWarning, match="starting from round 0"):
        fp.resume(tmp_path / "run")
    assert [row["round"] for row in rows(tmp_path / "run")] == [1, 2]


EXHAUSTED_DEVICES = """
    import sys, jax
    from fedjax_pcdd.cli.run import main
    from fedjax_pcdd.engine.simulation import Simulation
    step = Simulation.step
    def step_or_fail(self, *arguments):
        if self.program.lanes > 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.")
        assert self.program.devices == 2
        return step(self, *arguments)
    Simulation.step = step_or_fail
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.thorough
def test_several_devices_out_of_memory_go_on_with_half_of_the_lanes_of_each(tmp_path):
    completed = process(
        EXHAUSTED_DEVICES, "--device=cpu", "--no-quiet", lanes=2, devices=2, rounds=1, run_dir=tmp_path / "run"
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert "with 1 of 2 lanes" in completed.stderr
    assert recorded_lanes(tmp_path / "run") == 1


@pytest.mark.thorough
def test_as_many_devices_as_processors_do_not_deadlock(tmp_path):
    """CCVR's server factorises matrices, for which XLA takes threads of the pool in which devices wait."""
    code = ["from fedjax_pcdd.cli.run import main", "import sys", "sys.exit(main(sys.argv[1:]))"]
    options = [
        "--method=ccvr",
        "--partition=iid",
        "--clients=4",
        "--rounds=1",
        "--local-epochs=1",
        "--lanes=1",
        "--quiet",
    ]
    number = max(2, min(8, os.cpu_count() or 2))
    options += [f"--devices={number}", "--device=cpu", "--fine-tune-epochs=0", f"--run-dir={tmp_path / 'run'}"]
    completed = subprocess.run(
        [sys.executable, "-c", "\n".join(code), *options], timeout=200, capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0, completed.stderr


def test_a_backend_that_cannot_start_is_a_sentence_of_simulate_too():
    code = """
import fedjax_pcdd as fp
digits = fp.load_dataset("digits")
try:
    fp.simulate(fp.partition(digits, "iid", clients=2), rounds=1)
except fp.UserError as error:
    print(error)
"""
    environment = os.environ | {"JAX_PLATFORMS": "nothing"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.startswith("JAX cannot start nothing"), result.stderr
