"""Where the time of a round goes: milliseconds of a profiled round by layer, and by kind of operation.

python -m benchmarks.breakdown --workloads w1 w2 w4 --cores=1 --out benchmarks/results/breakdown
"""

import argparse
import re
from collections import defaultdict
from typing import Any

import jax

from benchmarks.overhead import simulate
from benchmarks.round_time import federation, profile
from benchmarks.table import hardware, on, pin, save
from benchmarks.workloads import WORKLOADS
from fedjax_pcdd.engine.simulation import Simulation

INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([\w.\-]+) = .*? ([\w\-]+)\((.*)")
PLACE = re.compile(r'op_name="[^"]*?(transpose\()?jvp\(\w*\)\)?/(?:backbone/)?(\w+)')
LAST = re.compile(r'op_name="[^"]*?(\w+)"')
CONTAINERS = ("while", "conditional", "call")
PRODUCTS = ("dot", "convolution", "custom-call")


def instructions(text: str) -> dict[str, tuple[str, str]]:
    """Layer and kind of every operation of a compiled program that computes something itself, by its name.

    >>> instructions('  %dot.6 = f32[8,2] dot(%a), metadata={op_name="jit(f)/transpose(jvp(CNN))/backbone/fc1/dot"}')
    {'dot.6': ('fc1, backward', 'products')}
    """
    operations = {}
    for line in text.splitlines():
        match = INSTRUCTION.match(line)
        if not match or match[2] in CONTAINERS:
            continue
        name, kind, tail = match.groups()
        location = PLACE.search(tail)
        last_name = LAST.search(tail)
        outside = f"outside the model: {last_name[1] if last_name else kind}"
        layer = f"{location[2]}, {'backward' if location[1] else 'forward'}" if location else outside
        product = kind in PRODUCTS or "__ynn_fusion" in tail or "__onednn" in tail
        operations[name] = (layer, "products" if product else "elementwise")
    return operations


def profiled(simulated: Simulation) -> dict[str, float]:
    """Nanoseconds of each operation in one round that compiles nothing."""
    events = (event for plane in profile(simulated).planes for line in plane.lines for event in line.events)
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        spent[event.name] += event.duration_ns
    return spent


def measure(name: str, method: str) -> dict[str, Any]:
    """Milliseconds of a round of one workload by layer and kind."""
    simulated = simulate(method, WORKLOADS[name], federation(WORKLOADS[name]))
    operations = instructions(str(simulated.compile(simulated.start()).as_text()))
    by_layer, by_kind = (defaultdict[str, float](float) for _ in range(2))
    for operation, spent in profiled(simulated).items():
        if operation in operations:
            layer, kind = operations[operation]
            by_layer[layer] += spent / 1e6
            by_kind[kind] += spent / 1e6
    return {"layers": dict(sorted(by_layer.items(), key=lambda item: -item[1])), "kinds": dict(by_kind)}


def markdown(machine: dict, method: str, results: dict[str, dict[str, Any]]) -> str:
    """A table for each workload, with the slowest layers first."""
    text = [f"Milliseconds of a round of {method} by layer. {on(machine)}, jax {jax.__version__}, {machine['date']}."]
    for name, times in results.items():
        total = sum(times["layers"].values())
        kinds = ", ".join(f"{kind} {spent / total:.0%}" for kind, spent in sorted(times["kinds"].items()))
        text += ["", f"## {name.upper()}", "", f"{total:.0f} ms in all: {kinds}.", ""]
        text += ["| layer | ms | share |", "|---|---:|---:|"]
        rows = list(times["layers"].items())[:12]
        text += [f"| {layer} | {spent:.1f} | {spent / total:.0%} |" for layer, spent in rows]
    return "\n".join([*text, ""])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["w1", "w2", "w4"])
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--cores", type=int, help="bind this process to so many")
    parser.add_argument("--out", help="path of the files to write, without their ending")
    args = parser.parse_args(argv)
    machine = hardware(pin(args.cores) if args.cores else None)
    results = {name: measure(name, args.method) for name in args.workloads}
    record = {"machine": machine, "method": args.method, "results": results}
    save(args.out, record, markdown(machine, args.method, results))


if __name__ == "__main__":
    main()
