"""What the engine's programs become on a GPU or a TPU, found without one: XLA's compilers for them run on any CPU.

    python -m benchmarks.accelerator loops --workload=w4 --lanes=500 --json
    python -m benchmarks.accelerator round --target=h100 --workload=w4 --lanes=500 --json
    python -m benchmarks.accelerator model --target=h100 --model=resnet18 --json
    python -m benchmarks.accelerator all --target=h100 [--quick] [--check] [--workers=2]

`loops` counts how often loops of unknown length turn (each turn costs a GPU a trip to the host) and the equations that
are evaluated; it needs no compiler but the CPU's. `round` compiles a program of the engine and counts the kernels that
it launches: those of a loop's body as often as the loop turns. `model` compiles a model's forward pass, gradient and
loop of steps. `all` goes through everything, compiles the programs that are not those of their records, and writes
`benchmarks/results/accelerator.{json,md}`; with --check it writes nothing, and fails where something does not compile
or has grown by a tenth.

All but `loops` needs the extra `accelerator` (5.5 GB). A compiler may end its process, so each compilation has its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cases import ENGINE, FEDERATIONS, PARTS, PRECISIONS, VIEWS, Case
from benchmarks.lowering import Digests, counted, lower
from benchmarks.targets import TARGETS, environment, imagine, missing

ROOT = Path(__file__).parents[1]
KEYS = {
    "loops": ("turns", "equations"),
    "round": ("ok", "kernels", "turns", "temp_mb", "compile_s"),
    "model": ("ok", "temp_mb"),
    "forms": ("ok", "temp_mb"),
}
USER_ERROR = 2  # exit code
TIMEOUT = 1800.0  # seconds of one compilation


def parser() -> argparse.ArgumentParser:
    """The command line's options; those of a case have the names of its fields."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("view", choices=(*VIEWS, "all"), metavar="loops|round|model|all")
    options.add_argument("--target", choices=TARGETS, default="h100")
    options.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    case = options.add_argument_group("what is looked at")
    case.add_argument(
        "--program", choices=(*ENGINE, *PARTS), help="of the engine, or part of a model; a round, all parts"
    )
    case.add_argument("--workload", choices=FEDERATIONS, default="w4", help="dirichlet has unequal clients, beta 0.1")
    case.add_argument("--clients", type=int, help="instead of the workload's")
    case.add_argument("--lanes", type=int, default=1)
    case.add_argument("--method", default="fedavg")
    case.add_argument(
        "--model", default="resnet18", help="of an exchange one for each participant, with commas between"
    )
    case.add_argument("--batch", type=int, default=50, help="of a model, or of an exchange's participants")
    case.add_argument("--side", type=int, default=32, help="of their images")
    case.add_argument("--precision", choices=PRECISIONS, default="float32", help="of a model")
    whole = options.add_argument_group("all")
    whole.add_argument("--quick", action="store_true", help="what breaks most often, in a quarter of an hour")
    whole.add_argument("--check", action="store_true", help="write nothing, fail where something became worse")
    whole.add_argument("--only", default="", help="cases whose lines, `section: name`, contain this")
    whole.add_argument("--workers", type=int, default=2, help="compilations at once")
    whole.add_argument("--out", type=Path, help="path of the results without its ending")
    options.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds; what takes longer does not compile")
    options.add_argument("--layer", help=argparse.SUPPRESS)
    options.add_argument("--form", help=argparse.SUPPRESS)
    options.add_argument("--in-process", action="store_true", help=argparse.SUPPRESS)
    return options


