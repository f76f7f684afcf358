"""Checkpoints of a run: written by Orbax in the background, checked byte by byte when they are read.

A checkpoint of round `r` (the number of completed rounds) is the folder `<folder>/<r>` with up to three items: `server`
and `clients` (arrays by name) and `record` (JSON: round, history, and name, dtype, shape and CRC-32 of every array).
It is *full* when it holds the clients; the others are server-only: good for evaluation, not for resuming.

Orbax writes synchronously in one worker thread of ours. Its own asynchronous mode blocks the caller for 12 to 30 ms
(2-core CPU, small model), since it prepares folders and files before it returns; here it is 1 ms, for the copy of the
arrays. Its checksums do not cover the arrays' bytes: hence the CRCs. Only one run at a time may open a folder. In a run
of several processes the first writes; if each process holds only its own clients' states, each writes and reads those.
"""

import json
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from fedjax_pcdd.errors import Say, UserError, failed_write, writing
from fedjax_pcdd.training.client_log import Changed, ClientLog
from fedjax_pcdd.training.hosts import in_turn, told_by_first
from fedjax_pcdd.training.named_arrays import Arrays, difference, fill, fingerprint, named, snapshot
from fedjax_pcdd.training.orbax_folder import REMOVED, check_files, damage, list_files, open_manager, remove_unfinished

_RESTS = 9  # a rest after paced checkpoints, in times of their duration
_MISREAD = re.compile(r"[]\[*?\\:%#\ud800-\udfff]")  # read as patterns or addresses, or not UTF-8

# Of client states: the changed rows, their values [n, ...], what other processes have written, and the states of all.
_Taken = tuple[np.ndarray, list[np.ndarray], list[list[int]], Any]


class Restored(NamedTuple):
    """The content of a restored checkpoint."""

    round: int
    server: Any
    clients: Any
    history: dict[str, Any]


class Pace:
    """When checkpoints are due: after every round, unless writing them would then take more than a tenth of the time.

    Experiments that train together share one, so that they have checkpoints of the same rounds.
    """

    def __init__(self):
        self._lock, self._writing, self._failed = Lock(), 0, False
        self._started, self._next_time = (-1, 0.0), 0.0  # round and time of the newest checkpoints' start
        self._asked = (-1, False)  # a round, and whether it gets checkpoints

    def is_due(self, round: int) -> bool:
        """Whether a round gets checkpoints; the first who asks decides for all."""
        with self._lock:
            if round != self._asked[0]:
                rested = not self._writing and perf_counter() >= self._next_time
                self._asked = round, rested or self._failed
                self._failed = False
            return self._asked[1]

    def begin(self, round: int, time: float) -> None:
        """A checkpoint is being written, for which the training had to stop at a time."""
        with self._lock:
            self._writing += 1
            self._started = self._started if round == self._started[0] else (round, time)

    def end(self, write: Future) -> None:
        """One is written, or has failed; then the next round has one, too, to report it."""
        failed = write.exception() is not None
        with self._lock:
            self._writing, self._failed, time = self._writing - 1, self._failed or failed, perf_counter()
            self._next_time = time + _RESTS * (time - self._started[1])


