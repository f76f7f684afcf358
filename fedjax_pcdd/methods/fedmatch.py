"""FedMatch between participants: weights are the sum of a supervised part and one that learns from public images.

Jeong et al., "Federated Semi-Supervised Learning with Inter-Client Consistency & Disjoint Learning", ICLR 2021.
A RECONSTRUCTION of the form that FCCL compares with: all private images have labels, public ones have none, and models
differ; the paper says only that key features are kept. Here sigma learns from private images and psi from public ones,
both stay with the participant, and helpers are logits of other participants instead of their models. Sent: N C logits
up, H N C down. The original's federation of one architecture, with unlabelled private images, is not offered.
sigma + psi is the (pre-trained) initial model, psi a fifth of it. Images are augmented for the pseudo-labels only.
Weight decay acts in public steps too, so psi shrinks even if all its losses have weight 0.
"""

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.distillation import confident, helper_consistency, pseudo_labels
from fedjax_pcdd.methods.method import hyperparameter
from fedjax_pcdd.methods.participant import Exchanging
from fedjax_pcdd.methods.parts import joined, moving, without
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.trees import squared_distance


@struct.dataclass
class FedMatch(Exchanging):
    """Private: lambda_s CE(sigma + psi), for sigma; public: consistency, pseudo-labels and regularisers, for psi."""

    lambda_s: float = hyperparameter(10.0, symbol="lambda_s", help="weight of the supervised loss", low=0.0)
    lambda_i: float = hyperparameter(0.01, symbol="lambda_ICC", help="weight of consistency with helpers", low=0.0)
    lambda_a: float = hyperparameter(0.01, symbol="lambda_a", help="weight of the pseudo-labels' loss", low=0.0)
    lambda_l2: float = hyperparameter(10.0, symbol="lambda_L2", help="weight of ||sigma - psi||^2", low=0.0)
    lambda_l1: float = hyperparameter(1e-4, symbol="lambda_L1", help="weight of ||psi||_1", low=0.0)
    confidence: float = hyperparameter(0.75, symbol="tau", help="least confidence of a public image", low=0.0, high=1.0)
    helpers: int = hyperparameter(
        2, symbol="H", help="helpers: the participants with the nearest outputs", static=True, low=0
    )
    psi_factor: float = hyperparameter(0.2, help="part of the initial weights that is psi", low=0.0, high=1.0)
    l1_threshold: float = hyperparameter(5e-6, help="smaller entries of psi are 0 in the evaluation", low=0.0)

    def traits(self):
        """As for all participants in an exchange."""
        return super().traits()._replace(paper="reconstructed: Jeong et al., ICLR 2021, as FCCL's baseline")

    def init_client(self, setting, server, facts, key):
        """The model with its parameters split: sigma in their place, and psi beside it."""
        sigma = jax.tree.map(lambda w: (1 - self.psi_factor) * w, server.variables["params"])
        psi = jax.tree.map(lambda w: self.psi_factor * w, server.variables["params"])
        return joined({**server.variables, "params": sigma}, "psi", psi)

    def _sum(self, variables, sigma=lambda x: x, psi=lambda x: x):
        """The model's variables with parameters sigma + psi, each passed through a function first."""
        model = without(variables, "psi")
        total = jax.tree.map(lambda s, p: sigma(s) + psi(p), model["params"], variables["params"]["psi"])
        return {**model, "params": total}

    def classification(self, outputs, batch, context):
        """lambda_s times the cross-entropy, a scalar."""
        return self.lambda_s * super().classification(outputs, batch, context)

    def loss(self, variables, batch, context):
        """The supervised loss, from which psi receives no gradient."""
        return super().loss(self._sum(variables, psi=jax.lax.stop_gradient), batch, context)

    def trainable(self, params, context):
        """sigma in local training, psi in the exchange."""
        return moving(params, "psi", context.exchanging, others=not context.exchanging)

    def say(self, variables, batch, context):
        """Logits of the images as they are, in eval mode."""
        return forward(context.model, self._sum(variables), batch.plain, train=False)[0].logits

    def agree(self, public, spoken, counts):
        """Logits of each participant's helpers [K, B, H, C]: those with the nearest softmax outputs on the batch."""
        outputs = jax.nn.softmax(spoken).reshape(len(spoken), -1)
        distance = jnp.square(outputs[:, None] - outputs[None]).sum(-1)
        distance = jnp.where(jnp.eye(len(spoken), dtype=bool), jnp.inf, distance)
        nearest = jnp.argsort(distance, axis=1)[:, : min(self.helpers, len(spoken) - 1)]
        return public, jnp.moveaxis(spoken[nearest], 1, 2)

    def imitate(self, variables, batch, context):
        """The unsupervised loss, from which sigma receives no gradient, and the model state after the batch."""
        model, total = context.model, self._sum(variables, sigma=jax.lax.stop_gradient)
        helpers = jnp.moveaxis(batch.target, 1, 0)
        plain = forward(model, total, batch.plain, train=False)[0].logits
        outputs, state = forward(model, total, batch.images, train=True, key=context.keys.dropout)
        selected = confident(plain, self.confidence)
        labels = pseudo_labels(plain, helpers)
        value = self.lambda_i * helper_consistency(plain, helpers, selected)
        value += self.lambda_a * cross_entropy(outputs.logits, labels, mask=selected.astype(outputs.logits.dtype))
        sigma, psi = without(variables, "psi")["params"], variables["params"]["psi"]
        # No gradient at 0, unlike that of `abs`.
        size = sum(jnp.where(leaf == 0, 0, jnp.abs(leaf)).sum() for leaf in jax.tree.leaves(psi))
        sigma = jax.lax.stop_gradient(sigma)
        return value + self.lambda_l2 * squared_distance(sigma, psi) + self.lambda_l1 * size, state

    def personal_variables(self, server, client):
        """The model sigma + psi, with small entries of psi set to 0."""
        threshold = self.l1_threshold
        return self._sum(client, psi=lambda p: jnp.where(jnp.abs(p) > threshold, p, 0))

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        """Logits of sigma + psi, whether they are added already or not."""
        split = "psi" in variables["params"]
        total = self.personal_variables(server, variables) if split else variables
        return forward(model, total, images, train=False)[0].logits
