"""What commands say: options as they are written, the names of commands, and how one ends."""

import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from fedjax_pcdd.errors import UserError, spelled


def flag(name: str) -> str:
    """A field as an option, as `--batch-size`."""
    return "--" + name.replace("_", "-")


def sentence(text: str) -> str:
    """A sentence with its fields as options.

    >>> sentence("`batch_size` must be at least 1 with `bn=local`.")
    '--batch-size must be at least 1 with --bn=local.'
    >>> sentence("continue with `resume=runs/a run`")
    "continue with '--resume=runs/a run'"
    """
    return spelled(text, flag, shlex.quote)


def invocation(name: str) -> str:
    """How a command is written: as a script of a checkout, where one was called, else as the installed program."""
    script = Path(sys.argv[0])
    in_checkout = script.suffix == ".py" and script.parent.name == "experiments"
    return f"python experiments/{name}.py" if in_checkout else f"fedjax-pcdd {name}"


@contextmanager
def _warned_in_sentences() -> Iterator[None]:
    """What the package warns of is a line, as errors are; warnings of others stay as Python writes them."""
    package, written = str(Path(__file__).parents[1]), warnings.formatwarning

    def line(message, category, filename, lineno, text=None):
        own = filename.startswith(package)
        return f"{sentence(str(message))}\n" if own else written(message, category, filename, lineno, text)

    warnings.formatwarning = line
    try:
        yield
    finally:
        warnings.formatwarning = written


def guarded(work: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None) -> int:
    """The exit code of a command: its own; 2 for a mistake of the user and 130 for an interrupt, said in a sentence.

    Args:
      work: with the arguments.
      argv: arguments without the program's name; None for those of the process.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # names of folders need not be UTF-8
    try:
        with _warned_in_sentences():
            code = work(sys.argv[1:] if argv is None else argv) or 0
        sys.stdout.flush()
        return code
    except UserError as error:
        print(" ".join(sentence(error.sentence).splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        advice = str(stop) or "the same command continues."
        print(sentence(f"stopped; {advice}"), file=sys.stderr)
        return getattr(stop, "code", 130)
    except BrokenPipeError:  # who read it has seen enough, as `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # of a file that nobody has looked at before
        if error.filename is None:
            raise
        print(f"{os.fsdecode(error.filename)} cannot be used ({error.strerror}): put that right.", file=sys.stderr)
        return 2
