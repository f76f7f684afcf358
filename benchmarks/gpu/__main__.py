"""A GPU day in three commands: does it work, how fast is it, and the papers' runs.

    python -m benchmarks.gpu --part=1 --minutes=9 --out=runs/gpu    [--rehearse]
    python -m benchmarks.gpu --page --out=runs/gpu

Each step is an item with a process of its own. Its result, be it a failure, is a line of OUT/results.jsonl; the same
command goes on with the first item without one, and stops before its minutes are over. Part 3 trains for hours: its
runs stop at a checkpoint and go on in the next call. `--page` adds the results to benchmarks/results/gpu.jsonl and
writes docs/gpu.md from that file. `--rehearse` does a tiny selection of everything on the CPU, its page is OUT/gpu.md.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu import page
from benchmarks.gpu.items import Item, Results, read
from benchmarks.gpu.workers import Call, Clock
from benchmarks.table import hardware

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "torch")


def items(part: int, rehearse: bool, data: Path | None, out: Path, results: Results) -> list[Item]:
    """The items of a part; imported late, as a starting worker does not need what they are made from."""
    if part == 1:
        from benchmarks.gpu import works

        return works.items(rehearse)
    if part == 2:
        from benchmarks.gpu import speed

        return speed.items(rehearse)
    from benchmarks.gpu import papers

    return papers.items(rehearse, data, out / "runs", results.lines)


def environment(part: int, rehearse: bool, out: Path) -> dict[str, str]:
    """The environment variables of a part's processes."""
    if rehearse:
        return {"JAX_PLATFORMS": "cpu"}
    if part == 2:  # each compilation is timed, and each process has the device to itself
        return {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    cache = {} if "JAX_COMPILATION_CACHE_DIR" in os.environ else {"JAX_COMPILATION_CACHE_DIR": str(out / "cache")}
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **cache}


def machine() -> dict[str, Any]:
    """The machine: processor, versions, and the driver's description of the GPU."""
    installed = [name for name in PACKAGES if importlib.util.find_spec(name.partition("-")[0])]
    query = "--query-gpu=name,driver_version,memory.total"
    tool = shutil.which("nvidia-smi")
    answer = subprocess.run([tool, query, "--format=csv,noheader"], capture_output=True, text=True) if tool else None
    gpu = answer.stdout.strip().splitlines() if answer else []
    return hardware(None) | {"gpu": gpu, "versions": {name: metadata.version(name) for name in installed}}


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options of a call."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__, formatter_class=raw)
    parser.add_argument("--part", type=int, choices=(1, 2, 3))
    parser.add_argument("--minutes", type=float, default=9.0, help="that this call may take")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the results and the runs")
    parser.add_argument("--data-dir", type=Path, default=os.environ.get("PCDD_DATA"), help="has fashion_mnist.npz")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 1) - 2)),
                        help="items of part 1 at the same time")  # fmt: skip
    parser.add_argument("--again", action="store_true", help="try what failed once more")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--page", action="store_true", help="write docs/gpu.md from the results")
    args = parser.parse_args(argv)
    if args.part is None and not args.page:
        parser.error("say which --part to run, or --page.")
    if args.part and not args.minutes > 0:
        parser.error("--minutes must be more than 0.")
    return args


def main(argv: list[str] | None = None) -> int:
    """Exit code: 0 if nothing is left to do, 3 if the same command would continue."""
    clock, args, done = Clock(0), parse(argv), True
    clock.seconds = 60 * args.minutes
    if args.part:
        results, rehearsed = Results(args.out), {"rehearsed": True} if args.rehearse else {}
        results.add({"name": "machine", "status": "machine", "part": args.part, **machine(), **rehearsed})
        todo = items(args.part, args.rehearse, args.data_dir, args.out.absolute(), results)
        workers = 1 if args.rehearse else args.workers
        call = Call(results, clock, workers=workers, shared=args.rehearse)
        env = environment(args.part, args.rehearse, args.out.absolute())
        done = call.work_off(todo, env, again=args.again, part=args.part, **rehearsed)
        remaining = len(results.unfinished(todo))
        print(f"{remaining} of {len(todo)} items are left" + (": run the same command again." if remaining else "."))
    if args.page and args.rehearse:
        (args.out / "gpu.md").write_text(page.page(read(args.out / "results.jsonl")), encoding="utf-8")
    elif args.page:
        page.write(args.out)
    return 0 if done else 3


if __name__ == "__main__":
    sys.exit(main())
