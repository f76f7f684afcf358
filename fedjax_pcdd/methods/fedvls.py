"""FedVLS: cross-entropy calibrated by class shares, lower logits off the label, and distillation of vacant classes.

Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning", AAAI 2025 (at first FedED, "empty classes").
Sent: as in FedAvg. A client keeps nothing but its class counts, which stay with it; it holds the received weights.
Follows the published code where the paper differs: the printed suppression has no lower bound (`form=paper`), and the
printed divergence is inverted. A client that has all classes, or lacks a single one, has nothing to distil. GA and
fine-tuning use plain logits.
"""

import dataclasses
from typing import Any, Literal

from flax import struct

from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.masked_distillation import masked_kl
from fedjax_pcdd.losses.vacant_classes import calibrated_cross_entropy, logit_suppression
from fedjax_pcdd.methods.method import Traits, hyperparameter
from fedjax_pcdd.methods.taught import Taught

UNSTABLE = 0.1  # weight above which the printed suppression is known to diverge


@struct.dataclass
class FedVLS(Taught):
    """L = L_cal + omega * L_sup + lambda * L_dis."""

    lam: float = hyperparameter(
        0.1, symbol="lambda", help="weight of the distillation; 0.5 in the paper for 100 classes and more", low=0.0
    )
    omega: float | None = hyperparameter(
        None, symbol="omega", help="weight of the suppression; by default 0.005, or 1 for form paper", low=0.0
    )
    form: Literal["code", "paper"] = hyperparameter(
        "code", help="calibration and suppression of the published code, or as printed", static=True
    )
    calibrated: bool = hyperparameter(True, help="false is the plain cross-entropy in place of L_cal", static=True)

    def traits(self):
        """FedAvg's traits, with a softmax of its own."""
        return Traits("Guo et al., AAAI 2025", own_loss=True)

    def configure(self, setting, hyper):
        """The default of omega; advice on a loss without lower bound, and on clients with nothing to learn from."""
        omega = (0.005 if self.form == "code" else 1.0) if self.omega is None else self.omega
        advice = []
        if self.form == "paper" and omega > UNSTABLE:
            advice.append(f"FedVLS with `form=paper` is unbounded below and runs away at `omega={omega:g}`: lower it.")
        if setting.one_class_clients and self.calibrated and (self.lam == 0 or setting.num_classes == 2):
            few = f"{setting.one_class_clients} clients have one class, where only FedVLS's distillation has a gradient"
            remedy = "set `lam` above 0" if self.lam == 0 else "two classes leave it nothing: use `calibrated=false`"
            advice.append(f"{few}: {remedy}.")
        if self.lam > 0 and setting.fewest_classes >= setting.num_classes - 1:
            cause = "FedVLS distils where a client lacks two classes or more, and here each lacks one at most"
            advice.append(f"{cause}: choose a `partition` that takes more away.")
        return dataclasses.replace(self, omega=omega), advice

    def classification(self, outputs, batch, context):
        """L_cal + omega * L_sup, a scalar."""
        counts = context.facts.class_counts
        options = {"form": self.form, "mask": batch.mask}
        omega: Any = self.omega
        suppression = omega * logit_suppression(outputs.logits, batch.labels, counts, **options)
        if not self.calibrated:
            return cross_entropy(outputs.logits, batch.labels, mask=batch.mask) + suppression
        return calibrated_cross_entropy(outputs.logits, batch.labels, counts, **options) + suppression

    def penalty(self, variables, outputs, batch, context):
        """lambda * L_dis, a scalar: KL(teacher || student) inside the classes that the client lacks."""
        vacant = context.facts.class_counts == 0
        return self.lam * masked_kl(self.received_logits(batch, context), outputs.logits, vacant, mask=batch.mask)
