"""Results over the models of all clients: the predictions of their ensemble, and the mean of what clients keep.

Clients are processed in portions, as they are fetched, so both are sums over the clients of one portion.
"""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.engine.devices import full_precision
from fedjax_pcdd.engine.evaluation import by_client, over_rows, personal_logits, tally
from fedjax_pcdd.engine.mesh import summed
from fedjax_pcdd.engine.program import OPTIMISER, Data, Program, State, Tree
from fedjax_pcdd.engine.storage import Portion
from fedjax_pcdd.methods.participant import over_all
from fedjax_pcdd.trees import total


@full_precision
def softmax_sums(program: Program, methods, state: State, data: Data, rows, slots, live) -> jax.Array:
    """Sums of the personal models' softmax outputs on the whole test set, [E, N, C].

    Args:
      state: its clients and statistics are those of the rows, [n, ...]; on several devices the slots locate them.
      rows, slots: [n].
      live: [n] booleans, which of the rows count.
    """

    def sums(methods, state, data, entries):
        def batch(index):
            images = prepare(program.pipeline, data.test.images[index], None, train=False, dtype=program.dtype)

            def client_softmax(entry):
                client, counts = entry
                logits = personal_logits(program, methods, state, data, client, "local")(images)
                return jnp.where(counts, jax.nn.softmax(logits), 0)

            rows, live = entries
            outputs = by_client(program, client_softmax, ((rows, state.clients, state.statistics), live))  # [n, B, C]
            experiment = rows // program.setting.num_clients
            return jax.ops.segment_sum(outputs, experiment, program.experiments).swapaxes(0, 1)

        images = data.test.labels.shape[0]
        return over_all(batch, images, program.eval_batch_of(program.blocks.size)).swapaxes(0, 1)

    return over_rows(sums, summed, program, methods, state, data, (rows, live), slots)


def ensemble_correct(program: Program, sums: jax.Array, data: Data) -> jax.Array:
    """Correct predictions [E, C] of the ensembles from their sums [E, N, C]; the largest entry is the prediction."""
    labels = data.test.labels
    return jax.vmap(lambda scores: tally(program, scores, labels, jnp.ones(labels.shape, bool)))(sums)


@jax.jit
@full_precision
def _kept_sums(statistics: Tree, slots: jax.Array, shares: jax.Array) -> Tree:
    """Sums over the clients in some slots [n], each weighted by its share [E, n]."""
    return jax.tree.map(lambda x: jnp.tensordot(shares.astype(x.dtype), x[slots], 1), statistics)


def mean_kept(portions: Iterable[Portion], weights: np.ndarray) -> Tree:
    """The mean of the layers and running statistics that clients keep, [E, ...], weighted by [E, K]."""
    shares = weights / weights.sum(1, keepdims=True)
    by_row = np.einsum("ek,ed->edk", shares, np.eye(len(shares))).reshape(len(shares), -1)  # [E, R]
    return total(
        _kept_sums({k: v for k, v in held.statistics.items() if k != OPTIMISER}, slots, by_row[:, rows] * first)
        for held, rows, slots, first in portions
    )
