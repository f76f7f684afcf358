"""Checkpoints of a run: written by Orbax in the background, checked byte by byte when they are read.

A checkpoint of round `r` (the number of completed rounds) is the folder `<folder>/<r>` with up to three
items: `server` and `clients` (arrays by name) and `record` (JSON: the history, and the name, dtype, shape
and CRC-32 of every array). It is *full* when it holds the clients; the others are server-only: good for
evaluation, not for resuming.

Orbax runs synchronously inside one worker thread of ours, not in its own asynchronous mode: the caller is
held up for the copy of the arrays alone, whereas that mode prepares folders and files before it returns.
One run at a time may open a folder. Of a run in several processes the first writes, what every process has of the
arrays, and all read.
"""

import json
import shutil
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.training import damage, snapshot
from fedjax_pcdd.training.disk import check_space as check_space
from fedjax_pcdd.training.disk import for_user
from fedjax_pcdd.training.hosts import in_turn
from fedjax_pcdd.training.manager import REMOVED, Retention, open_manager, silence_orbax

_SMALL_FILES = 2**17


class Restored(NamedTuple):
    """What a checkpoint gives back; `clients` is None where only the server was asked for."""

    round: int
    server: Any
    clients: Any
    history: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run; close it, or use it in a `with` block, so that the last is written."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        every: int = 1,
        clients_every: int = 1,
        asynchronous: bool = True,
        say: Callable[[str], None] = lambda sentence: print(sentence, file=sys.stderr),
    ):
        """Open or create the folder; what a killed process left half-written or half-removed goes.

        Args:
          folder: where the checkpoints live; one process at a time.
          keep: checkpoints kept, the newest ones; the two newest full ones stay in any case.
          every: rounds between checkpoints.
          clients_every: every n-th checkpoint is full. A resume starts from a full one, so it repeats up to
            `every * clients_every - 1` rounds; each full one writes all clients' states.
          asynchronous: write in the background.
          say: told, in one sentence, about what a user should know.

        Raises:
          UserError: the folder cannot be created or read.
        """
        self._folder = Path(folder).absolute()
        self._every, self._clients_every = every, clients_every
        self._say = say
        self._full: set[int] = set()
        self._pending: Future | None = None
        self._worker = ThreadPoolExecutor(1, "checkpoint") if asynchronous else None
        self._writes, self._retention = jax.process_index() == 0, Retention(keep, self._full)
        self._manager: Any = None
        silence_orbax()
        if self._writes:
            self._open()

    def _open(self) -> None:
        try:
            self._manager = open_manager(self._folder, self._retention, writes=self._writes)
        except OSError as error:
            raise for_user(error, self._folder) from error
        self._full.update(r for r in self._manager.all_steps() if self._is_full(r))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def save(self, round: int, server: Any, clients: Any, history: str, *, force: bool = False) -> bool:
        """Take a snapshot of the arrays and return; the writing happens behind the caller's back.

        The arrays may be donated as soon as this returns: the snapshot shares no memory with them. Where the
        checkpoint before is still being written, this waits for it.

        Args:
          round: completed rounds.
          server: pytree of arrays.
          clients: pytree of arrays, `()` where clients keep nothing; left out where the checkpoint is not to be full,
            unless forced.
          history: JSON; what it stands for comes back on `restore`.
          force: write now, and fully, whatever `every` and `clients_every` say.

        Returns:
          Whether a checkpoint is being written here (False too where this round has one already).

        Raises:
          UserError: this or the previous checkpoint could not be written (no space left, for example).
        """
        if not self._writes or (not force and round % self._every):
            return False
        self.wait()
        full = force or round // self._every % self._clients_every == 0
        if round in self._manager.all_steps() and (round in self._full or not full):
            return False
        parts = {"server": snapshot.take("server", server)}
        if full:
            parts["clients"] = snapshot.take("clients", clients)
        if self._worker is None:
            self._guard(lambda: self._write(round, parts, history))
        else:
            self._pending = self._worker.submit(self._write, round, parts, history)
        return True

    def restore(self, server_like: Any, clients_like: Any) -> Restored | None:
        """The newest intact full checkpoint, bit for bit; every newer one is removed, to be written again.

        Args:
          server_like: pytree of arrays or `jax.ShapeDtypeStruct` with the wanted shapes, dtypes, shardings.
          clients_like: the same for the clients.

        Returns:
          None where the folder holds no full checkpoint. Leaves are jax arrays; where the template is a numpy
          array, numpy arrays.

        Raises:
          UserError: all are damaged, or the checkpoint was written by another configuration.
        """
        like = {"server": server_like, "clients": clients_like}
        with in_turn():
            if not self._writes:
                self._open()
                return self._newest(like)
            restored = self._newest(like)
            if restored is None and self._manager.all_steps():
                self._say(f"no full checkpoint in {self._folder} yet: starting from round 0")
            self._discard_after(0 if restored is None else restored.round)
            return restored

    def restore_server(self, server_like: Any) -> Restored | None:
        """The newest intact checkpoint of either kind, for evaluation: no `clients`, nothing is removed."""
        return self._newest({"server": server_like})

    def wait(self) -> None:
        """Return once nothing is being written.

        Raises:
          UserError: the checkpoint in the making could not be written.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            self._guard(pending.result)

    def close(self) -> None:
        """Wait, then release the worker thread; raises as `wait` does."""
        try:
            self.wait()
        finally:
            if self._worker is not None:
                self._worker.shutdown()
            if self._manager is not None:
                self._manager.close()

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            raise for_user(error, self._folder) from error

    def _write(self, round: int, parts: dict[str, dict[str, Any]], history: str) -> None:
        host = {part: {name: np.asarray(a) for name, a in arrays.items()} for part, arrays in parts.items()}
        inventory = {
            part: {name: snapshot.fingerprint(a) for name, a in arrays.items()} for part, arrays in host.items()
        }
        content = f'{{"arrays": {json.dumps(inventory)}, "history": {history}}}'
        items: dict[str, Any] = {"record": ocp.args.JsonSave({"content": content, "crc": zlib.crc32(content.encode())})}
        for part, arrays in host.items():
            if stored := {name: a for name, a in arrays.items() if a.size}:
                items[part] = ocp.args.PyTreeSave(stored)
        if round in self._manager.all_steps():
            self._manager.delete(round)
        if "clients" in parts:
            self._full.add(round)
        try:
            self._manager.save(round, args=ocp.args.Composite(**items), force=True)
        except BaseException:
            self._full.discard(round)
            raise
        damage.list_files(self._folder / str(round))
        shutil.rmtree(self._folder / REMOVED, ignore_errors=True)

    def _newest(self, like: dict[str, Any]) -> Restored | None:
        self.wait()
        damaged: dict[int, str] = {}
        for round in sorted(self._manager.all_steps(), reverse=True):
            try:
                damage.check_files(self._folder / str(round))
                record = self._record(round)
                if not like.keys() <= record["arrays"].keys():
                    continue
                found = self._load(round, record["arrays"], like)
            except (UserError, MemoryError, PermissionError):
                raise
            # Damage can surface as almost any exception of Orbax, TensorStore or the decoders.
            except Exception as error:
                damaged[round] = damage.reason(error)
                continue
            for bad, reason in damaged.items():
                self._say(f"checkpoint of round {bad} is damaged ({reason}): continuing from round {round}")
            trees = {part: snapshot.fill(part, template, found[part]) for part, template in like.items()}
            return Restored(round, trees["server"], trees.get("clients"), record["history"])
        if damaged:
            rounds = "; ".join(f"round {bad}: {reason}" for bad, reason in damaged.items())
            raise UserError(f"no checkpoint in {self._folder} is intact ({rounds}): start a new run.")
        return None

    def _record(self, round: int) -> dict[str, Any]:
        saved = self._manager.restore(round, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
        if zlib.crc32(saved["content"].encode()) != saved["crc"]:
            raise ValueError("its record fails its checksum")
        return json.loads(saved["content"])

    def _is_full(self, round: int) -> bool:
        try:
            return "clients" in self._record(round)["arrays"]
        # A damaged checkpoint is reported when it is restored; here it only must not count as a full one.
        except Exception:
            return False

    def _load(self, round: int, inventory: dict[str, Any], like: dict[str, Any]) -> dict[str, Any]:
        wanted: dict[str, Any] = {}
        for part, template in like.items():
            self._check_same(round, inventory[part], snapshot.named(part, template))
            stored = [name for name, (_, shape, _) in inventory[part].items() if 0 not in shape]
            if stored:
                as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in stored}
                wanted[part] = ocp.args.PyTreeRestore(restore_args=as_numpy)
        found = self._manager.restore(round, args=ocp.args.Composite(**wanted)) if wanted else {}
        found = {part: found[part] if part in wanted else {} for part in like}
        for part, arrays in found.items():
            snapshot.verify(arrays, inventory[part])
        return found

    def _check_same(self, round: int, inventory: dict[str, Any], template: dict[str, Any]) -> None:
        if difference := snapshot.difference(inventory, template):
            raise UserError(
                f"the checkpoint of round {round} in {self._folder} was written by another configuration "
                f"({difference}): resume with the configuration it was started with."
            )

    def _discard_after(self, round: int) -> None:
        for newer in [r for r in self._manager.all_steps() if r > round]:
            self._manager.delete(newer)
            self._full.discard(newer)
        shutil.rmtree(self._folder / REMOVED, ignore_errors=True)


def required_bytes(server: Any, clients: Any) -> int:
    """Disk space in bytes of one full checkpoint; the trees may be abstract."""
    return snapshot.size(server) + snapshot.size(clients) + _SMALL_FILES
