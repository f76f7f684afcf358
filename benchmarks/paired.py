"""Our engine, the tuned PyTorch loop, and another commit's engine, a round of each in turn: ratios on a busy machine.

    git worktree add ../before COMMIT
    python -m benchmarks.paired --before=../before --workloads=w1,w2,w3,w4 --seconds=60 --out=benchmarks/results/paired

All stay in processes of their own on one core, and only one computes at a time, so that other work on the machine
disturbs each as much as the others. A ratio is of two rounds of the same turn, by processor seconds.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
OURS, TORCH, BEFORE, AGAIN = "ours", "tuned loop", "before", "ours again"
NOTE = """
One lane, one core. Seconds are processor seconds of a round: the least and the median. Ratios are medians over the
turns, with the middle half of them in brackets; above 1 ours is faster. "Least": the ratio of the two least times.
"Ours again" is a second process of ours: what its ratio differs from 1 by is the error of the others. Each turn has an
order of its own.
"""


class Contestant:
    """A process that computes a round on request."""

    def __init__(self, kind: str, workload: str, python: str, checkout: Path):
        """Args: kind: one of `SERVED`; checkout: folder whose code it runs."""
        env = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}
        command = [python, __file__, "--serve", kind, workload]
        self.name = f"{kind} in {checkout}"
        self.process = subprocess.Popen(
            command, cwd=checkout, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def round(self) -> float:
        """Processor seconds of one more round."""
        assert self.process.stdin
        assert self.process.stdout
        print("go", file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the process of {self.name} ended; its message is above.")
        return float(line)

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def serve_engine(workload: str) -> Callable[[], None]:
    """A round of FedAvg by the engine that this process imports."""
    import jax

    from benchmarks.round_time import prepare
    from benchmarks.workloads import WORKLOADS

    simulated = prepare(WORKLOADS[workload], "1", 1, 1)
    state, r = simulated.start(), 0

    def step():
        nonlocal state, r
        state, _ = jax.block_until_ready(simulated.step(state, r))
        r += 1

    return step


def serve_torch(workload: str) -> Callable[[], None]:
    """A round of the tuned loop."""
    import numpy as np

    from benchmarks import torch_loop, torch_models
    from benchmarks.workloads import WORKLOADS

    case, layout = WORKLOADS[workload], torch_loop.torch.channels_last
    torch_loop.torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    clients = [torch_loop.client_batches(case, rng, tuned=True) for _ in range(case.participants)]
    server, model = (torch_models.build(case).to(memory_format=layout) for _ in range(2))
    return lambda: torch_loop.round_of(server, [(model, model)], clients, case.epochs)


SERVED = {"engine": serve_engine, "torch": serve_torch}


def serve(kind: str, workload: str) -> None:
    """Compute a round for each line of the input, and answer with its processor seconds."""
    step = SERVED[kind](workload)
    for _ in sys.stdin:
        begun = time.process_time()
        step()
        print(time.process_time() - begun, flush=True)


def race(contestants: dict[str, Contestant], seconds: float) -> dict[str, list[float]]:
    """Seconds of rounds in turn, in an order drawn anew each time, after two warm-up rounds; at least five of each."""
    for _ in range(2):
        for contestant in contestants.values():
            contestant.round()
    times: dict[str, list[float]] = {name: [] for name in contestants}
    rng, order, begun = random.Random(0), list(contestants), time.monotonic()
    while time.monotonic() - begun < seconds or len(times[OURS]) < 5:
        rng.shuffle(order)  # what ran before leaves traces in the caches
        for name in order:
            times[name].append(contestants[name].round())
    return times


def ratio(other: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the paired ratios, and the ratio of the least times.

    >>> ratio([2.0, 2.0, 3.0], [1.0, 1.0, 1.0])
    {'low': 2.0, 'median': 2.0, 'high': 3.0, 'least': 2.0}
    """
    low, median, high = statistics.quantiles([a / b for a, b in zip(other, ours, strict=True)], method="exclusive")
    numbers = {"low": low, "median": median, "high": high, "least": min(other) / min(ours)}
    return {name: round(value, 3) for name, value in numbers.items()}


def markdown(results: dict[str, dict[str, Any]]) -> str:
    """The table of all workloads, each with where, when and against what it was measured."""
    rivals = [name for name in (TORCH, BEFORE, AGAIN) if any(name in entry["seconds"] for entry in results.values())]
    headings = ["", "turns", *(f"{name}, s" for name in (OURS, *rivals))]
    headings += [text for name in rivals for text in (f"{name} / ours", "least")]
    places: dict[str, list[str]] = {}
    for workload, entry in sorted(results.items()):
        places.setdefault(_where(entry), []).append(workload)
    lines = [f"{', '.join(workloads)}: {where}." for where, workloads in places.items()]
    lines += ["", f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for workload, entry in sorted(results.items()):
        times = entry["seconds"]
        seconds = (times.get(name) for name in (OURS, *rivals))
        cells = [workload, str(len(times[OURS]))]
        cells += [f"{min(values):.3f}, {statistics.median(values):.3f}" if values else "–" for values in seconds]
        for name in rivals:
            r = ratio(times[name], times[OURS]) if name in times else None
            cells += (
                [f"{r['median']:.2f} ({r['low']:.2f} to {r['high']:.2f})", f"{r['least']:.2f}"] if r else ["–", "–"]
            )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, NOTE])


def _where(entry: dict[str, Any]) -> str:
    machine, before = entry["machine"], entry["before"]
    other_work = "no other work" if entry["idle"] else "other work"
    text = f"{machine['cpu']}, 1 of {machine['cores']} cores, {other_work} on the machine, {machine['date']}"
    text += f", ours at commit {entry['ours']}"
    return text + (f", before at {before}" if before else "")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="w1,w2,w3,w4")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each workload")
    parser.add_argument("--before", type=Path, help="checkout of another commit")
    parser.add_argument("--control", action="store_true", help="a second process of ours, too")
    parser.add_argument("--python", default=sys.executable, help="interpreter with JAX")
    parser.add_argument("--torch-python", default=sys.executable, help="interpreter with torch; empty for none")
    parser.add_argument("--idle", action="store_true", help="note that the machine has no other work")
    parser.add_argument("--core", type=int, default=0, help="on which everything runs")
    parser.add_argument("--out", help="path of the files to write, without their ending; other workloads in them stay")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        return serve(*args.serve)
    from benchmarks.table import hardware, save

    os.sched_setaffinity(0, {args.core})
    results_file = Path(f"{args.out}.json")
    results = json.loads(results_file.read_text()) if results_file.exists() else {}
    for workload in args.workloads.split(","):
        contestants = {OURS: Contestant("engine", workload, args.python, ROOT)}
        if args.torch_python:
            contestants[TORCH] = Contestant("torch", workload, args.torch_python, ROOT)
        if args.before:
            contestants[BEFORE] = Contestant("engine", workload, args.python, args.before.absolute())
        if args.control:
            contestants[AGAIN] = Contestant("engine", workload, args.python, ROOT)
        seconds = race(contestants, args.seconds)
        for contestant in contestants.values():
            contestant.close()
        before = _commit(args.before) if args.before else None
        where = {"machine": hardware(1), "idle": args.idle, "ours": _commit(ROOT), "before": before}
        results[workload] = where | {"seconds": seconds}
        save(args.out, results, markdown(results))
    return None


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
