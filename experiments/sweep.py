"""A grid of runs: `python experiments/sweep.py --method=fedavg,fedgela --seed=0:3`; `--help` says how it is written."""

import sys

from fedjax_pcdd.cli.sweep import sweep_main

if __name__ == "__main__":
    sys.exit(sweep_main())
