"""Paired comparison of runs: `python experiments/compare.py runs/fedavg-* runs/fedgela-*`, see `--help`."""

import sys

from fedjax_pcdd.cli.report import compare_main

if __name__ == "__main__":
    sys.exit(compare_main())
