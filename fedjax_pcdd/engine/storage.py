"""Where the clients' state lives between rounds: on the device, or in host memory, from which a cohort is fetched.

Both give the same numbers; host memory serves when clients times parameters outgrow the device. A *slot* is the place
of a row (one client of one experiment) in the state that a round sees. On several devices every one has all rows, or,
from host memory, the state of its own jobs; in several processes each host has all rows, and each device the cohort's.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.engine.mesh import EVERYWHERE, SPLIT, place
from fedjax_pcdd.engine.program import State, Tree


class OnDevice:
    """All rows in device memory; a row is its own slot."""

    split = False  # whether several devices divide what is fetched

    def __init__(self, rows: int, devices: int = 1):
        """Args: rows: R; devices: D."""
        self.rows, self.devices = rows, devices

    @property
    def spec(self):
        """How what is fetched lies on several devices."""
        return SPLIT if self.split else EVERYWHERE

    def placed(self, state: State) -> State:
        """A new state where it lives between rounds."""
        return place(state, self.devices)

    def initial(self, make: Callable[[jax.Array], Tree], rows: np.ndarray) -> Tree:
        """State of the rows, stacked; `make` gives that of one."""
        return jax.jit(jax.vmap(make))(jnp.asarray(rows))

    def concatenate(self, parts: list[Tree]) -> Tree:
        """The states of all experiments one after another."""
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)

    def slots(self, rows: np.ndarray) -> np.ndarray:
        """Slots of a round's jobs."""
        return rows

    def chunks(self) -> Iterator[np.ndarray]:
        """All rows, in the portions in which they can be looked at."""
        rows = np.arange(self.rows, dtype=np.int32)
        yield np.append(rows, np.zeros(-self.rows % self.devices, np.int32))

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
    kept: Tree  # the host arrays of which they are rows
    held: tuple[Tree, Tree]  # clients and statistics on the device


@jax.jit
def _replaced(held: Tree, new: Tree, source: np.ndarray) -> Tree:
    """Row i becomes new[source[i]] where that is not -1."""

    def replace(old, new):
        chosen = (source >= 0).reshape(-1, *[1] * (old.ndim - 1))
        return jnp.where(chosen, new[jnp.maximum(source, 0)], old)

    return jax.tree.map(replace, held, new)


class OnHost(OnDevice):
    """All rows in numpy arrays, changed in place; the device holds those of a cohort."""

    def __init__(self, rows: int, chunk: int, devices: int = 1):
        """Args: rows: R; chunk: rows that are looked at together, at least one of each device; devices: D."""
        super().__init__(rows, devices)
        self.chunk = -(-max(1, min(chunk, rows)) // devices) * devices
        self._ahead: Ahead | None = None
        self.split = devices > 1 and jax.process_count() == 1

    def initial(self, make, rows):
        """State of the rows, stacked, made in chunks."""
        lifted, whole = jax.jit(jax.vmap(make)), None
        for start, chunk in zip(range(0, len(rows), self.chunk), self._split(rows), strict=True):
            part = lifted(jnp.asarray(chunk))
            if whole is None:
                whole = jax.tree.map(lambda x: np.empty((len(rows), *x.shape[1:]), x.dtype), part)
            here = slice(start, min(start + self.chunk, len(rows)))

            def write(old, new, here=here):
                old[here] = np.asarray(new)[: here.stop - here.start]

            jax.tree.map(write, whole, part)
        return whole

    def concatenate(self, parts):
        """The states of all experiments one after another."""
        return parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: np.concatenate(x), *parts)

    def placed(self, state):
        """A new state: the server on the devices, the clients in host memory."""
        return state._replace(servers=place(state.servers, self.devices))

    def slots(self, rows):
        """Slots of a round's jobs: one for each."""
        return np.arange(len(rows), dtype=np.int32)

    def chunks(self):
        """All rows in chunks; the last is filled up with row 0."""
        yield from self._split(np.arange(self.rows, dtype=np.int32))

    def fetch(self, state, rows):
        """The state with the clients of these rows alone, on the device."""
        ahead = self._ahead
        if ahead is not None and ahead.kept is state.clients and np.array_equal(ahead.rows, rows):
            (clients, statistics), self._ahead = ahead.held, None
        else:
            clients, statistics = self._gather(state, rows)
        return State(place(state.servers, self.devices), clients, statistics)

    def _gather(self, state: State, rows: np.ndarray) -> tuple[Tree, Tree]:
        held = jax.tree.map(lambda x: x[rows], (state.clients, state.statistics))
        return place(held, self.devices, self.spec) if self.devices > 1 else jax.tree.map(jnp.asarray, held)

    def prefetch(self, state, rows):
        """Fetch the next round's rows while the device computes this one; `store` brings them up to date."""
        self._ahead = Ahead(rows, state.clients, self._gather(state, rows))

    def store(self, state, after, rows, trained):
        """The state after a round: rows that took part are written to host memory, which waits for the round."""

        def scatter(tree, new):
            def write(old, value):
                old[rows[trained]] = np.asarray(value)[trained]
                return old

            return jax.tree.map(write, tree, new)

        clients, statistics = scatter(state.clients, after.clients), scatter(state.statistics, after.statistics)
        if self._ahead:
            self._ahead = self._patched(self._ahead, clients, (after.clients, after.statistics), rows, trained)
        return State(after.servers, clients, statistics)

    def _patched(self, ahead: Ahead, kept: Tree, new: Tree, rows: np.ndarray, trained: np.ndarray) -> Ahead:
        """Rows fetched ahead, those that were being trained meanwhile replaced by their new state [J, ...]."""
        source = np.full(self.rows, -1, np.int32)
        source[rows[trained]] = np.flatnonzero(trained)
        source = source[ahead.rows]
        return ahead._replace(kept=kept, held=_replaced(ahead.held, new, source) if (source >= 0).any() else ahead.held)

    def _split(self, rows: np.ndarray) -> Iterator[np.ndarray]:
        for start in range(0, len(rows), self.chunk):
            part = rows[start : start + self.chunk]
            yield np.concatenate([part, np.full(self.chunk - len(part), rows[0], part.dtype)])
