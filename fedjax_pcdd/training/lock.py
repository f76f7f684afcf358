"""A lock on writing to a folder: a file, taken atomically, kept alive by a heartbeat, taken over from a dead owner.

    with Lock.take(folder / "lock"):          raises InUse, a UserError, if another process has it
        ...

The file names the host, the process and a counter that its owner raises every few seconds. An owner on this machine is
dead when its process is gone, not when it is paused. For one on another machine, whose clock may differ, only the
counter tells: the owner is dead when the counter has stood still for `PATIENCE` seconds of the local clock, in which
this process was watching, not paused itself. An owner that was paused for longer learns from `check` that another one
has taken over. Threads of one process exclude each other like processes.
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

from fedjax_pcdd.errors import UserError, writing

BEAT = 5.0  # seconds between two heartbeats
PATIENCE = 30.0  # seconds without a heartbeat, after which an owner on another machine is dead
_SEEN: dict[str, tuple[bytes, float, float]] = {}  # locks of others: what they hold, seconds watched, last look
LENGTH = 512  # bytes of the file, always the same: a heartbeat changes some of them and needs no space


class Taken(UserError):
    """The folder is that of another run."""


class InUse(Taken):
    """Another process, or another run of this process, writes to the folder."""


class Lock:
    """A lock that is held; `take` one."""

    def __init__(self, path: Path):
        self.path, self._beats = path, 0
        host = socket.gethostname().encode("ascii", "replace").decode()[:100]
        self._own = {"host": host, "process": os.getpid(), "machine": _machine(), "started": _started(os.getpid())}
        self._own["token"] = secrets.token_hex(8)
        self._over = threading.Event()

    @classmethod
    def take(cls, path: Path, wait: float = PATIENCE + BEAT) -> "Lock":
        """Take the lock at this path.

        Args:
          path: the lock file, in an existing folder.
          wait: seconds that an owner on another machine may be watched. With 0 only what earlier calls of this process
            have seen counts, so that a caller who tries many locks in turn waits for none.

        Raises:
          InUse: its owner is alive, or not known to be dead.
          UserError: the file cannot be written.
        """
        lock, key, deadline = cls(path), str(path.absolute()), time.monotonic() + wait
        while not lock._create():
            if (content := _read(path)) is None:
                continue  # it was released meanwhile
            dead = _is_dead(content)
            if dead or (dead is None and _stands_still(key, content)):
                _remove(path, content, lock._own["token"])
            elif dead is False or time.monotonic() >= deadline:
                raise InUse(f"{path.parent} is in use by {_owner(content)}: wait for it to end, or end it.")
            else:
                time.sleep(min(BEAT / 5, max(0.0, deadline - time.monotonic())))
        _SEEN.pop(key, None)
        threading.Thread(target=lock._beat, name="lock", daemon=True).start()
        return lock

    def check(self) -> None:
        """Raise UserError if another process has taken over, as this one was paused, or if the lock is gone."""
        content = _read(self.path)
        if content is None:
            raise UserError(
                f"{self.path} is gone, as if the folder had been moved or removed: continue with `resume` where it is."
            )
        if _fields(content).get("token") != self._own["token"]:
            new_owner = f"{_owner(content)} while this one did not answer"
            raise UserError(f"{self.path.parent} was taken over by {new_owner}: it goes on there.")

    def release(self) -> None:
        """Release the lock."""
        self._over.set()
        content = _read(self.path)
        if content is not None and _fields(content).get("token") == self._own["token"]:
            self.path.unlink(missing_ok=True)

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_) -> None:
        self.release()

    def _create(self) -> bool:
        with writing(self.path.parent):
            try:
                file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
            except FileExistsError:
                return False
            try:
                os.write(file, self._content())
            except OSError:
                self.path.unlink(missing_ok=True)
                raise
            finally:
                os.close(file)
        return True

    def _content(self) -> bytes:
        return json.dumps(self._own | {"beat": self._beats}).ljust(LENGTH - 1).encode()[: LENGTH - 1] + b"\n"

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            self._beats += 1
            try:
                # Opened and closed each time, or other machines do not see it; a new owner has made another file.
                with open(self.path, "r+b", buffering=0) as file:
                    if _fields(file.read(LENGTH)).get("token") == self._own["token"]:
                        os.pwrite(file.fileno(), self._content(), 0)
            except OSError:
                pass  # `check` reports what has happened


def owner(path: Path) -> str | None:
    """The owner of the lock at this path, in words; None if there is none or it is known to be dead."""
    content = _read(path)
    return None if content is None or _is_dead(content) else _owner(content)


def _stands_still(path: str, content: bytes) -> bool:
    """Whether a lock has had the same content for too long; also an empty one, which was created but not written.

    Between two looks at most two heartbeats count, as this process may have been paused together with the owner.
    """
    now = time.monotonic()
    last_content, watched, last_look = _SEEN.get(path, (content, 0.0, now))
    watched = watched + min(now - last_look, 2 * BEAT) if last_content == content else 0.0
    _SEEN[path] = content, watched, now
    return watched > PATIENCE


def _read(path: Path) -> bytes | None:
    """The content of a lock; None if it no longer exists."""
    with writing(path.parent), suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(path).st_mode):  # reading a pipe would block
            raise UserError(f"{path} is a link or no file, which no run makes: remove it.")
        return path.read_bytes()[:LENGTH]
    return None


def _remove(path: Path, content: bytes, token: str) -> None:
    """Remove the lock of a dead owner, but not one that another process has taken since."""
    aside = path.with_name(f"{path.name}.{token}")
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can; without it two may try at once, and the rename decides
            fcntl.flock(folder, fcntl.LOCK_EX)
        if _read(path) == content:
            os.rename(path, aside)
            if _read(aside) != content:
                os.link(aside, path)
    except OSError:
        pass  # another process was faster: the caller looks again
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
    """Whether the owner, a process of this machine, is gone; None for one on another machine, where this is unknown."""
    fields = _fields(content)
    if fields.get("machine") != _machine():
        return None
    started = _started(fields.get("process"))
    return started is None or (started != "" and started != fields.get("started"))


def _machine() -> str:
    """The scope in which process numbers are unique: this boot of this machine, and the container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


def _started(process: Any) -> str | None:
    """When a process of this machine began, as its kernel counts ("" if it does not say); None if it is gone."""
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
