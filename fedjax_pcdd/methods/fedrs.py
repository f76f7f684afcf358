"""FedRS: the restricted softmax scales down the classifier's rows of classes that a client lacks.

Li and Zhan, "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021.
Sent: as in FedAvg. A client keeps nothing but its class counts, which stay with it.
Follows the paper (`hard`: only missing classes are scaled); `soft`, scales by the ratio of counts, is the published
code's. By default the head has no bias; with `bias=true` it has one that is not scaled. The published code also clips
gradients (`grad_clip`). GA and fine-tuning use plain logits.
"""

from typing import Literal

from flax import struct

from fedjax_pcdd.losses.logit_adjustment import restricted_scales
from fedjax_pcdd.methods.method import Method, Traits, hyperparameter
from fedjax_pcdd.methods.parts import joined


@struct.dataclass
class FedRS(Method):
    """Cross-entropy over o_c = s_c * (w_c . z), with s_c = alpha for a missing class."""

    alpha: float = hyperparameter(
        0.5, symbol="alpha", help="scale of missing classes; 1 is FedAvg with the same head", low=0.0, high=1.0
    )
    form: Literal["hard", "soft"] = hyperparameter(
        "hard", help="scales of the paper, or by the ratio of counts as in the published code", static=True
    )
    bias: bool = hyperparameter(False, help="head with a bias, which is not scaled", static=True)

    def traits(self):
        """FedAvg's traits, with a softmax of its own."""
        return Traits("Li and Zhan, KDD 2021", own_loss=True)

    def build(self, model):
        """The model with or without a bias in its head."""
        return model.clone(head_bias=self.bias)

    def loss(self, variables, batch, context):
        """As in FedAvg, with the columns of the head's kernel [D, C] scaled by s [C]; the bias is not scaled."""
        scales = restricted_scales(context.facts.class_counts, self.alpha, form=self.form)
        head = variables["params"]["head"]
        kernel = head["kernel"] * scales.astype(head["kernel"].dtype)
        return super().loss(joined(variables, "head", {**head, "kernel": kernel}), batch, context)
