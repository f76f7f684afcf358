"""Messages of the commands: options as written, the names of commands, and how a command ends."""

import codecs
import errno
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from fedjax_pcdd.errors import UserError, printable, spelled

_WRITTEN = "surrogateescape or replace"


def _encoded(error: UnicodeError) -> tuple[str | bytes, int]:
    """How text is printed that the output's encoding lacks: names of folders as their bytes, anything else as "?"."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.lookup_error("replace")(error)


codecs.register_error(_WRITTEN, _encoded)


def flag(name: str) -> str:
    """The option of a field, such as `--batch-size`."""
    return "--" + name.replace("_", "-")


def sentence(text: str) -> str:
    """A sentence with its fields written as options.

    >>> sentence("`batch_size` must be at least 1 with `bn=local`.")
    '--batch-size must be at least 1 with --bn=local.'
    >>> sentence("continue with `resume=runs/a run`")
    "continue with '--resume=runs/a run'"
    """
    return printable(spelled(text, flag, shlex.quote))


def warn(text: str) -> None:
    """Print a warning on stderr, with its fields written as options."""
    print(f"warning: {sentence(text)}", file=sys.stderr)


def invocation(name: str) -> str:
    """How a command is called: as a script of a checkout, if one was run, else as the installed program."""
    script = Path(sys.argv[0])
    in_checkout = script.suffix == ".py" and script.parent.name == "experiments"
    return f"python experiments/{name}.py" if in_checkout else f"fedjax-pcdd {name}"


@contextmanager
def _warned_in_sentences() -> Iterator[None]:
    """Print warnings of this package on one line, as errors are; other warnings stay as Python writes them."""
    package, original = str(Path(__file__).parents[1]), warnings.formatwarning

    def line(message, category, filename, lineno, text=None):
        from_package = filename.startswith(package)
        return f"{sentence(str(message))}\n" if from_package else original(message, category, filename, lineno, text)

    warnings.formatwarning = line
    try:
        yield
    finally:
        warnings.formatwarning = original


def _print_no_more() -> None:
    """Throw away what is still to be written, which Python would try again at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _can_print() -> bool:
    """Whether what was printed could be written; if not, it is thrown away."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
        return True
    except OSError:
        _print_no_more()
        return False


@contextmanager
def starting() -> Iterator[None]:
    """A context in which Ctrl-C ends the process at once, with a sentence: nothing has been written yet.

    The exception that Python raises otherwise is lost, or aborts the process, where it comes while JAX is being loaded.
    """
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, _: Any) -> None:
    os.write(2, b"stopped; nothing was written.\n")
    os._exit(128 + number)


def guarded(work: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None) -> int:
    """Run a command and return its exit code: 2 for a mistake of the user, 130 for an interrupt, each with a sentence.

    Args:
      work: called with the arguments.
      argv: arguments without the program's name; None for those of the process.
    """
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors=_WRITTEN)
    try:
        with _warned_in_sentences():
            code = work(sys.argv[1:] if argv is None else argv) or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except UserError as error:
        print(" ".join(sentence(error.sentence).splitlines()), file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        advice = str(stop) or "the same command continues."
        print(sentence(f"stopped; {advice}"), file=sys.stderr)
        return getattr(stop, "code", 130)
    except BrokenPipeError:  # the reader has seen enough, such as `head`
        _print_no_more()
        return 141
    except OSError as error:  # about a file that nothing has checked before
        if error.filename is not None:
            problem = f"{os.fsdecode(error.filename)} cannot be used"
        elif error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            problem = f"{'a file' if _can_print() else 'what is printed'} cannot be written"
        else:
            raise
        print(f"{problem} ({error.strerror}): put that right.", file=sys.stderr)
        return 2
