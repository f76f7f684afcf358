"""A stand-in for Slurm on one machine: starts what `sbatch` and `srun` would, with the variables that Slurm sets.

    install(folder)    # programs `sbatch`, `srun` and `fedjax-pcdd`, for PATH

Options that the templates of docs/scale.md do not have are refused. `STAND_IN_TASKS` is the number of processes of a
step, in place of nodes times tasks. `STAND_IN_MORE` holds words to append to every command; if it is `show`, commands
are not started but printed as lines of JSON.
"""

import itertools
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

SBATCH = {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--time", "--requeue"}
SRUN = {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--kill-on-bad-exit"}


def install(folder: Path) -> None:
    """Write the programs."""
    folder.mkdir(parents=True)
    this_program = f"{shlex.quote(sys.executable)} {shlex.quote(__file__)}"
    programs = {
        "sbatch": f"{this_program} sbatch",
        "srun": f"{this_program} srun",
        "fedjax-pcdd": f"{sys.executable} -m fedjax_pcdd",
    }
    for name, command in programs.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)


def checked(options: list[str], known: set[str]) -> None:
    """End the process if an option is one that no template has."""
    if unknown := {option.partition("=")[0] for option in options} - known:
        sys.exit(f"unknown options of Slurm: {sorted(unknown)}")


def sbatch(script: str) -> int:
    """Run a batch script, as on the first node of a job."""
    lines = Path(script).read_text().splitlines()
    checked([word for line in lines if line.startswith("#SBATCH ") for word in line.split()[1:]], SBATCH)
    return subprocess.call(["bash", script], env=os.environ | {"SLURM_JOB_ID": str(os.getpid())})


def srun(words: list[str]) -> int:
    """Run a step of a job: start the processes of a command; where one fails, the others are ended."""
    options = list(itertools.takewhile(lambda word: word.startswith("-"), words))
    checked(options, SRUN)
    command, appended, tasks = words[len(options) :], os.environ["STAND_IN_MORE"], int(os.environ["STAND_IN_TASKS"])
    if appended == "show":
        print(json.dumps(command))
        return 0
    step = {"NTASKS": str(tasks), "STEP_NUM_NODES": "1", "STEP_NODELIST": "localhost"}
    processes = []
    for i in range(tasks):
        task = {f"SLURM_{name}": value for name, value in (step | {"PROCID": str(i), "LOCALID": str(i)}).items()}
        processes.append(subprocess.Popen([*command, *appended.split()], env=os.environ | task))
    while None in (codes := [process.poll() for process in processes]):
        if any(codes) and "--kill-on-bad-exit=1" in options:
            for process in processes:
                process.terminate()
        time.sleep(0.1)
    return max(map(abs, codes))


if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    sys.exit(sbatch(*arguments) if program == "sbatch" else srun(arguments))
