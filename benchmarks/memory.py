"""Peak memory as the cohort grows: it should follow the lanes and the data, not the number of models.

python -m benchmarks.memory --out=benchmarks/results/NAME
"""

import sys

from benchmarks.table import hardware, parser, pin, run, save

COHORTS = (("w4", 500), ("w4", 5000), ("w1", 10), ("w1", 100))


def measure(lanes: int, rounds: int) -> list[dict]:
    """One record for each cohort, from fresh processes."""
    options = (f"--lanes={lanes}", f"--rounds={rounds}")
    return [
        run(sys.executable, "round_time", f"--workload={name}", f"--clients={clients}", *options)
        for name, clients in COHORTS
    ]


def models_mb(record: dict) -> float:
    """MiB that a float32 copy of the parameters for every client of the cohort would take."""
    return record["clients"] * record["params"] * 4 / 2**20


def markdown(machine: dict, records: list[dict]) -> str:
    """The table, and by how much each quantity grows with the cohort."""
    lines = ["| | clients | peak, MiB | images, MiB | all clients' models, MiB |", "|---" * 5 + "|"]
    for r in records:
        values = (r["clients"], round(r["peak_memory_mb"]), round(r["data_mb"]), round(models_mb(r)))
        lines.append(f"| {r['workload']} | {' | '.join(map(str, values))} |")
    lines += ["", "Growth from the smaller to the larger cohort:", ""]
    for small, large in zip(records[::2], records[1::2], strict=True):
        peak, images = (large[key] - small[key] for key in ("peak_memory_mb", "data_mb"))
        models = models_mb(large) - models_mb(small)
        lines.append(f"- {large['workload']}: peak {peak:+.0f}, images {images:+.0f}, models {models:+.0f} MiB.")
    lanes, jax = records[0]["lanes"], records[0]["jax"]
    machine_text = f"{machine['cpu']}, {lanes} lane(s), jax {jax} ({records[0]['device']}), {machine['date']}"
    return "\n".join([f"Peak resident memory of the whole process. {machine_text}.", "", *lines, ""])


def main(argv: list[str] | None = None) -> None:
    options = parser(__doc__)
    options.add_argument("--lanes", type=int, default=1)
    args = options.parse_args(argv)
    machine = hardware(pin(args.cores))
    records = measure(args.lanes, args.rounds)
    save(args.out, {"machine": machine, "results": records}, markdown(machine, records))


if __name__ == "__main__":
    main()
