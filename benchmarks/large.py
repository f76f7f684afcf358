"""Large federations: seconds a round and memory as the number of clients grows, with the same cohort.

python -m benchmarks.large --out=benchmarks/results/large

Logistic regression on made-up images, 4 samples a client, a cohort of 100, each setting in a fresh process: FedAvg,
which keeps nothing of a client, and SCAFFOLD, whose clients each keep a control, on the device and on the host.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace

import jax

from benchmarks.round_time import build, device_peak_mb, federation
from benchmarks.table import ROOT, hardware, save
from benchmarks.workloads import LR, WEIGHT_DECAY, WORKLOADS, peak_memory_mb
from fedjax_pcdd.data.augment import Pipeline
from fedjax_pcdd.engine.round import Experiment, Local, Simulation
from fedjax_pcdd.methods import METHODS
from fedjax_pcdd.models.classifier import sizes
from fedjax_pcdd.training.callbacks import Function
from fedjax_pcdd.training.loop import loop

SETTINGS = (("fedavg", "device"), ("scaffold", "device"), ("scaffold", "host"))
CLIENTS = (100, 1000, 10000)
COHORT, SAMPLES = 100, 4


def measure(method: str, where: str, clients: int, rounds: int) -> dict:
    """One setting, in this process."""
    workload = replace(WORKLOADS["w4lr"], clients=clients, per_client=SAMPLES, batch=SAMPLES)
    local, model = Local(1, SAMPLES, "drop", "sgd", LR, 0.0, WEIGHT_DECAY), build(workload)
    chosen = METHODS[method]()
    simulated = Simulation(
        chosen.build(model), [Experiment(federation(workload), chosen, local, 0)], pipeline=Pipeline(), cohort=COHORT,
        client_state="host" if where == "host" else "device",
    )  # fmt: skip
    seconds: list[float] = []
    clock = Function(lambda run, report: seconds.append(report.seconds))
    loop(simulated, simulated.start(), rounds + 1, [clock])
    kept = clients * sizes(model, workload.shape).params * 4 / 2**20 if method != "fedavg" else 0.0
    return {
        "method": method, "state": where, "clients": clients, "median_s": statistics.median(seconds[1:]),
        "peak_memory_mb": peak_memory_mb(), "device_peak_memory_mb": device_peak_mb(jax.devices()[0]),
        "images_mb": round(workload.data_bytes / 2**20, 1), "client_state_mb": round(kept, 1),
    }  # fmt: skip


def markdown(machine: dict, records: list[dict]) -> str:
    """The table."""
    head = "| method | state on | clients | s a round | peak MiB | device, MiB | images, MiB | client state, MiB |"
    lines = [head, "|---" * 8 + "|"]
    for r in records:
        device = "-" if r["device_peak_memory_mb"] is None else r["device_peak_memory_mb"]
        cells = (r["method"], r["state"], r["clients"], f"{r['median_s']:.4f}", r["peak_memory_mb"], device)
        lines.append(f"| {' | '.join(map(str, cells))} | {r['images_mb']} | {r['client_state_mb']} |")
    where = f"{machine['cpu']}, {machine['cores']} cores, jax {jax.__version__} ({jax.default_backend()})"
    text = f"Cohort of {COHORT}, {SAMPLES} samples a client, logistic regression. {where}, {machine['date']}."
    return "\n".join([text, "", *lines, "", "On a CPU the device's memory is the process's.", ""])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=3, metavar=("METHOD", "WHERE", "CLIENTS"), help="one setting, as a JSON line")
    parser.add_argument("--out", help="path of the files to write, without their ending")
    args = parser.parse_args(argv)
    if args.one:
        method, where, clients = args.one
        print(json.dumps(measure(method, where, int(clients), args.rounds)))
        return
    records = []
    for method, where in SETTINGS:
        for clients in CLIENTS:
            one = ["--one", method, where, str(clients), f"--rounds={args.rounds}"]
            command = [sys.executable, "-m", "benchmarks.large", *one]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            records.append(json.loads(done.stdout.splitlines()[-1]))
            print(records[-1], file=sys.stderr, flush=True)
    machine = hardware(None)
    save(args.out, {"machine": machine, "results": records}, markdown(machine, records))


if __name__ == "__main__":
    main()
