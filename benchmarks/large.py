"""Large federations: seconds a round, start and memory as the number of clients grows, with the same cohort.

    python -m benchmarks.large --clients=100000 --method=scaffold --client-state=disk --rounds=5 --json
    python -m benchmarks.large --out=benchmarks/results/large_stream

Logistic regression on images of 28x28, 20 samples a client, a cohort of 100, one core, each setting in a fresh process:
FedAvg, which keeps nothing of a client, and SCAFFOLD, whose clients each keep a control. The images are those of a
mapped file as large as they are, but sparse: all are black, which costs as much as any others.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.round_time import build, device_peak_mb
from benchmarks.table import ROOT, hardware, on, parser, pin, save
from benchmarks.workloads import CLASSES, LR, WEIGHT_DECAY, WORKLOADS, Workload, peak_memory_mb
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.data.dataset import Dataset
from fedjax_pcdd.data.federation import Federation
from fedjax_pcdd.data.lists import Lists, Partition
from fedjax_pcdd.engine.execution import Execution
from fedjax_pcdd.engine.planning import Experiment
from fedjax_pcdd.engine.simulation import Simulation
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.methods.method import Local
from fedjax_pcdd.models.classifier import sizes
from fedjax_pcdd.training.callbacks import Function
from fedjax_pcdd.training.loop import loop

COHORT, SAMPLES = 100, 20
KEYS = ("clients", "method", "median_s", "start_s", "peak_memory_mb")
STATES = ("device", "host", "disk")
CACHE = 2**28  # bytes of the device for streamed samples
SETTINGS = [{"method": "fedavg", "clients": n, "data": "device"} for n in (1000, 10_000)]
SETTINGS += [{"method": "fedavg", "clients": n, "data": "stream"} for n in (1000, 10_000, 100_000, 1_000_000)]
SETTINGS += [
    {"method": "scaffold", "clients": n, "data": "stream", "client-state": state}
    for n, state in ((1000, "device"), (1000, "host"), (10_000, "host"), (10_000, "disk"), (100_000, "disk"))
]
NOTE = """
Start: from the beginning of the process to the end of the first round, with imports, images and compilation. Peak: of
the process's resident memory, of which the device's is part on a CPU, and so are pages of the mapped file that were
read. Images and clients' state, all of it, in MiB, too.
"""


def federation(workload: Workload, folder: Path) -> Federation:
    """Equal clients whose samples lie one after another in a mapped file; the first client has two test samples."""
    count, file = workload.stored, folder / "images.npy"
    np.lib.format.open_memmap(file, "w+", np.uint8, (count, *workload.shape)).flush()
    images, labels = np.load(file, mmap_mode="r"), np.random.default_rng(0).integers(0, CLASSES, count, np.int32)
    test_counts, train_counts = np.zeros(workload.clients, np.int64), np.full(workload.clients, workload.per_client)
    test_counts[0] = 2
    dataset = Dataset("black", images, labels, images[:2], labels[:2], CLASSES)
    return Federation(dataset, Partition(Lists(np.arange(count), train_counts), Lists(np.arange(2), test_counts)))


def age() -> float:
    """Seconds since this process began; if the system does not report that, its processor time."""
    stat = Path("/proc/self/stat")
    if not stat.exists():
        return time.process_time()
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def measure(method: str, clients: int, rounds: int, where: Any, data: str, folder: Path) -> dict[str, Any]:
    """The record of one setting, measured in this process; the images are written to the folder."""
    workload = replace(WORKLOADS["w4lr"], clients=clients, per_client=SAMPLES, batch=SAMPLES)
    local, model = Local(1, SAMPLES, "drop", "sgd", LR, 0.0, WEIGHT_DECAY), build(workload)
    algorithm = METHODS[method]()
    experiment = Experiment(federation(workload, folder), algorithm, local, 0)
    simulated = Simulation(
        algorithm.build(model), [experiment], pipeline=Pipeline(), cohort=COHORT, rounds=rounds + 1,
        execution=Execution(client_state=where, stream=CACHE if data == "stream" else None),
    )  # fmt: skip
    seconds: list[float] = []
    ages: list[float] = []

    def look(run, report):
        seconds.append(report.seconds)
        ages.append(age())

    loop(simulated, simulated.start(), rounds + 1, [Function(look)])
    state_mb = clients * sizes(model, workload.shape).params * 4 / 2**20 if method != "fedavg" else 0.0
    return {
        "clients": clients, "method": method, "state": where, "data": data,
        "median_s": round(statistics.median(seconds[1:]), 5), "start_s": round(ages[0], 1),
        "peak_memory_mb": peak_memory_mb(), "device_peak_memory_mb": device_peak_mb(jax.devices()[0]),
        "images_mb": round(workload.data_bytes / 2**20, 1), "client_state_mb": round(state_mb, 1),
    }  # fmt: skip


def markdown(machine: dict, records: list[dict]) -> str:
    """The table."""
    head = "| method | samples | state on | clients | s a round | start, s | peak MiB | images | client state |"
    lines = [head, "|---" * 9 + "|"]
    for r in records:
        cells = (r["method"], r["data"], r["state"], f"{r['clients']:,}", f"{r['median_s']:.4f}", r["start_s"])
        lines.append(
            f"| {' | '.join(map(str, cells))} | {r['peak_memory_mb']} | {r['images_mb']} | {r['client_state_mb']} |"
        )
    machine_text = f"{on(machine)}, jax {jax.__version__} ({jax.default_backend()}), {machine['date']}"
    text = f"Cohort of {COHORT}, {SAMPLES} samples a client, logistic regression. {machine_text}."
    return "\n".join([text, "", *lines, NOTE])


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--clients", type=int, help="of one setting; without it all of a table are measured")
    options.add_argument("--method", default="fedavg")
    options.add_argument("--data", choices=("device", "stream"), default="device", help="where the samples are")
    options.add_argument("--client-state", choices=STATES, default="device", help="where it lives between rounds")
    options.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    args = options.parse_args(argv)
    machine = hardware(pin(args.cores))
    if args.clients:
        with tempfile.TemporaryDirectory() as folder:
            record = measure(args.method, args.clients, args.rounds, args.client_state, args.data, Path(folder))
        print(json.dumps({key: record[key] for key in KEYS} if args.json else record))
        return
    records = []
    for setting in SETTINGS:
        chosen = [f"--{name}={value}" for name, value in setting.items()]
        command = [sys.executable, "-m", "benchmarks.large", *chosen, f"--rounds={args.rounds}"]
        process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        records.append(json.loads(process.stdout.splitlines()[-1]))
        print(records[-1], file=sys.stderr, flush=True)
    save(args.out, {"machine": machine, "results": records}, markdown(machine, records))


if __name__ == "__main__":
    main()
