"""Part 1, does it work: every method and model, a killed run, lanes that agree, memory, and the device's ceilings."""

import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import training
from benchmarks.gpu.items import Item
from benchmarks.workloads import WORKLOADS, Workload
from fedjax_pcdd.training.folder import RunFolder

UNTIMED = {"tune": "off"}  # forms of convolutions are not timed where several items share the device
# Nor does XLA time its kernels there: that takes a hundred seconds of a core for each program, and the items share the
# cores.
UNTUNED = {"XLA_FLAGS": "--xla_gpu_autotune_level=0"}
# The models that take longest to compile.
LARGE = ("resnet50", "wrn28_10", "mobilenet_v2", "googlenet", "shufflenet_g2", "efficientnet_b0",
         "efficientnet_b0_1280", "efficientnet_b0_isic", "efficientnet_b0_flamby")  # fmt: skip
TINY = Workload("mlp", (8, 8, 1), clients=3, per_client=8, batch=4)
LARGEST_STEP = 1e-4  # relative difference of a parameter after one round in full float32, above which lanes disagree


def items(rehearse: bool) -> list[Item]:
    """The steps of part 1: those that share the device, the longest first, then the others."""
    from fedjax_pcdd.methods import METHODS
    from fedjax_pcdd.models import MODELS

    methods, models = ("fedmr",) if rehearse else METHODS, ("simple_cnn",) if rehearse else MODELS
    tiny = {"tiny": rehearse}
    shared: Any = {"together": True, "environment": {} if rehearse else UNTUNED}
    shared_items = [
        Item(f"model {name}", model, {"name": name, **tiny}, 60 if name in LARGE else 20, **shared) for name in models
    ]
    shared_items += [Item("killed and resumed", resumed, {"name": "scaffold", **tiny}, 40, **shared)]
    shared_items += [Item(f"method {name}", method, {"name": name, **tiny}, 25, **shared) for name in methods]
    compared = ("fedavg",) if rehearse else ("fedavg", "scaffold", "fedmr")
    shared_items += [Item(f"lanes {name}", lanes, {"name": name, **tiny}, 25, **shared) for name in compared]
    clients = (3,) if rehearse else (500, 5000)
    exclusive = [Item("ceilings", ceilings, seconds=20)]
    exclusive += [Item(f"memory, {k} clients", memory, {"clients": k, **tiny}, 20) for k in clients]
    return [*sorted(shared_items, key=lambda item: -item.seconds), *exclusive]


def device() -> dict[str, Any]:
    """The device that computes, and its backend."""
    import jax

    return {"device": jax.devices()[0].device_kind, "backend": jax.default_backend()}


