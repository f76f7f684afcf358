"""A campaign of faults: runs are killed, files damaged and disks filled, and the outcomes are compared with no fault.

    python tests/faults/campaign.py kills --count=200 --out=faults.jsonl      continues where it was stopped
    python tests/faults/campaign.py files --count=400 --out=faults.jsonl
    python tests/faults/campaign.py disks --count=40 --out=faults.jsonl
    python tests/faults/campaign.py counts --out=faults.jsonl

An outcome is `same` (the bits of an undisturbed run), `refused` (one sentence, exit code 2) or `wrong`, anything else:
other numbers, a traceback, another exit code. After kills `refused` is wrong, too. What a fault does follows from its
number alone.
"""

import argparse
import io
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from contextlib import redirect_stderr, suppress
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

SMALL = [
    "--train-samples=160", "--test-samples=60", "--local-epochs=1", "--batch-size=16", "--lanes=1", "--quiet",
    "--fine-tune-epochs=1",
]  # fmt: skip
SPLIT = ["--clients=4", "--min-samples=1", "--beta=0.5"]
TASK = ["--task=digits_domains", "--local-epochs=1", "--models=mlp", "--lanes=1", "--quiet", "--batch-size=64"]
OWN_MODELS = [
    "--pretrain-epochs=1",
    "--public-samples=64",
    "--public-batch=32",
]  # for participants with models of their own
KILLS = 4  # of one run, one after another, until it may end
MOST_MISSED = 10  # runs in a row that ended before they were killed


def kinds() -> list[tuple[str, list[str]]]:
    """What is killed, in turn: one of each kind, then every method with other tasks, sweeps and processes between."""
    from fedjax_pcdd.methods import METHODS

    first_kinds = [
        ("two processes", ["--method=scaffold", *SPLIT, *SMALL]),
        ("sweep", ["--method=fedavg,fedrep", "--seed=0:2", *SPLIT, *SMALL]),
        ("task fccl", ["--method=fccl", *TASK, *OWN_MODELS]),
        ("two sweeps", ["--method=fedavg,feddyn", "--seed=0:2", *SPLIT, *SMALL]),
    ]
    task_kinds = [(f"task {name}", [f"--method={name}", *TASK, *OWN_MODELS]) for name in ("fedmd", "fedproto")]
    task_kinds.insert(0, ("task fedavg", ["--method=fedavg", *TASK]))
    states_on_hosts = ("two processes, states on hosts", ["--method=feddyn", "--client-state=host", *SPLIT, *SMALL])
    task_sweep = ("sweep of a task", ["--method=fccl,fedmd", "--seed=0:2", *TASK, *OWN_MODELS])
    method_kinds = [
        (f"method {name}", [f"--method={name}", *SPLIT, *SMALL, *public(cls)]) for name, cls in METHODS.items()
    ]
    further_kinds = [*method_kinds, *task_kinds, states_on_hosts, task_sweep]
    random.Random(0).shuffle(further_kinds)
    return [*first_kinds, *further_kinds]


def public(method: type) -> list[str]:
    """Options about public images, as far as a method uses them."""
    traits = method().traits()
    batch = ["--public-batch=16"] if traits.exchange != "never" else []
    return ["--public-samples=64", *batch] if traits.needs_public else []


def command(kind: str, options: list[str], folder: Path, *, resume: bool) -> list[list[str]]:
    """The command line of each process."""
    if "sweep" in kind:
        sweep = [sys.executable, str(ROOT / "experiments/sweep.py"), *options, f"--sweep-dir={folder}"]
        return [sweep] * (2 if kind == "two sweeps" else 1)
    run_options = [f"--resume={folder}"] if resume else [*options, f"--run-dir={folder}"]
    run = [sys.executable, str(ROOT / "experiments/run.py"), *run_options]
    if not kind.startswith("two processes"):
        return [run]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    process_options = [f"--coordinator=127.0.0.1:{port}", "--processes=2", "--patience=60"]
    return [[*run, *process_options, f"--process={i}"] for i in range(2)]


LIMITED = """
import os, resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
os.execv(sys.argv[2], sys.argv[2:])
"""


