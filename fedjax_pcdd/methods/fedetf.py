"""FedETF: all clients train towards one fixed simplex ETF, through a projection and a learnt temperature.

Li et al., "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and Fixed
Classifier", ICCV 2023.
Sent: backbone, projection and the scalar beta each way; no classifier, as the ETF follows from a seed. Clients keep
nothing. PA: after the last round each client trains for E more epochs, and then tunes ETF and projection in turn.
Follows the published code: a class that a client lacks counts as one sample in the balanced softmax (`removed` is the
printed formula), and weight decay acts on beta too. For momentum that persists between rounds, as in that code, use
`optimizer_state=kept`. The E before the tuning is 1 with `local_steps`, and the largest one if clients differ in E.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.logit_adjustment import balanced_cross_entropy, scaled_logits
from fedjax_pcdd.methods.method import Method, Traits, hyperparameter, objective, train_forward
from fedjax_pcdd.methods.parts import joined
from fedjax_pcdd.models.classifier import forward
from fedjax_pcdd.models.etf import draw_etf

BETA, ETF = "beta", "etf"  # parts of the parameters; the latter only while a client tunes its own


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
    tuning_rates: Literal["absolute", "relative"] = hyperparameter(
        "absolute", help="both as they are, or times lr / 0.04, as they were published beside lr 0.04", static=True
    )

    def traits(self):
        """PA is that of tuned models."""
        return Traits("Li et al., ICCV 2023", target="both", own_loss=True)

    def build(self, model):
        """A linear projection, by default as wide as there are classes, and no trained head."""
        return model.clone(neck=1, neck_width=self.projection or model.num_classes, head=False)

    def configure(self, setting, hyper):
        """UserError for an ETF with fewer dimensions than classes; advice on a softmax over one class."""
        classes, width = setting.num_classes, setting.feature_dim
        if width < classes:
            raise UserError(
                f"FedETF with `projection={width}` has no ETF of {classes} classes: choose {classes} or more."
            )
        if not setting.one_class_clients or self.missing == "one":
            return self, []
        cause = f"{setting.one_class_clients} clients have one class, where FedETF's loss has no gradient"
        return self, [f"{cause}: use `missing=one`."]

    def init_server(self, setting, variables, class_counts, key):
        """The initial model with beta among its parameters, and the ETF."""
        beta = jnp.asarray(self.start_beta, jax.tree.leaves(variables["params"])[0].dtype)
        return Server(joined(variables, BETA, beta), draw_etf(key, setting.feature_dim, setting.num_classes))

    def loss(self, variables, batch, context):
        """As in FedAvg, with the logits beta * (m_c . h / |h|)."""
        outputs, state = train_forward(variables, batch, context)
        logits = self._cosines(variables, outputs, context.server) * variables["params"][BETA]
        return objective(self, variables, outputs._replace(logits=logits), batch, context), state

    def _cosines(self, variables, outputs, server):
        directions = variables["params"].get(ETF, server.etf)
        return scaled_logits(outputs.features, directions, jnp.ones(()), 1.0)

    def classification(self, outputs, batch, context):
        """The balanced cross-entropy, a scalar."""
        return self.balanced(outputs, batch, context, self.prior_power)

    def balanced(self, outputs, batch, context, power):
        """The balanced cross-entropy with this exponent on the counts, a scalar."""
        counts, missing = context.facts.class_counts, 1.0 if self.missing == "one" else None
        return balanced_cross_entropy(
            outputs.logits, batch.labels, counts, power=power, missing=missing, mask=batch.mask
        )

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        """m_c . h / |h|, without beta and counts."""
        return self._cosines(variables, forward(model, variables, images, train=False)[0], server)

    def fine_tuner(self, setting, epochs):
        """The personal tuning, whatever number of epochs the user asks for."""
        from fedjax_pcdd.methods.fedetf_tuning import FedETFTuning  # which is derived from this class

        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(FedETF)}
        return FedETFTuning(**options, epochs=setting.epochs)
