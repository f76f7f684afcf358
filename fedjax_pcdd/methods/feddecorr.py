"""FedDecorr: the dimensions of the features are decorrelated over each batch, so that they do not collapse.

Shi et al., "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning", ICLR 2023.
Sent: as in FedAvg, or as X in `X+decorr`. Clients keep nothing.
The default weight is for the form of the published code (off-diagonal entries of the undivided Gram matrix, over B),
which is about B times the printed one. On a batch of one class this is FedMR's intra-class term.
"""

from typing import Literal

from flax import struct

from fedjax_pcdd.errors import UserError
from fedjax_pcdd.losses.decorrelation import batch_decorrelation
from fedjax_pcdd.methods.method import hyperparameter
from fedjax_pcdd.methods.wrappers import Addition, averages_models


@struct.dataclass
class FedDecorr(Addition):
    """L = CE + beta * L_dec, or X's objective in place of CE."""

    paper = "Shi et al., ICLR 2023"

    beta_dec: float = hyperparameter(
        0.1, symbol="beta", help="weight of the decorrelation; 0.05 in the published runs for 100 classes", low=0.0
    )
    decorr_form: Literal["offdiag", "frobenius"] = hyperparameter(
        "offdiag", help="decorrelation of the published code, or as printed", static=True
    )

    def configure(self, setting, hyper):
        """Advice: correlations need two samples and two dimensions; UserError if X averages no models in this form."""
        method, advice = super().configure(setting, hyper)
        if not averages_models(method):
            raise UserError("FedDecorr needs a method that averages models in this form: drop the suffix.")
        small = "`batch_size=1`" if setting.batch_size == 1 else "one feature" if setting.feature_dim == 1 else ""
        return method, [*advice, *[f"FedDecorr with {small} has nothing to decorrelate: drop it."] * bool(small)]

    def penalty(self, variables, outputs, batch, context):
        """X's penalty + beta * L_dec on the features of the batch, a scalar."""
        decorrelation = batch_decorrelation(outputs.features, form=self.decorr_form, mask=batch.mask)
        return super().penalty(variables, outputs, batch, context) + self.beta_dec * decorrelation
