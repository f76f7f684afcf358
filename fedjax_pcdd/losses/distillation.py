"""Distillation between models of any architecture, through their outputs on the same batch.

FCCL: Huang, Ye and Du, CVPR 2022. FedMD: Li and Wang, NeurIPS workshop 2019. FML: Shen et al., 2020. FedDF: Lin et al.,
NeurIPS 2020. FedMatch: Jeong et al., ICLR 2021. The teacher is a constant everywhere.
Further letters: H helpers; here K counts teachers.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array
from optax.losses import kl_divergence_with_log_targets

from fedjax_pcdd.losses import Mask, Number, check, precise
from fedjax_pcdd.losses.classification import cross_entropy, masked_mean

ENSEMBLES = ("avg_logits", "avg_probs", "avg_losses")


def kl_to_teacher(teacher_logits: Array, logits: Array, *, temperature: Number = 1.0, mask: Mask = None) -> Array:
    """Batch mean of KL(softmax(teacher_logits / T) || softmax(logits / T)), not multiplied by T^2.

    Args:
      teacher_logits: [B, C], a constant.
      logits: [B, C] of the student.
      temperature: T > 0.

    Returns:
      Scalar >= 0 in float32 or better; 0 for equal outputs and if no sample counts.
    """
    teacher = _log_softmax(jax.lax.stop_gradient(teacher_logits), temperature)
    return masked_mean(kl_divergence_with_log_targets(_log_softmax(logits, temperature), teacher), mask)


def kl_to_probabilities(probabilities: Array, logits: Array, *, temperature: Number = 1.0, mask: Mask = None) -> Array:
    """Batch mean of KL(probabilities || softmax(logits / T)).

    Args:
      probabilities: [B, C], a constant; rows sum to 1, zeros are allowed.
      logits: [B, C] of the student.
      temperature: T > 0, of the student alone.
    """
    student = _log_softmax(logits, temperature)
    teacher = jax.lax.stop_gradient(probabilities).astype(student.dtype)
    return masked_mean(jnp.sum(jax.scipy.special.xlogy(teacher, teacher) - teacher * student, axis=-1), mask)


def absolute_error(target: Array, logits: Array, mask: Mask = None) -> Array:
    """FedMD's distance of logits: mean of |logits - target| over samples and classes, as in both published codes.

    Args:
      target: [B, C], a constant.

    Returns:
      Scalar; an entry that equals its target has gradient 0.

    >>> import jax.numpy as jnp
    >>> float(absolute_error(jnp.asarray([[2.0, 4.0]]), jnp.asarray([[1.0, 3.0]])))
    1.0
    """
    difference = _difference(target, logits)
    # JAX's gradient of |0| is 1, not 0.
    return masked_mean(jnp.mean(jnp.where(difference == 0, 0, jnp.abs(difference)), axis=-1), mask)


def squared_error(target: Array, logits: Array, mask: Mask = None) -> Array:
    """As `absolute_error` with squares, not halved: FedMD as described in the FCCL paper."""
    return masked_mean(jnp.mean(jnp.square(_difference(target, logits)), axis=-1), mask)


def ensemble_target(teachers: Array, *, form: str = "avg_logits", temperature: Number = 1.0) -> Array:
    """Mean over teachers as a target: everything their student needs.

    Args:
      teachers: [K, B, C] logits.
      form: "avg_logits" returns the mean logits, "avg_probs" and "avg_losses" the mean of softmax(logits / T).
      temperature: T > 0.

    Returns:
      [B, C] in float32 or better.
    """
    check(form, ENSEMBLES, "form of the ensemble")
    teachers = precise(teachers)
    return jnp.mean(teachers if form == "avg_logits" else jax.nn.softmax(teachers / temperature), axis=0)


def kl_to_target(
    target: Array, logits: Array, *, form: str = "avg_logits", temperature: Number = 1.0, mask: Mask = None
) -> Array:
    """FedDF's loss of a student, given the target of `ensemble_target`.

    Args:
      target: [B, C], a constant; of the same form and temperature.
      logits: [B, C] of the student.
      form: "avg_logits" or "avg_probs". "avg_losses" is "avg_probs" here: the gradient is the same, and the value
        lacks a term that does not depend on the student.
      temperature: T > 0.
    """
    check(form, ENSEMBLES, "form of the ensemble")
    loss = kl_to_teacher if form == "avg_logits" else kl_to_probabilities
    return loss(target, logits, temperature=temperature, mask=mask)


def mutual_losses(
    private_logits: Array,
    meme_logits: Array,
    labels: Array,
    *,
    alpha: Number = 0.5,
    beta: Number = 0.5,
    mask: Mask = None,
) -> tuple[Array, Array]:
    """FML's losses of the private and the shared ("meme") model on one batch; each model is a constant for the other.

    alpha CE(private) + (1 - alpha) KL(meme || private) and beta CE(meme) + (1 - beta) KL(private || meme). The gradient
    of their sum is that of either loss for its own model.

    Args:
      private_logits: [B, C].
      meme_logits: [B, C].
      alpha: weight of the labels for the private model, in [0, 1].
      beta: the same for the meme model.

    Returns:
      (private, meme), scalars in float32 or better.
    """

    def loss(student_logits, teacher_logits, weight):
        labelled = cross_entropy(student_logits, labels, mask=mask)
        return weight * labelled + (1 - weight) * kl_to_teacher(teacher_logits, student_logits, mask=mask)

    return loss(private_logits, meme_logits, alpha), loss(meme_logits, private_logits, beta)


def confident(logits: Array, confidence: Number, *, mask: Mask = None) -> Array:
    """FedMatch's confident samples, [B] bool: the largest softmax of logits [B, C] is at least `confidence`."""
    selected = jnp.max(jax.nn.softmax(precise(logits)), axis=-1) >= confidence
    return selected if mask is None else selected & mask.astype(bool)