class Checkpoints:
    """The checkpoints of one run; close it, or use it in a `with` block, so that the last one is written."""

    def __init__(
        self, folder: Path, *, keep: int = 3, every: int | Pace = 1, clients_every: int = 1, read_only: bool = False,
        say: Say = lambda sentence: print(sentence, file=sys.stderr),
    ):  # fmt: skip
        """Open or create the folder, and remove what a killed process left half-written or half-removed.

        Args:
          folder: where the checkpoints live; one process at a time.
          keep: how many of the newest checkpoints to keep; the two newest full ones are always kept.
          every: rounds between checkpoints, or their pace; several processes, which would have to agree when one is
            due, write every round instead.
          clients_every: every n-th checkpoint is full, and all are if clients keep nothing; of paced ones the first is.
            A resume starts from a full one, so with a number of rounds between checkpoints it repeats up to
            `every * clients_every - 1` rounds; each full one writes all clients' states.
          read_only: leave the folder as it is.
          say: called with sentences that the user should know.

        Raises:
          UserError: the folder cannot be created or read.
        """
        self._folder = Path(folder).absolute()
        self._pace = every if isinstance(every, Pace) and jax.process_count() == 1 else None
        self._every = 1 if isinstance(every, Pace) else every
        self._clients_every, self._keep, self._say, self._saved = clients_every, keep, say, 0
        self._full: set[int] = set()
        self._pending: Future | None = None
        self._worker = ThreadPoolExecutor(1, "checkpoint")
        self._writes = jax.process_index() == 0 and not read_only
        self._log, self._logs_all = ClientLog(self._folder.parent / "clients"), False
        self._shared = False  # whether all processes know the log's folder
        self._manager: Any = None
        self._alias: tempfile.TemporaryDirectory | None = None  # another path to the folder, in plain characters
        if self._writes or read_only:
            self._open()

    def _open(self) -> None:
        with writing(self._folder):
            if _MISREAD.search(str(self._folder)) and self._alias is None:
                self._alias = tempfile.TemporaryDirectory()
                Path(self._alias.name, "checkpoints").symlink_to(self._folder)
            alias = self._folder if self._alias is None else Path(self._alias.name, "checkpoints")
            self._manager = open_manager(self._folder, alias, self if self._writes else None)
        self._full.update(r for r in self._manager.all_steps() if self._is_full(r))

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Tell Orbax which checkpoints to keep: the `keep` newest and the two newest full ones."""
        del context
        rounds = sorted(info.step for info in checkpoints)
        kept_rounds = {*rounds[-self._keep :], *[r for r in rounds if r in self._full][-2:]}
        return [info.step in kept_rounds for info in checkpoints]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def is_due(self, round: int) -> bool:
        """Whether a round gets a checkpoint even without `force`."""
        return self._pace.is_due(round) if self._pace else round % self._every == 0

    def save(
        self, round: int, server: Any, clients: Any, history: str, *, force: bool = False, started: float | None = None
    ) -> None:
        """Take a snapshot of the arrays, which may be donated as soon as this returns, and write it in the background.

        Waits for the previous checkpoint if that is still being written.

        Args:
          round: completed rounds.
          server: pytree of arrays.
          clients: pytree of arrays, `()` if clients keep nothing; not written if the checkpoint is not full. A function
            instead returns what has `Changed` since its last call, which goes into the log.
          history: JSON text; `restore` returns its parsed content.
          force: write a full checkpoint now, whatever `every` and `clients_every` say.
          started: `perf_counter()` when the training stopped for this checkpoint, if that was before this call.

        Raises:
          UserError: this or the previous checkpoint could not be written (no space left, for example).
        """
        if not (self.is_due(round) or force):
            return
        number = self._saved if self._pace else round // self._every
        self._saved += 1
        full = force or number % self._clients_every == 0 or not jax.tree.leaves(clients)
        changed = self._taken(round, clients) if full and callable(clients) else None
        if not self._writes:
            return
        self.wait()
        if round in self._manager.all_steps() and (round in self._full or not full):
            return
        started = perf_counter() if started is None else started
        snapshots = {"server": snapshot("server", server)}
        if full:
            snapshots["clients"] = {} if changed else snapshot("clients", clients)
        if self._pace:
            self._pace.begin(round, started)
        self._pending = self._worker.submit(self._write, round, snapshots, history, changed)
        if self._pace:
            self._pending.add_done_callback(self._pace.end)

    def _taken(self, round: int, clients: Callable) -> _Taken:
        """The changed states of this process's clients; if there are other processes, those write theirs now."""
        (rows, states, owners), process = cast(Changed, clients()), jax.process_index()
        if self._logs_all:  # the log has nothing of the checkpoint that was resumed
            rows, self._logs_all = np.arange(len(jax.tree.leaves(states)[0])), False
        rows = rows if owners is None else rows[owners[rows] == process]
        values = [leaf[rows] for leaf in jax.tree.leaves(states)]  # copies
        if owners is None:
            return rows, values, [], states
        if not self._shared:  # the others have run folders of their own and would write there
            self._log, self._shared = ClientLog(Path(told_by_first(str(self._log.folder)))), True
        checksums = [0] * (1 + len(values))  # the first process writes the entry itself
        if process > 0:
            with writing(self._log.folder):
                checksums = self._log.append_part(round, process, rows, values)
        parts = np.asarray(multihost_utils.process_allgather(np.array(checksums, np.uint32)))[1:]
        return rows, values, parts.tolist(), states

    def restore(self, server_like: Any, clients_like: Any) -> Restored | None:
        """The newest intact full checkpoint, bit for bit; every newer one is removed, to be written again.

        Args:
          server_like: pytree of arrays or `jax.ShapeDtypeStruct` with the wanted shapes, dtypes, shardings.
          clients_like: the same for the clients; if the checkpoint has them in its log, their initial numpy arrays,
            which are brought up to date in place.

        Returns:
          None if the folder holds no full checkpoint. Leaves are jax arrays, or numpy arrays where the template has
          numpy arrays.

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
                    self._say(f"no full checkpoint in {self._folder}: starting from round 0.")
                self._discard_after(0 if restored is None else restored.round)
            return restored

    def newest_record(self) -> dict[str, Any] | None:
        """The history in the newest full checkpoint whose record is intact; None if there is no such checkpoint."""
        newest = self.newest_full
        return None if newest is None else self._record(newest)["history"]

    @property
    def newest_full(self) -> int | None:
        """The round that a resume would go back to, if no file is damaged; None if that is the start."""
        self.wait()
        return max(self._full, default=None)

    def wait(self) -> None:
        """Return once nothing is being written; UserError if the write failed."""
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

    def _write(self, round: int, snapshots: dict[str, Arrays], history: str, changed: _Taken | None) -> None:
        record: dict[str, Any] = {"round": round}
        if changed:
            rows, values, parts, states = changed
            record["logged"] = self._log.append(round, rows, values, parts)
            self._log.merge(min(self._manager.all_steps(), default=0), states)
        host_arrays = {part: {name: np.asarray(a) for name, a in arrays.items()} for part, arrays in snapshots.items()}
        record["arrays"] = {
            part: {name: fingerprint(a) for name, a in arrays.items()} for part, arrays in host_arrays.items()
        }
        content = f'{json.dumps(record)[:-1]}, "history": {history}}}'
        items: dict[str, Any] = {"record": ocp.args.JsonSave({"content": content, "crc": zlib.crc32(content.encode())})}
        for part, arrays in host_arrays.items():
            if stored := {name: a for name, a in arrays.items() if a.size}:
                items[part] = ocp.args.PyTreeSave(stored)
        if round in self._manager.all_steps():
            self._manager.delete(round)
        if "clients" in snapshots:
            self._full.add(round)  # before it is written, as Orbax then asks which ones to keep
        try:
            self._manager.save(round, args=ocp.args.Composite(**items), force=True)
        except BaseException:
            self._full.discard(round)
            remove_unfinished(self._folder)
            raise
        list_files(self._folder / str(round))
        shutil.rmtree(self._folder / REMOVED, ignore_errors=True)

    def _newest(self, like: dict[str, Any]) -> Restored | None:
        self.wait()
        damaged: dict[int, str] = {}
        for round in sorted(self._manager.all_steps(), reverse=True):
            try:
                check_files(self._folder / str(round))
                record = self._record(round)
                if not like.keys() <= record["arrays"].keys():
                    continue
                if logged := "logged" in record:
                    mark = record["logged"]
                    self._log.check(round, None if mark is True else mark)  # True: written when entries had no marks
                templates = like | {"clients": ()} if logged else like
                arrays = self._load(round, record["arrays"], templates)
            except (UserError, MemoryError, PermissionError):
                raise
            # Damage can surface as almost any exception of Orbax, TensorStore or the decoders.
            except Exception as error:
                damaged[round] = damage(error)
                continue
            use = "continuing from" if self._writes else "using"
            for bad, reason in damaged.items():
                self._say(f"checkpoint of round {bad} is damaged ({reason}): {use} round {round}.")
            trees = {part: fill(part, template, arrays[part]) for part, template in templates.items()}
            self._logs_all = not logged
            if logged:
                self._log.replay(round, like["clients"])
                trees["clients"] = like["clients"]
            return Restored(round, trees["server"], trees["clients"], record["history"])
        if damaged:
            rounds = "; ".join(f"round {bad}: {reason}" for bad, reason in damaged.items())
            raise UserError(f"no checkpoint in {self._folder} is intact ({rounds}): start a new run.")
        return None

    def _record(self, round: int) -> dict[str, Any]:
        saved = self._manager.restore(round, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
        if zlib.crc32(saved["content"].encode()) != saved["crc"]:
            raise ValueError("its record fails its checksum")
        record = json.loads(saved["content"])
        if record.get("round", round) != round:
            raise ValueError(f"it is that of round {record['round']}")
        return record

    def _is_full(self, round: int) -> bool:
        try:
            return "clients" in self._record(round)["arrays"]
        # A damaged checkpoint is reported when it is restored; here it only must not count as a full one.
        except Exception:
            return False

    def _load(self, round: int, inventory: dict[str, Any], like: dict[str, Any]) -> dict[str, Arrays]:
        requests: dict[str, Any] = {}
        for part, template in like.items():
            if different := difference(inventory[part], named(part, template)):
                raise UserError(
                    f"the checkpoint of round {round} in {self._folder} was written by another configuration "
                    f"({different}): resume with the configuration and the version that it was started with."
                )
            if stored := [name for name, (_, shape, _) in inventory[part].items() if 0 not in shape]:
                as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in stored}
                requests[part] = ocp.args.PyTreeRestore(restore_args=as_numpy)
        stored = self._manager.restore(round, args=ocp.args.Composite(**requests)) if requests else {}
        arrays = {part: stored[part] if part in requests else {} for part in like}
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
