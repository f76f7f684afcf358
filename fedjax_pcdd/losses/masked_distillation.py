"""Distillation from the received model on some classes only, to keep knowledge that local training forgets.

FedVLS: Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning", AAAI 2025. FedNTD: Lee et al.,
"Preservation of the Global Knowledge by Not-True Distillation in Federated Learning", NeurIPS 2022. FedLMD: Lu et al.,
"Federated Learning with Label-Masking Distillation", ACM MM 2023. The teacher is a constant everywhere.
"""

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_pcdd.losses import Mask, Number, check, precise
from fedjax_pcdd.losses.classification import masked_mean

PUBLISHED_SHIFT = 1000.0  # subtracted from masked logits in FedLMD's published code


def masked_kl(
    teacher_logits: Array,
    logits: Array,
    teacher_classes: Array,
    student_classes: Array | None = None,
    *,
    temperature: Number = 1.0,
    mask: Mask = None,
) -> Array:
    """T^2 times the batch mean of KL(softmax of the teacher / T || softmax of the student / T), each over its classes.

    A class outside a softmax has weight 0 in it, and its logit has gradient 0.

    Args:
      teacher_logits: [B, C], a constant.
      logits: [B, C] of the student.
      teacher_classes: [C] or [B, C] bool, classes in the teacher's softmax; a subset of the student's.
      student_classes: [C] or [B, C] bool; None for the teacher's.
      temperature: T > 0.

    Returns:
      Scalar; samples whose teacher has no class, or whose teacher and student have the same single one, add 0 with
      zero gradient, but are counted in B.
    """
    teacher = _log_softmax(jax.lax.stop_gradient(teacher_logits), teacher_classes, temperature)
    student = _log_softmax(logits, teacher_classes if student_classes is None else student_classes, temperature)
    terms = jnp.where(teacher_classes, jnp.exp(teacher) * (teacher - student), 0)
    return jnp.square(temperature) * masked_mean(jnp.sum(terms, axis=-1), mask)


def not_true_distillation(
    teacher_logits: Array, logits: Array, labels: Array, *, temperature: Number = 1.0, mask: Mask = None
) -> Array:
    """FedNTD's loss: `masked_kl` over all classes but the label.

    Args:
      teacher_logits: [B, C], a constant.
      logits: [B, C] of the student.
      temperature: tau > 0.

    Returns:
      Scalar >= 0; 0 with zero gradient for C = 2. The label's logit has no gradient.
    """
    return masked_kl(teacher_logits, logits, _not_true(logits, labels), temperature=temperature, mask=mask)


def majority_classes(class_counts: Array) -> Array:
    """FedLMD's majority labels [C] bool of class counts [C]: more samples than the mean over all C classes.

    >>> majority_classes(jnp.asarray([10, 6, 0, 0])).tolist()
    [True, True, False, False]
    """
    return class_counts * class_counts.size > jnp.sum(class_counts)  # a rounded mean may lie below equal counts


def label_masking_distillation(
    teacher_logits: Array,
    logits: Array,
    labels: Array,
    majority: Array,
    *,
    temperature: Number = 1.0,
    empty: str = "skip",
    mask: Mask = None,
) -> Array:
    """FedLMD's loss: the teacher's softmax is over minority classes, the student's over all classes but the label.

    The softmax of the teacher is over R_b, the classes that are neither the label nor in the majority. Equal logits of
    the teacher (for example zeros) give FedLMD-Tf: 1 / |R_b| for each of these classes.

    Args:
      teacher_logits: [B, C], a constant.
      logits: [B, C] of the student.
      majority: [C] bool, `majority_classes`.
      temperature: tau > 0.
      empty: what a sample with an empty R_b adds: "skip", 0; "published", the KL from a teacher over all classes to a
        student whose label's logit is lowered by 1000 tau, which is how the published code masks.

    Returns:
      Scalar >= 0. The label's logit has no gradient, except with "published" if R_b is empty.
    """
    check(empty, ("skip", "published"), "treatment of samples without classes")
    student_classes = _not_true(logits, labels)
    teacher_classes = student_classes & ~majority
    if empty == "published":
        none = ~jnp.any(teacher_classes, axis=-1, keepdims=True)
        logits = logits - jnp.where(none & ~student_classes, PUBLISHED_SHIFT * temperature, 0)
        teacher_classes, student_classes = teacher_classes | none, student_classes | none
    return masked_kl(teacher_logits, logits, teacher_classes, student_classes, temperature=temperature, mask=mask)


def _not_true(logits, labels):
    """[B, C] bool, False at each sample's label."""
    return jnp.arange(logits.shape[-1]) != labels[:, None]


def _log_softmax(logits, classes, temperature):
    """Logarithms of a softmax over some classes, [B, C] in float32 or better; finite and far below 0 elsewhere."""
    logits = precise(logits) / temperature
    # A finite fill, so that -inf is never multiplied by 0; half of the lowest number, so that nothing overflows.
    return jax.nn.log_softmax(jnp.where(classes, logits, jnp.finfo(logits.dtype).min / 2), axis=-1)
