"""The installed program: `fedjax-pcdd COMMAND ...`, and `python -m fedjax_pcdd COMMAND ...`."""

import importlib
import sys
from collections.abc import Sequence

from fedjax_pcdd import __version__
from fedjax_pcdd.cli.messages import guarded
from fedjax_pcdd.errors import nearest

# Command -> its module, its function, and what it does.
COMMANDS = {
    "run": ("run", "main", "train one method on one partition, or continue a run"),
    "sweep": ("sweep", "sweep_main", "a grid of runs: methods, settings, seeds"),
    "search": ("search", "search_main", "options of one method, suggested by Optuna"),
    "report": ("report", "report_main", "tables, curves and one page over the folders of runs"),
    "compare": ("report", "compare_main", "paired differences of runs with the same seeds and partitions"),
    "analyse": ("analyse", "analyse_main", "figures and tables of the papers that are not accuracies"),
    "leaderboard": ("leaderboard", "leaderboard_main", "all methods, or one's own, on equal data with equal trials"),
    "prepare": ("prepare", "prepare_main", "download a data set and prepare it, once"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first word names, with the other words; return its exit code, 2 if there is none."""
    word, *arguments = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if word in COMMANDS:
        module, function, _ = COMMANDS[word]
        return getattr(importlib.import_module(f"fedjax_pcdd.cli.{module}"), function)(arguments)
    if word in ("--version", "-V"):
        return guarded(lambda _: print(__version__), arguments)
    lines = [f"  {name:11} {text}" for name, (_, _, text) in COMMANDS.items()]
    usage = "\n".join(["usage: fedjax-pcdd COMMAND [--NAME=VALUE ...]", "", *lines, "", "COMMAND --help says more."])
    if word in ("--help", "-h"):
        return guarded(lambda _: print(usage), arguments)
    print(f"there is no command '{word}': {nearest(word, COMMANDS)}", file=sys.stderr)
    return 2
