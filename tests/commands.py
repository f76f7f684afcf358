"""Calls the command line as a user does, in this process or in a new one; reads the results of a run; kills a run."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax

from fedjax_pcdd.cli.options import configure, scan
from fedjax_pcdd.cli.run import main

ROOT = Path(__file__).parent.parent
RUN = [sys.executable, str(ROOT / "experiments" / "run.py")]


def parse(argv):
    """The configuration and the method that command-line arguments describe."""
    return configure(scan(argv))


def start(*options, cwd=None, **environment):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    return subprocess.Popen([*RUN, *options], cwd=cwd, env=environment, **pipes)


def call(*options, **given):
    process = start(*options, **given)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def call_here(*options, cwd="."):
    """As `call`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(options)
    return code, out.getvalue(), err.getvalue()


def results_of(folder, *options):
    """The results of a run on the CPU: run in this process if JAX uses the CPU here anyway, else in a new one."""
    run = call_here if jax.default_backend() == "cpu" else call
    code, _, err = run(*options)
    assert code == 0, err
    return results(folder)


def undisturbed(folder, *options):
    return results_of(folder, *options, f"--run-dir={folder}")


def resumed(folder):
    return results_of(folder, f"--resume={folder}")


def wait_for_rounds(process, folder, rounds):
    """Wait until a run has recorded this many rounds or has ended."""
    metrics, deadline = folder / "metrics.jsonl", time.time() + 600  # so long because the machine may be busy
    while time.time() < deadline and process.poll() is None:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= rounds:
            return
        time.sleep(0.01)


def kill_after(rounds, folder, *options):
    """Start a run and kill it once it has recorded this many rounds."""
    process = start(*options, f"--run-dir={folder}")
    wait_for_rounds(process, folder, rounds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (folder / "summary.json").exists()


def results(folder):
    """The results that do not depend on the clock: all rows without times, and the summary's accuracies."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]
    summary = json.loads((folder / "summary.json").read_text())
    return rows, {k: v for k, v in summary.items() if k.startswith(("ga", "pa"))}
