"""The one exception for what a user can put right: its text is one sentence that says what to do."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in the input. The command line prints the sentence and exits with code 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The part of a sentence that names the closest valid choice.

    >>> nearest("fedgella", ["fedavg", "fedgela"])
    "did you mean 'fedgela'?"
    >>> nearest("zzz", ["fedavg", "fedgela"])
    'choose one of fedavg, fedgela.'
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{close[0]}'?" if close else f"choose one of {', '.join(known)}."


def in_one_line(error: Exception) -> str:
    """The part of a sentence that quotes an exception of another library.

    >>> in_one_line(ValueError("bad magic number.\\n  at byte 3"))
    'bad magic number'
    >>> in_one_line(EOFError())
    'EOFError'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
