"""A CPU divided into several devices beside the same CPU as one: seconds and processor seconds of a round.

python -m benchmarks.devices --out=benchmarks/results/devices

Each workload has a process of its own, which divides the CPU and times one of the devices, with one lane and with as
many lanes as there are devices, and all of them with one lane each, round by round in turn; ratios are of medians.
"""

import argparse
import json
import os
import statistics
import sys

import jax

from benchmarks import workloads
from benchmarks.round_time import build, federation
from benchmarks.table import hardware, run, save
from benchmarks.workloads import LR, MOMENTUM, WEIGHT_DECAY, WORKLOADS
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.simulation.devices import select_device
from fedjax_pcdd.simulation.round import Experiment, Local, Simulation

HEADER = (
    "| | devices | one device, s | with as many lanes, s | all devices, s | speed-up | over the lanes | processor "
    "seconds, all devices / one |"
)
NOTE = (
    "Speed-up: seconds of one device with one lane over those of all with one lane each, rounds in turn; over the "
    "lanes: the same for one device with as many lanes. The limit is the number of cores, less what else runs on the "
    "machine (its load when the measurement began is given above) and what XLA spreads over cores by itself."
)


def measure(name: str, devices: int, rounds: int) -> dict:
    """Times of one workload, in this process."""
    select_device("cpu", devices)
    workload = WORKLOADS[name]
    parts, local = federation(workload), Local(1, workload.batch, "drop", "sgd", LR, MOMENTUM, WEIGHT_DECAY)
    method = METHODS["fedavg"]()
    ways, found = {}, {}
    for label, number, lanes in (("one", 1, 1), ("lanes", 1, devices), ("all", devices, 1)):
        simulated = Simulation(
            method.build(build(workload)), [Experiment(parts, method, local, 0)], pipeline=Pipeline(),
            cohort=workload.clients, lanes=lanes, devices=number,
        )  # fmt: skip
        ways[label] = [simulated, simulated.start()]
        found[label] = []
    for r in range(rounds + 1):
        for label, way in ways.items():
            begun = workloads.clocks()
            way[1], report = way[0].step(way[1], r)
            jax.block_until_ready((way[1], report))
            wall, cpu = (b - a for a, b in zip(begun, workloads.clocks(), strict=True))
            found[label].append((wall, cpu))
    medians = {
        label: [round(statistics.median(x), 5) for x in zip(*times[1:], strict=True)] for label, times in found.items()
    }
    return {"workload": name, "devices": devices, "rounds": rounds, "jax": jax.__version__, "seconds": medians}


def markdown(machine: dict, load: float, records: list[dict]) -> str:
    """The table with what it was measured on."""
    cores = f"{machine['cores']} cores with a load of {load:.1f}"
    lines = [f"{machine['cpu']}, {cores}, jax {records[0]['jax']}, {machine['date']}.", ""]
    lines += [HEADER, "|---" * (HEADER.count(" |")) + "|"]
    for record in records:
        (one, one_cpu), (lanes, _), (several, several_cpu) = (record["seconds"][x] for x in ("one", "lanes", "all"))
        numbers = (f"{one:.3f}", f"{lanes:.3f}", f"{several:.3f}", f"{one / several:.2f}", f"{lanes / several:.2f}")
        cells = (record["workload"], record["devices"], *numbers, f"{several_cpu / one_cpu:.2f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", NOTE, ""])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, help="measure this one in this process")
    parser.add_argument("--devices", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds")
    parser.add_argument("--json", action="store_true", help="print the JSON line of one workload")
    parser.add_argument("--out", help="path of the files to write, without their ending")
    args = parser.parse_args(argv)
    if args.workload:
        print(json.dumps(measure(args.workload, args.devices, args.rounds)), flush=True)
        return
    load = os.getloadavg()[0]
    options = (f"--devices={args.devices}", f"--rounds={args.rounds}")
    records = [run(sys.executable, "devices", f"--workload={name}", *options) for name in ("w1", "w4")]
    machine = hardware(None)
    save(args.out, {"machine": machine, "load": load, "results": records}, markdown(machine, load, records))


if __name__ == "__main__":
    main()
