"""Part 2, how fast: ours beside PyTorch, lanes, precision and forms, sweeps, launches, and numbers others printed."""

import importlib.util
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.gpu import training
from benchmarks.gpu.items import Item
from benchmarks.gpu.workers import Lacking
from benchmarks.gpu.works import TINY, device
from benchmarks.workloads import DIRICHLET, WORKLOADS, Workload
from fedjax_pcdd.training.folder import RunFolder

ROUNDS = 5
DIGITS = replace(TINY, model="mcmahan_cnn")
PRECISIONS = ("tf32", "bfloat16", "float32")
LANES = {"w1": (10, 1), "w2": (10, 1), "w3": (10, 2, 1), "w4": (500, 50)}  # many lanes first
FORMS = ("grouped", "gemm", "loop")
TORCH = ("tuned", "compiled", "vmap", "plain")

# Workloads for which others printed numbers. Images are random, so that nothing but the time is comparable.
PRINTED: dict[str, dict[str, Any]] = {
    "pfl-research": {
        "workload": Workload("simple_cnn", (32, 32, 3), clients=1000, per_client=50, batch=10, cohort=50),
        "lanes": (50, 10),
        "numbers": {},
        "source": "settings of CIFAR-10 in publications/pfl of pfl-research (NeurIPS 2024, Table 1); its network is "
        "another small CNN, its numbers are minutes of 1500 rounds with evaluation, on an A100",
    },
    "FL-Simulator": {
        "workload": Workload(
            "resnet18", (32, 32, 3), clients=100, per_client=500, batch=50, cohort=10, epochs=5, norm="group"
        ),
        "lanes": (10, 1),
        "methods": ("fedavg", "scaffold"),
        "numbers": {"fedavg": 15.9, "scaffold": 20.1},
        "source": "seconds a round on a V100, README of FL-Simulator (CIFAR-10, ResNet-18 with group norm)",
    },
    "PFLlib": {
        "workload": Workload("mcmahan_cnn", (28, 28, 1), clients=20, per_client=2620, batch=10),
        "lanes": (20, 1),
        "numbers": {"fedavg": 17.2},
        "source": "seconds a round on an RTX 5090, issue 253 of PFLlib (MNIST; its CNN has no padding and 0.58 million "
        "parameters, ours 1.66 million)",
    },
}


def items(rehearse: bool) -> list[Item]:
    """The steps of part 2, most valuable first."""
    if rehearse:
        return _rehearsal()
    steps = [ours("w4", 500), ours("w1", 10), ours("w3", 1), ours("w3", 10), ours("w2", 10)]
    steps += [_torch(workload, "tuned") for workload in ("w4", "w1", "w3", "w2")]
    steps += [ours(workload, 10, form="timed") for workload in ("w1", "w3", "w2")]
    steps += [_sweep("w1", 10, 160), *(_launches(workload, LANES[workload][0]) for workload in ("w4", "w1"))]
    steps += [_torch(workload, "vmap") for workload in ("w4", "w1")]
    steps += [_printed(name, method, PRINTED[name]["lanes"][0]) for name, method in _printed_methods()]
    steps += [_turns("dynamic"), _resnet(False), ours("w4", 500, method="scaffold"), _sweep("w4small", 100, 1600)]
    steps += [_ragged(100, None), _ragged(100, 100), _torch("w1", "compiled"), _resnet(True)]
    steps += [ours(w, 10, "tf32", form) for w in ("w1", "w3") for form in FORMS]
    steps += [ours(w, LANES[w][0], "bfloat16") for w in ("w3", "w1")]
    steps += [_turns("static"), _turns("dynamic", graphs=True)]
    steps += [_ragged(lanes, block) for lanes in (100, 32) for block in (None, lanes, 32, 8, 1)]
    steps += [_torch(workload, kind) for kind in ("compiled", "vmap") for workload in ("w3", "w4", "w2")]
    steps += [ours(w, lanes, precision, form) for precision in PRECISIONS for w in ("w1", "w3", "w2", "w4")
             for lanes in LANES[w] for form in (FORMS if lanes > 1 and w != "w4" else (None,))]  # fmt: skip
    steps += [_accuracy(precision) for precision in PRECISIONS]
    steps += [_printed(name, method, PRINTED[name]["lanes"][1]) for name, method in _printed_methods()]
    steps += [_torch(workload, "plain") for workload in ("w4", "w1", "w2", "w3")]
    steps += [_torch(name, "tuned") for name in ("pfl-research", "PFLlib")]
    return list({item.name: item for item in steps}.values())


