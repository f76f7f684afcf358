"""A search of options: `python experiments/search.py --lr=0.01:0.3:log`; `--help` says how it is written."""

import sys

from fedjax_pcdd.cli.search import search_main

if __name__ == "__main__":
    sys.exit(search_main())
