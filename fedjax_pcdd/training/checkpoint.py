"""Checkpoints of a run: written by Orbax in the background, checked byte by byte when they are read.

A checkpoint of round `r` (the number of completed rounds) is the folder `<folder>/<r>` with up to three items: `server`
and `clients` (arrays by name) and `record` (JSON: the history, and the name, dtype, shape and CRC-32 of every array).
It is *full* when it holds the clients; the others are server-only: good for evaluation, not for resuming.

Orbax writes synchronously in one worker thread of ours. Its own asynchronous mode holds the caller up for 12 to 30 ms
(2-core CPU, small model), since it prepares folders and files before it returns; here that is 1 ms, the copy of the
arrays. Its checksums do not cover the arrays' bytes: hence the CRCs. One run at a time may open a folder. Of a run in
several processes the first writes, and where each has the states of its clients alone, each writes and reads these.
"""

import asyncio
import errno
import json
import logging
import math
import os
import re
import shutil
import sys
import tempfile
import textwrap
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from fedjax_pcdd.data.unpacked import checksum
from fedjax_pcdd.engine.mesh import distribute, own_copy
from fedjax_pcdd.engine.storage import OnHost
from fedjax_pcdd.errors import UserError, failed_write
from fedjax_pcdd.training import interrupts
from fedjax_pcdd.training.client_log import Changed, ClientLog, Part
from fedjax_pcdd.training.hosts import in_turn, told_by_first
from fedjax_pcdd.training.loop import Callback, Progress, RoundReport, Run
from fedjax_pcdd.training.metrics import History

REMOVED = "removed"
_FILES = "files.json"
_SMALL_FILES = 2**17
_MISREAD = re.compile(r"[]\[*?\\:%#\ud800-\udfff]")  # patterns, addresses and what is not UTF-8

Arrays = dict[str, Any]  # by name, for example `server['params']['kernel']`, in the order of the tree


class Restored(NamedTuple):
    """What a checkpoint gives back; `clients` is None where only the server was asked for."""

    round: int
    server: Any
    clients: Any
    history: dict[str, Any]


class _Taken(NamedTuple):
    """What a checkpoint writes of clients' states that changed."""

    rows: np.ndarray
    values: list[np.ndarray]  # [n, ...] of those rows
    states: Any  # of all clients
    parts: list[Part]  # what other processes have written


