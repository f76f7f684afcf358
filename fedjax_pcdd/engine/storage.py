"""Where clients' state lives between rounds: on the device, or in host memory or on disk, to be fetched by cohort.

All give the same numbers; the latter two serve when clients times parameters exceed the memory of device or host.
A *slot* is the position of a row (one client of one experiment) in the state that a round sees. Each of several devices
has all rows or, if fetched from the host, the state of its own jobs; each of several processes has the rows of its own
clients.
"""

import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import is_
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.engine.mesh import SPLIT, distribute, sharding
from fedjax_pcdd.engine.program import State, Tree
from fedjax_pcdd.errors import UserError
from fedjax_pcdd.trees import on_leaves, select

Make = Callable[[int, jax.Array], Tree]  # the states of an experiment's rows [n], [n, ...]


class Portion(NamedTuple):
    """Clients that are processed together."""

    held: State  # the state, with that of these clients
    rows: np.ndarray  # [n]
    slots: np.ndarray  # [n] where they are in that state
    first: np.ndarray  # [n] whether a row occurs for the first time: portions are filled up with repeated rows


class OnDevice:
    """All rows in device memory; a row is its own slot."""

    split = False  # whether several devices divide the fetched state
    chunk = 0  # rows that are processed together, 0 for any number

    def __init__(self, rows: int, devices: int, owners: np.ndarray | None):
        """For R rows on D devices; owners: [R] the process whose devices train each, None for any."""
        self.rows, self.devices, self.owners = rows, devices, owners

    def placed(self, state: State) -> State:
        """A new state, placed where it lives between rounds."""
        return distribute(state, self.devices)

    def initial(self, make: Make, experiments: int) -> Tree:
        """State of all rows, stacked."""
        parts = [make(e, jnp.asarray(rows)) for e, rows in enumerate(self._by_experiment(experiments))]
        if experiments == 1:
            return parts[0]
        lists, structure = [jax.tree.leaves(part) for part in parts], jax.tree.structure(parts[0])
        del parts  # each leaf is freed as it is joined, so that the state is not held twice
        joined = [jnp.concatenate([leaves.pop(0) for leaves in lists]) for _ in range(structure.num_leaves)]
        return structure.unflatten(joined)

    def _by_experiment(self, experiments: int) -> list[np.ndarray]:
        return np.split(np.arange(self.rows, dtype=np.int32), experiments)

    def copied(self, state: State) -> State:
        """A copy of the state, for a simulation that changes it in place."""
        return jax.tree.map(lambda x: x.copy(), state)

    def slots(self, rows: np.ndarray) -> np.ndarray:
        """Slots of a round's jobs."""
        return rows

    def chunks(self, size: int | None = None) -> Iterator[np.ndarray]:
        """All rows, in equal portions to be processed together, of at most `size` if they live on the device.

        Each process's rows are on its devices; the last portion repeats a row to be as large as the others.
        """
        size = self.chunk or min(size or self.rows, self.rows)
        processes = 1 if self.owners is None else jax.process_count()
        owners = np.zeros(self.rows, int) if self.owners is None else self.owners
        per_process = (size + -size % self.devices) // processes
        lists = [np.flatnonzero(owners == p).astype(np.int32) for p in range(processes)]
        for start in range(0, max(map(len, lists)), per_process):
            yield np.concatenate(
                [owned[np.minimum(np.arange(start, start + per_process), len(owned) - 1)] for owned in lists]
            )

    def portions(self, state: State, size: int | None = None) -> Iterator[Portion]:
        """All clients, in the portions that `chunks` gives."""
        visited = np.zeros(self.rows, bool)
        for rows in self.chunks(size):
            first = np.zeros(len(rows), bool)
            first[np.unique(rows, return_index=True)[1]] = True
            if self.chunk or len(rows) >= self.rows:
                portion_state, slots = self.fetch(state, rows), self.slots(rows)
            else:  # some of the rows that are on the device
                portion_state = State(state.servers, *select((state.clients, state.statistics), rows))
                slots = np.arange(len(rows))
            yield Portion(portion_state, rows, slots, first & ~visited[rows])
            visited[rows] = True

    def fetch(self, state: State, rows: np.ndarray) -> State:
        """The state that a round of these rows sees."""
        return self.placed(state)

    def store(self, state: State, after: State, rows: np.ndarray, trained: np.ndarray) -> State:
        """The state after a round; rows [J], trained [J] says which of them took part."""
        return after

    def prefetch(self, state: State, rows: np.ndarray) -> None:
        """Fetch the next round's rows while the device computes this one; `store` brings them up to date."""


