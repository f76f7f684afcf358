"""A file that says who writes to a folder: taken atomically, kept alive by a heartbeat, taken over from who died.

    with Lock.take(folder / "lock"):          InUse, a UserError, where another process has it
        ...

The file names host, process and a number that its owner raises every few seconds. On one machine the owner is dead when
its process is gone. Of other machines, whose clocks may differ, only the number tells: it stands still for `PATIENCE`
seconds of one's own clock. An owner that was paused for longer learns from `check` that another one has taken over.
Threads of one process exclude each other like processes.
"""

import fcntl
import json
import os
import secrets
import socket
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedjax_pcdd.errors import UserError, failed_write

BEAT = 5.0  # seconds between two signs of life
PATIENCE = 30.0  # seconds without any, after which the owner on another machine is dead
_SEEN: dict[str, tuple[bytes, float]] = {}  # of others: what their files hold, and since when
LENGTH = 512  # bytes of the file, always as many: a sign of life changes some of them and needs no space


class InUse(UserError):
    """Another process, or another run of this one, writes there."""


class Lock:
    """A lock that is held; `take` it."""

    def __init__(self, path: Path):
        self.path, self._beats = path, 0
        host = socket.gethostname().encode("ascii", "replace").decode()[:100]
        self._own = {"host": host, "process": os.getpid(), "machine": _machine(), "started": _started(os.getpid())}
        self._own["token"] = secrets.token_hex(8)
        self._over = threading.Event()

    @classmethod
    def take(cls, path: Path, wait: float = PATIENCE + BEAT) -> "Lock":
        """The lock of this name.

        Args:
          path: of the file, in an existing folder.
          wait: seconds that an owner on another machine may be watched. With 0 only what earlier calls of this process
            have seen counts, so that one who asks for many locks in turn waits for none.

        Raises:
          InUse: its owner lives, or is not known to be dead.
          UserError: the file cannot be written.
        """
        lock, key, until = cls(path), str(path.absolute()), time.monotonic() + wait
        while not lock._create():
            if (content := _read(path)) is None:
                continue  # it was given up meanwhile
            dead = _is_dead(content)
            if dead or _stands_still(key, content):
                _remove(path, content, lock._own["token"])
            elif dead is False or time.monotonic() >= until:
                raise InUse(f"{path.parent} is in use by {_owner(content)}: wait for it to end, or end it.")
            else:
                time.sleep(min(BEAT / 5, max(0.0, until - time.monotonic())))
        _SEEN.pop(key, None)
        threading.Thread(target=lock._beat, name="lock", daemon=True).start()
        return lock

    def check(self) -> None:
        """UserError where another process has taken over meanwhile: this one was paused, or its disk did not answer."""
        content = _read(self.path)
        if content is None or _fields(content).get("token") != self._own["token"]:
            by = "another process" if content is None else _owner(content)
            raise UserError(
                f"{self.path.parent} was taken over by {by} while this one did not answer: it goes on there."
            )

    def release(self) -> None:
        """Give it up."""
        self._over.set()
        content = _read(self.path)
        if content is not None and _fields(content).get("token") == self._own["token"]:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_) -> None:
        self.release()

    def _create(self) -> bool:
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except FileExistsError:
            return False
        except OSError as error:
            raise failed_write(error, self.path.parent) from error
        try:
            os.write(file, self._content())
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise failed_write(error, self.path.parent) from error
        finally:
            os.close(file)
        return True

    def _content(self) -> bytes:
        return json.dumps(self._own | {"beat": self._beats}).ljust(LENGTH - 1).encode()[: LENGTH - 1] + b"\n"

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            self._beats += 1
            try:
                # Opened and closed each time, or other machines do not see it; who took over has made another file.
                with open(self.path, "r+b", buffering=0) as file:
                    if _fields(file.read(LENGTH)).get("token") == self._own["token"]:
                        os.pwrite(file.fileno(), self._content(), 0)
            except OSError:
                pass  # `check` says what has become of it


def owner(path: Path) -> str | None:
    """Who has the lock of this name, in words; None where nobody does who is known to live or not known to be dead."""
    content = _read(path)
    return None if content is None or _is_dead(content) else _owner(content)


def _stands_still(path: str, content: bytes) -> bool:
    """Whether it has held the same for long; of an empty one, which was created but not written, too."""
    now = time.monotonic()
    known, since = _SEEN.get(path, (None, now))
    if known != content:
        _SEEN[path] = content, now
        return False
    return now - since > PATIENCE


def _read(path: Path) -> bytes | None:
    """What a lock holds, None where there is none any more."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):  # a pipe would be waited for
            raise UserError(f"{path} is a link or no file, which no run makes: remove it.")
        return path.read_bytes()[:LENGTH]
    except FileNotFoundError:
        return None
    except OSError as error:
        raise failed_write(error, path.parent) from error


def _remove(path: Path, content: bytes, token: str) -> None:
    """Remove the lock of a dead owner, but not one that another process has taken since."""
    aside = path.with_name(f"{path.name}.{token}")
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can; without, two may try at once, and the renaming decides
            fcntl.flock(folder, fcntl.LOCK_EX)
        if _read(path) == content:
            os.rename(path, aside)
            if _read(aside) != content:
                os.link(aside, path)
    except OSError:
        pass  # another one was faster: the next look tells
    finally:
        aside.unlink(missing_ok=True)
        os.close(folder)


def _fields(content: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(content)
    except ValueError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _owner(content: bytes) -> str:
    fields = _fields(content)
    if not {"process", "host"} <= fields.keys():
        return "another process"
    if (fields["process"], fields.get("machine")) == (os.getpid(), _machine()):
        return "another run of this process"
    return f"process {fields['process']} on {fields['host']}"


def _is_dead(content: bytes) -> bool | None:
    """Whether the owner is gone, where it was a process of this machine; None of another one, of which nobody knows."""
    fields = _fields(content)
    if fields.get("machine") != _machine():
        return None
    started = _started(fields.get("process"))
    return started is None or (started != "" and started != fields.get("started"))


def _machine() -> str:
    """Where a number of a process means the same: this start of this machine, and the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(process: Any) -> str | None:
    """When a process of this machine began, as its kernel counts ("" where it does not say); None where it is gone."""
    try:
        os.kill(int(process), 0)
    except PermissionError:
        pass  # of another user, and alive
    except (OSError, TypeError, ValueError, OverflowError):
        return None
    try:
        state = Path(f"/proc/{int(process)}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return None if state[0] in "ZX" else state[19]