class Checkpoints:
    """The checkpoints of one run; close it, or use it in a `with` block, so that the last is written."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 3,
        every: int = 1,
        clients_every: int = 1,
        read_only: bool = False,
        say: Callable[[str], None] = lambda sentence: print(sentence, file=sys.stderr),
    ):
        """Open or create the folder; what a killed process left half-written or half-removed goes.

        Args:
          folder: where the checkpoints live; one process at a time.
          keep: checkpoints kept, the newest ones; the two newest full ones stay in any case.
          every: rounds between checkpoints.
          clients_every: every n-th checkpoint is full. A resume starts from a full one, so it repeats up to
            `every * clients_every - 1` rounds; each full one writes all clients' states.
          read_only: leave the folder as it is.
          say: told, in one sentence, about what a user should know.

        Raises:
          UserError: the folder cannot be created or read.
        """
        self._folder = Path(folder).absolute()
        self._every, self._clients_every, self._keep, self._say = every, clients_every, keep, say
        self._full: set[int] = set()
        self._pending: Future | None = None
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self._writes = jax.process_index() == 0 and not read_only
        self._log, self._logs_all = ClientLog(self._folder.parent / "clients"), False
        self._shared = False  # whether all processes know the log's folder
        self._manager: Any = None
        self._alias: tempfile.TemporaryDirectory | None = None  # another path, of plain characters
        if self._writes or read_only:
            self._open()

    def _open(self) -> None:
        try:
            if _MISREAD.search(str(self._folder)) and self._alias is None:
                self._alias = tempfile.TemporaryDirectory()
                Path(self._alias.name, "checkpoints").symlink_to(self._folder)
            alias = self._folder if self._alias is None else Path(self._alias.name, "checkpoints")
            self._manager = _open_manager(self._folder, alias, self if self._writes else None)
        except OSError as error:
            raise failed_write(error, self._folder) from error
        self._full.update(r for r in self._manager.all_steps() if self._is_full(r))

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax asks which checkpoints stay: the `keep` newest and the two newest full ones."""
        del context
        rounds = sorted(info.step for info in checkpoints)
        kept = {*rounds[-self._keep :], *[r for r in rounds if r in self._full][-2:]}
        return [info.step in kept for info in checkpoints]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def is_due(self, round: int) -> bool:
        """Whether a round gets a checkpoint without being forced."""
        return round % self._every == 0

    def save(self, round: int, server: Any, clients: Any, history: str, *, force: bool = False) -> bool:
        """Take a snapshot of the arrays, which may be donated as soon as this returns, and write it in the background.

        Where the checkpoint before is still being written, this waits for it.

        Args:
          round: completed rounds.
          server: pytree of arrays.
          clients: pytree of arrays, `()` where clients keep nothing; left out where the checkpoint is not to be full.
            A function instead returns what has `Changed` since it was called last, which goes into the log.
          history: JSON; what it stands for comes back on `restore`.
          force: write now, and fully, whatever `every` and `clients_every` say.

        Returns:
          Whether a checkpoint is being written here (False too where this round has one already).

        Raises:
          UserError: this or the previous checkpoint could not be written (no space left, for example).
        """
        if not (self.is_due(round) or force):
            return False
        full = force or round // self._every % self._clients_every == 0
        changed = self._taken(round, clients) if full and callable(clients) else None
        if not self._writes:
            return False
        self.wait()
        if round in self._manager.all_steps() and (round in self._full or not full):
            return False
        parts = {"server": snapshot("server", server)}
        if full:
            parts["clients"] = {} if changed else snapshot("clients", clients)
        self._pending = self._worker.submit(self._write, round, parts, history, changed)
        return True

    def _taken(self, round: int, clients: Callable) -> "_Taken":
        """What changed of the states of this process's clients; in several processes the others write theirs now."""
        changed = cast(Changed, clients())
        if self._logs_all:  # as the log has nothing of the checkpoint that was resumed
            rows, self._logs_all = np.arange(len(jax.tree.leaves(changed.states)[0])), False
            changed = changed._replace(rows=rows)
        own, me = changed.own(), jax.process_index()
        values = own.values()
        if changed.owners is None:
            return _Taken(own.rows, values, changed.states, [])
        if not self._shared:  # the others have a folder of their own, where they would write
            self._log, self._shared = ClientLog(Path(told_by_first(str(self._log.folder)))), True
        try:
            part = Part(0, [0] * (1 + len(values))) if me == 0 else self._log.append_part(round, me, own.rows, values)
        except OSError as error:
            raise failed_write(error, self._log.folder) from error
        told = np.asarray(multihost_utils.process_allgather(np.array(part.files, np.uint32)))
        parts = [Part(p, files.tolist()) for p, files in enumerate(told)][1:]
        return _Taken(own.rows, values, changed.states, parts)

    def restore(self, server_like: Any, clients_like: Any) -> Restored | None:
        """The newest intact full checkpoint, bit for bit; every newer one is removed, to be written again.

        Args:
          server_like: pytree of arrays or `jax.ShapeDtypeStruct` with the wanted shapes, dtypes, shardings.
          clients_like: the same for the clients; where the checkpoint has them in its log their initial numpy arrays,
            which are brought up to date in place.

        Returns:
          None where the folder holds no full checkpoint. Leaves are jax arrays; where the template is a numpy
          array, numpy arrays.

        Raises:
          UserError: all are damaged, or the checkpoint was written by another configuration.
        """
        like = {"server": server_like, "clients": clients_like}
        with in_turn():
            if not self._manager:  # the first process has made the folder by now
                self._open()
            restored = self._newest(like)
            if self._writes:
                if restored is None:
                    self._say(f"no full checkpoint in {self._folder} yet: starting from round 0")
                self._discard_after(0 if restored is None else restored.round)
            return restored

    def newest_record(self) -> dict[str, Any] | None:
        """What the newest full checkpoint whose record is intact has beside its arrays; None where there is none."""
        self.wait()
        for round in sorted(self._manager.all_steps() if self._manager else (), reverse=True):
            with suppress(Exception):  # a damaged one is reported when it is restored
                record = self._record(round)
                if "clients" in record["arrays"]:
                    return record["history"]
        return None

    @property
    def newest_full(self) -> int | None:
        """The round that a resume would go back to, if no file is damaged; None where that is the start."""
        self.wait()
        return max(self._full, default=None)

    def wait(self) -> None:
        """Return once nothing is being written; UserError where that could not be written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except Exception as error:
                raise failed_write(error, self._folder) from error

    def close(self) -> None:
        """Wait, then release the worker thread; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            if self._manager is not None:
                self._manager.close()
            if self._alias is not None:
                self._alias.cleanup()

    def _write(self, round: int, parts: dict[str, Arrays], history: str, changed: "_Taken | None") -> None:
        if changed:
            self._log.append(round, changed.rows, changed.values, changed.parts)
            self._log.merge(min(self._manager.all_steps(), default=0), changed.states)
        host = {part: {name: np.asarray(a) for name, a in arrays.items()} for part, arrays in parts.items()}
        inventory = {part: {name: fingerprint(a) for name, a in arrays.items()} for part, arrays in host.items()}
        logged = ', "logged": true' if changed else ""
        content = f'{{"arrays": {json.dumps(inventory)}{logged}, "history": {history}}}'
        items: dict[str, Any] = {"record": ocp.args.JsonSave({"content": content, "crc": zlib.crc32(content.encode())})}
        for part, arrays in host.items():
            if stored := {name: a for name, a in arrays.items() if a.size}:
                items[part] = ocp.args.PyTreeSave(stored)
        if round in self._manager.all_steps():
            self._manager.delete(round)
        if "clients" in parts:
            self._full.add(round)  # before it is written: Orbax asks on the way which ones stay
        try:
            self._manager.save(round, args=ocp.args.Composite(**items), force=True)
        except BaseException:
            self._full.discard(round)
            _remove_unfinished(self._folder)
            raise
        checkpoint = self._folder / str(round)
        files = {str(f.relative_to(checkpoint)): checksum(f) for f in checkpoint.rglob("*") if f.is_file()}
        (checkpoint / _FILES).write_text(json.dumps(files))
        shutil.rmtree(self._folder / REMOVED, ignore_errors=True)

    def _newest(self, like: dict[str, Any]) -> Restored | None:
        self.wait()
        damaged: dict[int, str] = {}
        for round in sorted(self._manager.all_steps(), reverse=True):
            try:
                _check_files(self._folder / str(round))
                record = self._record(round)
                if not like.keys() <= record["arrays"].keys():
                    continue
                logged = record.get("logged") and "clients" in like
                if logged:
                    self._log.check(round)
                wanted = like | {"clients": ()} if logged else like
                arrays = self._load(round, record["arrays"], wanted)
            except (UserError, MemoryError, PermissionError):
                raise
            # Damage can surface as almost any exception of Orbax, TensorStore or the decoders.
            except Exception as error:
                damaged[round] = _reason(error)
                continue
            for bad, reason in damaged.items():
                self._say(f"checkpoint of round {bad} is damaged ({reason}): continuing from round {round}")
            trees = {part: fill(part, template, arrays[part]) for part, template in wanted.items()}
            self._logs_all = not logged
            if logged:
                self._log.replay(round, like["clients"])
                trees["clients"] = like["clients"]
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

    def _load(self, round: int, inventory: dict[str, Any], like: dict[str, Any]) -> dict[str, Arrays]:
        wanted: dict[str, Any] = {}
        for part, template in like.items():
            if different := difference(inventory[part], named(part, template)):
                raise UserError(
                    f"the checkpoint of round {round} in {self._folder} was written by another configuration "
                    f"({different}): resume with the configuration and the version that it was started with."
                )
            if stored := [name for name, (_, shape, _) in inventory[part].items() if 0 not in shape]:
                as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in stored}
                wanted[part] = ocp.args.PyTreeRestore(restore_args=as_numpy)
        stored = self._manager.restore(round, args=ocp.args.Composite(**wanted)) if wanted else {}
        arrays = {part: stored[part] if part in wanted else {} for part in like}
        for part in like:
            for name, expected in inventory[part].items():
                if 0 not in expected[1] and fingerprint(arrays[part][name]) != expected:
                    raise ValueError(f"{name} fails its checksum")
        return arrays

    def _discard_after(self, round: int) -> None:
        for newer in [r for r in self._manager.all_steps() if r > round]:
            self._manager.delete(newer)
            self._full.discard(newer)
        self._log.discard_after(round)
        shutil.rmtree(self._folder / REMOVED, ignore_errors=True)


