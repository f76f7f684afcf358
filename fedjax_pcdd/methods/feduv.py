"""FedUV: predictions are made to vary over the batch, and features to spread out, as with data of all classes.

Son et al., "FedUV: Uniformity and Variance for Heterogeneous Federated Learning", CVPR 2024.
Sent: as in FedAvg. Clients keep nothing.
Follows the published code: features are not normalised, although the paper calls the space a hypersphere, and gradients
go through the median that scales their distances; both are options. The weights are those for 10 classes; with
`lam_scaling=classes` that of the variance is C / 4, as the paper may mean it. The authors' networks end in two further
layers, which the common model does not have.
"""

from typing import Literal

from flax import struct

from fedjax_pcdd.losses.logit_adjustment import l2_normalise
from fedjax_pcdd.losses.uniformity import prediction_variance, uniformity
from fedjax_pcdd.methods.method import Method, Traits, hyperparameter


@struct.dataclass
class FedUV(Method):
    """L = CE + lambda * L_V + mu * L_U."""

    lam: float = hyperparameter(2.5, symbol="lambda", help="weight of the predictions' variance", low=0.0)
    lam_scaling: Literal["constant", "classes"] = hyperparameter(
        "constant", help="lambda as it is, or times C / 10: its default is then C / 4", static=True
    )
    mu: float = hyperparameter(0.5, symbol="mu", help="weight of the features' uniformity", low=0.0)
    width: Literal["median", "constant"] = hyperparameter(
        "median", help="scale of the distances, their median: with its gradient, or without", static=True
    )
    normalise: bool = hyperparameter(False, help="features of unit length in the uniformity", static=True)

    def traits(self):
        """FedAvg's traits, with the paper."""
        return Traits("Son et al., CVPR 2024")

    def configure(self, setting, hyper):
        """Advice: variance and distances need two samples."""
        advice = ["FedUV with `batch_size=1` has no batch to vary: it is FedAvg."] if setting.batch_size == 1 else []
        return self, advice

    def penalty(self, variables, outputs, batch, context):
        """lambda * L_V + mu * L_U, a scalar."""
        features = l2_normalise(outputs.features) if self.normalise else outputs.features
        variance = prediction_variance(outputs.logits, mask=batch.mask)
        lam = self.lam if self.lam_scaling == "constant" else self.lam * outputs.logits.shape[-1] / 10
        return lam * variance + self.mu * uniformity(features, width=self.width, mask=batch.mask)
