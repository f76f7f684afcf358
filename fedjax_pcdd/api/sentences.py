"""Sentences about mistakes, in the words of Python in place of the command line's."""

import contextlib
import re
from collections.abc import Iterator

from fedjax_pcdd.errors import UserError

_FLAG = re.compile(r"--([a-z][a-z-]*)")


def in_python(sentence: str) -> str:
    """A sentence with its options as keyword arguments.

    >>> in_python("--batch-size must be at least 1, not 0.")
    'batch_size must be at least 1, not 0.'
    """
    return _FLAG.sub(lambda flag: flag[1].replace("-", "_"), sentence)


@contextlib.contextmanager
def python_sentences() -> Iterator[None]:
    """Within, every `UserError` speaks of keyword arguments."""
    try:
        yield
    except UserError as error:
        raise UserError(in_python(str(error))) from None
