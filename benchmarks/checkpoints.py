"""What checkpoints take from a run: one after every round, at the default's pace, or none but the last.

python -m benchmarks.checkpoints --rounds 100 --cores 2 --out benchmarks/results/checkpoints

Whole runs with evaluation every round; the time between the ends of two rounds is measured, in three runs that take
turns. Beside it, the time to write one checkpoint while nothing else runs, also for a ResNet18 of W3.
"""

import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

import jax
import numpy as np

from benchmarks.sweeps import SWEEPS, options
from benchmarks.table import hardware, on, parser, pin, save
from fedjax_pcdd.api.runs import run
from fedjax_pcdd.training.callbacks import Function
from fedjax_pcdd.training.checkpoint import Checkpoints
from fedjax_pcdd.training.config import build
from fedjax_pcdd.training.tasks import setup

EVERY = {"every round": 1, "auto": "auto", "none": 10**6}
WARM_UP = 10  # rounds that are not timed: the first checkpoint takes longer than others
SETTINGS = {
    "digits": SWEEPS["digits"],
    "digits100": {"clients": 100, "model": "mlp", "beta": 1.0, "min_samples": 1, "batch_size": 50},
    **{name: SWEEPS[name] for name in ("w1", "w4")},
    "w3": {"made_of": "w3", "clients": 10},
}
HEAD = "| | MB | one alone | every round | auto | none | every round / none | auto / none | auto writes |"
NOTE = """
Milliseconds, medians for one checkpoint, means for a round of a run with everything that it does. "auto writes": the
number of the timed rounds with a checkpoint. Of W3 only the checkpoint is timed.
"""


def round_ms(settings: dict[str, Any], folder: Path) -> tuple[float, int]:
    """Milliseconds of a round after the warm-up, and how many of these rounds wrote a checkpoint."""
    times, writes = [], []
    checkpoints: Any = Checkpoints
    write = checkpoints._write
    checkpoints._write = lambda self, round, *rest: (writes.append(round), write(self, round, *rest))
    try:
        run(*build(settings | {"run_dir": folder}), callbacks=[Function(lambda *_: times.append(perf_counter()))])
    finally:
        checkpoints._write = write
    seconds = times[-1] - times[WARM_UP]
    return 1e3 * seconds / (len(times) - 1 - WARM_UP), sum(round > WARM_UP for round in writes)


def checkpoint_ms(settings: dict[str, Any], folder: Path, repeats: int = 9) -> tuple[float, float]:
    """MB of a run's checkpoint, and milliseconds to write it."""
    state = setup([build(settings)]).start()
    server, clients = (state.servers, state.servers), (state.clients, state.statistics)
    seconds = []
    with Checkpoints(folder) as checkpoints:
        for round in range(1, repeats + 1):
            start = perf_counter()
            checkpoints.save(round, server, clients, "{}")
            checkpoints.wait()
            seconds.append(perf_counter() - start)
    return sum(x.nbytes for x in jax.tree.leaves((server, clients))) / 1e6, 1e3 * float(np.median(seconds[1:]))


def measure(name: str, rounds: int, repeats: int) -> dict[str, Any]:
    """The record of a workload; of several runs with one setting the fastest counts."""
    times: dict[str, list] = {side: [] for side in EVERY}
    with tempfile.TemporaryDirectory() as home:
        settings = options(SETTINGS[name], Path(home), rounds) | {"lanes": 1}
        size, alone = checkpoint_ms(settings, Path(home) / "one")
        for repeat in range(0 if name == "w3" else repeats):
            for side, every in EVERY.items():
                folder = Path(home) / f"{side}{repeat}"
                times[side].append(round_ms(settings | {"checkpoint_every": every}, folder))
    return {"mb": size, "alone_ms": alone, "rounds": {side: min(runs) for side, runs in times.items() if runs}}


def row(name: str, record: dict[str, Any]) -> str:
    """A line of the table."""
    cells = [name, f"{record['mb']:.1f}", f"{record['alone_ms']:.0f}"]
    if rounds := record["rounds"]:
        every, auto, none = (rounds[side][0] for side in EVERY)
        cells += [f"{x:.1f}" for x in (every, auto, none)] + [f"{x / none:.2f}" for x in (every, auto)]
        cells.append(str(rounds["auto"][1]))
    return f"| {' | '.join(cells + [''] * (9 - len(cells)))} |"


def main(argv: list[str] | None = None) -> None:
    argument_parser = parser(__doc__)
    argument_parser.add_argument("--workloads", nargs="+", choices=SETTINGS, default=[*SETTINGS])
    argument_parser.add_argument("--repeats", type=int, default=2, help="runs of each kind; the fastest counts")
    argument_parser.set_defaults(rounds=60)
    args = argument_parser.parse_args(argv)
    if args.rounds < WARM_UP + 2:
        argument_parser.error(f"--rounds must be at least {WARM_UP + 2}")
    machine, results = hardware(pin(args.cores)), {}
    for name in args.workloads:
        results[name] = measure(name, args.rounds, args.repeats)
        print(name, results[name], flush=True)
    title = f"{on(machine)}, jax {jax.__version__} ({jax.devices()[0].device_kind}), {machine['date']}."
    text = "\n".join([title, "", HEAD, 9 * "|---" + "|", *(row(*item) for item in results.items()), NOTE])
    save(args.out, {"machine": machine | {"jax": jax.__version__}, "results": results}, text)


if __name__ == "__main__":
    main()