def pseudo_labels(logits: Array, helper_logits: Array, *, valid: Array | None = None) -> Array:
    """FedMatch's labels: the class with most votes of the local model and its helpers; the lowest in a tie.

    Args:
      logits: [B, C] of the local model.
      helper_logits: [H, B, C]; H may be 0.
      valid: [H] bool, helpers that exist; None for all.

    Returns:
      [B] integers in [0, C).

    >>> import jax.numpy as jnp
    >>> pseudo_labels(jnp.asarray([[0.0, 0, 9]]), jnp.asarray([[[0.0, 9, 0]], [[0, 8, 1]]])).tolist()
    [1]
    """
    num_classes = logits.shape[-1]
    votes = jax.nn.one_hot(jnp.argmax(helper_logits, axis=-1), num_classes)
    votes = votes if valid is None else jnp.where(valid[:, None, None], votes, 0)
    return jnp.argmax(jnp.sum(votes, axis=0) + jax.nn.one_hot(jnp.argmax(logits, axis=-1), num_classes), axis=-1)


def helper_consistency(
    logits: Array, helper_logits: Array, kept: Array, *, valid: Array | None = None, floor: float = 1e-7
) -> Array:
    """FedMatch's inter-client consistency: mean over helpers and kept samples of KL(p_h || p).

    Args:
      logits: [B, C] of the local model.
      helper_logits: [H, B, C], constants; H may be 0.
      kept: [B], samples that count, from `confident`.
      valid: [H] bool, helpers that exist; None for all.
      floor: minimum of probabilities before the logarithm, as in the published code; 0 for none.

    Returns:
      Scalar; 0 with zero gradient if there are no kept samples or no helpers.
    """
    least = math.log(floor) if floor else -math.inf
    helpers = jnp.maximum(_log_softmax(jax.lax.stop_gradient(helper_logits)), least)
    divergences = kl_divergence_with_log_targets(jnp.maximum(_log_softmax(logits), least), helpers)
    exist = jnp.ones(helper_logits.shape[0], bool) if valid is None else valid
    return masked_mean(jax.vmap(lambda each: masked_mean(each, kept))(divergences), exist)


def _log_softmax(logits: Array, temperature: Number = 1.0) -> Array:
    """Logarithms of softmax(logits / T) over the last axis, in float32 or better."""
    return jax.nn.log_softmax(precise(logits) / temperature)


def _difference(target, logits):
    logits = precise(logits)
    return logits - jax.lax.stop_gradient(target).astype(logits.dtype)