class Ahead(NamedTuple):
    """Clients that were fetched before the round that needs them."""

    rows: np.ndarray
    kept: tuple[Tree, Tree]  # the host arrays that the rows come from: of clients and of statistics
    held: tuple[Tree, Tree]  # clients and statistics on the device


@partial(on_leaves, donate_argnums=0)
def _replaced(held: jax.Array, new: jax.Array, *, source: jax.Array) -> jax.Array:
    """Row i becomes new[source[i]] where source[i] is not -1; `held` is donated."""
    replaced = (source >= 0).reshape(-1, *[1] * (held.ndim - 1))
    return jnp.where(replaced, new[jnp.maximum(source, 0)], held)


def _parts(array: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """Which entries of an array this process has, and their values."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        yield slice(None), np.asarray(array)
        return
    for shard in array.addressable_shards:
        yield shard.index[0], np.asarray(shard.data)


class OnHost(OnDevice):
    """All rows in numpy arrays, changed in place; the device holds those of a cohort."""

    def __init__(self, rows: int, chunk: int, devices: int = 1, owners: np.ndarray | None = None):
        """For R rows on D devices.

        Args:
          chunk: rows that are processed together, at least one of each device.
          owners: [R] the process that has each row; None if there is only one. Each process's arrays have room for all
            rows, of which only those that are written take memory or disk.
        """
        super().__init__(rows, devices, owners)
        self.chunk = -(-max(1, min(chunk, rows)) // devices) * devices
        self._own = np.arange(rows) if owners is None else np.flatnonzero(owners == jax.process_index())
        self._ahead: Ahead | None = None
        self._changed = np.zeros(rows, bool)
        self.split = devices > 1

    def initial(self, make, experiments):
        """State of all rows, stacked, made in chunks."""
        whole = None
        for e, rows in enumerate(self._by_experiment(experiments)):
            rows = np.intersect1d(rows, self._own).astype(rows.dtype)
            for start in range(0, len(rows), self.chunk):
                chunk_rows = rows[start : start + self.chunk]
                part = make(e, jnp.asarray(np.resize(chunk_rows, self.chunk)))  # of one shape, hence compiled once
                if whole is None:
                    whole = jax.tree.map(lambda x: self.array((self.rows, *x.shape[1:]), x.dtype), part)

                def write(old, new, chunk_rows=chunk_rows):
                    values = np.ascontiguousarray(np.asarray(new)[: len(chunk_rows)])
                    if values.view(np.uint8).any():  # the room has zeros already, which cost neither memory nor time
                        self.put(old, chunk_rows, values)

                jax.tree.map(write, whole, part)
                self.release()
        return whole

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array of zeros with room for rows."""
        return np.zeros(shape, dtype)

    def get(self, array: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """A copy of some rows of what `array` made."""
        return array[rows]

    def put(self, array: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
        """Write these rows."""
        array[rows] = values

    def release(self) -> None:
        """Let what was read and written leave memory."""

    def changed(self) -> np.ndarray:
        """Rows that trained since the last call, in order."""
        rows = np.flatnonzero(self._changed)
        self._changed[:] = False
        return rows

    def placed(self, state):
        """A new state: the server on the devices, the clients in host memory."""
        return state._replace(servers=distribute(state.servers, self.devices))

    def slots(self, rows):
        """Slots of a round's jobs: one for each."""
        return np.arange(len(rows), dtype=np.int32)

    def fetch(self, state, rows):
        """The state with the clients of these rows alone, on the device."""
        ahead = self._ahead
        sources = state.clients, state.statistics
        if ahead and all(map(is_, ahead.kept, sources)) and np.array_equal(ahead.rows, rows):
            (clients, statistics), self._ahead = ahead.held, None
        else:
            clients, statistics = self._gather(state, rows)
        return State(distribute(state.servers, self.devices), clients, statistics)

    def _gather(self, state: State, rows: np.ndarray) -> tuple[Tree, Tree]:
        def of_devices(x: np.ndarray) -> jax.Array:
            shape, target = (len(rows), *x.shape[1:]), sharding(self.devices, SPLIT)
            assert target is not None
            read = lambda index: self.get(x, rows[(index or (slice(None),))[0]])  # noqa: E731
            return jax.make_array_from_callback(shape, target, read)

        gather = of_devices if self.devices > 1 else lambda x: jnp.asarray(self.get(x, rows))
        fetched = jax.tree.map(gather, (state.clients, state.statistics))
        self.release()
        return fetched

    def prefetch(self, state, rows):
        """Fetch the next round's rows while the device computes this one; `store` brings them up to date."""
        self._ahead = Ahead(rows, (state.clients, state.statistics), self._gather(state, rows))

    def store(self, state, after, rows, trained):
        """The state after a round: rows that took part are written to host memory, which waits for the round."""

        def write(old, value):
            for part, values in _parts(value):
                mask = trained[part]
                self.put(old, rows[part][mask], values if mask.all() else values[mask])
            return old

        new = after.clients, after.statistics
        clients, statistics = jax.tree.map(write, (state.clients, state.statistics), new)
        self._changed[rows[trained]] = True
        self.release()
        if ahead := self._ahead:  # rows that were trained meanwhile are replaced by their new state
            source = np.full(self.rows, -1, np.int32)
            source[rows[trained]] = np.flatnonzero(trained)
            source = source[ahead.rows]
            held = _replaced(ahead.held, new, source=source) if (source >= 0).any() else ahead.held
            self._ahead = ahead._replace(kept=(clients, statistics), held=held)
        return State(after.servers, clients, statistics)


def _no_room(size: int, error: OSError) -> UserError:
    return UserError(
        f"{tempfile.gettempdir()} has no room for {size / 1e6:.0f} MB of clients' state ({error.strerror}): set TMPDIR "
        "to a folder on a larger disk, and resume the run if it had begun."
    )


class OnDisk(OnHost):
    """All rows in files that are mapped into memory and vanish with the process; what must last is in checkpoints.

    They are where Python puts temporary files (`TMPDIR`). A cohort's rows are read and written by file operations, as
    these cost less than the page faults of the mapping.
    """

    _files: ClassVar[weakref.WeakKeyDictionary[mmap.mmap, int]] = weakref.WeakKeyDictionary()  # of all simulations, as
    # these take over each other's states

    def array(self, shape, dtype):
        """Room for rows in a file; UserError where the disk has none."""
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if not size:
            return np.empty(shape, dtype)
        with tempfile.TemporaryFile() as file:
            try:
                file.truncate(size)
                row_size, first, last = size // self.rows, self._own.min(initial=self.rows), self._own.max(initial=-1)
                # A disk that filled up later would end the process; macOS cannot reserve.
                if last >= first and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), int(first) * row_size, int(last + 1 - first) * row_size)
            except OSError as error:
                raise _no_room(size, error) from None
            memory, descriptor = mmap.mmap(file.fileno(), size), os.dup(file.fileno())
        memory.madvise(mmap.MADV_RANDOM)  # else rows around each one would be read as well
        self._files[memory] = descriptor
        weakref.finalize(memory, os.close, descriptor)
        return np.frombuffer(memory, dtype).reshape(shape)

    def copied(self, state):
        """The state, with the clients in files of their own."""

        def copy(array):
            new = self.array(array.shape, array.dtype)
            for rows in np.array_split(self._own, max(1, -(-len(self._own) // self.chunk))):
                self.put(new, rows, self.get(array, rows))
            self.release()
            return new

        clients, statistics = jax.tree.map(copy, (state.clients, state.statistics))
        return State(jax.tree.map(lambda x: x.copy(), state.servers), clients, statistics)

    def get(self, array, rows):
        """Some rows, read from the file."""
        values = np.empty((len(rows), *array.shape[1:]), array.dtype)
        self._transfer(lambda file, value, offset: os.preadv(file, [value], offset), array, rows, values)
        return values

    def put(self, array, rows, values):
        """Write them to the file; UserError where the disk is full."""
        try:
            self._transfer(os.pwrite, array, rows, np.ascontiguousarray(values))
        except OSError as error:  # on file systems that reserve no room before writing
            raise _no_room(array.nbytes, error) from None

    def _transfer(
        self, call: Callable[[int, memoryview, int], int], array: np.ndarray, rows: np.ndarray, values: np.ndarray
    ) -> None:
        """Call with the file, the bytes of each row and their offset in the file, until all are read or written."""
        if not values.size:
            return
        file, width, content = self._file(array), array.nbytes // len(array), values.reshape(-1).view(np.uint8).data
        for i, row in enumerate(rows.tolist()):
            value, offset = content[i * width : (i + 1) * width], row * width
            while value:
                done = call(file, value, offset)
                value, offset = value[done:], offset + done

    def _file(self, array: np.ndarray) -> int:
        memory: Any = array
        while not isinstance(memory, mmap.mmap):
            memory = memory.obj if isinstance(memory, memoryview) else memory.base
        return self._files[memory]

    def release(self):
        """Let what was read and written leave memory: the file has it."""
        for reference in self._files.keyrefs():  # at once, as another thread may make a state meanwhile
            if memory := reference():
                memory.madvise(mmap.MADV_DONTNEED)  # of a file: written pages stay in the system's cache
