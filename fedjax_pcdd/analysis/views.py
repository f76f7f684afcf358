"""Views of one model for the analyses: its class vectors, the mean features of classes, features of samples.

A model with a simplex ETF has no trained head; its class vectors are those of the ETF, and its features are normalised,
as the ETF only depends on their direction. All passes are in eval mode, over images without augmentation.
Letters: C classes, D features, B samples.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_pcdd.data.augment import prepare
from fedjax_pcdd.engine.blocks import Pass
from fedjax_pcdd.engine.evaluation import client_batches
from fedjax_pcdd.engine.program import Program, Samples, Tree, start_of, sum_over_samples
from fedjax_pcdd.losses.logit_adjustment import l2_normalise
from fedjax_pcdd.losses.prototypes import class_sums
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.models.pair import Pair, part

PROBE = 128  # B in FedMR, the paper whose spectra are compared
PROBES = 10


class View(NamedTuple):
    """One model, and the samples used to analyse it.

    Attributes:
      program: the static parts, such as model, pipeline and setting.
      server: the server's state, which may hold a fixed classifier.
      variables: of the model.
      logits: a function of prepared images that returns the model's logits [B, C] as the method defines them.
      samples: a split of the data set.
      row: the client whose samples are used; None for those of all clients, each once.
      present: [C] bool, classes that the client has in training; [S, C] for a global model, of S clients.
      tests: all test samples, for a client's model.
      steps: `Steps` of its local training, for quantities that are `of_steps`; None between rounds.
    """

    program: Program
    server: Tree
    variables: Tree
    logits: Callable[[jax.Array], jax.Array]
    samples: Samples
    row: Any
    present: jax.Array
    tests: Samples | None = None
    steps: Any = None


def own_params(view: View) -> Tree:
    """Parameters of the model, of two models those of the private one."""
    variables = part(view.variables, "private") if isinstance(view.program.model, Pair) else view.variables
    return variables["params"]


def class_vectors(view: View) -> jax.Array | None:
    """Rows [C, D] of the trained head, or of the ETF that the server holds as `etf`; None without either."""
    if "head" in (params := own_params(view)):
        return params["head"]["kernel"].T
    etf = getattr(view.server, "etf", ())
    return None if isinstance(etf, tuple) else etf.T


def features(view: View, index: jax.Array) -> jax.Array:
    """Features [B, D] of the samples with these indices [B]."""
    program = view.program
    images = prepare(program.pipeline, view.samples.images[index], None, train=False, dtype=program.dtype)
    return forward(program.model, view.variables, images, train=False)[0].features


def class_means(view: View) -> tuple[jax.Array, jax.Array]:
    """Mean features [C, D] of the classes, zeros for those without samples, and the numbers of samples [C]."""
    program, samples = view.program, view.samples
    classes = program.setting.num_classes
    headless = "head" not in own_params(view)

    def sums(index, mask):
        z = features(view, index)
        return class_sums(l2_normalise(z) if headless else z, samples.labels[index], classes, mask=mask)

    if view.row is not None:
        total, counts = client_batches(sums, samples, view.row, program.train_pass)
    else:
        all_samples = samples._replace(order=jnp.arange(samples.labels.shape[0], dtype=jnp.int32))
        number, how = samples.labels.shape[0], Pass(program.eval_batch)
        total, counts = sum_over_samples(sums, all_samples, 0, number, how)
    return total / jnp.maximum(counts, 1)[:, None], counts


def client_probe(view: View) -> tuple[jax.Array, jax.Array]:
    """Indices and mask of up to PROBE samples of the client, evenly spread over its list and so over its classes."""
    size = view.samples.size[view.row]
    used = jnp.minimum(size, PROBE)
    position = jnp.arange(PROBE) * size // jnp.maximum(used, 1)
    index = view.samples.order[start_of(view.samples, view.row) + jnp.minimum(position, jnp.maximum(size - 1, 0))]
    return index, jnp.arange(PROBE) < used


def random_probe(samples: int, seed: int) -> np.ndarray:
    """Draw test samples without replacement: [n, B], up to PROBES batches of PROBE, or one smaller batch."""
    batch = min(PROBE, samples)
    batches = min(PROBES, samples // batch)
    return np.random.default_rng(seed).permutation(samples)[: batches * batch].reshape(batches, batch).astype(np.int32)
