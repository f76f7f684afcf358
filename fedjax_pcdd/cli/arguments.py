"""Command lines that are one dataclass of `run_option` fields: read, refused and explained as the options of a run."""

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fedjax_pcdd.cli.help import entries
from fedjax_pcdd.cli.options import guarded, no_option, scan
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training.fields import convert, options_of


def command(form: Any, work: Callable[[Any], Any], argv: Sequence[str] | None, program: str) -> int:
    """Do what arguments ask for.

    Args:
      form: a dataclass; its fields are the options, a field `runs` the words beside them.
      work: with the options.
      argv: arguments without the program's name; None for those of the process.
      program: its name.

    Returns:
      Exit code: 0 when the work is done or the help was shown, 2 for a mistake of the user (one sentence on stderr),
      130 for an interrupt.
    """

    def whole() -> None:
        options = _parsed(form, list(sys.argv[1:] if argv is None else argv), program)
        try:
            if options is not None:
                work(options)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command continues.") from None

    return guarded(whole)


def _parsed(form: Any, argv: list[str], program: str) -> Any:
    """The options; None after the help."""
    options = dict(options_of(form))
    runs = options.pop("runs", None)
    words: list[str] | None = None if runs is None else []
    given = scan(argv, {name for name, option in options.items() if option.kind is bool} | {"help"}, words)
    if "help" in given:
        usage = f"usage: {program} [--NAME=VALUE ...]" + (f" RUN...\n\nRUN: {runs.help}" if runs else "")
        print("\n\n".join([usage, inspect.cleandoc(form.__doc__), entries(options.values())]))
        return None
    for name in given:
        if name not in options:
            raise UserError(no_option(name, [*options, "help"]))
    values: dict[str, Any] = {name: convert(options[name], text) for name, text in given.items()}
    return form(**values) if words is None else form(runs=tuple(map(Path, words)), **values)
