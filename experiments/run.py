"""One run: `python experiments/run.py --method=fedgela --dataset=digits`; `--help` lists the options."""

import sys

from fedjax_pcdd.cli.run import main

if __name__ == "__main__":
    sys.exit(main())
