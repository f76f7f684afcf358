"""Which process runs which cell: claims on their runs, as the experiments of a sweep are claimed.

A claim is on the options that decide a run, not on the cell: tables share runs, and none of them is run twice.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedjax_pcdd.api.sweep import CLAIMS
from fedjax_pcdd.errors import writing
from fedjax_pcdd.training.config import values
from fedjax_pcdd.training.folder import LOCK
from fedjax_pcdd.training.lock import InUse, Lock, owner
from reproduction import results
from reproduction.cells import Folders, run_folder
from reproduction.plan import Cell, configured


def claim_name(cell: Cell, folders: Folders) -> str:
    """The file that is the claim on a cell's run, below the run folders."""
    options = results.decisive(values(*configured(cell, folders.presets)))
    return f"{hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]}.lock"


def claims(folders: Folders) -> Path:
    """The folder of the claims, and of what several processes say."""
    folder = folders.runs / CLAIMS
    with writing(folder, "another `runs_dir`"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def claimed(cell: Cell, folders: Folders) -> Iterator[bool]:
    """Whether the run of a cell is this process's alone in here; False where another one is at it."""
    try:
        lock = Lock.take(claims(folders) / claim_name(cell, folders), wait=0)
    except InUse:
        yield False
        return
    with lock:
        yield True


def running(cells: Sequence[Cell], folders: Folders) -> list[tuple[Cell, str]]:
    """Those of some cells whose run folder a process writes to, and the process in words."""
    owners = [(cell, owner(run_folder(cell, folders) / LOCK)) for cell in cells]
    return [(cell, by) for cell, by in owners if by]
