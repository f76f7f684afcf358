"""The papers' tables, cell by cell: `python experiments/reproduce.py --budget-minutes=60`; `--help` has the options."""

import sys
from pathlib import Path

from reproduction.command import reproduce_main

if __name__ == "__main__":
    sys.exit(reproduce_main(Path(__file__).parent))
