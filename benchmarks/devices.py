"""A CPU divided into several devices beside the same CPU as one: seconds and processor seconds of a round.

python -m benchmarks.devices --out=benchmarks/results/devices

Each workload has a process of its own, which divides the CPU and times one of the devices, with one lane and with as
many lanes as there are devices, and all of them with one lane each, round by round in turn; ratios are of medians.
"""

import argparse
import contextlib
import json
import math
import os
import statistics
import sys
from pathlib import Path

import jax

from benchmarks import workloads
from benchmarks.round_time import federation, simulation
from benchmarks.table import hardware, run, save
from benchmarks.workloads import WORKLOADS
from fedjax_pcdd.engine.devices import select_device

HEADER = (
    "| | devices | one device, s | with as many lanes, s | all devices, s | speed-up, medians | fastest rounds "
    "| processor seconds: one device | all devices | of the busiest thread: one device | all devices |"
)
NOTE = (
    "Speed-up: seconds of one device with one lane over those of all devices with one lane each, rounds in turn; the "
    "fastest rounds are those that other work on the machine (its load is given above) disturbed least. Threads that "
    "wait for a core are not at work, so processor seconds are disturbed little: with as many idle cores as devices a "
    "round of all devices would take about those of its busiest thread, and one of a single device, whose threads take "
    "turns for the most part, between those of its busiest thread and those of all."
)


def busy() -> dict[str, float]:
    """Processor seconds of every thread of this process so far; {} if the system does not report them."""
    seconds = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # a thread may have ended
            seconds[path.parent.name] = int(path.read_text().split()[0]) / 1e9
    return seconds


def measure(name: str, devices: int, rounds: int) -> dict:
    """The record of one workload, measured in this process."""
    select_device("cpu", devices)
    workload, contestants, times = WORKLOADS[name], {}, {}
    federated = federation(workload)
    for label, number, lanes in (("one", 1, 1), ("lanes", 1, devices), ("all", devices, 1)):
        simulated = simulation(workload, federated, lanes, number)
        contestants[label] = [simulated, simulated.start()]
        times[label] = []
    for r in range(rounds + 1):
        for label, contestant in contestants.items():
            begun, threads = workloads.clocks(), busy()
            contestant[1], report = contestant[0].step(contestant[1], r)
            jax.block_until_ready((contestant[1], report))
            wall, cpu = (b - a for a, b in zip(begun, workloads.clocks(), strict=True))
            longest = max((b - threads.get(name, 0) for name, b in busy().items()), default=math.nan)
            times[label].append((wall, cpu, longest))
    return {
        "workload": name, "devices": devices, "rounds": rounds, "jax": jax.__version__,
        **{label: _statistics(rounds_timed[1:]) for label, rounds_timed in times.items()},
    }  # fmt: skip


def _statistics(times: list[tuple[float, float, float]]) -> dict[str, float]:
    wall, cpu, longest = zip(*times, strict=True)
    middle = statistics.median
    summary = {"median_s": middle(wall), "min_s": min(wall), "cpu_s": middle(cpu), "busiest_s": middle(longest)}
    return {key: round(value, 5) for key, value in summary.items()}


def markdown(machine: dict, load: float, records: list[dict]) -> str:
    """The table, with the machine that it was measured on."""
    cores = f"{machine['cores']} cores with a load of {load:.1f}"
    lines = [f"{machine['cpu']}, {cores}, jax {records[0]['jax']}, {machine['date']}.", ""]
    lines += [HEADER, "|---" * (HEADER.count(" |")) + "|"]
    for record in records:
        one_device, many_lanes, all_devices = (record[label] for label in ("one", "lanes", "all"))
        seconds = [f"{times['median_s']:.3f}" for times in (one_device, many_lanes, all_devices)]
        ratios = [f"{one_device[key] / all_devices[key]:.2f}" for key in ("median_s", "min_s")]
        work = [f"{times[key]:.3f}" for key in ("cpu_s", "busiest_s") for times in (one_device, all_devices)]
        lines.append(f"| {' | '.join([record['workload'], str(record['devices']), *seconds, *ratios, *work])} |")
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
