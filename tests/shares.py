"""Runs the command line in one of several processes, and then writes which share of samples and states it had.

    python tests/shares.py FILE OPTIONS

writes JSON to FILE: `samples` (training samples that were read), `of_samples` (all there are), `state` (bytes of
clients' states that are in memory or on disk) and `of_state` (those of all clients).
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from fedjax_pcdd.cli.run import main
from fedjax_pcdd.data.mapped import Rows
from fedjax_pcdd.engine.storage import OnDisk, OnHost

samples_read, arrays_made = {}, []


def reading(self, numbers, into, original=Rows.read):
    samples_read.setdefault(id(self), (self, set()))[1].update(numbers.tolist())
    original(self, numbers, into)


def remember(cls):
    original = cls.array

    def array(self, shape, dtype):
        arrays_made.append((self, original(self, shape, dtype)))
        return arrays_made[-1][1]

    cls.array = array


def held(storage, array):
    """Bytes that the system has allocated for an array in host memory, or for its file."""
    if not array.nbytes:
        return 0
    if isinstance(storage, OnDisk):
        return os.fstat(storage._file(array)).st_blocks * 512
    first, last, inside, resident = array.ctypes.data, array.ctypes.data + array.nbytes, False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, value, *_ = line.split()
        if not name.endswith(":"):  # a range of addresses, which the next lines describe
            start, stop = (int(x, 16) for x in name.split("-"))
            inside = start < last and first < stop
        elif inside and name == "Rss:":  # without pages of zeros that were only read
            resident += int(value) * 1024
    return min(resident, array.nbytes)


Rows.read = reading
remember(OnDisk)
remember(OnHost)
code = main(sys.argv[2:])
biggest, numbers = max(samples_read.values(), key=lambda entry: len(entry[0].array))
shares = {
    "samples": len(numbers), "of_samples": len(biggest.array),
    "state": sum(held(*pair) for pair in arrays_made),
    "of_state": int(np.sum([array.nbytes for _, array in arrays_made])),
}  # fmt: skip
Path(sys.argv[1]).write_text(json.dumps(shares))
sys.exit(code)
