"""FCCL: participants of any architecture correlate their logits on public images, and distil their earlier models.

Huang, Ye and Du, "Learn from Others and Be Yourself in Heterogeneous Federated Learning", CVPR 2022.
Sent: the logits of public images up, their mean down (per public epoch N C scalars each way); no parameters.
Follows the paper where the published code differs, with two exceptions: every public batch has a new Adam optimiser
(`public_optimizer`), and the correlation is of centred columns with the unbiased standard deviation over B (code),
which the paper does not specify. In the code's mean, a participant's own logits are those of its previous model:
`own=previous`.
"""

from typing import Literal, NamedTuple

from flax import struct

from fedjax_pcdd.losses.correlation import cross_correlation, cross_correlation_loss
from fedjax_pcdd.losses.distillation import kl_to_teacher
from fedjax_pcdd.methods.method import Tree, hyperparameter
from fedjax_pcdd.methods.participant import Exchanging
from fedjax_pcdd.models.classifier import forward


class Learner(NamedTuple):
    """A participant's models; before the first round all three are the pre-trained one."""

    variables: Tree  # theta
    previous: Tree  # theta after local training in the last round, before models are averaged
    pretrained: Tree  # theta*


class Spoken(NamedTuple):
    """Logits of a public batch [B, C]."""

    current: Tree
    previous: Tree


@struct.dataclass
class FCCL(Exchanging):
    """Public: L_col of the cross-correlation; private: CE + lambda_loc (KL to the previous + KL to the pre-trained)."""

    lambda_col: float = hyperparameter(
        0.0051,
        symbol="lambda_Col",
        help="weight of pairs of different classes",
        low=0.0,
        needs={"collaborate": (True,)},
    )
    lambda_loc: float = hyperparameter(
        1.0, symbol="lambda_Loc", help="weight of both distillations", low=0.0, needs={"continual": (True,)}
    )
    collaborate: bool = hyperparameter(True, help="the exchange; false is the ablation without COL", static=True)
    continual: bool = hyperparameter(True, help="the distillations; false is the ablation without CON", static=True)
    own: Literal["current", "previous"] = hyperparameter(
        "current",
        help="one's own part of the mean logits: the current model's, or the previous one's",
        static=True,
        needs={"collaborate": (True,)},
    )
    eps: float = hyperparameter(
        0.0, help="added to the variance of a column of logits", low=0.0, needs={"collaborate": (True,)}
    )

    def traits(self):
        """The exchange comes before local training."""
        exchange = "before" if self.collaborate else "never"
        return super().traits()._replace(paper="Huang et al., CVPR 2022", exchange=exchange)

    def init_client(self, setting, server, facts, key):
        """The initial model, three times."""
        return Learner(server.variables, server.variables, server.variables)

    def say(self, variables, batch, context):
        """Logits of the current model and, with `own=previous`, those of the previous one in eval mode."""
        current = super().say(variables, batch, context)
        if self.own == "current":
            return Spoken(current, ())
        return Spoken(current, forward(context.model, context.client.previous, batch.images, train=False)[0].logits)

    def agree(self, public, spoken, counts):
        """The mean logits, in which a participant's own may be replaced by those of its previous model."""
        public, mean = super().agree(public, spoken.current, counts)
        if self.own == "previous":
            mean = mean + (spoken.previous - spoken.current) / spoken.current.shape[0]
        return public, mean

    def public_loss(self, logits, target, context):
        """L_col, a scalar (equation 2)."""
        return cross_correlation_loss(cross_correlation(logits, target, eps=self.eps), self.lambda_col)

    def penalty(self, variables, outputs, batch, context):
        """lambda_loc times the sum of both divergences from constant teachers in eval mode (equations 4 and 5)."""
        if not self.continual:
            return 0.0

        def distance(teacher):
            logits = forward(context.model, teacher, batch.images, train=False)[0].logits
            return kl_to_teacher(logits, outputs.logits, mask=batch.mask)

        return self.lambda_loc * (distance(context.client.previous) + distance(context.client.pretrained))

    def upload(self, variables, summary, context):
        """Keep the trained model, also as the next round's previous one; send nothing."""
        client, message = super().upload(variables, summary, context)
        return client._replace(previous=variables), message
