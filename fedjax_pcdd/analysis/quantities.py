"""Quantities that a run can track: accuracy on classes that a client has or lacks, angles, spectra, gradients.

Each quantity is computed for every client's model right after local training, and for the global model. Compiled
functions map a `View` to arrays; functions on the host turn these into numbers. Letters: C classes, D features, S
clients of the round, n mini-batches of B random test samples (`random_probe`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_pcdd.analysis.angles import Angles, class_angles
from fedjax_pcdd.analysis.spectrum import class_eigenvalue_variance, class_spectra, eigenvalue_variance, mean_spectrum
from fedjax_pcdd.analysis.views import View, class_means, class_vectors, client_probe, features, own_params
from fedjax_pcdd.engine.evaluation import on_whole_test
from fedjax_pcdd.engine.program import Tree
from fedjax_pcdd.losses.decorrelation import intra_class
from fedjax_pcdd.registry import Registry

Numbers = dict[str, np.ndarray]


class Quantity(NamedTuple):
    """A quantity to track. Letters: S clients that were looked at, n batches of B test samples, C classes.

    Attributes:
      help: a line for the documentation.
      of_client: function of the view of a client's model; compiled.
      of_server: function of the view of the global model and of test samples' positions [n, B]; compiled.
      per_client: function of the results of `of_client`, leaves [S, ...]: numbers [S] by name, nan where undefined.
      overall: function of the result of `of_server`, of the clients that trained ([S] bool), the labels [n, B] and C:
        numbers by name.
      of_steps: whether `of_client` reads `View.steps`.
    """

    help: str
    of_client: Callable[[View], Tree]
    of_server: Callable[[View, jax.Array], Tree]
    per_client: Callable[[Tree], Numbers]
    overall: Callable[[Tree, np.ndarray, np.ndarray, int], dict[str, Any]]
    of_steps: bool = False


def _classifier_angles(view: View) -> Angles:
    vectors = class_vectors(view)
    if vectors is None:
        return Angles(*(jnp.full(view.present.shape[:-1], -1.0) for _ in Angles._fields))
    return _for_all_clients(lambda present: class_angles(vectors, present), view.present)


def _feature_angles(view: View) -> Angles:
    means, counts = class_means(view)
    return _for_all_clients(lambda present: class_angles(means, present, counts > 0), view.present)


def _client_feature_angles(view: View) -> Angles:
    """Angles of present classes from the client's samples, of missing ones from all tests, both under its own model."""
    return _feature_angles(view)._replace(missing=_feature_angles(view._replace(samples=view.tests, row=None)).missing)


def _for_all_clients(function: Callable, present: jax.Array) -> Angles:
    """Apply a function to the classes [C] of one client, or [S, C] of several."""
    return function(present) if present.ndim == 1 else jax.vmap(function)(present)


def _degrees(angles: Angles) -> Numbers:
    values = {name: np.asarray(value, float) for name, value in angles._asdict().items()}
    return {name: np.where(value < 0, np.nan, value) for name, value in values.items()}


