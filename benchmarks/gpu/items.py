"""Items, the steps of a GPU day, and the file of their results, one JSON line each."""

import datetime
import json
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FINAL = ("ok", "failed")  # an item that was left out or interrupted is tried again


@dataclass(frozen=True)
class Item:
    """One step of a GPU day.

    Attributes:
      name: unique, as "model resnet18".
      work: the function that does it, at the top of a module; it returns a record.
      options: its keyword arguments.
      seconds: how long it is expected to take.
      together: whether others may use the device at the same time; never where seconds are measured.
      interruptible: whether it can stop early and go on in the next call; it then gets the seconds left as `seconds`.
      environment: variables of its process, which it then shares with no other item.
    """

    name: str
    work: Callable[..., dict[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 30.0
    together: bool = False
    interruptible: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


class Results:
    """The results in a folder, kept as lines that are appended whole."""

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "results.jsonl"
        self.lines = read(self.path)

    def add(self, line: Mapping[str, Any]) -> None:
        """Append a line; an unfinished line that a killed process left is cut off first."""
        line = {**line, "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        with open(self.path, "a+b") as file:
            file.truncate(_whole(self.path.read_bytes()))
            file.write((json.dumps(line) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self.lines.append(line)

    def unfinished(self, items: Sequence[Item], *, again: bool = False) -> list[Item]:
        """Items without a result, in order; with `again` those that failed, too."""
        last_lines = latest(self.lines)
        final = FINAL[:1] if again else FINAL
        return [item for item in items if last_lines.get(item.name, {}).get("status") not in final]

    def pace(self, items: Sequence[Item]) -> float:
        """Median ratio of the seconds taken to those expected over the finished items; 1 without any."""
        finished = {name: line for name, line in latest(self.lines).items() if line["status"] == "ok"}
        ratios = [finished[item.name]["seconds"] / item.seconds for item in items if item.name in finished]
        return statistics.median(ratios) if ratios else 1.0


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines of a file of results, [] if there is no file."""
    if not path.exists():
        return []
    text = path.read_bytes()
    return [json.loads(line) for line in text[: _whole(text)].splitlines()]


def _whole(text: bytes) -> int:
    """Bytes up to the end of the last whole line."""
    return text.rfind(b"\n") + 1


def latest(lines: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The last line of each item, by its name.

    >>> latest([{"name": "a", "status": "interrupted"}, {"name": "a", "status": "ok"}])
    {'a': {'name': 'a', 'status': 'ok'}}
    """
    return {line["name"]: line for line in lines}
