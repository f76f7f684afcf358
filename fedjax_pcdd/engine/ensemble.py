"""What the models of all clients give together: the answer of their ensemble, and the mean of what they keep.

Clients are looked at in portions, as they are fetched, so both are sums over the clients of one portion.
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
      state: its clients and statistics are those of the rows, [n, ...], or on several devices found by the slots.
      rows, slots: [n].
      live: [n] booleans, which of them count.
    """

    def sums(methods, state, data, entries):
        def batch(index):
            images = prepare(program.pipeline, data.test.images[index], None, train=False, dtype=program.dtype)

            def one(entry):
                client, counts = entry
                logits = personal_logits(program, methods, state, data, client, "local")(images)
                return jnp.where(counts, jax.nn.softmax(logits), 0)

            rows, live = entries
            each = by_client(program, one, ((rows, state.clients, state.statistics), live))  # [n, B, C]
            of = rows // program.setting.num_clients
            return jax.ops.segment_sum(each, of, program.experiments).swapaxes(0, 1)

        images = data.test.labels.shape[0]
        return over_all(batch, images, program.eval_batch_of(program.blocks.size)).swapaxes(0, 1)

    return over_rows(sums, summed, program, methods, state, data, (rows, live), slots)


def ensemble_correct(program: Program, sums: jax.Array, data: Data) -> jax.Array:
    """Correct predictions [E, C] of the ensembles from their sums [E, N, C], whose largest entry is the answer."""
    labels = data.test.labels
    return jax.vmap(lambda one: tally(program, one, labels, jnp.ones(labels.shape, bool)))(sums)


@jax.jit
def _kept_sums(statistics: Tree, slots: jax.Array, shares: jax.Array) -> Tree:
    """Sums over the clients in some slots [n], each times its share [E, n]."""
    return jax.tree.map(lambda x: jnp.tensordot(shares.astype(x.dtype), x[slots], 1), statistics)


def mean_kept(portions: Iterable[Portion], weights: np.ndarray) -> Tree:
    """The mean of the layers and running statistics that clients keep, [E, ...], weighted by [E, K]."""
    shares = weights / weights.sum(1, keepdims=True)
    by_row = np.einsum("ek,ed->edk", shares, np.eye(len(shares))).reshape(len(shares), -1)  # [E, R]

    def part(held, rows, slots, first):
        models = {name: tree for name, tree in held.statistics.items() if name != OPTIMISER}
        return _kept_sums(models, slots, by_row[:, rows] * first)

    return total(part(*portion) for portion in portions)
