"""FedGen: the server trains a generator of features against the clients' heads; clients train on its features.

Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021.
Sent: as in FedAvg, and the generator and the classes it knows [C] down, label counts [C] up. A client keeps nothing.
The teachers' losses are weighted sample by sample, as printed; the published code averages losses and weights
separately (`broadcast`). Noise is uniform, as in the code, which calls it Gaussian (`noise`). Label counts are of the
samples owned; the code counts, from 1, those seen in training (`label_counts`). Its adversarial student term has weight
0 and is left out. alpha = beta = 1 are ours: the published values, 10 and 10, and 10 and 1, are for latents of 32 on
MNIST and EMNIST.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.generation import diversity, ensemble_loss, label_shares, latent_kl
from fedjax_pcdd.methods.label_counts import LabelCounts
from fedjax_pcdd.methods.method import Message, Traits, Tree, hyperparameter
from fedjax_pcdd.methods.parts import joined, without
from fedjax_pcdd.models.classifier import apply_head
from fedjax_pcdd.models.generator import adam, draw_labels, generate, initialise_generator, train_generator


class Server(NamedTuple):
    """Global model; generator, its optimiser state, the classes it knows [C], and how often it was trained."""

    variables: Tree
    generator: Tree
    optimiser: Tree
    known: jax.Array
    trained: jax.Array


@struct.dataclass
class FedGen(LabelCounts):
    """L = CE + alpha_t * CE of generated features + beta_t * KL(head on generated features || prediction)."""

    alpha: float = hyperparameter(1.0, symbol="alpha", help="weight of generated features for the head", low=0.0)
    beta_kl: float = hyperparameter(1.0, symbol="beta", help="weight of the divergence from them", low=0.0)
    decay: float = hyperparameter(0.98, help="factor a round on alpha and beta", low=0.0, high=1.0)
    floor: float = hyperparameter(1e-4, help="least alpha and beta, unless they are 0", low=0.0)
    synthetic_epochs: int = hyperparameter(20, help="local epochs with generated features, the first ones", low=0)
    synthetic_batch: int | None = hyperparameter(
        None, symbol="B_g", help="generated features a step; by default the batch size", low=1, static=True
    )
    diversity: float = hyperparameter(1.0, symbol="eta_d", help="weight of the generator's diversity loss", low=0.0)
    generator_lr: float = hyperparameter(3e-4, help="learning rate of the generator's Adam", low=0.0)
    generator_lr_decay: float = hyperparameter(0.98, help="factor a round on it", low=0.0, high=1.0)
    generator_wd: float = hyperparameter(1e-2, help="weight decay of the generator, added to the gradient", low=0.0)
    generator_steps: int = hyperparameter(50, help="steps of the generator a round", low=0, static=True)
    hidden: int | None = hyperparameter(None, help="width of the generator, by default 256 or 512", low=1, static=True)
    noise_dim: int | None = hyperparameter(None, help="width of the noise, by default 32 or 64", low=1, static=True)
    noise: Literal["uniform", "gaussian"] = hyperparameter("uniform", help="law of the noise", static=True)
    broadcast: bool = hyperparameter(False, help="mean loss times mean weight, as the published code", static=True)
    stale: Literal["carry", "drop"] = hyperparameter(
        "carry", help="a class that no participant owns stays known to the generator, or is dropped", static=True
    )

    def traits(self):
        """FedAvg's traits, with the paper."""
        return Traits("Zhu et al., ICML 2021")

    def configure(self, setting, hyper):
        """Defaults: the published sizes, for models below 256 features or others, and B generated features a step."""
        large = setting.feature_dim >= 256
        hidden, noise_dim = self.hidden or (512 if large else 256), self.noise_dim or (64 if large else 32)
        batch = self.synthetic_batch or setting.batch_size
        weights = {"alpha": self.alpha, "beta_kl": self.beta_kl}
        heavy = [f"`{name}={weight:g}`" for name, weight in weights.items() if weight >= 10]
        advice = f"FedGen with {' and '.join(heavy)} has ended with one class for everything: choose 1, or less."
        return replace(self, hidden=hidden, noise_dim=noise_dim, synthetic_batch=batch), [advice] * bool(heavy)

    @property
    def _size(self) -> int:
        return self.synthetic_batch  # pyright: ignore[reportReturnType]

    def _adam(self, trained):
        return adam(self.generator_lr * self.generator_lr_decay**trained, self.generator_wd)

    def init_server(self, setting, variables, class_counts, key):
        """A fresh generator that knows no class yet."""
        classes = setting.num_classes
        inner: tuple = self.noise_dim, self.hidden
        generator = initialise_generator(jax.random.split(key)[0], classes, setting.feature_dim, *inner)
        optimiser = self._adam(0).init(generator["params"])
        known, trained = jnp.zeros(classes, bool), jnp.zeros((), jnp.int32)
        return Server(variables, generator, optimiser, known, trained)

    def penalty(self, variables, outputs, batch, context):
        """(B_g / B) alpha_t CE(phi(z(y')), y') + beta_t KL(phi(z(y)) || f(x)), a scalar; 0 while no class is known."""
        server, setting, size = context.server, context.setting, self._size
        keys = jax.random.split(context.keys.method)
        labels = jnp.concatenate([draw_labels(keys[0], server.known, size), batch.labels])
        _, features, _ = generate(server.generator, keys[1], labels, setting.num_classes, noise=self.noise)
        generated = apply_head(variables["params"]["head"], features)
        teaching = cross_entropy(generated[:size], labels[:size]) * size / setting.batch_size
        valid = server.known[batch.labels]
        divergence = latent_kl(generated[size:], outputs.logits, mask=batch.mask, valid=valid)  # pyright: ignore[reportArgumentType]
        weights = jnp.stack([self.alpha, self.beta_kl])
        alpha, beta = jnp.where(weights > 0, jnp.maximum(self.floor, weights * self.decay**context.round), 0.0)
        active = jnp.any(server.known) & (context.epoch < self.synthetic_epochs)
        return jnp.where(active, alpha * teaching + beta * divergence, 0.0)

    def upload(self, variables, summary, context):
        """The model, with its head apart as a teacher, and the label counts [C]."""
        model, counts = self.split(variables, context)
        return context.client, Message(mean=without(model, "head"), each=(model["params"]["head"], counts))

    def aggregate(self, server, message, weights, context):
        """Train the generator on the participants' heads, then average the models."""
        (heads, counts), present = message.each, weights > 0
        owned = self.samples(counts, present) > 1
        shares = label_shares(jnp.where(present[:, None], counts, 0))

        def objective(noise, features, labels):
            logits = jax.vmap(apply_head, (0, None))(heads, features)
            teachers = ensemble_loss(logits, labels, shares, broadcast=self.broadcast)
            return teachers + self.diversity * diversity(noise, features)

        old, optimiser = (server.generator, server.optimiser), self._adam(server.trained)
        size, steps = self._size, self.generator_steps
        new = train_generator(*old, optimiser, objective, context.key, owned, size=size, steps=steps, noise=self.noise)
        known = owned | server.known if self.stale == "carry" else owned
        head = jax.tree.map(lambda x: jnp.tensordot(weights.astype(x.dtype), x, 1), heads)
        return server._replace(
            variables=joined(message.mean, "head", head), generator=new[0], optimiser=new[1], known=known,
            trained=server.trained + jnp.any(owned),
        )  # fmt: skip
