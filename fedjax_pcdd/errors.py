"""The one exception for what a user can put right: its text is one sentence that says what to do."""

import difflib
import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Say = Callable[[str], None]  # tells the user a sentence that is no error

_FIELD = re.compile(r"`([a-z][a-z0-9_]*)(=[^`]*)?`")


class UserError(ValueError):
    """A mistake in the input.

    Options are named as fields in backticks, `` `beta` `` or `` `bn=local` ``. As text an error spells them as Python's
    keyword arguments; the command line spells its `sentence` with options, prints that and exits with code 2.
    """

    def __init__(self, sentence: str, field: str | None = None):
        """Args: field: the option that the sentence is about, which it then begins with."""
        self.sentence = f"`{field}` {sentence}" if field else sentence
        super().__init__(spelled(self.sentence))


def spelled(sentence: str, spell: Callable[[str], str] = str, quote: Callable[[str], str] = str) -> str:
    """A sentence with its fields as `spell` writes them and, with their values, `quote`; by default as they are.

    >>> spelled("`batch_size` must be at least 1 with `bn=local`.")
    'batch_size must be at least 1 with bn=local.'
    """
    return _FIELD.sub(lambda field: quote(spell(field[1]) + (field[2] or "")), sentence)


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


def as_path(value: Any, field: str) -> Path:
    """A path as a user gives it, ~ being the home folder; UserError for what is none.

    >>> as_path("runs/a", "folder").name
    'a'
    """
    if not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value):
        raise UserError(f"takes a path, not {shortened(value)}.", field=field)
    return Path(os.path.expanduser(value))


def is_there(path: Path, kind: Callable[[Path], bool] = Path.is_file) -> bool:
    """Whether a path is a file, or what `kind` asks for; UserError where its folder may not be entered.

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
    """UserError where what is there is no file, as a pipe to which nobody writes; what is missing passes."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(f"{path} is no file, but a folder, a pipe or a device: name a file.")


def unreadable(error: OSError, path: Any) -> UserError:
    """What to raise for what is there and cannot be read, which nobody should remove for that."""
    return UserError(f"{path} cannot be read ({error.strerror or error}): put that right, or name another one.")


def shortened(value: Any) -> str:
    """What a sentence shows of a value: a number or a word itself, of anything else its type.

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
    """An argument that takes True or False; UserError for anything else."""
    if not isinstance(value, bool):
        raise UserError(f"takes True or False, not {shortened(value)}.", field=field)
    return value


def in_one_line(error: BaseException) -> str:
    """The part of a sentence that quotes an exception of another library.

    >>> in_one_line(ValueError("bad magic number.\\n  at byte 3"))
    'bad magic number'
    >>> in_one_line(EOFError())
    'EOFError'
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")


RUN_DIR = "another `run_dir`"


def failed_write(error: Exception, path: Path, instead: str = RUN_DIR) -> Exception:
    """What to raise where writing to a path failed: a `UserError` if the disk is at fault, else the error itself.

    Args:
      instead: what could be chosen where the path cannot be written at all.
    """
    # TensorStore reports a full disk as a ValueError that quotes the operating system.
    number, again = getattr(error, "errno", None), "resume the run" if instead == RUN_DIR else "try again"
    if number in (errno.ENOSPC, errno.EDQUOT) or re.search("No space left|quota exceeded", str(error)):
        return UserError(f"no space left on the disk of {path}: free some and {again}.")
    if number == errno.EFBIG or "File too large" in str(error):
        return UserError(f"{path} became larger than a file may be here: raise that limit and {again}.")
    if number == errno.ELOOP:
        return UserError(f"{path} is a symbolic link, which nothing is written through: remove it.")
    if isinstance(error, OSError):
        return UserError(f"cannot write to {path} ({error.strerror or error}): choose {instead}.")
    return error


@contextmanager
def writing(path: Path, instead: str = RUN_DIR) -> Iterator[None]:
    """What is written within to a path, or a sentence that says why it cannot be; arguments as of `failed_write`."""
    try:
        yield
    except OSError as error:
        raise failed_write(error, path, instead) from error


@contextmanager
def at_once(path: Path, instead: str = RUN_DIR) -> Iterator[Path]:
    """Another path to write to, with the same suffix, so that a file is there whole or as it was before.

    Links are not followed. Errors are those of `writing`, but for what is said of other files.
    """
    half = path.parent / f".{os.getpid()}.{path.name}"
    try:
        half.unlink(missing_ok=True)
        yield half
        if half.exists():  # of what has no numbers no picture is drawn
            half.replace(path)
    except (OSError, SystemError) as error:
        if getattr(error, "filename", None) not in (None, str(half)):
            raise
        raise failed_write(error, path, instead) from error
    finally:
        with suppress(OSError):
            half.unlink(missing_ok=True)
