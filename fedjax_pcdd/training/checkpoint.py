"""Checkpoints of a run: written by Orbax in the background, checked byte by byte when they are read.

A checkpoint of round `r` (the number of completed rounds) is the folder `<folder>/<r>` with up to three items: `server`
and `clients` (arrays by name) and `record` (JSON: the history, and the name, dtype, shape and CRC-32 of every array).
It is *full* when it holds the clients; the others are server-only: good for evaluation, not for resuming.

Orbax writes synchronously in one worker thread of ours. Its own asynchronous mode holds the caller up for 12 to 30 ms
(2-core CPU, small model), since it prepares folders and files before it returns; here that is 1 ms, the copy of the
arrays. Its checksums do not cover the arrays' bytes: hence the CRCs.
One run at a time may open a folder. Of a run in several processes the first writes, what every process has of the
arrays, and all read.
"""

import json
import logging
import math
import os
import re
import shutil
import sys
import textwrap
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from fedjax_pcdd.engine.mesh import here, place
from fedjax_pcdd.errors import UserError, failed_write
from fedjax_pcdd.training.hosts import in_turn
from fedjax_pcdd.training.loop import Callback, Progress, RoundReport, Run
from fedjax_pcdd.training.metrics import History

REMOVED = "removed"
PARTS = ("server", "clients")
_FILES = "files.json"
_SMALL_FILES = 2**17

Arrays = dict[str, Any]  # by name, for example `server['params']['kernel']`, in the order of the tree


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
        self._manager: Any = None
        _silence_orbax()
        if self._writes or read_only:
            self._open()

    def _open(self) -> None:
        try:
            self._manager = _open_manager(self._folder, self, writes=self._writes)
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
        return self._writes and round % self._every == 0

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
        if not (self.is_due(round) or (force and self._writes)):
            return False
        self.wait()
        full = force or round // self._every % self._clients_every == 0
        if round in self._manager.all_steps() and (round in self._full or not full):
            return False
        parts = {"server": snapshot("server", server)} | ({"clients": snapshot("clients", clients)} if full else {})
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
                if self._manager is None:  # the first process has made the folder by now
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

    def _write(self, round: int, parts: dict[str, Arrays], history: str) -> None:
        host = {part: {name: np.asarray(a) for name, a in arrays.items()} for part, arrays in parts.items()}
        inventory = {part: {name: fingerprint(a) for name, a in arrays.items()} for part, arrays in host.items()}
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
        _list_files(self._folder / str(round))
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
                arrays = self._load(round, record["arrays"], like)
            except (UserError, MemoryError, PermissionError):
                raise
            # Damage can surface as almost any exception of Orbax, TensorStore or the decoders.
            except Exception as error:
                damaged[round] = _reason(error)
                continue
            for bad, reason in damaged.items():
                self._say(f"checkpoint of round {bad} is damaged ({reason}): continuing from round {round}")
            trees = {part: fill(part, template, arrays[part]) for part, template in like.items()}
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
                    f"({different}): resume with the configuration it was started with."
                )
            if stored := [name for name, (_, shape, _) in inventory[part].items() if 0 not in shape]:
                as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in stored}
                wanted[part] = ocp.args.PyTreeRestore(restore_args=as_numpy)
        stored = self._manager.restore(round, args=ocp.args.Composite(**wanted)) if wanted else {}
        arrays = {part: stored[part] if part in wanted else {} for part in like}
        for part in like:
            verify(arrays[part], inventory[part])
        return arrays

    def _discard_after(self, round: int) -> None:
        for newer in [r for r in self._manager.all_steps() if r > round]:
            self._manager.delete(newer)
            self._full.discard(newer)
        shutil.rmtree(self._folder / REMOVED, ignore_errors=True)


class Checkpoint(Callback):
    """Saves a run and the state of the callbacks beside it; the last round in any case."""

    def __init__(self, checkpoints: Checkpoints, callbacks: Sequence[Callback] = ()):
        """Args: callbacks: those that may have a state."""
        self.checkpoints, self.callbacks = checkpoints, callbacks

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
        for name, callback in self._named():
            if name in kept:
                callback.restore(kept[name])
        clients, statistics = restored.clients
        state = state._replace(servers=servers, clients=clients, statistics=statistics)
        return state, Progress(restored.round, History(**record), best, stopped)

    def on_round(self, run: Run, report: RoundReport) -> None:
        """Save the round, if it is due."""
        if self.checkpoints.is_due(run.round) or run.is_over:
            state = run.state
            parts = (state.servers, run.best), (state.clients, state.statistics)
            self.checkpoints.save(run.round, *parts, self._record(run), force=run.is_over)

    def on_end(self, run: Run) -> None:
        """Write what is not yet written."""
        self.checkpoints.close()

    def _record(self, run: Run) -> str:
        """The history as JSON, and beside it what else is to be restored, where there is any."""
        kept = {name: state for name, callback in self._named() if (state := callback.state()) is not None}
        beside = ({"callbacks": kept} if kept else {}) | ({"stopped": True} if run.stopped else {})
        history = run.history.to_json()
        return f"{history[:-1]}, {json.dumps(beside)[1:]}" if beside else history

    def _named(self) -> list[tuple[str, Callback]]:
        """Callbacks by the name of their class; of several of one class the later ones have a number."""
        names: list[str] = []
        for callback in self.callbacks:
            name = type(callback).__name__
            names.append(f"{name}-{names.count(name) + 1}" if name in names else name)
        return list(zip(names, self.callbacks, strict=True))


