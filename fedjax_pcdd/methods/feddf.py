"""FedDF: what the clients' models say together of unlabelled images is distilled into the averaged model.

Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020.
Server form (default, one architecture): sent as FedAvg; the weighted mean of the models is then trained on the server
for `--server-steps` steps of Adam with a cosine schedule. There is no validation set, hence no early stopping. The
teachers are fixed meanwhile, so they look at public images once, in eval mode and without augmentation: here when
they upload, so the count of what is sent has these N C logits, which a server with the models makes itself.
Participants' form (`--form=participants`, FCCL's comparison): logits travel, and everybody takes a step towards their
mean on each public batch.
"""

from typing import ClassVar, Literal

import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.losses.distillation import ensemble_target, kl_to_target
from fedjax_pcdd.methods.method import Message, Method, hyperparameter
from fedjax_pcdd.methods.participant import Exchanging, over_all
from fedjax_pcdd.methods.server_training import train_on_public
from fedjax_pcdd.models.classifier import forward


@struct.dataclass
class FedDF(Exchanging):
    """KL(softmax(mean of the teachers' logits / T) || softmax(student's / T)) on public images."""

    paper: ClassVar[str] = "Lin et al., NeurIPS 2020"

    form: Literal["server", "participants"] = hyperparameter(
        "server", help="distil into the averaged model on the server, or into every participant's own", static=True
    )
    ensemble: Literal["avg_logits", "avg_probs", "avg_losses"] = hyperparameter(
        "avg_logits", help="what is averaged over the teachers", static=True
    )
    temperature: float = hyperparameter(1.0, symbol="T", help="temperature of both softmaxes", above=0.0)
    teacher_mode: Literal["eval", "train"] = hyperparameter(
        "eval", help="mode of the participants' models when they teach", static=True
    )
    server_steps: int = hyperparameter(500, help="optimiser steps on the server in a round", static=True, low=0)
    server_lr: float = hyperparameter(1e-3, help="learning rate of Adam on the server", above=0.0)
    server_decay_steps: int = hyperparameter(10_000, help="steps of the cosine schedule to 0", static=True, low=1)
    server_batch: int = hyperparameter(128, help="public images of a step on the server", static=True, low=1)
    server_clip: float = hyperparameter(5.0, help="largest gradient norm on the server", above=0.0)

    @property
    def _at_server(self) -> bool:
        return self.form == "server"

    own_models = property(lambda self: not self._at_server)  # pyright: ignore[reportAssignmentType]
    global_model = property(lambda self: self._at_server)  # pyright: ignore[reportAssignmentType]
    fine_tune = property(lambda self: self._at_server)  # pyright: ignore[reportAssignmentType]
    target = property(lambda self: "generic" if self._at_server else "personal")  # pyright: ignore[reportAssignmentType]
    exchange = property(lambda self: "never" if self._at_server else "before")  # pyright: ignore[reportAssignmentType]
    averages = property(lambda self: "never" if self._at_server else self.average)  # pyright: ignore[reportAssignmentType]
    distils = property(lambda self: self._at_server and self.server_steps > 0)  # pyright: ignore[reportAssignmentType]

    def init_client(self, setting, server, facts, key):
        """Nothing, or a participant's model."""
        return () if self._at_server else super().init_client(setting, server, facts, key)

    def download(self, server, client):
        """The global model, or the own one."""
        return Method.download(self, server, client) if self._at_server else super().download(server, client)

    def personal_variables(self, server, client):
        """The global model, or the own one."""
        return self.download(server, client)

    def upload(self, variables, summary, context):
        """The model, and what it says of all public images [N, C], as its part of the ensemble."""
        if not self._at_server:
            return super().upload(variables, summary, context)
        if not self.distils:
            return (), Message(mean=variables)

        def say(index):
            images = context.public.prepare(index, None)
            logits = forward(context.model, variables, images, train=False)[0].logits
            return ensemble_target(logits[None], form=self.ensemble, temperature=self.temperature)

        said = over_all(say, context.public.images.shape[0], 500)
        return (), Message(mean=variables, total=(said, jnp.ones(())))

    def aggregate(self, server, message, weights):
        """The weighted mean of the models, if there are any."""
        return Method.aggregate(self, server, message, weights) if self._at_server else server

    def distil(self, server, message, context):
        """The mean model after `server_steps` steps towards the ensemble."""
        total = message.total[0] / message.total[1]
        schedule = optax.cosine_decay_schedule(self.server_lr, self.server_decay_steps)
        optimiser = optax.chain(optax.clip_by_global_norm(self.server_clip), optax.adam(schedule))
        size = min(self.server_batch, total.shape[0])

        def distance(logits, index):
            return self._distance(logits, total[index])

        variables = train_on_public(server.variables, distance, context, optimiser, steps=self.server_steps, size=size)
        return server._replace(variables=variables)

    def say(self, variables, batch, context):
        """Logits of a participant on public images."""
        train = self.teacher_mode == "train"
        return forward(context.model, variables, batch.images, train=train, key=context.key)[0].logits

    def agree(self, public, said, counts):
        """The ensemble's word, the same for all."""
        target = ensemble_target(said, form=self.ensemble, temperature=self.temperature)
        return public, jnp.broadcast_to(target, said.shape)

    def public_loss(self, logits, target, context):
        """KL to the ensemble, a scalar."""
        return self._distance(logits, target)

    def _distance(self, logits, target):
        return kl_to_target(target, logits, form=self.ensemble, temperature=self.temperature)
