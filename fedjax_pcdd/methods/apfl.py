"""APFL: a client predicts with a mixture of its own model and the global one; the mixing weight may be learnt.

Deng, Kamani and Mahdavi, "Adaptive Personalized Federated Learning", 2020, algorithm 1.
Sent: as in FedAvg. A client keeps its own model v with its running statistics, and alpha.
Follows the paper: parameters are mixed, and all gradients are taken before the step. `mix=logits` is the published
code, which mixes logits, steps w first, and moves alpha after both steps, with 0.02 alpha added to its gradient. By
default alpha is fixed, as in that code (`adapt`). Running statistics are mixed like parameters; those of v come from
the mixture's forward passes. PA is that of the mixture with the w just trained. The recorded loss is the sum of the
losses of w and of the mixture.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.methods.method import Message, Step, Traits, hyperparameter, objective, train_forward
from fedjax_pcdd.methods.parts import PersonalModel, joined, protocol_of, without
from fedjax_pcdd.methods.personal_copy import PERSONAL, PersonalCopy, copy_of, with_copy, without_copy
from fedjax_pcdd.models.classifier import forward

ALPHA = "alpha"  # a part of the parameters that the optimiser does not move


class Client(NamedTuple):
    """The own model v, and the mixing weight, a scalar."""

    model: Any
    alpha: jax.Array


@struct.dataclass
class APFL(PersonalCopy):
    """CE(w) for the global model; CE(alpha v + (1 - alpha) w) for v and alpha, with w constant."""

    alpha: float = hyperparameter(0.5, symbol="alpha", help="share of the own model, at first", low=0.0, high=1.0)
    adapt: Literal["never", "round", "step"] = hyperparameter(
        "never", help="when alpha moves: never, after the first step of a round, after every step", static=True
    )
    alpha_lr: float | None = hyperparameter(
        None,
        symbol="eta_alpha",
        help="learning rate of alpha; by default that of the models",
        low=0.0,
        needs={"adapt": ("round", "step")},
    )
    mix: Literal["parameters", "logits"] = hyperparameter(
        "parameters", help="what is mixed: parameters as in the paper, or logits as in its code", static=True
    )
    pa_model: PersonalModel | None = hyperparameter(
        None, help="another name of `pa_protocol`: local of last, server of received", static=True
    )

    def traits(self):
        """PA is that of the mixtures; each model is clipped separately."""
        fields = {"target": "both", "fine_tunes": False, "protocol": protocol_of(self.pa_model)}
        return Traits("Deng et al., 2020", apart=(PERSONAL,), **fields)

    def configure(self, setting, hyper):
        """Advice: a mixture that stays at alpha = 0 or 1 is no mixture."""
        single = {0.0: "the global model alone", 1.0: "models that learn alone"}.get(float(self.alpha))
        if single is None or self.adapt != "never":
            return self, []
        return self, [f"APFL with `alpha={self.alpha:g}` answers with {single}: choose another, or `adapt=step`."]

    def init_client(self, setting, server, facts, key):
        """v is the common initial model."""
        return Client(server.variables, jnp.asarray(self.alpha, jnp.result_type(float)))

    def download(self, server, client):
        """The global model, with v and alpha beside it."""
        return joined(with_copy(server.variables, client.model), ALPHA, client.alpha)

    def local_update(self, evaluate, step, variables, batch, context):
        """One step of w on its own loss, one of v on the mixture's, and perhaps one of alpha."""
        loss, state, gradients = evaluate(variables)
        v, w, alpha = _split(variables["params"])
        if self.mix == "logits":
            w = optax.apply_updates(w, _split(step(gradients).updates)[1])

        def mixed(v, w, alpha):
            return self._mixed_loss({**variables, "params": {**w, PERSONAL: v, ALPHA: alpha}}, batch, context)

        evaluated = jax.value_and_grad(mixed, (0, 1, 2), has_aux=True)(v, w, alpha)
        (mixed_loss, statistics), (gradient_v, gradient_w, slope) = evaluated
        updates, optimiser = step({**gradients, PERSONAL: gradient_v})
        if self.mix == "logits":
            difference = optax.tree.sub(optax.apply_updates(v, updates[PERSONAL]), w)
            gradient = optax.tree.add_scale(optax.tree.scale(alpha, gradient_v), 1 - alpha, gradient_w)
            slope = optax.tree.vdot(difference, gradient) + 0.02 * alpha
        updates = {**updates, ALPHA: self._move(alpha, slope, context)}
        return loss + mixed_loss, {**state, PERSONAL: statistics}, Step(updates, optimiser)

    def _mixed_loss(self, variables, batch, context):
        """The objective of the mixture, a scalar, and v's running statistics after this batch."""
        v, w, alpha = _split(variables["params"])
        if self.mix == "parameters":
            return self.loss({**copy_of(variables), "params": _mixture(v, w, alpha)}, batch, context)
        outputs, statistics = train_forward(copy_of(variables), batch, context)
        global_outputs, _ = train_forward(without_copy(variables), batch, context)
        outputs = outputs._replace(logits=_mixture(outputs.logits, global_outputs.logits, alpha))
        return objective(self, copy_of(variables), outputs, batch, context), statistics

    def _move(self, alpha, slope, context):
        """The change of alpha in this step, which keeps it in [0, 1]."""
        rate = context.hyper.lr if self.alpha_lr is None else self.alpha_lr
        change = jnp.clip(alpha - rate * slope, 0, 1) - alpha
        moves = {"never": False, "round": context.step == 0, "step": True}[self.adapt]
        return jnp.where(moves, change, 0)

    def upload(self, variables, summary, context):
        """Keep v and alpha, send w."""
        client = Client(copy_of(variables), variables["params"][ALPHA])
        return client, Message(mean=without(without_copy(variables), ALPHA))

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        """Logits of w, or for a client's model those of the mixture."""
        if scope == "generic":
            return forward(model, variables, images, train=False)[0].logits
        v, w, alpha = copy_of(variables), without(without_copy(variables), ALPHA), variables["params"][ALPHA]
        if self.mix == "parameters":
            return forward(model, _mixture(v, w, alpha), images, train=False)[0].logits
        logits_v, logits_w = (forward(model, tree, images, train=False)[0].logits for tree in (v, w))
        return _mixture(logits_v, logits_w, alpha)


def _split(params):
    """The parameters of v, those of w, and alpha."""
    return params[PERSONAL], {n: tree for n, tree in params.items() if n not in (PERSONAL, ALPHA)}, params[ALPHA]


def _mixture(v, w, alpha):
    """alpha v + (1 - alpha) w, trees with the dtypes of w."""
    return jax.tree.map(lambda x, y: (alpha * x + (1 - alpha) * y).astype(y.dtype), v, w)
