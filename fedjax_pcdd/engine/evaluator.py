"""Tests of a state between rounds: of each experiment's global models and ensemble, and of every personal model.

Letters: E experiments, K clients, R = E * K rows, C classes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.engine.devices import full_precision
from fedjax_pcdd.engine.evaluation import ensemble_correct, generic_correct, personal_correct, softmax_sums
from fedjax_pcdd.engine.executables import compiled
from fedjax_pcdd.engine.mesh import distribute
from fedjax_pcdd.engine.program import OPTIMISER, Data, Evaluation, Program, State, Tree
from fedjax_pcdd.engine.storage import OnDevice, Portion
from fedjax_pcdd.engine.streaming import Streamed
from fedjax_pcdd.trees import total


@jax.jit
@full_precision
def _kept_sums(statistics: Tree, slots: jax.Array, shares: jax.Array) -> Tree:
    """Sums over the clients in some slots [n], each weighted by its share [E, n].

    What has no share, as the clients of other experiments, may be NaN, which a weight of 0 does not remove.
    """

    def weighted(share):
        def add(x):
            has_share = share.reshape(-1, *[1] * (x.ndim - 1)) != 0
            return jnp.tensordot(share.astype(x.dtype), jnp.where(has_share, x[slots], 0), 1)

        return jax.tree.map(add, statistics)

    return jax.lax.map(weighted, shares)  # one experiment at a time, as each masks a copy of all


def _paced(results: Iterable[Tree]) -> Iterator[Tree]:
    """The results, of which at most two are being computed, so that memory holds the samples of two."""
    former = ()
    for result in results:
        jax.block_until_ready(former)
        yield (former := result)


@dataclass
class Evaluator:
    """Counts correct predictions, with four compiled functions.

    Attributes:
      methods: [E, ...] as configured.
      weights: [E, K] of the clients in means over all clients, 0 for those that never train.
      cohort: S, the most clients processed together where samples are streamed and states are on the device.
    """

    program: Program
    methods: Tree
    data: Data
    storage: OnDevice
    streamed: Streamed | None
    weights: np.ndarray
    cohort: int

    def __post_init__(self):
        self.generic_correct = compiled(generic_correct, self.program)
        self.softmax_sums = compiled(softmax_sums, self.program)
        self.ensemble_correct = compiled(ensemble_correct, self.program)
        self.personal_correct = compiled(personal_correct, self.program, static_argnums=0)

    def evaluate(self, state: State, *, personal: bool = False) -> Evaluation:
        """All counts of a state; if `personal`, also those of every client's personal model on its own data."""
        generic, further = self.general(state)
        local = () if self.methods.traits().global_model else self.personal(state, own=False)
        return Evaluation(generic, self.personal(state) if personal else (), local, further)

    def general(self, state: State) -> tuple[Any, dict[str, Any]]:
        """Correct predictions of the global models and ensembles: `generic` and `further` of an `Evaluation`."""
        batch, layers = self.program.eval_batch_of(self.program.experiments), self.mean_layers(state)
        counts = (self.generic_correct(self.methods, state.servers, layers, data) for data in self._whole_test(batch))
        generic, further = total(_paced(counts))
        if self.methods.traits().ensemble:
            further = {**further, "ensemble": self._ensemble(state)}
        return generic, further

    def personal(self, state: State, *, own: bool = True) -> np.ndarray:
        """Correct predictions [R, C] of all personal models, each on its client's own tests or on all test samples."""
        correct = np.zeros((self.storage.rows, self.program.counts), np.int32)
        for fetched, rows, slots, _ in self._portions(state):
            batch = self.program.eval_batch_of(self.program.blocks.size)
            tests = [self.streamed.of_tests(rows)] if self.streamed and own else self._whole_test(batch)
            counts = (self.personal_correct(own, self.methods, fetched, data, rows, slots) for data in tests)
            correct[rows] = np.asarray(total(_paced(counts)))
        return correct

    def mean_layers(self, state: State) -> Tree:
        """The mean over all clients of the layers and statistics that they keep, [E, ...]; () without own layers."""
        if not self.program.setting.own_layers:
            return ()
        shares = self.weights / self.weights.sum(1, keepdims=True)
        by_row = np.einsum("ek,ed->edk", shares, np.eye(len(shares))).reshape(len(shares), -1)  # [E, R]
        sums = (
            _kept_sums({k: v for k, v in held.statistics.items() if k != OPTIMISER}, slots, by_row[:, rows] * first)
            for held, rows, slots, first in self._portions(state)
        )
        return distribute(total(_paced(sums)), self.program.devices)

    def _ensemble(self, state: State) -> jax.Array:
        """Correct predictions [E, C] of the mean of all clients' softmax outputs."""
        batch = self.program.eval_batch_of(self.program.blocks.size)

        def sums(fetched, rows, slots, first):
            tests = self._whole_test(batch)
            return list(_paced(self.softmax_sums(self.methods, fetched, data, rows, slots, first) for data in tests))

        chunks = zip(total(starmap(sums, self._portions(state))), self._whole_test(batch), strict=True)
        return total(_paced(self.ensemble_correct(*chunk) for chunk in chunks))

    def _whole_test(self, batch: int) -> Iterable[Data]:
        return self.streamed.whole_test(batch) if self.streamed else [self.data]

    def _portions(self, state: State) -> Iterator[Portion]:
        """All clients, as many at a time as fit the device."""
        if self.streamed is None:
            return self.storage.portions(state)
        client_arrays = jax.tree.leaves((state.clients, state.statistics))
        return self.storage.portions(state, self.cohort if client_arrays else self.streamed.tested_rows(self.cohort))