class Checkpoint(Callback):
    """Saves a run and the state of the callbacks beside it; the last round in any case."""

    def __init__(
        self, checkpoints: Checkpoints, callbacks: Sequence[Callback] = (), resolved: Mapping[str, Any] | None = None
    ):
        """Args: callbacks: those that may have a state; resolved: what resolved.json holds, kept in each checkpoint."""
        self.checkpoints, self.resolved = checkpoints, resolved
        self.began_with: dict[str, Any] | None = None  # what the run of a restored checkpoint computes from
        self._named: dict[str, Callback] = {}  # by class; of several of one class the later ones have a number
        for callback in callbacks:
            name = type(callback).__name__
            number = 1 + sum(type(other) is type(callback) for other in self._named.values())
            self._named[name if number == 1 else f"{name}-{number}"] = callback

    def begin(self, state: Any, best: Any) -> tuple[Any, Progress] | None:
        """State and progress of the newest intact full checkpoint, if there is any; callbacks go back to it, too.

        Args:
          state: a `State` with the wanted shapes.
          best: variables with those of the best global model, () where none is kept.
        """
        restored = self.checkpoints.restore((state.servers, best), (state.clients, state.statistics))
        if restored is None:
            return None
        (servers, best), record = restored.server, dict(restored.history)
        kept, stopped = record.pop("callbacks", {}), record.pop("stopped", False)
        self.began_with = record.pop("resolved", {}).get("inputs")
        for name in kept.keys() & self._named.keys():
            self._named[name].restore(kept[name])
        clients, statistics = restored.clients
        state = state._replace(servers=servers, clients=clients, statistics=statistics)
        return state, Progress(restored.round, History(**record), best, stopped)

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Save the round, if it is due or the last one, and beside its history what else is to be restored."""
        last = run.is_over or interrupts.pending() is not None
        if not (self.checkpoints.is_due(run.round) or last):
            return
        state, history = run.state, run.history.to_json()
        kept = {name: own for name, callback in self._named.items() if (own := callback.state()) is not None}
        beside = {"callbacks": kept, "stopped": run.stopped, "resolved": self.resolved}
        if beside := {name: value for name, value in beside.items() if value}:
            history = f"{history[:-1]}, {json.dumps(beside)[1:]}"
        clients, storage = (state.clients, state.statistics), getattr(run.simulation, "storage", None)
        given: Any = clients
        if isinstance(storage, OnHost) and len(run.runs) == 1 and jax.tree.leaves(clients):
            given = lambda: Changed(storage.changed(), clients, storage.owners)  # noqa: E731
        self.checkpoints.save(run.round, (state.servers, run.best), given, history, force=last)

    def on_end(self, run: Run) -> None:
        """Write what is not yet written."""
        self.checkpoints.close()


def required_bytes(server: Any, clients: Any) -> int:
    """Disk space in bytes of one full checkpoint; the trees may be abstract."""
    return size(server) + size(clients) + _SMALL_FILES


def check_space(folder: Path, required: int) -> None:
    """UserError where the disk of a folder, which need not exist yet, has less room than so many bytes."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    free = shutil.disk_usage(existing).free
    if free < required:
        raise UserError(
            f"{folder} needs {required / 1e6:.2f} MB for checkpoints, its disk has {free / 1e6:.2f} MB left: "
            "free some space, choose another `run_dir` or keep fewer checkpoints."
        )


