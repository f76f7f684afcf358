"""Tables, curves and a page over run folders: `python experiments/report.py runs/`; `--help` lists the options."""

import sys

from fedjax_pcdd.cli.report import report_main

if __name__ == "__main__":
    sys.exit(report_main())
