"""Command lines that are one dataclass: a mistake is one sentence and exit code 2."""

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tyro

from fedjax_pcdd.errors import UserError, nearest

T = TypeVar("T")


def parse(form: type[T], argv: Sequence[str] | None, program: str) -> T:
    """The options.

    Args:
      form: a dataclass; its fields are the options, a field `runs` the words beside them.
      argv: arguments without the program's name; None for those of the process.
      program: its name.

    Raises:
      UserError: a mistake of the user.
      SystemExit: after the help, with code 0.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    names: Any = [field.name for field in dataclasses.fields(form) if field.name != "runs"]  # pyright: ignore
    known = [f"--{name.replace('_', '-')}" for name in names]
    for token in argv:
        flag = token.partition("=")[0]
        if flag.startswith("-") and flag not in [*known, "--help", "-h"]:
            raise UserError(f"there is no option {flag}: {nearest(flag, [*known, '--help'])}")
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(form, prog=program, args=argv, config=(tyro.conf.FlagCreatePairsOff,))
    except SystemExit as stop:
        if stop.code:
            raise UserError(f"{program} does not understand '{' '.join(argv)}': --help shows its options.") from None
        raise


def exit_code(work: Callable[[], Any]) -> int:
    """0 when the work is done or the help was shown, 2 after a mistake of the user, 130 after an interrupt."""
    try:
        work()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command continues.", file=sys.stderr)
        return 130
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0
