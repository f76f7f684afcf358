"""Functions that the items of a made-up GPU day call: they succeed, crash, fail, sleep, or lack a file."""

import os
import sys
import time
from pathlib import Path

from benchmarks.gpu.workers import Lacking


def square(x):
    return {"square": x * x}


def crash():
    print("F0000 a check failed", file=sys.stderr, flush=True)
    os.abort()


def fail():
    raise ValueError("two lines\nof which this is the last")


def sleep(log, seconds=60.0):
    with open(log, "a") as file:
        file.write(f"{seconds}\n")
    time.sleep(60)


def lack(file):
    if not Path(file).exists():
        raise Lacking(f"there is no {Path(file).name}")
    return {}


def process():
    return {"pid": os.getpid(), "flag": os.environ.get("GPU_DAY_FLAG")}