def _rehearsal() -> list[Item]:
    """Each kind of item once, tiny."""
    steps = [ours("tiny", 2), ours("tiny", 2, "bfloat16", "grouped"), ours("digits", 2, form="timed")]
    steps += [_torch("tiny", kind) for kind in TORCH]
    steps += [_resnet(False, tiny=True), _turns("dynamic"), _launches("tiny", 3)]
    steps += [_sweep("digits", 2, 4, experiments=2, rounds=1), _accuracy("tf32", rounds=1, model="mlp")]
    return steps + [_ragged(4, 2, tiny=True), _printed("PFLlib", "fedavg", 2, tiny=True)]


def ours(workload: str, lanes: int, precision: str = "tf32", form: str | None = None, method: str = "fedavg") -> Item:
    """Our engine's round.

    Args:
      form: how lanes of convolutions run, "timed" for the fastest on this device, None for the packaged table's.
    """
    options = {"workload": workload, "lanes": lanes, "precision": precision, "form": form, "method": method}
    extras = [word for word in (form, method) if word not in (None, "fedavg")]
    name = ", ".join([f"ours {workload}", f"{lanes} lanes", precision, *map(str, extras)])
    return Item(name, ours_once, options, 45 if workload in ("w2", "w3") else 25)


def _torch(workload: str, kind: str) -> Item:
    seconds = {"compiled": 80, "vmap": 40}.get(kind, 25) * (2 if workload == "w3" else 1)
    return Item(f"torch {workload}, {kind}", torch, {"workload": workload, "kind": kind}, seconds)


def _resnet(barrier: bool, *, tiny: bool = False) -> Item:
    name = "barrier, with" if barrier else "barrier, without"
    return Item(name, resnet_step, {"barrier": barrier, "tiny": tiny}, 60)


def _turns(kind: str, *, graphs: bool = False) -> Item:
    """Turns of a loop; with `graphs` XLA may put whole loops into command buffers (CUDA graphs)."""
    flags = "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL --xla_gpu_graph_min_graph_size=1"
    name = f"turns, {kind}" + (", command buffers allowed" if graphs else "")
    environment = {"XLA_FLAGS": flags} if graphs else {}
    return Item(name, turns, {"sums": 3, "static": kind == "static"}, 20, environment=environment)


def _launches(workload: str, lanes: int) -> Item:
    return Item(f"launches {workload}", launches, {"workload": workload, "lanes": lanes}, 40)


def _ragged(lanes: int, block: int | None, *, tiny: bool = False) -> Item:
    block_text = "chosen by the program" if block is None else f"of {block}"
    return Item(
        f"unequal, {lanes} lanes, blocks {block_text}", ragged, {"lanes": lanes, "block": block, "tiny": tiny}, 25
    )


def _accuracy(precision: str, rounds: int = 30, model: str = "mcmahan_cnn") -> Item:
    return Item(f"accuracy {precision}", accuracy, {"precision": precision, "rounds": rounds, "model": model}, 40)


def _sweep(name: str, alone: int, together: int, experiments: int = 16, rounds: int = 10) -> Item:
    options = {"name": name, "experiments": experiments, "rounds": rounds, "lanes": together}
    return Item(f"sweep {name}, {alone} and {together} lanes", sweep, options, 60)


def _printed_methods() -> list[tuple[str, str]]:
    return [(name, method) for name, case in PRINTED.items() for method in case.get("methods", ("fedavg",))]


def _printed(name: str, method: str, lanes: int, *, tiny: bool = False) -> Item:
    options = {"name": name, "method": method, "lanes": lanes, "tiny": tiny}
    return Item(f"printed {name}, {method}, {lanes} lanes", printed, options, 90)


def _workload(name: str) -> Workload:
    return PRINTED[name]["workload"] if name in PRINTED else {"tiny": TINY, "digits": DIGITS, **WORKLOADS}[name]


