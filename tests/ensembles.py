"""FedDF's loss as its paper writes it, over all teachers at once; methods compute it from the teachers' mean."""

import jax
import jax.numpy as jnp

from fedjax_pcdd.losses.distillation import ensemble_target, kl_to_target, kl_to_teacher


def ensemble_kl(teachers, logits, *, form="avg_logits", temperature=1.0, mask=None):
    """FedDF's loss of a student, given all its teachers.

    Args:
      teachers: [K, B, C] logits, constants.
      logits: [B, C] of the student.
      form: "avg_logits": KL(softmax(mean_k Z_k / T) || student), the paper's; "avg_probs": KL(mean_k softmax(Z_k / T)
        || student); "avg_losses": mean_k KL(softmax(Z_k / T) || student).
      temperature: T > 0.
    """
    if form == "avg_losses":
        return jnp.mean(jax.vmap(lambda z: kl_to_teacher(z, logits, temperature=temperature, mask=mask))(teachers))
    target = ensemble_target(teachers, form=form, temperature=temperature)
    return kl_to_target(target, logits, form=form, temperature=temperature, mask=mask)