def start(commands: list[list[str]], limit: int | None = None) -> list[subprocess.Popen]:
    """Start processes; `limit` is the largest file that they may write."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    if limit is not None:
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # else JAX warns of what it cannot keep there
        # Set by the new process: a fork of one that has JAX's threads may hang.
        commands = [[sys.executable, "-c", LIMITED, str(limit), *command_line] for command_line in commands]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen(command_line, env=environment, **pipes) for command_line in commands]


def ended(processes: list[subprocess.Popen]) -> tuple[int, str]:
    """The exit code of the first process, and the stderr of all."""
    errors = [process.communicate(timeout=900)[1] for process in processes]
    return processes[0].returncode, "".join(errors)


def results(folder: Path) -> list:
    """The results of a run or of all runs of a sweep that do not depend on the clock."""
    import commands

    return [commands.results(file.parent) for file in sorted(folder.rglob("config.yaml"))]


def outcome(code: int, err: str, folder: Path, expected: list) -> str:
    """`same`, `refused` or `wrong`, as defined above."""
    if "Traceback" in err:
        return "wrong"
    if code == 2 and err.strip():
        return "refused"
    try:
        return "same" if code == 0 and results(folder) == expected else "wrong"
    except (OSError, ValueError):
        return "wrong"


def rounds_in(folder: Path) -> int:
    files = [*folder.glob("metrics.jsonl"), *folder.glob("*/metrics.jsonl")]
    return sum(file.read_bytes().count(b"\n") for file in files)


def strike(processes: list[subprocess.Popen], rng: random.Random) -> bool:
    """Kill one process, and the others too or let them end by themselves; False if the first one had already ended."""
    victim, alone = rng.choice(processes), rng.random() < 0.5
    alive = victim.poll() is None
    victim.kill()
    if not alone:
        time.sleep(0.05)
        for process in processes:
            process.kill()
    ended(processes)
    return alive


def kill(number: int, folder: Path) -> dict:
    """Kill a run several times at random moments, then let it end: one outcome for all kills."""
    rng, all_kinds = random.Random(number), kinds()
    kind, options = all_kinds[number % len(all_kinds)]
    rounds = rng.choice([6, 20])
    checkpoints = [[], ["--checkpoint-every=1"], ["--checkpoint-every=1", "--keep=2"], ["--checkpoint-every=3"]]
    options = [*options, f"--rounds={rounds}", *rng.choice(checkpoints)]
    start_time = time.monotonic()
    code, err = ended(start(command(kind, options, folder / "whole", resume=False)[: 1 if "sweep" in kind else None]))
    duration = time.monotonic() - start_time
    if code:
        return {"fault": "kill", "kind": kind, "kills": 0, "outcome": "wrong", "why": f"without a fault: {err[-500:]}"}
    expected, killed, kills, rounds_at_kills = results(folder / "whole"), folder / "killed", 0, []
    for _ in range(KILLS):
        resume = (killed / "config.yaml").exists()
        processes = start(command(kind, options, killed, resume=resume))
        kill_round, deadline = rounds_in(killed) + rng.randint(1, rounds), time.monotonic() + duration
        if rng.random() < 0.3:
            deadline, kill_round = time.monotonic() + rng.uniform(0, duration), 10**9
        while time.monotonic() < deadline and rounds_in(killed) < kill_round and processes[0].poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.1))
        kills += strike(processes, rng)
        rounds_at_kills.append(rounds_in(killed))
        if (killed / "summary.json").exists() or (killed / "summary.csv").exists():
            break
    code, err = ended(start(command(kind, options, killed, resume=(killed / "config.yaml").exists())))
    verdict = "same" if outcome(code, err, killed, expected) == "same" else "wrong"
    why = "" if verdict == "same" else f"{code} {err[-500:]}"
    return {"fault": "kill", "kind": kind, "kills": kills, "rounds": rounds_at_kills, "outcome": verdict, "why": why}


def interrupted(folder: Path) -> list:
    """Run 6 rounds in this process and end another such run after the fourth; return the results of the whole one."""
    from fedjax_pcdd.api.runs import run
    from fedjax_pcdd.cli.options import configure, scan
    from fedjax_pcdd.training.callbacks import Function

    options = ["--method=scaffold", *SPLIT, *SMALL, "--rounds=6", "--track=angles", "--checkpoint-every=1"]

    def stop(training, _):
        if training.round == 4:
            raise KeyboardInterrupt

    run(*configure(scan([*options, f"--run-dir={folder / 'whole'}"])))
    with suppress(KeyboardInterrupt):
        run(*configure(scan([*options, f"--run-dir={folder / 'run'}"])), last=[Function(stop)])
    return results(folder / "whole")


FILE_FAULTS = "flip", "cut", "delete", "empty"


def damage(number: int, original: Path, folder: Path, expected: list) -> dict:
    """Flip a byte of a file, cut it or delete it, and resume in this process."""
    from fedjax_pcdd.cli.run import main

    rng = random.Random(number)
    shutil.copytree(original, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    pairs = [(file, fault) for file in files for fault in FILE_FAULTS]
    random.Random(0).shuffle(pairs)
    file, fault = pairs[number % len(pairs)]
    content = bytearray(file.read_bytes())
    if fault == "delete":
        file.unlink()
    elif fault == "flip" and content:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    else:
        file.write_bytes(b"" if fault == "empty" or not content else content[: rng.randrange(len(content))])
    err = io.StringIO()
    try:
        with redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("default")  # as a command has them; the tests turn them into errors
            code = main([f"--resume={folder}"])
    except Exception as error:
        code, _ = 1, err.write(f"Traceback {error!r}")
    verdict = outcome(code, err.getvalue(), folder, expected)
    name = str(file.relative_to(folder))
    why = "" if verdict == "same" else err.getvalue()[-300:]
    return {"fault": fault, "kind": name, "outcome": verdict, "why": why}


FILLED = ["--method=scaffold", *SPLIT, *SMALL, "--rounds=5", "--checkpoint-every=1"]


def undisturbed(folder: Path) -> list:
    """The results of the run that `fill` disturbs."""
    code, err = ended(start(command("method", FILLED, folder, resume=False)))
    assert code == 0, err
    return results(folder)


def fill(number: int, folder: Path, expected: list) -> dict:
    """Run with a limit on the size of files, as on a full disk, and again without the limit."""
    limit = int(10 ** random.Random(number).uniform(2, 5.2))
    code, err = ended(start(command("method", FILLED, folder, resume=False), limit))
    verdict = "same" if code == 0 else "refused" if code == 2 and len(err.strip().splitlines()) == 1 else "wrong"
    if verdict != "wrong":
        code, err = ended(start(command("method", FILLED, folder, resume=(folder / "config.yaml").exists())))
        verdict = "same" if outcome(code, err, folder, expected) == "same" else "wrong"
    if verdict == "same" and min((folder / name).stat().st_size for name in ("partition.png", "curves.png")) < 1000:
        verdict, err = "wrong", "a picture was not drawn"
    why = "" if verdict == "same" else f"{limit} {code} {err[-500:]}"
    return {"fault": "full", "kind": f"{len(str(limit))} digits", "outcome": verdict, "why": why}


def counts(file: Path) -> dict[str, Counter]:
    """Numbers of outcomes by fault; those of kills by the kind of run that was killed."""
    table: dict[str, Counter] = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        entry = json.loads(line)
        kind = re.sub("^(method|task) .*", r"\1", entry["kind"])
        fault = f"kill, {kind}" if entry["fault"] == "kill" else entry["fault"]
        table.setdefault(fault, Counter()).update({entry["outcome"]: 1, "kills": entry.get("kills", 0)})
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["kills", "files", "disks", "counts"])
    parser.add_argument("--count", type=int, default=20, help="kills, or damaged files, or full disks")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    faults = {"kills": ("kill",), "disks": ("full",)}.get(options.what, FILE_FAULTS)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    entries = [entry for entry in map(json.loads, lines) if entry["fault"] in faults]
    number = options.first + len(entries)
    progress = sum(e.get("kills", 0) for e in entries) if options.what == "kills" else len(entries)
    with tempfile.TemporaryDirectory() as base:
        whole = Path(base) / "expected"
        expected = (
            interrupted(whole) if options.what == "files" else undisturbed(whole) if options.what == "disks" else []
        )
        missed = 0
        while options.what != "counts" and progress < options.count:
            folder = Path(base) / str(number)
            if options.what == "files":
                entry = damage(number, whole / "run", folder, expected)
            else:
                entry = kill(number, folder) if options.what == "kills" else fill(number, folder, expected)
            shutil.rmtree(folder, ignore_errors=True)
            with open(options.out, "a") as out:
                out.write(json.dumps({"number": number} | entry) + "\n")
            progress += entry.get("kills", 1)
            number += 1
            missed = 0 if entry.get("kills", 1) else missed + 1
            if missed == MOST_MISSED:
                sys.exit(f"No kill has landed in {missed} runs: they end too soon.")
    table = counts(options.out)
    for fault, outcomes in table.items():
        print(f"{fault}: " + ", ".join(f"{count} {word}" for word, count in outcomes.items() if count))
    return int(any(outcomes["wrong"] for outcomes in table.values()))


if __name__ == "__main__":
    sys.exit(main())