def named(part: str, tree: Any) -> Arrays:
    """The leaves of a tree by name."""
    return {part + jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def snapshot(part: str, tree: Any) -> Arrays:
    """Copies of the leaves; they share no memory with the tree, which may be donated at once.

    Of what lies on several devices, each of which has all of it, one copy is taken, by this process alone.
    """
    leaves = named(part, own_copy(tree))
    for leaf in leaves.values():
        if isinstance(leaf, jax.Array) and not _on_cpu(leaf):
            leaf.copy_to_host_async()
    return {name: _copy(leaf) for name, leaf in leaves.items()}


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    # On a CPU a numpy view shares the buffer and stays cached in the array, which blocks its donation.
    return jnp.copy(leaf) if _on_cpu(leaf) else np.asarray(leaf)


def _on_cpu(leaf: jax.Array) -> bool:
    return next(iter(leaf.devices())).platform == "cpu"


def fill(part: str, template: Any, arrays: Arrays) -> Any:
    """The template's tree with these values; those without elements need not be among them."""
    leaves = [
        _like(arrays[name] if name in arrays else np.zeros(leaf.shape, leaf.dtype), leaf)
        for name, leaf in named(part, template).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def _like(value: np.ndarray, leaf: Any) -> Any:
    """A value where and as the leaf of a template lies."""
    if isinstance(leaf, np.ndarray):
        return value
    # An uncommitted template gives an uncommitted array: for a committed one jit would compile anew.
    sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    if sharding is not None and not sharding.is_fully_addressable:
        return distribute(value, len(sharding.device_set))
    return jax.device_put(value, sharding, may_alias=False)


def size(tree: Any) -> int:
    """Bytes of all leaves, which may be abstract."""
    return sum(np.dtype(leaf.dtype).itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def fingerprint(array: np.ndarray) -> list[Any]:
    """`[dtype, shape, CRC-32 of the bytes]`, ready for JSON."""
    return [*_type_of(array), zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)]


def difference(inventory: dict[str, Any], template: Arrays) -> str | None:
    """The first leaf that differs between what was written (`fingerprint` by name) and what is wanted, in words."""
    written = {name: [dtype, shape] for name, (dtype, shape, _) in inventory.items()}
    wanted = {name: _type_of(leaf) for name, leaf in template.items()}
    for name in sorted(written.keys() | wanted.keys()):
        stored, expected = ("{}{}".format(*kinds[name]) if name in kinds else "missing" for kinds in (written, wanted))
        if stored != expected:
            return f"{name} is {stored} there and {expected} here"
    return None


def _type_of(leaf: Any) -> list[Any]:
    return [str(np.dtype(leaf.dtype)), list(leaf.shape)]


class _Together(ocp.type_handlers.NumpyHandler):
    """A write that fails is heard of when all writes have ended.

    Orbax closes the event loop of all arrays as soon as one of them fails, as on a full disk. TensorStore then prints a
    traceback for every other one that ends and finds its loop closed.
    """

    async def serialize(self, values: Sequence[np.ndarray], infos: Any, args: Any = None) -> Any:
        """Futures of the writes."""
        self._left, self._ended = len(values), asyncio.Event()
        return await super().serialize(values, infos, args)

    async def _open_and_write(self, *given: Any) -> None:
        try:
            await super()._open_and_write(*given)
        finally:
            self._left -= 1
            if not self._left:
                self._ended.set()
            await self._ended.wait()


def _open_manager(folder: Path, alias: Path, retention: Any) -> ocp.CheckpointManager:
    """A manager that waits for no other process.

    Args:
      folder: goes without what a killed process left half-written or half-removed, if this one writes.
      alias: leads to it by characters that Orbax does not misread.
      retention: says what stays; None for a manager that writes nothing.
    """
    writes, me = retention is not None, jax.process_index()
    if writes:
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link")
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(folder)
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )
    # Compression takes three times as long as writing and shrinks trained weights by a tenth at best.
    plain = {"use_compression": False, "multiprocessing_options": alone}
    handlers: dict[str, Any] = {}
    for part in ("server", "clients"):
        arrays = ocp.type_handlers.create_type_handler_registry((np.ndarray, _Together()))
        handlers[part] = ocp.PyTreeCheckpointHandler(**plain, type_handler_registry=arrays)
    handlers["record"] = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    # Renaming is atomic and removing a tree is not: a killed process must not leave half a checkpoint.
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False, preservation_policy=retention, todelete_subdir=REMOVED if writes else None,
        save_root_metadata=False, lightweight_initialize=True, create=False, read_only=not writes,
        multiprocessing_options=alone,
    )  # fmt: skip
    return ocp.CheckpointManager(alias, item_handlers=handlers, options=options)


