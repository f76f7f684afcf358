"""Download a data set and prepare it: `python experiments/prepare.py NAME --data-dir=DIR`; `--list` shows what."""

import sys

from fedjax_pcdd.cli.prepare import prepare_main

if __name__ == "__main__":
    sys.exit(prepare_main())
