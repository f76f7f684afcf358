"""FedDF: the ensemble of the clients' models is distilled into the averaged model, on unlabelled images.

Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020.
Server form (default, one architecture): sent as FedAvg; the weighted mean of the models is then trained on the server
for `server_steps` steps of Adam with a cosine schedule. There is no validation set, hence no early stopping. The
teachers stay fixed meanwhile, so their logits on public images are computed once, in eval mode and without
augmentation; here at upload. These N C logits are not counted as sent, since a server that has the models can compute
them itself.
Participants' form (`form=participants`, FCCL's comparison): logits are sent, and all participants take a step towards
their mean on each public batch.
"""

from typing import Literal

import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.losses.distillation import ensemble_target, kl_to_target
from fedjax_pcdd.methods.method import Derived, Message, Method, Traits, hyperparameter
from fedjax_pcdd.methods.participant import Exchanging, over_all
from fedjax_pcdd.methods.server_training import train_on_public
from fedjax_pcdd.models.classifier import forward

AT_SERVER = {"form": ("server",)}  # what some hyper-parameters need


@struct.dataclass
class FedDF(Exchanging):
    """KL(softmax(mean of the teachers' logits / T) || softmax(student's / T)) on public images."""

    form: Literal["server", "participants"] = hyperparameter(
        "server", help="distil into the averaged model on the server, or into every participant's own", static=True
    )
    ensemble: Literal["avg_logits", "avg_probs", "avg_losses"] = hyperparameter(
        "avg_logits", help="what is averaged over the teachers", static=True
    )
    temperature: float = hyperparameter(1.0, symbol="T", help="temperature of both softmaxes", above=0.0)
    teacher_mode: Literal["eval", "train"] = hyperparameter(
        "eval",
        help="mode of the participants' models when they teach, with `form=participants`",
        static=True,
        needs={"form": ("participants",)},
    )
    server_steps: int = hyperparameter(
        500, help="optimiser steps on the server in a round", static=True, low=0, needs=AT_SERVER
    )
    server_lr: float = hyperparameter(1e-3, help="learning rate of Adam on the server", above=0.0, needs=AT_SERVER)
    server_decay_steps: int = hyperparameter(
        10_000, help="steps of the cosine schedule to 0", static=True, low=1, needs=AT_SERVER
    )
    server_batch: int = hyperparameter(
        128, help="public images of a step on the server", static=True, low=1, needs=AT_SERVER
    )
    server_clip: float = hyperparameter(5.0, help="largest gradient norm on the server", above=0.0, needs=AT_SERVER)

    @property
    def _at_server(self) -> bool:
        return self.form == "server"

    def traits(self):
        """As in FedAvg with public images on the server, or as for all participants."""
        paper = "Lin et al., NeurIPS 2020"
        if self._at_server:
            return Traits(paper, public=self.server_steps > 0)
        return super().traits()._replace(paper=paper)

    def configure(self, setting, hyper):
        """Advice: options of an exchange between participants have no effect on the server."""
        method, advice = super().configure(setting, hyper)
        names = ("public_epochs", "public_optimizer", "average") if self._at_server else ()
        idle = [name for name in names if getattr(self, name) != getattr(type(self), name)]
        return method, [*advice, *(f"`{name}` has no effect with `form=server`." for name in idle)]

    def init_client(self, setting, server, facts, key):
        """No state, or a participant's model."""
        return () if self._at_server else super().init_client(setting, server, facts, key)

    def download(self, server, client):
        """The global model, or the participant's own one."""
        return Method.download(self, server, client) if self._at_server else super().download(server, client)

    def upload(self, variables, summary, context):
        """The model, and its part of the ensemble's target on all public images [N, C]."""
        if not self._at_server:
            return super().upload(variables, summary, context)
        if not self.server_steps:
            return (), Message(mean=variables)

        def teach(index):
            images = context.public.prepare(index, None)
            logits = forward(context.model, variables, images, train=False)[0].logits
            return ensemble_target(logits[None], form=self.ensemble, temperature=self.temperature)

        targets = over_all(teach, context.public.images.shape[0], 500)
        return (), Message(mean=variables, total=Derived(targets))

    def aggregate(self, server, message, weights, context):
        """The weighted mean of the models, if there are any, after `server_steps` steps towards the ensemble."""
        if not self._at_server:
            return server
        server = Method.aggregate(self, server, message, weights, context)
        return self._distilled(server, message.total.value / context.count, context) if self.server_steps else server

    def _distilled(self, server, target, context):
        schedule = optax.cosine_decay_schedule(self.server_lr, self.server_decay_steps)
        optimiser = optax.chain(optax.clip_by_global_norm(self.server_clip), optax.adam(schedule))
        size = min(self.server_batch, target.shape[0])

        def distance(logits, index):
            return self._distance(logits, target[index])

        variables = train_on_public(server.variables, distance, context, optimiser, steps=self.server_steps, size=size)
        return server._replace(variables=variables)

    def say(self, variables, batch, context):
        """Logits of a participant on public images."""
        train = self.teacher_mode == "train"
        return forward(context.model, variables, batch.images, train=train, key=context.keys.dropout)[0].logits

    def agree(self, public, spoken, counts):
        """The ensemble's target, the same for all."""
        target = ensemble_target(spoken, form=self.ensemble, temperature=self.temperature)
        return public, jnp.broadcast_to(target, spoken.shape)

    def public_loss(self, logits, target, context):
        """KL to the ensemble, a scalar."""
        return self._distance(logits, target)

    def _distance(self, logits, target):
        return kl_to_target(target, logits, form=self.ensemble, temperature=self.temperature)