def _timed(workload: Workload, lanes: int, rounds: int, form: str | None = None, **options: Any) -> dict[str, Any]:
    """Seconds a round, and memory."""
    import jax

    from benchmarks import round_time, workloads
    from benchmarks.round_time import device_peak_mb, prepare, time_rounds
    from fedjax_pcdd.models import convolution_table
    from fedjax_pcdd.models.convolution_table import Rule

    rules = _timed_forms(workload, lanes, options["precision"]) if form == "timed" else None
    with ExitStack() as stack:
        if rules:
            model = round_time.build(workload, options["precision"]).clone(convolutions=rules)
            stack.enter_context(mock.patch.object(round_time, "build", return_value=model))
        elif form:
            stack.enter_context(mock.patch.object(convolution_table, "rule_for", return_value=Rule("direct", form)))
        simulated = prepare(workload, str(lanes), 1, rounds, **options)
        timed = workloads.timing(time_rounds(simulated, rounds), workload.samples)
    timed |= {"lanes": simulated.program.lanes, "block": simulated.program.blocks.size}
    timed |= {"device_peak_memory_mb": device_peak_mb(jax.devices()[0])}
    return timed | ({"rules": convolution_table.as_json(rules)} if rules else {})


def _timed_forms(workload: Workload, lanes: int, precision: str) -> Any:
    """The forms of a workload's convolutions that are fastest on this device, as a run times them at its start."""
    from benchmarks.round_time import build
    from fedjax_pcdd.engine.devices import TYPES
    from fedjax_pcdd.engine.tuning import operations, time_forms
    from fedjax_pcdd.training.device_choices import SECONDS

    to_time = operations(build(workload, precision), workload.shape, workload.batch, lanes, TYPES[precision])
    return time_forms(to_time, time.perf_counter() + SECONDS)


def ours_once(workload: str, lanes: int, precision: str, form: str | None, method: str) -> dict[str, Any]:
    """A workload's round by our engine."""
    record = _timed(_workload(workload), lanes, ROUNDS, form, method=method, precision=precision)
    setting = {"workload": workload, "precision": precision, "form": form, "method": method}
    return setting | record | device()


def torch(workload: str, kind: str) -> dict[str, Any]:
    """A workload's round in PyTorch on the same device."""
    if not importlib.util.find_spec("torch"):
        raise Lacking("PyTorch is not installed")
    from benchmarks import torch_loop, torch_vmap

    device_name = "cpu" if os.environ.get("JAX_PLATFORMS") == "cpu" else "cuda"
    if device_name == "cuda" and not torch_loop.torch.cuda.is_available():
        raise Lacking("PyTorch sees no GPU")
    case, threads = _workload(workload), torch_loop.torch.get_num_threads()
    if kind == "vmap":
        record = torch_vmap.measure(workload, case, ROUNDS, device_name)
    else:
        variant = {"tuned": kind == "tuned", "compiled": kind == "compiled"}
        record = torch_loop.measure(workload, case, ROUNDS, threads, device=device_name, **variant)
    return record | {"kind": kind}


def sweep(name: str, experiments: int, rounds: int, lanes: int) -> dict[str, Any]:
    """Experiments that differ in their seeds, trained as one program and one after another."""
    from benchmarks import sweeps

    sides = sweeps.compare(name, experiments, rounds, repeats=1, lanes=str(lanes))
    return {"experiments": experiments, "rounds": rounds, **sides, "ratios": sweeps.ratios(sides)} | device()


def ragged(lanes: int, block: int | None, tiny: bool) -> dict[str, Any]:
    """A round of unequal clients, whose jobs begin and end in blocks of `block`."""
    workload = replace(DIRICHLET, clients=5, shape=TINY.shape) if tiny else DIRICHLET
    return _timed(workload, lanes, ROUNDS, precision="tf32", block=block) | device()


