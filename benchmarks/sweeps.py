"""Experiments trained together as one program, beside the same ones as runs of their own, one after another.

python -m benchmarks.sweeps --workloads digits w4small --experiments 8 --out benchmarks/results/sweeps

Both sides are whole runs with evaluation every round, checkpoints and curves, in one process without a cache of
compiled programs. They alternate; of each the repeat that took least counts.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.table import hardware, on, parser, pin, save
from benchmarks.workloads import CLASSES, WORKLOADS
from fedjax_pcdd.api.records import Asked
from fedjax_pcdd.api.runs import run, run_together
from fedjax_pcdd.training.config import build

COMMON = {"local_epochs": 1, "fine_tune_epochs": 0, "quiet": True}
SWEEPS: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "digits", "model": "mlp", "clients": 10, "beta": 0.5, "min_samples": 1, "batch_size": 50},
    "w4small": {"made_of": "w4", "clients": 100},
    "w4": {"made_of": "w4", "clients": 500},
    "w1": {"made_of": "w1", "clients": 10},
}
HEAD = (
    "| | side | all, s | CPU time, s | compiling, s | a round of all, s | lanes |\n|---|---|---|---|---|---|---|",
    "\n| | all | by CPU time | without compiling | a round |\n|---|---|---|---|---|",
)
NOTE = """
All: from the options to the curves, with the checkpoints and two pictures of each experiment (0.7 s), which are no
cheaper together. Compiling: seconds in XLA; tracing is not among them. A round of all: the sum over the experiments of
their median round, without evaluation, but with what checkpoints take from it that are written behind it: together
those of all. Ratios are runs of their own over together; where others use the machine, by CPU time they are steadier.
"""


def options(workload: dict[str, Any], folder: Path, rounds: int) -> dict[str, Any]:
    """Options of a run; random images, if it is made of another benchmark's workload, are written into the folder."""
    settings: dict[str, Any] = COMMON | workload | {"rounds": rounds}
    if "made_of" not in settings:
        return settings
    made_of, rng = WORKLOADS[settings.pop("made_of")], np.random.default_rng(0)
    arrays = {}
    for part, samples in (("train", settings["clients"] * made_of.per_client), ("test", 1000)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (samples, *made_of.shape), np.uint8)
        arrays[f"y_{part}"] = rng.integers(0, CLASSES, samples)
    np.savez(folder / "random.npz", **arrays)
    data = {"dataset": "random", "data_dir": folder, "partition": "iid", "model": made_of.model}
    return settings | data | {"batch_size": made_of.batch}


def measure(work: Any) -> dict[str, Any]:
    """The cost of running experiments; `work` returns their summaries."""
    wall, cpu = time.perf_counter(), time.process_time()
    summaries = work()
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "compile_s": sum(s["compile_seconds"] for s in summaries),
        "round_s": sum(s["seconds_per_round"] for s in summaries),
        "lanes": summaries[0]["lanes"],
    }


def compare(name: str, experiments: int, rounds: int, repeats: int, lanes: str) -> dict[str, dict[str, Any]]:
    """The fastest repeat of each side."""
    records: dict[str, list[dict[str, Any]]] = {"alone": [], "together": []}
    with tempfile.TemporaryDirectory() as home:
        settings = options(SWEEPS[name], Path(home), rounds) | {"lanes": lanes if lanes == "auto" else int(lanes)}

        def requests(side: str) -> list[Asked]:
            folder = Path(tempfile.mkdtemp(dir=home))
            built = [build(settings | {"seed": s, "run_dir": folder / str(s)}) for s in range(experiments)]
            return [Asked(*config_and_method, {"command": side}) for config_and_method in built]

        def alone() -> list:
            return [run(request.config, request.method, request.origin) for request in requests("alone")]

        def together() -> list:
            return run_together(requests("together"))

        first = requests("warm-up")[0]
        run(first.config, first.method, first.origin)
        for _ in range(repeats):
            for side, work in (("alone", alone), ("together", together)):
                records[side].append(measure(work))
    return {side: min(costs, key=lambda r: r["wall_s"]) for side, costs in records.items()}


def ratios(sides: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Cost of separate runs over that of the same runs together."""
    costs = {
        "all": lambda r: r["wall_s"],
        "cpu": lambda r: r["cpu_s"],
        "without_compiling": lambda r: r["wall_s"] - r["compile_s"],
        "round": lambda r: r["round_s"],
    }
    return {name: cost(sides["alone"]) / cost(sides["together"]) for name, cost in costs.items()}


def markdown(machine: dict, experiments: int, rounds: int, results: dict[str, dict]) -> str:
    """The tables of the seconds and of the ratios."""
    device = jax.devices()[0].device_kind
    machine_text = f"{on(machine)}, jax {jax.__version__} ({device}), {machine['date']}"
    lines = [f"{experiments} experiments of {rounds} rounds. {machine_text}.", "", HEAD[0]]
    for name, record in results.items():
        for side in ("alone", "together"):
            r = record[side]
            cells = (f"{r[key]:.3g}" for key in ("wall_s", "cpu_s", "compile_s", "round_s"))
            lines.append(f"| {name} | {side} | {' | '.join(cells)} | {r['lanes']} |")
    lines.append(HEAD[1])
    for name, record in results.items():
        lines.append(f"| {name} | {' | '.join(f'{value:.2f}' for value in record['ratios'].values())} |")
    return "\n".join([*lines, NOTE])


def main(argv: list[str] | None = None) -> None:
    argument_parser = parser(__doc__)
    argument_parser.add_argument("--workloads", nargs="+", choices=SWEEPS, default=["digits", "w4small"])
    argument_parser.add_argument("--experiments", type=int, default=8, help="E, that differ in their seeds")
    argument_parser.add_argument("--repeats", type=int, default=2, help="of each side; the best counts")
    argument_parser.add_argument(
        "--lanes", default="auto", help="clients trained as one step; auto measures on both sides"
    )
    argument_parser.set_defaults(rounds=20)
    args: argparse.Namespace = argument_parser.parse_args(argv)
    jax.config.update("jax_enable_compilation_cache", False)
    machine, results = hardware(pin(args.cores)), {}
    for name in args.workloads:
        sides = compare(name, args.experiments, args.rounds, args.repeats, args.lanes)
        results[name] = sides | {"ratios": ratios(sides)}
        print(name, results[name]["ratios"], flush=True)
    machine |= {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
    record = {"machine": machine, "experiments": args.experiments, "rounds": args.rounds, "results": results}
    save(args.out, record, markdown(machine, args.experiments, args.rounds, results))


if __name__ == "__main__":
    main()