def required_bytes(server: Any, clients: Any) -> int:
    """Disk space in bytes of one full checkpoint; the trees may be abstract."""
    return size(server) + size(clients) + _SMALL_FILES


def check_space(folder: Path, required: int) -> None:
    """Refuse a run whose files would not fit.

    Args:
      folder: where they will live; it need not exist yet.
      required: bytes.

    Raises:
      UserError: the disk has less room.
    """
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
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
    leaves = named(part, here(tree))
    for leaf in leaves.values():
        if isinstance(leaf, jax.Array) and not _on_cpu(leaf):
            leaf.copy_to_host_async()
    return {name: _copy(leaf) for name, leaf in leaves.items()}


def fill(part: str, template: Any, arrays: Arrays) -> Any:
    """The template's tree with these values; those without elements need not be among them."""
    leaves = [
        _like(arrays[name] if name in arrays else np.zeros(leaf.shape, leaf.dtype), leaf)
        for name, leaf in named(part, template).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(template), leaves)


def size(tree: Any) -> int:
    """Bytes of all leaves, which may be abstract."""
    return sum(np.dtype(leaf.dtype).itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def fingerprint(array: np.ndarray) -> list[Any]:
    """`[dtype, shape, CRC-32 of the bytes]`, ready for JSON."""
    dtype, shape = _type_of(array)
    return [dtype, list(shape), zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)]


def verify(arrays: Arrays, inventory: dict[str, Any]) -> None:
    """ValueError where an array is not what was written, by the `fingerprint` of each; empty ones may be missing."""
    for name, expected in inventory.items():
        if 0 not in expected[1] and fingerprint(arrays[name]) != expected:
            raise ValueError(f"{name} fails its checksum")


def difference(inventory: dict[str, Any], template: Arrays) -> str | None:
    """The first leaf that differs between what was written (`fingerprint` by name) and what is wanted, in words."""
    written = {name: (dtype, tuple(shape)) for name, (dtype, shape, _) in inventory.items()}
    wanted = {name: _type_of(leaf) for name, leaf in template.items()}
    for name in sorted(written.keys() | wanted.keys()):
        if written.get(name) != wanted.get(name):
            return f"{name} is {_in_words(written.get(name))} there and {_in_words(wanted.get(name))} here"
    return None


def _type_of(leaf: Any) -> tuple[str, tuple[int, ...]]:
    return str(np.dtype(leaf.dtype)), tuple(leaf.shape)


def _in_words(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if kind is None else f"{kind[0]}{list(kind[1])}"


def _on_cpu(leaf: jax.Array) -> bool:
    return next(iter(leaf.devices())).platform == "cpu"


def _copy(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return np.array(leaf)
    # On a CPU a numpy view shares the buffer and stays cached in the array, which blocks its donation.
    return jnp.copy(leaf) if _on_cpu(leaf) else np.asarray(leaf)


def _like(value: np.ndarray, leaf: Any) -> Any:
    """A value where and as the leaf of a template lies."""
    if isinstance(leaf, np.ndarray):
        return value
    # An uncommitted template gives an uncommitted array: for a committed one jit would compile anew.
    sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    if sharding is not None and not sharding.is_fully_addressable:
        return place(value, len(sharding.device_set))
    return jax.device_put(value, sharding, may_alias=False)


def _open_manager(folder: Path, retention: Any, *, writes: bool) -> ocp.CheckpointManager:
    """A manager that waits for no other process; if it writes, in a folder without what a killed one left behind."""
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if not path.name.isdigit():  # half-written or half-removed
                shutil.rmtree(path, ignore_errors=True)
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}"
    )
    # Compression takes three times as long as writing and shrinks trained weights by a tenth at best.
    plain = {"use_compression": False, "multiprocessing_options": alone}
    handlers: dict[str, Any] = {part: ocp.PyTreeCheckpointHandler(**plain) for part in PARTS}
    handlers["record"] = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    options = ocp.CheckpointManagerOptions(
        enable_async_checkpointing=False,
        preservation_policy=retention if writes else None,
        # Renaming is atomic and removing a tree is not: a killed process must not leave half a checkpoint.
        todelete_subdir=REMOVED if writes else None,
        save_root_metadata=False,
        lightweight_initialize=True,
        create=False,
        read_only=not writes,
        multiprocessing_options=alone,
    )
    return ocp.CheckpointManager(folder, item_handlers=handlers, options=options)


def _list_files(checkpoint: Path) -> None:
    """Write down the files of a finished checkpoint and their sizes."""
    sizes = {str(f.relative_to(checkpoint)): f.stat().st_size for f in checkpoint.rglob("*") if f.is_file()}
    (checkpoint / _FILES).write_text(json.dumps(sizes))


def _check_files(checkpoint: Path) -> None:
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


def _reason(error: Exception) -> str:
    """What an exception says of a checkpoint that cannot be read, for the user."""
    if isinstance(error, FileNotFoundError | KeyError):
        return "a file is missing"
    if isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error)):
        return "an array file is missing or cut short"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return textwrap.shorten(lines[0], 100, placeholder="...")


def _silence_orbax() -> None:
    """Let Orbax log nothing; errors are raised too."""
    logger = logging.getLogger("absl")
    if _is_not_orbax not in logger.filters:
        logger.addFilter(_is_not_orbax)


def _is_not_orbax(record: logging.LogRecord) -> bool:
    # Errors too: Orbax prints the traceback of every exception that it also raises.
    return f"{os.sep}orbax{os.sep}" not in record.pathname