def launches(workload: str, lanes: int) -> dict[str, Any]:
    """What the device executes in one round: kernels and copies, and the kernels that take most of the time.

    Their names show which library computes a product: cuBLAS and cuDNN name themselves (or xmma, cutlass), Triton's are
    fusions.
    """
    from benchmarks.round_time import prepare, profile

    planes = profile(prepare(_workload(workload), str(lanes), 1, 1, precision="tf32")).planes
    lines = [line for plane in planes if "GPU" in plane.name for line in plane.lines if "Stream" in line.name]
    spent: dict[str, list[float]] = {}
    for event in (event for line in lines for event in line.events):
        spent.setdefault(event.name, []).append(event.duration_ns / 1e6)
    copies = sum(len(times) for name, times in spent.items() if name.startswith(("Memcpy", "Memset")))
    longest = sorted(spent, key=lambda name: -sum(spent[name]))[:15]
    record = {
        "kernels": sum(map(len, spent.values())) - copies,
        "copies": copies,
        "busy_ms": sum(map(sum, spent.values())),
        "longest": [{"name": name[:80], "times": len(spent[name]), "ms": sum(spent[name])} for name in longest],
    }
    return {"workload": workload, "lanes": lanes} | predicted(workload, lanes) | record | device()


def predicted(workload: str, lanes: int) -> dict[str, Any]:
    """What `benchmarks.accelerator` has counted for such a round without a device; {} if it has not."""
    from benchmarks.survey import RESULTS, read

    counted = read(RESULTS).get("h100", {}).get("rounds", {}).get(f"{workload}, {lanes} lanes", {})
    return {f"predicted_{name}": counted[name] for name in ("kernels", "turns") if name in counted}


def resnet_step(barrier: bool, tiny: bool) -> dict[str, Any]:
    """A training step of ResNet18, with the barrier between a strided slice and its product, or without it.

    Without it XLA's GPU compiler aborts, at least when it compiles without a device (docs/performance.md).
    """
    from benchmarks.limits import bare_step
    from benchmarks.round_time import build

    workload = TINY if tiny else WORKLOADS["w3"]
    begun = time.perf_counter()
    with ExitStack() as stack:
        if not barrier:
            stack.enter_context(mock.patch("jax.lax.optimization_barrier", lambda operand: operand))
        seconds, operations = bare_step(build(workload, "tf32"), workload, repeats=2 if tiny else 20)
    rate = operations / seconds / 1e12
    return {"step_s": seconds, "tflop_s": rate, "compiling_and_all_s": time.perf_counter() - begun} | device()


def turns(sums: int, static: bool) -> dict[str, Any]:
    """Microseconds of one turn of a loop of a few small sums, by the difference between long and short loops."""
    import jax
    import jax.numpy as jnp

    from benchmarks.limits import seconds_of

    def body(_, x):
        for _ in range(sums):
            x = x / (1.0 + jnp.abs(x).sum())  # a sum over everything ends a kernel
        return x

    x, few, many = jnp.ones(4096), 200, 2200
    if static:
        loops = {n: jax.jit(lambda x, n=n: jax.lax.fori_loop(0, n, body, x)) for n in (few, many)}
    else:
        dynamic = jax.jit(lambda n, x: jax.lax.fori_loop(0, n, body, x))
        loops = {n: lambda x, n=n: dynamic(jnp.int32(n), x) for n in (few, many)}
    seconds = {n: seconds_of(lambda n=n: loops[n](x), 7) for n in loops}
    return {"sums": sums, "static": static, "turn_us": 1e6 * (seconds[many] - seconds[few]) / (many - few)} | device()


def accuracy(precision: str, rounds: int, model: str) -> dict[str, Any]:
    """GA on scikit-learn's digits in a precision, and seconds a round."""
    options = {"dataset": "digits", "model": model, "clients": 5, "rounds": rounds, "local_epochs": 2, "lanes": 1}
    options |= {"fine_tune_epochs": 0, "precision": precision, "partition": "iid"}
    with tempfile.TemporaryDirectory() as folder:
        training.train(options, Path(folder) / "run")
        result = RunFolder(Path(folder) / "run").summary() or {}
    names = ("ga_best", "ga_last", "ga_mean_last10", "seconds_per_round")
    return {"precision": precision, "rounds": rounds} | {name: result[name] for name in names} | device()


def printed(name: str, method: str, lanes: int, tiny: bool) -> dict[str, Any]:
    """Our round of a workload for which others printed a number, with that number and its source."""
    case = PRINTED[name]
    workload = replace(case["workload"], model="mlp", clients=2, per_client=20) if tiny else case["workload"]
    record = _timed(workload, lanes, 3, method=method, precision="tf32")
    number = case["numbers"].get(method)
    return {"workload": name, "method": method, "printed_s": number, "source": case["source"]} | record | device()
