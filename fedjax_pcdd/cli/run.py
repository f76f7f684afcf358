"""One run from the command line: its arguments, and what is printed of it."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedjax_pcdd.cli.messages import guarded, invocation, sentence
from fedjax_pcdd.training.config import RUN, RunConfig, check_written, run_folder

GRACE = 30.0  # seconds that a run has after SIGTERM or SIGINT to end its round and save it


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments say.

    Args:
      argv: arguments without the program's name; None for those of the process.

    Returns:
      Exit code: 0, 2 for a mistake of the user (one sentence on stderr), 130 for an interrupt.
    """
    return guarded(_main, argv)


def _main(argv: Sequence[str]) -> None:
    check_written(_plainly_written(argv))  # before methods and JAX are loaded, which takes seconds
    from fedjax_pcdd.cli.help import information
    from fedjax_pcdd.cli.options import configure, scan

    given = scan(argv)
    if shown := information(given):
        print(shown)
        return
    config, method = configure(given)
    if config.resume is None:
        config = replace(config, run_dir=run_folder(config))
    try:
        _train(config, method, origin(given, argv))
    except KeyboardInterrupt as stop:
        stop.args = (f"{f'{stop}: ' if str(stop) else ''}continue with `resume={config.run_dir}`",)
        raise


def _plainly_written(argv: Sequence[str]) -> dict[str, str]:
    """Options of every run among arguments like --name=value; none where the help is asked for."""
    words = [word[2:].partition("=") for word in argv if word.startswith("--") and "=" in word]
    given = {name.replace("-", "_"): text for name, _, text in words}
    return {} if {"-h", "--help"} & {*argv} else {name: text for name, text in given.items() if name in RUN}


def _train(config: RunConfig, method: Any, origin: Mapping[str, Any]) -> None:
    from fedjax_pcdd.api import runs  # JAX programs are not needed for the help and for mistakes
    from fedjax_pcdd.training import hosts, interrupts, progress

    def killed() -> str:
        return sentence(f"stopped in the midst of a round: continue with `resume={config.run_dir}`")

    with interrupts.watch(GRACE, killed), hosts.together(config, sentence) as own:
        if own.quiet:
            runs.run(own, method, origin, say=lambda _: None)
            return
        summary = runs.run(own, method, origin, last=[progress.RunBar()], say=_warn)
        progress.show(summary, own.run_dir or Path())


def _warn(text: str) -> None:
    print(f"warning: {sentence(text)}", file=sys.stderr)


def origin(given: Mapping[str, str], argv: Sequence[str]) -> dict[str, Any]:
    """How a run was asked for: by it a report sees the cell of a paper's table."""
    cell = {name: given.get(name) for name in ("preset", "split", "variant")}
    return {**cell, "command": f"{invocation('run')} {shlex.join(argv)}".rstrip()}
