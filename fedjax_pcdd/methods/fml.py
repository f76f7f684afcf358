"""FML: a private model of any architecture and a shared meme teach each other on every private batch.

Shen et al., "Federated Mutual Learning", 2020.
Sent: the meme, both ways, with its normalisation statistics. Meme and statistics are averaged with equal weights, as in
the official code; `meme_weights=samples` takes n_k. Both forward passes come first, then one step of each model, with
one optimiser that is new each round (in the official code the private model's persists); clipping, if any, acts on both
together. FCCL does not say which meme it compared with: ResNet10 is ours. As published, the official script never
averages: its calls are commented out.
"""

from typing import Literal

import jax.numpy as jnp
from flax import struct

from fedjax_pcdd import models
from fedjax_pcdd.losses.distillation import mutual_losses
from fedjax_pcdd.methods.method import Message, Server, hyperparameter
from fedjax_pcdd.methods.participant import Participant
from fedjax_pcdd.methods.parts import without_collection
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.models.pair import Pair, join, part


@struct.dataclass
class FML(Participant):
    """L_private = alpha CE + (1 - alpha) KL(meme || private); L_meme = beta CE + (1 - beta) KL(private || meme)."""

    alpha: float = hyperparameter(0.5, symbol="alpha", help="weight of CE for the private model", low=0.0, high=1.0)
    beta_meme: float = hyperparameter(0.5, symbol="beta", help="weight of CE for the meme", low=0.0, high=1.0)
    meme: str = hyperparameter("resnet10", help="architecture of the meme, see `list_models`", static=True)
    meme_weights: Literal["equal", "samples"] = hyperparameter("equal", help="weights of the memes' mean", static=True)
    answer: Literal["private", "meme"] = hyperparameter("private", help="whose accuracy is measured", static=True)

    def traits(self):
        """One meme for all architectures; the published code keeps the private model's optimiser alone."""
        fields = {"personal_model": "local" if self.answer == "private" else "server", "resumed": ("private",)}
        return super().traits()._replace(paper="Shen et al., 2020", common_server=True, own_loss=True, **fields)

    def build(self, model):
        """The participant's model and a meme."""
        norm = getattr(model.backbone, "norm", model.norm)
        types = {"norm": norm, "dtype": model.dtype, "param_dtype": model.param_dtype, "precision": model.precision}
        text = hasattr(model.backbone, "vocabulary")
        meme = models.build(self.meme, num_classes=model.num_classes, image_shape=(32, 32, 3), text=text, **types)
        return Pair(model, meme, models.smallest_side(self.meme))

    def weight(self, facts):
        """Equal, or n_k."""
        return jnp.ones_like(facts.num_samples) if self.meme_weights == "equal" else facts.num_samples

    def init_server(self, setting, variables, class_counts, key):
        """The initial meme, the same whatever the private architecture."""
        return Server(part(variables, "meme"))

    def init_client(self, setting, server, facts, key):
        """The private model."""
        return part(server.variables, "private")

    def download(self, server, client):
        """The private model and the shared meme."""
        return join(private=client, meme=server.variables)

    def loss(self, variables, batch, context):
        """L_private + L_meme; each teacher is constant, so the gradients do not mix."""
        state, logits = {}, {}
        for name in ("private", "meme"):
            model, tree = getattr(context.model, name), part(variables, name)
            key = context.keys.dropout
            outputs, state[name] = forward(model, tree, batch.images, train=True, mask=batch.mask, key=key)
            logits[name] = outputs.logits
        losses = mutual_losses(
            logits["private"], logits["meme"], batch.labels, alpha=self.alpha, beta=self.beta_meme, mask=batch.mask
        )
        return sum(losses), {**without_collection(variables, "params"), **join(**state)}

    def upload(self, variables, summary, context):
        """Keep the private model, send the meme."""
        return part(variables, "private"), Message(mean=part(variables, "meme"))

    def aggregate(self, server, message, weights, context):
        """The mean meme."""
        return Server(message.mean)

    def further_models(self, server):
        """The mean meme, whose GA is recorded beside that of the private models."""
        return {"meme": server.variables}

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        """Logits of the meme; for a client, of the model that `answer` names."""
        name = "meme" if scope == "generic" else self.answer
        tree = variables if scope == "generic" else part(variables, name)
        return forward(getattr(model, name), tree, images, train=False)[0].logits
