"""Command lines that are one dataclass: a mistake is one sentence and exit code 2."""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from fedjax_pcdd.cli.options import guarded
from fedjax_pcdd.errors import UserError, nearest


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
        options = _parse(form, list(sys.argv[1:] if argv is None else argv), program)
        try:
            if options is not None:
                work(options)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("the same command continues.") from None

    return guarded(whole)


def _parse(form: Any, argv: list[str], program: str) -> Any:
    """The options; None after the help."""
    names = [field.name.replace("_", "-") for field in dataclasses.fields(form) if field.name != "runs"]
    known = [*(f"--{name}" for name in names), "--help"]
    for token in argv:
        flag = token.partition("=")[0]
        if flag.startswith("-") and flag not in [*known, "-h"]:
            raise UserError(f"there is no option {flag}: {nearest(flag, known)}")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(form, prog=program, args=argv, config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if stop.code:
            raise UserError(f"{program} does not understand '{' '.join(argv)}': --help shows its options.") from None
    return None
