"""Our engine beside a plain and a tuned PyTorch loop, in alternating fresh processes on the same cores.

python -m benchmarks.table --workloads=w1,w4 --cores=1 --torch-python=PATH --out=benchmarks/results/NAME

With --devices=N ours divides its clients over N devices, as `run.py --devices=N` does.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).parents[1]
HEADER = (
    "| | ours, s | plain loop, s | tuned loop, s | plain / ours | tuned / ours | by CPU time "
    "| bare steps / ours | matrix rate / ours | lanes | peak MiB: ours, plain, tuned | compile, s |"
)
NOTE = (
    "A ratio above 1 means that ours is faster. By CPU time: the two ratios of processor seconds, plain and "
    "tuned, which other work on the machine disturbs less. Bare steps: as many training steps in programs of their "
    "own, without an engine; matrix rate: the steps' arithmetic at the rate of one large product, both measured in the "
    "process of ours."
)


def pin(cores: int) -> int | None:
    """Bind this process and those it starts to that many cores; None if the system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        return None
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    os.sched_setaffinity(0, allowed)
    return len(allowed)


def run(python: str, module: str, *options: str) -> dict:
    """The JSON line of one benchmark in a fresh process; exits if that fails."""
    command = [python, "-m", f"benchmarks.{module}", *options, "--json"]
    process = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if process.returncode:
        sys.exit(f"'{' '.join(command)}' failed with code {process.returncode}; its message is above.")
    return json.loads(process.stdout.splitlines()[-1])


def hardware(cores: int | None) -> dict:
    """The machine and the date."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (x.partition(":")[2].strip() for x in lines if x.startswith("model name"))
    return {
        "cpu": next(names, platform.machine()),
        "cores": os.cpu_count(),
        "cores_used": cores,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def on(machine: dict) -> str:
    """The processor of a machine and its cores, in words."""
    return f"{machine['cpu']}, {machine['cores_used'] or 'all'} of {machine['cores']} cores"


def compare(name: str, args: argparse.Namespace) -> dict[str, dict]:
    """For each of the three contestants the run with the best median; their runs alternate."""
    options, torch = (f"--workload={name}", f"--rounds={args.rounds}"), args.torch_python
    torch_options = (*options, f"--threads={args.cores}")
    best: dict[str, dict] = {}
    for _ in range(args.repeats):
        records = {
            "ours": run(sys.executable, "round_time", *options, f"--devices={args.devices}"),
            "plain": run(torch, "torch_loop", *torch_options),
            "tuned": run(torch, "torch_loop", *torch_options, "--tuned"),
        }
        best = {k: min(best.get(k, new), new, key=lambda r: r["median_s"]) for k, new in records.items()}
    return best


def row(name: str, records: dict[str, dict]) -> str:
    """A line of the table."""
    ours, plain, tuned = (records[key] for key in ("ours", "plain", "tuned"))
    seconds = " | ".join(f"{r['median_s']:.3f}" for r in (ours, plain, tuned))
    ratios = " | ".join(f"{r['median_s'] / ours['median_s']:.2f}" for r in (plain, tuned))
    by_cpu = ", ".join(f"{r['cpu_s'] / ours['cpu_s']:.2f}" for r in (plain, tuned))
    limits = " | ".join(f"{ours[k] / ours['median_s']:.2f}" for k in ("bare_s", "matrix_s"))
    memory = ", ".join(f"{r['peak_memory_mb']:.0f}" for r in (ours, plain, tuned))
    workers = str(ours["lanes"]) + (f" on each of {ours['devices']} devices" if ours["devices"] > 1 else "")
    cells = (name, seconds, ratios, by_cpu, limits, workers, memory, f"{ours['compile_s']:.1f}")
    return f"| {' | '.join(map(str, cells))} |"


def markdown(machine: dict, results: dict[str, dict[str, dict]]) -> str:
    """The table, with the machine that it was measured on."""
    first = next(iter(results.values()))
    versions = f"jax {first['ours']['jax']} ({first['ours']['device']}), torch {first['plain']['torch']}"
    text = f"Seconds a round. {on(machine)}, {versions}, {machine['date']}."
    rule = "|---" * HEADER.count(" |") + "|"
    rows = [row(name, records) for name, records in results.items()]
    return "\n".join([text, "", HEADER, rule, *rows, "", NOTE, ""])


def save(out: str | None, record: dict, text: str) -> None:
    """Print the table and write it as OUT.json and OUT.md."""
    print(text, end="")
    if out:
        Path(f"{out}.json").write_text(json.dumps(record, indent=1) + "\n")
        Path(f"{out}.md").write_text(text)


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in WORKLOADS]
    if unknown:
        available = ", ".join(WORKLOADS)
        raise argparse.ArgumentTypeError(f"no workload {', '.join(unknown)}: there are {available}")
    return names


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that the tables share."""
    raw = argparse.RawDescriptionHelpFormatter
    options = argparse.ArgumentParser(description=description, formatter_class=raw)
    options.add_argument("--rounds", type=int, default=5, help="timed rounds in each process")
    options.add_argument("--cores", type=int, default=1, help="cores on which everything runs")
    options.add_argument("--out", help="path of the files to write, without their ending")
    return options


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--workloads", type=_names, default="w1,w2,w4,w4lr")
    options.add_argument("--repeats", type=int, default=2, help="processes of each kind; the best counts")
    options.add_argument("--devices", type=int, default=1, help="devices of ours; a CPU is made into so many")
    options.add_argument("--torch-python", default=sys.executable, help="interpreter with torch and numpy")
    args = options.parse_args(argv)
    machine = hardware(pin(args.cores))
    results = {}
    for name in args.workloads:
        results[name] = compare(name, args)
        print(row(name, results[name]), file=sys.stderr, flush=True)
    save(args.out, {"machine": machine, "results": results}, markdown(machine, results))


if __name__ == "__main__":
    main()
