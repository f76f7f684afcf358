"""FedGen's losses: on the server for its generator of features, on the clients for the generated features.

Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021.
Further letters: S participants of a round, N dimensions of the noise.
"""

import jax
import jax.numpy as jnp
from jax import Array
from optax.losses import kl_divergence_with_log_targets

from fedjax_pcdd.losses import Mask, precise
from fedjax_pcdd.losses.classification import masked_mean


def label_shares(counts: Array) -> Array:
    """v_kc = n_kc / sum_j n_jc, each participant's share of the samples of each class.

    Args:
      counts: [S, C].

    Returns:
      [S, C]; a class without samples has shares 0.
    """
    total = jnp.sum(counts, axis=0)
    return jnp.where(total > 0, counts / jnp.where(total > 0, total, 1), 0)


def ensemble_loss(logits: Array, labels: Array, shares: Array, *, broadcast: bool = False) -> Array:
    """sum_k mean_b v_{k, y_b} CE(logits_kb, y_b): the participants' heads as teachers of the generator.

    Args:
      logits: [S, B, C].
      shares: [S, C], v_kc.
      broadcast: as in the published code, a (B,) loss times a (B, 1) weight: sum_k mean_b v * mean_b CE.
    """
    logits = precise(logits)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[None, :, None], axis=-1)[..., 0]
    weights = shares[:, labels]
    if broadcast:
        return jnp.sum(jnp.mean(losses, axis=1) * jnp.mean(weights, axis=1))
    return jnp.sum(jnp.mean(weights * losses, axis=1))


def diversity(noise: Array, latents: Array) -> Array:
    """exp(-mean_ij [mean_n (e_i - e_j)_n^2 * mean_d |z_i - z_j|_d]): small where different noise gives different z.

    Args:
      noise: [B, N].
      latents: [B, D].

    Returns:
      Scalar in (0, 1], 1 for identical latents.
    """
    noise_distances = jnp.mean(jnp.square(noise[:, None] - noise), axis=-1)
    latents = precise(latents)
    latent_distances = jnp.mean(jnp.abs(latents[:, None] - latents), axis=-1)
    return jnp.exp(-jnp.mean(noise_distances * latent_distances))


def latent_kl(generated: Array, logits: Array, *, mask: Mask = None, valid: Array | None = None) -> Array:
    """Batch mean of KL(softmax(generated) || softmax(logits)); the first is a constant.

    Args:
      generated: [B, C] logits of generated features with the labels of the batch.
      logits: [B, C] of the real samples.
      valid: [B] bool, samples with a label that the generator knows; others add 0, but stay in the divisor.
    """
    dtype = jnp.promote_types(logits.dtype, jnp.float32)
    target = jax.nn.log_softmax(jax.lax.stop_gradient(generated).astype(dtype))
    divergence = kl_divergence_with_log_targets(jax.nn.log_softmax(logits.astype(dtype)), target)
    return masked_mean(divergence if valid is None else jnp.where(valid, divergence, 0), mask)
