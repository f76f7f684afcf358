"""One run from the command line: its arguments, and what is printed of it."""

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedjax_pcdd.cli.help import information
from fedjax_pcdd.cli.options import PRESETS, configure, guarded, scan, sentence
from fedjax_pcdd.training.config import RunConfig, run_folder


def main(argv: Sequence[str] | None = None, presets: Path = PRESETS) -> int:
    """Run what the arguments say.

    Args:
      argv: arguments without the program's name; None for those of the process.
      presets: folder of the presets.

    Returns:
      Exit code: 0, 2 for a mistake of the user (one sentence on stderr), 130 for an interrupt.
    """
    argv = sys.argv[1:] if argv is None else argv
    return guarded(lambda: _main(argv, presets))


def _main(argv: Sequence[str], presets: Path) -> int:
    given = scan(argv)
    if shown := information(given):
        print(shown)
        return 0
    config, method = configure(given, presets)
    if config.resume is None:
        config = dataclasses.replace(config, run_dir=run_folder(config))
    try:
        _train(config, method, origin(given, argv))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"continue with `resume={config.run_dir}`") from None
    return 0


def _train(config: RunConfig, method: Any, origin: Mapping[str, Any]) -> None:
    from fedjax_pcdd.api import runs  # JAX programs are not needed for the help and for mistakes
    from fedjax_pcdd.training import hosts, progress

    with hosts.together(config, sentence) as own:
        if own.quiet:
            runs.run(own, method, origin, say=lambda _: None)
            return
        summary = runs.run(own, method, origin, last=[progress.bar()], say=_warn)
        progress.show(summary, own.run_dir or Path())


def _warn(text: str) -> None:
    print(f"warning: {sentence(text)}", file=sys.stderr)


def origin(given: Mapping[str, str], argv: Sequence[str]) -> dict[str, Any]:
    """How a run was asked for: by it a report sees the cell of a paper's table."""
    cell = {name: given.get(name) for name in ("preset", "split", "variant")}
    return {**cell, "command": shlex.join(["python", "experiments/run.py", *argv])}