def mean_of(values: np.ndarray) -> float | None:
    """Mean over the clients for which the value is defined; None if there are none."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else None


def _means(numbers: Numbers, trained: np.ndarray, *_: Any) -> dict[str, Any]:
    return {name: mean_of(np.asarray(value, float)[trained]) for name, value in numbers.items()}


def _client_features(view: View) -> tuple[jax.Array, jax.Array]:
    index, mask = client_probe(view)
    return features(view, index), mask.sum()


def _test_features(view: View, probe: jax.Array) -> jax.Array:
    return jax.lax.map(lambda index: features(view, index), probe)


def _client_variances(client_features: Tree) -> Numbers:
    probes, numbers = (np.asarray(x) for x in client_features)
    values = [eigenvalue_variance(z[:n])[1] if n >= 2 else np.nan for z, n in zip(probes, numbers, strict=True)]
    return {"variance": np.array(values)}


def _spectrum(test_features: Tree, counts: np.ndarray, labels: np.ndarray, classes: int) -> dict[str, Any]:
    batches = np.asarray(test_features)
    if batches.shape[1] < 2:  # a single test sample correlates with nothing
        return {}
    pooled, labels = batches.reshape(-1, batches.shape[-1]), labels.ravel()
    eigenvalues, variance = mean_spectrum(batches)
    return {
        "variance": variance,
        "dimensions": float(np.mean((np.ptp(batches, axis=1) > 0).sum(-1))),  # number that varies
        "class_variance": class_eigenvalue_variance(pooled, labels),
        "eigenvalues": eigenvalues.tolist(),
        "class_eigenvalues": class_spectra(pooled, labels, classes).tolist(),
    }


def _client_intra(view: View) -> jax.Array:
    index, mask = client_probe(view)
    classes = view.program.setting.num_classes
    return intra_class(features(view, index), view.samples.labels[index], classes, mask=mask)


def _test_intra(view: View, probe: jax.Array) -> jax.Array:
    classes = view.program.setting.num_classes
    losses = jax.lax.map(lambda i: intra_class(features(view, i), view.samples.labels[i], classes), probe)
    return losses.mean()


def _backbone_norm(view: View) -> jax.Array:
    return optax.tree.norm(own_params(view)["backbone"])


def _client_steps(view: View) -> dict[str, jax.Array]:
    count, norm, clipped = view.steps or jnp.full(3, jnp.nan)
    return {"norm": norm / count, "clipped": clipped / count, "weights": _backbone_norm(view)}


def _class_accuracies(view: View) -> dict[str, jax.Array]:
    """Accuracies on all tests of classes that a client has, and of classes that it lacks; nan without tests."""
    tests, classes = view.samples if view.tests is None else view.tests, view.program.setting.num_classes
    models = 1 if view.tests is None else view.program.blocks.size
    correct = on_whole_test(view.logits, view.program, tests, models)[:classes]
    number = jnp.zeros(classes, jnp.int32).at[tests.labels].add(1, mode="drop")  # validation labels are higher

    def share(chosen: jax.Array) -> jax.Array:
        correct_sum, total = ((x * chosen).sum(-1) for x in (correct, number))
        return jnp.where(total > 0, correct_sum / jnp.maximum(total, 1), jnp.nan)

    return {"existing": share(view.present), "missing": share(~view.present)}


_OWN = {
    "classes": Quantity(
        "accuracy on the classes that a client has, and on those that it lacks",
        _class_accuracies, lambda view, probe: _class_accuracies(view),
        lambda shares: shares, _means,
    ),
    "angles": Quantity(
        "angles between the classifier's class vectors (FedGELA, Figure 2)",
        _classifier_angles, lambda view, probe: _classifier_angles(view), _degrees,
        lambda angles, *others: _means(_degrees(angles), *others),
    ),
    "features": Quantity(
        "angles between the mean features of classes (FedGELA, Figures 3 and 5)",
        _client_feature_angles, lambda view, probe: _feature_angles(view),
        lambda angles: {name: _degrees(angles)[name] for name in ("existing", "missing")},
        lambda angles, *others: _means(_degrees(angles), *others),
    ),
    "spectrum": Quantity(
        "variance of the 50 largest eigenvalues of the features' correlation (FedMR, Table 7), and spectra",
        _client_features, _test_features, _client_variances, _spectrum,
    ),
    "intra": Quantity(
        "FedMR's intra-class loss, whatever the method trains (FedMR, Figure 7)",
        _client_intra, _test_intra,
        lambda losses: {"loss": losses}, lambda loss, counts, labels, classes: {"loss": loss},
    ),
    "gradients": Quantity(
        "norm of the gradients before clipping, share of clipped steps, norm of the backbone's weights",
        _client_steps, lambda view, probe: _backbone_norm(view),
        lambda steps: steps, lambda norm, counts, labels, classes: {"weights": norm}, of_steps=True,
    ),
}  # fmt: skip

QUANTITIES: Registry[Quantity] = Registry("quantity", "quantities", _OWN)
"""Quantities to track by name, or by the import path of a `Quantity` elsewhere."""
