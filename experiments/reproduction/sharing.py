"""Which process runs which cell: each claims its runs, as the experiments of a sweep are claimed.

A claim is on the options that decide a run, not on the cell: tables share runs, and no run is done twice.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedjax_pcdd.errors import writing
from fedjax_pcdd.training.config import values
from fedjax_pcdd.training.folder import CLAIMS, LOCK
from fedjax_pcdd.training.lock import InUse, Lock, owner
from reproduction import results
from reproduction.cells import Folders, run_folder
from reproduction.plan import Cell, configured


def run_name(cell: Cell, presets: Path) -> str:
    """A name for the run of a cell, which cells that share the run have in common."""
    options = results.decisive(values(*configured(cell, presets)))
    return hashlib.sha256(json.dumps(options).encode()).hexdigest()[:16]


def claim_name(cell: Cell, folders: Folders) -> str:
    """The name of the file that is the claim on a cell's run, below the run folders."""
    return f"{run_name(cell, folders.presets)}.lock"


def claims(folders: Folders) -> Path:
    """The folder of the claims, and of the logs of several processes."""
    folder = folders.runs / CLAIMS
    with writing(folder, "another `runs_dir`"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def claimed(cell: Cell, folders: Folders) -> Iterator[bool]:
    """Claim the run of a cell for the block: True if this process has it, False if another one is running it."""
    try:
        lock = Lock.take(claims(folders) / claim_name(cell, folders), wait=0)
    except InUse:
        yield False
        return
    with lock:
        yield True


def running(cells: Sequence[Cell], folders: Folders) -> list[tuple[Cell, str]]:
    """The cells whose run folder a process is writing to, and that process in words."""
    owners = [(cell, owner(run_folder(cell, folders) / LOCK)) for cell in cells]
    return [(cell, process) for cell, process in owners if process]
