"""FedETF: all clients train towards one fixed simplex ETF, through a projection and a learnt temperature.

Li et al., "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and Fixed
Classifier", ICCV 2023.
Sent: backbone, projection and the scalar beta each way; no classifier, as the ETF follows from a seed. Clients keep
nothing. PA: after the last round each client trains on for E epochs and tunes ETF and projection in turn for itself.
Follows the published code: a class that a client lacks counts as one sample in the balanced softmax (`removed` is the
printed formula), weight decay acts on beta too. Momentum that crosses rounds, as there, is `--optimizer-state=kept`.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.logit_adjustment import balanced_cross_entropy, scaled_logits
from fedjax_pcdd.methods.method import Message, Method, Step, Traits, hyperparameter, objective, train_forward
from fedjax_pcdd.methods.parts import joined, without
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.models.etf import draw_etf
from fedjax_pcdd.trees import zeros_like

BETA, ETF, TRACE = "beta", "etf", "tuning"  # parts of the parameters, and the collection of the tuning's momentum


class Server(NamedTuple):
    """Global backbone, projection and beta; the ETF's directions [D, C], which never change."""

    variables: Any
    etf: jax.Array


@struct.dataclass
class FedETF(Method):
    """Balanced cross-entropy over beta * (m_c . h / |h|), with h of the projection's width."""

    prior_power: float = hyperparameter(
        1.0, symbol="gamma", help="exponent on the class counts of the balanced softmax; 0 is plain", low=0.0
    )
    missing: Literal["one", "removed"] = hyperparameter(
        "one", help="classes a client lacks: count as one sample, or leave the softmax", static=True
    )
    projection: int | None = hyperparameter(
        None,
        symbol="p",
        help="width of the projection; by default C, 64 in the published small CNN",
        low=1,
        static=True,
    )
    start_beta: float = hyperparameter(
        1.0, symbol="beta_0", help="first inverse temperature; 10 with width 64", above=0.0
    )
    tuning_cycles: int = hyperparameter(20, help="times that a client tunes ETF and projection", low=0, static=True)
    tuning_epochs: int = hyperparameter(3, help="epochs of each of the two at a time", low=1, static=True)
    etf_lr: float = hyperparameter(0.1, help="learning rate of the ETF in the tuning", low=0.0)
    projection_lr: float = hyperparameter(0.05, help="learning rate of the projection in the tuning", low=0.0)

    def traits(self):
        """PA is that of tuned models."""
        return Traits("Li et al., ICCV 2023", target="both")

    def build(self, model):
        """A linear projection, by default as wide as there are classes, and no trained head."""
        return model.clone(neck=1, neck_width=self.projection or model.num_classes, head=False)

    def configure(self, setting, hyper):
        """An ETF needs as many dimensions as classes; a softmax over one class is constant."""
        classes, width = setting.num_classes, setting.feature_dim
        if width < classes:
            raise UserError(
                f"FedETF with `projection={width}` has no ETF of {classes} classes: choose {classes} or more."
            )
        if not setting.one_class_clients or self.missing == "one":
            return self, []
        few = f"{setting.one_class_clients} clients have one class, where FedETF's loss has no gradient"
        return self, [f"{few}: use `missing=one`."]

    def init_server(self, setting, variables, class_counts, key):
        """beta beside the parameters, and the ETF."""
        beta = jnp.asarray(self.start_beta, jax.tree.leaves(variables["params"])[0].dtype)
        return Server(joined(variables, BETA, beta), draw_etf(key, setting.feature_dim, setting.num_classes))

    def loss(self, variables, batch, context):
        """As FedAvg, of the logits beta * (m_c . h / |h|)."""
        outputs, state = train_forward(variables, batch, context)
        logits = self._cosines(variables, outputs, context.server) * variables["params"][BETA]
        return objective(self, variables, outputs._replace(logits=logits), batch, context), state

    def _cosines(self, variables, outputs, server):
        directions = variables["params"].get(ETF, server.etf)
        return scaled_logits(outputs.features, directions, jnp.ones(()), 1.0)

    def classification(self, outputs, batch, context):
        """The balanced cross-entropy, a scalar."""
        return self._balanced(outputs, batch, context, self.prior_power)

    def _balanced(self, outputs, batch, context, power):
        counts, missing = context.facts.class_counts, 1.0 if self.missing == "one" else None
        return balanced_cross_entropy(
            outputs.logits, batch.labels, counts, power=power, missing=missing, mask=batch.mask
        )

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        """m_c . h / |h|, without beta and counts."""
        return self._cosines(variables, forward(model, variables, images, train=False)[0], server)

    def fine_tuner(self, setting, epochs):
        """The personal tuning, whatever the epochs that the user asks for."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(FedETF)}
        return FedETFTuning(**own, epochs=setting.epochs)


@struct.dataclass
class FedETFTuning(FedETF):
    """E epochs as in a round; then, in turns, plain cross-entropy moves the ETF alone and the projection alone.

    The ETF is not renormalised. Both are SGD with learning rates of their own; the projection's has momentum 0.9, which
    begins at 0 in each of its turns, and weight decay 5e-4. Batch norm goes on to see the client's batches.
    """

    epochs: int = hyperparameter(1, symbol="E", help="local epochs before the tuning", low=0, static=True)

    def traits(self):
        """So many epochs, whatever is asked for."""
        return Traits(epochs=self.epochs, more_epochs=2 * self.tuning_cycles * self.tuning_epochs)

    def init_server(self, setting, variables, class_counts, key):
        """The trained model and the ETF that it was trained with, drawn from the same key."""
        return Server(variables, draw_etf(key, setting.feature_dim, setting.num_classes))

    def download(self, server, client):
        """The ETF as parameters of the client's own, and the momentum of its projection."""
        trace = zeros_like(server.variables["params"]["neck"])
        return {**joined(server.variables, ETF, server.etf), TRACE: trace}

    def _turns(self, context):
        """Whether the ETF, and whether the projection has its turn: booleans, both False in the epochs before."""
        since = context.epoch - (context.epochs - 2 * self.tuning_cycles * self.tuning_epochs)
        odd = (since // self.tuning_epochs) % 2 == 1
        return (since >= 0) & ~odd, (since >= 0) & odd

    def classification(self, outputs, batch, context):
        """The balanced cross-entropy at first, then the plain one, a scalar."""
        on_etf, on_projection = self._turns(context)
        return self._balanced(outputs, batch, context, jnp.where(on_etf | on_projection, 0.0, self.prior_power))

    def local_update(self, evaluate, step, variables, batch, context):
        """A step as in a round, or of what has its turn."""
        loss, state, gradients = evaluate(variables)
        on_etf, on_projection = self._turns(context)
        usual = step({**gradients, ETF: jnp.zeros_like(gradients[ETF])})
        updates = jax.tree.map(lambda u: jnp.where(on_etf | on_projection, 0, u), usual.updates)
        neck = optax.tree.add_scale(gradients["neck"], 5e-4, variables["params"]["neck"])
        trace = optax.tree.add_scale(neck, 0.9, variables[TRACE])
        trace = jax.tree.map(lambda m: jnp.where(on_projection, m, 0), trace)
        updates["neck"] = optax.tree.add_scale(updates["neck"], -self.projection_lr, trace)
        updates[ETF] = -self.etf_lr * jnp.where(on_etf, gradients[ETF], 0)
        return loss, {**state, TRACE: trace}, Step(updates, usual.optimiser)

    def upload(self, variables, summary, context):
        """The model without what is the client's own."""
        shared = without(variables, ETF)
        return (), Message(mean={name: tree for name, tree in shared.items() if name != TRACE})

    def personal_variables(self, server, client):
        """The model before its tuning."""
        return joined(server.variables, ETF, server.etf)
