"""FedLC: logits are calibrated by the client's class counts, so that rare classes get a margin.

Zhang et al., "Federated Learning with Label Distribution Skew via Logits Calibration", ICML 2022, section 4.
Sent: as in FedAvg. A client keeps nothing but its class counts, which stay with it (with `counted=global` their sum
over clients is shared).
The label stays in the denominator (`softmax`), as in the public implementations: the printed formula (`pairwise`) is
unbounded below and unstable. Classes that a client lacks leave the denominator (`masked`). tau = 0 is defined as no
calibration. GA and fine-tuning use plain logits. A client with one class has loss 0 and moves by weight decay alone.
"""

from typing import Literal

from flax import struct

from fedjax_pcdd.losses.classification import cross_entropy
from fedjax_pcdd.losses.logit_adjustment import calibration_margins, pairwise_cross_entropy
from fedjax_pcdd.methods.method import Method, Traits, hyperparameter


@struct.dataclass
class FedLC(Method):
    """Cross-entropy over o_c - tau * n_kc^(-1/4)."""

    tau: float = hyperparameter(1.0, symbol="tau", help="strength of the calibration; 0 (softmax) is FedAvg", low=0.0)
    form: Literal["softmax", "pairwise"] = hyperparameter(
        "softmax", help="denominator with the label, or without it as printed", static=True
    )
    missing: Literal["masked", "constant"] = hyperparameter(
        "masked", help="missing classes leave the softmax, or count as 1e-8 samples (margin 100 tau)", static=True
    )
    counted: Literal["local", "global"] = hyperparameter(
        "local", help="class counts: the client's, or those of all clients together, as in one library", static=True
    )

    def traits(self):
        """FedAvg's traits, with a softmax of its own."""
        return Traits("Zhang et al., ICML 2022", own_loss=True)

    def configure(self, setting, hyper):
        """Advice: a masked softmax over one class is constant; the pairwise form has no lower bound."""
        advice = []
        if self.form == "pairwise":
            advice += ["FedLC with `form=pairwise` is known to be unstable: `form=softmax` has a lower bound."]
        if self.tau > 0 and setting.one_class_clients and (self.missing, self.counted) == ("masked", "local"):
            cause = f"{setting.one_class_clients} clients have one class, where FedLC's loss has no gradient"
            advice += [f"{cause}: `counted=global` keeps the other classes in it."]
        if self.missing == "constant" and self.counted == "local" and self.tau > 0.1:
            margin = f"a missing class's margin of {100 * self.tau:g} takes it out of the softmax"
            advice += [f"`missing=constant` does nothing: {margin}, so set `tau` to 0.1 or less."]
        return self, advice

    def classification(self, outputs, batch, context):
        """The calibrated cross-entropy, a scalar."""
        facts = context.facts
        counts = facts.class_counts if self.counted == "local" else facts.federation_counts.sum(axis=0)
        masked = self.missing == "masked"
        margins = calibration_margins(counts, self.tau, missing=None if masked else 1e-8)
        classes = (counts > 0) | (self.tau == 0) if masked else None
        function = cross_entropy if self.form == "softmax" else pairwise_cross_entropy
        return function(outputs.logits - margins, batch.labels, mask=batch.mask, classes=classes)
