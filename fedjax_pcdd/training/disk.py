"""Room on the disk, and what its errors mean to a user."""

import errno
import shutil
from pathlib import Path

from fedjax_pcdd.errors import UserError


def check_space(folder: Path, required: int) -> None:
    """Refuse a run whose files would not fit.

    Args:
      folder: where they will live; it need not exist yet.
      required: bytes.

    Raises:
      UserError: the disk has less room.
    """
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free < required:
        raise UserError(
            f"{folder} needs {required / 1e6:.2f} MB for checkpoints, its disk has {free / 1e6:.2f} MB left: "
            "free some space, choose another --run-dir or keep fewer checkpoints."
        )


def for_user(error: Exception, place: Path) -> Exception:
    """What to raise for a failed write: a `UserError` where the disk is at fault, else the error itself."""
    text = str(error)
    # TensorStore reports a full disk as a ValueError that quotes the operating system.
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text:
        return UserError(f"no space left on the disk of {place}: free some and resume the run.")
    if isinstance(error, OSError):
        return UserError(f"cannot write to {place} ({error.strerror or text}): choose another --run-dir.")
    return error