def measure(case: Case, target: str, timeout: float = TIMEOUT) -> dict[str, Any]:
    """The record of a case, measured in its own process; if that fails, "ok" is false and "reason" says why."""
    command = [sys.executable, "-m", "benchmarks.accelerator", *case.options(), f"--target={target}", "--in-process"]
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        try:
            code = subprocess.run(
                command, cwd=ROOT, env=environment(target), stdout=output, stderr=errors, timeout=timeout
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        for file in (output, errors):
            file.seek(0)
        record = {key: value for line in output for key, value in json.loads(line).items()}
        if code == 0:
            return record | {"process_s": round(time.monotonic() - begun, 1)}
        reason = reason_of(code, errors.read()) if code else f"not compiled within {timeout:.0f} s"
    if code is None:
        record.pop("program", None)  # so that it is tried again, with more time
    return record | {"ok": False, "reason": reason} | ({"mistake": True} if code == USER_ERROR else {})


def reason_of(code: int, errors: str) -> str:
    """One line that says why a process failed: XLA's failed check, else the last line that it wrote.

    >>> reason_of(-6, "I0000 loading\\nF0000 00:00:1.2 7 tiling.cc:627] Check failed: a == b (1 vs. 2)\\n*** stack ***")
    'the compiler ended its process: tiling.cc:627] Check failed: a == b (1 vs. 2)'
    """
    lines = [line for line in errors.splitlines() if line.strip()]
    checks = [line for line in lines if "Check failed" in line]
    if checks:
        file = checks[-1].split("] ", 1)[0].split()[-1]
        return f"the compiler ended its process: {file}] {checks[-1].split('] ', 1)[-1]}"
    last = lines[-1].strip() if lines else "no message"
    return f"ended by signal {-code}: {last}" if code < 0 else last


def compute(case: Case, target: str) -> Iterator[dict[str, Any]]:
    """The record of a case, computed in this process, in parts: a program that does not compile has a digest, too."""
    from benchmarks import programs

    imagine(target)
    if case.view == "loops":
        record, loops = counted(programs.trace(case))
        yield record | {"loops": [loop._asdict() for loop in loops]}
        return
    program = lower(case, target)
    yield {"program": program.digest} | program.record
    begun = time.perf_counter()
    compiled = program.lowered.compile()
    seconds, bytes_needed = time.perf_counter() - begun, compiled.memory_analysis().temp_size_in_bytes
    kernels = _kernels(compiled, target, program.turns) if program.record else {}
    yield {"ok": True, "temp_mb": round(bytes_needed / 2**20, 1), "compile_s": round(seconds, 1), **kernels}


def run_in_process(case: Case, target: str) -> int:
    """Print the record of a case as several lines, or a sentence that says what is wrong with the case."""
    from fedjax_pcdd.errors import UserError

    try:
        for part in compute(case, target):
            print(json.dumps(part), flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return USER_ERROR
    return 0


def _kernels(compiled: Any, target: str, turns: dict[str, int]) -> dict[str, Any]:
    """Kernels of a whole program; a TPU runs it in one go and launches none."""
    from benchmarks.hlo import launches

    if TARGETS[target].backend != "gpu":
        return {"kernels": None}
    counted = launches(compiled.as_text(), turns)
    counts = {"kernels": counted.kernels, "branches": counted.branches or None, "uncounted": counted.reason}
    return counts | {"bodies": [body._asdict() for body in counted.bodies]}


def case_of(args: argparse.Namespace, program: str) -> Case:
    """The case that a command line describes."""
    values: dict[str, Any] = {field.name: getattr(args, field.name) for field in fields(Case)} | {"program": program}
    return Case(**values)


def look(args: argparse.Namespace) -> dict[str, Any]:
    """The record of the one view that a command line asks for."""
    if args.view != "model":
        return measure(case_of(args, args.program or "round"), args.target, timeout=args.timeout)
    parts = [args.program] if args.program else PARTS
    records = {part: measure(case_of(args, part), args.target, timeout=args.timeout) for part in parts}
    main = records.get("gradient") or records[parts[0]]
    reasons = [f"{part}: {r['reason']}" for part, r in records.items() if not r["ok"]]
    record = {"ok": not reasons, "temp_mb": main.get("temp_mb"), "parts": records}
    return record | ({"reason": "; ".join(reasons)} if reasons else {})


def show(view: str, record: dict[str, Any]) -> None:
    """Print a record for people."""
    print(", ".join(f"{key} {record[key]}" for key in KEYS[view] if key in record))
    if record.get("branches"):
        print(f"  at most so many kernels: of {record['branches']} branches the larger ones are counted")
    for loop in record.get("loops", ()):
        print(f"  loop {loop['name']}: {loop['turns']} turns" + (", of known length" if loop["known"] else ""))
    for body in record.get("bodies", ()):
        name = body["name"] if body["name"] == "entry" else f"loop {body['name']}"
        print(f"  {'  ' * body['depth']}{name}: {body['kernels']} kernels, {body['runs']} times")
    for part, part_record in record.get("parts", {}).items():
        print(f"  {part}: " + ", ".join(f"{key} {value}" for key, value in part_record.items()))


def go_through(args: argparse.Namespace) -> int:
    """Run the whole survey; returns 1 if something does not compile or, with --check, became worse."""
    import jax

    from benchmarks import survey

    jax.config.update("jax_platforms", "cpu")
    committed = survey.read(args.out or survey.RESULTS).get(args.target, {})
    records = survey.Survey(args.out or survey.RESULTS, writes=not args.check)
    complaints = []
    timed = partial(measure, timeout=args.timeout)
    measured = survey.run(records, args.target, timed, Digests, quick=args.quick, only=args.only, workers=args.workers)
    for section, name, record in measured:
        print(f"{section}: {name}: " + ", ".join(f"{k} {v}" for k, v in record.items() if k != "program"), flush=True)
        previous = committed.get(section, {}).get(name) if args.check else {"ok": True}
        complaints += filter(None, [survey.worse(section, name, record, previous)])
    print("\n".join(complaints) if complaints else "nothing became worse." if args.check else "all compile.")
    return 1 if complaints else 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.in_process:
        return run_in_process(case_of(args, args.program), args.target)
    if args.view != "loops" and (sentence := missing(args.target)):
        sys.exit(sentence)
    if args.view == "all":
        return go_through(args)
    record = look(args)
    if record.get("mistake"):
        sys.exit(record["reason"])
    if args.json:
        print(json.dumps({key: record.get(key) for key in KEYS[args.view]}))
    else:
        show(args.view, record)
    if notice := record.get("reason") or record.get("uncounted"):
        print(notice, file=sys.stderr)
    return 0 if record.get("ok", True) else 1


if __name__ == "__main__":
    sys.exit(main())
