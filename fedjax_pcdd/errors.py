"""The exception for mistakes that a user can correct: its text is one sentence that says what to do."""

import difflib
import errno
import importlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Say = Callable[[str], None]  # tells the user a sentence that is not an error

_FIELD = re.compile(r"`([a-z][a-z0-9_]*)(=[^`]*)?`")


class UserError(ValueError):
    """A mistake in the input.

    Options are written as fields in backticks, `` `beta` `` or `` `bn=local` ``. `str(error)` spells them as Python's
    keyword arguments; the command line spells `sentence` with its own options, prints it and exits with code 2.
    """

    def __init__(self, sentence: str, field: str | None = None):
        """Args: field: the option that the sentence is about; it is put at the beginning."""
        self.sentence = f"`{field}` {sentence}" if field else sentence
        super().__init__(spelled(self.sentence))


def spelled(sentence: str, spell: Callable[[str], str] = str, quote: Callable[[str], str] = str) -> str:
    """A sentence with each field written by `spell`, then, with its value, by `quote`; by default unchanged.

    >>> spelled("`batch_size` must be at least 1 with `bn=local`.")
    'batch_size must be at least 1 with bn=local.'
    """
    return _FIELD.sub(lambda field: quote(spell(field[1]) + (field[2] or "")), sentence)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a sentence that names the closest valid choice, or all choices.

    >>> nearest("fedgella", ["fedavg", "fedgela"])
    "did you mean 'fedgela'?"
    >>> nearest("zzz", ["fedavg", "fedgela"])
    'choose one of fedavg, fedgela.'
    """
    known = list(known)
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean '{matches[0]}'?" if matches else f"choose one of {', '.join(known)}."


def as_path(value: Any, field: str) -> Path:
    """A path as the user gives it, with ~ expanded; UserError for anything that is not a path.

    >>> as_path("runs/a", "folder").name
    'a'
    """
    if not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value):
        raise UserError(f"takes a path, not {shortened(value)}.", field=field)
    return expanded(value)


def expanded(path: str | os.PathLike) -> Path:
    """The path with ~ expanded, where that names a home folder."""
    return Path(os.path.expanduser(path))


def is_there(path: Path, kind: Callable[[Path], bool] = Path.is_file) -> bool:
    """Whether a path is a file, or what `kind` tests for; UserError if its folder may not be entered.

    >>> is_there(Path("x" * 300)), is_there(Path("/"), Path.is_dir)
    (False, True)
    """
    try:
        return kind(path)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return False
        raise unreadable(error, path) from error


def check_file(path: str | os.PathLike) -> None:
    """Raise a UserError if the path exists but is not a file (a pipe, for example, would block); missing paths pass."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path} is not a file but a folder, a pipe or a device: name a file.")


def unreadable(error: OSError, path: Any) -> UserError:
    """The error for a path that exists but cannot be read; it does not advise to remove it."""
    return UserError(f"{path} cannot be read ({error.strerror or error}): put that right, or name another one.")


def printable(text: str) -> str:
    """Text in which control characters, which a terminal would obey, are written out; lines and tabs stay.

    >>> printable("a\\x1b[31m")
    'a\\\\x1b[31m'
    """
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def shortened(value: Any) -> str:
    """How messages show a value: numbers and words as they are, anything else by its type.

    >>> shortened(3), shortened("abc"), shortened([1, 2]), shortened(dict)
    ('3', "'abc'", 'a list', 'the class dict')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 60 else text[:57] + "..."
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIOU' or kind == 'ndarray' else 'a'} {kind}"


def yes_or_no(value: Any, field: str) -> bool:
    """Return an argument that must be True or False; UserError for anything else."""
    if not isinstance(value, bool):
        raise UserError(f"takes True or False, not {shortened(value)}.", field=field)
    return value


def in_one_line(error: BaseException) -> str:
    """An exception of another library as part of a sentence: its first line, or its type.

    >>> in_one_line(ValueError("bad magic number.\\n  at byte 3"))
    'bad magic number'
    >>> in_one_line(EOFError())
    'EOFError'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


def imported(module: str, extra: str) -> Any:
    """A module of a package of one of the extras; UserError if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UserError(f"{package} is missing: pip install 'fedjax-pcdd[{extra}]'.") from error


RUN_DIR = "another `run_dir`"


def failed_write(error: Exception, path: Path, instead: str = RUN_DIR) -> Exception:
    """The error to raise when writing to a path failed: a `UserError` if the disk is at fault, else the error itself.

    Args:
      instead: what the user could choose if the path cannot be written at all.
    """
    # TensorStore reports a full disk as a ValueError that quotes the operating system.
    number, retry = getattr(error, "errno", None), "resume the run" if instead == RUN_DIR else "try again"
    if number in (errno.ENOSPC, errno.EDQUOT) or re.search("No space left|quota exceeded", str(error)):
        return UserError(f"no space left on the disk of {path}: free some and {retry}.")
    if number == errno.EFBIG or "File too large" in str(error):
        return UserError(f"{path} became larger than a file may be here: raise that limit and {retry}.")
    if re.fullmatch(r"\d+ requested and \d+ written", str(error)):  # NumPy's, without the system's number
        full = "is full, or a limit on the size of files was reached: free some space or raise the limit"
        return UserError(f"the disk of {path} {full}, and {retry}.")
    if number == errno.ELOOP:
        return UserError(f"{path} is a symbolic link, which nothing is written through: remove it.")
    if isinstance(error, OSError):
        return UserError(f"cannot write to {path} ({error.strerror or error}): choose {instead}.")
    return error


@contextmanager
def writing(path: Path, instead: str = RUN_DIR) -> Iterator[None]:
    """A context for writing to a path, which turns an OSError into a sentence; arguments as for `failed_write`."""
    try:
        yield
    except OSError as error:
        raise failed_write(error, path, instead) from error


@contextmanager
def at_once(path: Path, instead: str = RUN_DIR, *, parents: bool = False) -> Iterator[Path]:
    """A context with a temporary path to write to, which replaces `path` at the end: whole or not at all.

    The temporary path has the same suffix; with `parents` its folder may be new. Links are not followed. Errors are
    those of `writing`, except that errors about other files are raised as they are.
    """
    if parents:
        with writing(path, instead):
            path.parent.mkdir(parents=True, exist_ok=True)
    # A number of its own: on a shared file system processes of two machines may have the same number.
    temporary = path.parent / f".{secrets.randbelow(10**8)}.{path.name}"
    try:
        temporary.unlink(missing_ok=True)
        yield temporary
        if temporary.exists():  # else nothing was written, such as a picture without numbers
            temporary.replace(path)
    except (OSError, SystemError) as error:
        if getattr(error, "filename", None) not in (None, str(temporary)):
            raise
        raise failed_write(error, path, instead) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