def _remove_unfinished(folder: Path) -> None:
    """Remove what is no whole checkpoint; where a write failed, TensorStore's threads may still add files to it."""
    for path in [one for one in folder.iterdir() if one.is_dir() and not (one.is_symlink() or one.name.isdigit())]:
        end = time.monotonic() + 5
        while path.exists() and time.monotonic() < end:
            shutil.rmtree(path, ignore_errors=True)
            time.sleep(0.01)


def _check_files(checkpoint: Path) -> None:
    """ValueError where a file is missing or has other bytes than were written.

    TensorStore would notice too, but leaves reads behind that print tracebacks when they fail one by one. A process
    killed before the list was written leaves a checkpoint without one, which is then only checked by its contents.
    """
    try:
        files = json.loads((checkpoint / _FILES).read_text())
    except (FileNotFoundError, ValueError):
        return
    for name, crc in files.items():
        if not (checkpoint / name).is_file():
            raise ValueError(f"the file {name} is missing")
        if checksum(checkpoint / name) != crc:
            raise ValueError(f"the file {name} has other bytes than were written")


def _reason(error: Exception) -> str:
    """What an exception says of a checkpoint that cannot be read, for the user."""
    if isinstance(error, FileNotFoundError | KeyError):
        return "a file is missing"
    if isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error)):
        return "an array file is missing or cut short"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[0], 100, placeholder="...")


# Errors too: Orbax prints the traceback of every exception that it also raises.
logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)