def ceilings() -> dict[str, Any]:
    """GB/s of a copy, counting bytes read and written, and TFLOP/s of a large product in each precision."""
    import jax
    import jax.numpy as jnp

    size, side = (2**20, 512) if jax.default_backend() == "cpu" else (2**32, 8192)
    copied = jax.jit(lambda x: -x)
    record = {"copy_gb_s": 2 * size / _seconds(copied, jnp.ones(size // 4, jnp.float32)) / 1e9}
    for name, precision, dtype in (
        ("float32", "highest", jnp.float32),
        ("tf32", None, jnp.float32),
        ("bfloat16", None, jnp.bfloat16),
    ):
        a, b = (jax.random.normal(jax.random.key(i), (side, side), dtype) for i in range(2))
        with jax.default_matmul_precision(precision):
            record[f"{name}_tflop_s"] = 2 * side**3 / _seconds(jax.jit(jnp.matmul), a, b) / 1e12
    return record | device()


def _seconds(function: Callable[..., Any], *operands: Any, times: int = 20) -> float:
    """Seconds of one of `times` queued calls, after one that compiles; the device need not wait for the host."""
    import jax

    jax.block_until_ready(function(*operands))
    begun = time.perf_counter()
    for _ in range(times - 1):
        function(*operands)
    jax.block_until_ready(function(*operands))
    return (time.perf_counter() - begun) / times


def _two_rounds(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Results and cost of two rounds of a run; AssertionError if a loss is not finite."""
    common = {"rounds": 2, "local_epochs": 1, "fine_tune_epochs": 1, "min_samples": 1}
    training.train({**UNTIMED, **common, **options}, folder / "run")
    record = RunFolder(folder / "run")
    result, losses = record.summary() or {}, [row["loss"] for row in record.rows()]
    assert all(map(math.isfinite, losses)), f"losses are {losses}"
    names = ("ga_last", "pa_last", "compile_seconds", "seconds_per_round", "device_peak_memory_mb", "lanes")
    return {name: result.get(name) for name in names} | {"losses": losses} | device()


def method(name: str, tiny: bool) -> dict[str, Any]:
    """Two rounds of a method, with evaluation, fine-tuning and checkpoints: W1's clients in ten lanes."""
    from fedjax_pcdd import methods

    workload = TINY if tiny else WORKLOADS["w1"]
    with tempfile.TemporaryDirectory() as folder:
        data = training.random_images(Path(folder), workload.shape, workload.stored)
        options = data | {"method": name, "clients": workload.clients, "batch_size": workload.batch, "lanes": 10}
        traits = methods.get(name)().traits()
        public = {"public": "digits_public", "public_samples": 64} if traits.needs_public else {}
        public |= {"public_batch": 32} if traits.exchange != "never" else {}
        return _two_rounds(options | public | {"model": workload.model}, Path(folder))


def model(name: str, tiny: bool) -> dict[str, Any]:
    """Two rounds of FedAvg with a model: two clients in two lanes, two steps each."""
    from fedjax_pcdd.models import smallest_side

    side = max(smallest_side(name), 16) if tiny else 64 if name.endswith("isic") else 32
    batch = 4 if tiny else 50
    with tempfile.TemporaryDirectory() as folder:
        if name == "lstm":
            data = training.random_text(Path(folder), speakers=2, length=400)
        else:
            data = training.random_images(Path(folder), (side, side, 3), 4 * batch) | {"clients": 2}
        options = {"model": name, "batch_size": batch, "lanes": 2, "fine_tune_epochs": 0}
        return _two_rounds(data | options, Path(folder))


def resumed(name: str, tiny: bool) -> dict[str, Any]:
    """A run that is ended by SIGKILL and continued, compared with the same run undisturbed.

    On a CPU the losses are equal; on a GPU, where sums have no fixed order, nearly equal.
    """
    workload = TINY if tiny else WORKLOADS["w1"]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        options = training.random_images(home, workload.shape, workload.stored)
        options |= UNTIMED | {"method": name, "rounds": 6, "local_epochs": 1, "fine_tune_epochs": 0, "seed": 1}
        options |= {"model": workload.model, "clients": workload.clients, "batch_size": workload.batch, "lanes": 1}
        rounds_done = training.killed(options, home / "killed", after=2)
        training.train(options, home / "killed")
        training.train(options, home / "peace")
        difference = training.largest_difference(*(RunFolder(home / run).rows() for run in ("killed", "peace")))
        assert difference < 1e-2, f"losses of the resumed run differ by {difference}, relatively"
    return {"killed_after": rounds_done, "rounds": 6, "loss_difference": difference} | device()


def lanes(name: str, tiny: bool) -> dict[str, Any]:
    """Largest relative difference between the parameters with one lane and with ten, after one round and three."""
    import jax
    import numpy as np

    from benchmarks.round_time import federation, simulation

    workload = TINY if tiny else WORKLOADS["w1"]
    federated, params_after = federation(workload), {}
    for count in (1, 10):
        simulated = simulation(workload, federated, count, method=name)
        state = simulated.start()
        for number in range(3):
            state, _ = simulated.step(state, number)
            params = jax.tree.leaves(state.servers.variables["params"])
            params_after[count, number] = np.concatenate([np.ravel(x) for x in params])
    scale = np.abs(params_after[1, 0]).max()
    first, last = (float(np.abs(params_after[10, r] - params_after[1, r]).max() / scale) for r in (0, 2))
    assert first < LARGEST_STEP, f"parameters differ by {first} of the largest after one round"
    return {"difference_1_round": first, "difference_3_rounds": last} | device()


def memory(clients: int, tiny: bool) -> dict[str, Any]:
    """Peak memory of W4's round with so many clients in 500 lanes."""
    import jax

    from benchmarks.round_time import device_peak_mb, prepare, time_rounds

    workload = replace(TINY if tiny else WORKLOADS["w4"], clients=clients)
    simulated = prepare(workload, "500", 1, 1)
    time_rounds(simulated, 1)
    peak = device_peak_mb(jax.devices()[0])
    return {"clients": clients, "device_peak_memory_mb": peak, "images_mb": workload.data_bytes / 2**20} | device()
