"""FedNTD: the received model is distilled on all classes but the label, so that local training forgets less.

Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning", NeurIPS 2022.
Sent: as in FedAvg. A client keeps nothing; it holds the received weights while it trains.
Weight and temperature are those of the published configurations (1 and 1; the loss itself defaults to temperature 3).
"""

from flax import struct

from fedjax_pcdd.losses.masked_distillation import not_true_distillation
from fedjax_pcdd.methods.method import Traits, hyperparameter
from fedjax_pcdd.methods.taught import Taught


@struct.dataclass
class FedNTD(Taught):
    """L = CE + beta * tau^2 * KL(q^t || q), both softmaxes without the label."""

    beta_ntd: float = hyperparameter(1.0, symbol="beta", help="weight of the distillation; 0 is FedAvg", low=0.0)
    tau: float = hyperparameter(1.0, symbol="tau", help="temperature of the distillation", above=0.0)

    def traits(self):
        """FedAvg's traits, with the paper."""
        return Traits("Lee et al., NeurIPS 2022")

    def configure(self, setting, hyper):
        """Advice: without the label, two classes leave one."""
        advice = ["FedNTD with two classes distils nothing: it is FedAvg."] if setting.num_classes == 2 else []
        return self, advice

    def penalty(self, variables, outputs, batch, context):
        """beta * L_ntd, a scalar."""
        teacher = self.received_logits(batch, context)
        return self.beta_ntd * not_true_distillation(
            teacher, outputs.logits, batch.labels, temperature=self.tau, mask=batch.mask
        )
