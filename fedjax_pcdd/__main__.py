"""`python -m fedjax_pcdd COMMAND ...` is `fedjax-pcdd COMMAND ...`."""

import sys

from fedjax_pcdd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
