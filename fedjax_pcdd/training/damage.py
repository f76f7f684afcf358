"""How damage to a checkpoint is noticed before it is read, and named after."""

import json
import re
import textwrap
from pathlib import Path

_FILES = "files.json"


def list_files(checkpoint: Path) -> None:
    """Write down the files of a finished checkpoint and their sizes."""
    sizes = {str(f.relative_to(checkpoint)): f.stat().st_size for f in checkpoint.rglob("*") if f.is_file()}
    (checkpoint / _FILES).write_text(json.dumps(sizes))


def check_files(checkpoint: Path) -> None:
    """ValueError where a file is missing or has another size.

    TensorStore would notice too, but leaves reads behind that print tracebacks when they fail one by one. A process
    killed before the list was written leaves a checkpoint without one, which is then only checked by its contents.
    """
    try:
        sizes = json.loads((checkpoint / _FILES).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return
    for name, size in sizes.items():
        if not (checkpoint / name).is_file() or (checkpoint / name).stat().st_size != size:
            raise ValueError(f"the file {name} is missing or cut short")


def reason(error: Exception) -> str:
    """What an exception says of a checkpoint that cannot be read, for the user."""
    if isinstance(error, FileNotFoundError | KeyError):
        return "a file is missing"
    if isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error)):
        return "an array file is missing or cut short"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[0], 100, placeholder="...")
