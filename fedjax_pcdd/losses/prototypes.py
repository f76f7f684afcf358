"""Class prototypes: sums to compute them, merging on the server, and margins and distances to them.

FedMR: Fan et al., "Federated Learning under Partially Class-Disjoint Data via Manifold Reshaping", TMLR 2023.
FedProto: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients", AAAI 2022.
FedTGP: Zhang et al., "FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning for Data
and Model Heterogeneity in Federated Learning", AAAI 2024. Further letter: P uploaded prototypes.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_pcdd.losses import Mask, Number, check, precise, without_masked
from fedjax_pcdd.losses.classification import cross_entropy, masked_mean
from fedjax_pcdd.losses.membership import membership


def class_sums(features: Array, labels: Array, num_classes: int, mask: Mask = None) -> tuple[Array, Array]:
    """Sum of features and number of samples for each class.

    Returns:
      (sums [C, D], counts [C]) in float32 or better; zeros for absent classes.
    """
    features = precise(features)
    members = membership(labels, num_classes, mask, features.dtype)
    return members.per_class(jnp.where(members.any[:, None], features, 0)), members.counts


def merge_prototypes(
    sums: Array, counts: Array, previous: Array, previous_valid: Array, *, stale: str = "carry"
) -> tuple[Array, Array]:
    """Global prototypes g_c = sum_k n_kc g_kc / sum_k n_kc (FedMR), without momentum.

    Args:
      sums: [C, D], features summed over all samples of the submitting clients (sum_k n_kc g_kc).
      counts: [C], their numbers of samples (sum_k n_kc).
      previous: [C, D] prototypes of the previous round.
      previous_valid: [C] bool.
      stale: a class that no one submitted keeps its last prototype ("carry") or becomes invalid ("drop").

    Returns:
      (prototypes [C, D], valid [C] bool); invalid rows are zeros.
    """
    check(stale, ("carry", "drop"), "treatment of stale prototypes")
    fresh = counts > 0
    means = sums / jnp.where(fresh, counts, 1)[:, None]
    kept = previous_valid.astype(bool) & (stale == "carry")
    prototypes = jnp.where(fresh[:, None], means, jnp.where(kept[:, None], previous, 0))
    return prototypes, fresh | kept


def equal_shares(sums: Array, counts: Array) -> tuple[Array, Array]:
    """A client's class sums [C, D] and counts [C] as if it had one sample, the mean, of each of its classes.

    Summed over clients and merged, they give the unweighted mean of the local prototypes (FedProto).
    """
    owned = counts > 0
    return sums / jnp.where(owned, counts, 1)[:, None], owned.astype(counts.dtype)


def inter_class(
    features: Array, labels: Array, prototypes: Array, valid: Array, candidates: Array, *, mask: Mask = None
) -> Array:
    """FedMR's inter-class margin: a feature should be nearer to its own prototype than to any other.

    D(ci, cj) = mean over the samples of ci of max(||z - g_ci|| - ||z - g_cj||, 0), averaged over the ordered
    pairs with ci in the batch and valid, cj != ci a candidate and valid. The prototypes are constants.

    Args:
      prototypes: [C, D].
      valid: [C] bool, prototypes that exist.
      candidates: [C] bool, classes that may be cj: the client's own (as printed), or all.

    Returns:
      Scalar >= 0; 0 with zero gradient when there is no pair.
    """
    features, valid = precise(features), valid.astype(bool)
    anchors = membership(labels, valid.shape[0], mask, features.dtype).of_samples * valid
    counts = jnp.sum(anchors, axis=0)
    present, rivals = counts > 0, candidates.astype(bool) & valid
    pairs = jnp.sum(present) * jnp.sum(rivals) - jnp.sum(present & rivals)
    features = jnp.where(jnp.any(anchors > 0, axis=1)[:, None], features, 0)
    centre = jnp.sum(jnp.where(valid[:, None], prototypes, 0), axis=0) / jnp.maximum(jnp.sum(valid), 1)
    targets = jax.lax.stop_gradient(jnp.where(valid[:, None], prototypes, centre)).astype(features.dtype)
    distances = _distances(features, targets)
    own_distances = jnp.sum(anchors * distances, axis=1, keepdims=True)
    sample_weights = anchors / jnp.maximum(counts, 1)
    weights = (jnp.sum(sample_weights, axis=1, keepdims=True) - sample_weights) * rivals  # of all other classes
    return jnp.sum(weights * jax.nn.relu(own_distances - distances)) / jnp.maximum(pairs, 1)


@jax.custom_jvp
def _distances(vectors: Array, targets: Array) -> Array:
    """Distances [B, C] of rows of [B, D] to constant rows of [C, D]; its derivatives keep no array [B, C, D]."""
    return safe_norm(vectors[:, None] - targets)


@_distances.defjvp
def _distances_jvp(primals, tangents):
    """(z_b - g_c) . dz_b / distance_bc by one product, 0 at distance 0.

    Taken about the targets' mean, as z_b . dz_b - g_c . dz_b would cancel where all of them have much in common.
    """
    vectors, targets = primals
    distances, centre = _distances(vectors, targets), jnp.mean(targets, axis=0)
    along = jnp.matmul(tangents[0], (targets - centre).T, precision="highest")
    along = jnp.sum((vectors - centre) * tangents[0], axis=1, keepdims=True) - along
    apart = distances > 0
    return distances, jnp.where(apart, along / jnp.where(apart, distances, 1), 0)


def squared_distance_to_own(
    features: Array, labels: Array, prototypes: Array, valid: Array, *, mask: Mask = None
) -> Array:
    """FedProto's regulariser: (1 / (B D)) sum_b ||z_b - g_{y_b}||^2. The prototypes are constants.

    Args:
      prototypes: [C, D].
      valid: [C] bool; samples of other classes add nothing, but are counted in B.

    Returns:
      Scalar >= 0; 0 with zero gradient when no sample's class is valid.
    """
    features = precise(features)
    targets = jax.lax.stop_gradient(prototypes).astype(features.dtype)[labels]
    distances = jnp.mean(jnp.square(jnp.where(valid[labels].astype(bool)[:, None], features - targets, 0)), axis=-1)
    return masked_mean(distances, mask)


def nearest_prototype_scores(features: Array, prototypes: Array, valid: Array) -> Array:
    """FedProto's prediction: the argmax over classes is the nearest prototype.

    Args:
      prototypes: [C, D].
      valid: [C] bool, classes that may be predicted.

    Returns:
      [B, C], minus the mean over D of the squared distance; -inf for invalid classes.
    """
    distances = jnp.mean(jnp.square(features[:, None, :] - prototypes), axis=-1)
    return jnp.where(valid.astype(bool), -distances, -jnp.inf)


def centre_distances(centres: Array, valid: Array) -> tuple[Array, Array]:
    """Distances [C, C] between class centres [C, D], and which pairs [C, C] are of two different valid classes [C]."""
    pairs = valid[:, None] & valid & ~jnp.eye(len(valid), dtype=bool)
    return safe_norm(centres[:, None] - centres), pairs


def nearest_gaps(centres: Array, valid: Array) -> Array:
    """Distances [C] to the nearest other centre; invalid classes get the smallest one; all are inf without a pair."""
    distances, pairs = centre_distances(centres, valid)
    gaps = jnp.min(jnp.where(pairs, distances, jnp.inf), axis=1)
    return jnp.where(valid, gaps, jnp.min(gaps))


def adaptive_margin(centres: Array, valid: Array, threshold: Number, rule: str) -> Array:
    """FedTGP's margin between classes, at most a threshold; the threshold itself with fewer than two valid classes.

    Args:
      centres: [C, D], unweighted means of the uploaded prototypes of each class.
      valid: [C] bool, classes with a prototype.
      threshold: tau.
      rule: "nearest", the largest distance of a centre to its nearest neighbour; "farthest", the largest of all.
    """
    if rule == "nearest":
        return jnp.minimum(jnp.max(nearest_gaps(centres, valid)), threshold)
    distances, pairs = centre_distances(centres, valid)
    return jnp.minimum(jnp.where(jnp.any(pairs), jnp.max(jnp.where(pairs, distances, 0)), jnp.inf), threshold)


def margin_cross_entropy(
    prototypes: Array, labels: Array, targets: Array, margin: Number, *, mask: Mask = None
) -> Array:
    """FedTGP's loss: cross-entropy of negative distances to the targets, with the margin added for the own class.

    Args:
      prototypes: [P, D] as uploaded.
      labels: [P] their classes.
      targets: [C, D], the trained prototypes.
      margin: delta >= 0.
      mask: [P], prototypes that count; None for all.

    Returns:
      Scalar; the gradient of a distance of 0 is 0.
    """
    distances = safe_norm(without_masked(prototypes, mask)[:, None] - targets)
    one_hot = jax.nn.one_hot(labels, len(targets), dtype=distances.dtype)
    return cross_entropy(-(distances + margin * one_hot), labels, mask=mask)


def random_subset(key: Array, mask: Array, n: Array | int) -> Array:
    """Choose n of the unmasked samples uniformly without replacement (FedMR Lite-n).

    Args:
      key: consumed.
      mask: [B], samples to choose from.
      n: number of samples, may be traced; n >= B returns the mask, n = 0 an empty one.

    Returns:
      [B] bool mask.
    """
    mask = mask.astype(bool)
    # By position, so that padding changes no draw.
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(len(mask)))
    lots = jnp.where(mask, jax.vmap(jax.random.uniform)(keys), 2.0)
    ranks = jnp.argsort(jnp.argsort(lots))
    return mask & (ranks < n)


def safe_norm(vectors: Array) -> Array:
    """Euclidean norm over the last axis, [..., D] to [...], with zero gradient at zero."""
    squares = jnp.sum(jnp.square(vectors), axis=-1)
    positive = squares > 0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, squares, 1)), 0)
