"""Figures and tables beside accuracy: `python experiments/analyse.py angles RUN...`; `--help` lists the analyses."""

import sys

from fedjax_pcdd.cli.analyse import analyse_main

if __name__ == "__main__":
    sys.exit(analyse_main())
