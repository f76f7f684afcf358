"""Methods whose clients keep models of their own, perhaps of different architectures, and agree on public images.

Such clients are called participants. Only what `say` returns (logits on a batch of public images) crosses
architectures. A round: exchange (before or after local training), local training and, in a federation of one
architecture, optionally an average of the models. In an exchange, for every batch of public images:

    say (each participant) -> agree (server) -> imitate (each participant) -> optimiser

These three hooks, `public_loss` and `init_public` are all that an `Exchanging` method adds to the contract. A
participant's state is its model's variables, or an object with a field `variables`.

Letters as in `method.py`; N public images, K participants, all of which take part in every round.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.methods.method import Context, Message, Method, Setting, Traits, Tree, hyperparameter
from fedjax_pcdd.models.classifier import forward


class PublicBatch(NamedTuple):
    """One batch of public images, prepared, and this participant's target for them."""

    images: jax.Array  # [B, H, W, channels], augmented if public images are
    plain: jax.Array  # [B, H, W, channels], never augmented
    target: Tree  # leaves [B, ...]; () in `say`


def model_of(client: Tree) -> Tree:
    """Variables of the model in a participant's state."""
    return getattr(client, "variables", client)


def with_model(client: Tree, variables: Tree) -> Tree:
    """A participant's state with another model."""
    return client._replace(variables=variables) if hasattr(client, "variables") else variables


@struct.dataclass
class Participant(Method):
    """Local training of a model that stays with its client; by itself it sends nothing."""

    def traits(self):
        """Own models; PA is that of the model just trained."""
        return Traits(target="personal", global_model=False, fine_tunes=False, own_models=True)

    def init_client(self, setting, server, facts, key):
        """The participant's state, from `server.variables`: its own initial (or pre-trained) model."""
        return server.variables

    def download(self, server, client):
        """The participant's own model."""
        return model_of(client)

    def upload(self, variables, summary, context):
        """Keep the model, send nothing."""
        return with_model(context.client, variables), Message()

    def aggregate(self, server, message, weights, context):
        """The server as it is, since nothing arrives."""
        return server

    def personal_variables(self, server, client):
        """The participant's own model, and whatever it downloads with it."""
        return self.download(server, client)


@struct.dataclass
class Exchanging(Participant):
    """A participant that sends logits on public images; by default FedMD's exchange with FCCL's schedule."""

    public_epochs: int | None = hyperparameter(
        None, help="passes over the public images in a round; by default the task's, else 1", static=True, low=1
    )
    public_optimizer: Literal["per_batch", "per_round"] = hyperparameter(
        "per_batch",
        help="a new optimiser for each public batch, as the published FCCL code, or one a round",
        static=True,
    )
    average: Literal["never", "exchanged", "trained"] = hyperparameter(
        "never",
        help="equal architectures replaced by their mean: never, before local training (FCCL's paper) or after (code)",
        static=True,
    )

    common_start: bool = hyperparameter(
        True,
        help="models that are averaged begin from one initialisation, before they are pre-trained",
        static=True,
        needs={"average": ("exchanged", "trained")},
    )

    def traits(self):
        """An exchange before local training; if models are averaged after training, PA is that of the mean."""
        personal = "server" if self.average == "trained" else "local"
        common_start = self.common_start and self.average != "never"
        traits = super().traits()._replace(exchange="before", averages=self.average, personal_model=personal)
        return traits._replace(common_start=common_start)

    def configure(self, setting, hyper):
        """One public epoch, unless the task or the user sets another number."""
        return self if self.public_epochs else self.replace(public_epochs=1), []  # pyright: ignore[reportAttributeAccessIssue]

    def init_public(self, setting: Setting, images: int) -> Tree:
        """The server's state between exchanges; `images` is N."""
        return ()

    def say(self, variables: Tree, batch: PublicBatch, context: Context) -> Tree:
        """What a participant sends about public images, leaves [B, ...]: the model's logits, in training mode."""
        return forward(context.model, variables, batch.images, train=True, key=context.keys.dropout)[0].logits

    def agree(self, public: Tree, spoken: Tree, counts: jax.Array) -> tuple[Tree, Tree]:
        """What each participant has to imitate, as a constant: the mean of what all have sent.

        Args:
          public: the server's state between exchanges.
          spoken: results of `say`, leaves [K, B, ...]; [K, N, ...] if `Traits.targets` are made once a round.
          counts: [K, C] private samples.

        Returns:
          (public, target with leaves [K, B, ...]).
        """
        return public, jax.tree.map(lambda x: jnp.broadcast_to(_mean(x), x.shape), spoken)

    def public_loss(self, logits: jax.Array, target: Tree, context: Context) -> jax.Array:
        """The loss of one participant on a public batch, a scalar, from its logits [B, C]."""
        raise UserError(f"{type(self).__name__} must define public_loss(self, logits, target, context), or imitate.")

    def imitate(self, variables: Tree, batch: PublicBatch, context: Context) -> tuple[jax.Array, Tree]:
        """The public objective, a scalar, and the model state after this batch."""
        outputs, state = forward(context.model, variables, batch.images, train=True, key=context.keys.dropout)
        return self.public_loss(outputs.logits, batch.target, context), state


def _mean(values: jax.Array) -> jax.Array:
    """Mean over the participants [K, ...], to the last bit what all say if they say the same.

    A plain mean may differ from it by rounding. The absolute error turns this into a gradient of full size, and Adam
    does so with any error, so that models which agree would be driven apart.
    """
    return values[0] + jnp.mean(values - values[0], axis=0)


def over_all(function: Callable[[jax.Array], Tree], total: int, batch: int) -> Tree:
    """Results of function(index [B]), leaves [B, ...], for the indices 0 ... total - 1 in batches: [total, ...]."""
    batch = min(batch, total)
    index = jnp.minimum(jnp.arange(-(-total // batch) * batch), total - 1).reshape(-1, batch)
    results = jax.lax.map(function, index)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:total], results)
