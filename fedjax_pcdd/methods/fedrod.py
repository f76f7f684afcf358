"""FedRoD: a generic head trained with the balanced softmax, and a personal head that corrects its logits.

Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022.
Sent: as in FedAvg, body and generic head. A client keeps its personal head, linear with a bias.
Follows the paper (the official repository holds no code): logits of both heads are summed, and gradients of the
personal loss stop at the features and at the generic logits. Options: a personal head that predicts alone and trains
the body too, as in one benchmark, and one that starts as the generic head, as in one library. Clipping, if any, acts on
both heads together.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.logit_adjustment import balanced_cross_entropy
from fedjax_pcdd.methods.method import Traits, hyperparameter
from fedjax_pcdd.methods.parts import PersonalHead, PersonalModel, protocol_of
from fedjax_pcdd.models.classifier import apply_head, forward


@struct.dataclass
class FedRoD(PersonalHead):
    """L = CE(g(z) + gamma log n_k, y) + CE(sg[g(z)] + p_k(sg[z]), y), with heads g and p_k."""

    prior_power: float = hyperparameter(
        1.0, symbol="gamma", help="exponent on the class counts of the balanced softmax; 0 is plain", low=0.0
    )
    personal_start: Literal["zeros", "generic"] = hyperparameter(
        "zeros", help="first personal head: zeros, or a copy of the generic one", static=True
    )
    personal_logits: Literal["sum", "alone"] = hyperparameter(
        "sum", help="personal logits g + p_k as in the paper, or p_k alone with gradients into the body", static=True
    )
    pa_model: PersonalModel | None = hyperparameter(
        None, help="another name of `pa_protocol`: local of last, server of received", static=True
    )

    def traits(self):
        """PA is that of both heads, on the body that `pa_model` names."""
        fields = {"target": "both", "fine_tunes": False, "protocol": protocol_of(self.pa_model)}
        return Traits("Chen and Chao, ICLR 2022", own_loss=True, **fields)

    def init_client(self, setting, server, facts, key):
        """The personal head: kernel [D, C] and bias [C]."""
        head = super().init_client(setting, server, facts, key)
        return jax.tree.map(jnp.zeros_like, head) if self.personal_start == "zeros" else head

    def classification(self, outputs, batch, context):
        """L_g, the balanced softmax of the generic head, a scalar."""
        counts = context.facts.class_counts
        return balanced_cross_entropy(outputs.logits, batch.labels, counts, power=self.prior_power, mask=batch.mask)

    def penalty(self, variables, outputs, batch, context):
        """L_p, a scalar; it trains only the personal head, unless that head predicts alone."""
        if self.personal_logits == "sum":
            outputs = jax.lax.stop_gradient(outputs)
        return cross_entropy(self._personal(variables, outputs), batch.labels, mask=batch.mask)

    def _personal(self, variables, outputs):
        logits = apply_head(variables["params"]["personal"], outputs.features)
        return logits + outputs.logits if self.personal_logits == "sum" else logits

    def logits(self, model, variables, images, server, client=(), facts=None, *, scope="generic"):
        """Logits of the generic head; for a client's model of both heads, or of the personal one; without the prior.

        GA uses the latter too where it is that of clients' models, as with `bn=local-layers`.
        """
        outputs, _ = forward(model, variables, images, train=False)
        return outputs.logits if scope == "generic" else self._personal(variables, outputs)
