"""Whether a change made anything slower: ratios measured now beside the committed ones, never seconds.

python -m benchmarks.regression [--tolerance=0.25] [--update]

Every ratio is of two things timed in turn in this process, so that a slower machine slows both: methods over FedAvg,
and several lanes over one. Exit code 1 where one is worse than the committed ratio by more than the tolerance. Only
ratios of the same kind of device are compared. On a busy machine 1.4 means little: repeat before believing it.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import jax

from benchmarks.overhead import simulate, timer
from benchmarks.round_time import federation, simulation
from benchmarks.table import hardware
from benchmarks.workloads import WORKLOADS

FILE = Path(__file__).parent / "results" / "ratios.json"
METHODS = {"w4": ("scaffold", "feddyn", "moon", "fedmr", "fedgela"), "w1": ("fedmr", "moon", "feddc")}


def ratio(ours: Callable[[], tuple[float, float]], reference: Callable[[], tuple[float, float]], rounds: int) -> float:
    """Median of the ratios of rounds that are timed in turn."""
    return statistics.median(ours()[0] / reference()[0] for _ in range(rounds))


def measure(rounds: int) -> dict[str, float]:
    """All ratios by name."""
    ratios = {}
    for name, methods in METHODS.items():
        workload = WORKLOADS[name]
        federated = federation(workload)
        fedavg = timer(simulate("fedavg", workload, federated))
        for method in methods:
            ratios[f"{name}: {method} / fedavg"] = ratio(timer(simulate(method, workload, federated)), fedavg, rounds)
        for lanes in (2, 8):
            many_lanes = timer(simulation(workload, federated, lanes))
            ratios[f"{name}: {lanes} lanes / one"] = ratio(many_lanes, fedavg, rounds)
    return ratios


def compare(now: dict[str, float], committed: dict[str, float], tolerance: float) -> list[str]:
    """A sentence for each ratio that became worse or is no longer measured.

    >>> compare({"a": 1.2, "b": 2.0}, {"a": 1.0, "b": 1.0, "c": 1.0}, 0.25)
    ['b: 2.00, was 1.00', 'c: was 1.00 and is no longer measured']
    """
    gone = [f"{name}: was {old:.2f} and is no longer measured" for name, old in committed.items() if name not in now]
    pairs = [(name, new, committed[name]) for name, new in now.items() if name in committed]
    return [f"{name}: {new:.2f}, was {old:.2f}" for name, new, old in pairs if new > old * (1 + tolerance)] + gone


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="timed rounds of each")
    parser.add_argument("--tolerance", type=float, default=0.25, help="how much worse a ratio may be")
    parser.add_argument("--update", action="store_true", help="write the ratios as the committed ones")
    args = parser.parse_args(argv)
    kind = jax.devices()[0].device_kind
    committed = json.loads(FILE.read_text()) if FILE.exists() else {}
    now = measure(args.rounds)
    for name, value in now.items():
        print(f"{name}: {value:.2f}")
    if args.update:
        committed[kind] = {"machine": hardware(None), "jax": jax.__version__, "ratios": now}
        FILE.write_text(json.dumps(committed, indent=1) + "\n")
        return 0
    if kind not in committed:
        sys.exit(f"no ratios are committed for {kind}: add them with --update.")
    worse = compare(now, committed[kind]["ratios"], args.tolerance)
    print("\n".join(["slower than committed:", *worse]) if worse else "nothing became slower.")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
